"""What is near what on this host: NUMA nodes, RDMA devices, network interfaces and GPUs, and the PCIe path between them.

`read` looks at a sysfs tree, whose root is an argument; all else is pure. Distances are named as `nvidia-smi topo -m` names
them: X itself, PIX one PCIe switch or bridge at most, PXB several, PHB through the processor's PCIe host bridge, NODE between
host bridges of one NUMA node, SYS between NUMA nodes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

Distance = Literal["X", "PIX", "PXB", "PHB", "NODE", "SYS"]
_ORDER: dict[Distance, int] = {"X": 0, "PIX": 1, "PXB": 2, "PHB": 3, "NODE": 4, "SYS": 5}

_FUNCTION = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_HOST_BRIDGE = re.compile(r"pci[0-9a-f]{4,8}:[0-9a-f]{2}")
_GPU_CLASSES = ("0x0300", "0x0302", "0x0380", "0x1200")
_GPU_VENDORS = ("0x10de", "0x1002", "0x8086")
_MAX_DEVICES = 256
LOCAL_DISTANCE, REMOTE_DISTANCE = 10, 20
"""What ACPI says of a NUMA node and itself, and commonly of two."""


@dataclass(frozen=True, slots=True)
class Port:
    """Of an RDMA device, as sysfs has it."""

    number: int
    state: str
    """`ACTIVE`, `DOWN`, `INIT`, `ARMED`, or `` where it cannot be read."""
    link_layer: str
    rate: str
    """As the kernel writes it: `100 Gb/sec (4X EDR)`."""


@dataclass(frozen=True, slots=True)
class Device:
    """An RDMA device, a network interface, or a GPU."""

    kind: Literal["rdma", "net", "gpu"]
    name: str
    path: tuple[str, ...] = ()
    """PCIe, from the host bridge to the function; empty for what is no PCIe device (Soft-RoCE over a virtual interface)."""
    numa_node: int = -1
    """-1: the firmware does not say, or it is on none."""
    ports: tuple[Port, ...] = ()
    netdevs: tuple[str, ...] = ()
    """Interfaces of an RDMA device."""

    @property
    def pci(self) -> str:
        return self.path[-1] if self.path else ""


@dataclass(frozen=True, slots=True)
class NumaNode:
    number: int
    cpus: tuple[int, ...]
    """Empty for memory without processors (CXL, HBM)."""
    distances: Mapping[int, int] = field(default_factory=dict)
    """To each node, 10 being its own."""
    has_memory: bool = True


@dataclass(frozen=True, slots=True)
class Topology:
    """A host. Immutable, so free to share between threads."""

    nodes: tuple[NumaNode, ...] = ()
    devices: tuple[Device, ...] = ()

    def of(self, kind: str) -> list[Device]:
        return [device for device in self.devices if device.kind == kind]

    def node_distance(self, one: int, other: int) -> int:
        """Between NUMA nodes, in the firmware's units: 10 for one and itself."""
        if one == other:
            return LOCAL_DISTANCE
        for node in self.nodes:
            if node.number == one and other in node.distances:
                return node.distances[other]
        return REMOTE_DISTANCE


# --------------------------------------------------------------------------- distances


def distance(one: Device, other: Device) -> Distance:
    """How a transfer between two devices goes."""
    if (one.kind, one.name) == (other.kind, other.name) or (one.path and one.path == other.path):
        return "X"
    common = 0
    for here, there in zip(one.path, other.path, strict=False):
        if here != there:
            break
        common += 1
    if common == 0:
        return "NODE" if one.numa_node == other.numa_node and one.numa_node >= 0 else "SYS"
    if common == 1:
        return "PHB"
    # Below the bridge that both are under, a switch has one bridge on the way to each of its devices.
    return "PIX" if max(len(one.path), len(other.path)) - common <= 2 else "PXB"


def matrix(topology: Topology) -> list[list[str]]:
    """The distances as a table of texts, its first row and column being the names: GPUs and RDMA devices against each other,
    and the NUMA node of each. Without either, an empty list."""
    shown = [*topology.of("gpu"), *topology.of("rdma")]
    if not shown:
        return []
    rows = [["", *(device.name for device in shown), "NUMA"]]
    for device in shown:
        node = str(device.numa_node) if device.numa_node >= 0 else "?"
        rows.append([device.name, *(distance(device, other) for other in shown), node])
    return rows


# --------------------------------------------------------------------------- who uses what


def nearest(devices: Sequence[Device], numa_node: int, topology: Topology | None = None) -> list[Device]:
    """Those of the devices that are as near to memory on this NUMA node as any of them, in their order. All of them when it
    is not known where the memory is (-1)."""
    if numa_node < 0 or not devices:
        return list(devices)
    away = [_away(device, numa_node, topology or Topology()) for device in devices]
    return [device for device, far in zip(devices, away, strict=True) if far == min(away)]


def nearness(devices: Sequence[Device], numa_node: int, topology: Topology | None = None) -> list[float]:
    """How near each of the devices is to memory on this NUMA node: 1 for those that are as near as any, and less for others, in
    proportion to what the firmware says of the way. 1 for all when it is not known where the memory is (-1)."""
    away = [_away(device, numa_node, topology or Topology()) for device in devices]
    return [min(away) / far for far in away]


def _away(device: Device, numa_node: int, topology: Topology) -> int:
    """One whose node is not known is neither near nor far."""
    if device.numa_node < 0 or numa_node < 0:
        return (LOCAL_DISTANCE + REMOTE_DISTANCE) // 2
    return topology.node_distance(device.numa_node, numa_node)


def share(devices: Sequence[Device], places: Sequence[int | Device], topology: Topology | None = None) -> list[list[Device]]:
    """Which devices each of several users has, such as the ranks of a host: `places` says where each has its memory, by NUMA
    node or by its GPU. Every device has a user, and no device more of them than it must: with as many devices as users or
    more each has its own. Among such divisions the near ones are preferred. The same for the same arguments, in every process.

    Returns a list for each user, nearest first. Empty lists where there is no device."""
    shares: list[list[Device]] = [[] for _ in places]
    if not devices or not places:
        return shares
    known = topology or Topology()
    cost = [[_cost(device, place, known) for device in devices] for place in places]
    devices_each, more_devices = divmod(len(devices), len(places))
    users_each, more_users = divmod(len(places), len(devices))
    pairs = sorted(
        (cost[user][device], abs(user * len(devices) - device * len(places)), user, device)
        for user in range(len(places))
        for device in range(len(devices))
    )
    if len(devices) >= len(places):
        taken = _deal([(u, d) for _, _, u, d in pairs], len(places), devices_each, more_devices)
    else:
        turned = _deal([(d, u) for _, _, u, d in pairs], len(devices), users_each, more_users)
        taken = [(user, device) for device, user in turned]
    for user, device in sorted(taken, key=lambda pair: (pair[0], cost[pair[0]][pair[1]], pair[1])):
        shares[user].append(devices[device])
    return shares


def _deal(pairs: Sequence[tuple[int, int]], players: int, each: int, more: int) -> list[tuple[int, int]]:
    """Each card to one player, by the order of the pairs (player, card); each player gets `each` cards, and `more` of them one
    more. These are dealt last, so that nobody takes a second one that another needs as the first."""
    held = [0] * players
    given: dict[int, int] = {}
    for player, card in pairs:
        if card not in given and held[player] < each:
            given[card] = player
            held[player] += 1
    for player, card in pairs:
        if card not in given and held[player] == each and more:
            given[card] = player
            held[player] += 1
            more -= 1
    return [(player, card) for card, player in given.items()]


def _cost(device: Device, place: int | Device, topology: Topology) -> tuple[int, int]:
    if isinstance(place, int):
        return _away(device, place, topology), 0
    return _away(device, place.numa_node, topology), _ORDER[distance(device, place)]


# --------------------------------------------------------------------------- reading


def cpu_list(text: str) -> tuple[int, ...]:
    """`0-3,8` as (0, 1, 2, 3, 8). Raises ValueError."""
    cpus: list[int] = []
    for part in text.strip().split(","):
        if part:
            first, _, last = part.partition("-")
            cpus += range(int(first), int(last or first) + 1)
    return tuple(cpus)


def read(root: str | Path = "/sys") -> Topology:
    """The topology that a sysfs tree tells. What is missing or cannot be read is left out; raises nothing."""
    base = Path(root)
    devices = [*_rdma_devices(base), *_net_devices(base), *_gpus(base)]
    return Topology(tuple(read_numa_nodes(base)), tuple(devices))


def read_numa_nodes(root: str | Path = "/sys") -> list[NumaNode]:
    """Those that are online, in order; none where the kernel knows of none."""
    base = Path(root) / "devices/system/node"
    found = _numbers(_text(base / "online"))
    with_memory = set(_numbers(_text(base / "has_memory"))) if (base / "has_memory").exists() else set(found)
    nodes = []
    for number in found:
        each = _text(base / f"node{number}/distance").split()
        distances = {node: int(far) for node, far in zip(found, each, strict=False) if far.isdecimal()}
        cpus = tuple(_numbers(_text(base / f"node{number}/cpulist")))
        nodes.append(NumaNode(number, cpus, distances, number in with_memory))
    return nodes


def _numbers(text: str) -> list[int]:
    try:
        return list(cpu_list(text))
    except ValueError:
        return []


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""


def _names(folder: Path) -> list[str]:
    """In the order of people: mlx5_2 before mlx5_10."""
    try:
        names = [entry.name for entry in folder.iterdir()]
    except OSError:
        return []
    return sorted(names, key=_natural)[:_MAX_DEVICES]


def _natural(name: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)]


def _pci_path(link: Path) -> tuple[str, ...]:
    """Of what a `device` link leads to: what lies above or below PCIe, such as virtio, is left out."""
    try:
        parts = link.resolve(strict=True).parts
    except (OSError, RuntimeError):
        return ()
    path = [part for part in parts if _FUNCTION.fullmatch(part) or _HOST_BRIDGE.fullmatch(part)]
    return tuple(path) if path and _FUNCTION.fullmatch(path[-1]) else ()


def _numa_node(link: Path) -> int:
    text = _text(link / "numa_node")
    return int(text) if text.isdecimal() else -1


def _rdma_devices(base: Path) -> Iterable[Device]:
    for name in _names(base / "class/infiniband"):
        folder = base / "class/infiniband" / name
        link = folder / "device"
        netdevs = _names(link / "net")
        if not link.exists():  # a device in software, over an interface that may be one of PCIe
            netdevs = [parent] if (parent := _text(folder / "parent")) else []
            link = base / "class/net" / (netdevs[0] if netdevs else "") / "device"
        ports = tuple(
            Port(
                int(number),
                _text(folder / "ports" / number / "state").rpartition(":")[2].strip(),
                _text(folder / "ports" / number / "link_layer"),
                _text(folder / "ports" / number / "rate"),
            )
            for number in _names(folder / "ports")
            if number.isdecimal()
        )
        yield Device("rdma", name, _pci_path(link), _numa_node(link), ports, tuple(netdevs))


def _net_devices(base: Path) -> Iterable[Device]:
    for name in _names(base / "class/net"):
        link = base / "class/net" / name / "device"
        path = _pci_path(link)
        if path:
            yield Device("net", name, path, _numa_node(link))


def _gpus(base: Path) -> Iterable[Device]:
    """In the order of their PCIe addresses, as CUDA_DEVICE_ORDER=PCI_BUS_ID counts them."""
    folder = base / "bus/pci/devices"
    try:
        functions = sorted(entry.name for entry in folder.iterdir())
    except OSError:
        return
    gpus = [
        folder / name
        for name in functions
        if _text(folder / name / "class").startswith(_GPU_CLASSES) and _text(folder / name / "vendor") in _GPU_VENDORS
    ]
    for number, link in enumerate(gpus[:_MAX_DEVICES]):
        yield Device("gpu", f"GPU{number}", _pci_path(link), _numa_node(link))
