"""What a prefill engine sends for one request: the KV of 2,048 tokens, page by page, from one process to another.

32 layers of K and V, 8 KV heads of 128 as bf16, so 2 KiB a token for each of the 64; pages of 64 tokens (128 KiB), and of
16. The pages are scattered over the pools at both ends, as they are after some hours. Ours over tcp and over shared memory,
Mooncake's engine over tcp where `--mooncake PYTHON` names the Python that has it, and a bare `sendmsg`/`recv_into` loop over
one connection. Mooncake's gets 1,024 pieces a call, since it refuses more than some thousands over tcp ("TCP lane queue-full").

`python -m benchmarks.pd_payload --mooncake PYTHON`; `make bench` has it as the section `pd`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.progress import Progress

from benchmarks.harness import Bench, Row, compare, report, save
from benchmarks.machine import ROOT
from benchmarks.usage import METER

LAYERS, HEADS, HEAD_DIM, ITEM = 32, 8, 128, 2
TOKEN_BYTES = HEADS * HEAD_DIM * ITEM
"""Of K or V of a layer."""
TOKENS = 2048
OURS = "hicache_mooncake.messenger.mooncake_engine"
TARGET = 2.0
"""Times Mooncake's rate over tcp."""
_ALL, _MOST_MOONCAKE = 1 << 30, 1024
"""Pieces a call."""
_END = str(Path(__file__).with_name("pd_end.py"))


class End:
    """Owns the process."""

    def __init__(self, python: str, module: str, layers: int, length: int, most: int, env: dict[str, str]) -> None:
        self._process = subprocess.Popen(
            [python, _END, module, str(layers), str(length), str(most)],
            env=os.environ | env,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        self.pid = self._process.pid
        METER.apart.add(self.pid)

    def ask(self, *question: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        for line in self._process.stdout:  # among what it logs
            with contextlib.suppress(json.JSONDecodeError):
                return json.loads(line)
        raise RuntimeError(f"{self._process.args} ended with {self._process.wait()}: run it by hand to see why")

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()
        METER.apart.discard(self.pid)


class Pair:
    """A sender and a receiver with pools for twice the tokens of a request."""

    def __init__(self, python: str, module: str, layers: int, tokens: int, most: int, env: dict[str, str]) -> None:
        self._layers, self._tokens = layers, tokens
        length = 2 * tokens * TOKEN_BYTES
        self._ends: list[End] = []
        try:
            for _ in range(2):
                self._ends.append(End(python, module, layers, length, most, env))
            self._sender, self._receiver = self._ends
            self._sender.ask("fill", 1)
            self._receiver.ask("fill", 2)
            self._session, self._addresses = self._receiver.ask("where")
        except BaseException:
            self.close()
            raise

    def rate(self, page_tokens: int, round_: int) -> float:
        """GB/s of one request. In the round of the warm-up what has arrived is compared."""
        pages, page = self._tokens // page_tokens, page_tokens * TOKEN_BYTES
        shuffled = [random.Random(f"{round_} {end}").sample(range(2 * pages), pages) for end in range(2)]
        with METER.timed([end.pid for end in self._ends]):
            took = self._sender.ask("send", self._session, self._addresses, page, *shuffled)
        if round_ == 0 and self._sender.ask("digest", page, shuffled[0]) != self._receiver.ask("digest", page, shuffled[1]):
            raise RuntimeError("what has arrived is not what was sent")
        return float(2 * self._layers * pages * page / took / 1e9)

    def close(self) -> None:
        for end in self._ends:
            end.close()


@contextlib.contextmanager
def _pairs(bench: Bench, layers: int, tokens: int) -> Iterator[dict[str, Pair]]:
    path = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "master")])}
    wanted = {
        "ours tcp": (sys.executable, OURS, _ALL, path | {"HICACHE_MOONCAKE_TRANSPORT": "tcp"}),
        "ours shm": (sys.executable, OURS, _ALL, path),
        "bare loop": (sys.executable, "socket", _ALL, path),
    }
    if bench.mooncake:
        wanted["Mooncake tcp"] = (bench.mooncake, "mooncake.engine", _MOST_MOONCAKE, {"MC_FORCE_TCP": "1"})
    made: dict[str, Pair] = {}
    try:
        for name, (python, module, most, env) in wanted.items():
            made[name] = Pair(python, module, layers, tokens, most, env)
        yield made
    finally:
        for pair in made.values():
            pair.close()


def pd(bench: Bench, layers: int = LAYERS, tokens: int = TOKENS) -> list[Row]:
    rows: list[Row] = []
    with _pairs(bench, layers, tokens) as pairs:
        for page_tokens in (64, 16):
            contenders = {
                name: lambda number, pair=pair, page=page_tokens: pair.rate(page, number) for name, pair in pairs.items()
            }
            figures = bench.interleave(contenders, f"pd {page_tokens} tokens")
            what = f"{tokens} tokens in {page_tokens * TOKEN_BYTES >> 10} KiB pieces"
            for name in ("ours tcp", "ours shm"):
                for ceiling in ("Mooncake tcp", "bare loop"):
                    if ceiling in figures:
                        target = TARGET if (name, ceiling) == ("ours tcp", "Mooncake tcp") else None
                        row = f"pd {name.split()[1]}: {what}"
                        rows.append(compare(row, figures[name], figures[ceiling], "GB/s", ceiling, target))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--mooncake", metavar="PYTHON", default="", help="the Python that has Mooncake")
    options = parser.parse_args()
    with Progress(transient=True) as progress:
        rows = pd(Bench(progress, options.rounds, mooncake=options.mooncake), options.layers, options.tokens)
    report(rows, f"medians of {options.rounds} interleaved rounds")
    print(f"saved as {save(rows, 'pd_payload')}")


if __name__ == "__main__":
    main()
