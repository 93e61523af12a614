"""P03: requests with an adapter, an extra key or a salt share no page with others, on every way into L3 and out of it.

Older releases, whose hashes do not know whose pages they name, run `isolation_check.py` in a process each. In this one the
hashes do, and SGLang's own functions are asked, P41 too: writer and reader agree with and without bigrams.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import types
from array import array
from pathlib import Path
from typing import Any

import pytest

from hicache_mooncake.client import isolation
from tests.conftest import ROOT, environment
from tests.sglang.conftest import SHIMS

PAGE = 16
TOKENS = list(range(1000, 1000 + 4 * PAGE))
NAMESPACES: dict[str, dict[str, str]] = {
    "": {},
    "loraA": {"extra_key": "loraA"},
    "saltT1": {"cache_salt": "saltT1"},
    "loraA with saltT1": {"extra_key": "loraA", "cache_salt": "saltT1"},
}
KEPT_OUT = {"write": 0, "prefetch": 0, "decode": [0, 0], "decode offload": [0, 0]}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("version", ["0.5.9", "0.5.14"])
def test_a_release_without_seeded_hashes_keeps_them_out(version: str) -> None:
    wheel = Path(sys.prefix) / f"sglang-{version}"
    if not wheel.is_dir():
        pytest.skip(f"sglang {version} is not in {wheel}: make versions")
    env = environment() | {"SGLANG_USE_CPU_ENGINE": "1"}
    env["PYTHONPATH"] = os.pathsep.join([str(wheel), str(SHIMS), env["PYTHONPATH"]])
    command = [sys.executable, "-W", "ignore", "-m", "tests.sglang.isolation_check"]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["version"].startswith(version)
    assert result["refusal"] == ""
    nobodys = result["before"]["nobody's"]
    assert {"HiRadixCache write", "HiRadixCache prefetch", "decode offload"} <= nobodys.keys()
    assert all(nobodys.values()), "the base model's pages go every way"
    for state in ("before", "after"):
        assert all(paths == nobodys for paths in result[state].values()), "SGLang itself lets all of them through"
    during = result["during"]
    assert during.pop("nobody's") == nobodys
    assert during.keys() == {"an adapter's", "a tenant's", "an empty key's"}
    for paths in during.values():
        assert paths == {way: next(out for end, out in KEPT_OUT.items() if way.endswith(end)) for way in nobodys}
    assert result["unvouched"] == [1, 0, 0], "an operation that is answered, no page in it; no prefetch"
    assert "Scheduler._prefetch_kvcache" in result["without"]
    assert "0.5.20" in result["without"]


def test_a_release_with_seeded_hashes_is_left_alone() -> None:
    from sglang.srt.managers.cache_controller import HiCacheController
    from sglang.srt.mem_cache import utils

    before = HiCacheController.write_storage
    assert callable(utils.storage_namespace_seed)
    assert isolation.isolate() == ""
    assert HiCacheController.write_storage is before


def writer(namespace: dict[str, str], *, bigram: bool = False, split: int = 0) -> list[str]:
    """Keys that a tree gives the pages of a node, or of two where it was split, under the root."""
    from sglang.srt.mem_cache.radix_cache import RadixKey
    from sglang.srt.mem_cache.utils import compute_node_hash_values

    key = RadixKey(array("q", TOKENS), is_bigram=bigram, **namespace).page_aligned(PAGE)
    parent = types.SimpleNamespace(key=RadixKey(array("q")), hash_value=[], parent=None)
    keys: list[str] = []
    for part in (key[:split], key[split:]) if split else (key,):
        node = types.SimpleNamespace(key=part, parent=parent, hash_value=None)
        node.hash_value = compute_node_hash_values(node, PAGE)
        keys += node.hash_value
        parent = node
    return keys


class Asked:
    """A backend that has everything, and remembers what it was asked for."""

    def __init__(self) -> None:
        self.keys: list[str] = []

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        self.keys += keys
        return len(keys)


def reader(namespace: dict[str, str], *, bigram: bool = False, hybrid: bool = True) -> tuple[list[str], list[str]]:
    """Keys that a prefetch asks for, given tokens alone, and those that it then reads."""
    from sglang.srt.managers import cache_controller
    from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle
    from sglang.srt.mem_cache.hybrid_cache import hybrid_cache_controller
    from sglang.srt.mem_cache.radix_cache import RadixKey

    key = RadixKey(array("q", TOKENS), is_bigram=bigram, **namespace).page_aligned(PAGE)
    operation: Any
    if hybrid:
        kind = hybrid_cache_controller.HybridCacheController
        operation = hybrid_cache_controller.PrefetchOperation(CacheRequestHandle("r", 0), key)
    else:
        kind = cache_controller.HiCacheController
        operation = cache_controller.PrefetchOperation("r", key)
    controller = kind.__new__(kind)
    controller.page_size, controller.storage_backend = PAGE, Asked()
    read = kind._storage_hit_query(controller, operation)[0]
    return controller.storage_backend.keys, read


def decode_offload(namespace: dict[str, str]) -> list[str]:
    from sglang.srt.disaggregation.decode_kvcache_offload_manager import DecodeKVCacheOffloadManager
    from sglang.srt.mem_cache.utils import get_hash_str

    manager = DecodeKVCacheOffloadManager.__new__(DecodeKVCacheOffloadManager)
    manager.page_size, manager.cache_controller = PAGE, types.SimpleNamespace(get_hash_str=get_hash_str)
    request = types.SimpleNamespace(**({"extra_key": None, "cache_salt": None} | namespace))
    prompt, answer = TOKENS[: 2 * PAGE], TOKENS[2 * PAGE :]
    keys: list[str] = manager._compute_prefix_hash(request, prompt)
    return [*keys, *manager._compute_prefix_hash(request, answer, keys[-1])]


def test_four_namespaces_have_four_chains_on_every_way() -> None:
    chains = {}
    for name, namespace in NAMESPACES.items():
        chain = writer(namespace)
        assert len(set(chain)) == len(TOKENS) // PAGE
        assert writer(namespace, split=PAGE) == chain, "a split keeps the chain"
        assert reader(namespace) == (chain, chain)
        assert reader(namespace, hybrid=False) == (chain, chain)
        assert decode_offload(namespace) == chain
        chains[name] = set(chain)
    assert len(set.union(*chains.values())) == len(NAMESPACES) * len(TOKENS) // PAGE, "no key in two of them"


@pytest.mark.parametrize("name", NAMESPACES)
@pytest.mark.parametrize("bigram", [False, True])
def test_a_writers_tree_and_a_readers_tokens_make_the_same_keys(name: str, bigram: bool) -> None:
    """P41. With bigrams (EAGLE) the last token begins no pair, so its page is not whole."""
    namespace = NAMESPACES[name]
    chain = writer(namespace, bigram=bigram)
    assert len(chain) == len(TOKENS) // PAGE - int(bigram)
    assert writer(namespace, bigram=bigram, split=PAGE) == chain
    assert reader(namespace, bigram=bigram) == (chain, chain)
    assert not set(chain) & set(writer(namespace, bigram=not bigram))
