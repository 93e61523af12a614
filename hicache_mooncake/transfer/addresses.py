"""Addresses of this host's network interfaces, and which of them other hosts are told.

`table` asks the system (getifaddrs), `towards` its routes; the rest is pure.
"""

from __future__ import annotations

import ctypes
import ipaddress
import os
import socket
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from hicache_mooncake.config_values import is_wildcard, master_addresses, split_address

if TYPE_CHECKING:
    from hicache_mooncake.config import Settings

_IFF_UP = 0x1
_MAX_ADDRESSES = 4096
_MAX_LISTED = 16


class AddressError(ValueError):
    """No address can be used. The text lists what there is and says what to do."""


class InterfaceAddress(NamedTuple):
    interface: str
    address: str
    """"" for an interface without any."""
    up: bool
    network: str = ""
    """In which the address lies, `10.0.0.0/24`; "" where there is none."""


# --------------------------------------------------------------------------- choosing


def of_interface(name: str, addresses: Sequence[InterfaceAddress]) -> str:
    """The address of an interface that other hosts reach it by: IPv4 first, else routable IPv6, in the system's order. Raises
    AddressError."""
    own = [row for row in addresses if row.interface == name]
    if not own:
        raise AddressError(f"there is no network interface {name!r} here, only {listing(addresses)}")
    usable = [row for row in own if row.address and not is_link_local(row.address)]
    if not usable:
        what = (
            "only link-local addresses, which other hosts cannot be told" if any(row.address for row in own) else "no address"
        )
        down = "" if any(row.up for row in own) else " and is down"
        raise AddressError(
            f"network interface {name!r} has {what}{down}: give it one, or choose another. There are {listing(addresses)}"
        )
    best = min(usable, key=lambda row: ":" in row.address)
    if not best.up:
        raise AddressError(f"network interface {name!r} is down ({best.address}): bring it up, or choose another")
    return best.address


def owner(address: str, addresses: Sequence[InterfaceAddress]) -> str:
    """The interface that has this address, or ""."""
    return next((row.interface for row in addresses if row.address == address), "")


def listing(addresses: Sequence[InterfaceAddress]) -> str:
    """`eth0 (10.0.0.1, fd00::1), lo (127.0.0.1)`: without link-local addresses, and bounded."""
    own: dict[str, list[str]] = {}
    for row in addresses:
        shown = own.setdefault(row.interface, [])
        if row.address and not is_link_local(row.address):
            shown.append(row.address)
    parts = [f"{name} ({', '.join(shown) or 'no address'})" for name, shown in own.items()]
    more = f" and {len(parts) - _MAX_LISTED} more" if len(parts) > _MAX_LISTED else ""
    return (", ".join(parts[:_MAX_LISTED]) + more) or "none"


def is_link_local(host: str) -> bool:
    """Is this an address that means something on one network segment only? Names are not looked up."""
    try:
        return ipaddress.ip_address(host).is_link_local
    except ValueError:
        return False


def advertised(settings: Settings, bound_host: str, bound_port: int) -> tuple[str, int]:
    """Where other nodes connect to a node that has bound this: that, unless the settings say otherwise; never a wildcard, but
    the address that leads to the first master. May look up a name. Raises AddressError."""
    if settings.advertise:
        host, port = split_address(settings.advertise, 0)
        return host, port or bound_port
    if not is_wildcard(bound_host):
        return bound_host, bound_port
    if not settings.masters:
        return "127.0.0.1", bound_port
    master, port = master_addresses(settings.masters[0].removeprefix("tcp://"))[0]
    family = socket.AF_INET if bound_host == "0.0.0.0" else socket.AF_UNSPEC
    try:
        return towards(master, port, family), bound_port
    except AddressError as error:
        only = ", and only IPv4 is listened on" if family == socket.AF_INET else ""
        raise AddressError(
            f"--listen {settings.listen} is a wildcard, and which address to advertise is unknown: {error}{only}. Set "
            "--interface NAME, or --advertise HOST"
        ) from error


# --------------------------------------------------------------------------- the system's


class _SockAddr(ctypes.Structure):
    _fields_ = (("family", ctypes.c_ushort), ("data", ctypes.c_ubyte * 26))


class _IfAddrs(ctypes.Structure):
    pass


_IfAddrs._fields_ = (
    ("next", ctypes.POINTER(_IfAddrs)),
    ("name", ctypes.c_char_p),
    ("flags", ctypes.c_uint),
    ("address", ctypes.POINTER(_SockAddr)),
    ("netmask", ctypes.POINTER(_SockAddr)),
)
"""As far as it is read here; the rest of the structure is the system's."""


def table() -> list[InterfaceAddress]:
    """Every interface of this network namespace with its IPv4 and IPv6 addresses. Raises AddressError."""
    libc = ctypes.CDLL(None, use_errno=True)
    first = ctypes.POINTER(_IfAddrs)()
    if libc.getifaddrs(ctypes.byref(first)) != 0:
        raise AddressError(f"the network interfaces cannot be listed: {os.strerror(ctypes.get_errno())}")
    found: list[InterfaceAddress] = []
    try:
        at = first
        while at and len(found) < _MAX_ADDRESSES:
            row = at.contents
            text = _text(row.address)
            network = _network(text, row.netmask)
            found.append(InterfaceAddress(os.fsdecode(row.name), text, bool(row.flags & _IFF_UP), network))
            at = row.next
    finally:
        libc.freeifaddrs(first)
    return found


def is_own(host: str) -> bool:
    """Whether all addresses of this host name are of this host's interfaces. May look it up."""
    try:
        found = {str(row[4][0]) for row in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
        own = {row.address for row in table()}
    except (OSError, AddressError):
        return False
    return all(address in own or ipaddress.ip_address(address.partition("%")[0]).is_loopback for address in found)


def towards(host: str, port: int, family: int = socket.AF_UNSPEC) -> str:
    """The address from which this host reaches another one. Sends nothing; may look up a name. Raises AddressError."""
    try:
        found, kind, protocol, _, where = socket.getaddrinfo(host, port, family, socket.SOCK_DGRAM)[0]
        with socket.socket(found, kind, protocol) as probe:
            probe.connect(where)
            own = str(probe.getsockname()[0])
    except OSError as error:
        raise AddressError(f"no address of this host leads to {host} ({error.strerror or error})") from error
    if ":" in own and is_link_local(own):
        raise AddressError(f"this host reaches {host} from a link-local address, {own}, which others cannot be told")
    return own


def _text(pointer: ctypes._Pointer[_SockAddr]) -> str:
    if not pointer:
        return ""
    address = pointer.contents
    data = bytes(address.data)
    if address.family == socket.AF_INET:
        return socket.inet_ntop(socket.AF_INET, data[2:6])
    if address.family == socket.AF_INET6:
        return socket.inet_ntop(socket.AF_INET6, data[6:22])
    return ""


def _network(address: str, netmask: ctypes._Pointer[_SockAddr]) -> str:
    mask = _text(netmask) if address else ""
    if not mask:
        return ""
    bits = int(ipaddress.ip_address(mask)).bit_count()
    return str(ipaddress.ip_network(f"{address}/{bits}", strict=False))
