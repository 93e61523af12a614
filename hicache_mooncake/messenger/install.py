"""Makes `mooncake.engine` importable: the module that SGLang takes its transfer engine from, served by this package.

Nothing is loaded before somebody imports it. Of `mooncake` there is nothing else, so that `mooncake.store` and its like fail to
import as they do where Mooncake is not installed, or are the installed ones.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from types import ModuleType

_PACKAGE, _MODULE = "mooncake", "mooncake.engine"


class _Loader(Loader):
    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        if module.__name__ == _MODULE:
            from hicache_mooncake.messenger.mooncake_engine import TransferEngine

            module.TransferEngine = TransferEngine  # type: ignore[attr-defined]


class _Finder(MetaPathFinder):
    def __init__(self, *, package: bool) -> None:
        self._package = package
        """Whether there is none of that name."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname == _MODULE:
            return importlib.machinery.ModuleSpec(fullname, _Loader(), origin="hicache_mooncake")
        if fullname == _PACKAGE and self._package:
            return importlib.machinery.ModuleSpec(fullname, _Loader(), origin="hicache_mooncake", is_package=True)
        return None


def install() -> None:
    """From now on, in this process. Again is nothing."""
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    sys.meta_path.insert(0, _Finder(package=importlib.util.find_spec(_PACKAGE) is None))
    sys.modules.pop(_MODULE, None)
