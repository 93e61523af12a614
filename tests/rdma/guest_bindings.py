"""Runs in a guest (`make test-rdma`): both bindings over two rxe devices, each over a dummy interface."""

from __future__ import annotations

import subprocess

import pytest

from hicache_mooncake.transfer.verbs.bindings import load_binding

pytest.register_assert_rewrite("tests.rdma.suite")
from tests.rdma.suite import Rig, VerbsTests  # noqa: E402 (rewritten first)


@pytest.fixture(params=["ibverbs", "pyverbs"])
def rig(request: pytest.FixtureRequest) -> Rig:
    binding = load_binding(request.param)
    return Rig((binding, binding), ("rxe0", "rxe1"), set_link)


def set_link(device: str, up: bool) -> None:
    interface = device.replace("rxe", "dummy")
    subprocess.run(["ip", "link", "set", interface, "up" if up else "down"], check=True)


class TestBindings(VerbsTests):
    pass
