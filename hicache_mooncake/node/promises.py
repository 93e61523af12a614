"""Pages that a reader was told of and counts on: they stay until it has loaded them, for a while. No I/O, clocks or threads.

A decode server of SGLang promises to its prefill server what a lookup found, and a request whose promised page cannot be loaded
then fails. What is kept for that is bounded: beyond it the oldest promises are dropped. Clears and damage come before promises.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Generic, Protocol, TypeVar

from hicache_mooncake.protocol import HASH_BYTES

MAX_PROMISES = 4096
MAX_PAGES = 262_144
"""References to pages, in all promises together."""


class Promisable(Protocol):
    promises: int
    """In how many promises it is. While it is in one the page is not evicted, nor given away."""


P = TypeVar("P", bound=Promisable)
_Key = tuple[str, bytes, bytes]


class Promise(Generic[P]):
    """Pages of one chain that one reader was told of at once; None for those that it has loaded, or that were never here.
    `owner`: the connection that it ends with, 0 for none. `left` counts its pages, `times` how often they were promised."""

    __slots__ = ("hashes", "left", "namespace", "owner", "pages", "reader", "times", "until")

    def __init__(self, owner: int, reader: str, namespace: bytes, hashes: bytes, pages: list[P | None], until: float) -> None:
        self.owner = owner
        self.reader = reader
        self.namespace = namespace
        self.hashes = hashes
        self.pages = pages
        self.until = until
        self.left = len(pages) - pages.count(None)
        self.times = 1

    @property
    def key(self) -> _Key:
        return self.reader, self.namespace, self.hashes[-HASH_BYTES:]


class Promises(Generic[P]):
    """Not thread-safe. O(pages named) a call, and `expire` O(promises). `most_bytes` is the bound, `size_of` what a page takes
    of it. Pages that leave the store must be reported by `gone`."""

    def __init__(self, most_bytes: int, size_of: Callable[[P], int]) -> None:
        self.most_bytes = most_bytes
        self.bytes = 0
        self.made = self.loaded = self.expired = self.dropped = self.lost = 0
        """Pages since start: promised; loaded by the reader; not wanted in time, or by a reader that has gone; no longer kept
        since there were too many; damaged or cleared meanwhile."""
        self._size_of = size_of
        self._sizes: dict[P, int] = {}
        """Pages that are kept, by what they count for."""
        self._promises: dict[_Key, Promise[P]] = {}
        """The oldest first."""
        self._readers: dict[tuple[str, bytes], dict[_Key, Promise[P]]] = {}
        self._references = 0

    def __len__(self) -> int:
        """Pages that are kept."""
        return len(self._sizes)

    def __iter__(self) -> Iterator[P]:
        """Those pages."""
        return iter(self._sizes)

    def make(
        self, owner: int, reader: str, namespace: bytes, hashes: bytes, pages: Sequence[P | None], until: float
    ) -> Promise[P]:
        """Keep these pages, which lie behind one another in a chain; the same ones once more are a promise renewed. Those at
        its end that are more than the bound allows are not kept."""
        promise = Promise(owner, reader, namespace, hashes, list(pages), until)
        former = self._promises.get(promise.key)
        if former is not None and former.hashes == hashes and former.pages == promise.pages:
            del self._promises[former.key]
            self._promises[former.key] = former
            former.owner, former.until = owner, max(until, former.until)
            former.times += 1
            return former
        self._keep(promise)
        if promise.left:
            self._enter(promise)
            self._references += promise.left
            self.made += promise.left
        while self.bytes > self.most_bytes or self._references > MAX_PAGES or len(self._promises) > MAX_PROMISES:
            self.dropped += self._end(next(iter(self._promises.values())))
        return promise

    def cut(self, promise: Promise[P], count: int) -> None:
        """Only the first `count` pages of it were told after all."""
        if count >= len(promise.pages) or self._promises.get(promise.key) is not promise:
            return
        self._forget(promise)
        ended = self._let_go(promise, range(count, len(promise.pages)))
        self._references -= ended
        self.made -= ended
        promise.hashes = promise.hashes[: count * HASH_BYTES]
        del promise.pages[count:]
        if not promise.left:
            return
        self._enter(promise)

    def fulfil(self, reader: str, namespace: bytes, hashes: bytes, here: Sequence[int]) -> None:
        """This reader has got, or holds by now, those of these pages for which `here` says so. Of several promises with them
        the oldest has been kept. One that was made more than once may be of several requests: time ends it."""
        promises = self._readers.get((reader, namespace))
        if not promises:
            return
        first = hashes[:HASH_BYTES]
        for promise in promises.values():
            at, rest = divmod(promise.hashes.find(first), HASH_BYTES)
            count = min(len(here), len(promise.pages) - at)
            if at < 0 or rest or not promise.hashes.startswith(hashes[: count * HASH_BYTES], at * HASH_BYTES):
                continue
            if promise.times > 1:
                return
            ended = self._let_go(promise, [at + i for i in range(count) if here[i]])
            self._references -= ended
            self.loaded += ended
            if not promise.left:
                self._forget(promise)
            return

    def expire(self, now: float) -> None:
        for promise in [promise for promise in self._promises.values() if promise.until <= now]:
            self.expired += self._end(promise)

    def drop_owner(self, owner: int) -> None:
        """A connection ended: who asked over it does not load any more."""
        for promise in [promise for promise in self._promises.values() if promise.owner == owner]:
            self.expired += self._end(promise)

    def gone(self, page: P) -> None:
        """The page has left the store all the same. Its promises hold nothing any more."""
        size = self._sizes.pop(page, None)
        if size is not None:
            self.bytes -= size
            self.lost += 1

    def validate(self) -> None:
        """For tests, after every event."""
        counted: dict[P, int] = {}
        for key, promise in self._promises.items():
            assert promise.key == key
            assert len(promise.hashes) == HASH_BYTES * len(promise.pages)
            kept = [page for page in promise.pages if page is not None]
            assert len(kept) == promise.left > 0
            for page in kept:
                counted[page] = counted.get(page, 0) + 1
            assert self._readers[promise.reader, promise.namespace][key] is promise
        assert sum(map(len, self._readers.values())) == len(self._promises) <= MAX_PROMISES
        assert all(self._readers.values())
        assert self._references == sum(counted.values()) <= MAX_PAGES
        assert all(page.promises == count for page, count in counted.items())
        assert set(self._sizes) <= set(counted)
        assert self.bytes == sum(self._sizes.values()) <= self.most_bytes

    # ------------------------------------------------------------------ inside

    def _keep(self, promise: Promise[P]) -> None:
        """Its pages, as far as all may be kept together: of a longer chain the head."""
        sizes, size = self._sizes, 0
        for at, page in enumerate(promise.pages):
            if page is None:
                continue
            known = sizes.get(page)
            new = self._size_of(page) if known is None else known
            size += new
            if size > self.most_bytes:
                self.dropped += len(promise.pages[at:]) - promise.pages[at:].count(None)
                promise.hashes = promise.hashes[: at * HASH_BYTES]
                del promise.pages[at:]
                promise.left = at - promise.pages.count(None)
                return
            page.promises += 1
            if known is None:
                sizes[page] = new
                self.bytes += new

    def _enter(self, promise: Promise[P]) -> None:
        former = self._promises.get(promise.key)
        if former is not None:
            self._end(former)
        self._promises[promise.key] = promise
        self._readers.setdefault((promise.reader, promise.namespace), {})[promise.key] = promise

    def _end(self, promise: Promise[P]) -> int:
        """Returns how many pages it still held."""
        self._forget(promise)
        ended = self._let_go(promise, range(len(promise.pages)))
        self._references -= ended
        return ended

    def _forget(self, promise: Promise[P]) -> None:
        del self._promises[promise.key]
        of_reader = self._readers[promise.reader, promise.namespace]
        del of_reader[promise.key]
        if not of_reader:
            del self._readers[promise.reader, promise.namespace]

    def _let_go(self, promise: Promise[P], which: Sequence[int]) -> int:
        ended = 0
        for at in which:
            page = promise.pages[at]
            if page is None:
                continue
            promise.pages[at] = None
            page.promises -= 1
            ended += 1
            if not page.promises:
                self.bytes -= self._sizes.pop(page, 0)
        promise.left -= ended
        return ended
