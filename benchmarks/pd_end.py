"""One end of `benchmarks.pd_payload`: a prefill or a decode engine's memory and its transfer engine, in a process of its own.

Needs nothing but the Python that has the engine. Arguments: the module that has `TransferEngine`, or `socket` for a bare loop
over loopback; how many layers; how many bytes a layer's K has, and its V; how many pieces a call may have. Then each line on
stdin is a list in JSON, answered by a line of JSON: `["where"]`, `["fill", SEED]`, `["digest", PAGE_BYTES, PAGES]`, and
`["send", SESSION, ADDRESSES, PAGE_BYTES, SOURCES, TARGETS]`, which answers the seconds that it took.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib
import json
import mmap
import random
import socket
import sys
import threading
import time
from typing import Any


class Memory:
    """K and V of each layer: a pool of pages each."""

    def __init__(self, layers: int, length: int) -> None:
        self.length = length
        self.pools = [mmap.mmap(-1, length) for _ in range(2 * layers)]
        self.addresses = [ctypes.addressof(ctypes.c_char.from_buffer(pool)) for pool in self.pools]

    def fill(self, seed: int) -> None:
        for number, pool in enumerate(self.pools):
            pool[:] = random.Random(f"{seed} {number}").randbytes(1 << 16) * (self.length >> 16)

    def digest(self, page: int, numbers: list[int]) -> str:
        """Of these pages of each pool, in this order."""
        digest = hashlib.blake2b()
        for pool in self.pools:
            for number in numbers:
                digest.update(pool[number * page : (number + 1) * page])
        return digest.hexdigest()


class Engine:
    def __init__(self, module: str, memory: Memory, most: int) -> None:
        self._most = most
        self._engine = importlib.import_module(module).TransferEngine()
        self._memory = memory
        if self._engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") != 0:
            raise SystemExit(f"{module} does not start")
        if self._engine.batch_register_memory(memory.addresses, [memory.length] * len(memory.addresses)) != 0:
            raise SystemExit(f"{module} does not register memory")
        self.session = f"127.0.0.1:{self._engine.get_rpc_port()}"

    def send(self, session: str, addresses: list[int], page: int, sources: list[int], targets: list[int]) -> float:
        local = [base + number * page for base in self._memory.addresses for number in sources]
        remote = [base + number * page for base in addresses for number in targets]
        calls = [(local[at : at + self._most], remote[at : at + self._most]) for at in range(0, len(local), self._most)]
        started = time.perf_counter()
        for here, there in calls:
            code = self._engine.batch_transfer_sync_write(session, here, there, [page] * len(here))
            if code != 0:
                raise SystemExit(f"a transfer of {len(here)} pieces answered {code}")
        return time.perf_counter() - started


class Loop:
    """`sendmsg` of as many bytes as the kernel takes, `recv_into` the same pages: what Python and the kernel do at best with
    one connection. The receiver is told beforehand what comes."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.session = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._sock: socket.socket | None = None
        threading.Thread(target=self._receive, daemon=True).start()

    def _views(self, page: int, numbers: list[int]) -> list[memoryview]:
        return [memoryview(pool)[number * page : (number + 1) * page] for pool in self._memory.pools for number in numbers]

    def send(self, session: str, addresses: list[int], page: int, sources: list[int], targets: list[int]) -> float:
        if self._sock is None:
            host, _, port = session.partition(":")
            self._sock = socket.create_connection((host, int(port)))
        order = json.dumps([page, targets]).encode()
        self._sock.sendall(len(order).to_bytes(4, "little") + order)
        views = self._views(page, sources)
        self._sock.recv(1)
        started = time.perf_counter()
        while views:
            sent = self._sock.sendmsg(views[:512])
            done = 0
            while done < len(views) and sent >= len(views[done]):
                sent -= len(views[done])
                done += 1
            del views[:done]
            if sent:
                views[0] = views[0][sent:]
        self._sock.recv(1)
        return time.perf_counter() - started

    def _receive(self) -> None:
        sock, _ = self._listener.accept()
        while header := sock.recv(4, socket.MSG_WAITALL):
            page, targets = json.loads(sock.recv(int.from_bytes(header, "little"), socket.MSG_WAITALL))
            views = self._views(page, targets)
            sock.sendall(b"!")
            for view in views:
                sock.recv_into(view, 0, socket.MSG_WAITALL)
            sock.sendall(b"!")


def main(module: str, layers: str, length: str, most: str) -> None:
    memory = Memory(int(layers), int(length))
    engine: Any = Loop(memory) if module == "socket" else Engine(module, memory, int(most))
    calls = {
        "where": lambda: [engine.session, memory.addresses],
        "fill": memory.fill,
        "digest": memory.digest,
        "send": engine.send,
    }
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        print(json.dumps(calls[name](*arguments)), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
