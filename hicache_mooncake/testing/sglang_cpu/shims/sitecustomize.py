"""Lets PyPI's torchvision be imported beside a CPU build of torch.

PyPI's torchvision is a CUDA build. Its extension does not load beside a CPU torch, so `torchvision::nms` and `qnms` are never
defined and `import torchvision` dies. SGLang imports torchvision for text models too, in spawned children and before any SGLang
plugin runs there, so this cannot be a plugin: it must be the `sitecustomize` of every interpreter. Declaring the two operators
just before torchvision is first imported is enough; nothing calls them.
"""

import importlib.abc
import importlib.machinery
import sys


class _TorchvisionOperators(importlib.abc.MetaPathFinder):
    def find_spec(self, fullname, path=None, target=None) -> importlib.machinery.ModuleSpec | None:
        if fullname != "torchvision":
            return None
        sys.meta_path.remove(self)
        try:
            import torch
        except ImportError:
            return None
        if torch.version.cuda is None:
            library = torch.library.Library("torchvision", "DEF")
            for name in ("nms", "qnms"):
                library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            torch._hicache_mooncake_torchvision = library  # the declarations live as long as the Library object
        return None  # the ordinary finders load the real package


sys.meta_path.insert(0, _TorchvisionOperators())
