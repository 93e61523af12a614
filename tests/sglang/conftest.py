"""SGLang in the test's own process, on the CPU. Everything here is skipped where sglang is not installed."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import hicache_mooncake.testing
from tests.conftest import NodeProcess
from tests.sglang.matrix import pytest_runtest_makereport, pytest_sessionfinish, supports  # noqa: F401 (what pytest looks for)

if TYPE_CHECKING:
    from hicache_mooncake.backend import HiCacheMooncake

MakeBackend = Callable[..., "HiCacheMooncake"]

SHIMS = Path(hicache_mooncake.testing.__file__).parent / "sglang_cpu" / "shims"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.sglang)


if importlib.util.find_spec("sglang") is None or importlib.util.find_spec("torch") is None:
    collect_ignore_glob = ["test_*.py"]
else:
    import torch

    if torch.version.cuda is None:
        os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
        sys.path.insert(0, str(SHIMS))
        spec = importlib.util.spec_from_file_location("hicache_shims", SHIMS / "sitecustomize.py")
        assert spec is not None
        assert spec.loader is not None
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


@pytest.fixture
def node(start_node: Callable[..., NodeProcess]) -> NodeProcess:
    return start_node(dram="64MiB")


@pytest.fixture
def make_backend(node: NodeProcess) -> Iterator[MakeBackend]:
    """A backend as SGLang builds and registers it; extra keywords go into extra_config or the storage config."""
    from sglang.srt.mem_cache.hicache_storage import PoolName

    from hicache_mooncake.backend import HiCacheMooncake
    from tests.sglang.pools import storage_config

    made: list[HiCacheMooncake] = []

    def make(pool: Any, extra: dict[str, object] | None = None, **config: Any) -> HiCacheMooncake:
        extra_config = {"socket": node.socket, "interface_v1": 1, **(extra or {})}
        backend = HiCacheMooncake(storage_config(extra_config=extra_config, **config), pool)
        made.append(backend)
        backend.register_mem_pool_host(pool)
        backend.register_mem_host_pool_v2(pool, PoolName.KV)
        backend.on_host_pools_registered()
        return backend

    yield make
    for backend in made:
        backend.close()


@pytest.fixture
def make_tree() -> Iterator[Callable[..., Any]]:
    """SGLang's tree with HiCache over a node: `make_tree(node, device_pages, extra, **server_args)`, a `trees.Tree`. Its
    configuration stays until the test's end."""
    from tests.sglang.trees import Tree, configured

    with contextlib.ExitStack() as stack:

        def make(node: NodeProcess, device_pages: int = 16, extra: dict[str, Any] | None = None, **server_args: Any) -> Tree:
            stack.enter_context(configured(node, extra, **server_args))
            tree = Tree(device_pages)
            stack.callback(tree.close)
            return tree

        yield make
