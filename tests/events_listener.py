"""A subscriber of the pool's KV events: what it believes of each topic."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import msgspec


def key_of(page_hash: bytes) -> int:
    """As SGLang names a page in its events."""
    return int.from_bytes(page_hash[:8], "big", signed=True)


class Listener:
    """`holds`: (medium, key) by topic. `gaps`: batches that were missed."""

    def __init__(self) -> None:
        self.holds: dict[str, set[tuple[str, int]]] = defaultdict(set)
        self.events: list[tuple[str, str]] = []
        """(topic, type), all that came."""
        self.sizes: set[int] = set()
        self.largest = 0
        self.gaps = 0
        self.next_seq: dict[str, int] = {}

    def hear(self, topic: bytes, seq: int, payload: bytes) -> None:
        name = topic.decode()
        self.gaps += seq - self.next_seq.get(name, seq)
        self.next_seq[name] = seq + 1
        _, events, _ = msgspec.msgpack.decode(payload)
        for event in events:
            self._apply(name, event)
        self.largest = max(self.largest, sum(len(event.get("block_hashes", ())) for event in events))

    def _apply(self, topic: str, event: dict[str, Any]) -> None:
        self.events.append((topic, event["type"]))
        held = {(event["medium"], key) for key in event.get("block_hashes", ())}
        match event["type"]:
            case "BlockStored":
                assert (event["token_ids"], event["parent_block_hash"], event["lora_id"]) == ([], None, None)
                self.sizes.add(event["block_size"])
                self.holds[topic] |= held
            case "BlockRemoved":
                self.holds[topic] -= held
            case "AllBlocksCleared":
                self.holds[topic].clear()
            case other:
                raise AssertionError(f"an event of type {other!r}")
