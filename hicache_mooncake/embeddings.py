"""`HiCacheEmbeddings`: SGLang's `EmbeddingStore` (multimodal embeddings by content hash, for encoder servers) over the pool.

Source of the interface: `sglang.srt.mem_cache.embedding_store`. The plugin registers it under the name mooncake. SGLang's hash
says what was shown, not which model looked at it: that, the dtype and the width are in the namespace, and a length that differs
is a miss.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import os
from array import array
from collections.abc import Callable, Sequence
from typing import Any

from sglang.srt.mem_cache.embedding_store import EmbeddingStore

from hicache_mooncake.client import weights
from hicache_mooncake.client.client import Body, PoolClient
from hicache_mooncake.client.geometry import PoolGeometry
from hicache_mooncake.config import ConfigError, load_settings
from hicache_mooncake.keys import Namespace
from hicache_mooncake.protocol import Region, Run, select_hashes

log = logging.getLogger(__name__)


class HiCacheEmbeddings(EmbeddingStore):  # type: ignore[misc]
    """One per encoder rank. Thread-safe. Calls never raise: what fails is False. An embedding lies in one or more contiguous
    parts of host memory (`ptrs`, `sizes` in bytes), which need not be cut alike where it is stored and where it is loaded.

    Raises ConfigError when nothing says which model's embeddings these are.
    """

    def __init__(self, storage_config: Any = None) -> None:
        settings, notices = load_settings({})
        for notice in notices:
            log.warning("%s", notice)
        model_id = settings.model_id or weights.of_engine()
        if not model_id:
            raise ConfigError(
                "model_id", "default", "", "nothing says which model's embeddings these are. Set HICACHE_MOONCAKE_MODEL_ID"
            )
        self._namespace = Namespace(
            model="",
            model_id=model_id,
            weight_version=settings.weight_version,
            tag=settings.tag,
            tenant=settings.tenant,
            pool="embedding",
        )
        self._body: Body | None = None
        self.client = PoolClient(settings, f"{os.getpid()}:embeddings")
        self.client.start()

    def register_buffer(self, tensor: Any) -> None:
        """Share the host memory that all embeddings lie in: a contiguous CPU tensor of their dtype, its last dimension their
        width. Until then nothing is stored or found."""
        if tensor.device.type != "cpu" or not tensor.is_contiguous() or not tensor.numel():
            log.error("embeddings are not shared: their buffer is not contiguous host memory")
            return
        region = Region(tensor.data_ptr(), tensor.numel() * tensor.element_size(), -1)
        mode = self.client.share(PoolGeometry("embedding", (), 1, 1, (region,), (), affine=False))
        namespace = dataclasses.replace(self._namespace, dtype=str(tensor.dtype), head_dim=int(tensor.shape[-1]))
        self._body = Body(namespace.digest(), (), namespace.group())
        log.info("embeddings of %s x %d are shared by %s", tensor.dtype, tensor.shape[-1], mode)

    def batch_get_into_multi_buffers(self, hashes: list[str], ptrs: list[list[int]], sizes: list[list[int]]) -> list[bool]:
        """Load each embedding into its parts. True where it is there whole and verified."""
        return self._guard(len(hashes), lambda: self._transfer("load", hashes, ptrs, sizes))

    def batch_put_from_multi_buffers(self, hashes: list[str], ptrs: list[list[int]], sizes: list[list[int]]) -> list[bool]:
        """Store each embedding. True where the pool now holds it (also: already did)."""
        return self._guard(len(hashes), lambda: self._transfer("store", hashes, ptrs, sizes))

    def batch_get(self, hashes: list[str], ptrs: list[int], sizes: list[int]) -> list[bool]:
        return self.batch_get_into_multi_buffers(hashes, [[ptr] for ptr in ptrs], [[size] for size in sizes])

    def batch_put(self, hashes: list[str], ptrs: list[int], sizes: list[int]) -> list[bool]:
        return self.batch_put_from_multi_buffers(hashes, [[ptr] for ptr in ptrs], [[size] for size in sizes])

    def batch_is_exist(self, hashes: list[str]) -> list[bool]:
        return self._guard(len(hashes), lambda: self._exist(hashes))

    def _exist(self, hashes: Sequence[str]) -> list[bool]:
        if self._body is None or not hashes:
            return [False] * len(hashes)
        (column,) = self.client.find([], _page_hashes(hashes), [self._body.namespace]).columns
        return [bool(held) for held in column.ljust(len(hashes), b"\0")]

    def _transfer(
        self, op: str, hashes: Sequence[str], ptrs: Sequence[Sequence[int]], sizes: Sequence[Sequence[int]]
    ) -> list[bool]:
        verdict = [False] * len(hashes)
        if self._body is None or not len(hashes) == len(ptrs) == len(sizes):
            return verdict
        blob = _page_hashes(hashes)
        by_shape: dict[tuple[int, ...], list[int]] = {}
        for i, (parts, lengths) in enumerate(zip(ptrs, sizes, strict=True)):
            if parts and len(parts) == len(lengths) and min(lengths) > 0:
                by_shape.setdefault(tuple(lengths), []).append(i)
        for shape, members in by_shape.items():
            body = Body(self._body.namespace, tuple(Run(0, 0, length) for length in shape), self._body.group)
            addresses = array("q", [address for i in members for address in ptrs[i]])
            outcome = self.client.transfer(op, body, select_hashes(blob, members), None, addresses)
            for i, ok in zip(members, outcome.ok, strict=True):
                verdict[i] = bool(ok)
        return verdict

    def _guard(self, count: int, work: Callable[[], list[bool]]) -> list[bool]:
        try:
            return work()
        except Exception:
            self.client.miss({"internal": count})
            self.client.quiet(
                logging.ERROR, "embeddings", "a call failed inside hicache-mooncake. Please report this", exc_info=True
            )
            return [False] * count

    def close(self) -> None:
        """After this nothing touches the buffer."""
        self._body = None
        self.client.close()


def _page_hashes(hashes: Sequence[str]) -> bytes:
    """SGLang's content hashes are strings of any form."""
    return b"".join(hashlib.sha256(b"embedding " + str(each).encode()).digest() for each in hashes)
