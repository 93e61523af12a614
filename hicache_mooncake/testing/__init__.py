"""What tests and demos of this package, and of code built on it, share: real SGLang on CPUs, patterns, fixtures, and the
conformance suites `BackendTests` and `TransportTests`.

Importing this module needs neither pytest nor torch nor sglang; the name `BackendTests` does, and `TransportTests` pytest and
hypothesis.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hicache_mooncake.testing.conformance import BackendTests
    from hicache_mooncake.testing.transports import TransportTests

__all__ = ["BackendTests", "TransportTests"]

_SUITES = {"BackendTests": "conformance", "TransportTests": "transports"}


def __getattr__(name: str) -> Any:
    if name not in _SUITES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import pytest

    module = f"{__name__}.{_SUITES[name]}"
    pytest.register_assert_rewrite(module)  # its asserts then say what they compared
    return getattr(importlib.import_module(module), name)
