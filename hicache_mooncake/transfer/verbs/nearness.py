"""How near each RDMA device is to registered memory, so that a transfer goes by a near one where that is as fast."""

from __future__ import annotations

from collections.abc import Sequence

from hicache_mooncake.transfer import topology
from hicache_mooncake.transfer.numa import System, node_of


class Nearness:
    """Not thread-safe. On hosts with one NUMA node, or with all devices on one, everything is near."""

    def __init__(self, devices: Sequence[str], host: topology.Topology, system: System | None = None) -> None:
        """`devices`: names of those in use."""
        used = [device for device in host.of("rdma") if device.name in devices]
        apart = len(host.nodes) > 1 and len({device.numa_node for device in used}) > 1
        self._factors = {
            node.number: dict(zip([device.name for device in used], topology.nearness(used, node.number, host), strict=True))
            for node in host.nodes
            if apart
        }
        self._system = system or System()
        self._memory: dict[int, tuple[int, dict[str, float]]] = {}

    def registered(self, address: int, length: int) -> None:
        """This memory is pinned now, so where it lies is settled. One that is spread over the nodes is near to all."""
        if not self._factors:
            return
        try:
            node = node_of(0, [(address, length)], self._system)
        except OSError:  # as in many containers; `doctor` tells
            node = None
        self._memory[address] = (length, self._factors.get(node, {}) if node is not None else {})

    def forget(self, address: int) -> None:
        self._memory.pop(address, None)

    def of(self, device: str, address: int) -> float:
        """1 where no device is nearer to the memory at this address, and less else."""
        for start, (length, factors) in self._memory.items():
            if start <= address < start + length:
                return factors.get(device, 1.0)
        return 1.0
