"""The plugin in a fresh interpreter, as every SGLang process runs it: what it changed, and that off means off."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import environment
from tests.sglang.conftest import SHIMS

PROGRAM = """
import logging, os, sys
logging.basicConfig(level=logging.INFO, format="%(name)s %(message)s", stream=sys.stderr)
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory
from sglang.srt.mem_cache.pool_host import base
print(StorageBackendFactory._registry["mooncake"]["module_path"])
print(type(base.get_allocator_from_storage("mooncake")).__name__)
print(type(base.get_allocator_from_storage("file")).__name__)
print(os.environ.get("SGLANG_HICACHE_MOONCAKE_REUSE_TE"))
"""


def sglang_environment(**settings: str) -> dict[str, str]:
    env = environment() | {"SGLANG_USE_CPU_ENGINE": "1", "SGLANG_PLUGINS": "hicache_mooncake"} | settings
    env["PYTHONPATH"] = os.pathsep.join([str(SHIMS), env["PYTHONPATH"]])
    return env


def run(program: str = PROGRAM, **settings: str) -> tuple[list[str], str]:
    env = sglang_environment(**settings)
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=110, check=True)
    return done.stdout.split(), done.stderr


def test_the_name_mooncake_becomes_this_backend() -> None:
    output, log = run()
    assert output == ["hicache_mooncake.backend", "ShmHostTensorAllocator", "HostTensorAllocator", "0"]
    lines = [line for line in log.splitlines() if line.startswith("hicache_mooncake.plugin")]
    assert len(lines) == 1
    for word in ("HiCacheMooncake", "memfds", "SGLANG_HICACHE_MOONCAKE_REUSE_TE=0", "HICACHE_MOONCAKE_PLUGIN=off"):
        assert word in lines[0]


WHOSE = """
import os, sys
from sglang.srt.plugins import load_plugins
load_plugins()
assert not [name for name in sys.modules if name.startswith(("mooncake", "hicache_mooncake.transfer"))]
try:
    from mooncake.engine import TransferEngine
    print(TransferEngine.__module__)
except ImportError:
    print("none")
print(os.environ.get("SGLANG_HICACHE_MOONCAKE_REUSE_TE"))
from hicache_mooncake import plugin
print(plugin.summary.partition("disaggregation by mooncake is ")[2].partition(".")[0].replace(" ", "_"))
"""
OURS = "hicache_mooncake.messenger.mooncake_engine"


def test_disaggregation_gets_this_packages_engine_where_there_is_no_other() -> None:
    assert run(WHOSE)[0] == [OURS, "0", "hicache-mooncake's_(HICACHE_MOONCAKE_ENGINE=auto)"]


def test_the_engine_can_be_left_to_mooncake() -> None:
    off = run(WHOSE, HICACHE_MOONCAKE_ENGINE="off")[0]
    assert off == ["none", "0", "none,_since_Mooncake's_cannot_be_imported_(HICACHE_MOONCAKE_ENGINE=off)"]


def test_a_setting_that_cannot_be_used_does_not_hide_the_choice() -> None:
    output, log = run(WHOSE, HICACHE_MOONCAKE_ENGINE="off", HICACHE_MOONCAKE_LANES="many")
    assert output[0] == "none"
    assert "HICACHE_MOONCAKE_LANES" in log


@pytest.mark.parametrize(
    ("engine", "expected"),
    [
        ("auto", ["theirs", "None", "Mooncake's_(HICACHE_MOONCAKE_ENGINE=auto)"]),
        ("on", [OURS, "0", "hicache-mooncake's_(HICACHE_MOONCAKE_ENGINE=on)"]),
    ],
)
def test_mooncakes_own_engine_is_hidden_only_on_request(tmp_path: Path, engine: str, expected: list[str]) -> None:
    (tmp_path / "mooncake").mkdir()
    (tmp_path / "mooncake" / "__init__.py").write_text("")
    (tmp_path / "mooncake" / "engine.py").write_text("class TransferEngine: pass\nTransferEngine.__module__ = 'theirs'\n")
    program = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n" + WHOSE.replace('"mooncake", ', "")
    program = program.replace('("hicache_mooncake.transfer"))', "'hicache_mooncake.transfer')")
    assert run(program, HICACHE_MOONCAKE_ENGINE=engine)[0] == expected


def test_an_engine_of_mooncakes_that_does_not_load_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "mooncake").mkdir()
    (tmp_path / "mooncake" / "__init__.py").write_text("")
    (tmp_path / "mooncake" / "engine.py").write_text("raise OSError('libibverbs.so.1: cannot open shared object file')")
    program = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n" + WHOSE.replace("assert not", "_ =")
    assert run(program)[0] == [OURS, "0", "hicache-mooncake's_(HICACHE_MOONCAKE_ENGINE=auto)"]


def test_off_leaves_sglang_alone() -> None:
    output, log = run(HICACHE_MOONCAKE_PLUGIN="off")
    assert output[0].startswith("sglang.srt.mem_cache.storage.mooncake_store")
    assert output[3] == "None"
    assert "HICACHE_MOONCAKE_PLUGIN=off" in log


def test_the_operators_own_choice_about_the_engine_stands() -> None:
    output, _ = run(SGLANG_HICACHE_MOONCAKE_REUSE_TE="1")
    assert output[3] == "1"


@pytest.mark.parametrize("module", ["hicache_mooncake.plugin", "hicache_mooncake.config", "hicache_mooncake.client.client"])
def test_importing_it_pulls_in_nothing_heavy(module: str) -> None:
    """P76: no torch, no sglang, no native transfer library until they are needed."""
    program = (
        f"import sys, {module}\n"
        "heavy = {'torch', 'sglang', 'numpy', 'zmq', 'lmdb', 'mooncake', 'ibverbs'} & set(sys.modules)\n"
        "print(*(sorted(heavy) or ['none']))\n"
    )
    assert run(program)[0] == ["none"]


def test_node_and_master_run_without_torch_or_sglang() -> None:
    """P76 P82: they run on hosts that have neither; every native part they need is loaded at import, not at the first page."""
    program = (
        "import sys\n"
        "sys.modules['torch'] = sys.modules['sglang'] = None\n"
        "import hicache_mooncake.node.service, hicache_master.server, hicache_mooncake.client.mover\n"
        "print('ok', 'xxhash' in sys.modules)\n"
    )
    assert run(program)[0] == ["ok", "True"]
