"""etcd: where nodes find the masters of a cluster, and which master of a shard leads.

A lease of a few seconds keeps `/hicache-mooncake/CLUSTER/masters/SHARD/INCARNATION` -> address, and with it goes
`/hicache-mooncake/CLUSTER/leaders/SHARD`, which the first master of a shard to create it has until its lease ends.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol, TypeVar

from hicache_mooncake.config_values import DEFAULT_CLUSTER, DEFAULT_ETCD_PORT, split_address
from hicache_mooncake.discovery import ROOT, masters_prefix

if TYPE_CHECKING:
    from etcd3gw import Etcd3Client
    from etcd3gw.lease import Lease

_T = TypeVar("_T")

log = logging.getLogger("hicache_master")

TTL_S = 3
RENEWALS_PER_TTL = 4
SAFE_SHARE = 0.9
"""A leader stops to be one when so much of the lease has passed since it asked for its renewal: clocks do not run alike."""
LEADER, FOLLOWER = "leader", "follower"


class ElectionError(ValueError):
    """etcd cannot be used as configured; the text says what to change."""


def leader_key(cluster: str, shard: int) -> str:
    return f"{ROOT}/{cluster}/leaders/{shard}"


class Term:
    """Is this master the leader? Without I/O and without a clock: what etcd answered comes in, with the time of the question.

    etcd keeps a lease at least `ttl_s` from when it was asked for it, so until then nobody else can lead. Not thread-safe.
    """

    def __init__(self, ttl_s: float) -> None:
        self.ttl_s = ttl_s
        self._until = float("-inf")
        self._leads = False

    def renewed(self, asked_at: float) -> None:
        """etcd granted or renewed the lease, and was asked at this time."""
        self._until = max(self._until, asked_at + SAFE_SHARE * self.ttl_s)

    def elected(self, leads: bool) -> None:
        """The leader's key is this master's, and of its present lease; or it is not."""
        self._leads = leads

    def expired(self) -> None:
        """etcd does not know the lease any more, and whatever hung on it is gone."""
        self._until = float("-inf")
        self._leads = False

    def role(self, now: float) -> str:
        return LEADER if self._leads and now < self._until else FOLLOWER


class Etcd(Protocol):
    """What this module needs of etcd. Everything raises on failure."""

    def grant(self, ttl_s: int) -> int:
        """A new lease."""

    def renew(self, lease: int) -> bool:
        """False: there is no such lease any more."""

    def revoke(self, lease: int) -> None: ...

    def put(self, key: str, value: str, lease: int) -> None: ...

    def create(self, key: str, value: str, lease: int) -> bool:
        """False: the key is there already."""

    def get(self, key: str) -> str | None: ...

    def list(self, prefix: str) -> dict[str, str]: ...


class Gateway:
    """etcd through its JSON gateway. Asks its servers in turn, until one answers; raises what the last one gave.

    Raises ElectionError where the library is missing or `servers` cannot be read."""

    def __init__(self, servers: str, timeout_s: float) -> None:
        try:
            import etcd3gw  # noqa: F401
        except ImportError:
            raise ElectionError("--etcd needs the library etcd3gw: pip install 'hicache-mooncake[etcd]'") from None
        self._addresses = parse_servers(servers)
        self._timeout_s = timeout_s
        self._clients: list[Etcd3Client] = [self._client(*address) for address in self._addresses]

    def grant(self, ttl_s: int) -> int:
        return int(self._ask(lambda client: client.lease(ttl_s).id))

    def renew(self, lease: int) -> bool:
        return bool(self._ask(lambda client: _lease(client, lease).refresh() > 0))

    def revoke(self, lease: int) -> None:
        self._ask(lambda client: _lease(client, lease).revoke())

    def put(self, key: str, value: str, lease: int) -> None:
        self._ask(lambda client: client.put(key, value, _lease(client, lease)))

    def create(self, key: str, value: str, lease: int) -> bool:
        return bool(self._ask(lambda client: client.create(key, value, _lease(client, lease))))

    def get(self, key: str) -> str | None:
        values = self._ask(lambda client: client.get(key))
        return values[0].decode() if values else None

    def list(self, prefix: str) -> dict[str, str]:
        found = self._ask(lambda client: client.get_prefix(prefix))
        return {meta["key"].decode(): value.decode() for value, meta in found}

    def close(self) -> None:
        for client in self._clients:
            client.session.close()

    def _client(self, scheme: str, host: str, port: int) -> Etcd3Client:
        import etcd3gw
        import requests

        session = requests.Session()
        session.trust_env = False  # a proxy of the environment is for the internet, and would cost the lease
        return etcd3gw.client(host=host, port=port, protocol=scheme, timeout=self._timeout_s, session=session)

    def _ask(self, what: Callable[[Etcd3Client], _T]) -> _T:
        for _ in range(len(self._clients) - 1):
            try:
                return what(self._clients[0])
            except Exception:  # the next server may answer: whatever this one has
                self._clients.append(self._clients.pop(0))
        return what(self._clients[0])


def _lease(client: Etcd3Client, lease: int) -> Lease:
    from etcd3gw.lease import Lease

    return Lease(lease, client)


def parse_servers(servers: str) -> list[tuple[str, str, int]]:
    """`http://host:2379,https://host2`, scheme and port optional, as (scheme, host, port). Raises ElectionError."""
    found = []
    for text in filter(None, (part.strip().rstrip("/") for part in servers.split(","))):
        scheme, _, address = text.rpartition("://")
        try:
            host, port = split_address(address, DEFAULT_ETCD_PORT)
        except ValueError as error:
            raise ElectionError(f"--etcd {servers!r}: {error}") from None
        if scheme not in ("", "etcd", "http", "https") or not port:
            raise ElectionError(f"--etcd {servers!r}: write http://host:2379, several separated by commas")
        found.append(("https" if scheme == "https" else "http", host, port))
    if not found:
        raise ElectionError(f"--etcd {servers!r} names no server: write http://host:2379")
    return found


class Candidate:
    """One master's entry in etcd, kept by `step`; without threads and without a clock. Raises what `etcd` raises; the next
    `step` goes on from there. Not thread-safe."""

    def __init__(self, etcd: Etcd, cluster: str, shard: int, incarnation: bytes, address: str, ttl_s: int = TTL_S) -> None:
        self.term = Term(ttl_s)
        self.masters: list[str] = []
        """Addresses of all masters of the cluster, of every shard, when etcd was last asked."""
        self._etcd = etcd
        self._cluster = cluster
        self._name = incarnation.hex()
        self._key = f"{masters_prefix(cluster)}{shard}/{self._name}"
        self._leader_key = leader_key(cluster, shard)
        self._address = address
        self._lease: int | None = None

    def step(self, clock: Callable[[], float]) -> None:
        """Renew the lease or get one, be listed, and lead if nobody does."""
        asked_at = clock()
        if self._lease is not None and not self._etcd.renew(self._lease):
            self._lease = None
            self.term.expired()
            asked_at = clock()
        if self._lease is None:
            self._lease = self._etcd.grant(int(self.term.ttl_s))
        self.term.renewed(asked_at)
        listed = self._etcd.list(masters_prefix(self._cluster))
        if listed.get(self._key) != self._address:
            self._etcd.put(self._key, self._address, self._lease)
            listed[self._key] = self._address
        self.masters = sorted(set(listed.values()))
        leader = self._etcd.get(self._leader_key)
        if leader is None and self._etcd.create(self._leader_key, self._name, self._lease):
            leader = self._name
        self.term.elected(leader == self._name)

    def resign(self) -> None:
        """Off the list at once, and free for another to lead."""
        lease, self._lease = self._lease, None
        self.term.expired()
        if lease is not None:
            self._etcd.revoke(lease)


class Election:
    """Runs a Candidate on a thread of its own from `start` to `close`. While etcd is away the master serves on, as a follower
    when its lease may have ended. `role` and `masters` from any thread."""

    def __init__(self, servers: str, cluster: str, shard: int, incarnation: bytes, address: str, *, ttl_s: int = TTL_S) -> None:
        self._pause_s = ttl_s / RENEWALS_PER_TTL
        self._gateway = Gateway(servers, self._pause_s)
        self._candidate = Candidate(self._gateway, cluster or DEFAULT_CLUSTER, shard, incarnation, address, ttl_s)
        self._servers = servers
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="election", daemon=True)
        self.problem = ""
        """Why etcd cannot be used at the moment."""

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Leave the list. Waits for etcd for a few seconds at most."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join()
        with contextlib.suppress(Exception):  # without etcd the lease ends by itself
            self._candidate.resign()
        self._gateway.close()

    @property
    def masters(self) -> Sequence[str]:
        return self._candidate.masters

    def role(self, now: float) -> str:
        return self._candidate.term.role(now)

    def _run(self) -> None:
        role = FOLLOWER
        while not self._stopping.is_set():
            try:
                self._candidate.step(time.monotonic)
                if self.problem:
                    log.info("etcd at %s answers again", self._servers)
                self.problem = ""
            except Exception as error:  # whatever HTTP and a foreign server can raise: the master serves without
                if not self.problem:
                    log.warning(
                        "etcd at %s cannot be used: nodes that look for masters there do not see this one; trying on (%s)",
                        self._servers,
                        error,
                    )
                self.problem = f"{type(error).__name__}: {error}"[:300]
            now_role = self._candidate.term.role(time.monotonic())
            if now_role != role:
                log.info("this master is now %s of its shard", "the leader" if now_role == LEADER else "a follower")
                role = now_role
            self._stopping.wait(self._pause_s)
