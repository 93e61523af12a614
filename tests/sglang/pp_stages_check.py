"""One pipeline stage of a prefill server over the pool: run twice, with rank 0 and 1 (`test_pp_stages.py` does).

SGLang's own tree, controller and process groups. Stage 1 sees the request when stage 0 has long looked it up and stage 0's node
has been filled by others. Prints one JSON object.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import distributed

from hicache_mooncake.config import load_settings
from hicache_mooncake.testing.local import FakeRank, page_hash
from tests.sglang.trees import PAGE, Tree, configured, prompt, request

IDS = prompt(1, 8)
WRITTEN_PAGES = (8, 6)
"""By stage."""
SKEW_S = 2.0
LATE, FILLED_MIB = 1, 64


def together(tree: Tree, condition: Callable[[], object]) -> None:
    """Both stages step alike, as a pipeline's do, until it is so on both."""
    done = torch.zeros(1, dtype=torch.int)
    while not done:
        tree.tree.check_hicache_events()
        done[0] = bool(condition())
        distributed.all_reduce(done, op=distributed.ReduceOp.MIN)
        time.sleep(0.01)


def fill(socket: str) -> None:
    rank = FakeRank(load_settings({}, {}, {"socket": socket, "node": "external", "deadline_s": 7.5})[0])
    for number in range(FILLED_MIB * (1 << 20) // rank.page_bytes // 16):
        while rank.store(b"o" * 32, [page_hash((number, i)) for i in range(16)]).ok != b"\1" * 16:
            time.sleep(0.05)
    rank.close()


def stage(rank: int, socket: str, group: Any) -> dict[str, Any]:
    tree = Tree(pp_cache_group=group, pp_rank=rank, pp_size=2)
    client = tree.backend.client
    tree.compute(IDS[: WRITTEN_PAGES[rank] * PAGE])
    together(tree, lambda: tree.backend._presence.identity().counts.get("stored") == WRITTEN_PAGES[rank] and tree.idle())
    tree.forget()
    req = request("a", IDS)
    distributed.barrier()
    if rank == LATE:
        distributed.barrier()
        time.sleep(SKEW_S)
    tree.start_prefetch(req)
    if rank != LATE:
        while "lookups" not in tree.backend._presence.identity().counts:
            time.sleep(0.01)
        fill(socket)
        distributed.barrier()
    together(tree, lambda: tree.tree.check_prefetch_progress(req.cache_request_handle))
    loaded = tree.tree.pop_prefetch_loaded_tokens(req.cache_request_handle)
    right = tree.load(IDS[:loaded])
    counts = tree.backend._presence.identity().counts
    report = client.status()
    assert report is not None
    distributed.barrier()
    found = {"loaded": loaded, "right": right, "found": counts["found"], "broken": client.broken}
    tree.close()
    return found | {"evicted": report.node["evicted"]}


def main(rank: int, store: str, socket: str, promise_s: str) -> None:
    distributed.init_process_group("gloo", store=distributed.FileStore(store, 2), rank=rank, world_size=2)
    group = distributed.new_group([0, 1], backend="gloo")
    extra = {"promise_s": float(promise_s), "deadline_s": 7.5}
    parallel = {"pp_rank": rank, "pp_size": 2}
    with configured(socket, extra, parallel, disaggregation_mode="prefill"):
        print(json.dumps(stage(rank, socket, group)), flush=True)
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
