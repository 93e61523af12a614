"""Prefill and decode servers' trees over the pool, in SGLang's own classes: what a server says it has, it has.

Where SGLang alone decides, the test says what it does in the release that is installed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from sglang.srt.disaggregation.common import conn
from sglang.srt.disaggregation.decode_hicache_mixin import HiCacheRestoreResult
from sglang.srt.mem_cache.base_prefix_cache import EvictParams

from hicache_mooncake.testing.local import FakeRank, page_hash
from tests.conftest import START_S, NodeProcess, wait_until
from tests.sglang.trees import PAGE, DecodeSide, MakeTree, Tree, prompt, request

DECODE: dict[str, Any] = {"disaggregation_mode": "decode", "disaggregation_decode_enable_radix_cache": True}
PROMISE = {"promise_s": 60, "deadline_s": 7.5}


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lookup may take as long as a load: a machine may have much else to do."""
    monkeypatch.setattr("hicache_mooncake.client.client.LOOKUP_S", 7.5)


def report(tree: Tree) -> dict[str, Any]:
    found = tree.backend.client.status()
    assert found is not None
    return dict(found.node)


def test_decode_tells_prefill_what_l3_has_and_no_more(node: NodeProcess, make_tree: MakeTree) -> None:
    """The whole history is not sent anew each turn, and nothing is missing from what was not sent."""
    prefill = make_tree(node)
    ids = prompt(1, 8)
    prefill.compute_and_write(ids[: 6 * PAGE])
    tree = make_tree(node, extra=PROMISE, **DECODE)
    decode = DecodeSide(tree)
    req = request("a", ids)
    match = decode.promise(req)
    assert (match.l1_prefix_len, match.l2_host_hit_length, match.decode_prefix_len) == (0, 0, 6 * PAGE)
    done = decode.restore(req, match)
    assert done.hicache_restore_status == HiCacheRestoreResult.READY
    assert tree.pools.holds(done.hicache_restored_kv_indices, ids[: 6 * PAGE])


def fill(node: NodeProcess, mib: int) -> None:
    """Others store so much that nothing stays that may go."""
    rank = FakeRank(node.settings(deadline_s=7.5))
    try:
        for number in range(mib * (1 << 20) // rank.page_bytes // 16):
            pages = [page_hash((number, i)) for i in range(16)]
            wait_until(lambda: rank.store(b"o" * 32, pages).ok == b"\1" * 16, START_S, "they are stored")  # noqa: B023
    finally:
        rank.close()


def test_what_decode_has_promised_is_there_when_it_is_loaded_however_full_the_node_gets(
    start_node: Callable[..., NodeProcess], make_tree: MakeTree
) -> None:
    node = start_node(dram="16MiB")
    ids = prompt(1, 8)
    make_tree(node).compute_and_write(ids)
    tree = make_tree(node, extra=PROMISE, **DECODE)
    decode = DecodeSide(tree)
    req = request("a", ids)
    match = decode.look_up(req)
    fill(node, 64)
    assert report(tree)["evicted"] > 0
    decode._start_hicache_prefetch(req, match)
    assert match.decode_prefix_len == 8 * PAGE
    assert decode.restore(req, match).hicache_restore_status == HiCacheRestoreResult.READY
    assert tree.backend.client.broken == {}


def test_a_promised_page_that_is_gone_fails_the_restore_and_is_counted(node: NodeProcess, make_tree: MakeTree) -> None:
    ids = prompt(1, 8)
    prefill = make_tree(node)
    prefill.compute_and_write(ids)
    tree = make_tree(node, extra=PROMISE, **DECODE)
    decode = DecodeSide(tree)
    req = request("a", ids)
    match = decode.look_up(req)
    prefill.backend.clear()
    decode._start_hicache_prefetch(req, match)
    assert match.decode_prefix_len == 8 * PAGE, "SGLang does not ask again"
    assert decode.restore(req, match).hicache_restore_status == HiCacheRestoreResult.FAILED
    assert tree.backend.client.broken == {"evicted": 8}


def test_a_prefetch_that_sglang_declines_takes_the_promise_back_before_prefill_is_told(
    node: NodeProcess, make_tree: MakeTree
) -> None:
    ids = prompt(1, 8)
    make_tree(node).compute_and_write(ids)
    tree = make_tree(node, extra=PROMISE | {"promise_s": 2}, **DECODE)
    decode = DecodeSide(tree)
    req = request("a", ids)
    match = decode.look_up(req)
    assert match.decode_prefix_len == 8 * PAGE
    tree.controller.prefetch_tokens_occupied = tree.controller.prefetch_capacity_limit
    decode._start_hicache_prefetch(req, match)
    assert match.decode_prefix_len == 0, "prefill sends it all"
    assert report(tree)["promises"] == 8
    wait_until(lambda: report(tree)["promised"] == 0, START_S, "a promise that nobody takes up ends by time")
    assert report(tree)["promises_expired"] == 8


def test_a_prompt_below_the_threshold_is_promised_nothing_and_costs_no_question(node: NodeProcess, make_tree: MakeTree) -> None:
    ids = prompt(1, 8)
    make_tree(node).compute_and_write(ids)
    tree = make_tree(node, extra=PROMISE | {"prefetch_threshold": 256}, **DECODE)
    assert DecodeSide(tree).promise(request("a", ids)).decode_prefix_len == 0
    assert tree.backend._presence.identity().counts == {}


def test_l2_without_room_after_the_promise_fails_the_request(node: NodeProcess, make_tree: MakeTree) -> None:
    """SGLang takes room for a hit only when the lookup of the prefetch has answered, which is after prefill was told."""
    ids = prompt(1, 8)
    make_tree(node).compute_and_write(ids)
    tree = make_tree(node, extra=PROMISE, **DECODE)
    decode = DecodeSide(tree)
    req = request("a", ids)
    taken = tree.l2.alloc(tree.l2.available_size() - 2 * PAGE)
    match = decode.promise(req)
    assert match.decode_prefix_len == 8 * PAGE
    done = decode.restore(req, match)
    assert done.hicache_restore_status == HiCacheRestoreResult.FAILED
    assert tree.backend.client.broken == {}, "the pool has kept its word"
    tree.l2.free(taken)


# --------------------------------------------------------------------------- what the host pool is used for


def test_a_miss_takes_no_memory_and_drives_nothing_out_of_l2(
    node: NodeProcess, make_tree: MakeTree, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = make_tree(node, device_pages=16, extra={"promise_s": 60})
    known = [prompt(number, 4) for number in range(1, 12)]
    for ids in known:
        tree.compute_and_write(ids)
    tree.tree.evict(EvictParams(num_tokens=16 * PAGE))
    assert [tree.match(ids).host_hit_length for ids in known] == [4 * PAGE] * len(known)
    free = tree.l2.available_size()
    assert free < 8 * PAGE, "what misses do not have room for would drive something out"
    seen: list[int] = []
    ask = tree.backend.batch_exists

    def asked(*args: Any, **more: Any) -> Any:
        answer = ask(*args, **more)
        seen.append(tree.l2.available_size())
        return answer

    monkeypatch.setattr(tree.backend, "batch_exists", asked)
    for number in range(10):
        assert tree.prefetch(request(str(number), prompt(100 + number, 8))) == 0
    assert seen == [free] * 10
    assert tree.l2.available_size() == free
    assert [tree.match(ids).host_hit_length for ids in known] == [4 * PAGE] * len(known)
    figures = report(tree)
    assert (figures["promises"], figures["pinned_bytes"]) == (0, 0), "neither does the node keep anything for it"


def test_a_hit_that_l2_has_no_room_for_is_shortened_to_what_has_room_and_sglang_counts_the_rest(
    node: NodeProcess, make_tree: MakeTree
) -> None:
    ids = prompt(1, 8)
    make_tree(node).compute_and_write(ids)
    tree = make_tree(node)
    lost: list[tuple[int, str]] = []
    tree.tree.enable_storage_metrics = True
    tree.tree.storage_metrics_collector = mock.Mock(
        log_storage_prefetch_unfulfilled_tokens=lambda count, reason: lost.append((count, reason))
    )
    taken = tree.l2.alloc(tree.l2.available_size() - 3 * PAGE)
    assert tree.prefetch(request("a", ids)) == 3 * PAGE
    assert lost == [(5 * PAGE, "host_capacity")]
    counts = tree.backend._presence.identity().counts
    assert (counts["found"], counts["loaded"]) == (8, 3), "status shows the difference"
    tree.l2.free(taken)


@pytest.mark.parametrize("ratio", [0.5, 3.0])
def test_with_a_host_pool_smaller_than_the_devices_writes_go_on_and_a_part_of_the_pages_is_never_written(
    node: NodeProcess, make_tree: MakeTree, ratio: float, caplog: pytest.LogCaptureFixture
) -> None:
    """SGLang takes no page out of L2 that is in L1 too: what is computed while L2 is full of such pages has no room there."""
    tree = make_tree(node, device_pages=32, hicache_ratio=ratio)
    written: list[int] = []
    for number in range(1, 25):
        tree.compute_and_write(prompt(number, 4))
        written.append(tree.backend._presence.identity().counts["stored"])
    small = ratio < 1
    assert (written[-1] < 4 * 24) is small
    assert written[-1] > written[11] > 0, "it goes on"
    assert ("smaller than the device's" in caplog.text) is small, "and the engine's log says why"


# --------------------------------------------------------------------------- pairs that SGLang does not connect


@pytest.mark.parametrize(
    ("theirs", "words"),
    [({"page_size": 64}, "Page size mismatch"), ({"kv_cache_dtype": "fp8_e4m3"}, "KV cache dtype mismatch")],
)
def test_a_pair_that_cannot_send_each_other_kv_is_refused_by_sglang(
    monkeypatch: pytest.MonkeyPatch, theirs: dict[str, Any], words: str
) -> None:
    """It is an exception on the scheduler's thread. What the two store is never compared there."""
    fields = dict.fromkeys((each.name for each in dataclasses.fields(conn.PrefillServerInfo)), 1)
    told = fields | {"page_size": PAGE, "kv_cache_dtype": "auto"} | theirs
    monkeypatch.setattr(conn.requests, "get", lambda *_, **__: SimpleNamespace(status_code=200, json=lambda: told))
    decode = SimpleNamespace(prefill_info_table={}, kv_args=SimpleNamespace(page_size=PAGE), kv_cache_dtype_str="auto")
    with pytest.raises(RuntimeError, match=words):
        conn.CommonKVManager.try_ensure_parallel_info(decode, "prefill:8998")
