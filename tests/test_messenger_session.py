"""The state machines of a session from prefill to decode: whatever the network does, no wrong byte is delivered, no byte is
lost, and no buffer is handed out that may still be written to."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hicache_mooncake.messenger import actions as a
from hicache_mooncake.messenger import messages as m
from hicache_mooncake.messenger.destination import Destination, DestinationState
from hicache_mooncake.messenger.layout import Layout, neighbours, pieces
from hicache_mooncake.messenger.source import Source, SourceState, _At
from hicache_mooncake.protocol import ProtocolError
from tests.messenger_world import BASES, LAYOUT, LIMITS, PAGES, SESSION, Trouble, World

CALM = Trouble(cut=0.0, repeat=0.0)
TROUBLES = {
    "calm": CALM,
    "links break": Trouble(cut=0.02),
    "links break often": Trouble(cut=0.1),
    "writes fail": Trouble(fail=0.1),
    "aborts": Trouble(cut=0.01, abort=0.01, fail=0.1),
    "pages are replaced": Trouble(cut=0.01, replace=0.02),
    "silence": Trouble(cut=0.01, silence=0.03),
    "all at once": Trouble(cut=0.03, repeat=0.05, abort=0.003, replace=0.003, silence=0.02, fail=0.05),
}


@pytest.mark.parametrize("trouble", TROUBLES.values(), ids=TROUBLES)
def test_sessions_in_trouble_end_well_or_not_at_all(trouble: Trouble) -> None:
    ends: dict[str, int] = {}
    resumed = 0
    for seed in range(150):
        world = World(seed, trouble)
        world.run()
        ends[world.source.reason] = ends.get(world.source.reason, 0) + 1
        resumed += world.source.generation > 1 and world.source.state is SourceState.DONE
    if trouble is CALM:
        assert set(ends) == {""}
    if trouble is TROUBLES["links break"]:
        assert resumed > 20, ends
    if trouble.abort:
        assert ends["cancelled"] > 10, ends
    if trouble is TROUBLES["pages are replaced"]:
        assert ends["checksum"] > 10, ends


@settings(max_examples=60)
@given(
    st.integers(0, 1 << 32),
    st.floats(0, 0.2),
    st.floats(0, 0.2),
    st.floats(0, 0.02),
    st.floats(0, 0.02),
    st.floats(0, 0.05),
    st.floats(0, 0.2),
)
def test_any_trouble(seed: int, cut: float, repeat: float, abort: float, replace: float, silence: float, fail: float) -> None:
    World(seed, Trouble(cut, repeat, abort, replace, silence, fail)).run(300)


def _fails(sabotage: Callable[[pytest.MonkeyPatch], None], trouble: Trouble, seeds: int = 300) -> bool:
    with pytest.MonkeyPatch.context() as patch:
        sabotage(patch)
        for seed in range(seeds):
            try:
                World(seed, trouble).run()
            except (AssertionError, KeyError):
                return True
    return False


def resumes_without_a_fence(patch: pytest.MonkeyPatch) -> None:
    def fence(self: Any, now: float) -> None:
        self._exposed.clear()
        self.state = DestinationState.RECEIVING
        self._go_on(now)

    patch.setattr(Destination, "_fence", fence)


def frees_poisoned_buffers(patch: pytest.MonkeyPatch) -> None:
    def drain(self: Any, now: float) -> None:
        if self.state is DestinationState.POISONED and not self._reserving and not self._verifying:
            self._exposed.clear()
            self.state = DestinationState.FREED
            self._actions.append(a.Free())

    patch.setattr(Destination, "_drain", drain)


def believes_an_unclean_end(patch: pytest.MonkeyPatch) -> None:
    told = Destination.told

    def believing(self: Any, now: float, message: Any) -> None:
        if isinstance(message, m.Quiet):
            message = m.Quiet(message.session, message.generation, True)
        told(self, now, message)

    patch.setattr(Destination, "told", believing)


def calls_every_end_clean(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Source, "_dirty", property(lambda self: False, lambda self, value: None), raising=False)


def frees_while_it_verifies(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Destination, "_verifying", property(lambda self: 0, lambda self, value: None), raising=False)


def counts_without_looking(patch: pytest.MonkeyPatch) -> None:
    verified = Destination.verified
    patch.setattr(
        Destination, "verified", lambda self, now, layer, first, count, ok: verified(self, now, layer, first, count, True)
    )


def takes_stale_messages(patch: pytest.MonkeyPatch) -> None:
    for kind in (Source, Destination):
        told = kind.told

        def taking(self: Any, now: float, message: Any, told: Any = told) -> None:
            told(self, now, type(message)(message.session, self.generation, *_rest(message)))

        patch.setattr(kind, "told", taking)


def _rest(message: Any) -> list[Any]:
    return [getattr(message, field) for field in message.__struct_fields__[2:]]


def counts_repeated_runs(patch: pytest.MonkeyPatch) -> None:
    def ran(self: Any, now: float, message: m.Ran) -> None:
        self._claimed[message.layer] += message.count
        self._verifying += 1
        self._actions.append(a.Verify(message.layer, message.first, message.count, message.checksum))

    patch.setattr(Destination, "_ran", ran)


def commits_before_all_has_come(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Destination, "layers_done", property(lambda self: self.layout.layers))


def releases_pages_when_written(patch: pytest.MonkeyPatch) -> None:
    wrote = Source.wrote

    def releasing(self: Any, now: float, ticket: int, reason: str = "", why: str = "") -> None:
        run = self._runs.get(ticket)
        if run is not None and not reason:
            self._actions.append(a.Release(run.tag, True))
            run.tag = (run.layer, run.first, 0)
        wrote(self, now, ticket, reason, why)

    patch.setattr(Source, "wrote", releasing)


def gives_up_pages_that_are_being_written(patch: pytest.MonkeyPatch) -> None:
    def settle(self: Any, now: float) -> None:
        if self.state is SourceState.ABORTING:
            self._tell(now, m.Quiet(self.session, self.generation, True))
            self._actions += [a.Release(run.tag, False) for run in self._runs.values()]
            self._runs.clear()
            self.writing_bytes = self.queued_bytes = 0
            self.state = SourceState.FAILED
            self._actions.append(a.Ended(self.reason, self.detail))

    patch.setattr(Source, "_settle", settle)


def tells_of_runs_out_of_order(patch: pytest.MonkeyPatch) -> None:
    speak = Source._speak

    def out_of_order(self: Any, now: float) -> None:
        self._order = type(self._order)(sorted(self._order, key=lambda run: run.at is not _At.WRITTEN))
        speak(self, now)

    patch.setattr(Source, "_speak", out_of_order)


def forgets_what_was_not_counted(patch: pytest.MonkeyPatch) -> None:
    resume = Source._resume

    def forgetting(self: Any, now: float) -> None:
        told = [run for run in self._runs.values() if run.at is _At.TOLD]
        resume(self, now)
        for run in told:
            if run in self._queue:
                self._queue.remove(run)

    patch.setattr(Source, "_resume", forgetting)


SABOTAGES = (
    (resumes_without_a_fence, "links break often"),
    (frees_poisoned_buffers, "aborts"),
    (believes_an_unclean_end, "aborts"),
    (calls_every_end_clean, "aborts"),
    (frees_while_it_verifies, "aborts"),
    (counts_without_looking, "pages are replaced"),
    (takes_stale_messages, "links break often"),
    (counts_repeated_runs, "all at once"),
    (commits_before_all_has_come, "calm"),
    (releases_pages_when_written, "calm"),
    (gives_up_pages_that_are_being_written, "aborts"),
    (tells_of_runs_out_of_order, "calm"),
    (forgets_what_was_not_counted, "links break often"),
)


@pytest.mark.parametrize(("sabotage", "trouble"), SABOTAGES, ids=[each.__name__ for each, _ in SABOTAGES])
def test_a_machine_that_breaks_a_rule_is_noticed(sabotage: Callable[[pytest.MonkeyPatch], None], trouble: str) -> None:
    assert _fails(sabotage, TROUBLES[trouble])


# --------------------------------------------------------------------------- one by one


def opened(layout: Layout = LAYOUT, generation: int = 1, pages: int = PAGES, budget_s: float = 100.0) -> m.Open:
    return m.Open(SESSION, generation, "r", layout, pages, True, budget_s, generation == 1)


def receiving(limits: a.Limits = LIMITS) -> Destination:
    destination = Destination(opened(), LAYOUT, limits, 0.0)
    destination.reserved(0.0, BASES, list(range(PAGES)))
    destination.take()
    return destination


def streaming(limits: a.Limits = LIMITS, deadline: float = 100.0) -> Source:
    source = Source(SESSION, "r", LAYOUT, BASES, PAGES, limits, 0.0, deadline)
    source.connected(0.0, 1)
    source.told(0.0, m.Reserved(SESSION, 1, BASES, [0] * LAYOUT.layers, PAGES))
    source.told(0.0, m.Places(SESSION, 1, 0, list(range(PAGES))))
    assert source.state is SourceState.STREAMING
    source.take()
    return source


def told(machine: Source | Destination) -> list[Any]:
    return [action.message for action in machine.take() if isinstance(action, a.Tell)]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"namespace": "other"}, "namespace: 'model' here, 'other' there"),
        ({"dtype": "fp8"}, "dtype: 'bf16' here, 'fp8' there"),
        ({"page_tokens": 8}, "page_tokens: 4 here, 8 there"),
        ({"runs": LAYOUT.runs[:2]}, "layers: 3 here, 2 there"),
        ({"runs": (*LAYOUT.runs[:2], (8,))}, "bytes a page in layer 2: [4] here, [8] there"),
    ],
    ids=["namespace", "dtype", "page size", "layers", "bytes"],
)
def test_ends_that_disagree_refuse_with_the_field_before_an_address_is_told(change: dict[str, Any], said: str) -> None:
    theirs = Layout(**{field: getattr(LAYOUT, field) for field in LAYOUT.__struct_fields__} | change)
    destination = Destination(opened(theirs), LAYOUT, LIMITS, 0.0)
    (declined, ended) = destination.take()
    assert isinstance(declined, a.Tell)
    assert isinstance(declined.message, m.Declined)
    assert isinstance(ended, a.Ended)
    assert declined.message.reason == ended.reason == "layout"
    assert said in declined.message.detail
    assert destination.state is DestinationState.FREED


@pytest.mark.parametrize(
    "layout",
    [
        Layout("m", "bf16", 4, ()),
        Layout("m", "bf16", 4, ((),)),
        Layout("m", "bf16", 4, ((0,),)),
        Layout("m", "bf16", 0, ((1,),)),
        Layout("m" * 5000, "bf16", 4, ((1,),)),
        Layout("m", "bf16", 4, ((1,) * 5000,)),
    ],
)
def test_layouts_that_make_no_sense_are_refused(layout: Layout) -> None:
    with pytest.raises(ValueError, match=r"a layout has|the parts of a page|namespace and dtype"):
        layout.check()


def test_neighbours_are_those_on_both_sides() -> None:
    assert list(neighbours([3, 4, 5, 9, 10], [0, 1, 5, 6, 7])) == [(3, 0, 2), (5, 5, 1), (9, 6, 2)]
    assert pieces((10, 1), (1000, 2000), (3, 4), (5000, 6000), (8, 9)) == [(1030, 5080, 20), (2003, 6008, 2)]


def test_a_push_that_does_not_follow_is_refused() -> None:
    source = streaming()
    for layer, first, count in ((3, 0, 1), (-1, 0, 1), (0, 1, 1), (0, 0, 0), (0, 0, PAGES + 1)):
        with pytest.raises(ValueError, match="layer"):
            source.push(layer, first, [0] * count, 0)
    with pytest.raises(ValueError, match="layer 0: 0 of 5 pages were pushed"):
        source.finish(0.0, 0, b"")


def test_only_so_much_is_under_way_and_the_rest_follows() -> None:
    source = streaming()
    for layer in range(LAYOUT.layers):
        for run in source.cut(layer, 0, PAGES):
            source.push(layer, run.start, list(run), 0)
    writes = [action for action in source.take() if isinstance(action, a.Write)]
    assert 0 < sum(write.size for write in writes) <= LIMITS.window_bytes
    moved = 0
    while writes:
        write = writes.pop(0)
        moved += write.size
        source.wrote(0.0, write.ticket)
        writes += [action for action in source.take() if isinstance(action, a.Write)]
        assert sum(write.size for write in writes) <= LIMITS.window_bytes
    assert moved == PAGES * LAYOUT.all_bytes


def test_a_push_waits_when_too_much_has_not_arrived() -> None:
    source = streaming(dataclasses.replace(LIMITS, queued_bytes=20))
    source.push(0, 0, [0, 1], 0)
    assert source.has_room
    source.push(0, 2, [2, 3], 0)
    assert not source.has_room
    (first, *_) = [action for action in source.take() if isinstance(action, a.Write)]
    source.wrote(0.0, first.ticket)
    assert not source.has_room
    source.told(0.0, m.Counted(SESSION, 1, 0, 2))
    assert source.has_room


def test_a_destination_that_is_never_committed_to_is_poisoned_fenced_and_freed() -> None:
    destination = receiving()
    now = 0.0
    while destination.state is DestinationState.RECEIVING:
        now += 0.5
        destination.told(now, m.Alive(SESSION, 1, False))
        destination.tick(now)
        assert now < 200
    assert destination.reason == "deadline"
    assert [type(message) for message in told(destination)][-1] is m.Abort
    destination.tick(now + LIMITS.quiet_s / 2)
    assert destination.take() == []
    destination.tick(now + LIMITS.quiet_s)
    assert destination.take() == [a.Fence(1)]
    destination.fenced(now, 1, False)
    destination.tick(now)
    assert (destination.take(), destination.state) == ([], DestinationState.POISONED)
    destination.tick(now + LIMITS.fence_retry_s)
    assert destination.take() == [a.Fence(1)]
    destination.fenced(now, 1, True)
    assert destination.take() == [a.Free()]


def test_a_source_that_says_nothing_any_more_is_given_up() -> None:
    destination = receiving()
    destination.tick(LIMITS.silence_s + LIMITS.resume_s - 0.1)
    assert destination.state is DestinationState.RECEIVING
    destination.tick(LIMITS.silence_s + LIMITS.resume_s)
    assert (destination.state, destination.reason) == (DestinationState.POISONED, "peer")


def test_a_destination_that_says_nothing_any_more_is_connected_to_anew_and_given_up() -> None:
    source = streaming()
    source.tick(LIMITS.silence_s)
    assert a.Connect(2) in source.take()
    source.not_connected(LIMITS.silence_s, 2, "refused")
    now = LIMITS.silence_s
    while not source.ended:
        now += 0.1
        source.tick(now)
        for action in source.take():
            if isinstance(action, a.Connect):
                source.not_connected(now, action.generation, "refused")
        assert now < 100
    assert (source.reason, source.detail) == ("peer", "refused")


def test_an_end_that_has_nothing_to_say_is_heard_of_in_time() -> None:
    source, destination = streaming(), receiving()
    now = 0.0
    for _ in range(200):
        now += 0.1
        source.tick(now)
        destination.tick(now)
        for message in told(source):
            destination.told(now, message)
        for message in told(destination):
            source.told(now, message)
    assert (source.state, destination.state) == (SourceState.STREAMING, DestinationState.RECEIVING)


def test_what_was_delivered_and_is_not_fetched_is_freed() -> None:
    destination = Destination(opened(pages=1), LAYOUT, LIMITS, 0.0)
    destination.reserved(0.0, BASES, [0])
    for layer in range(LAYOUT.layers):
        destination.told(0.0, m.Ran(SESSION, 1, layer, 0, 1, 0))
        destination.verified(0.0, layer, 0, 1, True)
    destination.told(0.0, m.Commit(SESSION, 1, 7, b""))
    assert destination.state is DestinationState.COMMITTED
    destination.take()
    destination.tick(LIMITS.unclaimed_s)
    assert destination.take() == [a.Free()]
    assert not destination.claimed()


def test_a_source_that_asks_again_after_the_end_hears_how_it_ended() -> None:
    destination = receiving()
    destination.abort(0.0)
    destination.told(0.0, m.Quiet(SESSION, 1, True))
    assert destination.state is DestinationState.FREED
    destination.take()
    destination.opened(1.0, opened(generation=2))
    (declined,) = told(destination)
    assert (declined.generation, declined.reason) == (2, "cancelled")


@pytest.mark.parametrize(
    "message",
    [
        m.Ran(SESSION, 1, 99, 0, 1, 0),
        m.Ran(SESSION, 1, 0, -1, 1, 0),
        m.Ran(SESSION, 1, 0, 0, PAGES + 1, 0),
        m.Ran(SESSION, 1, 0, 0, 0, 0),
        m.Ran(SESSION, 1, 0, 1, 1, 0),
        m.Commit(SESSION, 1, 0, b""),
    ],
)
def test_a_source_that_breaks_the_protocol_ends_its_session(message: Any) -> None:
    destination = receiving()
    destination.told(0.0, message)
    assert (destination.state, destination.reason) == (DestinationState.POISONED, "protocol")


@pytest.mark.parametrize(
    "messages",
    [
        [m.Reserved(SESSION, 1, BASES[:1], [0, 0, 0], PAGES)],
        [m.Reserved(SESSION, 1, BASES, [1, 0, 0], PAGES)],
        [m.Reserved(SESSION, 1, BASES, [0, 0, 0], PAGES - 1)],
        [m.Reserved(SESSION, 1, BASES, [0, 0, 0], PAGES), m.Places(SESSION, 1, 1, [0])],
        [m.Reserved(SESSION, 1, BASES, [0, 0, 0], PAGES), m.Places(SESSION, 1, 0, [0] * (PAGES + 1))],
        [m.Done(SESSION, 1)],
    ],
)
def test_a_destination_that_breaks_the_protocol_ends_its_session(messages: list[Any]) -> None:
    source = Source(SESSION, "r", LAYOUT, BASES, PAGES, LIMITS, 0.0, 100.0)
    source.connected(0.0, 1)
    for message in messages:
        source.told(0.0, message)
    assert (source.state, source.reason) == (SourceState.FAILED, "protocol")


def test_messages_come_whole_or_not_at_all() -> None:
    large = m.Places(SESSION, 3, 0, [(1 << 32) - 1] * m.MAX_PLACES)
    for message in (opened(), large, m.Commit(SESSION, 1, 5, b"x" * m.MAX_AUX_BYTES), m.Quiet(SESSION, 2, True)):
        packed = m.pack(message)
        assert len(packed) <= 64 << 10
        assert m.unpack(packed) == message
        damaged = bytearray(packed)
        damaged[len(damaged) // 2] ^= 1
        with pytest.raises(ProtocolError):
            m.unpack(bytes(damaged))
    for strange in (b"", b"hello", m.pack(m.Quiet(b"short", 1, True)), m.pack(m.Quiet(SESSION, 0, True))):
        with pytest.raises(ProtocolError):
            m.unpack(strange)
