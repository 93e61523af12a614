"""Which prefixes of a chain can be restored whole, from what each of a model's pools holds of it. Pure functions.

The KV pool and pools of policy ALL_PAGES need every page of the prefix. A pool of policy TRAILING_PAGES (sliding window,
recurrent state) needs the last pages of it, as many as its window has, and so may serve a long prefix and none of the shorter
ones: SGLang wants the whole set, to intersect it over ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

ALL_PAGES, TRAILING_PAGES = "all_pages", "trailing_pages"


def trailing_lengths(column: bytes, window: int, up_to: int) -> list[int]:
    """Prefix lengths 1..`up_to`, ascending, whose last `window` pages (or all, where they are fewer) are 1 in `column`."""
    lengths: list[int] = []
    run = 0
    for length in range(1, min(up_to, len(column)) + 1):
        run = run + 1 if column[length - 1] else 0
        if run >= min(window, length):
            lengths.append(length)
    return lengths


def restorable_lengths(runs: Sequence[int], trailing: Sequence[Sequence[int]]) -> list[int]:
    """Prefix lengths, ascending, that every pool can serve. `runs`: leading pages of the KV pool and of each ALL_PAGES pool;
    `trailing`: what `trailing_lengths` gave for each of the others."""
    lengths = list(range(1, min(runs) + 1)) if runs else []
    for served in trailing:
        allowed = set(served)
        lengths = [length for length in lengths if length in allowed]
    return lengths


def both(columns: Sequence[bytes]) -> bytes:
    """One byte a page: 1 where every column has it. The columns are of one length."""
    return columns[0] if len(columns) == 1 else bytes(map(all, zip(*columns, strict=True)))
