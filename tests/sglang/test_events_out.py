"""The pool's KV events are SGLang's, byte for byte, and its pages have the names that SGLang's own events give them."""

from __future__ import annotations

import hashlib

import msgspec
import pytest
from hicache_master.events_out import EventsOut
from hicache_master.shard import Shard

from hicache_mooncake.protocol import COLD, DRAM
from tests.test_events_out import described
from tests.test_master_core import NS

kv_events = pytest.importorskip("sglang.srt.disaggregation.kv_events")


def test_sglangs_own_decoder_reads_every_kind_of_event() -> None:
    from sglang.srt.mem_cache.utils import hash_str_to_int64

    pages = [hashlib.sha256(bytes([n])).digest() for n in range(3)]
    keys = [hash_str_to_int64(page.hex()) for page in pages]
    assert min(keys) < 0 < max(keys), "both signs are tried"
    out = EventsOut(Shard())
    out.describe(described())
    out.changed("a", DRAM, [(NS, b"".join(pages))], [])
    out.changed("a", COLD, [(NS, pages[0])], [])
    out.changed("a", DRAM, [], [(NS, pages[0])])
    ((topic, seq, payload),) = out.take(1234.5)
    assert (topic, seq) == (b"kv@a@tiny", 0)
    batch = msgspec.msgpack.decode(payload, type=kv_events.KVEventBatch)
    medium = kv_events.StorageMedium
    stored = {"parent_block_hash": None, "token_ids": [], "block_size": 64, "lora_id": None}
    expected = kv_events.KVEventBatch(
        ts=1234.5,
        events=[
            kv_events.AllBlocksCleared(),
            kv_events.BlockStored(block_hashes=keys, medium=medium.EXTERNAL.value, **stored),
            kv_events.BlockStored(block_hashes=keys[:1], medium=medium.DISK.value, **stored),
            kv_events.BlockRemoved(block_hashes=keys[:1], medium=medium.EXTERNAL.value),
        ],
    )
    assert batch == expected
    assert payload == msgspec.msgpack.encode(expected)
