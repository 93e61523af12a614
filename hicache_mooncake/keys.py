"""Namespace and page hashes: the only place where keys are made.

SGLang names a page by the SHA-256 chain of its tokens. That says nothing about the model, the dtype, the byte layout or the
shard, so everything else that decides what the bytes mean goes into a `Namespace`, and an object's identity is the pair
(namespace digest, page hash). Nothing here depends on `hash()` or on the order of a dict.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
import struct
from collections.abc import Sequence

from hicache_mooncake.protocol import HASH_BYTES, NAMESPACE_BYTES

FORMAT = 1
"""Version of the stored form (body order, framing of this digest). Another value never shares a page with this one."""

_HEX64 = re.compile(r"[0-9a-f]{64}\Z")
_SEEDS = struct.Struct(f"<Q{HASH_BYTES - 8}s")
_HEX_RUN = re.compile(r"[0-9a-f]*\Z")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Namespace:
    """Everything beside the tokens that decides what a page's bytes mean. None is a value of its own, unlike 0 and "".

    Two configurations that differ in one field never share a page; two that differ in none always do, in any process.
    """

    model: str
    """Served model name, as SGLang reports it."""
    model_id: str = ""
    """Which weights: the operator's own name for them, else the fingerprint of the checkpoint (client/weights.py)."""
    weight_version: str = ""
    tag: str = ""
    tenant: str = ""
    pool: str = "kv"
    family: str = ""
    """Class of the host pool: MHATokenToKVPoolHost, MLATokenToKVPoolHost, ..."""
    dtype: str = ""
    layout: str = ""
    storage_format: str = ""
    page_size: int = 0
    """Tokens a page, logical."""
    layers: int = 0
    start_layer: int | None = None
    end_layer: int | None = None
    target_layers: int | None = None
    heads: int | None = None
    head_dim: int | None = None
    v_head_dim: int | None = None
    kv_cache_dim: int | None = None
    details: tuple[str, ...] = ()
    """What else this kind of pool says of the form of its bytes, and the engine of how it computes them: `name=value` each."""
    run_bytes: tuple[int, ...] = ()
    """Lengths of the contiguous parts of one page, in body order."""
    head_range: tuple[int, ...] = ()
    """(first, end, all): which of the model's KV heads, for objects that hold some of a page's heads."""
    tp_rank: int | None = None
    tp_size: int | None = None
    """None for pools that every tensor-parallel rank holds alike (MLA): written once, read by all."""
    pp_rank: int = 0
    pp_size: int = 1
    cp_rank: int = 0
    cp_size: int = 1
    dcp_rank: int = 0
    dcp_size: int = 1

    def digest(self) -> bytes:
        """16 bytes. Every field enters framed by the length of its name and of its value, so no two field lists collide."""
        sha = hashlib.sha256(b"hicache-mooncake namespace %d" % FORMAT)
        for field in dataclasses.fields(self):
            name = field.name.encode()
            value = _canonical(getattr(self, field.name))
            sha.update(struct.pack("<II", len(name), len(value)))
            sha.update(name)
            sha.update(value)
        return sha.digest()[:NAMESPACE_BYTES]

    def group(self) -> bytes:
        """16 bytes: what the pools and ranks of one model have in common. Objects of one group under one page hash are the
        parts of one logical page, wherever they come from."""
        sha = hashlib.sha256(b"hicache-mooncake group %d" % FORMAT)
        for value in (self.model, self.model_id, self.weight_version, self.tag, self.tenant):
            part = _canonical(value)
            sha.update(struct.pack("<I", len(part)) + part)
        return sha.digest()[:NAMESPACE_BYTES]

    def differences(self, other: Namespace) -> list[str]:
        """Names of the fields in which two namespaces differ: why two engines do not share."""
        return [f.name for f in dataclasses.fields(self) if getattr(self, f.name) != getattr(other, f.name)]

    def described(self) -> dict[str, str]:
        """What it consists of, by name, as texts; only what is set. For people: pages are found by digests alone. Objects that
        hold some of a page's heads are described by how they are cut, and not each by its own heads."""
        found = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in ("details", "head_range")}
        texts = {name: _text(value) for name, value in found.items() if value not in (None, "", ())}
        for detail in self.details:
            name, _, value = detail.partition("=")
            texts.setdefault(name, value)
        if self.head_range:
            texts |= {"share_across_tp": "true", "kv_heads": str(self.head_range[-1])}
        return texts


def _text(value: str | int | tuple[int, ...] | tuple[str, ...]) -> str:
    return "+".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _canonical(value: str | int | tuple[int, ...] | tuple[str, ...] | None) -> bytes:
    if value is None:
        return b"n"
    if isinstance(value, bool):
        raise TypeError("a namespace field must not be a bool: use an int or a str")
    if isinstance(value, int):
        return b"i%d" % value
    if isinstance(value, str):
        return b"s" + value.encode()
    parts = [_canonical(item) for item in value]
    return b"t" + b"".join(struct.pack("<I", len(part)) + part for part in parts)


def pack_hashes(keys: Sequence[str]) -> tuple[bytes, list[int]]:
    """SGLang's page keys (64 lower-case hex digits) as one blob of 32-byte hashes, and the positions of keys that are not.

    A bad key keeps its place in the blob as zeros; the caller must give it a False verdict and must not store it.
    """
    try:
        joined = "".join(keys)
    except TypeError:  # a key that is no text: the others are as good as ever
        joined = ""
    if len(joined) == 2 * HASH_BYTES * len(keys) and _HEX_RUN.match(joined) and all(len(key) == 2 * HASH_BYTES for key in keys):
        return bytes.fromhex(joined), []
    bad: list[int] = []
    parts: list[bytes] = []
    for position, key in enumerate(keys):
        if isinstance(key, str) and _HEX64.match(key):
            parts.append(bytes.fromhex(key))
        else:
            bad.append(position)
            parts.append(bytes(HASH_BYTES))
    return b"".join(parts), bad


def checksum_seed(namespace: bytes, page_hash: bytes) -> int:
    """Seed of a page's xxh3-64: its identity. Bytes of another page, however whole, then fail the checksum, so no mix-up on
    the way (a slot, a connection, an answer that belongs to another request) can deliver one page as another."""
    return int.from_bytes(namespace[:8], "little") ^ int.from_bytes(page_hash[:8], "little")


def checksum_seeds(namespace: bytes, hashes: bytes) -> list[int]:
    """The same for each hash of a blob, for less."""
    of_all = int.from_bytes(namespace[:8], "little")
    return [of_all ^ first for first, _ in _SEEDS.iter_unpack(hashes)]
