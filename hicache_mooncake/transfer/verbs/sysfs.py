"""What sysfs says of RDMA ports: the GID table with types and interfaces, which libibverbs' oldest calls do not give."""

from __future__ import annotations

from pathlib import Path

from hicache_mooncake.transfer.verbs.api import Gid

ROOT = "/sys/class/infiniband"
_TYPES = {("RoCE v2", "Ethernet"): "RoCE v2", ("IB/RoCE v1", "Ethernet"): "RoCE v1", ("IB/RoCE v1", "InfiniBand"): "IB"}
_LONGEST_GAP = 64
"""Tables have up to 1,024 entries, nearly all empty, and the kernel puts a new one into the first that is."""
_EMPTY = ":".join(["0000"] * 8)


def present(root: str = ROOT) -> bool:
    """Whether sysfs is there to be asked. It is not in some containers that have devices all the same."""
    return Path(root).is_dir()


def gids(device: str, port: int, link_layer: str, root: str = ROOT) -> tuple[Gid, ...]:
    """The entries of a port's table that are not empty, by index. Empty where the device or port is not there."""
    base = Path(root) / device / "ports" / str(port)
    try:
        indexes = sorted(int(entry.name) for entry in (base / "gids").iterdir() if entry.name.isdecimal())
    except OSError:
        return ()
    found: list[Gid] = []
    empty = 0
    for index in indexes:
        gid = _read(base / "gids" / str(index))
        empty = empty + 1 if gid in ("", _EMPTY) else 0
        if empty > _LONGEST_GAP:
            break
        if not empty:
            kind = _read(base / "gid_attrs" / "types" / str(index))
            netdev = _read(base / "gid_attrs" / "ndevs" / str(index))
            found.append(Gid(index, gid, _TYPES.get((kind, link_layer), ""), netdev))
    return tuple(found)


def _read(path: Path) -> str:
    """Files of entries that are empty, or just went, cannot be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""
