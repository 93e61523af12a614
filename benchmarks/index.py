"""What a node's index costs: `python -m benchmarks.index [--pages 1000000] [--batch 128] [--policy NAME]`.

Fills the store of a node with pages of one granule and one part, and prints the memory a page takes (resident, so everything
counts: record, hash, checksum, order, allocator), lookups of 128 keys, and the longest time that any one call needs, which is
how long a node's lock is held: all in CPU time of the thread, so that a busy machine does not show.
"""

from __future__ import annotations

import argparse
import gc
import random
import time
from collections.abc import Callable, Iterator
from statistics import median

from hicache_mooncake.node.allocator import GRANULE
from hicache_mooncake.node.policy import DEFAULT_POLICY, POLICIES
from hicache_mooncake.node.store import Store

NAMESPACE = b"n" * 16


def resident_bytes() -> int:
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmRSS"))


def chains(rng: random.Random, pages: int, batch: int) -> Iterator[bytes]:
    for first in range(0, pages, batch):
        yield rng.randbytes(32 * min(batch, pages - first))


def timed(call: Callable[[], object]) -> float:
    """Milliseconds."""
    started = time.thread_time()
    call()
    return (time.thread_time() - started) * 1e3


def write(store: Store, blob: bytes) -> None:
    txn, status, _ = store.reserve(1, NAMESPACE, blob, GRANULE)
    writes = status.count(1)
    store.commit(1, txn, b"\x01" * writes, [int.from_bytes(blob[at * 32 : at * 32 + 8], "little") for at in range(writes)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pages", type=int, default=1_000_000)
    parser.add_argument("--batch", type=int, default=128, help="pages stored together")
    parser.add_argument("--policy", choices=list(POLICIES), default=DEFAULT_POLICY)
    options = parser.parse_args()
    pages, batch = options.pages, options.batch
    store = Store(pages * GRANULE, policy=options.policy, high_watermark=1.0, low_watermark=0.99)
    before = resident_bytes()
    stores = [timed(lambda blob=blob: write(store, blob)) for blob in chains(random.Random(0), pages, batch)]  # type: ignore[misc]
    print(f"{store.objects} pages, {(resident_bytes() - before) / store.objects:.0f} bytes a page")
    asked = [blob for at, blob in enumerate(chains(random.Random(0), pages, batch)) if at % max(1, pages // batch // 500) == 0]
    figures = {
        "store of new pages": stores,
        "lookup": [timed(lambda blob=blob: store.present(NAMESPACE, blob)) for blob in asked],  # type: ignore[misc]
        "lookup that touches nothing": [
            timed(lambda blob=blob: store.present(NAMESPACE, blob, touch=False))  # type: ignore[misc]
            for blob in asked
        ],
    }
    located: list[float] = []
    for blob in asked:
        located.append(timed(lambda blob=blob: store.release(1, store.locate(1, NAMESPACE, blob, GRANULE, 0.0)[0])))  # type: ignore[misc]
    figures["locate and release"] = located
    parts = store.snapshot_parts()
    steps: list[float] = []
    while parts is not None:
        started = time.thread_time()
        if next(parts, None) is None:
            break
        steps.append((time.thread_time() - started) * 1e3)
    figures["a step of the snapshot"] = steps
    figures["store that evicts"] = [
        timed(lambda blob=blob: write(store, blob))  # type: ignore[misc]
        for blob in chains(random.Random(1), min(pages, 50_000), batch)
    ]
    figures["garbage collection"] = [timed(gc.collect) for _ in range(3)]
    figures["clear"] = [timed(lambda: store.clear(NAMESPACE))]
    figures["a slice of the sweep"] = [timed(store.sweep) for _ in range(1000)]
    for what, times in figures.items():
        print(f"{what:28} median {median(times):8.3f} ms   longest {max(times):8.3f} ms")


if __name__ == "__main__":
    main()
