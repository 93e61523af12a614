"""`hicache-mooncake cold`: look at a cold tier, prove what it has, give back what it does not need, and empty it."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import lmdb
import xxhash

from hicache_mooncake.cli.status import human_bytes
from hicache_mooncake.cold import directory as places
from hicache_mooncake.cold.index import Index, Key, Place, map_bytes_for
from hicache_mooncake.cold.layout import blocks
from hicache_mooncake.cold.pages_file import ColdError, PagesFile
from hicache_mooncake.cold.reading import Reader
from hicache_mooncake.keys import checksum_seed

if TYPE_CHECKING:
    from rich.progress import Progress

_FAILED, _UNUSABLE = 1, 2
_SWEPT = 4096
_PART_S = 600.0
"""For reading some thousand pages: a disk that takes longer hangs."""
_COMPACT_BYTES = 1 << 20
"""Less than this is no gain."""


def run(command: Callable[[], int]) -> int:
    """The exit status. What cannot be done is a sentence."""
    try:
        return command()
    except ColdError as error:
        print(f"hicache-mooncake: {error}", file=sys.stderr)
    except (OSError, lmdb.Error) as error:
        print(f"hicache-mooncake: the cold tier cannot be used: {error}", file=sys.stderr)
    return _UNUSABLE


def stat(directory: Path, *, as_json: bool) -> int:
    path = _existing(directory)
    with _looked_at(path) as index:
        namespaces: dict[bytes, tuple[int, int]] = {}
        for part in index.records():
            for namespace, rows in part:
                pages, size = namespaces.get(namespace, (0, 0))
                namespaces[namespace] = pages + len(rows), size + int(rows["length"].sum(dtype="u8"))
        segments = index.segments()
        report: dict[str, object] = {
            "path": str(path),
            "format": places.FORMAT,
            "in_use": _in_use(path),
            "capacity_bytes": index.number("capacity") or 0,
            "segment_bytes": index.number("segment bytes") or 0,
            "segments": len(segments),
            "used_bytes": sum(each.used for each in segments),
            "pages": sum(pages for pages, _ in namespaces.values()),
            "page_bytes": sum(size for _, size in namespaces.values()),
            "junk_pages": max(0, index.pages() - sum(pages for pages, _ in namespaces.values())),
            "index_bytes": index.file_bytes,
            "damaged_index_bytes": _disk_bytes(path / places.DAMAGED),
            "namespaces": {each.hex(): {"pages": pages, "bytes": size} for each, (pages, size) in namespaces.items()},
            "other_versions": {str(each): _disk_bytes(each) for each in places.others(directory)},
        }
    print(json.dumps(report)) if as_json else _print_stat(report)
    return 0


def _print_stat(report: dict[str, object]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("", "", show_header=False, box=None)
    for name, value in report.items():
        if isinstance(value, dict):
            for key, each in value.items():
                text = f"{each['pages']:,} pages, {human_bytes(each['bytes'])}" if isinstance(each, dict) else human_bytes(each)
                table.add_row(f"{'namespace' if name == 'namespaces' else 'other version'} {key}", text)
        elif name.endswith("_bytes") and isinstance(value, int):
            table.add_row(name.removesuffix("_bytes").replace("_", " "), human_bytes(value))
        else:
            table.add_row(name.replace("_", " "), f"{value:,}" if type(value) is int else str(value))
    Console().print(table)


def verify(directory: Path, *, as_json: bool) -> int:
    """Read all pages. Beside a node that runs, what it writes over meanwhile is not damaged."""
    path = _existing(directory)
    counts = dict.fromkeys(("pages", "bytes", "damaged", "unreadable", "overwritten"), 0)
    with _looked_at(path) as index, contextlib.ExitStack() as opened:
        file = PagesFile(path / places.PAGES, writable=False)
        opened.callback(file.close)
        reader = Reader(file)
        opened.callback(reader.close)
        progress = opened.enter_context(_progress())
        task = progress.add_task("verifying", total=sum(each.used for each in index.segments()))
        for part in index.entries():
            part.sort(key=lambda each: each[1].offset)
            for key, place, fate in _proved(reader, part):
                if fate and index.find(key.namespace, [key.hash])[0] != place:
                    fate = "overwritten"
                counts["pages"] += 1
                counts["bytes"] += place.length
                if fate:
                    counts[fate] += 1
                    if fate != "overwritten":
                        print(f"{fate}: {key.namespace.hex()} {key.hash.hex()} at {place.offset}", file=sys.stderr)
                progress.advance(task, blocks(place.length))
    bad = counts["damaged"] + counts["unreadable"]
    if as_json:
        print(json.dumps(counts))
    else:
        fates = ", ".join(f"{counts[fate]:,} {fate}" for fate in ("damaged", "unreadable", "overwritten"))
        print(f"{counts['pages']:,} pages, {human_bytes(counts['bytes'])}: {fates} meanwhile")
        if bad:
            print(
                "No engine gets a damaged page: a node forgets it when it is asked for. Look at the disk (smartctl -a, dmesg)"
            )
    return _FAILED if bad else 0


def _proved(reader: Reader, part: list[tuple[Key, Place]]) -> Iterator[tuple[Key, Place, str]]:
    """Each with what is wrong with it, or ""."""
    reading = reader.read([(place.offset, place.length) for _, place in part], time.monotonic() + _PART_S)
    with contextlib.closing(reading):
        for (key, place), view in zip(part, reading, strict=True):
            if not isinstance(view, memoryview):
                yield key, place, "unreadable"
            else:
                seen = xxhash.xxh3_64_intdigest(view[: place.length], checksum_seed(*key))
                yield key, place, "" if seen == place.checksum else "damaged"


def gc(directory: Path, *, other_versions: bool) -> int:
    """Give back what nobody can find."""
    path = _existing(directory)
    with _held(path) as index:
        before = index.pages()
        while index.sweep(_SWEPT) is not None:
            pass
        index.prune()
        gone, size, gain = before - index.pages(), index.file_bytes, index.file_bytes - index.live_bytes
        print(f"{gone:,} pages of namespaces that were cleared are forgotten")
        if gain > max(size // 2, _COMPACT_BYTES):
            index.compact(path / places.INDEX)
            print(f"the index takes {human_bytes(gain)} less")
        _remove(path / places.DAMAGED, "an index that was damaged")
        for other in places.others(directory) if other_versions else ():
            with _only_user(other):
                _remove(other, "another version's")
    return 0


def clear(directory: Path, *, namespace: str | None, everything: bool) -> int:
    if everything == (namespace is not None):
        raise ColdError("give either --namespace or --all")
    path = _existing(directory)
    if everything:
        with _only_user(path):
            shutil.rmtree(path / places.INDEX, ignore_errors=True)
            (path / places.PAGES).unlink(missing_ok=True)
        print(f"{path} is empty")
        return 0
    try:
        wanted = bytes.fromhex(namespace or "")
    except ValueError:
        raise ColdError(f"--namespace {namespace}: not hexadecimal. `hicache-mooncake cold stat` lists them") from None
    with _held(path) as index:
        if wanted not in index.namespaces():
            print(f"hicache-mooncake: there is nothing of {namespace} in {path}", file=sys.stderr)
            return _FAILED
        index.forget(wanted)
        index.save_cleared()
    print(f"nothing of {namespace} is found any more; its room is used again in time")
    return 0


# --------------------------------------------------------------------------- getting at it


def _existing(directory: Path) -> Path:
    path = places.own_path(directory)
    if not (path / places.INDEX / "data.mdb").exists():
        others = ", ".join(each.name for each in places.others(directory))
        raise ColdError(f"there is no cold tier of this version in {directory}{others and f' ({others} is of another)'}")
    return path


@contextlib.contextmanager
def _looked_at(path: Path) -> Iterator[Index]:
    index = Index(path / places.INDEX, 0, writable=False)
    try:
        yield index
    finally:
        index.close()


@contextlib.contextmanager
def _only_user(path: Path) -> Iterator[None]:
    try:
        fd = places.locked(path)
    except ColdError:
        raise ColdError(f"{path} is in use: stop the node first") from None
    try:
        yield
    finally:
        os.close(fd)


@contextlib.contextmanager
def _held(path: Path) -> Iterator[Index]:
    """Nobody else has it: to be changed."""
    with _only_user(path):
        places.check_index(path)
        places.mark_unclean(path)
        with contextlib.closing(Index(path / places.INDEX, 0)) as index:
            capacity = index.number("capacity") or 0
        with contextlib.closing(Index(path / places.INDEX, map_bytes_for(capacity))) as index:
            yield index
        places.mark_clean(path)


def _in_use(path: Path) -> bool:
    """Does a process have it? Asked without taking the lock, which a node that is starting could want."""
    found = (path / "lock").stat()
    wanted = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}:{found.st_ino}"
    try:
        return any(wanted in line.split() and "FLOCK" in line for line in Path("/proc/locks").read_text().splitlines())
    except OSError:
        return False


def _disk_bytes(path: Path) -> int:
    return sum(each.lstat().st_blocks * 512 for each in path.rglob("*")) if path.exists() else 0


def _remove(path: Path, what: str) -> None:
    if path.exists():
        size = _disk_bytes(path)
        shutil.rmtree(path)
        print(f"{what} {path} is deleted: {human_bytes(size)}")


def _progress() -> Progress:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    text = TextColumn("{task.description}")
    columns = (text, BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn(), TimeRemainingColumn())
    return Progress(*columns, console=Console(stderr=True), transient=True)
