"""Masters in etcd: listed while they live, one leader a shard, and never two of them whatever fails."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import random
import signal
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hicache_master.election import (
    FOLLOWER,
    LEADER,
    SAFE_SHARE,
    Candidate,
    Election,
    ElectionError,
    Term,
    leader_key,
    parse_servers,
)
from hicache_master.server import MasterError, MasterServer

from hicache_mooncake.discovery import masters_prefix
from tests.etcd import EtcdProcess, etcd_server, needs_etcd

PATIENCE_S = 30.0


def eventually(what: Callable[[], object], within_s: float = PATIENCE_S) -> None:
    deadline = time.monotonic() + within_s
    while not what():
        assert time.monotonic() < deadline, "it did not come true in time"
        time.sleep(0.05)


# --------------------------------------------------------------------------- a term, a candidate


def test_a_leader_stops_to_be_one_before_its_lease_can_have_ended() -> None:
    term = Term(3.0)
    assert term.role(0.0) == FOLLOWER
    term.renewed(10.0)
    term.elected(True)
    assert term.role(10.0 + 3.0 * SAFE_SHARE - 0.01) == LEADER
    assert term.role(10.0 + 3.0 * SAFE_SHARE) == FOLLOWER, "nobody needs to tell it"
    term.renewed(11.0)
    assert term.role(12.0) == LEADER
    term.renewed(10.5)  # an answer that came late
    assert term.role(11.0 + 3.0 * SAFE_SHARE - 0.01) == LEADER
    term.expired()
    assert term.role(12.0) == FOLLOWER
    term.renewed(12.0)
    assert term.role(12.0) == FOLLOWER, "a new lease is no election"


class FakeEtcd:
    """Leases and keys on a clock of its own, with failures before or after the deed."""

    def __init__(self) -> None:
        self.now = 0.0
        self.leases: dict[int, tuple[float, int]] = {}
        self.keys: dict[str, tuple[str, int]] = {}
        self.numbers = itertools.count(1)
        self.fail: Callable[[], bool] = lambda: False

    def expire(self) -> None:
        for lease, (until, _) in list(self.leases.items()):
            if self.now >= until:
                self.end(lease)

    def end(self, lease: int) -> None:
        self.leases.pop(lease, None)
        self.keys = {key: entry for key, entry in self.keys.items() if entry[1] != lease}

    def call(self) -> None:
        self.expire()
        if self.fail():
            raise ConnectionError("etcd is away")

    def grant(self, ttl_s: int) -> int:
        self.call()
        lease = next(self.numbers)
        self.leases[lease] = self.now + ttl_s, ttl_s
        self.call()
        return lease

    def renew(self, lease: int) -> bool:
        self.call()
        if lease not in self.leases:
            return False
        ttl_s = self.leases[lease][1]
        self.leases[lease] = self.now + ttl_s, ttl_s
        self.call()
        return True

    def revoke(self, lease: int) -> None:
        self.call()
        self.end(lease)

    def put(self, key: str, value: str, lease: int) -> None:
        self.call()
        if lease not in self.leases:
            raise ValueError("requested lease not found")
        self.keys[key] = value, lease
        self.call()

    def create(self, key: str, value: str, lease: int) -> bool:
        self.call()
        if key in self.keys:
            return False
        self.put(key, value, lease)
        return True

    def get(self, key: str) -> str | None:
        self.call()
        return self.keys[key][0] if key in self.keys else None

    def list(self, prefix: str) -> dict[str, str]:
        self.call()
        return {key: value for key, (value, _) in self.keys.items() if key.startswith(prefix)}


def candidate(etcd: FakeEtcd, name: bytes, shard: int = 0) -> Candidate:
    return Candidate(etcd, "test", shard, name, f"host-{name.decode()}:1")


def test_the_first_master_of_a_shard_leads_and_the_next_when_it_ends() -> None:
    etcd = FakeEtcd()
    a, b, other = candidate(etcd, b"a"), candidate(etcd, b"b"), candidate(etcd, b"c", shard=1)
    for one in (a, b, other):
        one.step(lambda: etcd.now)
    assert [one.term.role(etcd.now) for one in (a, b, other)] == [LEADER, FOLLOWER, LEADER]
    assert etcd.keys[f"{masters_prefix('test')}0/{b'a'.hex()}"][0] == "host-a:1"
    a.step(lambda: etcd.now)
    assert a.masters == ["host-a:1", "host-b:1", "host-c:1"]
    a.resign()
    b.step(lambda: etcd.now)
    assert b.term.role(etcd.now) == LEADER
    assert b.masters == ["host-b:1", "host-c:1"]
    assert a.term.role(etcd.now) == FOLLOWER


def test_a_master_that_was_paused_finds_its_lease_gone_and_is_listed_again() -> None:
    etcd = FakeEtcd()
    a, b = candidate(etcd, b"a"), candidate(etcd, b"b")
    a.step(lambda: etcd.now)
    b.step(lambda: etcd.now)
    etcd.now += 2.9
    b.step(lambda: etcd.now)
    etcd.now += 0.2
    b.step(lambda: etcd.now)
    assert (a.term.role(etcd.now), b.term.role(etcd.now)) == (FOLLOWER, LEADER)
    a.step(lambda: etcd.now)
    assert a.masters == ["host-a:1", "host-b:1"]
    assert a.term.role(etcd.now) == FOLLOWER


def test_what_an_operator_deletes_comes_back() -> None:
    etcd = FakeEtcd()
    a = candidate(etcd, b"a")
    a.step(lambda: etcd.now)
    etcd.keys.clear()
    a.step(lambda: etcd.now)
    assert a.term.role(etcd.now) == LEADER
    assert len(etcd.keys) == 2
    assert etcd.keys[leader_key("test", 0)][0] == b"a".hex()


@pytest.mark.parametrize("seed", range(40))
def test_there_are_never_two_leaders_whatever_fails(seed: int) -> None:
    rng = random.Random(seed)
    etcd = FakeEtcd()
    paused: set[int] = set()
    names = itertools.count()
    masters = [candidate(etcd, b"%d" % next(names)) for _ in range(3)]
    etcd.fail = lambda: rng.random() < 0.15
    terms = 0
    for _ in range(600):
        etcd.now += rng.random() * 0.5
        etcd.expire()
        number = rng.randrange(3)
        dice = rng.random()
        if dice < 0.02:
            masters[number] = candidate(etcd, b"%d" % next(names))  # killed, and a new one started
        elif dice < 0.06:
            paused ^= {number}
        elif number not in paused:
            with contextlib.suppress(ConnectionError, ValueError):
                masters[number].step(lambda: etcd.now)
        leaders = [one for one in masters if one.term.role(etcd.now) == LEADER]
        assert len(leaders) <= 1
        terms += len(leaders)
    assert terms > 50, "and mostly there is one"
    etcd.fail = lambda: False
    for _ in range(40):
        etcd.now += 0.3
        for one in masters:
            one.step(lambda: etcd.now)
    assert sum(one.term.role(etcd.now) == LEADER for one in masters) == 1
    assert all(len(one.masters) == 3 for one in masters)


@pytest.mark.parametrize(
    ("text", "servers"),
    [
        ("http://e1:2379", [("http", "e1", 2379)]),
        ("e1,https://e2:99/", [("http", "e1", 2379), ("https", "e2", 99)]),
        ("etcd://[::1]:5", [("http", "::1", 5)]),
    ],
)
def test_servers_are_written_in_several_ways(text: str, servers: list[tuple[str, str, int]]) -> None:
    assert parse_servers(text) == servers


@pytest.mark.parametrize("text", ["", ",", "ftp://e1", "http://e1:port", "http://"])
def test_servers_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(ElectionError, match="--etcd"):
        parse_servers(text)


# --------------------------------------------------------------------------- with a real etcd


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[EtcdProcess]:
    with etcd_server(tmp_path) as server:
        yield server


@pytest.fixture
def elections(etcd: EtcdProcess) -> Iterator[Callable[..., Election]]:
    started: list[Election] = []

    def start(name: bytes, shard: int = 0) -> Election:
        election = Election(f"http://{etcd.address}", "test", shard, name, f"127.0.0.1:{1000 + len(started)}")
        started.append(election)
        election.start()
        return election

    yield start
    for election in started:
        election.close()


def role(election: Election) -> str:
    return election.role(time.monotonic())


@needs_etcd
def test_one_leads_and_when_it_ends_the_other_does_at_once(elections: Callable[..., Election]) -> None:
    a = elections(b"a")
    eventually(lambda: role(a) == LEADER)
    b, other = elections(b"b"), elections(b"c", shard=1)
    eventually(lambda: len(b.masters) == 3 and role(other) == LEADER)
    assert (role(a), role(b)) == (LEADER, FOLLOWER)
    a.close()
    eventually(lambda: role(b) == LEADER)
    eventually(lambda: list(b.masters) == ["127.0.0.1:1001", "127.0.0.1:1002"])
    assert role(a) == FOLLOWER


@needs_etcd
def test_without_etcd_nobody_leads_and_with_it_one_does_again(
    etcd: EtcdProcess, elections: Callable[..., Election], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    a, b = elections(b"a"), elections(b"b")
    eventually(lambda: len(a.masters) == len(b.masters) == 2 and LEADER in (role(a), role(b)))
    etcd.kill()
    eventually(lambda: a.problem and b.problem and role(a) == role(b) == FOLLOWER)
    assert len(a.masters) == 2, "what was known stays"
    etcd.start()
    eventually(lambda: not a.problem and not b.problem and sorted((role(a), role(b))) == [FOLLOWER, LEADER])
    assert len([record for record in caplog.records if "cannot be used" in record.message]) == 2, "said once each"


@needs_etcd
def test_an_etcd_that_hangs_is_as_good_as_none(etcd: EtcdProcess, elections: Callable[..., Election]) -> None:
    a = elections(b"a")
    eventually(lambda: role(a) == LEADER)
    etcd.signal(signal.SIGSTOP)
    try:
        eventually(lambda: role(a) == FOLLOWER and a.problem)
    finally:
        etcd.signal(signal.SIGCONT)
    eventually(lambda: role(a) == LEADER)


@needs_etcd
def test_a_master_says_its_role_and_whom_it_knows(etcd: EtcdProcess) -> None:
    server = MasterServer("127.0.0.1:0", "127.0.0.1:0", shard=(1, 2), etcd=f"http://{etcd.address}", cluster="test")
    thread = threading.Thread(target=server.serve)
    thread.start()
    try:
        eventually(lambda: server.core.role == LEADER and server.core.masters == [server.address])

        def health() -> dict[str, object]:
            with urllib.request.urlopen(f"http://{server.metrics_address}/health", timeout=10) as response:
                return dict(json.load(response))

        eventually(lambda: health()["role"] == LEADER)
        assert (health()["shard"], health()["etcd"]) == ("1/2", "")
    finally:
        server.stop()
        thread.join(timeout=20)
    assert not thread.is_alive()
    late = Election(f"http://{etcd.address}", "test", 1, b"late", "127.0.0.1:9")
    late.start()
    try:
        eventually(lambda: role(late) == LEADER and list(late.masters) == ["127.0.0.1:9"])
    finally:
        late.close()


def test_a_master_starts_and_serves_while_etcd_is_away() -> None:
    pytest.importorskip("etcd3gw")
    server = MasterServer("127.0.0.1:0", etcd="http://127.0.0.1:1")
    thread = threading.Thread(target=server.serve)
    thread.start()
    try:
        eventually(lambda: server.view.etcd)
        assert server.core.role == FOLLOWER
    finally:
        server.stop()
        thread.join(timeout=20)
    assert not thread.is_alive()


def test_an_address_that_no_node_can_connect_to_is_not_listed() -> None:
    pytest.importorskip("etcd3gw")
    with pytest.raises(MasterError, match="--advertise"):
        MasterServer("0.0.0.0:0", allow_unauthenticated=True, etcd="http://127.0.0.1:1")
    with pytest.raises(MasterError, match="--etcd"):
        MasterServer("127.0.0.1:0", etcd="ftp://127.0.0.1:1")
    server = MasterServer("0.0.0.0:0", allow_unauthenticated=True, etcd="http://127.0.0.1:1", advertise="10.0.0.7")
    server.close()
