"""What SGLang does for a backend by the name `mooncake`, and what comes of it with this one."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

from sglang.srt.managers.scheduler import Scheduler

import hicache_mooncake
from tests.sglang.conftest import MakeBackend
from tests.sglang.pools import mha_pool


def test_the_layout_for_external_routers_is_declined_with_a_reason(make_backend: MakeBackend) -> None:
    """Its answer is how to build the built-in store's object names; ours are a digest, and a router asks the master."""
    controller = SimpleNamespace(storage_backend=make_backend(mha_pool()), storage_backend_type="mooncake")
    scheduler = SimpleNamespace(
        enable_hierarchical_cache=True, page_size=16, tree_cache=SimpleNamespace(cache_controller=controller)
    )
    layout = Scheduler._hicache_l3_layout(scheduler)
    assert layout["enabled"] is False
    assert layout["hicache_object_layout"] == {"pools": []}
    assert layout["reason"]


def test_the_backend_performs_no_collective_of_its_own() -> None:
    """P59: a rank without a request takes part in none of ours, and so none may wait for it."""
    package = Path(hicache_mooncake.__file__).parent
    parts = [path for path in package.rglob("*.py") if "testing" not in path.relative_to(package).parts]
    assert len(parts) > 30
    assert [path.name for path in parts if "torch.distributed" in path.read_text()] == []
