"""Names of masters: each connection resolves anew, and a name server that hangs holds up nobody for long."""

from __future__ import annotations

import threading
import time

import pytest

from hicache_mooncake.node.names import Names


def test_each_call_resolves_anew() -> None:
    answers = iter(["10.0.0.1", "10.0.0.2", "fd00::1"])
    names = Names(lambda host, port: next(answers))
    assert [names("masters.test:50051") for _ in range(3)] == ["10.0.0.1:50051", "10.0.0.2:50051", "[fd00::1]:50051"]


@pytest.mark.parametrize("address", ["10.1.2.3:5", "[::1]:5", "[fe80::1%eth0]:5"])
def test_addresses_are_left_alone(address: str) -> None:
    def resolver(host: str, port: int) -> str:
        raise AssertionError("nothing to resolve")

    assert Names(resolver)(address) == address


def test_the_hosts_own_names_resolve() -> None:
    assert Names()("localhost:7") in ("127.0.0.1:7", "[::1]:7")


def test_a_name_without_an_address_is_an_error_each_time_anew() -> None:
    problems = iter([OSError(-2, "Name or service not known"), UnicodeError("label too long"), None])

    def resolver(host: str, port: int) -> str:
        if problem := next(problems):
            raise problem
        return "10.0.0.1"

    names = Names(resolver)
    with pytest.raises(OSError, match=r"masters\.test: Name or service not known"):
        names("masters.test:1")
    with pytest.raises(OSError, match="label too long"):
        names("masters.test:1")
    assert names("masters.test:1") == "10.0.0.1:1"


def test_a_name_server_that_hangs_costs_a_moment_and_one_thread() -> None:
    release, asked = threading.Event(), []

    def resolver(host: str, port: int) -> str:
        asked.append(host)
        if host == "slow.test" and len(asked) == 1:
            release.wait(30)
        return f"10.0.0.{len(asked)}"

    names = Names(resolver)
    for _ in range(5):
        with pytest.raises(OSError, match=r"does not answer for slow\.test"):
            names("slow.test:1")
    assert asked == ["slow.test"]
    assert names("quick.test:1") == "10.0.0.2:1"
    release.set()
    deadline = time.monotonic() + 20
    while True:
        try:
            late = names("slow.test:1")
            break
        except OSError:
            assert time.monotonic() < deadline
    assert late == "10.0.0.2:1", "what came late is used, once"
    assert names("slow.test:1") == "10.0.0.3:1"


def test_a_name_that_is_no_host_and_port_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="port"):
        Names()("host:port")


def test_a_lookup_does_not_wait_for_a_name_server_that_hangs_and_hears_of_news_later() -> None:
    release, asked = threading.Event(), []

    def resolver(host: str, port: int) -> str:
        asked.append(host)
        if len(asked) == 2:
            release.wait(30)
        if len(asked) == 3:
            raise OSError(-2, "Name or service not known")
        return f"10.0.0.{len(asked)}"

    names = Names(resolver)
    assert names.known("masters.test:1") == "10.0.0.1:1", "the first time there is nothing to go by"
    for _ in range(5):
        assert names.known("masters.test:1") == "10.0.0.1:1"
    assert len(asked) == 2, "one looks for all"
    release.set()
    deadline = time.monotonic() + 20
    while names.known("masters.test:1") != "10.0.0.2:1":
        assert time.monotonic() < deadline
        time.sleep(0.01)
    while names.known("masters.test:1") != "10.0.0.4:1":
        assert time.monotonic() < deadline, "a failure between leaves what was known and is not the end"
        time.sleep(0.01)
    assert names.known("[::1]:5") == "[::1]:5"
