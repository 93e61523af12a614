"""Hosts as network namespaces on one switch, and what goes wrong between them. Needs root and the `ip` and `tc` commands."""

from __future__ import annotations

import ctypes
import itertools
import os
import shutil
import subprocess
import threading
from collections.abc import Callable

_CLONE_NEWNET = 0x40000000
_numbers = itertools.count(1)


class NoNetwork(Exception):
    """This machine does not allow network namespaces; the message says why."""


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise NoNetwork(f"ip {' '.join(arguments)}: {done.stderr.strip()}")


class Network:
    """A switch and the hosts on it, 10.77.0.0/24, apart from every other network. Use it as a context manager.

    Raises NoNetwork, with nothing left behind, where this cannot be had."""

    def __init__(self) -> None:
        if os.geteuid() or not shutil.which("ip") or not shutil.which("tc"):
            raise NoNetwork("needs root, ip and tc")
        self.prefix = f"hm{os.getpid()}x{next(_numbers)}"
        self.switch = f"{self.prefix}-sw"
        self.hosts: dict[str, Host] = {}
        _ip("netns", "add", self.switch)
        try:
            for bridge in ("br0", "br1"):
                _ip("-n", self.switch, "link", "add", bridge, "type", "bridge")
                _ip("-n", self.switch, "link", "set", bridge, "up")
        except NoNetwork:
            self.close()
            raise

    def host(self, name: str) -> Host:
        self.hosts[name] = Host(self, name, f"10.77.0.{len(self.hosts) + 1}")
        return self.hosts[name]

    def heal(self) -> None:
        """Nothing is cut, lost or slow any more."""
        for host in self.hosts.values():
            host.connect()
            if host.unheard:
                host.reaches(*host.unheard)
            if host.rate:
                host.throttle("")

    def close(self) -> None:
        for namespace in [*(host.namespace for host in self.hosts.values()), self.switch]:
            subprocess.run(["ip", "netns", "del", namespace], capture_output=True, check=False)

    def __enter__(self) -> Network:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Host:
    """One namespace, with one cable to the switch."""

    def __init__(self, network: Network, name: str, address: str) -> None:
        self.name, self.address = name, address
        self.namespace = f"{network.prefix}-{name}"
        self.prefix = ("ip", "netns", "exec", self.namespace)
        """What a command is started under to run on this host."""
        self.unheard: list[Host] = []
        self.rate = ""
        self._switch, self._port = network.switch, f"p-{name}"
        _ip("netns", "add", self.namespace)
        _ip("-n", self.namespace, "link", "set", "lo", "up")
        peer = ("peer", "name", self._port, "netns", network.switch)
        _ip("link", "add", "cable", "netns", self.namespace, "type", "veth", *peer)
        _ip("-n", self.namespace, "addr", "add", f"{address}/24", "dev", "cable")
        _ip("-n", self.namespace, "link", "set", "cable", "up")
        _ip("-n", network.switch, "link", "set", self._port, "up")
        self.connect()

    def run(self, work: Callable[[], None]) -> None:
        """Run it on a thread that is on this host: its sockets are, and so are threads and processes that it starts. What it
        raises is raised here."""
        failed: list[BaseException] = []

        def on_host() -> None:
            try:
                fd = os.open(f"/run/netns/{self.namespace}", os.O_RDONLY)
                try:
                    if ctypes.CDLL(None, use_errno=True).setns(fd, _CLONE_NEWNET):
                        raise OSError(ctypes.get_errno(), "setns")
                finally:
                    os.close(fd)
                work()
            except BaseException as error:
                failed.append(error)

        thread = threading.Thread(target=on_host, name=f"on-{self.name}", daemon=True)
        thread.start()
        thread.join()
        if failed:
            raise failed[0]

    def disconnect(self) -> None:
        """Nothing reaches this host and nothing comes from it, and nobody is told."""
        _ip("-n", self._switch, "link", "set", self._port, "nomaster")

    def connect(self, side: int = 0) -> None:
        """To the others of this side (0 or 1): between the two sides nothing passes."""
        _ip("-n", self._switch, "link", "set", self._port, "master", f"br{side}")

    def mute_towards(self, *others: Host) -> None:
        """What this host sends to these is lost. What they send arrives."""
        for other in others:
            _ip("-n", self.namespace, "route", "add", "blackhole", f"{other.address}/32")
            self.unheard.append(other)

    def reaches(self, *others: Host) -> None:
        for other in others:
            _ip("-n", self.namespace, "route", "del", "blackhole", f"{other.address}/32")
            self.unheard.remove(other)

    def throttle(self, rate: str) -> None:
        """What this host sends is sent at this rate (`4mbit`); empty: as fast as it goes."""
        what = ("add", "dev", "cable", "root", "tbf", "rate", rate, "burst", "32k", "latency", "200ms")
        command = [*self.prefix, "tc", "qdisc", *(what if rate else ("del", "dev", "cable", "root"))]
        subprocess.run(command, check=True, capture_output=True)
        self.rate = rate
