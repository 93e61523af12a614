"""Wrappers around methods of the host process's classes: put on once, taken off again.

SGLang has no events for what a backend must know of its process. A wrapped method stays what it was for its callers: the same
arguments, the same value, the same exceptions. What a wrapper does on the side goes through `quietly`.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import sys
import types
from collections.abc import Callable
from typing import Any

from hicache_mooncake.quiet import QuietLog

log = logging.getLogger(__name__)
_quiet = QuietLog(log)

Around = Callable[..., Any]
"""`around(original, self, *arguments, **keywords)`: calls `original(self, ...)`, or not, and returns the value."""


@dataclasses.dataclass
class _Wrapped:
    original: Callable[..., Any]
    wrapper: Callable[..., Any]
    active: bool = True


class Hooks:
    """The wrappers of one feature. Not thread-safe: put them on and off in the thread that builds the backend."""

    def __init__(self) -> None:
        self._wrapped: dict[tuple[type, str], _Wrapped] = {}

    def put(self, owner: type, name: str, around: Around) -> bool:
        """Wrap the method `name` that `owner` itself defines. A second call for the same method changes nothing.
        False when `owner` does not define it, or it is not a plain function."""
        if (owner, name) in self._wrapped:
            return True
        original = vars(owner).get(name)
        if not isinstance(original, types.FunctionType):
            return False
        entry = _Wrapped(original, original)

        @functools.wraps(original)
        def wrapper(self: Any, *arguments: Any, **keywords: Any) -> Any:
            if not entry.active:
                return original(self, *arguments, **keywords)
            return around(original, self, *arguments, **keywords)

        entry.wrapper = wrapper
        setattr(owner, name, wrapper)
        self._wrapped[owner, name] = entry
        return True

    def original(self, owner: type, name: str) -> Any:
        """The method as `owner` defines it, without this feature's wrapper; None when it does not define it."""
        entry = self._wrapped.get((owner, name))
        return entry.original if entry else vars(owner).get(name)

    def take_off(self) -> None:
        """Every method is as it was. Where somebody wrapped one of ours since, ours stays below theirs and does nothing."""
        for (owner, name), entry in self._wrapped.items():
            entry.active = False
            if vars(owner).get(name) is entry.wrapper:
                setattr(owner, name, entry.original)
        self._wrapped.clear()


def loaded(module: str, name: str) -> Any:
    """The class or function `name` of a module that this process has already imported; None without the one or the other.
    A scheduler process has imported whatever it can call by the time it builds a storage backend."""
    return getattr(sys.modules.get(module), name, None)


def subclasses(base: type) -> list[type]:
    """`base` and all classes derived from it that exist by now."""
    derived: list[type] = type.__subclasses__(base)
    return list(dict.fromkeys([base, *(each for child in derived for each in subclasses(child))]))


def quietly(what: str, work: Callable[..., Any], *arguments: Any) -> Any:
    """What `work` returns; None, and a line in the log, when it raises: nothing of ours raises into the caller of a wrapper."""
    try:
        return work(*arguments)
    except Exception:
        text = f"{what} failed inside hicache-mooncake. Please report this"
        _quiet(logging.ERROR, what, text, exc_info=True)
        return None


def engine_setting(group: str, *path: str) -> Any:
    """A setting of this engine, where its release keeps it: in `runtime_context`, in older ones in the server arguments."""
    getter = getattr(sys.modules.get("sglang.srt.runtime_context"), f"get_{group}", None)
    for source in (getter, getattr(sys.modules.get("sglang.srt.server_args"), "get_global_server_args", None)):
        try:
            value = source() if source is not None else None
            for name in path if source is getter else path[-1:]:
                value = getattr(value, name)
        except Exception:  # no such group, or a process that never published its settings
            continue
        if value is not None:
            return value
    return None
