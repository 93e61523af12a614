"""Every message on every wire, and the version range this build speaks.

Three wires use these structs, all msgpack:

* engine rank or mover <-> store node: UNIX stream socket, frames of `u32 length + body`, descriptors by SCM_RIGHTS
  (`hicache_mooncake.wire`);
* engine rank <-> its movers: the same framing over a socket pair;
* store node <-> metadata master: ZMQ, one body per message.

The node <-> node data wire (`hicache_mooncake.transfer.tcp`) has `Fetch`, `Push` and their answers as its headers.

Version 1 had no shards, tiers, draining, failure reports, room table, second holders, Push, Describe or Engines. Whoever
speaks 2 with a peer that negotiated 1 leaves the messages out that came with 2; new fields at the end of a message are ignored
by the older side. So a master of version 1 would take a cold tier's pages for pages in DRAM: a node sends it empty updates in
their place, which keep the numbers, and leaves them out of snapshots.

Hashes travel as one `bytes` of 32-byte page hashes, columns of integers as lists: nothing here is a Python object per page
except the integers of a column.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Iterable

import msgspec

PROTOCOL_MIN = 1
PROTOCOL_MAX = 2
FETCH_VERSION = 1
"""The first version with today's Fetch. A reader says this one, so that nodes of an older build serve it."""

HASH_BYTES = 32
"""Length of a page hash (SHA-256) on every wire."""
_CUT_AT_ONCE = 128
NAMESPACE_BYTES = 16
MAX_KEYS_PER_MESSAGE = 131_072
MAX_NAMESPACES_PER_MESSAGE = 256
"""Parts of one logical page that are looked up together: a pool each, or a KV head each."""
MAX_FRAME_BYTES = 64 << 20
MAX_ROOM_LISTED = 8
DRAM, COLD = 0, 1
"""Tiers, as they stand on the wire."""


class ProtocolError(Exception):
    """The peer sent something this build does not speak. The connection it came from must be closed."""


class Message(msgspec.Struct, tag=True, array_like=True):
    """Base of every message: tagged with its class name, fields by position, new fields only at the end with a default."""


class Refused(Message):
    """The answer to anything that cannot be done; `reason` is a sentence for the operator."""

    reason: str
    full: bool = False
    """Nothing is wrong: this end has as many connections as it takes, and closes this one."""


# --------------------------------------------------------------------------- rank or mover <-> node


class Hello(Message):
    """First message on a node connection. `role`: query, load, store, identity or admin; load and store get the segment's
    descriptor."""

    version_min: int
    version_max: int
    role: str
    client: str
    """Who asks, for logs and pins: `pid:model:rank`."""
    cold: bool = False
    """It can read from the cold tier's file."""


class Welcome(Message):
    """Answer to Hello. With roles load and store the segment's memfd rides on the same frame; with role load behind it the cold
    tier's file, to be read from, where there is one and the Hello says `cold`."""

    version: int
    node: str
    incarnation: bytes
    segment_bytes: int
    data_key: bytes = b""
    """With roles load and store: what proves membership on the data ports of other nodes (`hicache_mooncake.security`)."""
    tls_cert: bytes = b""
    """With roles load and store, where the cluster has TLS: this node's certificate, its key, and the authority, as PEM."""
    tls_key: bytes = b""
    tls_ca: bytes = b""
    cold: int = 0
    """0: no cold tier. 1: its file comes. 2: and is read in whole blocks, past the page cache."""


class Exists(Message):
    """Which of these pages can be loaded? Own index first, then the master in one request.

    `leading`: namespaces that are asked for a leading run. `sparse`: those that are asked page by page."""

    leading: list[bytes]
    hashes: bytes
    sparse: list[bytes] = []
    budget_s: float = 1.0
    """As in Locate."""
    promise_s: float = 0.0
    """So long the asker counts on what it is told of: it stays until it has loaded it, as far as may be. 0: it does not."""
    reader: str = ""
    """Who will load it: as in Locate."""


class Found(Message):
    """`runs`: how many leading pages each of `leading` has. `columns`: for each of `sparse` one byte a page, 1 where it can be
    loaded."""

    runs: list[int]
    columns: list[bytes] = []
    reason: str = ""
    """Why an answer is short, when that is not plain absence: `master_down`."""


class Locate(Message):
    """A load mover asks where the pages are; local ones are pinned until Release, the pin's expiry or the connection's end."""

    namespace: bytes
    hashes: bytes
    length: int
    """Bytes of one page body. An object of any other length is a miss."""
    shared: bool = False
    """Other ranks of this host ask for the same pages: one of them fetches a remote page into the segment, for all."""
    group: bytes = b""
    """Of the objects that this makes: see Reserve."""
    wait_s: float = 0.0
    """Before the answer, wait at most so long until none of these pages is being fetched by another rank."""
    touch: bool = True
    """They count as used now. False where a Touch will say it of the whole chain."""
    budget_s: float = 1.0
    """What is left of the asker's time: a master that does not answer may take half of it, and no more."""
    here_only: bool = False
    """A mover of a neighbour's asks: only what lies in this node's segment counts, and no master is asked."""
    links: bool = False
    """The asker knows of links, and sends Landed."""
    recall: bool = False
    """What a lookup has just learned of other nodes will do: the asker asks again for what does not come by it."""
    again: bool = False
    """The same load asks for pages that did not come by a recalled answer: nothing is recalled for it, nor known any more."""
    cold: bool = False
    """The asker reads from the cold tier's file by itself: what lies there is told."""
    reader: str = ""
    """For whom: what a lookup promised to it need not be kept any longer. Empty: to nobody."""


MISS, LOCAL, REMOTE, WRONG_LENGTH, FETCH, WAIT, READ, READ_ON = 0, 1, 2, 3, 4, 5, 6, 7


class Located(Message):
    """Columns, one entry per key: status, segment offset (LOCAL) or index into `peers` (REMOTE, FETCH), xxh3-64 of the body,
    seeded with the page's identity (LOCAL; remote ones come with the bytes).

    FETCH, where shared: take it from the peer into the segment at the next offset of `room`, and then Commit `txn`, whose
    WRITE entries these are. WAIT: another rank does that just now.

    READ: it lies in the cold tier's file, at offset `where`, in whole blocks. READ_ON: so, and it is to be copied into the
    segment as well, at the next offset of `cold_room`, and then Commit `cold_txn`."""

    pin: int
    status: bytes
    where: list[int]
    checksum: list[int]
    peers: list[Peer]
    reason: str = ""
    """`master_down` when remote holders could not be asked for."""
    txn: int = 0
    room: list[int] = []
    others: list[int] = []
    """For each key the index into `peers` of another holder to try when the first fails, or -1. Empty: none has one."""
    links: list[int] = []
    """For each of `peers` the id of the link over which it can write into this node's segment, or 0. Empty: none has one."""
    landing: int = 0
    """Room for pages that come over links, this mover's until Landed; 0: there is none."""
    places: list[int] = []
    """For each key the segment offset that a link may write it to, or -1. Of FETCH keys it is their entry of `room`."""
    recalled: bool = False
    """No master was asked: who holds the pages is what a lookup learned a moment ago."""
    cold_txn: int = 0
    cold_room: list[int] = []


class Peer(Message):
    """A store node's data address, as it advertises it."""

    node: str
    incarnation: bytes
    host: str
    port: int
    socket: str = ""
    """UNIX socket of a node on the asker's own host, whose segment can be mapped. Empty: not here, or not known."""


class Landed(Message):
    """One-way, load mover -> node: the mover is done with the room of a landing. `quiet` are links that wrote all that they
    were asked for, or were never asked: of the others something may still be under way, and they are ended before the room is
    used again."""

    landing: int
    quiet: list[int] = []
    received: int = 0
    """Bytes of pages that came over links, whole."""


class Release(Message):
    """One-way. Ends a pin, and tells what came of it: `loaded` pages arrived whole; `bad` are hashes whose bytes failed their
    checksum in this node's segment; `peer_down` are nodes that could not be reached, broke off, were silent or sent damaged
    pages, once a failure; `apart` are nodes of this host whose socket or segment this mover cannot open, as (node, incarnation,
    why)."""

    pin: int
    namespace: bytes = b""
    bad: bytes = b""
    peer_down: list[str] = []
    loaded: int = 0
    apart: list[tuple[str, bytes, str]] = []
    bad_cold: list[tuple[bytes, int]] = []
    """Hashes whose bytes in the cold tier's file, at this offset, failed their checksum."""


class Reserve(Message):
    """A store mover asks for room. Nothing is visible before Commit; the connection's end frees what was not committed."""

    namespace: bytes
    hashes: bytes
    length: int
    group: bytes = b""
    """Objects of one group and one page hash are parts of one logical page: they are evicted together. Empty: the namespace's
    own."""


REFUSED, WRITE, HAVE = 0, 1, 2


class Reserved(Message):
    """One status per key: REFUSED (no room), WRITE (copy the body to `where`), HAVE (already stored)."""

    txn: int
    status: bytes
    where: list[int]


class Commit(Message):
    """Checksums for the WRITE entries in order; `ok` holds 1 where the body was copied whole, 0 where it must be dropped."""

    txn: int
    ok: bytes
    checksum: list[int]


class Committed(Message):
    """1 per WRITE entry that is now visible."""

    ok: bytes


class Touch(Message):
    """One-way. These pages of a chain, head first, count as used now, and the head as used last."""

    namespace: bytes
    hashes: bytes


class Clear(Message):
    """Drop every object of one namespace on this node and, through the master, on all others."""

    namespace: bytes
    everywhere: bool = True


class Cleared(Message):
    objects: int


class Missed(Message):
    """One-way, rank -> node: misses since the last such message, by reason, for the node's metrics."""

    reasons: dict[str, int]
    broken: dict[str, int] = {}
    """Of pages that a lookup had promised, those that could not be loaded in that time, by reason."""


class PoolIdentity(msgspec.Struct, array_like=True):
    """A host pool as its rank stores it. `namespaces` are those of its objects; `fields` what they are digests of, as texts:
    for people and for comparisons, and never for finding a page."""

    pool: str
    namespaces: list[bytes]
    fields: dict[str, str] = {}


class RankIdentity(msgspec.Struct, array_like=True):
    """What a rank stores and finds in the pool, and of which engine it is. Bounded by `hicache_mooncake.sharing.clip`."""

    engine: bytes
    """The same for all ranks of an engine, whatever host they are on."""
    label: str
    """The engine, for people."""
    role: str
    """prefill, decode, or empty for an engine that does both."""
    writer: str
    """tree: its prefix cache writes and reads. offload: a decode engine that writes what it computes, and reads nothing."""
    chain: str
    """plain: page hashes are of tokens. bigrams: of pairs of them."""
    rank: tuple[int, int, int]
    """Tensor-parallel, pipeline-parallel and context-parallel; `size` likewise."""
    size: tuple[int, int, int]
    pools: list[PoolIdentity]
    version: str = ""
    """Of hicache-mooncake."""
    off: str = ""
    """Why it stores and finds nothing at the moment."""
    flags: dict[str, str] = {}
    """SGLang's settings that decide what comes to the pool. Not told to masters."""
    counts: dict[str, int] = {}
    """Pages asked for, found, loaded, stored since the rank started. Not told to masters."""


class Unshared(msgspec.Struct, array_like=True):
    """A prefill and a decode engine that never find each other's pages. `differences`: (field, in prefill, in decode)."""

    prefill: bytes
    prefill_label: str
    decode: bytes
    decode_label: str
    differences: list[tuple[str, str, str]]


class Describe(Message):
    """Rank -> node, again and again: who it is, for as long as the connection lives. The answer is Described."""

    rank: RankIdentity


class Described(Message):
    """The engines that this rank's engine should share with and cannot."""

    unshared: list[Unshared] = []


class AdminStatus(Message):
    pass


class AdminReport(Message):
    """A node's own account of itself, as JSON-able values by name, plus the master's list of nodes when there is one."""

    node: dict[str, int | float | str | bool]
    cluster: list[NodeInfo]
    ranks: list[RankIdentity] = []
    """Those of this node's host that have said who they are."""
    unshared: list[Unshared] = []
    """What concerns these ranks."""


# --------------------------------------------------------------------------- rank <-> mover


class Region(Message):
    """A stretch of engine memory. `fd` is the index among the frame's descriptors, or -1 when the mover must use process_vm."""

    address: int
    length: int
    fd: int
    fd_offset: int = 0


class Run(Message):
    """One part of a page: page i has it at `address + i * stride`, `length` bytes in all.

    With `dims` it is strided: (count, step in bytes), outermost first, of equal contiguous pieces of `length` over the
    product of the counts; in the body they lie one after the other.
    """

    address: int
    stride: int
    length: int
    dims: list[tuple[int, int]] = []


class Attach(Message):
    """Start of a mover's life: where the node is, what memory the engine shares, whose memory it is."""

    socket_path: str
    engine_pid: int
    client: str
    regions: list[Region]
    own_user: bool = False
    """The socket must be served by this user or root."""
    canary_address: int = 0
    canary: bytes = b""
    """process_vm only: bytes at an address in the engine that the mover must be able to read and write back."""
    strided: bool = False
    """Strided runs will come: what they need is loaded now, and not in the first batch's time."""
    lanes: int = 0
    """tcp connections that a load uses to one node; 0: as many as are faster."""
    numa: bool = False
    """The mover runs on the NUMA node that this memory is on."""
    copy_threads: int = 0
    """Threads that copy large pages; 0: by the number of cores."""


class Attached(Message):
    mode: str
    problem: str = ""
    placed: str = ""
    """Where the mover runs, for the log, when that is not just anywhere."""


class Transfer(Message):
    """One batch. `pages` are little-endian int64 page numbers for `runs`; where geometry is not affine, `addresses` holds the
    absolute address of each run of each page instead, and `runs` only their lengths."""

    op: str
    """`load` or `store`."""
    namespace: bytes
    hashes: bytes
    runs: list[Run]
    pages: bytes
    budget_s: float
    addresses: bytes = b""
    id: int = 0
    group: bytes = b""
    """Of the objects that a store makes: see Reserve."""
    shared: bool = False
    """Other ranks of this host will ask for the same pages: those of a load that come from another node stay here too."""
    touch: bool = True
    """As in Locate."""


class Transferred(Message):
    """`ok` has 1 per page that is whole and verified; `reasons` counts the others by reason; the rest is for metrics."""

    ok: bytes
    reasons: dict[str, int]
    local_bytes: int = 0
    remote_bytes: int = 0
    had: int = 0
    """Pages of a store that the node already held."""
    id: int = 0
    """Of the Transfer that this answers."""
    cold_bytes: int = 0
    """Read from the cold tier; in `local_bytes` as well."""


# --------------------------------------------------------------------------- node <-> node


class Fetch(Message):
    """Ask the holder for pages by key. Bodies follow FetchReply in order, for every key whose status is LOCAL."""

    version: int
    requester: str
    namespace: bytes
    hashes: bytes
    length: int
    id: int = 0
    touch: bool = True
    """As in Locate."""
    link: int = 0
    """Write the bodies over this link, instead of sending them here."""
    into: list[int] = []
    """Segment offset in the requester's node for each key; for `link`."""
    reader: str = ""
    """As in Locate, of the requester's."""


class FetchReply(Message):
    node: str
    incarnation: bytes
    status: bytes
    checksum: list[int]
    id: int = 0
    """Of the Fetch that this answers."""
    linked: bool = False
    """Every LOCAL body has been written over the link, whole, and nothing follows. False: nothing is under way on the link for
    this Fetch any more as far as this end can tell, and the bodies follow."""
    link_failed: bool = False
    """Something was begun over the link and has failed: the reader's end is ended before what it wrote to is used again."""
    cold: bytes = b""
    """1 for each key whose body comes from the cold tier: one that is damaged there is no fault of the node. Empty: none."""


class Prove(Message):
    """First message on a data connection where the cluster has a key: who connects, and a nonce for the server to sign."""

    version: int
    requester: str
    nonce: bytes


class Proof(Message):
    """Answer to Prove, with the server's own nonce; and the reader's answer to that, with an empty one."""

    nonce: bytes
    mac: bytes


class Push(Message):
    """Give pages to another node: spilled ones, or hot ones of a node that ends. The answer is a PushReply; then follow the
    bodies of the WRITE keys, in order, and the answer to those is a Pushed."""

    version: int
    requester: str
    namespace: bytes
    group: bytes
    hashes: bytes
    length: int
    checksum: list[int]
    """As in Located; the receiver checks each body against it before it counts."""
    hot: bool = False
    """False: spilled, to be evicted before the receiver's own pages. True: like a page that was just used there."""
    id: int = 0
    link: int = 0
    """The giver can write over this link."""


class PushReply(Message):
    """One of REFUSED, WRITE, HAVE a key."""

    status: bytes
    id: int = 0
    places: list[int] = []
    """Where `link` may be used: segment offset of each WRITE key. Then a Wrote follows, and no bodies."""


class Wrote(Message):
    """The giver's answer to a PushReply with places: its writes over the link have ended. `ok` False: one of them failed."""

    ok: bool
    id: int = 0


class Link(Message):
    """On a data connection: it is to be the control channel of a link by this scheme. Whoever asks offers its node's segment,
    `token` being what the transport needs to reach it. After Linked both ends run the transport's handshake on the connection,
    which carries no message any more."""

    version: int
    requester: str
    incarnation: bytes
    scheme: str
    id: int
    """Chosen at random by who asks; both ends know the link by it."""
    address: int
    length: int
    token: bytes


class Linked(Message):
    """The answer to Link, with the answering node's own segment."""

    node: str
    incarnation: bytes
    address: int
    length: int
    token: bytes


class Pushed(Message):
    """1 per WRITE key that is now stored and visible."""

    ok: bytes
    id: int = 0


# --------------------------------------------------------------------------- node <-> master


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
    """Number of the last update of this master's shard; the master asks for a snapshot when it does not know everything before
    it."""
    host_id: str = ""
    """Nodes of one physical host say the same. Empty: a host of its own."""
    draining: bool = False
    socket: str = ""
    """Where ranks reach it, told to nodes of its own host."""


class Joined(Message):
    version: int
    master: bytes
    """The master's own incarnation: a change means that it restarted empty."""
    heartbeat_s: float
    ttl_s: float
    want_snapshot: bool
    warming: bool = False
    gather_s: float = 0.005
    """How long a node gathers changes for one update: longer in large clusters, so that updates do not flood the master."""


class Beat(Message):
    node: str
    incarnation: bytes
    seq: int
    used_bytes: int
    capacity_bytes: int
    objects: int
    hits: int = 0
    lookups: int = 0
    draining: bool = False
    load: int = 0
    """Bytes that this node sent to others since its last beat."""
    want_room: bool = False
    room_bytes: int = -1
    """Bytes below its low watermark: what it takes from others. -1: it does not say, and a tenth of it stays free."""
    engines: int = 0
    """Number of the last Engines that this node has sent; 0: none."""


class Engines(Message):
    """One-way, node -> master: the ranks of this node's host, all of them, in place of those told before. `number` grows with
    every change. Not to masters of version 1."""

    node: str
    incarnation: bytes
    number: int
    ranks: list[RankIdentity]


class Room(msgspec.Struct, array_like=True):
    """A node that can take pages. `age_s`: since it joined."""

    peer: Peer
    host_id: str
    free_bytes: int
    capacity_bytes: int
    age_s: float


class BeatReply(Message):
    """`known` False: join again. `want_snapshot`: updates were lost, send everything."""

    master: bytes
    known: bool
    want_snapshot: bool
    warming: bool = False
    gather_s: float = 0.005
    room: list[Room] = []
    """Where asked for: a random sample, at most MAX_ROOM_LISTED, of the other active nodes with room."""
    clears: int = 0
    """How many clears this master has passed on to this node since it joined. Who has heard of fewer joins again."""
    want_engines: bool = False
    """The last Engines is not known here: send it again."""
    unshared: list[Unshared] = []
    """What concerns ranks of this node."""


class Update(Message):
    """One-way. Numbered per incarnation and shard, whatever the tier: seq n follows n-1. Pairs of (namespace, blob of 32-byte
    hashes)."""

    node: str
    incarnation: bytes
    seq: int
    added: list[tuple[bytes, bytes]]
    removed: list[tuple[bytes, bytes]]
    tier: int = DRAM


class Snapshot(Message):
    """One-way. All that the node holds of the master's shard as of update `seq`, in parts, each of one tier; part 0 empties
    what it knew, of all tiers. DRAM comes first: it is answered as soon as another tier begins."""

    node: str
    incarnation: bytes
    seq: int
    part: int
    last: bool
    added: list[tuple[bytes, bytes]]
    tier: int = DRAM


class Leave(Message):
    node: str
    incarnation: bytes


class Report(Message):
    """One-way, node -> master: reads from these nodes failed, so often since the last report."""

    node: str
    incarnation: bytes
    failed: dict[str, int]


class Question(msgspec.Struct, array_like=True):
    """Who holds these pages? With `prefix` the answer stops at the first page that nobody holds."""

    namespace: bytes
    hashes: bytes
    prefix: bool


class Answer(msgspec.Struct, array_like=True):
    """`holder[i]` is 0 (nobody) or 1 + an index into `peers`."""

    holder: bytes
    peers: list[Peer]
    others: bytes = b""
    """A second holder, coded like `holder` and as long: another node. Empty: no page has one."""
    tiers: bytes = b""
    """Tier of each of `peers`; one node may be there once a tier. Empty: all DRAM."""


class Lookup(Message):
    """`asker` is never an answer."""

    id: int
    questions: list[Question]
    asker: str = ""
    promise_s: float = 0.0
    """The first holder of each page is told to keep it for so long."""
    reader: str = ""
    """Who counts on it: as in Locate, of the asker's."""


class LookupReply(Message):
    """One answer a question, in order."""

    id: int
    answers: list[Answer]
    warming: bool = False
    """The master does not know of everything yet: absent here may be present."""


class ClearNamespace(Message):
    """Node -> master: pass on to every other node. Master -> node: do it."""

    namespace: bytes
    origin: str = ""
    number: int = 0
    """Master -> node: counted from 1 since the node joined. 0: not counted."""


class Keep(Message):
    """One-way, master -> node: a reader of another node was told that these pages are here. They stay for so long, or until it
    has loaded them, as far as may be. Pairs of (namespace, blob of 32-byte hashes)."""

    node: str
    """Whose reader."""
    reader: str
    promise_s: float
    pages: list[tuple[bytes, bytes]]


class ClusterStatus(Message):
    brief: bool = False
    """No list of nodes: what kind of master is this?"""
    kinds: bool = False
    """Which namespaces make up a page? Told by masters that know of it."""


class PageKind(msgspec.Struct, array_like=True):
    """What one logical page of some engines is made of: the namespaces of all their ranks."""

    every: list[bytes]
    """Those that hold something of every page: of the KV pool."""
    last: list[bytes]
    """Those of side pools: a prefix needs them at its end at least."""
    chain: str
    """As in RankIdentity; so are the roles."""
    roles: list[str]
    model: str = ""
    engines: int = 0


class NodeInfo(Message):
    node: str
    host: str
    port: int
    state: str
    """joining (no snapshot yet), active, sick (others cannot read from it), suspected (heartbeat late), draining, gone."""
    used_bytes: int
    capacity_bytes: int
    objects: int
    keys: int
    age_s: float
    hits: int = 0
    lookups: int = 0
    host_id: str = ""
    load: int = 0


class ClusterReport(Message):
    master: bytes
    version: int
    nodes: list[NodeInfo]
    keys: int
    shard: int = 0
    shards: int = 1
    """Of the keys this master has those for which `shard_of(hash, shards) == shard`."""
    warming: bool = False
    role: str = ""
    """leader or follower where roles are given out (etcd), else empty."""
    masters: list[str] = []
    """Addresses of all masters that this one knows of, where it can know."""
    unshared: list[Unshared] = []
    engines: dict[str, int] = {}
    """How many engines have said who they are, by role: prefill, decode, both."""
    kinds: list[PageKind] = []
    """Where it was asked for: of engines all of whose ranks have said who they are."""


FromClient = Hello | Exists | Locate | Landed | Release | Reserve | Commit | Touch | Clear | Missed | AdminStatus | Describe
FromNode = Welcome | Refused | Found | Located | Reserved | Committed | Cleared | AdminReport | Described
ToMover = Attach | Transfer
FromMover = Attached | Transferred | Refused
ToMaster = Join | Beat | Update | Snapshot | Leave | Report | Lookup | ClearNamespace | ClusterStatus | Engines
ToData = Prove | Proof | Fetch | Push | Wrote | Link
FromData = Proof | FetchReply | PushReply | Pushed | Linked | Refused
FromMaster = Joined | Refused | BeatReply | LookupReply | ClearNamespace | Keep | ClusterReport

_encoder = msgspec.msgpack.Encoder()


def encode(message: Message) -> bytes:
    return _encoder.encode(message)


def decoder(kind: object) -> msgspec.msgpack.Decoder[Message]:
    """A decoder for one of the unions above; raises `msgspec.DecodeError` or `msgspec.ValidationError` on anything else."""
    return msgspec.msgpack.Decoder(kind)


def negotiate(their_min: int, their_max: int) -> int | None:
    """The newest version both sides speak, or None."""
    version = min(PROTOCOL_MAX, their_max)
    return version if version >= max(PROTOCOL_MIN, their_min) else None


def split(hashes: bytes) -> list[bytes]:
    """The hashes of a blob."""
    each: list[bytes] = []
    for at in range(0, len(hashes), _CUT_AT_ONCE * HASH_BYTES):
        each += _cutter(min(_CUT_AT_ONCE, (len(hashes) - at) // HASH_BYTES)).unpack_from(hashes, at)
    return each


@functools.cache
def _cutter(count: int) -> struct.Struct:
    """Cuts so many hashes in a fraction of the time that a slice of each takes."""
    return struct.Struct(f"{HASH_BYTES}s" * count)


def select_hashes(hashes: bytes, which: Iterable[int]) -> bytes:
    """The hashes at these positions of a blob, as a blob."""
    return b"".join([hashes[i * HASH_BYTES : (i + 1) * HASH_BYTES] for i in which])


def shard_of(page_hash: bytes, shards: int) -> int:
    """Which of so many shards of the directory has this page hash."""
    return int.from_bytes(page_hash[20:24], "little") % shards


def count_hashes(hashes: bytes, limit: int = MAX_KEYS_PER_MESSAGE) -> int:
    """Number of page hashes in a blob. Raises ProtocolError for a ragged or oversized one."""
    count, rest = divmod(len(hashes), HASH_BYTES)
    if rest or count > limit:
        raise ProtocolError(f"{len(hashes)} bytes of hashes: must be a multiple of {HASH_BYTES} and at most {limit} keys")
    return count
