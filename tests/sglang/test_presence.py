"""Who an engine says it is: role, writer, what its page hashes are of, by SGLang's own settings; and what it warns of."""

from __future__ import annotations

import json
import logging
from array import array
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.arg_groups.kv_cache_hook import handle_cache_compatibility
from sglang.srt.disaggregation.decode_kvcache_offload_manager import DecodeKVCacheOffloadManager
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.utils import compute_node_hash_values, get_hash_str
from sglang.srt.runtime_context import get_context
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from hicache_mooncake import sharing
from hicache_mooncake.backend import HiCacheMooncake
from hicache_mooncake.client import engine_facts, introduction
from hicache_mooncake.client.promised import PROMISE_S
from hicache_mooncake.protocol import RankIdentity
from hicache_mooncake.sharing import BIGRAMS, DECODE, OFFLOAD, PLAIN, PREFILL, SETTLED_S, TREE, SharingTable
from tests.conftest import START_S, NodeProcess, wait_until
from tests.sglang.conftest import MakeBackend
from tests.sglang.pools import PAGE_SIZE, fill, indices, key, mha_pool, mla_pool, storage_config

OFFLOADS: dict[str, Any] = {"disaggregation_mode": "decode", "disaggregation_decode_enable_offload_kvcache": True}
RADIX: dict[str, Any] = {
    "disaggregation_mode": "decode",
    "disaggregation_decode_enable_radix_cache": True,
    "enable_hierarchical_cache": True,
}
PREFILLS: dict[str, Any] = {"disaggregation_mode": "prefill", "enable_hierarchical_cache": True}


@pytest.fixture
def decode_offload(node: NodeProcess) -> Callable[[Any], HiCacheMooncake]:
    """A backend as SGLang's decode offload registers it: the anchor alone."""

    def make(pool: Any) -> HiCacheMooncake:
        backend = HiCacheMooncake(storage_config(extra_config={"socket": node.socket, "interface_v1": 1}), pool)
        backend.register_mem_pool_host(pool)
        backend.on_host_pools_registered()
        return backend

    return make


def identity(backend: HiCacheMooncake) -> RankIdentity:
    return backend._presence.identity()


# --------------------------------------------------------------------------- what page hashes are of


def offload_hashes(tokens: list[int]) -> list[str]:
    """As the decode offload names its pages, by its own code."""
    manager = SimpleNamespace(page_size=PAGE_SIZE, cache_controller=SimpleNamespace(get_hash_str=get_hash_str))
    request = SimpleNamespace(extra_key=None, cache_salt=None)
    hashes: list[str] = DecodeKVCacheOffloadManager._compute_prefix_hash(manager, request, tokens)
    return hashes


def tree_hashes(tokens: list[int], *, eagle: bool) -> list[str]:
    """As the tree names them, by its own code."""
    view, _ = RadixKey(array("q", tokens)).maybe_to_bigram_view(eagle)
    pages = len(view) // PAGE_SIZE * PAGE_SIZE
    hashes: list[str] = compute_node_hash_values(SimpleNamespace(parent=None, key=view[:pages]), PAGE_SIZE)
    return hashes


def test_what_decode_offload_writes_an_eagle_tree_never_asks_for() -> None:
    tokens = list(range(100, 100 + 4 * PAGE_SIZE + 1))
    written = offload_hashes(tokens[: 4 * PAGE_SIZE])
    assert tree_hashes(tokens, eagle=False) == written
    asked = tree_hashes(tokens, eagle=True)
    assert len(asked) == 4
    assert not set(asked) & set(written)


@pytest.mark.parametrize("name", [None, "NEXTN", *(member.name for member in SpeculativeAlgorithm)])
def test_which_algorithms_hash_pairs_is_sglangs_to_say(name: str | None) -> None:
    with get_context().override_server_args(speculative_algorithm=name):
        facts = engine_facts.read(storage_config())
    assert facts.eagle is SpeculativeAlgorithm.from_string(name).is_eagle()
    assert engine_facts._is_eagle(name) is facts.eagle


def test_without_sglangs_word_the_name_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_facts, "loaded", lambda module, name: None)
    names = {name: engine_facts._is_eagle(name) for name in ("EAGLE", "eagle3", "nextn", "NGRAM", "STANDALONE", None)}
    assert names == {"EAGLE": True, "eagle3": True, "nextn": True, "NGRAM": False, "STANDALONE": False, None: False}


def test_a_tree_with_recurrent_states_has_no_pairs(make_backend: MakeBackend) -> None:
    with get_context().override_server_args(**PREFILLS, speculative_algorithm="EAGLE"):
        backend = make_backend(mha_pool())
        assert identity(backend).chain == BIGRAMS
        backend.register_mem_host_pool_v2(mla_pool(), "mamba")  # any pool will do: its name says what it is
        assert identity(backend).chain == PLAIN


# --------------------------------------------------------------------------- who it is


def test_an_engine_that_does_both(make_backend: MakeBackend) -> None:
    found = identity(make_backend(mha_pool(), tp_rank=1, tp_size=4, pp_size=2))
    assert (found.role, found.writer, found.chain) == ("", TREE, PLAIN)
    assert (found.rank, found.size) == ((1, 0, 0), (4, 2, 1))
    (pool,) = found.pools
    assert pool.pool == "kv"
    assert pool.fields["page_size"] == str(PAGE_SIZE)
    assert pool.fields["model"] == "tiny"


def test_both_sides_of_a_cluster(make_backend: MakeBackend, decode_offload: Callable[[Any], HiCacheMooncake]) -> None:
    with get_context().override_server_args(**PREFILLS):
        prefill = identity(make_backend(mha_pool()))
    with get_context().override_server_args(**OFFLOADS, speculative_algorithm="EAGLE"):
        offload = decode_offload(mha_pool())
        decode = identity(offload)
    with get_context().override_server_args(**RADIX, speculative_algorithm="EAGLE"):
        radix = identity(make_backend(mha_pool()))
    offload.close()
    assert (prefill.role, prefill.writer, prefill.chain) == (PREFILL, TREE, PLAIN)
    assert (decode.role, decode.writer, decode.chain) == (DECODE, OFFLOAD, PLAIN)
    assert (radix.role, radix.writer, radix.chain) == (DECODE, TREE, BIGRAMS)
    assert prefill.pools == decode.pools == radix.pools
    assert len({prefill.engine, decode.engine}) == 2


def test_only_a_decode_server_with_a_tree_counts_on_what_a_lookup_found(
    make_backend: MakeBackend, decode_offload: Callable[[Any], HiCacheMooncake]
) -> None:
    made = {}
    for name, arguments in (("prefill", PREFILLS), ("tree", RADIX)):
        with get_context().override_server_args(**arguments):
            made[name] = make_backend(mha_pool()).client._told
    with get_context().override_server_args(**OFFLOADS):
        offload = decode_offload(mha_pool())
    offload.close()
    assert made["tree"] is not None
    assert made["tree"].seconds == PROMISE_S
    assert made["prefill"] is offload.client._told is None


def test_an_engine_with_both_ways_of_writing_has_a_backend_for_each(
    make_backend: MakeBackend, decode_offload: Callable[[Any], HiCacheMooncake], caplog: pytest.LogCaptureFixture
) -> None:
    with get_context().override_server_args(**(OFFLOADS | RADIX)):
        offload = decode_offload(mha_pool())
        tree = make_backend(mha_pool())
    assert identity(offload).writer == OFFLOAD
    assert identity(tree).writer == TREE
    assert "requests that are offloaded never enter the radix cache" in caplog.text
    offload.close()


def compared(*backends: HiCacheMooncake) -> list[list[tuple[str, str, str]]]:
    table = SharingTable()
    for number, backend in enumerate(backends):
        table.put(str(number), [identity(backend)], 0.0)
    return [pair.differences for pair in table.verdict(SETTLED_S).unshared]


def test_heads_as_objects_are_told_of_as_such(make_backend: MakeBackend) -> None:
    extra = {"share_across_tp": True, "kv_heads": 2}
    with get_context().override_server_args(**PREFILLS):
        whole = make_backend(mha_pool(), extra)
        plain = make_backend(mha_pool())
    fields = identity(whole).pools[0].fields
    assert (fields["share_across_tp"], fields["kv_heads"]) == ("true", "2")
    assert "tp_size" not in fields
    with get_context().override_server_args(**RADIX):
        same = make_backend(mha_pool("layer_first"), extra)
    assert compared(whole, same) == [], "another layout, and shared all the same"
    assert compared(plain, same) == [[("share_across_tp", "", "true")]]


def test_copies_through_tensors_are_told_of_as_such(make_backend: MakeBackend) -> None:
    with get_context().override_server_args(**PREFILLS):
        zero_copy = make_backend(mha_pool(), {"backend_name": "mooncake"})
    with get_context().override_server_args(**RADIX):
        tensors = make_backend(mha_pool(), {"backend_name": "mooncake", "interface_v1": 0})
    (differences,) = compared(zero_copy, tensors)
    assert ("storage_format", "", "+data_page") in differences


def test_an_engine_that_is_off_says_why(make_backend: MakeBackend) -> None:
    backend = make_backend(mha_pool())
    backend._pools.weights_changing()
    found = identity(backend)
    assert found.off == "the weights are being updated"
    assert found.pools == []


def test_pages_are_counted(make_backend: MakeBackend) -> None:
    pool = mha_pool()
    backend = make_backend(pool)
    names = [key(i) for i in range(4)]
    for page, name in enumerate(names):
        fill(pool, page, name)
    assert backend.batch_set_v1(names[:3], indices(0, 1, 2)) == [True] * 3
    assert backend.batch_exists(names) == 3
    assert backend.batch_get_v1(names, indices(0, 1, 2, 3)) == [True, True, True, False]
    counts = {"offered": 3, "stored": 3, "lookups": 1, "asked": 4, "found": 3, "wanted": 4, "loaded": 3}
    assert identity(backend).counts == counts


def test_an_engine_over_several_hosts_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = SimpleNamespace(nnodes=2, dist_init_addr="10.0.0.1:5000", port=30000)
    monkeypatch.setattr(engine_facts.weights, "server_args", lambda: arguments)
    first = engine_facts.read(storage_config())
    monkeypatch.setattr(engine_facts.os, "getppid", lambda: 4711)
    monkeypatch.setattr(engine_facts.socket, "gethostname", lambda: "the-other-host")
    assert engine_facts.read(storage_config()).id == first.id
    assert "10.0.0.1:5000 (2 hosts)" in first.label
    arguments.dist_init_addr = "10.0.0.9:5000"
    assert engine_facts.read(storage_config()).id != first.id
    arguments.nnodes = 1
    here = engine_facts.read(storage_config()).id
    arguments.port = 30001
    assert engine_facts.read(storage_config()).id != here, "two servers that one process has started"


@pytest.mark.parametrize(
    ("given", "found"),
    [
        (None, "256"),
        ("{}", "256"),
        ('{"prefetch_threshold": 16}', "16"),
        ("not json", "?"),
        ("@/no/such/file.json", "?"),
        ("@/etc/l3.toml", "256, or as in /etc/l3.toml"),
    ],
)
def test_the_prefetch_threshold_is_read_where_sglang_reads_it(given: str | None, found: str) -> None:
    with get_context().override_server_args(hicache_storage_backend_extra_config=given):
        assert engine_facts.read(storage_config()).threshold == found
    assert engine_facts.read(storage_config(extra_config={"prefetch_threshold": 32})).threshold == "32", "decode offload"


# --------------------------------------------------------------------------- what it says at start-up

FACTS = engine_facts.EngineFacts(b"e", "decode engine of tiny on host:1", write_policy="write_through")


def warnings(writer: str = TREE, host: int = 4096, device: int = 1024, **fields: Any) -> str:
    facts = engine_facts.dataclasses.replace(FACTS, **fields)
    return " | ".join(engine_facts.contradictions(facts, writer, PLAIN, 64, host, device))


def test_a_sound_configuration_is_warned_of_nothing() -> None:
    assert warnings() == ""
    assert warnings(role=PREFILL) == ""
    assert warnings(writer=OFFLOAD, role=DECODE, offload=True, host=10) == "", "its host pool is a buffer"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"writer": OFFLOAD, "role": DECODE, "offload": True, "eagle": True}, "decode offload with EAGLE"),
        ({"writer": OFFLOAD, "role": DECODE, "offload": True, "stride": "256"}, "up to 255 tokens at the end of each"),
        ({"writer": OFFLOAD, "role": DECODE, "offload": True, "stride": "32"}, "=32 has no effect"),
        ({"writer": OFFLOAD, "role": DECODE, "offload": True, "stride": "100"}, "=100 has no effect"),
        ({"role": PREFILL, "write_policy": "write_through_selective"}, "a second time"),
        ({"role": PREFILL, "write_policy": "write_back"}, "when the GPU evicts it"),
        ({"host": 512}, "the host pool (512 tokens) is smaller than the device's (1,024)"),
        ({"role": DECODE, "offload": True, "radix": True}, "Take one of them"),
    ],
)
def test_settings_without_effect_or_against_each_other_are_named(fields: dict[str, Any], words: str) -> None:
    assert words in warnings(**fields)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (OFFLOADS, "only supported when hicache-storage-backend is provided"),
        (
            OFFLOADS | {"disaggregation_mode": "prefill", "hicache_storage_backend": "mooncake"},
            "only supported for decode side",
        ),
        ({"enable_hierarchical_cache": True, "disable_radix_cache": True}, "mutually exclusive"),
    ],
)
def test_what_could_have_no_effect_sglang_refuses_itself(arguments: dict[str, Any], words: str) -> None:
    with get_context().override_server_args(**arguments) as given, pytest.raises(ValueError, match=words):
        handle_cache_compatibility(given)


def test_a_stride_is_a_whole_number_of_pages() -> None:
    strides = {given: engine_facts.dataclasses.replace(FACTS, stride=given).stride_tokens(64) for given in ("", "0", "-1", "x")}
    assert strides == dict.fromkeys(strides, 64)
    assert engine_facts.dataclasses.replace(FACTS, stride="200").stride_tokens(64) == 192


def test_the_configuration_in_effect_is_one_line_of_the_first_rank(
    make_backend: MakeBackend, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    extra = json.dumps({"prefetch_threshold": 16})
    with get_context().override_server_args(
        **PREFILLS, hicache_storage_backend_extra_config=extra, hicache_storage_prefetch_policy="best_effort"
    ):
        make_backend(mha_pool(), tp_rank=1, tp_size=2)
        assert "prefetch_threshold" not in caplog.text
        make_backend(mha_pool(), tp_rank=0, tp_size=2)
    (line,) = [record.getMessage() for record in caplog.records if "prefetch_threshold" in record.getMessage()]
    assert line.startswith("prefill engine of tiny on ")
    assert f"page_size {PAGE_SIZE}; page hashes of tokens" in line
    assert "prefetch policy best_effort; prompts with less than 16 tokens to compute are not looked up" in line
    assert "host pool of 384 tokens, 12.0 times the device's" in line


def test_the_engines_own_log_says_that_it_can_share_with_nobody(
    node: NodeProcess, make_backend: MakeBackend, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """End to end but for the engine: real backends, a real node in a process of its own, which waits as long as it does."""
    monkeypatch.setattr(introduction, "FIRST_S", 0.1)
    monkeypatch.setattr(introduction, "EVERY_S", 0.5)
    with get_context().override_server_args(**PREFILLS):
        make_backend(mha_pool("page_first"))
    with get_context().override_server_args(**RADIX):
        make_backend(mha_pool("page_first_direct"))
    words = "layout is page_first in prefill and page_first_direct in decode"

    def said() -> list[str]:
        return [record.name for record in caplog.records if words in record.getMessage()]

    wait_until(lambda: len(said()) == 2, START_S + sharing.SETTLED_S, "both engines say it")
    assert set(said()) == {"hicache_mooncake.client.presence"}
    assert node.log is not None
    wait_until(lambda: words in node.log.read_text(), START_S, "so does the node")  # type: ignore[union-attr]
