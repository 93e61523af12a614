"""`TransferEngine`: move bytes between registered memory of processes, by whatever transport both ends have.

See docs/transfer-engine.md. The store does not use it: its nodes make links of their own over `transport.py`.
"""

from __future__ import annotations

import ctypes
import logging
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, Self

from hicache_mooncake import protocol as p
from hicache_mooncake.backoff import Admission, Breaker
from hicache_mooncake.config_values import is_loopback, split_address
from hicache_mooncake.security import load_key
from hicache_mooncake.transfer import engine_wire as w
from hicache_mooncake.transfer.addresses import is_own
from hicache_mooncake.transfer.engine_agree import agree, answer
from hicache_mooncake.transfer.engine_peer import MAX_REGIONS, Peer, PeerReport, Region
from hicache_mooncake.transfer.mapping import Mapping, create_memfd
from hicache_mooncake.transfer.transport import Transport, TransportError, TransportOptions, open_transport
from hicache_mooncake.wire import Wire

_ALIASES = {"auto": ("shm", "verbs", "tcp"), "rdma": ("verbs", "shm", "tcp")}
_MAX_PEERS = 256
_MAX_NOTICES = 4096
"""Of peers that are gone."""
_MEETING_S = 60.0
_BREAKER_FIRST_S, _BREAKER_MAX_S = 0.5, 8.0
_MAX_TARGETS = 1024
_SAMPLE_BYTES = 32
_log = logging.getLogger("hicache_mooncake.engine")


@dataclass(frozen=True, slots=True)
class EngineReport:
    address: str
    transports: dict[str, str]
    """By scheme: empty where it can be used, else why not."""
    peers: list[PeerReport]


class _Own:
    """What is registered: where, the tokens by scheme, and what keeps the memory."""

    def __init__(self, region: Region, keep: object) -> None:
        self.region, self.keep = region, keep
        self.tokens: dict[str, bytes] = {}
        self.mapping: Mapping | None = None
        self.fd = -1

    def free(self) -> None:
        if self.mapping is not None:
            self.mapping.close()
        if self.fd >= 0:
            os.close(self.fd)


class _Target:
    """An address that was to be connected to."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        """Of what follows: one thread connects."""
        self.breaker = Breaker(_BREAKER_FIRST_S, _BREAKER_MAX_S)
        self.peer: Peer | None = None


class TransferEngine:
    """One process's end. Thread-safe.

    * `name`: what peers know it by.
    * `listen`: host and port, 0 for any free one. `advertise`: the host that `address` names, where `listen` names none.
    * `transports`: schemes in the order in which they are tried with each peer; "auto" stands for shared memory on one host,
      then RDMA verbs, then tcp; "rdma" for the same with RDMA first.
    * `key_file`: the cluster's key (`hicache-mooncake keygen`). Without one only loopback is served and contacted.
    * `without_key`: who is served and contacted without a key: "loopback", the processes of this host by any of its addresses
      ("own host"), or everybody ("anybody"), who may then read and write all that is registered.
    * `anonymous`: memory will be registered that is no mapping of a descriptor. Then shared memory is agreed on only with peers
      that may reach into this process (see docs/transfer-engine.md), and not found out to fail by the first transfer.
    * `unix_socket`: path of the socket for peers on this host, which those in other network namespaces need; by default it
      is an abstract one.

    Raises ValueError for values that make no sense, SecurityError for a key that cannot be used, OSError where it cannot
    listen, and TransportError when none of the transports works on this host.
    """

    def __init__(
        self,
        name: str,
        listen: str = "127.0.0.1:0",
        *,
        transports: Sequence[str] = ("auto",),
        key_file: str = "",
        options: TransportOptions | None = None,
        advertise: str = "",
        unix_socket: str = "",
        without_key: Literal["loopback", "own host", "anybody"] = "loopback",
        anonymous: bool = False,
    ) -> None:
        w.check_name(name)
        self.name = name
        host, _ = split_address(listen)
        key = load_key(key_file)
        self._data_key = key.data_key if key else b""
        self._without_key = without_key
        if key is None and without_key == "loopback" and not is_loopback(host):
            raise ValueError(
                f"listen={listen!r}: without a key only loopback is served, since whoever connects may read and write what is "
                "registered: make a key with `hicache-mooncake keygen FILE` and give key_file=FILE to all engines"
            )
        if host in ("0.0.0.0", "::") and not advertise:
            raise ValueError(f"listen={listen!r} names no host that peers could connect to: give advertise=HOST")
        self._registering = threading.Lock()
        """One at a time, peers told included. Apart from what follows, since it can take long."""
        self._lock = threading.Lock()
        self._own: dict[int, _Own] = {}
        self._peers: list[Peer] = []
        self._meetings: set[Wire] = set()
        self._targets: dict[str, _Target] = {}
        self._late: deque[tuple[Peer, bytes]] = deque(maxlen=_MAX_NOTICES)
        self._closed = False
        self._boot_id = w.boot_id()
        self._sample_bytes = ctypes.create_string_buffer(os.urandom(_SAMPLE_BYTES), _SAMPLE_BYTES)
        self._anonymous = anonymous
        self._transports: dict[str, Transport] = {}
        self._unusable: dict[str, str] = {}
        self._open_transports(list(transports), options or TransportOptions())
        try:
            own_host_only = key is None and without_key == "own host"
            self._door = w.Door(name, listen, unix_socket, self._data_key, self._visited, own_host_only=own_host_only)
        except BaseException:
            for transport in self._transports.values():
                transport.close()
            raise
        self.address = w.join_name(name, advertise or host, self._door.port)
        """To be handed to those who are to connect, in whatever way: `name@host:port`."""

    def _open_transports(self, wanted: list[str], options: TransportOptions) -> None:
        listed = [each for scheme in wanted for each in _ALIASES.get(scheme, (scheme,))]
        self._schemes = list(dict.fromkeys(listed))
        for scheme in self._schemes:
            try:
                self._transports[scheme] = open_transport(scheme, options)
            except TransportError as error:
                self._unusable[scheme] = str(error)
                # That a host has no RDMA device is no news, unless it was asked for.
                _log.log(logging.WARNING if scheme in wanted else logging.INFO, "no transport %s: %s", scheme, error)
        if not self._transports:
            raise TransportError("unavailable", f"no transport works on this host: {self._why_unusable()}")

    def _why_unusable(self) -> str:
        return "; ".join(f"{scheme}: {detail}" for scheme, detail in self._unusable.items()) or "none was asked for"

    # ------------------------------------------------------------------ memory

    def register(
        self,
        memory: Any,
        length: int | None = None,
        *,
        fd: int = -1,
        fd_offset: int = 0,
        name: str = "",
        device: bool = False,
    ) -> Region:
        """Let peers read and write this memory: a writable buffer (bytearray, numpy array, mmap), which is kept alive and in
        its place, or an address and a length, which the caller keeps. `name` is what peers find it by, by default its address.

        `fd`: the descriptor of which it is a mapping, if it is one; it stays the caller's, and open. Peers on this host map
        it, which is faster than the alternative and needs no rights over this process. `device`: the address is one of a GPU or
        the like, so that only transports that can move such memory are used for it.

        Raises TransportError (which limit was met, and what raises it), or ValueError."""
        if isinstance(memory, int):
            if length is None:
                raise ValueError("an address needs a length")
            own = _Own(Region(name or f"{memory:#x}", memory, length), None)
        else:
            view = memoryview(memory)
            if view.readonly or not view.c_contiguous:
                raise ValueError("memory to be registered must be writable and contiguous")
            size = view.nbytes if length is None else length
            if size > view.nbytes:
                raise ValueError(f"a length of {size} in a buffer of {view.nbytes} bytes")
            keep = (ctypes.c_ubyte * view.nbytes).from_buffer(view.cast("B"))
            address = ctypes.addressof(keep)
            own = _Own(Region(name or f"{address:#x}", address, size), keep)
        return self._register(own, fd, fd_offset, device=device)

    def allocate(self, length: int, *, name: str = "", huge: bool = False) -> tuple[Region, memoryview]:
        """New shared memory, registered, full of zeros. It is freed by `unregister` and `close`: the view must not be used
        after. `huge`: of 2 MiB pages, in whole ones. Raises OSError, and what `register` does."""
        fd = create_memfd("hicache-mooncake-engine", length, huge=huge)
        try:
            mapping = Mapping(fd, length, writable=True)
        except OSError:
            os.close(fd)
            raise
        own = _Own(Region(name or f"{mapping.address:#x}", mapping.address, length), None)
        own.mapping, own.fd = mapping, fd
        try:
            return self._register(own, fd, 0), mapping.view
        except BaseException:
            own.free()
            raise

    def _register(self, own: _Own, fd: int, fd_offset: int, *, device: bool = False) -> Region:
        region = own.region
        able = {scheme: each for scheme, each in self._transports.items() if each.device_memory or not device}
        if not able:
            raise TransportError("memory", f"no transport here moves memory of a device: {self._why_unusable()}")
        with self._registering:
            with self._lock:
                self._check_open()
                known = [each.region for each in self._own.values()]
            if len(known) >= MAX_REGIONS:
                raise TransportError("memory", f"{MAX_REGIONS} stretches of memory are registered: register larger ones")
            if any(each.name == region.name or each.address == region.address for each in known):
                raise ValueError(f"memory {region.name!r} at {region.address:#x} is registered already, or another by its name")
            for scheme, transport in able.items():
                try:
                    own.tokens[scheme] = transport.register(region.address, region.length, fd, fd_offset)
                except TransportError as error:
                    if not own.tokens and scheme == list(able)[-1]:
                        raise
                    _log.warning("memory %r cannot be reached over %s: %s", region.name, scheme, error)
            with self._lock:
                self._own[region.address] = own
                peers = list(self._peers)
            for peer in peers:
                share = self._share(own, peer.transport)
                if share is not None:
                    peer.tell(share)
        return region

    def _share(self, own: _Own, scheme: str) -> w.Share | None:
        token = own.tokens.get(scheme)
        if token is None:
            return None
        token = self._transports[scheme].token(own.region.address) or token
        return w.Share(own.region.name, own.region.address, own.region.length, token)

    def unregister(self, region: Region) -> None:
        """No peer reaches this memory any more when this returns. Raises TransportError when a peer does not confirm that: then
        the memory must not be used for anything else until that process has ended. Memory that is not registered is ignored."""
        problem = None
        with self._registering:
            with self._lock:
                own = self._own.pop(region.address, None)
                peers = list(self._peers)
            if own is None:
                return
            for scheme in own.tokens:
                try:
                    self._transports[scheme].unregister(region.address)
                except TransportError as error:
                    problem = error
            for peer in peers:
                peer.tell(w.Unshare(region.address))
        if problem is not None:
            raise problem
        own.free()

    def holds(self, address: int, length: int) -> bool:
        """Whether these bytes lie in one stretch of memory that is registered."""
        with self._lock:
            regions = [own.region for own in self._own.values()]
        return any(each.address <= address and address + length <= each.address + each.length for each in regions)

    # ------------------------------------------------------------------ peers

    @property
    def peers(self) -> list[Peer]:
        """All that this engine has a link to, whoever connected."""
        with self._lock:
            return list(self._peers)

    def connect(self, address: str, deadline: float) -> Peer:
        """The peer at this address, by the first transport that works between the two; the one that there is already, if it is
        alive. What it has registered is in `Peer.regions` when this returns. Raises TransportError, also while a peer that
        failed is left alone for a few seconds, and ValueError for an address that is none."""
        self._check_contact(address)
        with self._lock:
            self._check_open()
            target = self._target(address)
        if not target.lock.acquire(timeout=max(0.0, min(deadline - time.monotonic(), threading.TIMEOUT_MAX))):
            raise TransportError("deadline", f"{address} is being connected to by another thread")
        try:
            if target.peer is not None and target.peer.alive:
                return target.peer
            if target.breaker.admit() is Admission.NO:
                raise TransportError("peer", f"{address} failed a moment ago and is left alone for up to {_BREAKER_MAX_S:g} s")
            try:
                if target.peer is not None:
                    target.peer.close()
                target.peer = self._connect(address, target, deadline)
            except TransportError:
                target.breaker.failed()
                raise
            except BaseException:
                target.breaker.undecided()
                raise
            target.breaker.succeeded()
            return target.peer
        finally:
            target.lock.release()

    def probe(self, address: str, deadline: float) -> None:
        """See that an engine answers at this address, by a connection of its own, which is closed again. If it does, the next
        `connect` tries it at once. Raises TransportError, and ValueError for an address that is none."""
        self._check_contact(address)
        self._meet(address, deadline)[1].close()
        self._tell_breaker(address, Breaker.succeeded)

    def leave_alone(self, address: str) -> None:
        """A transfer with it has failed: `connect` leaves it alone for a while, and so do those who wait for one."""
        self._tell_breaker(address, Breaker.failed)

    def _tell_breaker(self, address: str, what: Callable[[Breaker], None]) -> None:
        """Unless somebody is connecting, who will see by himself."""
        with self._lock:
            target = self._targets.get(address)
        if target is not None and target.lock.acquire(blocking=False):
            try:
                what(target.breaker)
            finally:
                target.lock.release()

    def _check_contact(self, address: str) -> None:
        _, host, _ = w.split_name(address)
        if self._data_key or self._without_key == "anybody" or is_loopback(host):
            return
        if self._without_key == "loopback":
            raise ValueError(f"{address}: without a key only loopback is contacted: give key_file to all engines")
        if not is_own(host):
            raise ValueError(f"{address}: without a key only engines of this host are contacted: give key_file to all engines")

    def _target(self, address: str) -> _Target:
        if address not in self._targets:
            if len(self._targets) >= _MAX_TARGETS:
                idle = [each for each, target in self._targets.items() if target.peer is None and not target.lock.locked()]
                if not idle:
                    raise TransportError("memory", f"{_MAX_TARGETS} peers are connected to: close those that are not needed")
                del self._targets[idle[0]]
            self._targets[address] = _Target()
        return self._targets[address]

    def _meet(self, address: str, deadline: float) -> tuple[w.Dialler, Wire, w.Greeted]:
        """A control connection on which the peer has greeted. Raises TransportError."""
        dialler = w.Dialler(address, self._data_key, self.name)
        try:
            sock = dialler.tcp(deadline)
            wire = Wire(w.unbounded(sock))
        except (OSError, p.ProtocolError) as error:
            reason = "deadline" if isinstance(error, TimeoutError) else "peer"
            raise TransportError(reason, f"engine {address} cannot be reached: {error}") from error
        try:
            greet = w.Greet(w.VERSION, self.name, self._boot_id, list(self._transports), self._sample())
            wire.send(greet, deadline=deadline)
            greeted = wire.receive(w.greeted_decoder, deadline)
            if isinstance(greeted, p.Refused):
                hint = "" if self._data_key else ". This engine has no key: set key_file if the other one has"
                raise TransportError("peer", f"engine {address} refused: {greeted.reason}{hint}")
        except (OSError, p.ProtocolError) as error:
            wire.close()
            raise _broke_off(address, error) from error
        except BaseException:
            wire.close()
            raise
        return dialler, wire, greeted

    def _sample(self) -> w.Sample | None:
        if not self._anonymous:
            return None
        return w.Sample(os.getpid(), ctypes.addressof(self._sample_bytes), self._sample_bytes.raw)

    def _connect(self, address: str, target: _Target, deadline: float) -> Peer:
        dialler, wire, greeted = self._meet(address, deadline)
        try:
            scheme, link, why = agree(
                dialler, address, wire, greeted, self._schemes, self._transports, self._unusable, self._boot_id, deadline
            )
        except (OSError, p.ProtocolError) as error:
            wire.close()
            raise _broke_off(address, error) from error
        except BaseException:
            wire.close()
            raise
        peer = Peer(w.split_name(address)[0], wire, link, scheme, why, self._forget)
        self._begin(peer, target)
        try:
            threading.Thread(target=peer.listen, name="engine-peer", daemon=True).start()
        except RuntimeError as error:
            peer.close()
            wire.close()
            raise TransportError("memory", f"no thread for a peer: {error}; raise the limit of threads (ulimit -u)") from error
        try:
            peer.await_told(deadline)
        except TransportError:
            peer.close()
            raise
        return peer

    def _begin(self, peer: Peer, target: _Target | None) -> None:
        def join() -> list[w.Share]:
            with self._lock:
                self._peers.append(peer)
                if target is not None:
                    target.peer = peer
                shares = [self._share(own, peer.transport) for own in self._own.values()]
            return [share for share in shares if share is not None]

        peer.start(join)

    def _forget(self, peer: Peer) -> None:
        notices = peer.notices()
        with self._lock:
            if peer in self._peers:
                self._peers.remove(peer)
            for target in self._targets.values():
                if target.peer is peer:
                    target.peer = None
            self._late.extend((peer, notice) for notice in notices)

    def _visited(self, sock: socket.socket, greet: w.Greet) -> None:
        """Somebody has connected; on a thread of its own until it is gone."""
        wire = Wire(w.unbounded(sock))
        until = time.monotonic() + _MEETING_S
        with self._lock:
            full = self._closed or len(self._peers) + len(self._meetings) >= _MAX_PEERS
            if not full:
                self._meetings.add(wire)
        try:
            if full:
                wire.send(p.Refused(f"{self.name} has {_MAX_PEERS} peers already, or is closing"), deadline=until)
                raise ConnectionError("refused, with too many peers")
            greeted = w.Greeted(self._boot_id, self._door.socket, list(self._transports), self._sample())
            wire.send(greeted, deadline=until)
            scheme, link = answer(wire, self._door, self._transports, self.name, greet.sample, until)
        except (OSError, p.ProtocolError, TransportError) as error:
            _log.info("engine %s: %s came and left: %s", self.name, greet.name, error)
            with self._lock:
                self._meetings.discard(wire)
            wire.close()
            return
        peer = Peer(greet.name, wire, link, scheme, f"{scheme}: the peer connected by it", self._forget)
        self._begin(peer, None)
        with self._lock:
            self._meetings.discard(wire)
            if self._closed:  # and may not have seen this peer
                peer.end()
        peer.listen()

    # ------------------------------------------------------------------ the rest

    def notices(self) -> list[tuple[str, bytes]]:
        """(peer, message) that peers have told since the last call, each peer's in order. Who is told too much without looking
        loses the peer."""
        return [(peer.name, notice) for peer, notice in self.told()]

    def told(self) -> list[tuple[Peer, bytes]]:
        """The same as `notices`, with the peer itself: several may have one name."""
        with self._lock:
            late = list(self._late)
            self._late.clear()
        return late + [(peer, notice) for peer in self.peers for notice in peer.notices()]

    def fences(self, peer: Peer) -> bool:
        """Whether `Peer.close` keeps its promise: not with engines that cannot recall what they have begun."""
        return self._transports[peer.transport].fences

    def report(self) -> EngineReport:
        usable = dict.fromkeys(self._transports, "")
        return EngineReport(self.address, usable | self._unusable, [peer.report() for peer in self.peers])

    def _check_open(self) -> None:
        if self._closed:
            raise TransportError("closed", f"engine {self.name} was closed")

    def close(self) -> None:
        """Closes all links, and forgets all memory. Raises TransportError when a peer could not be fenced, after all else is
        closed; memory that it allocated is not freed then."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            meetings = list(self._meetings)
        self._door.close()
        for wire in meetings:
            wire.shutdown()
        problem = None
        for peer in self.peers:
            try:
                peer.close()
            except TransportError as error:
                problem = error
        for transport in self._transports.values():
            try:
                transport.close()
            except TransportError as error:
                problem = error
        with self._lock:
            own, self._own = list(self._own.values()), {}
        if problem is not None:
            raise problem
        for each in own:
            each.free()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()


def _broke_off(address: str, error: Exception) -> TransportError:
    return TransportError("deadline" if isinstance(error, TimeoutError) else "peer", f"engine {address} broke off: {error}")
