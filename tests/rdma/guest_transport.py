"""Runs in a guest (`make test-rdma`): the verbs transport over rxe devices keeps the contract of transports, and goes on over
one rail when the other fails."""

from __future__ import annotations

import subprocess
import time

import msgspec
import pytest

from hicache_mooncake.testing import TransportTests
from hicache_mooncake.testing.transports import End
from hicache_mooncake.testing.transports.harness import wait_until
from hicache_mooncake.transfer.transport import Piece, Transport, TransportOptions
from hicache_mooncake.transfer.verbs.bindings import load_binding
from hicache_mooncake.transfer.verbs.link import VerbsLink
from hicache_mooncake.transfer.verbs.transport import VerbsTransport

SIZE = 8 << 20
LONG = 100.0


class VerbsOverRxe(TransportTests):
    """Over both devices."""

    scheme = "verbs"
    transfers = 300
    # Emulated as it all is, this machine is a hundred times slower than a real one.
    patience_s = 240.0
    endless = 500
    binding = "auto"

    def make_transport(self, options: TransportOptions) -> Transport:
        return VerbsTransport(options, load_binding(self.binding))

    def spoil(self, token: bytes) -> bytes:
        start, length, devices = msgspec.msgpack.decode(token)
        wrong = {name: (step, [key ^ 0xFF00 for key in keys]) for name, (step, keys) in devices.items()}
        return msgspec.msgpack.encode((start, length, wrong))


class TestContract(VerbsOverRxe):
    pass


def rails(end: End) -> dict[str, str]:
    """The state of each rail by this end's device."""
    assert isinstance(end.link, VerbsLink)
    return {rail.here.partition(":")[0]: rail.state for rail in end.link.report()}


def set_link(interface: str, up: bool) -> None:
    subprocess.run(["ip", "link", "set", interface, "up" if up else "down"], check=True)


@pytest.fixture
def interfaces():
    yield
    for interface in ("dummy0", "dummy1"):
        set_link(interface, True)


@pytest.mark.parametrize("binding", ["ibverbs", "pyverbs"])
@pytest.mark.usefixtures("interfaces")
def test_a_batch_goes_on_over_the_other_rail_and_a_rail_that_is_back_is_used_again(binding: str) -> None:
    tests = VerbsOverRxe()
    tests.binding = binding
    tests.begin()
    try:
        near, far, mine, theirs = tests.sharing(SIZE)
        wait_until(lambda: rails(near) == {"rxe0": "up", "rxe1": "up"}, "both rails are up", LONG)
        pieces = [Piece(mine.address + at, theirs.address + at, 256 << 10) for at in range(0, SIZE, 256 << 10)]
        batch = near.submit("write", pieces, 2 * LONG)
        set_link("dummy0", False)
        batch.wait()
        assert theirs.bytes() == mine.bytes()
        theirs.fill(4)
        near.move("read", pieces)
        assert mine.bytes() == theirs.bytes()
        wait_until(lambda: rails(near)["rxe0"] == "down" and rails(near)["rxe1"] == "up", "the rail is found down", LONG)

        set_link("dummy0", True)
        wait_until(lambda: rails(near) == {"rxe0": "up", "rxe1": "up"}, "the rail is back", LONG)
        before = carried(near, "rxe0")
        deadline = time.monotonic() + LONG
        while carried(near, "rxe0") == before:
            assert time.monotonic() < deadline
            mine.fill(int(time.monotonic() * 1000))
            near.move("write", pieces)
            assert theirs.bytes() == mine.bytes()
        assert near.link.alive
        assert far.link.alive
    finally:
        tests.end()


def carried(end: End, device: str) -> int:
    assert isinstance(end.link, VerbsLink)
    return sum(rail.bytes for rail in end.link.report() if rail.here.startswith(device))
