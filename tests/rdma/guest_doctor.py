"""Runs in a guest (`make test-rdma`): what `doctor` finds of a real kernel's RDMA devices, by sysfs and by libibverbs."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from dataclasses import replace

import pytest

from hicache_mooncake.cli import doctor_transports
from hicache_mooncake.cli.checks import Check
from hicache_mooncake.config import Settings, load_settings
from hicache_mooncake.transfer import addresses, topology


@pytest.fixture(params=["ibverbs", "pyverbs"])
def settings(request: pytest.FixtureRequest) -> Settings:
    return load_settings({"dram": "16mb", "verbs_binding": request.param}, {"XDG_RUNTIME_DIR": "/tmp"})[0]


@pytest.fixture
def port_down() -> Iterator[None]:
    subprocess.run(["ip", "link", "set", "dummy1", "down"], check=True)
    yield
    subprocess.run(["ip", "link", "set", "dummy1", "up"], check=True)


def examined(settings: Settings) -> dict[str, Check]:
    return {check.name: check for check in doctor_transports.examine(settings)}


def test_devices_ports_and_gids_are_found(settings: Settings) -> None:
    checks = examined(settings)
    assert f"{settings.verbs_binding} is used" in checks["RDMA packages"].found
    table = addresses.table()
    for number in (0, 1):
        check = checks[f"RDMA rxe{number}"]
        address = addresses.of_interface(f"dummy{number}", table)
        assert check.status == "ok", check
        assert f"RoCE v2, IPv4 address {address} of dummy{number}" in check.found, check
    assert checks["pages of other hosts"].status == "ok"
    assert checks["pages of other hosts"].found.startswith("verbs with nodes that have it too (rxe0:1 gid ")
    devices = topology.read().of("rdma")
    assert [(device.name, device.netdevs) for device in devices] == [("rxe0", ("dummy0",)), ("rxe1", ("dummy1",))]
    assert "2 of 2 RDMA devices in use" in checks["topology"].found


@pytest.mark.usefixtures("port_down")
def test_a_port_that_is_down_is_told_and_a_failure_where_it_was_named(settings: Settings) -> None:
    check = examined(settings)["RDMA rxe1"]
    assert (check.status, "port 1 DOWN" in check.found) == ("warn", True), check
    checks = examined(replace(settings, transport="verbs", rdma_devices=("rxe1",)))
    assert checks["RDMA rxe1"].status == "fail"
    assert "rxe1 port 1 is DOWN, not ACTIVE. GID table: " in checks["pages of other hosts"].found


def test_a_device_that_is_not_there_is_told_with_those_that_are(settings: Settings) -> None:
    check = examined(replace(settings, rdma_devices=("mlx5_0",)))["RDMA mlx5_0"]
    assert check.status == "fail"
    assert "rxe0 port 1 ACTIVE, GID table: " in check.found


def test_an_index_that_is_not_in_the_table_is_told_with_the_table(settings: Settings) -> None:
    check = examined(replace(settings, gid_index=200))["RDMA rxe0"]
    assert (check.status, "rxe0 port 1 has no GID 200. There are " in check.advice) == ("warn", True), check
