"""The transport over RDMA verbs: devices of this host, memory registered on them, and links over queue pairs.

One thread carries all links on; it starts with the first. All links share a lock, under which no peer is waited for.
"""

from __future__ import annotations

import contextlib
import ipaddress
import itertools
import logging
import socket
import threading
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import ClassVar

from hicache_mooncake.transfer import addresses, gids, topology
from hicache_mooncake.transfer.transport import Extents, Link, Transport, TransportError, TransportOptions
from hicache_mooncake.transfer.verbs.api import Binding, BindingUnavailable, Device, DeviceInfo, VerbsError
from hicache_mooncake.transfer.verbs.bindings import load_binding
from hicache_mooncake.transfer.verbs.fair_lock import FairLock
from hicache_mooncake.transfer.verbs.handshake import MAX_PORTS
from hicache_mooncake.transfer.verbs.link import VerbsLink
from hicache_mooncake.transfer.verbs.nearness import Nearness
from hicache_mooncake.transfer.verbs.pairing import LocalPort
from hicache_mooncake.transfer.verbs.progress import Progress
from hicache_mooncake.transfer.verbs.rails import Network, Port
from hicache_mooncake.transfer.verbs.registration import Part, Registration, register
from hicache_mooncake.transfer.verbs.slices import Lookup

log = logging.getLogger(__name__)

_MAX_RAILS_SHOWN = 16
LOOK_AGAIN_S = 60.0
"""How often ports that cannot be used are looked at again."""
_REPORT_S = 1.0
_MOST_REOPENED = 8
"""Devices that were opened anew; what is left of their former selves stays until the end."""
_numbers = itertools.count(1)


class VerbsTransport(Transport):
    """See the module. Raises TransportError where no port can be used: `unavailable` where nothing can be done here and now,
    `device` where what the operator named is not as it must be. Thread-safe."""

    scheme: ClassVar[str] = "verbs"
    device_memory: ClassVar[bool] = True

    def __init__(
        self,
        options: TransportOptions,
        binding: Binding | None = None,
        host: topology.Topology | None = None,
        networks: Mapping[str, str] | None = None,
    ) -> None:
        """`binding`: not the one that the options name. `host`: another one than this; `networks`: its own, by address."""
        self._options = options
        self._binding = binding or _load(options.verbs_binding)
        self.lock = FairLock()
        self.extents = Extents()
        self._devices: dict[str, Device] = {}
        self._former: list[Device] = []
        """Open, but gone: their queue pairs are those of links that do not know it yet."""
        self._registrations: dict[int, Registration] = {}
        self._links: set[VerbsLink] = set()
        self._past: dict[str, tuple[int, int]] = {}
        """Bytes and failures of links that are over, by port."""
        self._closed = False
        self._networks = _networks() if networks is None else networks
        self._look_at = time.monotonic() + LOOK_AGAIN_S
        self._looking = False
        self._incomplete = False
        """There are ports that were not usable when they were last looked at."""
        self._ports = self._open_ports()
        self._host = host or topology.read()
        self._nearness = Nearness([at.port.device for at in self._ports], self._host)
        self.progress = Progress(f"verbs {next(_numbers)}", self._turn)

    @property
    def ports(self) -> Sequence[LocalPort]:
        return self._ports

    # ------------------------------------------------------------------ the contract

    def register(self, address: int, length: int, fd: int = -1, fd_offset: int = 0) -> bytes:
        with self.lock:
            self._check_open()
            devices = dict(self._devices)
        made = register(devices, address, length)
        for name, problem in made.problems.items():
            log.warning("%s is not used for %d bytes at %#x: %s", name, length, address, problem)
        with self.lock:
            try:
                self._check_open()
                self.extents.add(address, length, made.token)
            except TransportError:
                _let_go(made)
                raise
            former = self._registrations.get(address)
            self._registrations[address] = made
            self._nearness.registered(address, length)
        if former is not None:
            _let_go(former)
        return made.token

    def token(self, address: int) -> bytes:
        with self.lock:
            registration = self._registrations.get(address)
        return registration.token if registration is not None else b""

    def unregister(self, address: int) -> None:
        with self.lock:
            self.extents.remove(address)
            self._nearness.forget(address)
            registration = self._registrations.pop(address, None)
        if registration is not None:
            _let_go(registration)

    def connect(self, channels: Sequence[socket.socket], deadline: float) -> Link:
        return self._begin(channels, deadline, connected=True)

    def accept(self, channels: Sequence[socket.socket], deadline: float) -> Link:
        return self._begin(channels, deadline, connected=False)

    def close(self) -> None:
        with self.lock:
            if self._closed:
                return
            self._closed = True
            links = list(self._links)
        failed: TransportError | None = None
        for link in links:
            try:
                link.close()
            except TransportError as error:
                failed = error
        self.progress.close()
        with self.lock:
            registrations, self._registrations = list(self._registrations.values()), {}
            devices, self._devices = [*self._devices.values(), *self._former], {}
            for registration in registrations:
                self.extents.remove(registration.address)
                with contextlib.suppress(VerbsError):  # the device's close tries again
                    registration.close()
        for device in devices:
            try:
                device.close()
            except VerbsError as error:
                failed = failed or TransportError("device", f"{device.info.name} cannot be closed: {error.reason}")
        if failed is not None:
            raise failed

    def report(self) -> dict[str, int | float | str | bool]:
        """For each port its GID, its state, how many rails are up and how many are not, what they moved and how often they
        failed since the transport was made, and the rate of the fastest; of rails that are not up some by name. Nothing of that
        while a driver hangs."""
        if not self.lock.acquire(_REPORT_S):
            return {"binding": self._binding.name, "problem": f"no answer within {_REPORT_S:g} s: a driver may hang"}
        try:
            links = list(self._links)
            rails = [rail for link in links for rail in link.report()]
            found: dict[str, int | float | str | bool] = {"binding": self._binding.name, "links": len(links)}
            for at in self._ports:
                here = [rail for rail in rails if rail.here == at.port.name]
                past_bytes, past_failures = self._past.get(at.port.name, (0, 0))
                found |= {
                    f"{at.port.name} gid": f"{at.gid_index} {at.port.gid}",
                    f"{at.port.name} state": _state(at),
                    f"{at.port.name} rails": sum(rail.state == "up" for rail in here),
                    f"{at.port.name} rails not up": sum(rail.state != "up" for rail in here),
                    f"{at.port.name} bytes": past_bytes + sum(rail.bytes for rail in here),
                    f"{at.port.name} bytes_per_s": max((rail.bytes_per_s for rail in here), default=0.0),
                    f"{at.port.name} failures": past_failures + sum(rail.failures for rail in here),
                }
            bad = [rail for rail in rails if rail.state != "up"]
            return found | {f"rail {rail.here} to {rail.there} of {rail.peer}": rail.state for rail in bad[:_MAX_RAILS_SHOWN]}
        finally:
            self.lock.release()

    # ------------------------------------------------------------------ for links

    def local(self, device: str) -> Lookup:
        def find(address: int) -> Part:
            start, length, _ = self.extents.find(address, 1)
            table = self._registrations[start].tables.get(device)
            if table is None:
                raise TransportError("bounds", f"{length} bytes at {start:#x} are not registered on {device}")
            return table.part(address)

        return find

    def near(self, device: str, address: int) -> float:
        return self._nearness.of(device, address)

    def forget(self, link: VerbsLink) -> None:
        self._links.discard(link)
        for rail in link.report():
            moved, failures = self._past.get(rail.here, (0, 0))
            self._past[rail.here] = moved + rail.bytes, failures + rail.failures

    def _begin(self, channels: Sequence[socket.socket], deadline: float, *, connected: bool) -> Link:
        self._look_again()
        if not channels:
            raise TransportError("peer", "the peer offers no channel: a verbs link needs one")
        for spare in channels[1:]:
            spare.close()
        link = VerbsLink(self, channels[0], connected=connected, max_in_flight=self._options.max_in_flight)
        with self.lock:
            if self._closed:
                channels[0].close()
                raise TransportError("closed", "the transport is closed")
            self._links.add(link)
        link.begin(deadline)
        return link

    def _turn(self) -> float | None:
        self._look_again()
        with self.lock:
            links = list(self._links)
        first: float | None = None
        for link in links:
            at = link.tick(time.monotonic())  # under the lock, but not for all at once: others want it, too
            if at is not None and (first is None or at < first):
                first = at
        return None if first is None else first - time.monotonic()

    def _check_open(self) -> None:
        if self._closed:
            raise TransportError("closed", "the transport is closed")

    # ------------------------------------------------------------------ devices

    def _open_ports(self) -> list[LocalPort]:
        infos = {info.name: info for info in self._binding.devices()}
        if not infos:
            raise TransportError(
                "unavailable",
                f"there is no RDMA device on this host ({self._binding.name} sees none): a card, its driver and "
                "/dev/infiniband are needed",
            )
        wanted = _wanted(self._options.devices)
        chosen: list[LocalPort] = []
        problems: list[str] = []
        try:
            for name, numbers in (wanted or dict.fromkeys(infos, frozenset())).items():
                if name not in infos:
                    raise TransportError("device", f"there is no RDMA device {name!r}. There are: {_listed(infos.values())}")
                usable = self._usable_ports(infos[name], numbers, problems, self._devices)
                if wanted and len(usable) < max(len(numbers), 1):
                    raise TransportError("device", "; ".join(problems) + ". Correct rdma_devices, or leave it out")
                chosen += usable
            if not chosen:
                raise TransportError("unavailable", "no RDMA port can be used: " + "; ".join(problems))
        except TransportError:
            for device in self._devices.values():
                with contextlib.suppress(VerbsError):
                    device.close()
            raise
        for problem in problems:
            log.info("%s", problem)
        self._incomplete = bool(problems)
        return chosen[:MAX_PORTS]

    def _usable_ports(
        self,
        info: DeviceInfo,
        numbers: frozenset[int],
        problems: list[str],
        devices: dict[str, Device],
        used: Collection[str] = (),
    ) -> list[LocalPort]:
        """Of the ports with these numbers, or of all, those that are not `used` yet. `devices`: those that are open; others are
        opened and added."""
        if info.problem:
            problems.append(f"{info.name} cannot be opened: {info.problem}")
            return []
        for number in sorted(numbers - {port.number for port in info.ports}):
            problems.append(f"{info.name} has no port {number}. There are: {_listed([info])}")
        usable = []
        for port in info.ports:
            if (numbers and port.number not in numbers) or f"{info.name}:{port.number}" in used:
                continue
            if port.state != "ACTIVE":
                problems.append(
                    f"{info.name} port {port.number} is {port.state}, not ACTIVE. GID table: {gids.table(port.gids)}"
                )
                continue
            try:
                choice = gids.choose(info.name, port, self._options.gid_index)
                if info.name not in devices:
                    devices[info.name] = self._binding.open(info.name)
            except gids.GidError as error:
                problems.append(str(error))
                continue
            except VerbsError as error:
                problems.append(f"{info.name} cannot be opened: {error.reason}")
                continue
            log.info("%s port %d: GID %d, %s", info.name, port.number, choice.index, choice.why)
            if choice.warning:
                log.warning("%s port %d: GID %d: %s", info.name, port.number, choice.index, choice.warning)
            known = Port(info.name, port.number, port.link_layer, choice.gid, port.lid, port.active_mtu)
            usable.append(LocalPort(devices[info.name], known, choice.index, self._network(choice)))
        return usable

    # ------------------------------------------------------------------ ports that come up later

    def _look_again(self) -> None:
        """At ports that could not be used, now and then: on a thread of its own, since memory is registered there."""
        with self.lock:
            now = time.monotonic()
            if self._closed or self._looking or now < self._look_at:
                return
            self._looking, self._look_at = True, now + LOOK_AGAIN_S
        try:
            threading.Thread(target=self._look, name="verbs look", daemon=True).start()
        except RuntimeError:  # no more threads: later
            self._looking = False

    def _look(self) -> None:
        try:
            gone = {at.port.device for at in self._ports if _gone(at)}
            if len(self._former) + len(gone) > _MOST_REOPENED:
                gone = set()
            if gone or self._incomplete:
                self._take_in(gone)
        except (VerbsError, TransportError) as error:
            log.info("RDMA ports that could not be used cannot be looked at again: %s", error)
        except Exception:
            log.exception("looking for RDMA ports that have come up failed. Please report this")
        finally:
            self._looking = False

    def _take_in(self, gone: set[str]) -> None:
        """Use the ports that can be used now, for links that are made from now on. Devices that are `gone` are opened anew."""
        wanted = _wanted(self._options.devices)
        used = {at.port.name for at in self._ports if at.port.device not in gone}
        kept = {name: device for name, device in self._devices.items() if name not in gone}
        problems: list[str] = []
        for info in self._binding.devices():
            if wanted and info.name not in wanted:
                continue
            open_ = dict(kept)
            fresh = self._usable_ports(info, wanted.get(info.name, frozenset()), problems, open_, used)
            if fresh:
                self._begin_to_use(info.name, fresh, open_[info.name])
        self._incomplete = bool(problems)

    def _begin_to_use(self, name: str, fresh: list[LocalPort], device: Device) -> None:
        with self.lock:
            if self._closed:
                memory = None
            else:
                former = self._devices.get(name)
                if former is not None and former is not device:
                    self._former.append(former)
                self._devices[name] = device
                memory = list(self._registrations.values()) if former is not device else []
        if memory is None:
            device.close()
            return
        for registration in memory:
            try:
                made = register({name: device}, registration.address, registration.length)
            except TransportError as error:
                log.warning("%s is not used for %d bytes at %#x: %s", name, registration.length, registration.address, error)
                continue
            with self.lock:
                current = not self._closed and self._registrations.get(registration.address) is registration
                if current:
                    whole = registration.joined(made)
                    self._registrations[registration.address] = whole
                    self.extents.add(whole.address, whole.length, whole.token)
            if not current:
                _let_go(made)
        with self.lock:
            if self._closed:
                return
            numbers = {at.port.name: number for number, at in enumerate(self._ports)}
            ports = list(self._ports)
            for at in fresh:
                if at.port.name in numbers:
                    ports[numbers[at.port.name]] = at
                else:
                    ports.append(at)
            self._ports = ports[:MAX_PORTS]
            self._nearness = Nearness([at.port.device for at in self._ports], self._host)
            for registration in self._registrations.values():
                self._nearness.registered(registration.address, registration.length)
        for at in fresh:
            log.info("%s has come up: links that are made from now on use it", at.port.name)

    def _network(self, choice: gids.Choice) -> Network | None:
        if choice.family not in ("IPv4", "IPv6"):
            return None
        found = self._networks.get(str(gids.address(choice.gid)))
        return ipaddress.ip_network(found) if found else None


def _networks() -> dict[str, str]:
    """The network of each address of this host."""
    try:
        return {row.address: row.network for row in addresses.table() if row.network}
    except addresses.AddressError as error:
        log.info("which RDMA ports are on one network is not known: %s", error)
        return {}


def _gone(at: LocalPort) -> bool:
    """Its device was pulled out or reset: an open one stays dead then."""
    try:
        at.device.port(at.port.number)
    except VerbsError:
        return True
    return False


def _state(at: LocalPort) -> str:
    try:
        return at.device.port(at.port.number).state
    except VerbsError as error:
        return error.reason


def _load(name: str) -> Binding:
    try:
        return load_binding(name)
    except BindingUnavailable as error:
        raise TransportError("unavailable", error.reason) from error


def _wanted(devices: Sequence[str]) -> dict[str, frozenset[int]]:
    """The ports of each device that are to be used; none named is all. Raises TransportError."""
    wanted: dict[str, frozenset[int]] = {}
    for text in devices:
        name, colon, number = text.partition(":")
        if colon and not number.isdecimal():
            raise TransportError(
                "device", f"{text!r} is no RDMA device: write name or name:port, as in mlx5_0:1 (rdma_devices)"
            )
        wanted[name] = wanted.get(name, frozenset()) | ({int(number)} if colon else frozenset())
    return {name: frozenset() if name in devices else numbers for name, numbers in wanted.items()}


def _listed(infos: Iterable[DeviceInfo]) -> str:
    return "; ".join(
        f"{info.name} port {port.number} {port.state}, GID table: {gids.table(port.gids)}"
        for info in infos
        for port in info.ports
    )


def _let_go(registration: Registration) -> None:
    try:
        registration.close()
    except VerbsError as error:
        where = f"{registration.length} bytes at {registration.address:#x}"
        raise TransportError("memory", f"{where} cannot be unregistered, do not free them: {error.reason}") from error
