"""What a listener hears in one SGLang release: run with that release first on PYTHONPATH (`test_weight_updates.py` does).

The requests, the dispatcher, the scheduler's methods for updates and the cache controller are the release's own. Only what
writes the weights, and the tree and the pools, are small stand-ins.

Prints one JSON object: scenario → what was heard, in order.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import importlib
import json
import queue
import sys
import threading
import time
import types
from collections.abc import Callable
from typing import Any

import torch

import tests.sglang.old_releases  # noqa: F401  lets another release be imported

heard: list[str] = []
outcome: dict[str, Any] = {"write": (True, "fine"), "writes": [], "idle": True}
WRITERS = (
    "update_weights_from_disk",
    "update_weights_from_distributed",
    "update_weights_from_tensor",
    "update_weights_from_ipc",
)


def import_release() -> types.SimpleNamespace:
    """The release's classes, None for those it does not have."""

    def get(module: str, name: str) -> Any:
        with contextlib.suppress(ModuleNotFoundError):
            return getattr(importlib.import_module(module), name, None)
        return None

    managers = "sglang.srt.managers"
    return types.SimpleNamespace(
        Scheduler=get(f"{managers}.scheduler", "Scheduler"),
        Manager=get(f"{managers}.scheduler_components.weight_updater", "SchedulerWeightUpdaterManager")
        or get(f"{managers}.scheduler_update_weights_mixin", "SchedulerUpdateWeightsMixin"),
        WeightUpdater=get("sglang.srt.model_executor.model_runner_components.weight_updater", "WeightUpdater"),
        ModelRunner=get("sglang.srt.model_executor.model_runner", "ModelRunner"),
        TpWorker=get(f"{managers}.tp_worker", "TpModelWorker"),
        Dispatcher=get("sglang.utils", "TypeBasedDispatcher"),
        Controller=get("sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller", "HybridCacheController")
        or get(f"{managers}.cache_controller", "HiCacheController"),
        BaseController=get(f"{managers}.cache_controller", "HiCacheController"),
        Decode=get("sglang.srt.disaggregation.decode_kvcache_offload_manager", "DecodeKVCacheOffloadManager"),
        Saver=get("sglang.srt.utils.torch_memory_saver_adapter", "_TorchMemorySaverAdapterReal"),
        Allocator=get("sglang.srt.mem_cache.allocator", "TokenToKVPoolAllocator")
        or get("sglang.srt.mem_cache.allocator.token", "TokenToKVPoolAllocator"),
        requests=importlib.import_module(f"{managers}.io_struct"),
    )


class Backend:
    """A storage backend that listens."""

    def weights_changing(self) -> None:
        heard.append("changing")

    def weights_changed(self, version: str | None, model_path: str | None, ok: bool) -> None:
        heard.append(f"changed {version} {model_path} {ok}")

    def caches_flushed(self) -> None:
        heard.append("flushed")


def stand_in_writers(owner: type) -> None:
    """Replace what writes weights, before anything is wrapped: says so and answers with the next of `outcome["writes"]`, then
    with `outcome["write"]`."""
    for name in [*WRITERS, "load_weights_from_distributed", "begin_weight_update", "end_weight_update"]:
        if name in vars(owner):

            def write(self: Any, *_arguments: Any, **_keywords: Any) -> Any:
                heard.append("write")
                return outcome["writes"].pop(0) if outcome["writes"] else outcome["write"]

            write.__name__ = name
            setattr(owner, name, write)
    if "receive_weights_from_distributed" in vars(owner):
        owner.receive_weights_from_distributed = lambda self, **_keywords: []  # type: ignore[attr-defined]


class Engine:
    """The part of a scheduler that updates weights and flushes, of the release's own classes where they do something."""

    def __init__(self, sg: types.SimpleNamespace, *, with_draft: bool = False) -> None:
        self.sg = sg
        self.backend = Backend()
        self.held = 0  # pages in the caches
        self.controller = bare_controller(sg, self.backend)
        self.controller.mem_pool_device_allocator = sg.Allocator(64, torch.float16, "cpu", None, False)
        self.controller.mem_pool_host = types.SimpleNamespace(size=64, available_size=lambda: 64 - self.held)
        self.writer = self._runner()
        worker = sg.TpWorker.__new__(sg.TpWorker)
        worker._model_runner = self.writer
        worker.tp_rank = 0
        worker.deserialize_own_rank = lambda payload: []
        draft = self._runner()
        draft_worker = types.SimpleNamespace(
            weight_update_runners=lambda: [("draft", draft)],
            update_weights_from_disk=lambda request: direct(draft).update_weights_from_disk("/m", "auto"),
        )
        fields: dict[str, Any] = dict.fromkeys(("metrics_collector", "stashed_model_static_state", "_session", "tp_cpu_group"))
        fields |= {"tp_worker": worker, "draft_worker": draft_worker if with_draft else None, "scheduler": self}
        fields |= {"flush_cache": self.flush, "is_fully_idle": lambda **_: True, "offload_tags": set()}
        if dataclasses.is_dataclass(sg.Manager):
            self.manager = object.__new__(sg.Manager)
        else:
            self.manager = type("Scheduler", (sg.Manager,), {})()
        for name, value in fields.items():
            with contextlib.suppress(AttributeError):  # no such slot in this release
                setattr(self.manager, name, value)
        io = sg.requests
        table = {
            io.UpdateWeightFromDiskReqInput: self.manager.update_weights_from_disk,
            io.UpdateWeightsFromDistributedReqInput: self.manager.update_weights_from_distributed,
            io.UpdateWeightsFromTensorReqInput: self.manager.update_weights_from_tensor,
            io.UpdateWeightsFromIPCReqInput: self.manager.update_weights_from_ipc,
            io.FlushCacheReqInput: lambda request: self.flush(),
            io.UpdateWeightVersionReqInput: lambda request: None,
        }
        if hasattr(io, "BeginWeightUpdateReqInput"):
            table[io.BeginWeightUpdateReqInput] = self.manager.begin_weight_update
            table[io.EndWeightUpdateReqInput] = self.manager.end_weight_update
        self.dispatcher = sg.Dispatcher(list(table.items()))  # bound methods, from before anything is wrapped

    def _runner(self) -> Any:
        if self.sg.WeightUpdater is not None:
            return types.SimpleNamespace(weight_updater=object.__new__(self.sg.WeightUpdater))
        return self.sg.ModelRunner.__new__(self.sg.ModelRunner)

    def record_weight_version_change(self, new_version: str | None) -> None:
        pass

    def flush(self, **_keywords: Any) -> bool:
        if not outcome["idle"]:
            return False
        heard.append("reset")
        self.held = 0
        self.controller.mem_pool_device_allocator.clear()
        self.controller.reset()
        return True

    def request(self, name: str, **fields: Any) -> Any:
        kind = getattr(self.sg.requests, name)
        known = (
            {field.name for field in dataclasses.fields(kind)} if dataclasses.is_dataclass(kind) else set(kind.__annotations__)
        )
        return self.dispatcher(kind(**{key: value for key, value in fields.items() if key in known}))

    def disk(self, **fields: Any) -> Any:
        return self.request("UpdateWeightFromDiskReqInput", model_path="/m", **fields)

    def in_session(self, *updates: Callable[[], Any]) -> None:
        """Where the release has sessions, tensors and broadcasts must come in one."""
        sessions = hasattr(self.sg.requests, "BeginWeightUpdateReqInput")
        if sessions:
            self.request("BeginWeightUpdateReqInput")
        for update in updates:
            update()
        if sessions:
            self.request("EndWeightUpdateReqInput")


def bare_controller(sg: types.SimpleNamespace, backend: Any) -> Any:
    """The release's cache controller without pools, storage threads or a GPU."""
    controller = sg.Controller.__new__(sg.Controller)
    controller.storage_backend = backend
    controller.enable_storage = False
    controller.storage_stop_event = threading.Event()
    controller.stop_event = threading.Event()
    controller.pp_prefetch_command_group = None
    controller.pp_prefetch_command_thread = None
    controller.pp_prefetch_state_lock = threading.Lock()
    controller.extra_host_mem_release_queues = {}
    controller.mem_pool_host = None
    for name in ("write_queue", "load_queue", "ack_write_queue", "ack_load_queue", "write_buffer", "load_buffer"):
        setattr(controller, name, [])
    controller.pp_prefetch_states, controller.pp_prefetch_decisions = {}, {}
    return controller


def attempt(work: Callable[[], Any]) -> str:
    try:
        result = work()
    except AssertionError:
        return "raised"
    return "" if getattr(result, "success", True) else "refused"


def scenarios(sg: types.SimpleNamespace) -> dict[str, list[str]]:
    from hicache_mooncake.client import weight_updates

    owner = sg.WeightUpdater or sg.ModelRunner
    stand_in_writers(owner)
    before = {name: vars(owner)[name] for name in vars(owner)} | {"reset": sg.BaseController.reset}
    results: dict[str, list[str]] = {}

    def run(
        name: str, work: Callable[[Engine], Any], *, held: int = 3, idle: bool = True, ok: bool = True, draft: bool = False
    ) -> None:
        engine = Engine(sg, with_draft=draft)
        weight_updates.watch(engine.backend)
        engine.controller.reset()  # as the tree does when it is built
        engine.held = held
        heard.clear()
        outcome.update(write=(ok, "broken"), writes=[], idle=idle)
        work(engine)
        results[name] = [word for word in heard if word != "write" or name == "disk"]
        outcome.update(write=(True, "fine"), idle=True)
        weight_updates.unwatch()

    def broadcast(engine: Engine, **fields: Any) -> Any:
        return engine.request(
            "UpdateWeightsFromDistributedReqInput", names=["a"], dtypes=["float16"], shapes=[[1]], group_name="g", **fields
        )

    run("disk", lambda e: e.disk(weight_version="v2", flush_cache=True))
    run("no flush", lambda e: (e.disk(weight_version="v2", flush_cache=False), heard.append("later"), e.flush()))
    run("nothing to flush", lambda e: e.disk(weight_version="v2", flush_cache=False), held=0)
    run("failed", lambda e: e.disk(weight_version="v2", flush_cache=True), ok=False)
    run(
        "draft failed", lambda e: (outcome["writes"].extend([(True, ""), (False, "")]), e.disk(weight_version="v2")), draft=True
    )
    run("busy", lambda e: heard.append(attempt(lambda: e.disk(weight_version="v2", flush_cache=True))), idle=False)
    run("no name", lambda e: e.in_session(lambda: broadcast(e, flush_cache=True)))
    run(
        "two parts",
        lambda e: e.in_session(
            lambda: broadcast(e, weight_version="v2", flush_cache=False),
            lambda: broadcast(e, weight_version="v2", flush_cache=True),
        ),
    )
    run(
        "named later",
        lambda e: (e.in_session(lambda: broadcast(e)), e.request("UpdateWeightVersionReqInput", new_version="v3")),
    )
    run("renamed", lambda e: (e.disk(weight_version="v2"), e.request("UpdateWeightVersionReqInput", new_version="v3")))
    run("ipc", lambda e: e.request("UpdateWeightsFromIPCReqInput", zmq_handles={}, weight_version="v2", flush_cache=True))
    run("no request", lambda e: direct(e.writer).update_weights_from_tensor([]))
    run("elastic", lambda e: direct(e.writer).update_weights_from_disk("/m", "auto", lambda name: True))
    run("only a flush", lambda e: e.request("FlushCacheReqInput"))
    run("resumed", lambda e: resume(sg, "weights"))
    run("resumed cache", lambda e: resume(sg, "kv_cache"))
    results |= listeners(sg, weight_updates)
    results["threads"] = with_threads(sg, weight_updates)
    results["decode"] = decode_node(sg, weight_updates)
    after = {name: vars(owner)[name] for name in vars(owner)} | {"reset": sg.BaseController.reset}
    results["taken off"] = [name for name in before if before[name] is not after[name]]
    results["blind"] = [weight_updates.watch(Backend())]
    weight_updates.unwatch()
    return results


def listeners(sg: types.SimpleNamespace, weight_updates: Any) -> dict[str, list[str]]:
    """Who is told: late ones too, only one's own flush, nobody who is gone; and what SGLang's callers get."""
    results: dict[str, list[str]] = {}

    def engine() -> Engine:
        weight_updates.unwatch()
        made = Engine(sg)
        weight_updates.watch(made.backend)
        made.controller.reset()
        made.held = 3
        heard.clear()
        return made

    first = engine()
    first.disk(weight_version="v2", flush_cache=True)
    heard.clear()
    late = Backend()
    weight_updates.watch(late)
    results["late"] = list(heard)
    first.held = 3
    first.disk(weight_version="v3", flush_cache=False)
    heard.clear()
    later = Backend()
    weight_updates.watch(later)
    results["late, not flushed"] = list(heard)

    second = engine()
    second.backend = second.controller.storage_backend = None
    gc.collect()
    second.disk(weight_version="v2", flush_cache=True)
    results["gone"] = list(heard)

    third = engine()
    third.controller.storage_backend = object()
    third.flush()
    results["somebody else's flush"] = list(heard)
    third.controller.storage_backend = types.SimpleNamespace(_backend=third.backend)
    third.flush()
    results["through a proxy"] = list(heard)

    fourth = engine()
    bad = type("Bad", (), dict.fromkeys(("weights_changing", "weights_changed", "caches_flushed")))()  # None is not callable
    fourth.controller.storage_backend.beside = bad
    weight_updates.watch(bad)
    result = fourth.disk(weight_version="v2", flush_cache=True)
    results["beside one that raises"] = [*heard, str(result.success), type(result).__name__]

    fifth = engine()
    kind = type("UpdateWeightsFromNowhereReqInput", (), {"weight_version": "v2"})

    def handler(request: Any) -> None:
        direct(fifth.writer).update_weights_from_tensor([])
        raise KeyError("nowhere")

    try:
        sg.Dispatcher([(kind, handler)])(kind())
    except KeyError as error:
        heard.append(str(error))
    results["raises"] = list(heard)
    weight_updates.unwatch()
    return results


def direct(runner: Any) -> Any:
    return getattr(runner, "weight_updater", runner)


def resume(sg: types.SimpleNamespace, tag: str) -> None:
    sys.modules[sg.Saver.__module__]._memory_saver = types.SimpleNamespace(resume=lambda tag: None)
    sg.Saver.__new__(sg.Saver).resume(tag)


def with_threads(sg: types.SimpleNamespace, weight_updates: Any) -> list[str]:
    """A reset while the release's real storage threads are in the backend, one reading and one writing, more queued."""
    begun, go_on = [threading.Event(), threading.Event()], threading.Event()
    calls: list[str] = []
    alive: list[str] = []

    class Blocking(Backend):
        def batch_set_v1(self, keys: list[str], *_rest: Any) -> list[bool]:
            calls.append(f"set {keys[0]}")
            begun[0].set()
            go_on.wait(20)
            return [True] * len(keys)

        def batch_get_v1(self, *_rest: Any) -> None:
            calls.append("get")
            begun[1].set()
            go_on.wait(20)
            time.sleep(2)  # a reader that nobody waits for would still be here when the flush is told

        def caches_flushed(self) -> None:
            alive.extend(thread.name for thread in old if thread.is_alive())
            calls.append("flushed")

    backend = Blocking()
    controller = bare_controller(sg, backend)
    controller.enable_storage = True
    controller.page_size, controller.storage_batch_size, controller.tp_world_size = 1, 128, 1
    controller.has_draft = False
    with contextlib.suppress(AttributeError):  # a property in newer releases, read off the storage config
        controller.backup_skip = False
    controller.storage_config = types.SimpleNamespace(is_storage_writer=True)
    controller.prefetch_tokens_occupied = 0
    controller.page_set_func = controller._page_set_zero_copy
    controller._page_transfer = lambda operation: backend.batch_get_v1()
    controller._page_backup = lambda operation: backend.batch_set_v1([operation.name])
    controller._reduce_prefetch_ack = lambda ack: None
    controller._start_storage_threads()
    weight_updates.watch(backend)
    while not isinstance(getattr(controller, "prefetch_buffer", None), queue.Queue):
        time.sleep(0.01)  # older releases make it in their query thread
    empty = torch.empty(0, dtype=torch.int64)
    for name in ("first", "second"):
        controller.backup_queue.put(types.SimpleNamespace(name=name))
    controller.prefetch_buffer.put(types.SimpleNamespace(host_indices=empty, completed_tokens=0, request_id="r", request="r"))
    assert begun[0].wait(20)
    assert begun[1].wait(20)
    names = ("prefetch_thread", "backup_thread", "prefetch_io_aux_thread", "prefetch_sync_thread")
    old = [getattr(controller, name) for name in names if hasattr(controller, name)]
    threading.Thread(target=lambda: (controller.storage_stop_event.wait(20), go_on.set()), daemon=True).start()
    controller.reset()
    restarted = [name for name in names if hasattr(controller, name) and getattr(controller, name).is_alive()]
    controller._stop_storage_threads()
    weight_updates.unwatch()
    return [
        *sorted(calls[:-1]),
        calls[-1],
        *alive,
        f"{len(restarted) >= 2} {controller.prefetch_thread not in old}",
    ]


def decode_node(sg: types.SimpleNamespace, weight_updates: Any) -> list[str]:
    """Decode offload: the flush resets the tree, never the offload's controller, whose queue may hold pages from before."""

    class Tree:
        def reset(self) -> None:
            heard.append("reset")

    controller = bare_controller(sg, Backend())
    controller.mem_pool_device_allocator = controller.mem_pool_host = types.SimpleNamespace(size=1, available_size=lambda: 0)
    controller.ack_backup_queue = queue.Queue()
    manager = sg.Decode.__new__(sg.Decode)
    manager.cache_controller, manager.tree_cache, manager.tp_world_size = controller, Tree(), 1
    manager.ongoing_offload, manager.ongoing_backup = {}, {}
    manager.decode_host_mem_pool = types.SimpleNamespace(free=lambda indices: None)
    weight_updates.watch(controller.storage_backend)
    heard.clear()
    manager.check_offload_progress()
    manager.ongoing_offload[1] = "a copy to the host from before"
    manager.tree_cache.reset()
    manager.check_offload_progress()
    heard.append("copied")
    del manager.ongoing_offload[1]
    manager.ongoing_backup[7] = ("r", [], 0.0, ())[: 4 if "_resolve_offload_transfers" in vars(sg.Decode) else 3]
    manager.check_offload_progress()
    heard.append("stored")
    manager.ongoing_backup[8] = "a backup from after"
    controller.ack_backup_queue.put(types.SimpleNamespace(id=7))
    manager.check_offload_progress()
    weight_updates.unwatch()
    return list(heard)


def main() -> dict[str, Any]:
    torch.distributed.barrier = lambda *_arguments, **_keywords: None  # type: ignore[assignment]
    import sglang

    return {"version": sglang.__version__, **scenarios(import_release())}


if __name__ == "__main__":
    print(json.dumps(main()))
