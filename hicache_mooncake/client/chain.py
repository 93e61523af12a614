"""Which pages come before a batch in its chain: they must not be evicted before it.

SGLang moves a long prefix in batches of 128 pages, head first, and says what came before only when it is started with
`hicache_storage_pass_prefix_keys`. Without that, the batches of one operation still follow each other on one thread.
"""

from __future__ import annotations

from collections.abc import Sequence

from hicache_mooncake.keys import pack_hashes
from hicache_mooncake.protocol import HASH_BYTES

PAGES_A_CALL = 128
"""SGLang's `STORAGE_BATCH_SIZE`: a batch of fewer pages is the last of its operation."""
MAX_PAGES = 16_384
"""Of a longer chain nothing is said: naming it would cost more than the order is worth."""


class Chain:
    """The batches of one kind (loads, or stores) as they follow each other. A wrong guess makes some pages more recent than
    they are. Not thread-safe: SGLang has one thread for each kind."""

    def __init__(self) -> None:
        self._so_far = b""

    def before(self, hashes: bytes, prefix_keys: Sequence[str] | None) -> bytes:
        """Hashes of the pages before these, head first. `prefix_keys`: SGLang's own account, where it gives one."""
        if prefix_keys:
            before, bad = pack_hashes(prefix_keys[-MAX_PAGES:])
            before = b"" if bad or len(prefix_keys) > MAX_PAGES else before
            self._so_far = b""
            return before
        before = self._so_far
        more = before + hashes
        full = len(hashes) == PAGES_A_CALL * HASH_BYTES and len(more) <= MAX_PAGES * HASH_BYTES
        self._so_far = more if full else b""
        return before
