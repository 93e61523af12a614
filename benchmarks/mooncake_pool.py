"""The peer's side of `make bench`: a client of the Mooncake store, run by the Python that has Mooncake (it needs nothing else).

Arguments: the master's address and a kind: `owner` lends memory and waits, `local` holds the pages in its own process, `remote`
uses the owner's over TCP, `dummy` those of a `mooncake_client` on this host over shared memory, whose address follows. Then
each line on stdin is `put BYTES COUNT` or `get BYTES COUNT`, answered by a line of JSON: the seconds that one call took.
"""

import ctypes
import json
import mmap
import os
import sys
import time

from mooncake.store import MooncakeDistributedStore

POOL = 256 << 20
SEGMENT = 1 << 30


def main() -> None:
    address, kind = sys.argv[1], sys.argv[2]
    store = MooncakeDistributedStore()
    if kind == "dummy":
        failed = store.setup_dummy(2 * POOL, 16 << 20, sys.argv[3])
        memory = 0 if failed else store.alloc_from_mem_pool(POOL)
        failed = failed or store.register_buffer(memory, POOL)
    else:
        segment = SEGMENT if kind in ("owner", "local") else 0
        failed = store.setup("127.0.0.1", "P2PHANDSHAKE", segment, 64 << 20, "tcp", "", address)
        mapping = mmap.mmap(-1, POOL)
        memory = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
        failed = failed or (kind != "owner" and store.register_buffer(memory, POOL))
    if failed:
        raise SystemExit(f"mooncake: setup of {kind} failed with {failed}")
    ctypes.memset(memory, 1, POOL)
    print(json.dumps("ready"), flush=True)
    keys: list[str] = []
    for line in sys.stdin:
        op, page, count = line.split()[0], *map(int, line.split()[1:])
        places, sizes = [memory + at * page for at in range(count)], [page] * count
        if op == "put":
            store.remove_all(True)
            keys = [os.urandom(32).hex() for _ in range(count)]
        started = time.perf_counter()
        done = store.batch_put_from(keys, places, sizes) if op == "put" else store.batch_get_into(keys, places, sizes)
        took = time.perf_counter() - started
        if done != [0 if op == "put" else page] * count:
            raise SystemExit(f"mooncake: {op} of {count} x {page} answered {sorted(set(done))}")
        print(json.dumps(took), flush=True)
    store.close()


if __name__ == "__main__":
    main()
