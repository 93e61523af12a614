"""Stands in for sglang-kernel where it cannot be imported: a machine without libcuda.

SGLang imports names from `sgl_kernel` at module level on CPU too. Without AMX every layer takes its native path and none of
them is called, so each name resolves to a function that raises when it is.
"""

__version__ = "0.0.0+hicache.mooncake.stub"


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args: object, **kwargs: object) -> None:
        raise NotImplementedError(f"sgl_kernel.{name} was called; on CPU only a stand-in without kernels is installed")

    missing.__name__ = name
    return missing
