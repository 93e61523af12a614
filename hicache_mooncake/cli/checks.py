"""A finding of `doctor`."""

from __future__ import annotations

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
