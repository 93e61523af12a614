"""What an administrator does to a server that runs: attach, detach, flush, clear; and a node that is frozen or dead meanwhile.

A server of two ranks and one of one rank, real SGLang on CPU, both started without an L3. What is right is what transformers
answers.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from hicache_mooncake.testing.sglang_cpu.reference import reference_answers
from hicache_mooncake.testing.sglang_cpu.servers import (
    PAGE_TOKENS,
    Answer,
    Cached,
    Refused,
    attach_storage,
    attached_storage,
    clear_storage,
    detach_storage,
    flush_cache,
    full_pages,
    generate,
    pool_config,
    update_weights,
)
from hicache_mooncake.testing.sglang_cpu.tiny_model import Family, make_tiny_model
from tests.e2e.support import (
    END_TO_END,
    MARKS,
    Engine,
    Host,
    Prompt,
    ask,
    ask_and_wait_until_written,
    prompt,
    running_hosts,
)
from tests.sglang.matrix import Supports

pytestmark = [*MARKS, pytest.mark.slow]

KEY = "admin"
ANSWER_TOKENS, LONG_ANSWER_TOKENS = 8, 60
FIRST, SECOND, THIRD, FOURTH, FIFTH, SIXTH, SEVENTH, EIGHTH, NINTH, TAIL = PROMPTS = [
    prompt(40 + i, 400 + 33 * i) for i in range(10)
]


@dataclass
class Server:
    """The server under test. Every method leaves it idle."""

    host: Host
    right: dict[Prompt, tuple[int, ...]]

    @property
    def url(self) -> str:
        return self.host.engine.url

    def attach(self, **settings: object) -> None:
        attach_storage(self.url, "mooncake", pool_config(self.host.node.socket_path) | settings, admin_key=KEY)

    def detach(self) -> None:
        self.flush()  # waits until the last answer is written
        self.detach_now()

    def detach_now(self) -> None:
        detach_storage(self.url, admin_key=KEY)

    def attached(self) -> str | None:
        return attached_storage(self.url, admin_key=KEY)

    def flush(self) -> None:
        flush_cache(self.url, admin_key=KEY)

    def ask(self, ids: Prompt) -> Cached:
        """With L1 and L2 empty: what is cached comes from L3."""
        self.flush()
        answer = ask(self.host.engine, ids, tokens=ANSWER_TOKENS)
        assert answer.output_ids == self.right[ids]
        return answer.cached

    def write(self, ids: Prompt) -> None:
        """A prompt that L3 does not know is in L3 afterwards, each rank's part of every page."""
        self.flush()
        answer = ask_and_wait_until_written(self.host.engine, ids, tokens=ANSWER_TOKENS, copies=self.host.engine.tp)
        assert answer.output_ids == self.right[ids]
        assert answer.cached == Cached()


@pytest.fixture(scope="module")
def running(tiny_model: Callable[[Family], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Server]]:
    model = tiny_model("llama")
    talks = reference_answers(model, [*([ids] for ids in PROMPTS), [NINTH, TAIL]], max_new_tokens=ANSWER_TOKENS)
    right = {ids: answer for talk in talks for ids, answer in talk}
    args = ("--admin-api-key", KEY)
    engines = [Engine(model, tp=tp, attached=False, args=args) for tp in (2, 1)]
    with running_hosts(tmp_path_factory.mktemp("runtime"), *engines) as (a, b):
        yield Server(a, right), Server(b, right)


@dataclass
class OtherWeights:
    model: Path
    right: dict[Prompt, tuple[int, ...]]
    original: Path


@pytest.fixture(scope="module")
def other_weights(tiny_model: Callable[[Family], Path], tmp_path_factory: pytest.TempPathFactory) -> OtherWeights:
    """The same model, trained on: what it computes for a prompt is not what the first one does."""
    model = make_tiny_model(tmp_path_factory.mktemp("other") / "weights", seed=4321)
    talks = reference_answers(model, [[FIRST], [SECOND]], max_new_tokens=ANSWER_TOKENS)
    return OtherWeights(model, {ids: answer for [(ids, answer)] in talks}, tiny_model("llama"))


@pytest.fixture
def servers(running: tuple[Server, Server]) -> Iterator[tuple[Server, Server]]:
    """No L3 attached before the test, none after it."""
    for server in running:
        assert server.attached() is None
    yield running
    for server in running:
        server.host.node.thaw()
        server.detach()
        assert server.host.engine.running


@pytest.fixture
def server(servers: tuple[Server, Server]) -> Server:
    """The one with two ranks."""
    return servers[0]


def whole(ids: Prompt) -> Cached:
    return Cached(storage=full_pages(len(ids) - 1))


def test_attached_and_detached_twice_over(server: Server, supports: Supports) -> None:
    assert server.ask(FIRST) == Cached()
    server.attach()
    assert server.attached() == "mooncake"
    stored = server.host.node.metric("stored_total")
    server.write(FIRST)
    pages = full_pages(len(FIRST) + ANSWER_TOKENS - 1) // PAGE_TOKENS
    assert server.host.node.metric("stored_total") - stored == 2 * pages, "each rank its own"
    assert server.ask(FIRST) == whole(FIRST)
    server.detach()
    assert server.attached() is None
    assert server.ask(FIRST) == Cached()

    server.attach()
    assert server.ask(FIRST) == whole(FIRST), "the node kept them"
    server.write(SECOND)
    assert server.ask(SECOND) == whole(SECOND)
    server.detach()
    assert server.ask(SECOND) == Cached()
    supports(family="mha", layout="page_first", shape=f"{END_TO_END}, TP 2")


def test_what_was_computed_before_the_attach_is_never_found_under_a_wrong_name(server: Server) -> None:
    """Its pages had no hash then. A chain that began again behind them would offer the tail to whoever begins with it."""
    server.flush()
    first = ask(server.host.engine, NINTH, tokens=ANSWER_TOKENS)
    server.attach()
    both = (*NINTH, *first.output_ids, *TAIL)
    answer = ask(server.host.engine, both, tokens=ANSWER_TOKENS)
    assert answer.output_ids == server.right[both]
    assert answer.cached.device == full_pages(len(NINTH) + ANSWER_TOKENS - 1)
    assert server.ask(TAIL) == Cached()
    assert server.ask(both) in (Cached(), whole(both)), "the pages before the tail are missing, or none is"


class Talk:
    """One long request in a thread."""

    def __init__(self, server: Server, ids: Prompt) -> None:
        self._answer: Answer | None = None
        self._begun = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(server.url, ids), daemon=True)

    def _run(self, url: str, ids: Prompt) -> None:
        self._answer = generate(
            url, ids, max_new_tokens=LONG_ANSWER_TOKENS, on_tokens=lambda tokens: tokens and self._begun.set()
        )

    def __enter__(self) -> Talk:
        self._thread.start()
        assert self._begun.wait(60), "no token within 60 s"
        return self

    def __exit__(self, *exception: object) -> None:
        self._thread.join(120)

    @property
    def goes_on(self) -> bool:
        return self._thread.is_alive()

    def answer(self) -> Answer:
        self._thread.join(120)
        assert self._answer is not None, "the request failed"
        return self._answer


def until_accepted(talk: Talk, call: Callable[[], None]) -> list[str]:
    """Call again until the server is idle enough to do it; returns with what it refused while the request ran."""
    refusals = []
    while True:
        busy = talk.goes_on
        try:
            call()
        except Refused as refusal:
            refusals += [str(refusal)] * busy
        else:
            return refusals


def test_under_traffic_sglang_refuses_and_nothing_is_half_done(server: Server) -> None:
    with Talk(server, THIRD) as talk:
        refusals = until_accepted(talk, server.attach)
        right = talk.answer().output_ids
    assert refusals, "the request was over too soon"
    assert all("not idle" in refusal for refusal in refusals)
    assert right[:ANSWER_TOKENS] == server.right[THIRD]
    server.write(THIRD)

    server.flush()
    with Talk(server, THIRD) as talk:
        refusals = until_accepted(talk, server.detach_now)
        answer = talk.answer()
    assert refusals, "the request was over too soon"
    assert answer.output_ids == right
    assert answer.cached == whole(THIRD), "still attached while the detach was refused"
    assert server.attached() is None
    assert server.ask(THIRD) == Cached()


def test_clear_touches_this_model_only(server: Server) -> None:
    server.attach(model_id="one")
    server.write(FOURTH)
    server.detach()

    server.attach(model_id="another")
    server.write(FOURTH)
    assert server.ask(FOURTH) == whole(FOURTH)
    clear_storage(server.url, admin_key=KEY)
    assert server.ask(FOURTH) == Cached()
    server.detach()

    server.attach(model_id="one")
    assert server.ask(FOURTH) == whole(FOURTH)


def test_engines_of_another_parallel_size_share_where_they_are_told_to(
    servers: tuple[Server, Server], supports: Supports
) -> None:
    two, one = servers
    two.attach()
    one.attach()
    two.write(SEVENTH)
    assert one.ask(SEVENTH) == Cached()

    for server in servers:
        server.detach()
        server.attach(share_across_tp=True)
    two.write(SEVENTH)
    assert one.ask(SEVENTH) == whole(SEVENTH)
    one.write(EIGHTH)
    assert two.ask(EIGHTH) == whole(EIGHTH)
    supports(family="mha", layout="page_first", shape=f"{END_TO_END}, another TP size")


def test_a_frozen_node_stops_neither_flush_nor_detach(server: Server) -> None:
    server.attach()
    server.write(FIFTH)
    server.host.node.freeze()
    # What is asked for and what is written waits for the node here, as long as the deadline allows.
    assert server.ask(FIFTH) == Cached()
    server.flush()
    server.detach()
    assert server.attached() is None
    assert server.ask(FIFTH) == Cached()

    server.attach()  # nobody answers yet
    assert server.ask(FIFTH) == Cached()
    server.host.node.thaw()
    for _ in range(30):
        if (cached := server.ask(FIFTH)) != Cached():
            break
    assert cached == whole(FIFTH)


def test_a_dead_node_stops_neither_flush_nor_clear_nor_detach(server: Server) -> None:
    server.attach()
    server.write(SIXTH)
    server.host.node.kill()
    assert server.ask(SIXTH) == Cached()
    clear_storage(server.url, admin_key=KEY)
    server.detach()
    server.attach()
    assert server.ask(SIXTH) == Cached()

    server.host.node.start_and_wait()
    for _ in range(30):
        if (cached := server.ask(SIXTH)) != Cached():
            break
    assert cached == whole(SIXTH)


def test_pages_of_other_weights_are_not_found(servers: tuple[Server, Server], other_weights: OtherWeights) -> None:
    server = servers[1]
    other = Server(server.host, other_weights.right)

    def change_weights(model: Path) -> None:
        # With pages still on their way to L3, SGLang changes the weights, but refuses to flush what it holds of the old ones.
        with contextlib.suppress(Refused):
            update_weights(server.url, model, admin_key=KEY)

    server.attach()
    server.write(FIRST)
    ask(server.host.engine, SECOND, tokens=ANSWER_TOKENS)
    change_weights(other_weights.model)
    try:
        assert other.ask(SECOND) == Cached()
        assert other.ask(FIRST) == Cached()
        assert other.ask(SECOND) == whole(SECOND)
    finally:
        change_weights(other_weights.original)
    assert server.ask(FIRST) == whole(FIRST)
    assert server.ask(SECOND) in (Cached(), whole(SECOND))
