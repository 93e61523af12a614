"""A shared KV-cache pool for SGLang HiCache. See docs/concepts.md for the parts and why they are cut this way.

`TransferEngine` and what it is used with (docs/transfer-engine.md) are loaded when they are first asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hicache_mooncake.transfer.engine import TransferEngine
    from hicache_mooncake.transfer.transport import Piece, TransportError, TransportOptions

__version__ = "0.1.0"
__all__ = ["Piece", "TransferEngine", "TransportError", "TransportOptions"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    module = "engine" if name == "TransferEngine" else "transport"
    return getattr(import_module(f"{__name__}.transfer.{module}"), name)
