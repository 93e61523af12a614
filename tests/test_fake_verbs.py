"""The fake RDMA device does what rxe devices do in `tests/rdma`, and has faults that they do not have."""

from __future__ import annotations

import pytest

from hicache_mooncake.testing.fake_verbs import FakeFabric

pytest.register_assert_rewrite("tests.rdma.suite")
from tests.rdma.suite import Rig, VerbsTests  # noqa: E402 (rewritten first)


@pytest.fixture
def fabric():
    with FakeFabric() as fabric:
        yield fabric


@pytest.fixture
def rig(fabric: FakeFabric) -> Rig:
    names = ("mlx5_0", "mlx5_1")
    hosts = [fabric.host(name, names) for name in "ab"]

    def set_link(device: str, up: bool) -> None:
        for host in hosts:
            host.cards[device].port_state(1, "ACTIVE" if up else "DOWN")

    return Rig((hosts[0].binding(), hosts[1].binding()), names, set_link)


class TestFakeVerbs(VerbsTests):
    pass
