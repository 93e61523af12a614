"""P04: what the backend hears when a running engine's weights change, in this SGLang release and in older ones.

The scenarios are in `weight_updates_check.py`, one process a release. Other releases lie where `make versions` puts them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from hicache_mooncake.client import weight_updates
from tests.conftest import ROOT, environment
from tests.sglang.conftest import SHIMS

INSTALLED = ""
VERSIONS = (INSTALLED, "0.5.9", "0.5.14", "0.5.20", "0.5.21", "0.5.22")
BETWEEN = ("0.5.14", "0.5.20", "0.5.21")
"""Left to `make test-all`: what changed with them shows in those before and after, too."""


HEARD = {
    "disk": ["changing", "write", "reset", "changed v2 /m True", "flushed"],
    "no flush": ["changing", "changed v2 /m True", "later", "reset", "flushed"],
    "nothing to flush": ["changing", "changed v2 /m True", "flushed"],
    "failed": ["changing", "changed v2 /m False"],
    "draft failed": ["changing", "reset", "changed v2 /m False", "flushed"],
    "busy": ["changing", "changed v2 /m True", "refused"],
    "no name": ["changing", "reset", "changed None None True", "flushed"],
    "two parts": ["changing", "reset", "changed v2 None True", "flushed"],
    "named later": ["changing", "reset", "changed None None True", "flushed", "changed v3 None True"],
    "renamed": ["changing", "reset", "changed v2 /m True", "flushed"],
    "ipc": ["changing", "reset", "changed v2 None True", "flushed"],
    "no request": ["changing", "changed None None True"],
    "elastic": [],
    "only a flush": ["reset", "flushed"],
    "resumed": ["changing", "changed None None False"],
    "resumed cache": [],
    "late": ["changing", "changed v2 /m True", "flushed"],
    "late, not flushed": ["changing", "changed v3 /m True"],
    "gone": ["write", "reset"],
    "somebody else's flush": ["reset"],
    "through a proxy": ["reset", "reset", "flushed"],
    "beside one that raises": [
        "changing", "write", "reset", "changed v2 /m True", "flushed", "True", "UpdateWeightFromDiskReqOutput",
    ],
    "raises": ["changing", "write", "changed v2 None False", "'nowhere'"],
    "threads": ["get", "set first", "flushed", "True True"],
    "decode": ["reset", "copied", "stored", "flushed"],
    "taken off": [],
    "blind": [""],
}  # fmt: skip
"""What every release says, but for:"""
DIFFERENT: dict[str, dict[str, Any]] = {
    # Updates from disk leave the draft as it is.
    "0.5.9": {"draft failed": ["changing", "reset", "changed v2 /m True", "flushed"]},
}
WITHOUT_SESSIONS = {"two parts": ["changing", "changed v2 None True", "changing", "reset", "changed v2 None True", "flushed"]}
FLUSH_ASSERTED = {"busy": ["changing", "changed v2 /m False", "raised"]}  # and the scheduler dies of it
NO_NAME_FOR_RANKS = {
    "blind": ["this SGLang does not tell its ranks of POST /update_weight_version: name weight_version in the update itself"]
}


def expected(version: str) -> dict[str, Any]:
    known = HEARD | DIFFERENT.get(version, {})
    if version in ("0.5.9", "0.5.14", "0.5.20"):
        known = known | WITHOUT_SESSIONS
    if version in ("0.5.9", "0.5.14", "0.5.20", "0.5.21"):
        known = known | FLUSH_ASSERTED
    if version in ("0.5.9", "0.5.14"):
        known = known | NO_NAME_FOR_RANKS
    return known


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "version",
    [pytest.param(version, marks=[pytest.mark.slow] * (version in BETWEEN), id=version or "installed") for version in VERSIONS],
)
def test_a_backend_hears_what_becomes_of_the_weights(version: str) -> None:
    wheel = Path(sys.prefix) / f"sglang-{version}"
    if version and not wheel.is_dir():
        pytest.skip(f"sglang {version} is not in {wheel}: make versions")
    env = environment() | {"SGLANG_USE_CPU_ENGINE": "1"}
    env["PYTHONPATH"] = os.pathsep.join([*([str(wheel)] if version else []), str(SHIMS), env["PYTHONPATH"]])
    command = [sys.executable, "-W", "ignore", "-m", "tests.sglang.weight_updates_check"]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert result.pop("version").startswith(version)
    assert result == expected(version)


def test_only_really_empty_pools_count_as_flushed() -> None:
    """With SGLang's own pools: one page on the device, or one in host memory, may be a page of the old weights."""
    import torch
    from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator

    from tests.sglang.pools import PAGE_SIZE, mha_pool

    device = PagedTokenToKVPoolAllocator(10 * PAGE_SIZE + 3, PAGE_SIZE, torch.bfloat16, "cpu", None, False)
    host = mha_pool(allocator="default")
    controller = types.SimpleNamespace(mem_pool_device_allocator=device, mem_pool_host=host)
    assert weight_updates._empty(controller)
    on_device = device.alloc(PAGE_SIZE)
    assert not weight_updates._empty(controller)
    device.free(on_device)
    assert weight_updates._empty(controller)
    in_host = host.alloc(PAGE_SIZE)
    assert not weight_updates._empty(controller)
    host.free(in_host)
    assert weight_updates._empty(controller)
    controller.mem_pool_device_allocator = type("SomeNewAllocator", (PagedTokenToKVPoolAllocator,), {})(
        10 * PAGE_SIZE, PAGE_SIZE, torch.bfloat16, "cpu", None, False
    )
    assert not weight_updates._empty(controller), "an allocator that nobody has looked at"


def test_the_engines_own_version_is_read_where_the_release_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    context, arguments = types.ModuleType("context"), types.ModuleType("arguments")
    monkeypatch.setitem(sys.modules, "sglang.srt.runtime_context", context)
    monkeypatch.setitem(sys.modules, "sglang.srt.server_args", arguments)
    assert weight_updates.engine_weight_version() is None
    monkeypatch.setattr(
        arguments, "get_global_server_args", lambda: types.SimpleNamespace(weight_version="old place"), raising=False
    )
    assert weight_updates.engine_weight_version() == "old place"
    monkeypatch.setattr(context, "get_serving", lambda: types.SimpleNamespace(weight_version="v7"), raising=False)
    assert weight_updates.engine_weight_version() == "v7"
    monkeypatch.setattr(context, "get_serving", lambda: types.SimpleNamespace(weight_version="default"))
    assert weight_updates.engine_weight_version() is None


class Ears:
    """Remembers what it was told."""

    def __init__(self) -> None:
        self.heard: list[Any] = []

    def weights_changing(self) -> None:
        self.heard.append("changing")

    def weights_changed(self, *what: Any) -> None:
        self.heard.append(what)

    def caches_flushed(self) -> None:
        self.heard.append("flushed")


def test_a_backend_attached_after_an_update_hears_of_it_from_sglangs_own_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """The caches may still hold pages of the old weights: no flush is told."""
    from sglang.srt import runtime_context

    entries: list[tuple[str, dict[str, Any]]] = []
    monkeypatch.setattr(runtime_context.get_context(), "_overrides_log", entries)
    before, after, later = Ears(), Ears(), Ears()
    try:
        weight_updates.watch(before)
        weight_updates.unwatch()
        entries.append(("arguments", {"page_size": 16}))
        entries.append(("model_runner.update_model_fields", {"model_path": "/new", "load_format": "auto"}))
        weight_updates.watch(after)
        weight_updates.unwatch()
        entries.append(("scheduler.weight_version", {"weight_version": "v2"}))
        weight_updates.watch(later)
    finally:
        weight_updates.unwatch()
    assert before.heard == []
    assert after.heard == ["changing", (None, "/new", True)]
    assert later.heard == ["changing", ("v2", None, True)], "what has a name may have been written over the files"


def test_without_a_scheduler_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    listener = Ears()
    monkeypatch.delitem(sys.modules, "sglang.srt.managers.scheduler", raising=False)
    try:
        assert "no SGLang scheduler" in weight_updates.watch(listener)
    finally:
        weight_updates.unwatch()


def test_the_last_write_says_where_the_weights_are_from() -> None:
    """Files, and then tensors over them: no file has these weights. What a write calls is part of it."""
    process = weight_updates._Process()
    outer = process._begin_write("/checkpoint")
    assert process._begin_write(None) is None
    process._end_write(None, True)
    process._end_write(outer, True)
    assert process._last == (None, "/checkpoint", True)
    session = weight_updates._Change("5", "/checkpoint", touched=True)
    session.absorb(weight_updates._Change("5", None, touched=True))
    assert session.model_path is None


def test_every_change_has_a_mark_of_its_own_and_parts_are_counted() -> None:
    process = weight_updates._Process()
    marks = []
    for version in ("1", "2", "1"):
        process._set_last(version, None, True)
        marks.append(process._mark)
    assert len({mark for mark, _ in marks}) == 3
    assert [count for _, count in marks] == [1, 1, 2]
