"""What tests and demos of this package, and of code built on it, share: real SGLang on CPUs, patterns, fixtures, and the
conformance suite `BackendTests`.

Importing this module needs neither pytest nor torch nor sglang; the name `BackendTests` does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hicache_mooncake.testing.conformance import BackendTests

__all__ = ["BackendTests"]


def __getattr__(name: str) -> Any:
    if name != "BackendTests":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import pytest

    pytest.register_assert_rewrite(f"{__name__}.conformance")  # its asserts then say what they compared
    from hicache_mooncake.testing.conformance import BackendTests

    return BackendTests
