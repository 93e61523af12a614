"""Which entry of an RDMA port's GID table to use, and whether two ends can talk. Pure: the table is an argument.

On RoCE the GID is the address, and a port has several: RoCE v1 and v2, link-local and routable, of a bond and its VLANs. A
wrong one connects to nothing, or only on some hosts.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from hicache_mooncake.transfer.verbs.api import Gid, PortInfo

Family = Literal["IPv4", "IPv6", "link-local", "InfiniBand"]
"""Two ends must have the same."""

_MAX_LISTED = 16


class GidError(Exception):
    """No GID can be used, or not the one that was asked for. The text lists the table and says what to do."""


@dataclass(frozen=True, slots=True)
class Choice:
    index: int
    gid: str
    family: Family
    netdev: str
    why: str
    """For `doctor` and the log."""
    warning: str = ""
    """What may go wrong with it, and what to do then."""


def address(gid: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """The address that a GID is. Raises ValueError for what is none."""
    found = ipaddress.IPv6Address(gid)
    return found.ipv4_mapped or found


def family(gid: str, link_layer: str) -> Family:
    """Raises ValueError for what is no GID."""
    if link_layer == "InfiniBand":
        return "InfiniBand"
    found = address(gid)
    if found.is_link_local:
        return "link-local"
    return "IPv4" if found.version == 4 else "IPv6"


def is_v2(gid: Gid) -> bool:
    return gid.type.strip().lower().endswith("v2")


_FAMILY_ORDER = {"IPv4": 0, "IPv6": 1, "link-local": 4}


def _usable(gid: Gid) -> bool:
    try:
        found = address(gid.gid)
    except ValueError:
        return False
    return not (found.is_unspecified or found.is_multicast)


def _rank(gid: Gid) -> tuple[int, bool, int]:
    """Smallest is best. A GID whose interface is not seen, as in a container that has the device but not its network, comes
    after all that can be reached, link-local ones excepted. One of the host itself (loopback) is for tests on one host."""
    rank = _FAMILY_ORDER[family(gid.gid, "Ethernet")]
    if rank < 2 and not gid.netdev:
        rank += 2
    if address(gid.gid).is_loopback:
        rank += 5
    return rank, not gid.netdev, gid.index


def candidates(gids: Sequence[Gid]) -> list[Gid]:
    """Those of an Ethernet port that may be chosen, best first: RoCE v2 with an IPv4 address, then with a routable IPv6 one,
    then those whose network interface is not seen here, link-local last."""
    return sorted((gid for gid in gids if is_v2(gid) and _usable(gid)), key=_rank)


def table(gids: Sequence[Gid]) -> str:
    """The table in one line, for messages."""
    shown = [f"{gid.index}: {_short(gid.gid)} {gid.type or 'type unknown'} {gid.netdev or 'no interface'}" for gid in gids]
    more = f"; {len(shown) - _MAX_LISTED} more" if len(shown) > _MAX_LISTED else ""
    return ("; ".join(shown[:_MAX_LISTED]) + more) or "empty"


def _short(gid: str) -> str:
    try:
        return str(address(gid))
    except ValueError:
        return gid


def choose(device: str, port: PortInfo, forced: int = -1) -> Choice:
    """The GID for a port of this device. `forced` is an index that the operator wants, or -1. Raises GidError."""
    where = f"{device} port {port.number}"
    if port.link_layer == "InfiniBand":
        return _infiniband(where, port, forced)
    if forced >= 0:
        return _forced(where, port, forced)
    best = candidates(port.gids)
    if not best:
        what = "has only RoCE v1, which is not routed, and is not chosen by itself" if port.gids else "is empty"
        raise GidError(
            f"{where}: no RoCE v2 GID with an address ({table(port.gids)}): the table {what}. Give its network interface an "
            "IPv4 address, or name an entry with gid_index (HICACHE_MOONCAKE_GID_INDEX)"
        )
    gid = best[0]
    of = family(gid.gid, port.link_layer)
    why = f"RoCE v2, {of} address {_short(gid.gid)} of {gid.netdev or 'no interface seen'}"
    others = len(best) - 1
    return Choice(gid.index, gid.gid, of, gid.netdev, why + (f", first of {others + 1}" if others else ""), _warning(gid, of))


def _warning(gid: Gid, of: Family) -> str:
    if of == "link-local":
        return (
            "link-local only: it reaches hosts on the same network segment and nobody behind a router. Give its network "
            "interface an IPv4 address"
        )
    if not gid.netdev:
        return (
            "its network interface is not seen here, as in a container with a network of its own: run the node in the host's "
            "network if connections fail"
        )
    if address(gid.gid).is_loopback:
        return "a loopback address: only this host reaches it"
    return ""


def _forced(where: str, port: PortInfo, index: int) -> Choice:
    found = next((gid for gid in port.gids if gid.index == index), None)
    if found is None or not _usable(found):
        raise GidError(
            f"{where} has no GID {index}. There are {table(port.gids)}. Correct gid_index (HICACHE_MOONCAKE_GID_INDEX), or "
            "leave it out"
        )
    of = family(found.gid, port.link_layer)
    warning = (
        _warning(found, of)
        if is_v2(found)
        else f"it is {found.type or 'of unknown type'}, not RoCE v2: both ends need the same"
    )
    return Choice(index, found.gid, of, found.netdev, f"gid_index={index} says so: {_short(found.gid)}", warning)


def _infiniband(where: str, port: PortInfo, forced: int) -> Choice:
    """Within a subnet the LID is the address. The GID says which subnet that is, and leads to other ones; where the table has
    none, links are by LID alone."""
    usable = sorted((gid for gid in port.gids if _usable(gid)), key=lambda gid: gid.index)
    found = next((gid for gid in usable if forced < 0 or gid.index == forced), None)
    if found is None and forced >= 0:
        raise GidError(f"{where} has no GID {forced}. There are {table(port.gids)}. Leave gid_index out")
    if not port.lid:
        raise GidError(
            f"{where} is InfiniBand and has no LID: no subnet manager has seen it. Start one (opensm), or check the cable"
        )
    why = f"InfiniBand, LID {port.lid}" + (f", gid_index={forced} says so" if forced >= 0 else "")
    if found is None:
        return Choice(0, "", "InfiniBand", "", f"{why}, which is all: its GID table is empty")
    return Choice(found.index, found.gid, "InfiniBand", found.netdev, why)


def mismatch(mine: str, theirs: str, my_layer: str = "Ethernet", their_layer: str = "Ethernet") -> str:
    """Why ports with these GIDs cannot be a pair, or "" where they can, as far as the addresses tell: both ends are of one
    family, and on InfiniBand of one subnet."""
    if "InfiniBand" in (my_layer, their_layer):
        if my_layer != their_layer:
            return f"one end is InfiniBand and the other is not ({my_layer}, {their_layer})"
        if mine and theirs and _subnet(mine) != _subnet(theirs):
            return f"two InfiniBand subnets ({_short(mine)}, {_short(theirs)})"
        return ""
    try:
        here, there = family(mine, my_layer), family(theirs, their_layer)
    except ValueError as error:
        return f"no GID: {error}"
    if here == there:
        return ""
    return (
        f"GIDs of two kinds, {here} {_short(mine)} here and {there} {_short(theirs)} there: give both ports an address of one "
        "kind, or choose entries of one kind with gid_index"
    )


def _subnet(gid: str) -> int:
    return int(ipaddress.IPv6Address(gid)) >> 64
