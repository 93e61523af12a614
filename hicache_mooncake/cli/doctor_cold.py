"""What `doctor` says of a cold tier before a node is started with it: may it be made, is there room, is there any use in it?"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from hicache_mooncake.cli.checks import FAIL, OK, WARN, Check
from hicache_mooncake.cli.status import human_bytes
from hicache_mooncake.cold import directory as places
from hicache_mooncake.cold.layout import segment_bytes_for
from hicache_mooncake.cold.pages_file import ColdError, PagesFile
from hicache_mooncake.config import Settings

NAME = "cold tier"
_IN_MEMORY = ("tmpfs", "ramfs")


def examine(settings: Settings) -> list[Check]:
    return [_cold(settings, Path(settings.cold).absolute())] if settings.cold else []


def _cold(settings: Settings, directory: Path) -> Check:
    own = places.own_path(directory)
    nearest = next(each for each in (own, *own.parents) if os.path.exists(each))
    if not nearest.is_dir() or not os.access(nearest, os.R_OK | os.W_OK | os.X_OK):
        who = f"user {os.getuid()} may not write to {nearest}"
        return Check(NAME, FAIL, who, "have the node's user own it, or set cold to another directory; run doctor as that user")
    try:
        if own.exists():
            places.check_owner(own)
        segment_bytes_for(settings.cold_bytes)
    except (ColdError, ValueError) as error:
        return Check(NAME, FAIL, str(error), "the node would not start: correct cold or cold_bytes")
    pages = own / places.PAGES
    had = pages.stat().st_blocks * 512 if pages.exists() else 0
    space = os.statvfs(nearest)
    room = space.f_bavail * space.f_frsize + had
    size = human_bytes(settings.cold_bytes)
    found = f"{size} in {directory}, where {human_bytes(room)} can be had" + (
        f" ({human_bytes(had)} of it already)" if had else ""
    )
    if room < settings.cold_bytes + settings.cold_floor:
        short = f"{found}; {human_bytes(settings.cold_floor)} (cold_floor) are to be left free"
        if not had:
            return Check(NAME, FAIL, short, "the node would not start: free some, or lower cold_bytes")
        return Check(NAME, WARN, short, "the tier makes do with what there is, but cannot be made larger: lower cold_bytes")
    why, advice = _no_use(settings, nearest) or _no_direct_io(nearest) or ("", "")
    return Check(NAME, WARN if why else OK, found + (why or ", with direct I/O"), advice)


def _no_use(settings: Settings, nearest: Path) -> tuple[str, str] | None:
    """A tier that is not worth having: why, and what to do."""
    kind = _file_system(nearest)
    if kind in _IN_MEMORY:
        return (
            f", which is {kind}: memory, lost when the host restarts",
            "give that memory to dram, or name a directory on a disk",
        )
    if settings.cold_bytes <= settings.dram_bytes:
        return (
            f", no more than dram ({human_bytes(settings.dram_bytes)}): it holds little that DRAM does not",
            "give cold_bytes several times dram",
        )
    return None


def _no_direct_io(nearest: Path) -> tuple[str, str] | None:
    with tempfile.TemporaryFile(dir=nearest) as probe:
        probe.truncate(1 << 20)
        file = PagesFile(Path(f"/proc/self/fd/{probe.fileno()}"), writable=False)
        direct = file.direct
        file.close()
    if direct:
        return None
    return (
        ", without direct I/O: pages go through the page cache, which costs a copy and takes memory from others",
        "a local ext4 or xfs has it",
    )


def _file_system(path: Path) -> str:
    """Its type, "" where that cannot be told."""
    device = path.stat().st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        mounted, _, rest = line.partition(" - ")
        if mounted.split()[2] == wanted:
            return rest.split()[0]
    return ""
