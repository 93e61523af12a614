"""Where a result comes from: the commit, the date, the machine and the versions of what took part."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_OURS = (
    "hicache-mooncake",
    "msgspec",
    "numpy",
    "pyzmq",
    "xxhash",
    "lmdb",
    "ibverbs",
    "sglang",
    "sglang-router",
    "torch",
    "nixl",
)
_THEIRS = {
    "mooncake": ("mooncake-transfer-engine-non-cuda", "mooncake-transfer-engine"),
    "lmcache": ("lmcache", "torch"),
    "nixl": ("nixl",),
}
_PROGRAMS = ("fio", "redis-server", "valkey-server")
_ASK = """
import importlib.metadata as metadata, json, sys
found = {}
for name in sys.argv[1:]:
    try:
        found[name] = metadata.version(name)
    except metadata.PackageNotFoundError:
        pass
print(json.dumps(found))
"""


def machine() -> str:
    """For people."""
    return f"{os.cpu_count()} cores ({cpu_name()}), kernel {platform.release()}, Python {platform.python_version()}"


def cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "")


def _output(*command: str) -> str:
    """ "" where there is no such program or it fails."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=30)
        return done.stdout.strip()
    return ""


def memory_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def disk(directory: str) -> dict[str, object]:
    """The file system that holds it, its device and the device's model, as far as the kernel tells."""
    source, _, kind = _output("findmnt", "--noheadings", "--output", "SOURCE,FSTYPE", "--target", directory).partition(" ")
    number = os.stat(directory).st_dev
    device = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}")
    model = ""
    for place in (device / "device" / "model", device / ".." / "device" / "model"):
        with contextlib.suppress(OSError):
            model = model or place.read_text().strip()
    return {"device": source, "filesystem": kind.strip(), "model": model, "bytes": shutil.disk_usage(directory).total}


def versions(pythons: Mapping[str, str] | None = None) -> dict[str, str]:
    """Of our environment's packages, of the programs in PATH, and of what peers' Pythons have (by peer: "" for none)."""
    asked = {"": (sys.executable, _OURS)}
    asked |= {peer: (python, _THEIRS[peer]) for peer, python in (pythons or {}).items() if python}
    found: dict[str, str] = {}
    for peer, (python, names) in asked.items():
        answer = json.loads(_output(python, "-c", _ASK, *names) or "{}")
        found |= {f"{peer}: {name}" if peer else name: version for name, version in answer.items()}
    for program in _PROGRAMS:
        if shutil.which(program) and (said := _output(program, "--version")):
            found[program] = said.splitlines()[0]
    return found


def provenance(name: str, pythons: Mapping[str, str] | None = None, directory: str = "/var/tmp") -> dict[str, object]:
    """Of a result. `pythons`: see `versions`; `directory`: where files were written."""
    return {
        "benchmark": name,
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "commit": _output("git", "rev-parse", "HEAD"),
        "dirty": bool(_output("git", "status", "--porcelain")),
        "machine": {
            "cpu": cpu_name(),
            "cores": os.cpu_count(),
            "memory_bytes": memory_bytes(),
            "kernel": platform.release(),
            "python": platform.python_version(),
            "disk": disk(directory),
        },
        "versions": versions(pythons),
    }
