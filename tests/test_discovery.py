"""Where the masters are, as etcd says it: what is told, what is kept, and what is not believed."""

from __future__ import annotations

import logging
import threading

import pytest

from hicache_mooncake.discovery import Discovery

log = logging.getLogger("discovery")


class Etcd:
    """Two servers, `one` and `two`, with the same keys; each may be down."""

    def __init__(self) -> None:
        self.values: list[bytes] = []
        self.down: set[str] = set()
        self.asked: list[str] = []
        self.prefixes: set[str] = set()

    def client(self, host: str, port: int) -> Client:
        return Client(self, host)


class Client:
    def __init__(self, etcd: Etcd, host: str) -> None:
        self._etcd, self._host = etcd, host

    def get_prefix(self, prefix: str) -> list[tuple[bytes, dict[str, bytes]]]:
        self._etcd.asked.append(self._host)
        self._etcd.prefixes.add(prefix)
        if self._host in self._etcd.down:
            raise ConnectionError(f"{self._host} is down")
        return [(value, {"key": b"k"}) for value in self._etcd.values]


@pytest.fixture
def etcd() -> Etcd:
    return Etcd()


@pytest.fixture
def told() -> list[tuple[str, ...]]:
    return []


@pytest.fixture
def discovery(etcd: Etcd, told: list[tuple[str, ...]]) -> Discovery:
    return Discovery("etcd://one:2379,two:2379/prod", told.append, log, client=etcd.client)


def test_changes_are_told_once_and_in_one_order(discovery: Discovery, etcd: Etcd, told: list[tuple[str, ...]]) -> None:
    etcd.values = [b"b:2", b"a:1", b"a:1"]
    discovery.poll()
    etcd.values.reverse()
    discovery.poll()
    assert told == [("a:1", "b:2")]
    etcd.values = [b"b:2"]
    discovery.poll()
    assert told[1:] == [("b:2",)]
    assert etcd.prefixes == {"/hicache-mooncake/prod/masters/"}


def test_what_is_known_stays_while_etcd_is_away_or_empty(
    discovery: Discovery, etcd: Etcd, told: list[tuple[str, ...]], caplog: pytest.LogCaptureFixture
) -> None:
    etcd.values = [b"a:1"]
    discovery.poll()
    etcd.values = []
    discovery.poll()
    etcd.down = {"one", "two"}
    for _ in range(5):
        discovery.poll()
    assert told == [("a:1",)]
    assert len([r for r in caplog.records if r.levelname == "WARNING"]) == 1, "said once until it is well again"
    etcd.down, etcd.values = set(), [b"a:1", b"b:2"]
    discovery.poll()
    assert told[-1] == ("a:1", "b:2")
    etcd.down = {"one", "two"}
    discovery.poll()
    assert len([r for r in caplog.records if r.levelname == "WARNING"]) == 2


def test_another_server_is_asked_and_stays_the_first(discovery: Discovery, etcd: Etcd, told: list[tuple[str, ...]]) -> None:
    etcd.values = [b"a:1"]
    etcd.down = {"one"}
    discovery.poll()
    assert told == [("a:1",)]
    discovery.poll()
    assert etcd.asked == ["one", "two", "two"]


def test_what_is_no_address_is_left_out(discovery: Discovery, etcd: Etcd, told: list[tuple[str, ...]]) -> None:
    etcd.values = [b"", b"\xff\xfe", b"host", b"host:99999", b"host:0", b"tcp://host:1", b"ok:1", b"[::1]:2"]
    discovery.poll()
    assert told == [("[::1]:2", "ok:1")]


def test_a_thread_polls_until_it_is_closed(etcd: Etcd) -> None:
    news = threading.Event()
    seen: list[tuple[str, ...]] = []

    def found(masters: tuple[str, ...]) -> None:
        seen.append(masters)
        news.set()
        if len(seen) == 1:
            raise RuntimeError("a bug in whoever is told")

    etcd.values = [b"a:1"]
    discovery = Discovery("etcd://one/prod", found, log, poll_s=0.01, client=etcd.client)
    discovery.start()
    assert news.wait(20)
    news.clear()
    etcd.values = [b"b:1"]
    assert news.wait(20), "one bug must not end it"
    discovery.close()
    discovery._thread.join(20)
    assert not discovery._thread.is_alive()
    assert seen == [("a:1",), ("b:1",)]


@pytest.mark.parametrize("url", ["http://host:2379/prod", "etcd:///prod", "etcd://host:x/prod", "etcd://host/a b"])
def test_other_urls_are_refused(url: str, etcd: Etcd) -> None:
    with pytest.raises(ValueError, match=r"etcd|port|cluster"):
        Discovery(url, lambda masters: None, log, client=etcd.client)


def test_a_proxy_of_the_environment_is_not_asked_for_etcd(monkeypatch: pytest.MonkeyPatch, told: list[tuple[str, ...]]) -> None:
    """Hosts behind a proxy have its variables set everywhere."""
    pytest.importorskip("etcd3gw")
    requests = pytest.importorskip("requests")
    monkeypatch.setenv("http_proxy", "http://proxy.invalid:3128")
    monkeypatch.setenv("no_proxy", "")
    proxies: list[object] = []

    def send(session: object, request: object, **options: object) -> object:
        proxies.append(options["proxies"])
        raise requests.ConnectionError("nobody is asked here")

    monkeypatch.setattr(requests.Session, "send", send)
    discovery = Discovery("etcd://etcd.invalid:2379/prod", told.append, log)
    for _ in range(2):
        discovery.poll()
    assert len(proxies) >= 2
    assert not any(proxies)
