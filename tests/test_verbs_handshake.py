"""What the ends of a verbs link say to each other: whole messages, whatever the stream's cuts, and nothing out of bounds."""

from __future__ import annotations

import struct

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache_mooncake.protocol import Message
from hicache_mooncake.transfer.transport import MAX_NOTICE_BYTES, TransportError
from hicache_mooncake.transfer.verbs.api import QpAddress
from hicache_mooncake.transfer.verbs.handshake import (
    MAX_FRAME,
    MAX_PORTS,
    MAX_TEXT,
    Begun,
    Bye,
    Control,
    Frames,
    Gone,
    Lost,
    Notice,
    NotPaired,
    Pair,
    Paired,
    Ports,
    Ready,
    Refusal,
    announce,
    announced,
    check_ports,
    check_rail,
    frame,
    remote_qp,
    short,
)
from hicache_mooncake.transfer.verbs.rails import MAX_RAILS, Port

V4 = "0000:0000:0000:0000:0000:ffff:0a00:0001"
PORTS = [Port("mlx5_0", 1, "Ethernet", V4, 0, 4096), Port("mlx5_1", 2, "InfiniBand", "", 7, 2048)]
ALL: list[Control] = [
    announce(PORTS),
    Refusal("no"),
    Pair(0, 1, 17, 5, 16),
    Pair(0, 1, 17, 5, 16, 3, 2),
    Paired(0, 1, 18, 6, 16),
    NotPaired(3, 2, "no memory"),
    Ready(0, 1),
    Begun(),
    Lost(0, 1, True, "retries"),
    Gone(0, 1),
    Notice(b"x" * MAX_NOTICE_BYTES),
    Bye(),
]


@given(st.lists(st.sampled_from(ALL), max_size=5), st.lists(st.integers(1, 5000), min_size=1))
def test_messages_arrive_whole_and_in_order_whatever_the_cuts(messages: list[Control], cuts: list[int]) -> None:
    stream = b"".join(map(frame, messages))
    frames, heard, turn = Frames(), [], 0
    while stream:
        now = cuts[turn % len(cuts)] * (1 + turn // 50)
        heard += frames.feed(stream[:now])
        stream, turn = stream[now:], turn + 1
    assert heard == messages


def test_the_longest_message_fits() -> None:
    device = "d" * 64
    gid = "ffff:" * 7 + "ffff"
    longest = announce([Port(device, 255, "InfiniBand", gid, 65535, 4096)] * MAX_PORTS)
    for message in (longest, Refusal("r" * MAX_TEXT), Notice(b"x" * MAX_NOTICE_BYTES)):
        assert len(frame(message)) <= MAX_FRAME + 4


def test_a_length_beyond_the_limit_is_refused_before_its_bytes_come() -> None:
    with pytest.raises(TransportError, match="limit") as caught:
        list(Frames().feed(struct.pack("<I", MAX_FRAME + 1)))
    assert caught.value.reason == "peer"


@pytest.mark.parametrize("body", [b"", b"\xc1", msgspec.msgpack.encode(["Nobody", 1]), msgspec.msgpack.encode(["Pair", "x"])])
def test_what_is_no_message_is_refused(body: bytes) -> None:
    with pytest.raises(TransportError, match="not understood"):
        list(Frames().feed(struct.pack("<I", len(body)) + body))


def test_ports_come_as_they_were_sent() -> None:
    assert announced(announce(PORTS)) == PORTS


def test_at_most_so_many_ports_are_announced() -> None:
    assert len(announced(announce(PORTS * MAX_PORTS))) == MAX_PORTS


@pytest.mark.parametrize(
    "changes",
    [
        {"version_min": 9, "version_max": 9},
        {"version_max": 0},
        {"device": []},
        {"mtu": [4096]},
        {"mtu": [4096, 1500]},
        {"gid": ["::1", ""]},
        {"gid": ["", ""]},
        {"lid": [0, 1 << 16]},
        {"device": ["x" * 65, "y"]},
        {name: ([1] if name in ("lid", "mtu", "number") else ["x"]) * (MAX_PORTS + 1) for name in Ports.__struct_fields__[2:]},
    ],
    ids=["newer", "older", "no-ports", "ragged", "mtu", "gid-text", "gid-empty", "lid", "name", "too-many"],
)
def test_ports_that_are_none_are_refused_with_a_sentence(changes: dict[str, object]) -> None:
    fields = {name: getattr(announce(PORTS), name) for name in Ports.__struct_fields__}
    with pytest.raises(TransportError, match="peer") as caught:
        announced(Ports(**(fields | changes)))
    assert caught.value.reason == "peer"


def test_a_newer_version_that_still_speaks_ours_is_welcome() -> None:
    message = announce(PORTS)
    message.version_max = 7
    assert announced(message) == PORTS


def test_queue_pairs_have_numbers_of_24_bits() -> None:
    assert remote_qp(Pair(0, 1, 17, 5, 16), PORTS[0]) == QpAddress(17, 5, V4, 0, 16)
    for bad in (Pair(0, 1, 1 << 24, 5, 16), Pair(0, 1, 17, -1, 16), Paired(0, 1, 17, 5, 1 << 16)):
        with pytest.raises(TransportError, match="none"):
            remote_qp(bad, PORTS[0])


def test_rails_that_there_are_not_are_refused() -> None:
    check_rail(Ready(1, 1), 2)
    for rail, rails in ((2, 2), (-1, 2), (MAX_RAILS, 99)):
        with pytest.raises(TransportError, match=f"rail {rail}"):
            check_rail(Gone(rail, 1), rails)


def test_reasons_are_as_long_as_they_may_be() -> None:
    assert short("x" * MAX_TEXT) == "x" * MAX_TEXT
    assert len(short("x" * 10_000)) == MAX_TEXT


class OldPair(Message, tag="Pair"):
    """Of the first release."""

    rail: int
    generation: int
    number: int
    psn: int
    rd_atomic: int


def test_messages_of_the_first_release_are_read_and_read_there() -> None:
    old, new = OldPair(0, 1, 17, 5, 16), Pair(0, 1, 17, 5, 16, 3, 2)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(new), type=OldPair) == old
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(old), type=Pair) == Pair(0, 1, 17, 5, 16, -1, -1)
    told = msgspec.to_builtins(announce(PORTS))
    assert not msgspec.convert(told[:-1], Ports).takes_ports


@pytest.mark.parametrize(("port", "to"), [(-1, 0), (2, 0), (0, 3), (0, -1)])
def test_a_pair_of_ports_that_there_are_not_is_refused(port: int, to: int) -> None:
    check_ports(Pair(0, 1, 17, 5, 16, 1, 2), 2, 3)
    with pytest.raises(TransportError, match="pairs its port"):
        check_ports(Pair(0, 1, 17, 5, 16, port, to), 2, 3)
