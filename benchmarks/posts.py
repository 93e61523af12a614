"""Works posted to an RDMA device each second: through a link of the verbs transport, against the binding alone.

On a device that is not there (`hicache_mooncake.testing.fake_verbs`) in any case, which says what the code costs and nothing of
a network; and, through each binding that is installed, on the first real device whose port is up, from this process to itself.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator

from benchmarks.harness import Bench, Memory, Row, compare
from hicache_mooncake.testing.fake_verbs import FakeFabric
from hicache_mooncake.transfer import gids
from hicache_mooncake.transfer.transport import Link, Piece, TransportError, TransportOptions
from hicache_mooncake.transfer.verbs.api import Binding, Mr, PortInfo, Qp, Sge, VerbsError, Work
from hicache_mooncake.transfer.verbs.bindings import load_binding
from hicache_mooncake.transfer.verbs.transport import VerbsTransport

_LENGTH = 4 << 20
_PIECE, _PIECES = 512, 4096
_LIST = 64
"""Works in one call of the binding alone."""
_PATIENT_S = 60.0


def _apart(source: int, target: int) -> list[Piece]:
    """Pieces that stay works of their own: none is followed by its neighbour."""
    order = [*range(0, _PIECES, 2), *range(1, _PIECES, 2)]
    return [Piece(source + at * 2 * _PIECE, target + at * 2 * _PIECE, _PIECE) for at in order]


class _Linked:
    """Two ends of a link in this process."""

    def __init__(self, bindings: tuple[Binding, Binding]) -> None:
        self._memories = Memory(_LENGTH), Memory(_LENGTH)
        self._ends = [VerbsTransport(TransportOptions(), binding) for binding in bindings]
        tokens = [end.register(each.address, _LENGTH) for end, each in zip(self._ends, self._memories, strict=True)]
        ours, theirs = socket.socketpair()
        accepted: list[Link] = []

        def accept() -> None:
            accepted.append(self._ends[1].accept([theirs], time.monotonic() + _PATIENT_S))

        thread = threading.Thread(target=accept)
        thread.start()
        self._link = self._ends[0].connect([ours], time.monotonic() + _PATIENT_S)
        thread.join()
        self._link.learn(self._memories[1].address, _LENGTH, tokens[1])
        self._pieces = _apart(self._memories[0].address, self._memories[1].address)

    def rate(self, _round: int) -> float:
        """Thousand works a second."""
        started = time.perf_counter()
        self._link.submit("write", self._pieces, time.monotonic() + _PATIENT_S).wait()
        return _PIECES / (time.perf_counter() - started) / 1e3

    def close(self) -> None:
        for end in self._ends:
            end.close()
        for memory in self._memories:
            memory.close()


class _Bare:
    """The binding alone: lists of works, the last of each signaled, posted as fast as completions come."""

    def __init__(self, bindings: tuple[Binding, Binding]) -> None:
        self._memories = Memory(_LENGTH), Memory(_LENGTH)
        self._open = contextlib.ExitStack()
        pairs: list[tuple[Qp, PortInfo, int]] = []
        keys: list[Mr] = []
        for binding, memory in zip(bindings, self._memories, strict=True):
            name, port = _first_port(binding)
            device = binding.open(name)
            self._open.callback(device.close)
            keys.append(device.register(memory.address, _LENGTH))
            self._queue = device.completions(4 * _LIST)
            pair = device.queue_pair(self._queue, port.number, 4 * _LIST, 1)
            pair.init()
            pairs.append((pair, port, gids.choose(name, port).index))
        pairs.reverse()  # the queue is that of the end made last: it posts, and the other one is written to
        self._pairs = [pair for pair, _, _ in pairs]
        addresses = [pair.address(gid) for pair, _, gid in pairs]
        for (pair, port, gid), other in zip(pairs, reversed(addresses), strict=True):
            pair.connect(other, gid, port.active_mtu)
        pieces = _apart(self._memories[1].address, self._memories[0].address)
        mine, theirs = keys[1].lkey, keys[0].rkey
        works = [
            Work("write", [Sge(piece.local, piece.length, mine)], piece.remote, theirs, 1, number % _LIST == _LIST - 1)
            for number, piece in enumerate(pieces)
        ]
        self._lists = [works[at : at + _LIST] for at in range(0, len(works), _LIST)]

    def rate(self, _round: int) -> float:
        started, under_way = time.perf_counter(), 0
        for works in self._lists:
            self._pairs[0].post(works)
            under_way += 1
            while under_way > 3:
                under_way -= self._completed()
        while under_way:
            under_way -= self._completed()
        return _PIECES / (time.perf_counter() - started) / 1e3

    def _completed(self) -> int:
        done = self._queue.poll(4)
        if failed := [each for each in done if each.status]:
            raise RuntimeError(f"a work failed: {failed[0]}")
        if not done:
            time.sleep(0)
        return len(done)

    def close(self) -> None:
        self._open.close()
        for memory in self._memories:
            memory.close()


def _first_port(binding: Binding) -> tuple[str, PortInfo]:
    for device in binding.devices():
        for port in device.ports:
            if port.state == "ACTIVE":
                return device.name, port
    raise VerbsError(f"{binding.name}: no device with a port that is up")


def _real() -> Iterator[tuple[str, Binding]]:
    """Each binding that is installed, where there is a device."""
    for name in ("ibverbs", "pyverbs"):
        with contextlib.suppress(VerbsError):
            binding = load_binding(name)
            _first_port(binding)
            yield f"{name}, a real device", binding


def posts(bench: Bench) -> list[Row]:
    rows: list[Row] = []
    with FakeFabric() as fabric:
        hosts = fabric.host("a"), fabric.host("b")
        fake = (hosts[0].binding(), hosts[1].binding())
        for name, bindings in [("a device that is not there", fake), *((name, (real, real)) for name, real in _real())]:
            try:
                with contextlib.closing(_Bare(bindings)) as bare, contextlib.closing(_Linked(bindings)) as linked:
                    figures = bench.interleave({"link": linked.rate, "binding": bare.rate}, f"posts, {name}")
            except (VerbsError, TransportError) as error:
                bench.progress.console.print(f"posts, {name}: {error}")
                continue
            what = f"posts: {_PIECES} works of {_PIECE} bytes, {name}"
            rows.append(compare(what, figures["link"], figures["binding"], "k/s", "binding alone"))
    return rows
