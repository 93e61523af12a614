"""The hashes by which SGLang names the pages of a prompt, in its storage and in its KV events. No I/O.

Both are SHA-256 chains over the tokens of whole pages, as little-endian 32-bit numbers. A prompt without adapter, extra key and
salt has one chain, and a page's name in KV events is the first 8 bytes of its hash. For other prompts the two chains start from
different seeds, and KV events may name a page by yet another hash (sglang/srt/mem_cache/utils.py and mem_cache/events.py).
"""

from __future__ import annotations

import hashlib
import sys
import uuid
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

HASH_BYTES = 32
_STORAGE_TAG = b"sglang-cache-namespace-v1"
_EVENT_TAG = b"sglang-kv-event-namespace-v1"
_SALT_TAG = b"sglang-cache-salt-v1\0"
_LARGEST_TOKEN = 2**32 - 1


@dataclass(frozen=True, slots=True)
class CacheNamespace:
    """What keeps a request's pages apart from those of others with the same tokens. All None: nothing does."""

    extra_key: str | None = None
    """As the request gives it."""
    cache_salt: str | None = None
    adapter_id: str | None = None
    """SGLang's id of the LoRA adapter (`adapter_id()`)."""

    @property
    def plain(self) -> bool:
        return self.key is None and self.cache_salt is None

    @property
    def key(self) -> str | None:
        """SGLang appends the adapter's id to the extra key."""
        return self.extra_key if self.adapter_id is None else (self.extra_key or "") + self.adapter_id


PLAIN = CacheNamespace()


def adapter_id(name: str, path: str) -> str:
    """Of an adapter of SGLang's --lora-paths. One that was loaded later has a random id that nobody outside can know."""
    return uuid.uuid5(uuid.NAMESPACE_URL, f"{name}\0{path}").hex


def page_hashes(tokens: Sequence[int], page_size: int, *, seed: bytes = b"", bigrams: bool = False) -> bytes:
    """The hashes of all whole pages, one after the other.

    `bigrams`: a page has `page_size` pairs of neighbouring tokens, as with EAGLE. Raises ValueError for what is no token."""
    try:
        words = array("I", tokens)
    except (TypeError, OverflowError) as error:
        raise ValueError(f"token ids are whole numbers from 0 to {_LARGEST_TOKEN}") from error
    if bigrams:
        pairs = array("I", bytes(words.itemsize * 2 * max(len(words) - 1, 0)))
        pairs[0::2], pairs[1::2] = words[:-1], words[1:]
        words = pairs
    if sys.byteorder == "big":
        words.byteswap()
    data = words.tobytes()
    step = page_size * words.itemsize * (2 if bigrams else 1)
    digest, digests = seed, []
    sha256 = hashlib.sha256
    for end in range(step, len(data) + 1, step):
        digest = sha256(digest + data[end - step : end]).digest()
        digests.append(digest)
    return b"".join(digests)


def storage_seed(namespace: CacheNamespace) -> bytes:
    """What the chain in the storage starts from, from SGLang 0.5.20 on; older ones keep all but plain prompts out of it."""
    return b"" if namespace.plain else _digest(_STORAGE_TAG, namespace.key, namespace.cache_salt)


def event_seed(namespace: CacheNamespace) -> bytes:
    """What the chain in KV events starts from: the extra key has no part in it."""
    salt = namespace.cache_salt
    return b"" if salt is None else hashlib.sha256(_SALT_TAG + salt.encode()).digest()


def event_keys(hashes: bytes, namespace: CacheNamespace, *, dynamo: bool = False) -> tuple[int, ...]:
    """The pages' names in KV events. `hashes`: the chain that starts from `event_seed`. `dynamo`: with "format": "dynamo" in
    SGLang's --kv-events-config, in which the names depend on extra key and salt; else on a LoRA adapter alone."""
    if not namespace.plain and (dynamo or namespace.adapter_id is not None):
        seed = _digest(_EVENT_TAG, namespace.key, namespace.cache_salt if dynamo else None)
        heads = (hashes[start : start + 8] for start in range(0, len(hashes), HASH_BYTES))
        hashes = b"".join(hashlib.sha256(seed + head).digest() for head in heads)
    return tuple(np.frombuffer(hashes, ">i8")[:: HASH_BYTES // 8].tolist())


def _digest(tag: bytes, *parts: str | None) -> bytes:
    """Absent, empty and joined parts all differ."""
    digest = hashlib.sha256(tag)
    for part in parts:
        encoded = b"" if part is None else part.encode()
        digest.update(b"\0" if part is None else b"\1" + len(encoded).to_bytes(8, "little") + encoded)
    return digest.digest()
