"""Where the masters are, when etcd knows: a thread that reads their addresses there every second."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

from hicache_mooncake.config_values import join_address, split_address, split_etcd

POLL_S = 1.0
REQUEST_S = 2.0
ROOT = "/hicache-mooncake"


def masters_prefix(cluster: str) -> str:
    """Under this the masters of a cluster register: `SHARD/INCARNATION` -> `host:port`."""
    return f"{ROOT}/{cluster}/masters/"


class Discovery:
    """Reads `etcd://host:2379,host2:2379/CLUSTER` and calls `found` with the addresses of all masters, sorted, on its own
    thread: at first, and whenever they changed. While no etcd server answers, or it knows of no master, what was known stays.

    Raises ValueError for another kind of URL, and when the package for etcd is not installed."""

    def __init__(
        self,
        url: str,
        found: Callable[[tuple[str, ...]], None],
        log: logging.Logger,
        *,
        poll_s: float = POLL_S,
        client: Callable[[str, int], Any] | None = None,
    ) -> None:
        self._servers, cluster = split_etcd(url)
        self._prefix = masters_prefix(cluster)
        self._found = found
        self._log = log
        self._poll_s = poll_s
        self._connect = client or _etcd3gw()
        self._clients: dict[tuple[str, int], Any] = {}
        self._known: tuple[str, ...] = ()
        self._complained = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="discovery", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """End the thread, after a request that is under way; that one is not waited for, and tells nobody anything."""
        self._stop.set()

    def poll(self) -> None:
        """Read once and tell."""
        masters = self._read()
        if masters is None or self._stop.is_set():
            return
        if not masters:
            if not self._complained:
                self._log.warning("etcd knows no master under %s yet (start them with --etcd and this --cluster)", self._prefix)
            self._complained = True
            return
        self._complained = False
        if masters != self._known:
            self._log.info("masters: %s", ", ".join(masters))
            self._known = masters
            self._found(masters)

    def _read(self) -> tuple[str, ...] | None:
        problem = ""
        for host, port in list(self._servers):
            try:
                if (host, port) not in self._clients:
                    self._clients[host, port] = self._connect(host, port)
                values = self._clients[host, port].get_prefix(self._prefix)
                return tuple(sorted({address for value, _ in values if (address := _address(value))}))
            except Exception as error:  # whatever the HTTP library raises
                problem = f"{join_address(host, port)}: {error}"
                self._servers.append(self._servers.pop(0))  # the next one is asked first from now on
        if not self._complained:
            self._log.warning("no etcd server answers (%s): the masters that are known stay", problem)
        self._complained = True
        return None

    def _run(self) -> None:
        while True:
            try:
                self.poll()
            except Exception:
                self._log.exception("looking for masters in etcd failed; trying on")
            if self._stop.wait(self._poll_s):
                return


def _address(value: bytes) -> str:
    """What a master registered, "" when it is no address."""
    try:
        host, port = split_address(value.decode())
    except ValueError:
        return ""
    return join_address(host, port) if port else ""


def _etcd3gw() -> Callable[[str, int], Any]:
    try:
        import etcd3gw
        import requests
    except ImportError as error:
        raise ValueError("masters=etcd://… needs a package more: pip install 'hicache-mooncake[etcd]'") from error

    def client(host: str, port: int) -> Any:
        session = requests.Session()
        session.trust_env = False  # a proxy of the environment is for the internet, and knows no etcd in here
        return etcd3gw.client(host=host, port=port, timeout=REQUEST_S, session=session)

    return client
