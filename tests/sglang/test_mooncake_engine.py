"""SGLang's own wrapper of `mooncake.engine`, between two processes that have only this package's."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.sglang.test_plugin import sglang_environment

PROGRAM = """
import ctypes, hashlib, json, os, sys
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang.srt.distributed.device_communicators.mooncake_transfer_engine import MooncakeTransferEngine
import torch
engine = MooncakeTransferEngine(sys.argv[1])
tensors = [torch.randint(0, 255, (1 << 20,), dtype=torch.uint8) for _ in range(8)]

def register():
    return engine.batch_register([t.data_ptr() for t in tensors], [t.nbytes for t in tensors])

def unregister():
    return engine.batch_deregister([t.data_ptr() for t in tensors])

def where():
    return [t.data_ptr() for t in tensors]

def digest():
    return hashlib.sha256(b"".join(t.numpy().tobytes() for t in tensors)).hexdigest()

def one():
    extra = torch.zeros(4096, dtype=torch.uint8)
    engine.register(extra.data_ptr(), 4096)
    try:
        engine.register(extra.data_ptr(), 4096)
    except RuntimeError as error:
        print(error, file=sys.stderr)
    else:
        return "registered twice"
    engine.deregister(extra.data_ptr())
    try:
        engine.deregister(extra.data_ptr())
    except RuntimeError:
        return "refused twice"

own = {f.__name__: f for f in (register, unregister, where, digest, one)}
print(json.dumps(engine.get_session_id()), flush=True)
for line in sys.stdin:
    name, *arguments = json.loads(line)
    print(json.dumps((own.get(name) or getattr(engine, name))(*arguments)), flush=True)
"""


class Rank:
    def __init__(self, host: str) -> None:
        self._child = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, host], env=sglang_environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    def answer(self) -> Any:
        assert self._child.stdout is not None
        line = self._child.stdout.readline()
        assert line, "the process has ended"
        return json.loads(line)

    def call(self, name: str, *arguments: Any) -> Any:
        assert self._child.stdin is not None
        self._child.stdin.write(json.dumps([name, *arguments]).encode() + b"\n")
        self._child.stdin.flush()
        return self.answer()

    def kill(self) -> None:
        self._child.kill()
        self._child.communicate()


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_sglangs_wrapper_moves_kv_between_two_processes(host: str) -> None:
    prefill, decode = Rank(host), Rank(host)
    try:
        here, there = prefill.answer(), decode.answer()
        assert there.startswith("[::1]:" if ":" in host else "127.0.0.1:")
        assert here != there
        assert prefill.call("register") == decode.call("register") == 0
        sources, targets, page = prefill.call("where"), decode.call("where"), 4096
        local = [base + at for base in sources for at in range(0, 1 << 20, page)]
        remote = [base + at for base in targets for at in range(0, 1 << 20, page)]
        assert prefill.call("digest") != decode.call("digest")
        assert prefill.call("batch_transfer_sync", there, local, remote, [page] * len(local)) == 0
        assert prefill.call("digest") == decode.call("digest")
        assert prefill.call("transfer_sync", there, sources[0], targets[1], 1 << 20) == 0
        assert prefill.call("digest") != decode.call("digest")
        assert prefill.call("send_probe", there) == 0
        assert prefill.call("one") == "refused twice"

        assert decode.call("unregister") == 0
        assert decode.call("unregister") == -1
        assert prefill.call("batch_transfer_sync", there, local, remote, [page] * len(local)) == -1
        decode.kill()
        assert prefill.call("send_probe", there) < 0
        assert prefill.call("transfer_sync", there, sources[0], targets[1], 1 << 20) < 0
    finally:
        prefill.kill()
        decode.kill()
