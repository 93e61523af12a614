"""What a Python process that we start needs to find this package, however it came onto our own path."""

from __future__ import annotations

import os
from pathlib import Path


def environment() -> dict[str, str]:
    """This process's environment, with the package's own folders (and the master's, in a checkout) first on PYTHONPATH."""
    root = Path(__file__).resolve().parents[2]
    found = [str(root), str(root / "master"), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, found))}
