"""What the conformance tests stand on: the SGLang release, one engine rank, and what a backend's author overrides."""

from __future__ import annotations

import hashlib
import inspect
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

import pytest
import sglang
from sglang.srt.mem_cache import hicache_storage

from hicache_mooncake.testing.conformance.host_pools import (
    HostPool,
    LogicalPool,
    MHAPool,
    body,
    page_bytes,
    read_page,
    scramble,
    slots,
    snapshot,
    write_page,
)

_T = TypeVar("_T")

SGLANG_VERSION = str(sglang.__version__)
HAS_V2 = hasattr(hicache_storage, "PoolTransfer")
needs_v2 = pytest.mark.skipif(not HAS_V2, reason=f"sglang {SGLANG_VERSION} has no PoolTransfer")


def each_test_needs_v2(cls: type[_T]) -> type[_T]:
    """`needs_v2` on every test of a class; on the class itself it would be inherited by the tests of its subclasses."""
    for name, value in list(vars(cls).items()):
        if name.startswith("test_"):
            setattr(cls, name, needs_v2(value))
    return cls


KV = "kv"
ALL_PAGES, TRAILING_PAGES = "all_pages", "trailing_pages"
PLACEHOLDER = "__placeholder__"


def key(name: object) -> str:
    """A page key as SGLang makes it: 64 lower-case hex digits."""
    return hashlib.sha256(repr(name).encode()).hexdigest()


def fresh_keys(count: int) -> list[str]:
    """Keys that nobody has used before."""
    chain = uuid.uuid4().hex
    return [key((chain, i)) for i in range(count)]


def pool_name(name: str) -> Any:
    """The release's `PoolName`, or the string itself where the release has no such pool."""
    try:
        return hicache_storage.PoolName(name)
    except (AttributeError, ValueError):
        return name


def hit_policy(name: str) -> Any:
    try:
        return hicache_storage.PoolHitPolicy(name)
    except ValueError:
        return name


def storage_config(**fields: Any) -> Any:
    """SGLang's `HiCacheStorageConfig`: one rank of one model, but for `fields`. Skips the test where the release has not all
    of those, unless they have the value that such a release implies."""
    values: dict[str, Any] = {
        "tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "attn_cp_rank": 0, "attn_cp_size": 1, "is_mla_model": False,
        "enable_storage_metrics": True, "is_page_first_layout": True, "model_name": "model", "extra_config": {},
    }  # fmt: skip
    known = inspect.signature(hicache_storage.HiCacheStorageConfig).parameters
    for name in fields:
        if name not in known:
            pytest.skip(f"the storage config of sglang {SGLANG_VERSION} has no {name}")
    return hicache_storage.HiCacheStorageConfig(**{k: v for k, v in (values | fields).items() if k in known})


def expected_restorable(pages: int, stored: Mapping[str, Sequence[bool]], windows: Mapping[str, int | None]) -> list[int]:
    """Every prefix length of `pages` that can be restored, by the definition and nothing else.

    `stored[pool][i]` says whether page i is there; `windows[pool]` is None for ALL_PAGES and the window for TRAILING_PAGES.
    """

    def restorable(length: int) -> bool:
        for pool, window in windows.items():
            first = 0 if window is None else max(0, length - max(1, window))
            if not all(stored[pool][first:length]):
                return False
        return True

    return [length for length in range(1, pages + 1) if restorable(length)]


class Rank:
    """One engine rank: host pools, anchor first, and a backend that knows them. Every load is compared byte by byte.

    `zero_copy` False takes SGLang's generic path for the anchor: one flat tensor a page.
    """

    def __init__(self, backend: Any, pools: dict[str, HostPool], config: Any, *, zero_copy: bool):
        self.backend, self.pools, self.config, self.zero_copy = backend, pools, config, zero_copy

    @property
    def anchor(self) -> HostPool:
        return next(iter(self.pools.values()))

    @property
    def anchor_name(self) -> str:
        return next(iter(self.pools))

    # ------------------------------------------------------------------ as SGLang's controllers call

    def register(self) -> None:
        """The anchor, every pool by name, the end of the attach: what the release has of it, in its order."""
        self.backend.register_mem_pool_host(self.anchor)
        for name in self.pools:
            self.register_late(name)
        if hasattr(self.backend, "on_host_pools_registered"):
            self.backend.on_host_pools_registered()

    def refused(self) -> str | None:
        """Register pools that cannot be stored whole: the message of the exception that fails the attach, None if none."""
        try:
            self.register()
        except Exception as error:
            return str(error)
        return None

    def register_late(self, name: str, pool: HostPool | None = None) -> None:
        if pool is not None:
            self.pools[name] = pool
        if hasattr(self.backend, "register_mem_host_pool_v2"):
            self.backend.register_mem_host_pool_v2(self.pools[name], pool_name(name))

    def set(self, keys: list[str], pages: Sequence[int]) -> list[bool]:
        """`batch_set_v1`, or `batch_set` as the generic path does it: one verdict for all."""
        indices = slots(self.anchor, pages)
        if self.zero_copy:
            return verdict_of(self.backend.batch_set_v1(keys, indices), len(keys))
        size = self.anchor.logical_page_size
        values = [self.anchor.get_data_page(indices[i * size]) for i in range(len(keys))]
        stored = self.backend.batch_set(keys, values)
        assert isinstance(stored, bool), f"batch_set answered {stored!r}"
        return [stored] * len(keys)

    def get(self, keys: list[str], pages: Sequence[int]) -> list[bool]:
        """`batch_get_v1`, or `batch_get` into flat tensors that are copied into the pool where they come back."""
        indices = slots(self.anchor, pages)
        if self.zero_copy:
            return verdict_of(self.backend.batch_get_v1(keys, indices), len(keys))
        got = self.backend.batch_get(keys, [self.anchor.get_dummy_flat_data_page() for _ in keys])
        assert len(got) == len(keys), f"{len(got)} tensors for {len(keys)} keys"
        size = self.anchor.logical_page_size
        for i, page in enumerate(got):
            if page is not None:
                self.anchor.set_from_flat_data_page(indices[i * size], page)
        return [page is not None for page in got]

    def exists(self, keys: list[str]) -> int:
        found = self.backend.batch_exists(keys)
        assert isinstance(found, int), f"batch_exists answered {found!r}"
        assert not isinstance(found, bool), f"batch_exists answered {found!r}"
        assert 0 <= found <= len(keys), f"{found} hits for {len(keys)} keys"
        return found

    def transfer(self, pool: str, keys: list[str] | None, pages: Sequence[int] | None, policy: str = ALL_PAGES) -> Any:
        """A `PoolTransfer` of one pool; without `pages` one as a query has it."""
        indices = None if pages is None else slots(self.pools[pool], pages)
        return hicache_storage.PoolTransfer(
            name=pool_name(pool), host_indices=indices, keys=keys, hit_policy=hit_policy(policy)
        )

    def query(self, keys: list[str], windows: Mapping[str, int | None]) -> Any:
        """`batch_exists_v2` with one transfer per side pool, as SGLang makes them: no keys for ALL_PAGES, placeholders for a
        window. The answer is checked for its own sense."""
        transfers = [
            self.transfer(pool, None, None, ALL_PAGES)
            if window is None
            else self.transfer(pool, [PLACEHOLDER] * window, None, TRAILING_PAGES)
            for pool, window in windows.items()
        ]
        return checked_result(self.backend.batch_exists_v2(keys, transfers), len(keys))

    def set_side(self, pool: str, keys: list[str], pages: Sequence[int]) -> list[bool]:
        return self.set_all({pool: (keys, pages)})[pool]

    def set_all(self, parts: Mapping[str, tuple[list[str], Sequence[int]]]) -> dict[str, list[bool]]:
        """One `batch_set_v2` for several side pools."""
        return self._side("batch_set_v2", parts)

    def get_all(self, parts: Mapping[str, tuple[list[str], Sequence[int]]]) -> dict[str, list[bool]]:
        return self._side("batch_get_v2", parts)

    def _side(self, method: str, parts: Mapping[str, tuple[list[str], Sequence[int]]]) -> dict[str, list[bool]]:
        transfers = [self.transfer(pool, keys, pages) for pool, (keys, pages) in parts.items()]
        answer = getattr(self.backend, method)(transfers)
        assert isinstance(answer, dict), f"{method} answered {answer!r}"
        verdicts = {}
        for transfer, (pool, (keys, _)) in zip(transfers, parts.items(), strict=True):
            assert transfer.name in answer, f"{method} has no verdict for {pool}: {answer!r}"
            verdicts[pool] = verdict_of(answer[transfer.name], len(keys))
        return verdicts

    # ------------------------------------------------------------------ pages that name themselves

    def fill(self, pool: str, keys: Sequence[str], pages: Sequence[int], generation: int = 0) -> None:
        target = self.pools[pool]
        for name, page in zip(keys, pages, strict=True):
            write_page(target, page, body(pool, name, page_bytes(target), generation))

    def store(self, keys: list[str], pages: Sequence[int] | None = None, generation: int = 0) -> list[bool]:
        """Fill pages of the anchor, 0 and up unless told, with their keys' patterns and store them."""
        pages = range(len(keys)) if pages is None else pages
        self.fill(self.anchor_name, keys, pages, generation)
        return self.set(keys, pages)

    def store_side(self, pool: str, keys: list[str], pages: Sequence[int] | None = None, generation: int = 0) -> list[bool]:
        pages = range(len(keys)) if pages is None else pages
        self.fill(pool, keys, pages, generation)
        return self.set_side(pool, keys, pages)

    def store_everywhere(self, keys: list[str], generation: int = 0) -> None:
        """Every page of every pool, side pools first, as SGLang does."""
        for pool in list(self.pools)[1:]:
            assert self.store_side(pool, keys, generation=generation) == [True] * len(keys), f"{pool} was not stored"
        assert self.store(keys, generation=generation) == [True] * len(keys), "the anchor was not stored"

    def load(self, keys: list[str], pages: Sequence[int] | None = None, generation: int = 0) -> list[bool]:
        """Scramble the anchor, load, and compare: pages with a True verdict have their key's bytes, pages that were not asked
        for are as they were. Raises AssertionError on a wrong byte."""
        pages = range(len(keys)) if pages is None else pages
        before = self.scrambled(self.anchor_name)
        verdict = self.get(keys, pages)
        self.compare(self.anchor_name, keys, pages, verdict, before, generation)
        return verdict

    def load_side(self, pool: str, keys: list[str], pages: Sequence[int] | None = None, generation: int = 0) -> list[bool]:
        pages = range(len(keys)) if pages is None else pages
        before = self.scrambled(pool)
        verdict = self.get_all({pool: (keys, pages)})[pool]
        self.compare(pool, keys, pages, verdict, before, generation)
        return verdict

    def scrambled(self, pool: str) -> list[bytes]:
        scramble(self.pools[pool])
        return snapshot(self.pools[pool])

    def compare(
        self,
        pool: str,
        keys: Sequence[str],
        pages: Sequence[int],
        verdict: Sequence[bool],
        before: list[bytes],
        generation: int,
    ) -> None:
        target = self.pools[pool]
        last = {page: i for i, page in enumerate(pages)}  # a page that is named twice holds what came last
        for i, (name, page) in enumerate(zip(keys, pages, strict=True)):
            if verdict[i] and last[page] == i and read_page(target, page) != body(pool, name, page_bytes(target), generation):
                raise AssertionError(f"{pool}: page {page} was reported loaded and has not the bytes of its key")
        for page, old in enumerate(before):
            if page not in last and read_page(target, page) != old:
                raise AssertionError(f"{pool}: page {page} was not asked for and has changed")

    def close(self) -> None:
        if hasattr(self.backend, "close"):
            self.backend.close()


def verdict_of(answer: Any, expected: int) -> list[bool]:
    """The answer, if it is one bool a key."""
    assert isinstance(answer, list), f"not a list of verdicts: {answer!r}"
    assert all(isinstance(one, bool) for one in answer), f"not a list of bools: {answer!r}"
    assert len(answer) == expected, f"{len(answer)} verdicts for {expected} keys"
    return answer


def checked_result(result: Any, pages: int) -> Any:
    """A `PoolTransferResult` whose parts agree: the hit is the largest restorable length, and all lie in 1..pages."""
    assert isinstance(result, hicache_storage.PoolTransferResult), f"not a PoolTransferResult: {result!r}"
    assert 0 <= result.kv_hit_pages <= pages, f"{result.kv_hit_pages} hits for {pages} keys"
    assert all(0 <= count <= pages for count in result.extra_pool_hit_pages.values()), result.extra_pool_hit_pages
    if reports_restorable():
        restorable = result.restorable_prefix_pages
        assert restorable is not None, "without restorable_prefix_pages SGLang takes every shorter length for restorable"
        assert sorted(set(restorable)) == sorted(restorable)
        assert all(1 <= length <= pages for length in restorable), restorable
        assert result.kv_hit_pages == max(restorable, default=0)
    return result


def reports_restorable() -> bool:
    return HAS_V2 and "restorable_prefix_pages" in inspect.signature(hicache_storage.PoolTransferResult).parameters


class Harness:
    """What a subclass of BackendTests overrides, and what its tests use."""

    zero_copy = True
    """Whether SGLang calls batch_get_v1 and batch_set_v1 of this backend, or the generic batch_get and batch_set."""
    memory = "anonymous"
    """Where host pools lie: "anonymous", or "memfd" as with SGLang's shared-memory allocator."""

    _ranks: list[Rank]
    _model: str

    # ------------------------------------------------------------------ to override

    def make_backend(self, config: Any, pools: dict[str, HostPool]) -> Any:
        """A backend for `config`, SGLang's HiCacheStorageConfig, whose `extra_config` dict may be added to. `pools` are the
        rank's host pools by name, anchor first. All backends of a test use one storage. The suite registers the pools, and
        closes the backend."""
        raise NotImplementedError("override make_backend")

    def evict_part(self, backend: Any, pool: str, key: str) -> None:
        """Make the storage lose one page of one pool, as an eviction would. Skips the tests that need it unless overridden."""
        pytest.skip("evict_part is not overridden")

    def flip_byte(self, backend: Any, pool: str, key: str, position: int) -> None:
        """Change one stored byte of one page of one pool behind the backend's back; `position` may be negative."""
        pytest.skip("flip_byte is not overridden")

    def resize_part(self, backend: Any, pool: str, key: str, length: int) -> None:
        """Let one stored page of one pool have `length` bytes: its first ones, or all of them with zeros behind."""
        pytest.skip("resize_part is not overridden")

    def stop_storage(self) -> None:
        """Make the storage unreachable for every backend of this test, without warning."""
        pytest.skip("stop_storage is not overridden")

    def start_storage(self) -> None:
        """The storage is there again, with or without what it held."""
        pytest.skip("start_storage is not overridden")

    def covers(self, *, family: str, layout: str, shape: str) -> None:
        """Called by tests that have shown a model family in a layout and a parallel shape to work; for those who keep a
        table. Does nothing unless overridden."""

    # ------------------------------------------------------------------ for the tests

    @pytest.fixture(autouse=True)
    def _each_test_has_its_own_model(self) -> Iterator[None]:
        self.begin()
        yield
        self.end()

    def begin(self) -> None:
        self._ranks = []
        self._model = f"model-{uuid.uuid4().hex}"

    def end(self) -> None:
        """Close every backend, then give back the pools that they may have touched until then."""
        for rank in self._ranks:
            rank.close()
        for rank in self._ranks:
            for pool in rank.pools.values():
                pool.close()

    def rank(self, pools: dict[str, HostPool] | HostPool | None = None, **fields: Any) -> Rank:
        """A new rank with `pools` (one: the anchor; none: a small MHA pool), registered, and `fields` in its config."""
        rank = self.unregistered(pools, **fields)
        rank.register()
        return rank

    def unregistered(self, pools: dict[str, HostPool] | HostPool | None = None, **fields: Any) -> Rank:
        """The same before its pools are registered."""
        made = pools if isinstance(pools, dict) else {KV: pools if pools is not None else self.mha()}
        is_mla = not isinstance(next(iter(made.values())), MHAPool)
        layout = getattr(next(iter(made.values())), "layout", "")
        defaults = {"model_name": self._model, "is_mla_model": is_mla, "is_page_first_layout": layout == "page_first"}
        config = storage_config(**(defaults | fields))
        rank = Rank(self.make_backend(config, made), made, config, zero_copy=self.zero_copy)
        self._ranks.append(rank)
        return rank

    def mha(self, layout: str = "page_first", **shape: Any) -> MHAPool:
        return MHAPool(layout, memory=self.memory, **shape)


def is_logical(pool: HostPool) -> bool:
    return isinstance(pool, LogicalPool)
