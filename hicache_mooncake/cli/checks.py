"""A finding of `doctor`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

OK, WARN, FAIL, SKIPPED = "ok", "warn", "fail", "skipped"


@dataclass(frozen=True)
class Check:
    """`status` is ok, warn, fail or skipped; `advice` says what to do, if there is something to do. `table`: rows of texts to
    be shown beneath, the first of them the heading."""

    name: str
    status: str
    found: str
    advice: str = ""
    table: tuple[tuple[str, ...], ...] = ()


def guarded(name: str, check: Callable[[], Check]) -> Check:
    """A check that breaks is a finding of its own and hides no other."""
    try:
        return check()
    except Exception as error:
        return broken(name, error)


def broken(name: str, error: Exception) -> Check:
    return Check(name, WARN, f"could not be checked: {type(error).__name__}: {error}", "please report this")
