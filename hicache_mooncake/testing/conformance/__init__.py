"""The contract of a HiCache storage backend as tests that any backend can be run against."""

from __future__ import annotations

from hicache_mooncake.testing.conformance.faults import FaultTests
from hicache_mooncake.testing.conformance.harness import Harness, Rank, storage_config
from hicache_mooncake.testing.conformance.host_pools import HostPool
from hicache_mooncake.testing.conformance.identity import IdentityTests
from hicache_mooncake.testing.conformance.pages import PageTests
from hicache_mooncake.testing.conformance.side_pools import SidePoolTests

__all__ = ["BackendTests", "Harness", "HostPool", "Rank", "storage_config"]


class BackendTests(PageTests, IdentityTests, SidePoolTests, FaultTests):
    """What SGLang expects of a `HiCacheStorage`, and what its users do, as pytest tests. Subclass it in a test module:

        from hicache_mooncake.testing import BackendTests

        class TestMyBackend(BackendTests):
            def make_backend(self, config, pools):
                return MyBackend(config)

    `make_backend` is called with SGLang's `HiCacheStorageConfig` and the rank's host pools by name, anchor first; all backends
    of one test must use one storage. The suite registers the pools as SGLang does, calls what its controllers call with what
    they pass, and closes the backend if it has a `close`. Every test uses a model name of its own, so tests may share a
    storage. The host pools are of the suite's own making, some kilobytes each, with the accessors and the byte geometry of
    SGLang's: in `memory` "anonymous", or "memfd" as under SGLang's shared-memory allocator. Set `zero_copy` to False for a
    backend that SGLang drives through the generic `batch_get` and `batch_set`.

    Storage faults need the backend's help: `evict_part`, `flip_byte`, `resize_part`, `stop_storage`, `start_storage`. Tests
    that need one which is not overridden are skipped. `covers` is told what has been shown to work.

    Promises: every load in every test is compared byte by byte with what (pool, key, generation) say, and pages that were not
    asked for must not have changed; no assertion depends on time. Runs on SGLang 0.5.9 and later, with the installed release's
    own types; tests of calls that it does not have are skipped. Needs pytest, torch and sglang, no GPU.

    A backend that deviates on purpose marks the test in its subclass; the docstring of each test says which sentence of the
    contract it checks, and what goes wrong without.
    """
