"""The messages between node and master, and between nodes, of protocol version 1, as they were released. Frozen: nodes and
masters of that version are upgraded one at a time, beside this one."""

from __future__ import annotations

import msgspec

PROTOCOL_MIN = 1
PROTOCOL_MAX = 1


class Message(msgspec.Struct, tag=True, array_like=True):
    pass


class Refused(Message):
    reason: str


class Peer(Message):
    """A store node's data address, as it advertises it."""

    node: str
    incarnation: bytes
    host: str
    port: int


class Join(Message):
    """A node (re)introduces itself. A new incarnation under an old name replaces the old one and its keys."""

    version_min: int
    version_max: int
    node: str
    incarnation: bytes
    host: str
    port: int
    capacity_bytes: int
    seq: int
    """Sequence number of the last update sent; the master asks for a snapshot when it does not know everything before it."""


class Joined(Message):
    version: int
    master: bytes
    """The master's own incarnation: a change means that it restarted empty."""
    heartbeat_s: float
    ttl_s: float
    want_snapshot: bool


class Beat(Message):
    node: str
    incarnation: bytes
    seq: int
    used_bytes: int
    capacity_bytes: int
    objects: int
    hits: int = 0
    lookups: int = 0


class BeatReply(Message):
    """`known` False: join again. `want_snapshot`: updates were lost, send everything."""

    master: bytes
    known: bool
    want_snapshot: bool


class Update(Message):
    """One-way. Numbered per incarnation: seq n follows n-1. Pairs of (namespace, blob of 32-byte hashes)."""

    node: str
    incarnation: bytes
    seq: int
    added: list[tuple[bytes, bytes]]
    removed: list[tuple[bytes, bytes]]


class Snapshot(Message):
    """One-way. Everything the node holds as of update `seq`, in parts; part 0 empties what the master knew."""

    node: str
    incarnation: bytes
    seq: int
    part: int
    last: bool
    added: list[tuple[bytes, bytes]]


class Leave(Message):
    node: str
    incarnation: bytes


class Question(msgspec.Struct, array_like=True):
    """Who holds these pages? With `prefix` the answer stops at the first page that nobody holds."""

    namespace: bytes
    hashes: bytes
    prefix: bool


class Answer(msgspec.Struct, array_like=True):
    """`holder[i]` is 0 (nobody) or 1 + an index into `peers`."""

    holder: bytes
    peers: list[Peer]


class Lookup(Message):
    """`asker` is never an answer."""

    id: int
    questions: list[Question]
    asker: str = ""


class LookupReply(Message):
    """One answer a question, in order."""

    id: int
    answers: list[Answer]


class ClearNamespace(Message):
    """Node -> master: pass on to every other node. Master -> node: do it."""

    namespace: bytes
    origin: str = ""


class ClusterStatus(Message):
    pass


class NodeInfo(Message):
    node: str
    host: str
    port: int
    state: str
    """joining (no snapshot yet), active, suspected (heartbeat late), gone."""
    used_bytes: int
    capacity_bytes: int
    objects: int
    keys: int
    age_s: float
    hits: int = 0
    lookups: int = 0


class ClusterReport(Message):
    master: bytes
    version: int
    nodes: list[NodeInfo]
    keys: int


class Fetch(Message):
    """Ask the holder for pages by key. Bodies follow FetchReply in order, for every key whose status is LOCAL."""

    version: int
    requester: str
    namespace: bytes
    hashes: bytes
    length: int
    id: int = 0
    touch: bool = True


class FetchReply(Message):
    node: str
    incarnation: bytes
    status: bytes
    checksum: list[int]
    id: int = 0


ToMaster = Join | Beat | Update | Snapshot | Leave | Lookup | ClearNamespace | ClusterStatus
FromMaster = Joined | Refused | BeatReply | LookupReply | ClearNamespace | ClusterReport

_encoder = msgspec.msgpack.Encoder()


def encode(message: Message) -> bytes:
    return _encoder.encode(message)


def decoder(kind: object) -> msgspec.msgpack.Decoder[Message]:
    return msgspec.msgpack.Decoder(kind)
