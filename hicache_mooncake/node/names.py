"""Names of hosts, resolved anew at each connection, on threads of their own: name servers that hang hold up nobody else."""

from __future__ import annotations

import ipaddress
import socket
import threading
from collections.abc import Callable

from hicache_mooncake.config_values import join_address, split_address

PATIENCE_S = 0.2

Resolver = Callable[[str, int], str]
"""From a host's name and port to its address. Raises OSError, and may take as long as it likes."""


def resolve(host: str, port: int) -> str:
    """The first IPv4 address of a host, or the first one where it has none of those."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return str(min(found, key=lambda entry: entry[0] != socket.AF_INET)[4][0])


class _Query:
    def __init__(self) -> None:
        self.done = threading.Event()
        self.address = ""
        self.problem = ""


class Names:
    """Maps `host:port` to `address:port`. For any thread; a call takes at most PATIENCE_S.

    Raises OSError for a name that has no address, and for one whose name server takes its time: what that answers later is what
    the next call gets. ValueError for what is no host:port."""

    def __init__(self, resolver: Resolver = resolve) -> None:
        self._resolver = resolver
        self._lock = threading.Lock()
        self._queries: dict[str, _Query] = {}
        """Those that nobody has had the answer of."""
        self._last: dict[str, str] = {}
        self._looking: set[str] = set()

    def __call__(self, master: str) -> str:
        host, port = split_address(master)
        if _is_address(host):
            return master
        with self._lock:
            query = self._queries.get(host)
            if query is None:
                query = self._queries[host] = _Query()
                threading.Thread(target=self._run, args=(query, host, port), name="resolver", daemon=True).start()
        if not query.done.wait(PATIENCE_S):
            raise OSError(f"the name server does not answer for {host}")
        with self._lock:
            if self._queries.get(host) is query:
                del self._queries[host]
        if query.problem:
            raise OSError(query.problem)
        self._last[host] = query.address
        return join_address(query.address, port)

    def known(self, master: str) -> str:
        """The same for whoever has no time: the last address of a name, while a newer one is looked for beside. Only a name
        that never had one takes as long as a call."""
        host, port = split_address(master)
        if _is_address(host):
            return master
        address = self._last.get(host)
        if address is None:
            return self(master)
        with self._lock:
            start = host not in self._looking
            self._looking.add(host)
        if start:
            threading.Thread(target=self._look, args=(host, port), name="resolver", daemon=True).start()
        return join_address(address, port)

    def _look(self, host: str, port: int) -> None:
        try:
            self._last[host] = self._resolver(host, port)
        except (OSError, ValueError):
            pass  # what was known is the best there is
        finally:
            with self._lock:
                self._looking.discard(host)

    def _run(self, query: _Query, host: str, port: int) -> None:
        try:
            query.address = self._resolver(host, port)
        except OSError as error:
            query.problem = f"{host}: {error.strerror or error}"
        except Exception as error:  # such as a name that no encoding of names can have
            query.problem = f"{host}: {error}"
        query.done.set()


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return True
