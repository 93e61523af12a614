"""Sessions from prefill to decode over real engines: whole bytes, and ends of all kinds."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hicache_mooncake.messenger.actions import Limits
from hicache_mooncake.messenger.layout import Layout
from hicache_mooncake.messenger.stream import Buffers, Messenger, StreamError
from hicache_mooncake.transfer.engine import TransferEngine
from hicache_mooncake.transfer.shm import ShmTransport
from hicache_mooncake.transfer.transport import TransportError
from tests.conftest import environment, stands_still
from tests.faults.proxy import FaultProxy, Faults
from tests.messenger_ends import LAYERS, PAGES, End, layout_of, soon

pytestmark = pytest.mark.timeout(300)
BOTH = ("shm", "tcp")
KIB = 1 << 10
SMALL, LARGE = 4 * KIB, 64 * KIB
LIMITS = Limits(silence_s=20, quiet_s=20, remember_s=5)
IMPATIENT = Limits(silence_s=2, resume_s=3, quiet_s=0.3, fence_retry_s=0.3, chunk_bytes=128 * KIB)
"""For peers that are gone for good: those that are only slow have more than their beats' time."""


def until(met: Callable[[], Any]) -> None:
    end = soon()
    while not met():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.005)


class Process:
    """An end in a process of its own."""

    def __init__(self, role: str, scheme: str, page_bytes: int, limits: Limits = LIMITS) -> None:
        path = Path(__file__).with_name("messenger_ends.py")
        arguments = [role, scheme, str(page_bytes), json.dumps(dataclasses.asdict(limits))]
        self.process = subprocess.Popen(
            [sys.executable, str(path), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment(),
        )
        self.address = self.hear()["address"]

    def tell(self, *words: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(" ".join(map(str, words)) + "\n")
        self.process.stdin.flush()

    def hear(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the process has ended"
        heard: dict[str, Any] = json.loads(line)
        return heard

    def signal(self, signum: int) -> None:
        self.process.send_signal(signum)
        if signum == signal.SIGSTOP:
            until(lambda: stands_still(self.process.pid))

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


@contextlib.contextmanager
def process(*arguments: Any, **options: Any) -> Iterator[Process]:
    other = Process(*arguments, **options)
    try:
        yield other
    finally:
        other.close()


@contextlib.contextmanager
def ends(scheme: str, page_bytes: int = SMALL, limits: Limits = LIMITS, layers: int = LAYERS) -> Iterator[tuple[End, End]]:
    layout = layout_of(page_bytes, layers)
    with End("prefill", (scheme,), layout, limits) as source, End("decode", (scheme,), layout, limits) as destination:
        destination.accept()
        yield source, destination


@pytest.mark.parametrize("scheme", BOTH)
def test_all_bytes_of_32_layers_arrive_in_another_process(scheme: str) -> None:
    with process("destination", scheme, LARGE) as other, End("prefill", (scheme,), layout_of(LARGE), LIMITS) as source:
        for number in range(3):
            request = f"request-{number}"
            other.tell("receive", request)
            stream = source.send(other.address, request)
            chunks = [(0, PAGES)] if number else [(0, 2), (2, 5), (5, PAGES)]  # the first prompt is computed in chunks
            for first, last in chunks:
                source.push(stream, range(LAYERS), 0, first, last)
            stream.finish(4711, b"aux")
            stream.wait(soon())
            told = other.hear()
            assert told == {"request": request, "reason": "", "equal": True, "first_token": 4711, "aux": b"aux".hex()}
            assert stream.layers_arrived == [PAGES] * LAYERS
            (peer,) = source.engine.peers
            assert peer.transport == scheme
        assert source.released == {True: LAYERS * (3 + 1 + 1)}
        other.tell("report")
        report = other.hear()
        assert (report["ended_ok"], report["poisoned"], report["strange_notices"]) == (3, 0, 0)


@pytest.mark.parametrize("scheme", BOTH)
def test_layers_are_there_before_the_session_ends(scheme: str) -> None:
    with ends(scheme) as (source, destination):
        stream = source.send(destination.engine.address, "r")
        source.push(stream, [0, 1, 2])
        there = destination.messenger.incoming("r", soon())
        there.wait_layer(2, soon())
        assert there.layers_done == 3
        slot = destination.taken["r"]
        for layer in range(3):
            assert bytes(destination.part(slot, layer, 0, 1)) == bytes(source.part(0, layer, 0, 1))
        with pytest.raises(StreamError, match="deadline"):
            there.wait_layer(3, time.monotonic() + 0.05)
        source.push(stream, range(3, LAYERS))
        with pytest.raises(StreamError, match="deadline"):
            there.result(time.monotonic() + 0.05)
        stream.finish()
        there.result(soon())
        there.wait_layer(LAYERS - 1, soon())
        assert destination.holds("r")


def test_a_source_that_is_stopped_in_the_middle_over_tcp_is_fenced_and_the_buffers_are_free() -> None:
    layout = layout_of(LARGE)
    with process("source", "tcp", LARGE, IMPATIENT) as other, End("decode", ("tcp",), layout, IMPATIENT) as destination:
        destination.accept()
        other.tell("send", destination.engine.address, "r", LAYERS // 2)
        stream = destination.messenger.incoming("r", soon())
        stream.wait_layer(3, soon())
        other.signal(signal.SIGSTOP)
        with pytest.raises(StreamError) as caught:
            stream.result(soon())
        assert caught.value.reason == "peer"
        slot = destination.taken.get("r", destination.slots[-1])
        assert destination.wait_freed("r")
        other.signal(signal.SIGCONT)
        other.hear()
        other.tell("wait")
        told = other.hear()
        assert told["reason"] == "peer"
        assert told["released"] == LAYERS // 2
        assert destination.untouched(slot)
        assert destination.freed == ["r"]


def test_buffers_that_a_stopped_source_reaches_by_shared_memory_stay_poisoned_until_it_has_ended() -> None:
    layout = layout_of(LARGE)
    with process("source", "shm", LARGE, IMPATIENT) as other, End("decode", ("shm",), layout, IMPATIENT) as destination:
        destination.accept()
        other.tell("send", destination.engine.address, "r", LAYERS // 2)
        stream = destination.messenger.incoming("r", soon())
        stream.wait_layer(3, soon())
        other.signal(signal.SIGSTOP)
        with pytest.raises(StreamError, match="peer"):
            stream.result(soon())
        until(lambda: destination.messenger.report()["poisoned"])
        assert destination.messenger.report()["poisoned_bytes"] == layout.all_bytes * PAGES
        assert not destination.wait_freed("r", 5.0)
        other.signal(signal.SIGKILL)
        assert destination.wait_freed("r")
        until(lambda: not destination.messenger.report()["poisoned"])


@pytest.mark.parametrize("scheme", BOTH)
def test_a_source_that_is_killed_costs_its_session_only(scheme: str) -> None:
    with End("decode", (scheme,), layout_of(LARGE), IMPATIENT) as destination:
        destination.accept()
        with process("source", scheme, LARGE, IMPATIENT) as other, process("source", scheme, LARGE, LIMITS) as well:
            other.tell("send", destination.engine.address, "bad", LAYERS // 2)
            stream = destination.messenger.incoming("bad", soon())
            stream.wait_layer(3, soon())
            other.signal(signal.SIGKILL)
            well.tell("send", destination.engine.address, "good", LAYERS)
            destination.messenger.incoming("good", soon()).result(soon())
            assert destination.holds("good")
            with pytest.raises(StreamError, match="peer"):
                stream.result(soon())
            assert destination.wait_freed("bad")
            assert destination.freed == ["bad"]


@pytest.mark.parametrize("scheme", BOTH)
def test_a_destination_that_is_killed_ends_the_source_and_all_pages_come_back(scheme: str) -> None:
    with (
        process("destination", scheme, LARGE, IMPATIENT) as other,
        End("prefill", (scheme,), layout_of(LARGE), IMPATIENT) as source,
    ):
        stream = source.send(other.address, "r")
        source.push(stream, range(LAYERS // 2))
        until(lambda: stream.layers_arrived[3] == PAGES)
        other.signal(signal.SIGKILL)
        source.push(stream, range(LAYERS // 2, LAYERS))
        with contextlib.suppress(ValueError):
            stream.finish()
        with pytest.raises(StreamError) as caught:
            stream.wait(soon())
        assert caught.value.reason == "peer"
        assert sum(source.released.values()) == LAYERS


def test_a_destination_that_is_stopped_is_given_up() -> None:
    with (
        process("destination", "tcp", LARGE, IMPATIENT) as other,
        End("prefill", ("tcp",), layout_of(LARGE), IMPATIENT) as source,
    ):
        stream = source.send(other.address, "r")
        source.push(stream, range(LAYERS // 2))
        until(lambda: stream.layers_arrived[3] == PAGES)
        other.signal(signal.SIGSTOP)
        source.push(stream, range(LAYERS // 2, LAYERS))
        with pytest.raises(StreamError, match="peer"):
            stream.wait(soon())
        assert sum(source.released.values()) == LAYERS


def through(proxy: FaultProxy, end: End) -> str:
    return f"{end.engine.name}@{proxy.address}"


def port_of(end: End) -> tuple[str, int]:
    return "127.0.0.1", int(end.engine.address.rpartition(":")[2])


@pytest.mark.parametrize("again", ["the same way", "another way"])
def test_a_session_whose_link_is_cut_goes_on_where_it_was(again: str) -> None:
    with ends("tcp", LARGE) as (source, destination), FaultProxy(port_of(destination)) as proxy:
        addresses = [through(proxy, destination)]
        if again == "another way":
            addresses.append(destination.engine.address)
        stream = source.send(addresses, "r")
        source.push(stream, range(10))
        there = destination.messenger.incoming("r", soon())
        there.wait_layer(9, soon())
        passed = proxy.asked_bytes
        if again == "another way":
            proxy.refuse()
        proxy.drop_all()
        source.push(stream, range(10, LAYERS))
        stream.finish(1)
        assert there.result(soon()).first_token == 1
        stream.wait(soon())
        assert destination.holds("r")
        assert stream.attempts > 1
        assert source.messenger.report()["resumed"] >= 1
        assert source.released == {True: LAYERS}
        layer_bytes = layout_of(LARGE).page_bytes(0) * PAGES
        if again == "the same way":
            assert proxy.asked_bytes - passed < (LAYERS - 10 + 2) * layer_bytes, "layers that were counted were sent again"
        else:
            assert proxy.asked_bytes == passed


def test_a_session_whose_first_word_is_lost_with_its_link_is_opened_by_the_next() -> None:
    with ends("tcp") as (source, destination), FaultProxy(port_of(destination)) as proxy:
        peer = source.engine.connect(through(proxy, destination), soon())
        proxy.faults = Faults(swallow=True, upstream=True)
        before = proxy.asked_bytes
        stream = source.send(through(proxy, destination), "r")
        source.push(stream, range(LAYERS))
        stream.finish()
        until(lambda: proxy.asked_bytes > before)
        proxy.drop_all()
        proxy.faults = Faults()
        destination.messenger.incoming("r", soon()).result(soon())
        assert destination.holds("r")
        stream.wait(soon())
        assert stream.attempts > 1
        assert not peer.alive


def test_a_session_that_its_destination_has_forgotten_ends() -> None:
    limits = dataclasses.replace(LIMITS, remember_s=0.1)
    with ends("tcp", limits=limits) as (source, destination), FaultProxy(port_of(destination)) as proxy:
        stream = source.send(through(proxy, destination), "r")
        source.push(stream, [0])
        there = destination.messenger.incoming("r", soon())
        until(lambda: stream.layers_arrived[0])
        proxy.refuse()
        proxy.drop_all()
        there.abort()
        assert destination.wait_freed("r")
        until(lambda: not destination.messenger._remembered and not destination.messenger._destinations)
        proxy.accept()
        with pytest.raises(StreamError, match="does not know this session"):
            stream.wait(soon())


def test_a_session_whose_link_is_cut_goes_on_over_another_transport(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = layout_of(LARGE)
    with End("prefill", BOTH, layout, LIMITS) as source, End("decode", BOTH, layout, LIMITS) as destination:
        destination.accept()
        stream = source.send(destination.engine.address, "r")
        source.push(stream, range(10))
        destination.messenger.incoming("r", soon()).wait_layer(9, soon())
        (peer,) = source.engine.peers
        assert peer.transport == "shm"

        def fails(self: ShmTransport, channels: list[Any], deadline: float) -> Any:
            for channel in channels:
                channel.close()
            raise TransportError("device", "no shared memory any more")

        monkeypatch.setattr(ShmTransport, "connect", fails)
        peer.close()
        source.push(stream, range(10, LAYERS))
        stream.finish()
        destination.messenger.incoming("r", soon()).result(soon())
        assert destination.holds("r")
        stream.wait(soon())
        assert {peer.transport for peer in source.engine.peers} == {"tcp"}


def test_a_session_over_a_link_that_breaks_again_and_again_arrives() -> None:
    limits = dataclasses.replace(LIMITS, chunk_bytes=128 * KIB, window_bytes=256 * KIB, attempts=1000, resume_s=60)
    with ends("tcp", LARGE, limits) as (source, destination), FaultProxy(port_of(destination)) as proxy:
        stream = source.send(through(proxy, destination), "r")
        source.push(stream, range(LAYERS))
        stream.finish(1)
        for layer in (2, 5, 9, 17, 25):
            until(lambda layer=layer: stream.ended or stream.layers_arrived[layer])
            proxy.drop_all()
        there = destination.messenger.incoming("r", soon())
        there.result(soon())
        assert destination.holds("r")
        until(lambda: stream.ended)


def test_what_the_network_damages_is_noticed_and_never_delivered() -> None:
    """tcp has its own checksum, which does not see what a broken switch does to it, too."""
    with ends("tcp", LARGE) as (source, destination), FaultProxy(port_of(destination)) as proxy:
        stream = source.send(through(proxy, destination), "r")
        source.push(stream, range(4))
        there = destination.messenger.incoming("r", soon())
        there.wait_layer(3, soon())
        proxy.faults = Faults(corrupt=True, upstream=True, after_bytes=20 * KIB)
        source.push(stream, range(4, LAYERS))
        stream.finish()
        with pytest.raises(StreamError):
            there.result(soon())
        assert destination.wait_freed("r")


@pytest.mark.parametrize("checked", [True, False])
def test_a_page_that_is_replaced_before_it_was_sent_is_noticed(checked: bool) -> None:
    """The receiver would read the bytes of another request. Without the checksum it does."""
    limits = dataclasses.replace(LIMITS, window_bytes=64 * KIB, quiet_s=30)
    with ends("tcp", LARGE, limits) as (source, destination), FaultProxy(port_of(destination)) as proxy:
        stream = source.send(through(proxy, destination), "r", checked=checked)
        source.push(stream, [0])
        there = destination.messenger.incoming("r", soon())
        until(lambda: stream.layers_arrived[0] == PAGES)
        proxy.faults = Faults(swallow=True, upstream=True)
        source.push(stream, range(1, LAYERS))
        stream.finish()
        assert source.released == {True: 1}, "these pages are the session's until it says otherwise"
        source.part(0, LAYERS - 1, 0, 3)[:] = bytes(LARGE)
        proxy.faults = Faults()
        if checked:
            for waiting in (there.result, stream.wait):
                with pytest.raises(StreamError) as caught:
                    waiting(soon())
                assert caught.value.reason == "checksum"
                assert f"layer {LAYERS - 1}" in str(caught.value)
            assert destination.wait_freed("r")
        else:
            there.result(soon())
            assert not destination.holds("r")
            stream.wait(soon())


@pytest.mark.parametrize("scheme", BOTH)
@pytest.mark.parametrize("who", ["source", "destination"])
def test_an_abort_from_either_end_gives_pages_and_buffers_back(scheme: str, who: str) -> None:
    with ends(scheme, LARGE) as (source, destination):
        stream = source.send(destination.engine.address, "r")
        source.push(stream, range(LAYERS // 2))
        there = destination.messenger.incoming("r", soon())
        there.wait_layer(1, soon())
        slot = destination.taken["r"]
        (stream if who == "source" else there).abort("not wanted any more")
        for waiting in (there.result, stream.wait):
            with pytest.raises(StreamError, match=r"cancelled.*not wanted any more"):
                waiting(soon())
        assert destination.wait_freed("r")
        assert sum(source.released.values()) == LAYERS // 2
        source.push(stream, range(LAYERS // 2, LAYERS))
        assert sum(source.released.values()) == LAYERS
        assert destination.untouched(slot)
        (peer,) = source.engine.peers
        assert peer.alive, "an abort costs no link"
        again = source.send(destination.engine.address, "again")
        source.push(again, range(LAYERS))
        again.finish()
        destination.messenger.incoming("again", soon()).result(soon())
        assert destination.holds("again")


def test_nothing_lands_in_buffers_that_were_aborted_in_the_middle_of_a_slow_transfer() -> None:
    impatient = dataclasses.replace(LIMITS, quiet_s=0.3)
    with (
        End("prefill", ("tcp",), layout_of(LARGE), dataclasses.replace(LIMITS, quiet_s=60)) as source,
        End("decode", ("tcp",), layout_of(LARGE), impatient) as destination,
        FaultProxy(port_of(destination)) as proxy,
    ):
        destination.accept()
        stream = source.send(through(proxy, destination), "r")
        source.push(stream, [0])
        there = destination.messenger.incoming("r", soon())
        there.wait_layer(0, soon())
        proxy.faults = Faults(rate_bytes_s=100 * KIB, upstream=True)
        source.push(stream, range(1, LAYERS))
        slot = destination.taken["r"]
        there.abort()
        assert destination.wait_freed("r")
        proxy.faults = Faults()
        with pytest.raises(StreamError):
            stream.wait(soon())
        assert sum(source.released.values()) == LAYERS
        assert destination.untouched(slot)


def test_buffers_behind_an_engine_without_fences_are_free_only_after_a_clean_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TransferEngine, "fences", lambda self, peer: False)
    with End("decode", ("tcp",), layout_of(LARGE), IMPATIENT) as destination:
        destination.accept()
        with End("prefill", ("tcp",), layout_of(LARGE), IMPATIENT) as source:
            stream = source.send(destination.engine.address, "clean")
            source.push(stream, [0])
            destination.messenger.incoming("clean", soon()).wait_layer(0, soon())
            stream.abort()
            assert destination.wait_freed("clean")
        with process("source", "tcp", LARGE, IMPATIENT) as other:
            other.tell("send", destination.engine.address, "killed", 2)
            destination.messenger.incoming("killed", soon()).wait_layer(1, soon())
            other.signal(signal.SIGKILL)
            until(lambda: destination.messenger.report()["poisoned"])
            assert not destination.wait_freed("killed", 3.0)
        monkeypatch.undo()
        assert destination.wait_freed("killed")


def test_more_than_the_bounds_is_never_under_way_and_a_push_waits_no_longer_than_its_deadline() -> None:
    limits = dataclasses.replace(
        LIMITS, window_bytes=512 * KIB, link_bytes=768 * KIB, chunk_bytes=128 * KIB, queued_bytes=2 << 20
    )
    with ends("tcp", LARGE, limits) as (source, destination), FaultProxy(port_of(destination)) as proxy:
        streams = [source.send(through(proxy, destination), request, slot) for slot, request in enumerate(("a", "b"))]
        there = [destination.messenger.incoming(request, soon()) for request in ("a", "b")]
        proxy.faults = Faults(swallow=True, upstream=True)
        began = time.monotonic()
        refused = ""
        for layer in range(LAYERS):
            try:
                streams[0].push(layer, 0, source.places(0), source.note, deadline=time.monotonic() + 0.2)
            except StreamError as error:
                refused = error.reason
                break
        assert refused == "deadline"
        assert time.monotonic() - began < 60
        layer_bytes = layout_of(LARGE).page_bytes(0) * PAGES
        assert layer * layer_bytes < limits.queued_bytes + layer_bytes
        source.push(streams[1], range(2), 1)
        proxy.faults = Faults()
        source.push(streams[0], range(layer, LAYERS))
        source.push(streams[1], range(2, LAYERS), 1)
        for stream, end in zip(streams, there, strict=True):
            stream.finish()
            end.result(soon())
            stream.wait(soon())
        assert destination.holds("a")
        assert destination.holds("b")
        assert 0 < source.messenger.report()["peak_link_bytes"] <= limits.link_bytes


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def resident_kib() -> int:
    return int(next(line for line in Path("/proc/self/status").read_text().splitlines() if "VmRSS" in line).split()[1])


@pytest.mark.parametrize("scheme", BOTH)
def test_a_thousand_sessions_leave_nothing_behind(scheme: str) -> None:
    limits = Limits(silence_s=20, remember_s=0.2)
    with ends(scheme, 512, limits, layers=4) as (source, destination):

        def session(number: int) -> None:
            request = f"r{number}"
            stream = source.send(destination.engine.address, request)
            source.push(stream, range(4))
            there = destination.messenger.incoming(request, soon())
            if number % 10 == 9:
                there.abort()
                destination.wait_freed(request)
                with pytest.raises(StreamError):
                    stream.wait(soon())
                destination.freed.clear()
                return
            stream.finish()
            there.result(soon())
            assert destination.holds(request)
            stream.wait(soon())
            destination.done_with(request)

        for number in range(200):
            session(number)
        gc.collect()
        files, memory = descriptors(), resident_kib()
        for number in range(200, 1000):
            session(number)
        gc.collect()
        assert descriptors() <= files + 2
        assert resident_kib() < memory + 16 * KIB
        messenger = destination.messenger
        until(lambda: not messenger._remembered and not messenger._destinations and not messenger._requests)
        until(lambda: not source.messenger._sources)
        assert source.messenger.report()["ended_ok"] == 900


@pytest.mark.parametrize(
    ("change", "said"),
    [({"dtype": "fp8_e4m3"}, "dtype: 'fp8_e4m3'"), ({"page_tokens": 1}, "page_tokens"), ({"namespace": "x"}, "namespace")],
)
def test_ends_with_other_layouts_are_refused_with_the_field_and_no_buffer(change: dict[str, Any], said: str) -> None:
    with ends("tcp") as (source, destination):
        layout = Layout(**{field: getattr(source.layout, field) for field in Layout.__struct_fields__} | change)
        destination.messenger.accept(layout, destination.reserve)
        stream = source.send(destination.engine.address, "r")
        source.push(stream, range(LAYERS))
        with pytest.raises(StreamError, match=said) as caught:
            stream.wait(soon())
        assert caught.value.reason == "layout"
        assert source.released == {False: LAYERS}
        assert destination.taken == {}
        with pytest.raises(StreamError, match=said):
            destination.messenger.incoming("r", soon()).result(soon())


def test_sessions_are_declined_with_the_reason() -> None:
    limits = dataclasses.replace(LIMITS, sessions=2)
    with ends("tcp", limits=limits) as (source, destination):
        first = source.send(destination.engine.address, "a")
        destination.messenger.incoming("a", soon())
        source.push(first, [0])
        until(lambda: first.layers_arrived[0])
        twice = source.send(destination.engine.address, "a")
        with pytest.raises(StreamError, match="being received already"):
            twice.wait(soon())
        until(lambda: source.messenger.report()["sending"] == 1)
        second = source.send(destination.engine.address, "b")
        with pytest.raises(StreamError, match=r"Limits\.sessions") as caught:
            source.send(destination.engine.address, "c")
        assert caught.value.reason == "full"
        source.push(second, [0])
        until(lambda: second.layers_arrived[0])
        with Messenger(TransferEngine("third", transports=("tcp",))) as third:
            memory = third.engine.allocate(source.layout.all_bytes * PAGES)[0]
            bases = [[memory.address] * 2 for _ in range(LAYERS)]
            more = third.send(destination.engine.address, "c", source.layout, bases, PAGES, deadline=soon())
            with pytest.raises(StreamError, match="2 sessions are being received"):
                more.wait(soon())
            nobody = source.engine.address
            silent = third.send(nobody, "d", source.layout, bases, PAGES, deadline=soon())
            with pytest.raises(StreamError, match="takes no sessions"):
                silent.wait(soon())
        third.engine.close()


def test_pages_in_no_registered_memory_are_refused_and_not_read() -> None:
    with ends("tcp") as (source, destination):
        stream = source.send(destination.engine.address, "r")
        for places in ([1 << 40] * PAGES, [-(1 << 40), *range(1, PAGES)]):
            with pytest.raises(ValueError, match="registered memory"):
                stream.push(0, 0, places)
        source.push(stream, range(LAYERS))
        stream.finish()
        destination.messenger.incoming("r", soon()).result(soon())
        assert destination.holds("r")


def test_memory_that_is_unregistered_in_the_middle_ends_the_session() -> None:
    freed: list[bool] = []
    with ends("tcp") as (source, destination):
        places = destination.places(0)
        destination.messenger.accept(
            destination.layout, lambda _: Buffers(destination.bases, places, lambda: freed.append(True))
        )
        stream = source.send(destination.engine.address, "r")
        source.push(stream, [0])
        until(lambda: stream.layers_arrived[0])
        destination.engine.unregister(destination.region)
        source.push(stream, [1])
        with pytest.raises(StreamError) as caught:
            stream.wait(soon())
        assert caught.value.reason == "bounds"
        until(lambda: freed)


@pytest.mark.parametrize("fault", ["raises", "wrong bases", "too few pages", "no memory"])
def test_receivers_that_fail_cost_their_session_only(fault: str) -> None:
    freed = []

    def reserve(stream: Any) -> Buffers:
        good = destination.reserve(stream)
        if fault == "raises":
            destination.free(stream.request)
            raise StreamError("declined", "out of pages")
        bases = good.bases[:3] if fault == "wrong bases" else good.bases
        if fault == "no memory":
            bases = [[base + (1 << 40) for base in parts] for parts in bases]
        return Buffers(bases, good.pages[:2] if fault == "too few pages" else good.pages, lambda: freed.append(good.free()))

    with ends("tcp") as (source, destination):
        destination.messenger.accept(destination.layout, reserve)
        stream = source.send(destination.engine.address, "r")
        source.push(stream, range(LAYERS))
        with pytest.raises(StreamError) as caught:
            stream.wait(soon())
        assert caught.value.reason == "declined"
        assert destination.wait_freed("r")
        assert len(freed) == (fault != "raises")
        assert source.released == {False: LAYERS}
        if fault == "raises":
            assert "out of pages" in str(caught.value)


def test_a_messenger_that_ends_gives_everything_back() -> None:
    with ends("tcp", LARGE) as (source, destination):
        stream = source.send(destination.engine.address, "r")
        source.push(stream, range(4))
        destination.messenger.incoming("r", soon()).wait_layer(0, soon())
        destination.messenger.close()
        assert destination.freed == ["r"]
        with pytest.raises(StreamError, match="the destination ends"):
            stream.wait(soon())
        with pytest.raises(StreamError, match="closed"):
            destination.messenger.incoming("later", soon())
        source.messenger.close()
        with pytest.raises(StreamError, match="closed"):
            source.send(destination.engine.address, "later")


def test_notices_of_others_are_counted_and_harm_nobody() -> None:
    with ends("tcp") as (source, destination):
        peer = source.engine.connect(destination.engine.address, soon())
        for strange in (b"", b"hello", bytes(1000)):
            peer.notify(strange, soon())
        until(lambda: destination.messenger.report()["strange_notices"] == 3)
        stream = source.send(destination.engine.address, "r")
        source.push(stream, range(LAYERS))
        stream.finish()
        destination.messenger.incoming("r", soon()).result(soon())
        assert destination.holds("r")


def test_callbacks_that_fail_harm_nobody() -> None:
    def fails(arrived: bool) -> None:
        raise RuntimeError("of the engine's own making")

    with ends("tcp") as (source, destination):
        stream = source.send(destination.engine.address, "r")
        stream.push(0, 0, source.places(0), fails)
        source.push(stream, range(1, LAYERS))
        stream.finish()
        destination.messenger.incoming("r", soon()).result(soon())
        stream.wait(soon())
        assert destination.holds("r")
        aborted = source.send(destination.engine.address, "aborted")
        aborted.abort()
        with pytest.raises(StreamError, match="cancelled"):
            aborted.wait(soon())
        aborted.push(0, 0, source.places(0), fails)
        assert aborted.ended


def test_the_example_of_the_documentation_runs_and_prints_what_it_says() -> None:
    text = (Path(__file__).parents[1] / "docs" / "messenger.md").read_text()
    program = text.partition("```python\n")[2].partition("```")[0]
    prints = text.partition("It prints\n\n```\n")[2].partition("```")[0]
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment())
    assert ran.stderr == ""
    assert ran.stdout == prints


def test_addresses_that_are_none_are_refused_at_once() -> None:
    with ends("tcp") as (source, _):
        for address in ("nowhere", [], "a@b"):
            with pytest.raises(ValueError, match=r"address|port"):
                source.send(address, "r")
