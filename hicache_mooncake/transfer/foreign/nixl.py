"""NVIDIA's NIXL as a transport, over its UCX backend, from its PyPI packages `nixl-cu12` and `nixl-cu13` (no CUDA is needed).

Each process has an agent of its own. Agents learn of each other, and of each stretch of memory, by metadata that the link's
channel carries. UCX chooses among what there is (RDMA, tcp, shared memory; UCX_TLS and UCX_NET_DEVICES say otherwise), and asks
for no key. Tried with release 1.5.1 over tcp and shared memory; not with RDMA devices.
"""

from __future__ import annotations

import importlib
import secrets
import threading
import time
from collections.abc import Sequence
from typing import Any, ClassVar

from hicache_mooncake.transfer.foreign.base import Engine, ForeignTransport
from hicache_mooncake.transfer.transport import Op, Piece, TransportError, TransportOptions

_MODULES = ("nixl_cu12._api", "nixl_cu13._api", "nixl._api")
_BACKEND = "UCX"
_FIRST_LOOK_S, _SLOWEST_LOOK_S = 0.00005, 0.005


class NixlTransport(ForeignTransport):
    scheme: ClassVar[str] = "nixl"
    magic: ClassVar[bytes] = b"hcnx"

    def __init__(self, options: TransportOptions) -> None:
        super().__init__(options)
        problems = []
        for name in _MODULES:
            try:
                self._api = importlib.import_module(name)
                return
            except (ImportError, OSError) as error:
                problems.append(str(error))
        raise TransportError("unavailable", f"NIXL cannot be loaded ({'; '.join(problems)}): pip install nixl-cu12")

    def start(self, host: str) -> Engine:
        return _NixlEngine(self._api)


class _NixlEngine(Engine):
    def __init__(self, api: Any) -> None:
        config = api.nixl_agent_config(backends=[_BACKEND], sync_mode=api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT)
        try:
            self._agent = api.nixl_agent(f"hicache-mooncake-{secrets.token_hex(8)}", config)
        except Exception as error:  # what its bindings raise
            raise TransportError("device", f"NIXL does not start: {error}") from error
        if _BACKEND not in self._agent.backends:
            raise TransportError("device", f"NIXL has no backend {_BACKEND}, only {', '.join(self._agent.get_plugin_list())}")
        self._lock = threading.Lock()
        self._registered: dict[int, Any] = {}

    def hello(self) -> bytes:
        return bytes(self._agent.get_agent_metadata())

    def attach(self, hello: bytes, host: str) -> str:
        return self._load(hello)

    def _load(self, metadata: bytes) -> str:
        try:
            name: bytes | str = self._agent.add_remote_agent(metadata)
        except Exception as error:
            raise TransportError("peer", f"NIXL does not accept a peer's metadata: {error}") from error
        return name.decode() if isinstance(name, bytes) else name

    def detach(self, peer: str) -> None:
        try:
            self._agent.remove_remote_agent(peer)
        except Exception as error:
            raise TransportError("peer", f"NIXL does not forget {peer}: {error}") from error

    def register(self, address: int, length: int) -> None:
        try:
            registered = self._agent.register_memory([(address, length, 0, "")], "DRAM", backends=[_BACKEND])
        except Exception as error:
            raise TransportError("memory", f"NIXL does not register {length} bytes at {address:#x}: {error}") from error
        with self._lock:
            self._registered[address] = registered

    def unregister(self, address: int) -> None:
        with self._lock:
            registered = self._registered.pop(address, None)
        if registered is not None:
            self._agent.deregister_memory(registered)

    def how(self, address: int) -> bytes:
        with self._lock:
            registered = self._registered[address]
        return bytes(self._agent.get_partial_agent_metadata(registered, True, [_BACKEND]))

    def reach(self, peer: str, how: bytes) -> None:
        if self._load(how) != peer:
            raise TransportError("peer", f"the metadata of memory of {peer} is another agent's")

    def move(self, op: Op, peer: str, pieces: Sequence[Piece]) -> None:
        try:
            here = self._agent.get_xfer_descs([(piece.local, piece.length, 0) for piece in pieces], "DRAM")
            there = self._agent.get_xfer_descs([(piece.remote, piece.length, 0) for piece in pieces], "DRAM")
            handle = self._agent.initialize_xfer(op.upper(), here, there, peer, b"", [_BACKEND])
        except Exception as error:
            raise TransportError("peer", f"NIXL cannot {op} with {peer}: {error}") from error
        try:
            state, look_s = self._agent.transfer(handle), _FIRST_LOOK_S
            while state == "PROC":  # also after its batch has ended: until then bytes may land
                time.sleep(look_s)
                look_s = min(look_s * 1.5, _SLOWEST_LOOK_S)
                state = self._agent.check_xfer_state(handle)
        except Exception as error:
            raise TransportError("peer", f"NIXL failed to {op} with {peer}: {error}") from error
        finally:
            self._agent.release_xfer_handle(handle)
        if state != "DONE":
            raise TransportError("peer", f"NIXL failed to {op} with {peer}: {state}")

    def close(self) -> None:
        for address in list(self._registered):
            self.unregister(address)
