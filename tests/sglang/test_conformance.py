"""The conformance suite against our backend in every configuration, and, to check the suite itself, against SGLang's `file`."""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import xxhash
from sglang.srt.mem_cache import utils
from sglang.srt.mem_cache.hicache_storage import HiCacheFile

from hicache_mooncake import protocol as p
from hicache_mooncake.backend import HiCacheMooncake
from hicache_mooncake.client.client import Body
from hicache_mooncake.client.node_link import connect
from hicache_mooncake.keys import checksum_seed
from hicache_mooncake.testing import BackendTests
from hicache_mooncake.transfer.mapping import Mapping
from tests.conftest import NodeProcess
from tests.sglang.matrix import Supports

if not hasattr(utils, "storage_namespace_seed"):  # before 0.5.20 requests are told apart in the scheduler, if there is one
    importlib.import_module("sglang.srt.managers.scheduler")


class Saboteur:
    """The segment as a store mover sees it: what is stored there can be lost, changed and replaced behind everybody's back."""

    def __init__(self, node: NodeProcess) -> None:
        self.wire = connect(node.socket, 5.0)
        self.wire.send(p.Hello(p.PROTOCOL_MIN, p.PROTOCOL_MAX, "store", "saboteur"))
        welcome = self.receive(p.Welcome)
        (fd,) = self.wire.take_fds()
        self.segment = Mapping(fd, welcome.segment_bytes, writable=True)
        os.close(fd)

    def receive(self, kind: type[p.Message]) -> Any:
        answer = self.wire.receive(p.decoder(p.FromNode), time.monotonic() + 5)
        assert isinstance(answer, kind), answer
        return answer

    def locate(self, body: Body, page: bytes) -> tuple[int, int]:
        """(pin, where in the segment) of a stored page."""
        self.wire.send(p.Locate(body.namespace, page, body.length))
        located = self.receive(p.Located)
        assert list(located.status) == [p.LOCAL]
        return located.pin, located.where[0]

    def evict(self, body: Body, page: bytes) -> None:
        pin, _ = self.locate(body, page)
        self.wire.send(p.Release(pin, body.namespace, bad=page))
        self.wire.send(p.Locate(body.namespace, page, body.length))  # answered after what was sent before it
        assert list(self.receive(p.Located).status) == [p.MISS]

    def flip(self, body: Body, page: bytes, position: int) -> None:
        pin, where = self.locate(body, page)
        self.segment.view[where + position % body.length] ^= 0xFF
        self.wire.send(p.Release(pin))

    def resize(self, body: Body, page: bytes, length: int) -> None:
        """Its checksum is right: only its length gives it away. There are no objects without bytes."""
        pin, where = self.locate(body, page)
        other = bytes(self.segment.view[where : where + min(length, body.length)]).ljust(length, b"\0")
        self.wire.send(p.Release(pin))
        self.evict(body, page)
        if length:
            self.wire.send(p.Reserve(body.namespace, page, length, body.group))
            reserved = self.receive(p.Reserved)
            assert list(reserved.status) == [p.WRITE]
            self.segment.view[reserved.where[0] : reserved.where[0] + length] = other
            checksum = xxhash.xxh3_64_intdigest(other, seed=checksum_seed(body.namespace, page))
            self.wire.send(p.Commit(reserved.txn, b"\x01", [checksum]))
            assert self.receive(p.Committed).ok == b"\x01"

    def close(self) -> None:
        self.wire.close()
        self.segment.close()


@pytest.fixture(scope="class")
def class_node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    """One node for all tests of a class: each of them has a model of its own."""
    node = NodeProcess(str(tmp_path_factory.mktemp("node") / "a.sock"), "64MiB", name="a").start()
    yield node
    node.stop()


FAMILIES = {
    "MHA": "mha",
    "MHA, K and V of different width": "mha_asymmetric",
    "MLA": "mla",
    "MLA with Mamba": "kimi_linear",
    "sparse attention (indexer)": "dsa",
    "sliding window": "swa",
    "Mamba": "mamba",
    "draft model": "eagle_mha",
    "DeepSeek-V4": "deepseek_v4",
}
"""What the suite calls a family -> what the tests with SGLang's own pools (families.py) do."""
NOT_IN_SGLANG = {("sparse attention (indexer)", "layer_first")}
"""What the suite's pools can do and SGLang's cannot."""


class OurBackend(BackendTests):
    copy_mode: ClassVar[str]
    by_name: ClassVar[bool]
    """Constructed as by the name mooncake, with the host pool, or by the dynamic loader, with an empty dict."""
    node: NodeProcess

    @pytest.fixture(autouse=True)
    def _surroundings(self, class_node: NodeProcess, supports: Supports) -> None:
        self.node = class_node
        self.supports = supports
        self.start_storage()

    def make_backend(self, config: Any, pools: dict[str, Any]) -> HiCacheMooncake:
        # The longest deadline: on a machine that is busy with other tests, a late answer is no wrong one.
        config.extra_config |= {"socket": self.node.socket, "copy_mode": self.copy_mode, "deadline_s": 7.5}
        if self.by_name:
            return HiCacheMooncake(config, next(iter(pools.values())))
        config.extra_config |= {
            "backend_name": "mooncake",
            "module_path": "hicache_mooncake.backend",
            "class_name": "HiCacheMooncake",
            "interface_v1": int(self.zero_copy),
        }
        return HiCacheMooncake(config, {})

    def covers(self, *, family: str, layout: str, shape: str) -> None:
        if family in FAMILIES and (family, layout) not in NOT_IN_SGLANG:
            self.supports(family=FAMILIES[family], layout=layout, shape=shape)

    def damage(self, how: str, backend: HiCacheMooncake, pool: str, key: str, *arguments: int) -> None:
        saboteur = Saboteur(self.node)
        for body in backend._bodies(backend._pools.view.pools[pool]):
            getattr(saboteur, how)(body, bytes.fromhex(key), *arguments)
        saboteur.close()

    def evict_part(self, backend: HiCacheMooncake, pool: str, key: str) -> None:
        self.damage("evict", backend, pool, key)

    def flip_byte(self, backend: HiCacheMooncake, pool: str, key: str, position: int) -> None:
        self.damage("flip", backend, pool, key, position)

    def resize_part(self, backend: HiCacheMooncake, pool: str, key: str, length: int) -> None:
        self.damage("resize", backend, pool, key, length)

    def stop_storage(self) -> None:
        self.node.kill()

    def start_storage(self) -> None:
        if self.node.process is None or self.node.process.poll() is not None:
            self.node.start()


class TestMemfd(OurBackend):
    copy_mode, memory, by_name = "memfd", "memfd", False


class TestProcessVm(OurBackend):
    copy_mode, memory, by_name = "process_vm", "anonymous", True


@pytest.mark.slow
class TestSegment(OurBackend):
    copy_mode, memory, by_name = "segment", "anonymous", False


@pytest.mark.slow
class TestGeneric(OurBackend):
    copy_mode, memory, by_name, zero_copy = "auto", "anonymous", False, False


IDENTITY = "neither dtype, layout, shape nor length of a page is in its keys (a TODO in its source)"
NO_CHECKSUM = "its files have no checksum"
NO_REFUSAL = "no pool is ever refused"
ANCHOR_ONLY = "its batch_exists looks at the anchor's files alone"
CLEARS_ALL = "its clear removes every file of the folder, whoever wrote it"
RAISES = "arguments are used as they come, and raise"
ANY_NAME = "a key is a file name, whatever it says"
NO_INDEX_CHECK = "it counts the indices of a side pool and does not look at them"
OTHER_ERRORS = "what the file system says other than that a file is not there goes up to SGLang"

FILE_FAILS: dict[str, str] = {
    "test_engines_that_differ_never_share[model, separators]": "it makes a-b of the model's name a/b",
    **{
        f"test_engines_that_differ_never_share[{difference}]": IDENTITY
        for difference in (
            "dtype", "dtype, half the bytes", "dtype, MLA", "layout, direct", "layout, page_head", "layout, layer_first",
            "layout, MLA", "layers", "layers, equal bytes", "layer range", "heads", "heads, equal bytes", "page size",
            "page size, equal bytes", "kv_cache_dim", "a longer page", "a shorter page", "kind of pool",
        )
    },
    "test_side_pools_that_differ_are_not_shared": IDENTITY,
    "test_a_damaged_page_is_never_delivered": NO_CHECKSUM,
    "test_a_damaged_part_is_never_delivered": NO_CHECKSUM,
    "test_a_page_of_another_length_is_never_delivered": "a shorter file raises, the end of a longer one is not read",
    "test_without_storage_everything_is_a_miss": OTHER_ERRORS,
    "test_without_storage_side_pools_are_misses": OTHER_ERRORS,
    "test_a_part_that_was_evicted_takes_its_page_with_it[indexer]": ANCHOR_ONLY,
    "test_a_side_pool_stored_in_part_never_yields_a_hit": ANCHOR_ONLY,
    "test_batch_exists_promises_no_more_than_the_side_pools_can_restore": ANCHOR_ONLY,
    "test_an_anchor_without_bytes_is_decided_by_its_side_pools": ANCHOR_ONLY,
    "test_an_anchor_without_bytes_alone_has_no_pages": ANCHOR_ONLY,
    "test_clear_leaves_other_models_alone": CLEARS_ALL,
    "test_clear_forgets_every_pool": CLEARS_ALL,
    "test_a_side_pool_that_cannot_be_stored_turns_the_model_off": NO_REFUSAL,
    "test_a_placeholder_is_no_key": ANY_NAME,
    "test_an_unknown_hit_policy_gets_no_verdict": "a policy that it does not know raises",
    "test_a_pool_that_was_never_registered": "a pool that it does not know raises",
    "test_bad_indices_of_one_pool_leave_the_others_alone": NO_INDEX_CHECK,
    "test_lookups_take_any_argument": RAISES,
    "test_the_generic_calls_take_any_argument": RAISES,
    "test_the_v2_calls_take_any_argument": RAISES,
}  # fmt: skip
"""Test, or test and case, of the suite -> why SGLang's `file` backend fails it."""


class TestFile(BackendTests):
    """SGLang's `file` backend, which SGLang drives through the generic calls and, for side pools, v2."""

    zero_copy = False

    @pytest.fixture(autouse=True)
    def _surroundings(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR", raising=False)
        self.folder = tmp_path / "pages"
        self.folder.mkdir()

    @pytest.fixture(autouse=True)
    def _known_to_fail(self, request: pytest.FixtureRequest) -> None:
        """Whatever is in the table must fail, and nothing else may."""
        reason = FILE_FAILS.get(request.node.name) or FILE_FAILS.get(request.node.originalname)
        if reason:
            request.applymarker(pytest.mark.xfail(reason=reason, strict=True))

    def test_every_entry_of_the_table_is_a_test(self) -> None:
        assert [name for name in FILE_FAILS if not hasattr(BackendTests, name.partition("[")[0])] == []

    def make_backend(self, config: Any, pools: dict[str, Any]) -> HiCacheFile:
        return HiCacheFile(config, str(self.folder))

    def path(self, backend: HiCacheFile, pool: str, key: str) -> Path:
        return self.folder / f"{backend._get_component_key(key, pool)}.bin"

    def evict_part(self, backend: HiCacheFile, pool: str, key: str) -> None:
        self.path(backend, pool, key).unlink()

    def flip_byte(self, backend: HiCacheFile, pool: str, key: str, position: int) -> None:
        content = bytearray(self.path(backend, pool, key).read_bytes())
        content[position] ^= 0xFF
        self.path(backend, pool, key).write_bytes(content)

    def resize_part(self, backend: HiCacheFile, pool: str, key: str, length: int) -> None:
        os.truncate(self.path(backend, pool, key), length)

    def stop_storage(self) -> None:
        """As when what was mounted there fails: there is something, and it is no folder."""
        self.folder.rename(self.folder.with_name("gone"))
        self.folder.touch()

    def start_storage(self) -> None:
        self.folder.unlink()
        self.folder.with_name("gone").rename(self.folder)
