"""Which pages of other nodes are hot here: those that this host's engines fetch again and again."""

from __future__ import annotations

import itertools
from collections import OrderedDict

WINDOW_S = 60.0
MAX_PAGES = 65_536


class Heat:
    """Remembers when pages were fetched, at most `MAX_PAGES` of them: the one fetched longest ago is forgotten first. Not
    thread-safe; time comes in."""

    def __init__(self, after: int, window_s: float = WINDOW_S, max_pages: int = MAX_PAGES) -> None:
        """A page is hot at its `after`-th fetch within `window_s`; 0: never."""
        self._after = after
        self._window_s = window_s
        self._max_pages = max_pages
        self._fetched: OrderedDict[tuple[bytes, bytes], tuple[float, ...]] = OrderedDict()

    def fetched(self, namespace: bytes, page_hash: bytes, now: float) -> bool:
        """Count one fetch. Is the page hot now?"""
        if self._after <= 1:
            return self._after == 1
        key = (namespace, page_hash)
        lately = (*(at for at in self._fetched.pop(key, ()) if now - at < self._window_s), now)
        self._fetched[key] = lately[1 - self._after :]
        # Two for each that comes, so that what is of no use any more goes away.
        for oldest in list(itertools.islice(self._fetched, 2)):
            if len(self._fetched) > self._max_pages or now - self._fetched[oldest][-1] >= self._window_s:
                del self._fetched[oldest]
        return len(lately) >= self._after

    def __len__(self) -> int:
        return len(self._fetched)
