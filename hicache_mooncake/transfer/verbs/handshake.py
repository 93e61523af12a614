"""What the two ends of a verbs link tell each other over its channel, and how it is framed, without I/O.

The side that connected sends Ports and gets Ports; both then know the rails. For each rail it sends Pair with its queue pair
(QP), the other makes its own, connects it and sends Paired, the first connects too, tries it with a write of no bytes, and
sends Ready: only then does the other post. Begun follows when this has been tried for every rail. Rails are paired again in the
same way later, always by the side that connected, which may also name other ports then.

Whoever takes a rail down destroys its QP and sends Lost; the other destroys its own and answers Gone. What was under way on the
rail goes over another one only after that, so that no late packet of the first lands behind the second's.

A frame is a little-endian u32 length and a msgpack body. Messages of one side arrive in order, or the link ends.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Sequence

import msgspec

from hicache_mooncake.protocol import Message
from hicache_mooncake.transfer.transport import MAX_NOTICE_BYTES, TransportError
from hicache_mooncake.transfer.verbs.api import MTUS, QpAddress
from hicache_mooncake.transfer.verbs.rails import MAX_RAILS, Port

VERSION_MIN = VERSION_MAX = 1
MAX_PORTS = 64
MAX_TEXT = 2000
MAX_FRAME = MAX_NOTICE_BYTES + 1024
_HEADER = struct.Struct("<I")
_GID = re.compile(r"[0-9a-f]{4}(:[0-9a-f]{4}){7}")


class Ports(Message):
    """First message of either side. Columns, an entry per port."""

    version_min: int
    version_max: int
    device: list[str]
    number: list[int]
    link_layer: list[str]
    gid: list[str]
    lid: list[int]
    mtu: list[int]
    takes_ports: bool = False
    """Pair may say of which ports a rail is. False in former releases: both ends number the same pairs by `rails.pairs`."""


class Refusal(Message):
    """No link; a sentence for the operator."""

    reason: str


class Pair(Message):
    rail: int
    generation: int
    number: int
    """Of the QP."""
    psn: int
    rd_atomic: int
    port: int = -1
    """Of the sender, by its place in Ports, and `to`, the receiver's: what the rail is made of from now on. -1: it is known."""
    to: int = -1


class Paired(Message):
    """The answer to Pair, in the same terms: this end's QP takes what comes."""

    rail: int
    generation: int
    number: int
    psn: int
    rd_atomic: int


class NotPaired(Message):
    """The answer to Pair where this end has no QP for it."""

    rail: int
    generation: int
    reason: str


class Ready(Message):
    rail: int
    generation: int


class Begun(Message):
    """Every rail has been tried."""


class Lost(Message):
    """This end's QP is destroyed. `failed` False: only to end a batch."""

    rail: int
    generation: int
    failed: bool
    reason: str


class Gone(Message):
    """The answer to Lost: neither end's QP of this generation is there any more."""

    rail: int
    generation: int


class Notice(Message):
    body: bytes


class Bye(Message):
    """This end closes the link."""


Control = Ports | Refusal | Pair | Paired | NotPaired | Ready | Begun | Lost | Gone | Notice | Bye
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Control)


def frame(message: Control) -> bytes:
    body = _encoder.encode(message)
    return _HEADER.pack(len(body)) + body


class Frames:
    """Puts the messages of a stream together. Not thread-safe."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Control]:
        """The messages that are whole now. Raises TransportError, `peer`, for what is no message of this protocol."""
        self._buffer += data
        while len(self._buffer) >= _HEADER.size:
            (length,) = _HEADER.unpack_from(self._buffer)
            if length > MAX_FRAME:
                raise TransportError("peer", f"a message of {length} bytes on the channel: the limit is {MAX_FRAME}")
            end = _HEADER.size + length
            if len(self._buffer) < end:
                return
            body = bytes(memoryview(self._buffer)[_HEADER.size : end])
            del self._buffer[:end]
            try:
                message: Control = _decoder.decode(body)
            except msgspec.MsgspecError as error:
                raise TransportError("peer", f"message on the channel not understood: {error}") from error
            yield message


def announce(ports: Sequence[Port]) -> Ports:
    """At most MAX_PORTS of them."""
    ports = ports[:MAX_PORTS]
    return Ports(
        VERSION_MIN,
        VERSION_MAX,
        [port.device for port in ports],
        [port.number for port in ports],
        [port.link_layer for port in ports],
        [port.gid for port in ports],
        [port.lid for port in ports],
        [port.mtu for port in ports],
        takes_ports=True,
    )


def announced(message: Ports) -> list[Port]:
    """The peer's ports. Raises TransportError, `peer`, with what the peer is told too, where no link can come of it."""
    if message.version_min > VERSION_MAX or message.version_max < VERSION_MIN:
        raise TransportError(
            "peer",
            f"the peer's verbs links are of version {message.version_min} to {message.version_max}, this side's of "
            f"{VERSION_MIN} to {VERSION_MAX}: run the same release on both hosts",
        )
    columns = (message.device, message.number, message.link_layer, message.gid, message.lid, message.mtu)
    if not 0 < len(message.device) <= MAX_PORTS or len({len(column) for column in columns}) != 1:
        raise TransportError(
            "peer", f"the peer announces {len(message.device)} ports: must be 1 to {MAX_PORTS}, in equal columns"
        )
    ports = [Port(*values) for values in zip(*columns, strict=True)]
    for port in ports:
        good_gid = _GID.fullmatch(port.gid) or (port.link_layer == "InfiniBand" and not port.gid)
        if not good_gid or port.mtu not in MTUS or not 0 <= port.lid < 1 << 16 or len(port.device) > 64:
            raise TransportError("peer", f"the peer announces a port that is none: {str(port)[:200]}")
    return ports


def remote_qp(message: Pair | Paired, port: Port) -> QpAddress:
    """The peer's QP. Raises TransportError, `peer`, for numbers that are none."""
    if not (0 <= message.number < 1 << 24 and 0 <= message.psn < 1 << 24 and 0 <= message.rd_atomic < 1 << 16):
        raise TransportError("peer", f"the peer announces a queue pair that is none: {message}")
    return QpAddress(message.number, message.psn, port.gid, port.lid, message.rd_atomic)


def check_ports(message: Pair, theirs: int, ours: int) -> None:
    """Raises TransportError, `peer`, for ports that there are not."""
    if not (0 <= message.port < theirs and 0 <= message.to < ours):
        raise TransportError("peer", f"the peer pairs its port {message.port} of {theirs} with port {message.to} of {ours}")


def check_rail(message: Pair | Paired | NotPaired | Ready | Lost | Gone, rails: int) -> None:
    """Raises TransportError, `peer`, for a rail that there is not."""
    if not 0 <= message.rail < min(rails, MAX_RAILS):
        raise TransportError("peer", f"the peer speaks of rail {message.rail} of {rails}")


def short(text: str) -> str:
    """A reason, as long as a message may have it."""
    return text[:MAX_TEXT] if len(text) <= MAX_TEXT else text[: MAX_TEXT - 3] + "..."
