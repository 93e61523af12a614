"""The GID of each port is chosen by its table: routable RoCE v2 wherever there is one, and otherwise a sentence that shows what
there is. The tables have the shape of hosts on which users met the wrong one."""

from __future__ import annotations

from ipaddress import IPv6Address
from pathlib import Path
from typing import NamedTuple

import pytest

from hicache_mooncake.transfer import gids
from hicache_mooncake.transfer.verbs.api import Gid, PortInfo


class Recorded(NamedTuple):
    name: str
    port: PortInfo
    expected: str


def _recorded() -> list[Recorded]:
    found: list[Recorded] = []
    for line in (Path(__file__).parent / "data" / "gid_tables.txt").read_text().splitlines():
        if line.startswith("=="):
            name, layer, lid, expected = (part.strip() for part in line[2:].split("|"))
            found.append(Recorded(name, port((), layer=layer, lid=int(lid)), expected))
        elif line and not line.startswith("#"):
            index, gid, kind, netdev = line.split()
            row = Gid(int(index), IPv6Address(gid).exploded, kind.replace("_", " "), netdev.replace("-", ""))
            last = found.pop()
            found.append(last._replace(port=port((*last.port.gids, row), layer=last.port.link_layer, lid=last.port.lid)))
    return found


def port(rows: tuple[Gid, ...], layer: str = "Ethernet", lid: int = 0) -> PortInfo:
    return PortInfo(1, "ACTIVE", layer, lid, 4096, 1 << 30, rows)


RECORDED = _recorded()
TABLES = {recorded.name: recorded.port for recorded in RECORDED}


@pytest.mark.parametrize("recorded", RECORDED, ids=lambda recorded: recorded.name)
def test_a_recorded_table_has_one_right_entry(recorded: Recorded) -> None:
    if recorded.expected == "-":
        with pytest.raises(gids.GidError, match="mlx5_7 port 1"):
            gids.choose("mlx5_7", recorded.port)
        return
    choice = gids.choose("mlx5_7", recorded.port)
    assert choice.index == int(recorded.expected)
    assert choice.gid == next(row.gid for row in recorded.port.gids if row.index == choice.index)
    assert choice.why


def test_the_order_of_a_table_does_not_matter() -> None:
    for recorded in RECORDED:
        if recorded.expected != "-":
            turned = port(recorded.port.gids[::-1], recorded.port.link_layer, recorded.port.lid)
            assert gids.choose("d", turned).index == int(recorded.expected), recorded.name


def test_what_cannot_be_chosen_is_listed() -> None:
    with pytest.raises(gids.GidError) as caught:
        gids.choose("mlx5_0", TABLES["RoCE v1 alone"])
    assert "0: fe80::bace:f6ff:fe12:3450 RoCE v1 eth2; 1: 10.20.0.11 RoCE v1 eth2" in str(caught.value)
    assert "HICACHE_MOONCAKE_GID_INDEX" in str(caught.value)
    many = tuple(Gid(i, IPv6Address(i + 1).exploded, "RoCE v1", "e") for i in range(200))
    with pytest.raises(gids.GidError, match="184 more") as long:
        gids.choose("mlx5_0", port(many))
    assert len(str(long.value)) < 2000


def test_a_forced_index_is_taken_or_refused_with_the_table() -> None:
    table = TABLES["mlx5 with one IPv4 address"]
    assert gids.choose("mlx5_0", table, 1).family == "link-local"
    assert "RoCE v1" in gids.choose("mlx5_0", table, 2).warning
    assert gids.choose("mlx5_0", table, 3).warning == ""
    with pytest.raises(gids.GidError, match=r"mlx5_0 port 1 has no GID 4\. There are 0: fe80"):
        gids.choose("mlx5_0", table, 4)
    with pytest.raises(gids.GidError, match="no GID 1"):
        gids.choose("mlx5_0", TABLES["zeroed entries"], 1)
    assert gids.choose("ib0", TABLES["InfiniBand"], 1).gid.startswith("fec0")
    with pytest.raises(gids.GidError, match="no GID 5"):
        gids.choose("ib0", TABLES["InfiniBand"], 5)


def test_what_may_go_wrong_is_said() -> None:
    assert "network segment" in gids.choose("d", TABLES["nothing but link-local"]).warning
    assert "host's network" in gids.choose("d", TABLES["container with a network of its own"]).warning.replace("\n", " ")
    assert "only this host" in gids.choose("d", TABLES["Soft-RoCE on loopback"]).warning
    assert gids.choose("d", TABLES["bond with a VLAN"]).warning == ""


def test_an_infiniband_port_needs_a_lid() -> None:
    with pytest.raises(gids.GidError, match="opensm"):
        gids.choose("mlx5_0", TABLES["InfiniBand without a subnet manager"])


def test_an_infiniband_port_without_a_gid_is_used_by_its_lid() -> None:
    for rows in ((), (Gid(0, IPv6Address(0).exploded, "IB", ""),)):
        choice = gids.choose("ib0", port(rows, "InfiniBand", lid=37))
        assert (choice.gid, choice.family) == ("", "InfiniBand")
        assert "LID 37" in choice.why
    with pytest.raises(gids.GidError, match="no GID 0"):
        gids.choose("ib0", port((), "InfiniBand", lid=37), 0)


V4, OTHER_V4 = "::ffff:10.0.0.1", "::ffff:10.9.0.1"
V6, LOCAL = "2001:db8::1", "fe80::1"


@pytest.mark.parametrize(
    ("mine", "theirs", "fits"),
    [
        (V4, OTHER_V4, True),
        (V6, "2001:db8:9::2", True),
        (LOCAL, "fe80::2", True),
        (V4, V6, False),
        (V4, LOCAL, False),
        (LOCAL, V6, False),
        ("", V4, False),
    ],
    ids=lambda value: str(value) or "none",
)
def test_both_ends_are_of_one_family(mine: str, theirs: str, fits: bool) -> None:
    assert (gids.mismatch(mine, theirs) == "") is fits
    assert (gids.mismatch(theirs, mine) == "") is fits


def test_infiniband_pairs_within_its_subnet() -> None:
    both = ("InfiniBand", "InfiniBand")
    assert gids.mismatch("fe80::1", "fe80::2", *both) == ""
    assert "subnets" in gids.mismatch("fe80::1", "fec0::2", *both)
    assert gids.mismatch("", "fe80::2", *both) == ""
    assert "InfiniBand and the other" in gids.mismatch(V4, "fe80::2", "Ethernet", "InfiniBand")
