"""What the peers' sides that keep pages in files share: scripts run by path, by Pythons that need not have this project.

Each line on stdin is `put BYTES COUNT` or `get BYTES COUNT`, answered by a line of JSON: the seconds that it took. A get takes
the batch that was put first of those that were not got yet: every page is read once. The first get of a size compares the
bytes, outside of the time.
"""

from __future__ import annotations

import json
import sys
from typing import Protocol


class Pool(Protocol):
    def put(self, page: int, count: int) -> float: ...

    def get(self, page: int, count: int) -> float: ...


def pattern(number: int, page: int) -> bytes:
    return number.to_bytes(8, "little") * (page // 8)


def serve(pool: Pool) -> None:
    """Until stdin ends."""
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        op, page, count = line.split()[0], *map(int, line.split()[1:])
        print(json.dumps({"put": pool.put, "get": pool.get}[op](page, count)), flush=True)
