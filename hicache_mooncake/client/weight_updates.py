"""Tells the backend when the engine's weights change and when no page of the old ones is left, in the process itself.

SGLang updates the weights of a running engine (`update_weights_from_*`, weight-update sessions, memory that is released and
resumed) and then resets its own caches. It tells a storage backend nothing of it, so pages of the old weights would stay
addressable. `watch` wraps the methods that every such update goes through. They are looked up at each call, so it does not
matter that the scheduler's request dispatcher keeps bound methods from before:

* `TypeBasedDispatcher.__call__` sees the request: its version, its path, its begin and its end;
* the methods that write weights (of `WeightUpdater`, in older releases of `ModelRunner`, for target and draft alike) say
  whether anything was written, and whether it worked;
* `HiCacheController.reset`, and on a decode node that offloads without a tree `check_offload_progress`, say when an operation
  from before can no longer reach the backend.

Everything here runs on the scheduler's thread, the only one that updates weights, resets caches and builds backends.
"""

from __future__ import annotations

import dataclasses
import logging
import re
import uuid
import weakref
from collections import Counter
from collections.abc import Iterator
from typing import Any, Protocol

from hicache_mooncake.client.hooks import Hooks, engine_setting, loaded, quietly, subclasses

log = logging.getLogger(__name__)

_UPDATE = re.compile(r"UpdateWeights?From\w+ReqInput")
_WRITES = re.compile(r"(update|load|apply)_weights(_from_\w+)?|(begin|end)_weight_update")
_WRITERS = (
    ("sglang.srt.model_executor.model_runner_components.weight_updater", "WeightUpdater"),
    ("sglang.srt.model_executor.model_runner", "ModelRunner"),
)
_SCHEDULER = ("sglang.srt.managers.scheduler", "Scheduler")
_CONTROLLER = ("sglang.srt.managers.cache_controller", "HiCacheController")
_DISPATCHER = ("sglang.utils", "TypeBasedDispatcher")
_DECODE_OFFLOAD = ("sglang.srt.disaggregation.decode_kvcache_offload_manager", "DecodeKVCacheOffloadManager")
_MEMORY_SAVER = ("sglang.srt.utils.torch_memory_saver_adapter", "_TorchMemorySaverAdapterReal")
_MAX_NAMES = 100_000
_COUNTABLE = ("TokenToKVPoolAllocator", "PagedTokenToKVPoolAllocator", "SWATokenToKVPoolAllocator")
"""Device allocators whose free slots, counted, say that no request and no tree holds any."""


class Listener(Protocol):
    """What `watch` calls, on the scheduler's thread. Must be weakly referenceable. Whatever it raises is logged and dropped.

    Pages may be stored and found again once both have come since the last `weights_changing`: a `weights_changed` that is ok
    and names the weights, and a `caches_flushed`. They come in either order.
    """

    def weights_changing(self) -> None:
        """The weights are about to be written. Until further notice they are unknown."""

    def weights_changed(self, version: str | None, model_path: str | None, ok: bool) -> None:
        """The writing has ended. `version`: the update's `weight_version`; `model_path`: the checkpoint it was read from. Not
        ok: the update failed, or the memory came back without its contents, and nobody knows what the weights are (SGLang's
        own rollback loads the new path again). Comes without a `weights_changing` before it when weights that no update
        named were given a name afterwards (POST /update_weight_version)."""

    def caches_flushed(self) -> None:
        """Neither device nor host memory holds a page from before, and no storage operation from before can still reach the
        backend. Never told between `weights_changing` and `weights_changed`, and also told when no weights have changed."""


def watch(listener: Listener) -> str:
    """Tell `listener` of every change from now on, and of the last one before, for as long as it lives (it is held weakly).

    The first call puts the wrappers on. `caches_flushed` is told to a listener that is the storage backend of the controller
    which was reset, or an attribute of it. Returns "", or a sentence on what cannot be seen in this SGLang release: then the
    operator should name the weights (`weight_version` in the extra config) and restart after an update. Never raises for
    anything in SGLang; TypeError for a listener without weak references.
    """
    return _process.watch(listener)


def unwatch() -> None:
    """Every method as SGLang has it, and no listener: for tests."""
    global _process
    _process.hooks.take_off()
    _process = _Process()


def change_mark() -> tuple[str, int]:
    """Of the last change of the weights: (a random text that nothing else ever has, the how-manieth change this was in this
    process that named its version). Both outlive a backend that is detached and attached again."""
    return _process._mark


def engine_weight_version() -> str | None:
    """SGLang's own `--weight-version`, None when it is "default". Where ranks are told of versions (from 0.5.19 on) it is the
    one that the last update named, before that the one that the engine was started with."""
    value = engine_setting("serving", "weight_version")
    return None if value in (None, "", "default") else str(value)


@dataclasses.dataclass
class _Change:
    """One change of the weights: a request, a session of requests, or a write that no request explains."""

    version: str | None = None
    model_path: str | None = None
    touched: bool = False
    ok: bool = True
    flushed: list[Any] = dataclasses.field(default_factory=list)
    """Controllers that were reset since the weights were last written."""

    def absorb(self, later: _Change) -> None:
        if later.touched:
            self.version = later.version or self.version
            self.model_path = later.model_path  # what was written over files is no file's any more
            self.touched = True
            self.ok = self.ok and later.ok
        self.flushed = later.flushed


@dataclasses.dataclass
class _Drain:
    """A decode offload manager's operations that are older than the last reset of its tree. None: nothing is waited for."""

    copies: set[Any] | None = None
    backups: set[Any] | None = None


class _Process:
    """The wrappers of this process and what they have seen."""

    def __init__(self) -> None:
        self.hooks = Hooks()
        self._listeners: list[weakref.ref[Any]] = []
        self._open: _Change | None = None
        self._session: _Change | None = None
        self._changing = False
        self._writing = 0
        """Depth of writes in writes."""
        self._mark = ("", 0)
        self._named_so_far: Counter[str] = Counter()
        self._last: tuple[str | None, str | None, bool] | None = None
        self._controllers: weakref.WeakSet[Any] = weakref.WeakSet()
        self._stale: weakref.WeakSet[Any] = weakref.WeakSet()
        self._resetting: set[int] = set()
        self._decoders: weakref.WeakKeyDictionary[Any, _Drain] = weakref.WeakKeyDictionary()

    def watch(self, listener: Listener) -> str:
        if not self._listeners and self._last is None:
            earlier = quietly("earlier updates", _earlier_update)
            if earlier is not None:
                self._set_last(*earlier)
        blind = self._put_hooks()
        if all(held() is not listener for held in self._listeners):
            self._listeners.append(weakref.ref(listener))
            if self._changing:
                quietly("weights_changing", listener.weights_changing)
            elif self._last is not None:
                quietly("weights_changing", listener.weights_changing)
                quietly("weights_changed", listener.weights_changed, *self._last)
                if self._controllers and not self._stale:
                    quietly("caches_flushed", listener.caches_flushed)
        return "; ".join(blind)

    # ------------------------------------------------------------------ wrappers

    def _put_hooks(self) -> list[str]:
        """Wrap what this process has loaded and is not wrapped yet. What it misses, in words."""
        scheduler = loaded(*_SCHEDULER)
        if scheduler is None:
            return ["no SGLang scheduler runs in this process, so updates of the weights cannot be seen from it"]
        blind: list[str] = []
        dispatcher = loaded(*_DISPATCHER)
        if dispatcher is None or not self.hooks.put(dispatcher, "__call__", self._around_dispatch):
            blind.append(f"the version that an update names cannot be seen (no {_DISPATCHER[1]} in this SGLang)")
        if not self._put_writers():
            blind.append("updates of the weights cannot be seen (no methods of this SGLang are known to write them)")
        controller = loaded(*_CONTROLLER)
        if controller is None or not self.hooks.put(controller, "reset", self._around_reset):
            blind.append(f"a flush of the caches cannot be seen (no {_CONTROLLER[1]}.reset in this SGLang)")
        else:
            for derived in subclasses(controller):
                self.hooks.put(derived, "reset", self._around_reset)
        decode = loaded(*_DECODE_OFFLOAD)
        if decode is not None and not self.hooks.put(decode, "check_offload_progress", self._around_decode_progress):
            blind.append(
                f"a flush cannot be seen on a decode node that offloads (no check_offload_progress in {decode.__name__})"
            )
        saver = loaded(*_MEMORY_SAVER)
        if saver is not None and not self.hooks.put(saver, "resume", self._around_resume):
            blind.append("weights whose memory was released and resumed cannot be seen")
        if not hasattr(scheduler, "handle_update_weight_version"):
            blind.append(
                "this SGLang does not tell its ranks of POST /update_weight_version: name weight_version in the update itself"
            )
        return blind

    def _put_writers(self) -> bool:
        put = False
        for place in _WRITERS:
            owner = loaded(*place)
            for name in list(vars(owner)) if owner is not None else ():
                if _WRITES.fullmatch(name):
                    put |= self.hooks.put(owner, name, self._around_write)
        return put

    def _around_dispatch(self, original: Any, dispatcher: Any, *arguments: Any, **keywords: Any) -> Any:
        request = arguments[0] if arguments else None
        kind = _KINDS.of(type(request))
        if not kind:
            return original(dispatcher, *arguments, **keywords)
        opened = quietly("the begin of a weight update", self._begin_request, kind, request)
        try:
            result = original(dispatcher, *arguments, **keywords)
        except BaseException:
            quietly("the end of a weight update", self._end_request, kind, request, opened, True)
            raise
        quietly("the end of a weight update", self._end_request, kind, request, opened, False)
        return result

    def _around_write(self, original: Any, owner: Any, *arguments: Any, **keywords: Any) -> Any:
        name = original.__name__
        if name == "update_weights_from_disk" and (keywords.get("weight_name_filter") or any(map(callable, arguments))):
            return original(owner, *arguments, **keywords)  # elastic EP: experts of a lost rank, again from the same checkpoint
        path = None
        if name == "update_weights_from_disk":
            path = keywords.get("model_path", arguments[0] if arguments else None)
        opened = quietly("a write of weights", self._begin_write, path)
        try:
            result = original(owner, *arguments, **keywords)
        except BaseException:
            quietly("a write of weights", self._end_write, opened, False)
            raise
        quietly("a write of weights", self._end_write, opened, _succeeded(result))
        return result

    def _around_resume(self, original: Any, saver: Any, *arguments: Any, **keywords: Any) -> Any:
        tag = keywords.get("tag", arguments[0] if arguments else None)
        if tag != "weights" or engine_setting("exec", "features", "enable_weights_cpu_backup"):
            return original(saver, *arguments, **keywords)
        opened = quietly("resumed weights", self._begin_write, None)
        try:
            return original(saver, *arguments, **keywords)
        finally:
            quietly("resumed weights", self._end_write, opened, False)  # the memory is back, what was in it is not

    def _around_reset(self, original: Any, controller: Any, *arguments: Any, **keywords: Any) -> Any:
        if id(controller) in self._resetting:  # a subclass's reset calls its parent's
            return original(controller, *arguments, **keywords)
        self._resetting.add(id(controller))
        try:
            clean = self._stop_threads(controller)
            result = original(controller, *arguments, **keywords)
        finally:
            self._resetting.discard(id(controller))
        if clean:
            quietly("a reset of the caches", self._flushed, controller)
        return result

    def _stop_threads(self, controller: Any) -> bool:
        """Before 0.5.19 a reset waits for the query and the write thread, but not for the one that reads pages: it would go on
        to fill host pages that are somebody else's by then. End all three first, as a detach does. False: one did not end."""
        base = loaded(*_CONTROLLER)
        reset = getattr(self.hooks.original(base, "reset"), "__code__", None)
        names = set(reset.co_names) if reset is not None else set()
        if names & {"_stop_storage_threads", "prefetch_io_aux_thread"} or not getattr(controller, "enable_storage", False):
            return True
        try:
            controller._stop_storage_threads()
        except Exception as error:
            log.error("the caches are not known to be flushed, L3 stays as it is: %s", error)
            return False
        return True

    def _around_decode_progress(self, original: Any, manager: Any, *arguments: Any, **keywords: Any) -> Any:
        result = original(manager, *arguments, **keywords)
        quietly("decode offload", self._decode_progress, manager)
        return result

    def _around_tree_reset(self, original: Any, tree: Any, *arguments: Any, **keywords: Any) -> Any:
        result = original(tree, *arguments, **keywords)
        quietly("a reset of the tree", self._tree_reset, tree)
        return result

    # ------------------------------------------------------------------ changes

    def _begin_request(self, kind: str, request: Any) -> _Change | None:
        if kind == "name" or self._open is not None:
            return None
        self._open = _Change(_text(request, "weight_version"), _text(request, "model_path"))
        if kind in ("update", "begin") and not self._put_writers():
            self._touch(self._open)  # nothing else will say that it writes
        return self._open

    def _end_request(self, kind: str, request: Any, opened: _Change | None, raised: bool) -> None:
        if kind == "name":
            if not raised:
                self._named(_text(request, "new_version"))
            return
        if opened is None:
            return
        self._open = None
        opened.ok = opened.ok and not raised
        session = self._session
        if kind == "begin" and opened.touched and session is None and not raised:
            self._session = opened
        elif session is None:
            self._finish(opened)
        else:
            session.absorb(opened)
            if kind == "end" and not raised:
                self._session = None
                self._finish(session)

    def _begin_write(self, path: str | None) -> _Change | None:
        opened = None
        if self._open is None:
            opened = self._open = _Change(model_path=path)
        if self._writing == 0:  # the last write decides where the weights are from; what it calls is part of it
            self._open.model_path = path
        self._writing += 1
        self._touch(self._open)
        return opened

    def _end_write(self, opened: _Change | None, ok: bool) -> None:
        self._writing = max(0, self._writing - 1)
        if self._open is not None:
            self._open.ok = self._open.ok and ok
        if opened is None:
            return
        self._open = None
        if self._session is None:
            self._finish(opened)
        else:
            self._session.absorb(opened)

    def _set_last(self, version: str | None, model_path: str | None, ok: bool) -> None:
        self._last = (version, model_path, ok)
        name = version or ""
        if len(self._named_so_far) < _MAX_NAMES or name in self._named_so_far:
            self._named_so_far[name] += 1
        self._mark = (uuid.uuid4().hex, self._named_so_far[name])

    def _touch(self, change: _Change) -> None:
        change.touched = True
        change.flushed.clear()
        self._stale.update(self._controllers)
        for drain in self._decoders.values():
            drain.copies = drain.backups = None
        if not self._changing:
            self._changing = True
            for listener in self._alive():
                quietly("weights_changing", listener.weights_changing)

    def _finish(self, change: _Change) -> None:
        if change.touched:
            self._changing = False
            self._set_last(change.version, change.model_path, change.ok)
            for listener in self._alive():
                quietly("weights_changed", listener.weights_changed, change.version, change.model_path, change.ok)
        for controller in list(self._controllers):
            reset = any(each is controller for each in change.flushed)
            if reset or (change.touched and quietly("counting pages", _empty, controller)):
                self._deliver(controller)

    def _named(self, version: str | None) -> None:
        """A name counts only for weights that came without one: renaming others would not change what they are."""
        if self._session is not None:
            self._session.version = version or self._session.version
        elif not self._changing and self._last == (None, None, True) and version:
            self._set_last(version, None, True)
            for listener in self._alive():
                quietly("weights_changed", listener.weights_changed, version, None, True)

    # ------------------------------------------------------------------ flushes

    def _flushed(self, controller: Any) -> None:
        self._controllers.add(controller)
        if self._open is not None:
            self._open.flushed.append(controller)  # told after weights_changed
        elif self._session is None:
            self._deliver(controller)

    def _deliver(self, controller: Any) -> None:
        self._stale.discard(controller)
        backend = getattr(controller, "storage_backend", None)
        for listener in self._alive():
            if backend is not None and _belongs(listener, backend):
                quietly("caches_flushed", listener.caches_flushed)

    def _decode_progress(self, manager: Any) -> None:
        drain = self._decoders.get(manager)
        if drain is None:
            drain = self._decoders[manager] = _Drain()
            self._controllers.add(manager.cache_controller)
            owner = next(each for each in type(manager.tree_cache).__mro__ if "reset" in vars(each))
            self.hooks.put(owner, "reset", self._around_tree_reset)
        self._step(manager, drain)

    def _tree_reset(self, tree: Any) -> None:
        for manager, drain in list(self._decoders.items()):
            if manager.tree_cache is tree:
                drain.copies, drain.backups = set(manager.ongoing_offload), None
                self._step(manager, drain)

    def _step(self, manager: Any, drain: _Drain) -> None:
        """A flush resets the tree but not the offload's controller: wait until what was under way then has been answered. A
        copy to the host becomes a backup with a number of its own, so copies first."""
        if drain.copies is not None:
            drain.copies.intersection_update(manager.ongoing_offload)
            if drain.copies:
                return
            drain.copies, drain.backups = None, set(manager.ongoing_backup)
        if drain.backups is not None:
            drain.backups.intersection_update(manager.ongoing_backup)
            if not drain.backups:
                drain.backups = None
                self._flushed(manager.cache_controller)

    def _alive(self) -> Iterator[Any]:
        self._listeners = [held for held in self._listeners if held() is not None]
        return (listener for held in list(self._listeners) if (listener := held()) is not None)


class _Kinds:
    """What a request is to us, by its type: "" for all but a handful. One dictionary look-up for each request."""

    def __init__(self) -> None:
        self._known: dict[type, str] = {}

    def of(self, request: type) -> str:
        kind = self._known.get(request)
        if kind is None:
            name = request.__name__
            fixed = {
                "BeginWeightUpdateReqInput": "begin",
                "EndWeightUpdateReqInput": "end",
                "UpdateWeightVersionReqInput": "name",
            }
            kind = self._known[request] = fixed.get(name, "update" if _UPDATE.fullmatch(name) else "")
        return kind


_KINDS = _Kinds()


def _succeeded(result: Any) -> bool:
    """Methods that write weights return (success, message), or nothing."""
    return bool(result[0]) if isinstance(result, (tuple, list)) and result else True


def _text(request: Any, name: str) -> str | None:
    value = getattr(request, name, None)
    return str(value) if value is not None and value != "" else None


def _earlier_update() -> tuple[str | None, str | None, bool] | None:
    """What newer releases remember of updates before anybody watched: a backend may be attached late. None: no update that left
    a trace (one from tensors that named no version leaves none)."""
    context = loaded("sglang.srt.runtime_context", "get_context")
    entries = getattr(context(), "overrides_log", None) if callable(context) else None
    changes: dict[str, Any] = {}
    for source, fields in entries() if callable(entries) else ():
        if source in ("model_runner.update_model_fields", "scheduler.weight_version"):
            changes |= fields
    if not changes:
        return None
    version = changes.get("weight_version")
    # A name may be that of the files, or of what was written over them since.
    return (version, None if version else changes.get("model_path"), True)


def _belongs(listener: Any, backend: Any) -> bool:
    """Is `listener` this backend, one of its attributes, or inside the proxy that SGLang puts around a backend to test?"""
    held = [backend, *vars(backend).values()] if hasattr(backend, "__dict__") else [backend]
    proxied = getattr(backend, "_backend", None)
    return any(each is listener for each in held) or (proxied is not None and _belongs(listener, proxied))


def _empty(controller: Any) -> bool:
    """Does no page exist on device or host? Trainers pause, flush, and only then update, without a flush after it: there is
    nothing left to flush, and waiting for one would leave L3 off for ever. Only what can be counted exactly counts."""
    device, host = controller.mem_pool_device_allocator, controller.mem_pool_host
    if type(device).__name__ not in _COUNTABLE:
        return False
    size = getattr(device, "size_full", None) or device.size
    free = device.full_available_size() if hasattr(device, "full_available_size") else device.available_size()
    page_size = int(getattr(device, "page_size", 1))
    if free != size // page_size * page_size:
        return False
    return bool(host.available_size() == getattr(host, "logical_size", host.size))


_process = _Process()
