"""The peer's side of `benchmarks.master`: a Mooncake client, run by the Python that has Mooncake (it needs nothing else).

Arguments: master's address, seed, keys, and 1 to put all keys first. Then each line on stdin is a number of seconds to ask for,
answered by a line of JSON: keys a second, median and 99th percentile of a batch's seconds.
"""

import json
import random
import sys
import time

from mooncake.store import MooncakeDistributedStore

BATCH = 128
VALUE = b"v" * 64


def main() -> None:
    address, seed, count, fill = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4] == "1"
    keys = [random_bytes.hex() for random_bytes in _hashes(seed, count)]
    store = MooncakeDistributedStore()
    segment = (count * 256 if fill else 0) + (64 << 20)
    if store.setup("127.0.0.1", "P2PHANDSHAKE", segment, 64 << 20, "tcp", "", address):
        raise SystemExit("mooncake: setup failed")
    if fill:
        for at in range(0, count, 500):
            part = keys[at : at + 500]
            if store.put_batch(part, [VALUE] * len(part)):
                raise SystemExit("mooncake: put_batch failed")
    print(json.dumps("ready"), flush=True)
    rng = random.Random()
    for line in sys.stdin:
        seconds = float(line)
        times, started = [], time.perf_counter()
        while time.perf_counter() - started < seconds:
            at = rng.randrange(count - BATCH)
            before = time.perf_counter()
            found = store.batch_is_exist(keys[at : at + BATCH])
            times.append(time.perf_counter() - before)
            if sum(found) != BATCH:
                raise SystemExit(f"mooncake: only {sum(found)} of {BATCH} keys exist")
        took = time.perf_counter() - started
        times.sort()
        print(json.dumps([len(times) * BATCH / took, times[len(times) // 2], times[len(times) * 99 // 100]]), flush=True)
    store.close()


def _hashes(seed: int, count: int) -> list[bytes]:
    blob = random.Random(seed).randbytes(32 * count)
    return [blob[at : at + 32] for at in range(0, len(blob), 32)]


if __name__ == "__main__":
    main()
