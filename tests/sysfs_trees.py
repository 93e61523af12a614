"""Unpacks hosts of tests/data/hosts.txt, as trees of files and links like those under /sys."""

from __future__ import annotations

from pathlib import Path

_DATA = Path(__file__).parent / "data" / "hosts.txt"


def names() -> list[str]:
    return [line[2:].strip() for line in _DATA.read_text().splitlines() if line.startswith("==")]


def unpack(name: str, root: Path) -> Path:
    """The tree of one host under `root`, which is also returned."""
    chosen = False
    for line in _DATA.read_text().splitlines():
        if line.startswith("=="):
            chosen = line[2:].strip() == name
        elif chosen and line and not line.startswith("#"):
            kind, *fields = line.split()
            {"node": _node, "rdma": _rdma, "soft": _soft, "net": _net, "gpu": _gpu}[kind](root, *fields)
    return root


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


def _link(path: Path, to: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(to)


def _node(root: Path, number: str, cpus: str, distances: str) -> None:
    base = root / "devices/system/node"
    _write(base / f"node{number}/cpulist", cpus.replace("-", "") if cpus == "-" else cpus)
    _write(base / f"node{number}/distance", distances.replace(",", " "))
    for file in ("online", "has_memory"):
        _write(base / file, f"0-{number}" if number != "0" else "0")


def _function(root: Path, path: str, node: str) -> Path:
    folder = root / "devices" / path
    pci = folder.parent if "virtio" in folder.name else folder
    folder.mkdir(parents=True, exist_ok=True)
    _write(folder / "numa_node", node)
    bus = root / "bus/pci/devices" / pci.name
    if not bus.is_symlink():
        _link(bus, pci)
    return folder


def _rdma(root: Path, name: str, path: str, node: str, netdev: str, state: str, layer: str, rate: str) -> None:
    folder = _function(root, path, node)
    _write(folder / "class", "0x020000")
    _write(folder / "vendor", "0x15b3")
    device = folder / "infiniband" / name
    number = {"ACTIVE": 4, "DOWN": 1}[state]
    _write(device / "ports/1/state", f"{number}: {state}")
    _write(device / "ports/1/link_layer", layer)
    _write(device / "ports/1/rate", f"{rate} Gb/sec (4X)")
    _link(device / "device", folder)
    _link(root / "class/infiniband" / name, device)
    if netdev != "-":
        (folder / "net" / netdev).mkdir(parents=True)
        _link(folder / "net" / netdev / "device", folder)
        _link(root / "class/net" / netdev, folder / "net" / netdev)


def _soft(root: Path, name: str, netdev: str) -> None:
    device = root / "devices/virtual/infiniband" / name
    _write(device / "parent", netdev)
    _write(device / "ports/1/state", "4: ACTIVE")
    _write(device / "ports/1/link_layer", "Ethernet")
    _write(device / "ports/1/rate", "2.5 Gb/sec (1X SDR)")
    _link(root / "class/infiniband" / name, device)


def _net(root: Path, name: str, path: str, node: str) -> None:
    folder = _function(root, path, node)
    (folder / "net" / name).mkdir(parents=True)
    _link(folder / "net" / name / "device", folder)
    _link(root / "class/net" / name, folder / "net" / name)


def _gpu(root: Path, path: str, node: str, vendor: str) -> None:
    folder = _function(root, path, node)
    _write(folder / "class", "0x030200")
    _write(folder / "vendor", vendor)
