"""Transfer engines: who may come in, what two of them agree on, and what a peer sees of the other's memory."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import hicache_mooncake
from hicache_mooncake import TransferEngine, TransportError
from hicache_mooncake.security import ClusterKey
from hicache_mooncake.transfer import channel_link, engine, engine_peer, engine_wire, transport
from hicache_mooncake.transfer.engine_wire import Share
from hicache_mooncake.transfer.shm import ShmTransport

LONG_S = 60.0
BOTH = ("shm", "tcp")


def soon() -> float:
    return time.monotonic() + LONG_S


def until(met: Callable[[], Any]) -> None:
    end = soon()
    while not met():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.005)


@contextlib.contextmanager
def engines(*transports: tuple[str, ...], **options: Any) -> Iterator[list[TransferEngine]]:
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(TransferEngine(f"engine-{number}", transports=each, **options))
            for number, each in enumerate(transports)
        ]


def test_importing_the_package_loads_no_engine() -> None:
    program = (
        "import sys, hicache_mooncake; "
        "assert not [name for name in sys.modules if name.startswith('hicache_mooncake.transfer')]; "
        "hicache_mooncake.TransferEngine; hicache_mooncake.Piece; "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
    with pytest.raises(AttributeError):
        _ = hicache_mooncake.NoSuchThing


@pytest.mark.parametrize("scheme", BOTH)
@pytest.mark.parametrize("kind", ["allocated", "bytearray"])
def test_both_ends_read_and_write_each_others_memory(scheme: str, kind: str) -> None:
    with engines((scheme,), (scheme,)) as (here, there):
        size = 3 << 20
        if kind == "allocated":
            (mine, my_view), (theirs, their_view) = here.allocate(size), there.allocate(size, name="pages")
        else:
            my_view, their_view = memoryview(bytearray(size)), memoryview(bytearray(size))
            mine, theirs = here.register(my_view), there.register(their_view, name="pages")
        body = os.urandom(size)
        their_view[:] = body
        peer = here.connect(there.address, soon())
        assert peer.transport == scheme
        assert peer.regions["pages"] == theirs

        peer.read([(mine.address, theirs.address, size)], soon()).wait()
        assert bytes(my_view) == body
        my_view[:5] = b"hello"
        peer.write([(mine.address, theirs.address + 100, 5)], soon()).wait()
        assert bytes(their_view[:110]) == body[:100] + b"hello" + body[105:110]

        until(lambda: there.peers)
        (back,) = there.peers
        assert back.name == "engine-0"
        back.wait_region(mine.name, soon())
        back.read([(theirs.address, mine.address, 5)], soon()).wait()
        assert bytes(their_view[:5]) == b"hello"


@pytest.mark.parametrize("scheme", BOTH)
def test_a_peer_hears_of_memory_that_comes_and_goes(scheme: str) -> None:
    with engines((scheme,), (scheme,)) as (here, there):
        mine, _ = here.allocate(4096)
        peer = here.connect(there.address, soon())
        assert peer.regions == {}
        later, view = there.allocate(4096, name="later")
        view[:4] = b"late"
        assert peer.wait_region("later", soon()) == later
        peer.read([(mine.address, later.address, 4)], soon()).wait()
        del view
        there.unregister(later)
        until(lambda: peer.regions == {})
        with pytest.raises(TransportError) as caught:
            peer.read([(mine.address, later.address, 4)], soon()).wait()
        assert caught.value.reason == "bounds"
        with pytest.raises(TransportError) as caught:
            peer.wait_region("never", time.monotonic() + 0.05)
        assert caught.value.reason == "deadline"


def test_memory_that_comes_and_goes_is_not_kept_track_of_for_ever() -> None:
    with engines(("tcp",), ("tcp",)) as (here, there):
        peer = here.connect(there.address, soon())
        heap = ctypes.create_string_buffer(8192)
        for number in range(100):
            there.unregister(there.register(ctypes.addressof(heap) + 64 * number, 64, name="again"))
        there.register(ctypes.addressof(heap), 1, name="last")
        peer.wait_region("last", soon())
        assert len(peer._link.remote._tokens) == 1  # type: ignore[attr-defined]


def test_a_peer_that_shares_memory_twice_is_left() -> None:
    """There is no end to what it could share under one name."""
    with engines(("tcp",), ("tcp",)) as (here, there):
        peer = here.connect(there.address, soon())
        heap = ctypes.create_string_buffer(8192)
        there.register(ctypes.addressof(heap), 64, name="once")
        peer.wait_region("once", soon())
        (other,) = there.peers
        other.tell(Share("once", ctypes.addressof(heap) + 4096, 64, bytes(16)))
        until(lambda: not peer.alive)


@pytest.mark.parametrize("scheme", BOTH)
def test_notices_come_after_the_bytes_they_tell_of(scheme: str) -> None:
    with engines((scheme,), (scheme,)) as (here, there):
        mine, my_view = here.allocate(4096)
        theirs, their_view = there.allocate(4096, name="mailbox")
        peer = here.connect(there.address, soon())
        my_view[:4] = b"page"
        peer.write([(mine.address, theirs.address, 4)], soon()).wait()
        peer.notify(b"it is there", soon())
        told: list[tuple[str, bytes]] = []
        until(lambda: told.extend(there.notices()) or told)
        assert told == [("engine-0", b"it is there")]
        assert bytes(their_view[:4]) == b"page"


def test_notices_of_a_peer_that_has_left_are_kept() -> None:
    with engines(BOTH, BOTH) as (here, there):
        here.connect(there.address, soon()).notify(b"goodbye", soon())
        here.close()
        until(lambda: not there.peers)
        assert there.notices() == [("engine-0", b"goodbye")]


def test_engines_of_one_host_use_shared_memory_and_say_why() -> None:
    with engines(("auto",), ("auto",)) as (here, there):
        peer = here.connect(there.address, soon())
        assert peer.transport == "shm"
        assert here.report().transports["shm"] == ""
        assert here.report().address == here.address
        (said,) = here.report().peers
        assert (said.name, said.transport, said.why, said.alive) == ("engine-1", "shm", "shm: the first choice", True)


def test_the_order_of_transports_is_the_connecting_sides() -> None:
    with engines(("tcp", "shm"), BOTH) as (here, there):
        assert here.connect(there.address, soon()).transport == "tcp"
        assert there.connect(here.address, soon()).transport == "shm"


def test_of_another_host_no_memory_is_mapped(monkeypatch: pytest.MonkeyPatch) -> None:
    with engines(BOTH) as (here,):
        monkeypatch.setattr(engine_wire, "boot_id", lambda: "another")
        with engines(BOTH) as (there,):
            peer = here.connect(there.address, soon())
            assert peer.transport == "tcp"
            assert "another host" in peer.why


def test_a_transport_that_only_one_end_has_is_passed_over() -> None:
    with engines(BOTH, ("tcp",)) as (here, there):
        peer = here.connect(there.address, soon())
        assert (peer.transport, peer.why) == ("tcp", "tcp: the peer has no shm")


@pytest.mark.parametrize("end", ["connect", "accept"])
def test_a_transport_that_fails_at_either_end_is_followed_by_the_next_with_one_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, end: str
) -> None:
    def fails(self: ShmTransport, channels: list[Any], deadline: float) -> Any:
        for channel in channels:
            channel.close()
        raise TransportError("device", "the device has left")

    monkeypatch.setattr(ShmTransport, end, fails)
    with engines(BOTH, BOTH) as (here, there), caplog.at_level(logging.WARNING):
        mine, _ = here.allocate(4096)
        theirs, view = there.allocate(4096, name="pages")
        view[:3] = b"abc"
        peer = here.connect(there.address, soon())
        assert peer.transport == "tcp"
        peer.read([(mine.address, theirs.address, 3)], soon()).wait()
        lines = [record.getMessage() for record in caplog.records]
        assert len(lines) == 1
        assert "the device has left" in lines[0]
        assert "reached over tcp" in lines[0]


def test_two_engines_without_a_transport_in_common_say_so() -> None:
    with engines(("shm",), ("tcp",)) as (here, there):
        with pytest.raises(TransportError, match="the peer has no shm") as caught:
            here.connect(there.address, soon())
        assert caught.value.reason == "unavailable"


def test_a_transport_that_cannot_work_here_is_reported_and_the_others_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(transport._BUILT_IN, "broken", "hicache_mooncake.no_such_module:Nothing")
    with engines(("broken", "tcp"), ("tcp",)) as (here, there):
        assert "cannot be loaded" in here.report().transports["broken"]
        assert "broken is not usable here" in here.connect(there.address, soon()).why
    with pytest.raises(TransportError, match="no transport works on this host") as caught:
        TransferEngine("alone", transports=("broken",))
    assert caught.value.reason == "unavailable"


def test_memory_that_a_transport_refuses_is_reached_over_another(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(self: ShmTransport, *place: Any) -> bytes:
        raise TransportError("memory", "the limit of locked memory is 0 bytes: ulimit -l")

    monkeypatch.setattr(ShmTransport, "register", refuses)
    with engines(BOTH, ("tcp",), ("shm",)) as (here, there, alone):
        region, view = here.allocate(4096, name="pages")
        view[:3] = b"abc"
        mine, my_view = there.allocate(4096)
        there.connect(here.address, soon()).read([(mine.address, region.address, 3)], soon()).wait()
        assert bytes(my_view[:3]) == b"abc"
        with pytest.raises(TransportError, match="ulimit") as caught:
            alone.allocate(4096)
        assert caught.value.reason == "memory"


# --------------------------------------------------------------------------- membership


def key_file(folder: Path, name: str = "key") -> str:
    path = str(folder / name)
    ClusterKey.generate().save(path)
    return path


@pytest.mark.parametrize("scheme", BOTH)
def test_engines_with_one_key_know_each_other(tmp_path: Path, scheme: str) -> None:
    with engines((scheme,), (scheme,), key_file=key_file(tmp_path)) as (here, there):
        mine, _ = here.allocate(4096)
        theirs, _ = there.allocate(4096, name="pages")
        here.connect(there.address, soon()).read([(mine.address, theirs.address, 4096)], soon()).wait()


def test_who_has_another_key_or_none_is_kept_out(tmp_path: Path) -> None:
    with (
        engines(BOTH, key_file=key_file(tmp_path)) as (inside,),
        engines(BOTH, key_file=key_file(tmp_path, "other")) as (other,),
        engines(BOTH) as (without,),
    ):
        for stranger in (other, without):
            with pytest.raises(TransportError) as caught:
                stranger.connect(inside.address, soon())
            assert caught.value.reason == "peer"
        with pytest.raises(TransportError):
            inside.connect(without.address, soon())
        assert inside.peers == without.peers == []


def test_an_engine_of_another_name_is_not_the_one_that_was_meant(tmp_path: Path) -> None:
    with engines(BOTH, BOTH, key_file=key_file(tmp_path)) as (here, there):
        wrong = there.address.replace("engine-1", "engine-9")
        with pytest.raises(TransportError, match="did not prove"):
            here.connect(wrong, soon())


def test_without_a_key_nothing_leaves_the_host() -> None:
    with pytest.raises(ValueError, match="keygen"):
        TransferEngine("open", listen="0.0.0.0:0", advertise="here")
    with engines(("tcp",)) as (here,), pytest.raises(ValueError, match="key_file"):
        here.connect("far@192.0.2.1:7000", soon())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"name": ""}, "name"),
        ({"name": "a@b"}, "name"),
        ({"name": "x", "listen": "nowhere"}, "port"),
        ({"name": "x", "transports": ()}, "none was asked for"),
    ],
    ids=["no name", "a name with @", "no port", "no transport"],
)
def test_values_that_make_no_sense_are_refused(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises((ValueError, TransportError), match=said):
        TransferEngine(**arguments)


def test_an_address_that_must_be_advertised_is_asked_for(tmp_path: Path) -> None:
    key = key_file(tmp_path)
    with pytest.raises(ValueError, match="advertise"):
        TransferEngine("open", listen="0.0.0.0:0", key_file=key)
    with TransferEngine("open", listen="0.0.0.0:0", key_file=key, advertise="127.0.0.1", transports=BOTH) as there:
        assert there.address.startswith("open@127.0.0.1:")
        with engines(("tcp",), key_file=key) as (here,):
            here.connect(there.address, soon())


def test_engines_meet_over_ipv6() -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError as error:
        pytest.skip(f"no IPv6 here: {error}")
    with engines(("tcp",), ("tcp",), listen="[::1]:0") as (here, there):
        assert "@[::1]:" in there.address
        assert here.connect(there.address, soon()).alive


def test_strangers_that_say_nothing_or_nonsense_keep_nobody_out() -> None:
    with engines(BOTH, BOTH) as (here, there), contextlib.ExitStack() as stack:
        _, host, port = engine_wire.split_name(there.address)
        for _ in range(5):
            stack.enter_context(socket.create_connection((host, port)))
            stack.enter_context(socket.create_connection((host, port))).sendall(b"\x08\x00\x00\x00GET / HT")
        assert here.connect(there.address, soon()).alive


def test_the_unix_socket_may_be_a_file(tmp_path: Path) -> None:
    path = tmp_path / "engine.sock"
    with engines(("shm",)) as (here,), TransferEngine("filed", transports=("shm",), unix_socket=str(path)) as there:
        assert path.stat().st_mode & 0o777 == 0o600
        assert here.connect(there.address, soon()).transport == "shm"
    assert not path.exists()


def test_the_socket_of_an_engine_that_was_killed_is_taken_over_and_no_other(tmp_path: Path) -> None:
    path = tmp_path / "engine.sock"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))  # and closing leaves it there
    with TransferEngine("next", unix_socket=str(path)) as there, TransferEngine("here") as here:
        assert here.connect(there.address, soon()).transport == "shm"
        with pytest.raises(OSError, match="path of its own"):
            TransferEngine("too many", unix_socket=str(path))
    path.write_text("no socket")
    with pytest.raises(OSError, match="no socket"):
        TransferEngine("no", unix_socket=str(path))
    assert path.read_text() == "no socket"


# --------------------------------------------------------------------------- bounds, ends and returns


def test_what_is_registered_twice_or_is_no_memory_is_refused() -> None:
    with engines(BOTH) as (here,):
        region, _ = here.allocate(4096, name="pages")
        with pytest.raises(ValueError, match="registered already"):
            here.allocate(4096, name="pages")
        with pytest.raises(ValueError, match="writable"):
            here.register(b"constant")
        with pytest.raises(ValueError, match="length"):
            here.register(region.address)
        with pytest.raises(ValueError, match="in a buffer of 10 bytes"):
            here.register(bytearray(10), 11)


def test_connecting_again_is_the_same_peer_while_it_lives() -> None:
    with engines(BOTH, BOTH) as (here, there):
        peers: list[Any] = []
        threads = [threading.Thread(target=lambda: peers.append(here.connect(there.address, soon()))) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len({id(peer) for peer in peers}) == 1
        peers[0].close()
        assert not peers[0].alive
        again = here.connect(there.address, soon())
        assert again.alive
        assert again is not peers[0]


def test_an_address_where_nobody_listens_fails_and_is_left_alone_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    with engines(BOTH) as (here,):
        with engines(BOTH) as (there,):
            address = there.address
        with pytest.raises(TransportError, match="cannot be reached") as caught:
            here.connect(address, soon())
        assert caught.value.reason == "peer"
        monkeypatch.setattr(engine_wire.Dialler, "tcp", lambda *_: pytest.fail("it was dialled"))
        with pytest.raises(TransportError, match="left alone"):
            here.connect(address, soon())


CHILD = """
import sys, time
from hicache_mooncake import TransferEngine
name, listen, transports = sys.argv[1:]
with TransferEngine(name, listen, transports=transports.split(",")) as engine:
    region, view = engine.allocate(1 << 20, name="pages")
    view[:] = b"\\x5a" * (1 << 20)
    print(engine.address, flush=True)
    sys.stdin.read()
"""


@contextlib.contextmanager
def child(scheme: str, listen: str = "127.0.0.1:0") -> Iterator[tuple[subprocess.Popen[str], str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", CHILD, "child", listen, scheme],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    try:
        assert process.stdout is not None
        yield process, process.stdout.readline().strip()
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("scheme", BOTH)
def test_a_killed_peer_is_noticed_and_its_successor_is_another_peer(scheme: str) -> None:
    with engines((scheme,)) as (here,):
        mine, view = here.allocate(1 << 20)
        with child(scheme) as (process, address):
            peer = here.connect(address, soon())
            region = peer.regions["pages"]
            peer.read([(mine.address, region.address, 1 << 20)], soon()).wait()
            assert bytes(view) == b"\x5a" * (1 << 20)
            process.kill()
            process.wait()
            until(lambda: not here.peers)
            assert not peer.alive
            with pytest.raises(TransportError):
                peer.read([(mine.address, region.address, 1)], soon()).wait()
        with child(scheme, address.partition("@")[2]) as (_, again):
            assert again == address
            assert here.connect(address, soon()) is not peer


def test_a_stopped_peer_is_not_taken_for_fenced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel_link, "FENCE_S", 0.3)  # it never answers
    with engines(("shm",)) as (here,), child("shm") as (process, address):
        here.allocate(4096)
        peer = here.connect(address, soon())
        process.send_signal(signal.SIGSTOP)
        tasks = Path(f"/proc/{process.pid}/task")
        until(lambda: all((task / "stat").read_text().rpartition(")")[2].split()[0] == "T" for task in tasks.iterdir()))
        with pytest.raises(TransportError, match="is it stopped"):
            peer.close()
        process.kill()
        process.wait()
        peer.close()
        assert here.peers == []


def test_closing_leaves_no_thread_and_no_descriptor() -> None:
    def used() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    with engines(BOTH, BOTH) as (here, there):
        here.connect(there.address, soon())
    before = used()
    for _ in range(5):
        with engines(BOTH, BOTH) as (here, there):
            mine, _ = here.allocate(4096)
            theirs, _ = there.allocate(4096)
            here.connect(there.address, soon()).read([(mine.address, theirs.address, 4096)], soon()).wait()
    until(lambda: all(now <= then for now, then in zip(used(), before, strict=True)))


def test_a_closed_engine_says_so() -> None:
    with engines(BOTH, BOTH) as (here, there):
        here.close()
        here.close()
        for call in (lambda: here.allocate(4096), lambda: here.connect(there.address, soon())):
            with pytest.raises(TransportError) as caught:
                call()
            assert caught.value.reason == "closed"


def test_a_peer_that_asks_for_more_memory_than_is_kept_track_of_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "MAX_REGIONS", 50)
    monkeypatch.setattr(engine_peer, "MAX_REGIONS", 50)
    with engines(("tcp",), ("tcp",)) as (here, there):
        heap = ctypes.create_string_buffer(8192)
        for number in range(50):
            there.register(ctypes.addressof(heap) + number, 1)
        with pytest.raises(TransportError, match="register larger ones"):
            there.register(ctypes.addressof(heap) + 5000, 1)
        peer = here.connect(there.address, soon())
        assert len(peer.regions) == 50
        (other,) = there.peers
        other.tell(Share("one more", ctypes.addressof(heap) + 5000, 1, bytes(16)))
        until(lambda: not peer.alive)


@pytest.mark.timeout(300)
def test_the_example_of_the_documentation_runs_and_prints_what_it_says() -> None:
    text = (Path(__file__).parents[1] / "docs" / "transfer-engine.md").read_text()
    program = text.partition("```python\n")[2].partition("```")[0]
    prints = text.partition("It prints\n\n```\n")[2].partition("```")[0]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
    assert ran.stderr == ""
    assert ran.stdout == prints
