"""SGLang's own decode offload over the pool: whose a slot is while a page is on its way, and that each is given back once."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from sglang.srt.disaggregation.decode_kvcache_offload_manager import DecodeKVCacheOffloadManager
from sglang.srt.managers.schedule_batch import FINISH_LENGTH, Req
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from tests.conftest import START_S, NodeProcess, wait_until
from tests.sglang.trees import PAGE, MakeTree, Pools, Prompt, configured, prompt, request

OFFLOAD: dict[str, Any] = {
    "disaggregation_mode": "decode",
    "disaggregation_decode_enable_offload_kvcache": True,
    "enable_hierarchical_cache": False,
}


class Server:
    """A decode server without its model: SGLang's pools, tree and offload manager, and what its scheduler does in a step."""

    def __init__(self, device_pages: int) -> None:
        self.pools = Pools(device_pages)
        params = CacheInitParams(
            disable=True,
            req_to_token_pool=self.pools.rows,
            token_to_kv_pool_allocator=self.pools.allocator,
            page_size=PAGE,
            tree_components=(ComponentType.FULL,),
        )
        tree = UnifiedRadixCache(params)
        self.manager = DecodeKVCacheOffloadManager(self.pools.rows, self.pools.allocator, torch.distributed.group.WORLD, tree)
        self.controller = self.manager.cache_controller
        self.l2 = self.manager.decode_host_mem_pool

    def close(self) -> None:
        self.controller.detach_storage_backend()
        self.manager.release_host_resources()

    def free_pages(self) -> tuple[int, int]:
        """On the device, and in the host pool."""
        return self.pools.allocator.available_size() // PAGE, self.l2.available_size() // PAGE

    def receive(self, name: str, ids: Prompt) -> Req:
        """Prefill has sent the prompt."""
        req = request(name, ids)
        self.pools.rows.alloc([req])
        for at in range(0, len(ids), PAGE):
            self._compute(req, ids, at)
        return req

    def decode(self, req: Req, token: int) -> None:
        """One more token of the answer; the one before it has been computed."""
        req.output_ids.append(token)
        done = self.tokens(req)
        if len(req.output_ids) > 1:
            self._compute(req, done, (len(done) - 1) // PAGE * PAGE)
        self.manager.offload_kv_cache(req)
        self.check()

    def finish(self, req: Req) -> None:
        req.finished_reason = FINISH_LENGTH(len(req.output_ids))
        if not self.manager.offload_kv_cache(req):
            self.manager.finalize_release_on_finish(req)
        self.check()

    def check(self) -> None:
        self.controller.start_writing()
        self.manager.check_offload_progress()

    def tokens(self, req: Req) -> Prompt:
        """All of its tokens but the newest, which is never computed."""
        return (*req.origin_input_ids, *req.output_ids[:-1])

    def slots(self, req: Req) -> torch.Tensor:
        return self.pools.rows.req_to_token[req.kv.req_pool_idx, : req.kv.kv_allocated_len].to(torch.int64)

    def all_written(self) -> bool:
        self.check()
        return not (self.manager.ongoing_offload or self.manager.ongoing_backup)

    def _compute(self, req: Req, ids: Prompt, at: int) -> None:
        """The page at this token."""
        if at >= req.kv.kv_allocated_len:
            slots = self.pools.allocator.alloc(PAGE)
            assert slots is not None
            self.pools.rows.write((req.kv.req_pool_idx, slice(at, at + PAGE)), slots.to(torch.int32))
            req.kv.kv_allocated_len = at + PAGE
        page = ids[at : at + PAGE]
        self.pools.write(self.slots(req)[at : at + len(page)], page)


MakeServer = Callable[..., Server]


@pytest.fixture
def make_server() -> Iterator[MakeServer]:
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    with contextlib.ExitStack() as stack:

        def make(node: NodeProcess, device_pages: int = 32, **server_args: Any) -> Server:
            stack.enter_context(configured(node, **(OFFLOAD | server_args)))
            server = Server(device_pages)
            stack.callback(server.close)
            return server

        yield make
    torch.distributed.destroy_process_group()


ASKED, ANSWER = prompt(1, 3)[:40], prompt(2, 6)[:75]
WHOLE = (*ASKED, *ANSWER[:-1])
FULL = len(WHOLE) // PAGE * PAGE


def take_all(server: Server) -> torch.Tensor:
    """New requests are given every slot that is free, and write to it."""
    slots = server.pools.allocator.alloc(server.pools.allocator.available_size())
    assert slots is not None
    server.pools.write(slots, [7] * len(slots))
    return slots


def held_up(server: Server, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """The pool takes nothing before this is set."""
    go = threading.Event()
    backend = server.controller.storage_backend
    store = backend.batch_set_v1

    def slow(*args: Any, **more: Any) -> Any:
        assert go.wait(START_S)
        return store(*args, **more)

    monkeypatch.setattr(backend, "batch_set_v1", slow)
    return go


def test_no_slot_of_an_answer_is_given_away_before_its_end(
    node: NodeProcess, make_server: MakeServer, make_tree: MakeTree
) -> None:
    server = make_server(node)
    nothing_used = server.free_pages()
    req = server.receive("a", ASKED)
    for token in ANSWER:
        server.decode(req, token)
        others = take_all(server)
        server.pools.allocator.free(others)
    assert server.pools.holds(server.slots(req)[:FULL], WHOLE[:FULL])
    wait_until(server.all_written, START_S, "the pages are written")
    assert server.free_pages()[0] == nothing_used[0] - len(WHOLE) // PAGE - 1
    server.finish(req)
    wait_until(server.all_written, START_S, "the last pages are written")
    assert server.free_pages() == nothing_used, "and then each of them is"
    reader = make_tree(node)
    # The prompt's own whole pages are the prefill server's to write.
    reader.compute_and_write(ASKED[: 2 * PAGE])
    again = request("b", (*WHOLE, 3))
    assert reader.prefetch(again) == FULL - 2 * PAGE


def test_what_is_being_written_is_what_was_computed_though_its_slots_have_new_owners(
    node: NodeProcess, make_server: MakeServer, make_tree: MakeTree, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = make_server(node)
    nothing_used = server.free_pages()
    go = held_up(server, monkeypatch)
    req = server.receive("a", ASKED)
    for token in ANSWER:
        server.decode(req, token)
    server.finish(req)
    written = (FULL - 2 * PAGE) // PAGE
    assert server.free_pages() == (nothing_used[0], nothing_used[1] - written), "what is not written keeps its place in L2"
    take_all(server)
    go.set()
    wait_until(server.all_written, START_S, "the pages are written")
    assert server.free_pages()[1] == nothing_used[1]
    reader = make_tree(node)
    reader.compute_and_write(ASKED[: 2 * PAGE])
    assert reader.prefetch(request("b", (*WHOLE, 3))) == FULL - 2 * PAGE
    assert reader.load(WHOLE[:FULL]), "byte for byte"


def test_requests_of_all_lengths_leave_no_slot_behind_though_l2_was_full(
    node: NodeProcess, make_server: MakeServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What has no room in L2 when the answer ends is not written, and its slots are free all the same."""
    server = make_server(node, device_pages=64, hicache_ratio=0.25)
    nothing_used = server.free_pages()
    go = held_up(server, monkeypatch)
    for number in range(24):
        ids, answer = prompt(10 + number, 4)[: 3 + 5 * number % 60], prompt(100 + number, 12)[: 1 + 17 * number % 180]
        req = server.receive(str(number), ids)
        for token in answer:
            server.decode(req, token)
        server.finish(req)
    assert "Not enough host memory" in caplog.text
    assert server.free_pages() == (nothing_used[0], 0)
    go.set()
    wait_until(server.all_written, START_S, "all is written that will be")
    assert server.free_pages() == nothing_used
    assert server.pools.rows.available_size() == server.pools.rows.size
