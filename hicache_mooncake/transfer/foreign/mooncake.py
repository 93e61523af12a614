"""Mooncake's transfer engine as a transport, from its PyPI packages `mooncake-transfer-engine` and `-non-cuda`.

Each process has an engine of its own that listens on ports of its choice, in Mooncake's P2P mode without a metadata server.
Whoever reaches those ports reaches the registered memory: Mooncake asks for no key. A peer that does not answer holds the
engine's thread for 30 s. Tried with release 0.3.13 over tcp and IPv4; not with RDMA devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from hicache_mooncake.transfer.foreign.base import Engine, ForeignTransport
from hicache_mooncake.transfer.transport import Op, Piece, TransportError, TransportOptions


class MooncakeTransport(ForeignTransport):
    """With `TransportOptions.devices`, or where the host has any RDMA device, Mooncake moves by RDMA, else by tcp."""

    scheme: ClassVar[str] = "mooncake"
    magic: ClassVar[bytes] = b"hcmk"

    def __init__(self, options: TransportOptions) -> None:
        super().__init__(options)
        try:
            from mooncake.engine import TransferEngine
        except (ImportError, OSError) as error:
            raise TransportError(
                "unavailable",
                f"Mooncake's engine cannot be loaded ({error}): pip install mooncake-transfer-engine-non-cuda (or the one for "
                "your CUDA), and the libraries that it names, from your distribution",
            ) from error
        if TransferEngine.__module__.startswith("hicache_mooncake."):
            raise TransportError(
                "unavailable", "mooncake.engine is this package's here (HICACHE_MOONCAKE_ENGINE), not Mooncake's"
            )
        self._make = TransferEngine
        self._devices = options.devices

    def start(self, host: str) -> Engine:
        rdma = bool(self._devices) or any(Path("/sys/class/infiniband").glob("*"))
        return _MooncakeEngine(self._make(), host, "rdma" if rdma else "tcp", ",".join(self._devices))


class _MooncakeEngine(Engine):
    def __init__(self, engine: Any, host: str, protocol: str, devices: str) -> None:
        self._engine = engine
        code = engine.initialize(host, "P2PHANDSHAKE", protocol, devices)
        if code != 0:
            raise TransportError("device", f"Mooncake's engine does not start on {host} with {protocol} {devices}: code {code}")

    def hello(self) -> bytes:
        return str(self._engine.get_rpc_port()).encode()

    def attach(self, hello: bytes, host: str) -> str:
        if not hello.isdigit():
            raise TransportError("peer", f"{hello[:32]!r} is no port of a Mooncake engine")
        return f"{host}:{hello.decode()}"

    def detach(self, peer: str) -> None:
        """It keeps what it knows: there is no call to forget a peer."""

    def register(self, address: int, length: int) -> None:
        code = self._engine.register_memory(address, length)
        if code != 0:
            raise TransportError("memory", f"Mooncake's engine does not register {length} bytes at {address:#x}: code {code}")

    def unregister(self, address: int) -> None:
        self._engine.unregister_memory(address)

    def how(self, address: int) -> bytes:
        return b""  # it asks the peer's engine by itself

    def reach(self, peer: str, how: bytes) -> None:
        """See `how`."""

    def move(self, op: Op, peer: str, pieces: Sequence[Piece]) -> None:
        call = self._engine.batch_transfer_sync_read if op == "read" else self._engine.batch_transfer_sync_write
        local, remote, lengths = (list(column) for column in zip(*pieces, strict=True))
        code = call(peer, local, remote, lengths)
        if code != 0:
            raise TransportError("peer", f"Mooncake's engine failed to {op} {sum(lengths)} bytes with {peer}: code {code}")

    def close(self) -> None:
        self._engine = None  # its destructor ends it
