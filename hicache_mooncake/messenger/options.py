"""What an engine for SGLang is to be like: from what SGLang asks for, and from this package's settings. Without I/O."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from hicache_mooncake.config import Settings
from hicache_mooncake.config_values import is_loopback, join_address, parse_devices, split_address

P2P = "P2PHANDSHAKE"
PROTOCOLS = ("tcp", "rdma")
_OFF = ("", "0", "false", "no", "off")


@dataclass(frozen=True)
class Options:
    host: str
    """That peers are told, without brackets."""
    port: int
    listen: tuple[str, ...]
    """Addresses to listen on: the first that this host has."""
    transports: tuple[str, ...]
    devices: tuple[str, ...]
    wants_rdma: bool
    without_key: Literal["loopback", "own host", "anybody"]


def options(
    hostname: str, metadata_server: str, protocol: str, device_name: str, settings: Settings, environ: Mapping[str, str]
) -> Options:
    """Raises ValueError for what cannot be had, with what to do."""
    if metadata_server != P2P:
        raise ValueError(f"metadata_server={metadata_server!r}: there is none here, engines meet directly: give {P2P}")
    if protocol not in PROTOCOLS:
        raise ValueError(
            f"protocol={protocol!r}: there are {' and '.join(PROTOCOLS)} (MOONCAKE_PROTOCOL); for others install "
            "mooncake-transfer-engine and set HICACHE_MOONCAKE_ENGINE=off"
        )
    host, port = _split(hostname)
    forced = environ.get("MC_FORCE_TCP", "").strip().lower() not in _OFF
    rdma = protocol == "rdma" and not forced
    if settings.transport == "tcp" and settings.sources.get("transport") != "MC_FORCE_TCP":
        transports: tuple[str, ...] = ("tcp",)
        rdma = False
    elif rdma:
        transports = ("rdma",)
    else:
        transports = ("shm", "tcp")
    devices = parse_devices(device_name) if rdma and device_name.strip() else settings.rdma_devices
    return Options(
        host,
        port,
        _listen(host, port),
        transports,
        devices if rdma else (),
        rdma,
        "anybody" if settings.allow_unauthenticated else "own host",
    )


def _split(hostname: str) -> tuple[str, int]:
    """A host, or an IPv6 address with or without brackets, or either of them with a port."""
    try:
        return str(ipaddress.ip_address(hostname)), 0
    except ValueError:
        return split_address(hostname, default_port=0)


def _listen(host: str, port: int) -> tuple[str, ...]:
    """An address of this host is listened on itself. A name, which may mean another address here than elsewhere, and an address
    that is translated to this host's, cannot be: then every address is."""
    try:
        version = ipaddress.ip_address(host).version
    except ValueError:
        return (join_address(host if is_loopback(host) else "::", port), join_address("0.0.0.0", port))
    everywhere = "::" if version == 6 else "0.0.0.0"
    return tuple(dict.fromkeys((join_address(host, port), join_address(everywhere, port))))
