"""What `doctor` says of how pages travel between hosts: RDMA packages and devices, GIDs, locked memory, topology, TLS, and
which transport will be used.

Nothing is registered and nothing connected. Devices are asked through the same code that the node uses.
"""

from __future__ import annotations

import ctypes
import mmap
import resource
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path

from hicache_mooncake.cli.checks import FAIL, OK, SKIPPED, WARN, Check, guarded
from hicache_mooncake.cli.status import Unreachable, ask_node, human_bytes
from hicache_mooncake.config import Settings, is_loopback, join_address, split_address
from hicache_mooncake.config_values import is_remote_master
from hicache_mooncake.transfer import addresses, gids, numa, topology
from hicache_mooncake.transfer.tls import Tls, TlsError
from hicache_mooncake.transfer.transport import Transport, TransportError, TransportOptions, open_transport
from hicache_mooncake.transfer.verbs.api import Binding, BindingUnavailable, DeviceInfo, PortInfo, VerbsError
from hicache_mooncake.transfer.verbs.bindings import load_binding

BINDINGS = ("ibverbs", "pyverbs")
INSTALL = "pip install hicache-mooncake[verbs], or the distribution's python3-pyverbs"
MEMLOCK = (
    "ulimit -l unlimited in the shell that starts the node, LimitMEMLOCK=infinity in its systemd unit, --ulimit memlock=-1 for "
    "docker, or the capability IPC_LOCK"
)
_CAP_IPC_LOCK = 14
_EXPIRES_SOON_S = 14 * 86_400


def examine(
    settings: Settings,
    root: str | Path = "/sys",
    load: Callable[[str], Binding] = load_binding,
    open_: Callable[[str, TransportOptions], Transport] = open_transport,
) -> list[Check]:
    """All of it, in reading order. `root`, `load` and `open_` are other ones in tests."""
    found = topology.read(root)
    wanted = settings.transport != "tcp" and not settings.tls_cert
    infos, packages = bindings(settings, bool(found.of("rdma")), wanted, load)
    return [
        packages,
        *devices(settings, infos, found, wanted),
        memlock(settings, len(_in_use(settings, infos)) if wanted else 0),
        guarded("NUMA", lambda: placement(settings, found)),
        guarded("topology", lambda: near_and_far(settings, found)),
        guarded("data port", lambda: data_port(settings)),
        guarded("TLS", lambda: tls(settings)),
        guarded("pages of other hosts", lambda: verdict(settings, open_)),
    ]


# --------------------------------------------------------------------------- RDMA


def bindings(
    settings: Settings, has_devices: bool, wanted: bool, load: Callable[[str], Binding]
) -> tuple[list[DeviceInfo], Check]:
    """Which packages speak to RDMA devices, and the devices that the one in use sees."""
    name = "RDMA packages"
    words, reasons = [], []
    for package in BINDINGS:
        try:
            load(package)
            words.append(f"{package} works")
        except BindingUnavailable as error:
            words.append(f"{package} does not")
            reasons.append(error.reason)
    found = f"{', '.join(words)}; verbs_binding={settings.verbs_binding}"
    try:
        used = load(settings.verbs_binding)
        infos = used.devices()
    except (BindingUnavailable, VerbsError) as error:
        status = WARN if wanted and (has_devices or settings.transport == "verbs") else OK
        return [], Check(name, status, f"{found}: {error.reason}", INSTALL if status == WARN else "")
    return infos, Check(name, OK, f"{found}: {used.name} is used" + (f" ({'; '.join(reasons)})" if reasons else ""))


def _wanted_ports(settings: Settings) -> dict[str, set[int]]:
    """Ports of the devices that the operator named; none named is all of them."""
    wanted: dict[str, set[int]] = {}
    for text in settings.rdma_devices:
        device, _, port = text.partition(":")
        ports = wanted.setdefault(device, set())
        if port:
            ports.add(int(port))
    return wanted


def _in_use(settings: Settings, infos: Sequence[DeviceInfo]) -> list[DeviceInfo]:
    wanted = _wanted_ports(settings)
    return [
        info for info in infos if (not wanted or info.name in wanted) and any(port.state == "ACTIVE" for port in info.ports)
    ]


def devices(settings: Settings, infos: Sequence[DeviceInfo], found: topology.Topology, wanted: bool) -> list[Check]:
    """One finding a device, and one for each that was named and is not there."""
    named = _wanted_ports(settings)
    known = {device.name: device for device in found.of("rdma")}
    checks = [_device(settings, info, known.get(info.name), named.get(info.name), wanted) for info in infos]
    checks += [
        Check(
            f"RDMA {device.name}",
            WARN if wanted else OK,
            f"{_ports_of(device)}; the system shows it, and no package speaks to it",
            INSTALL if wanted else "",
        )
        for device in known.values()
        if device.name not in {info.name for info in infos}
    ]
    there = sorted(set(known) | {info.name for info in infos})
    for name in named:
        if name not in there:
            seen = "; ".join(_listed(info) for info in infos) or ", ".join(there) or "none"
            source = settings.sources.get("rdma_devices", "default")
            checks.append(
                Check(f"RDMA {name}", FAIL, f"there is no such device. There are: {seen}", f"correct rdma_devices ({source})")
            )
    if not checks:
        status = WARN if settings.transport == "verbs" else OK
        return [Check("RDMA", status, "no devices: pages go by shared memory on a host and by TCP between hosts")]
    return checks


def _ports_of(device: topology.Device) -> str:
    return (
        ", ".join(f"port {port.number} {port.state} {port.link_layer} {port.rate}".strip() for port in device.ports)
        or "no port"
    )


def _listed(info: DeviceInfo) -> str:
    ports = (f"port {port.number} {port.state}, GID table: {gids.table(port.gids)}" for port in info.ports)
    return f"{info.name} " + (", ".join(ports) or info.problem)


def _device(settings: Settings, info: DeviceInfo, known: topology.Device | None, ports: set[int] | None, wanted: bool) -> Check:
    name = f"RDMA {info.name}"
    if info.problem:
        status = FAIL if ports is not None else WARN if wanted else OK
        advice = "the user needs /dev/infiniband/uverbs*: group rdma, or --device /dev/infiniband for docker"
        return Check(name, status, f"cannot be opened: {info.problem}", advice)
    if settings.rdma_devices and ports is None:
        return Check(name, OK, f"{_listed(info)}; not used: rdma_devices names others")
    words, advices, good, named_bad = [], [], 0, False
    for port in info.ports:
        is_named = ports is not None and (not ports or port.number in ports)
        if ports and port.number not in ports:
            continue
        text, advice, usable = _port(settings, info.name, port)
        words.append(text)
        advices += [advice] if advice else []
        good += usable
        named_bad = named_bad or (is_named and not usable)
    for missing in sorted((ports or set()) - {port.number for port in info.ports}):
        named_bad = True
        words.append(f"there is no port {missing}, only {', '.join(str(port.number) for port in info.ports) or 'none'}")
    if known is not None and known.numa_node >= 0:
        words.append(f"NUMA node {known.numa_node}")
    status = OK
    if wanted and (not good or advices):
        status = FAIL if named_bad else WARN
    return Check(name, status, "; ".join(words), "; ".join(dict.fromkeys(advices)))


def _port(settings: Settings, device: str, port: PortInfo) -> tuple[str, str, bool]:
    """(what it is, what to do, can it be used)."""
    text = f"port {port.number} {port.state}, {port.link_layer}"
    if port.state != "ACTIVE":
        advice = "check cable and switch; on InfiniBand a subnet manager must run" if port.state != "ARMED" else "wait"
        return f"{text}, GID table: {gids.table(port.gids)}", advice, False
    try:
        choice = gids.choose(device, port, settings.gid_index)
    except gids.GidError as error:
        return f"{text}, no GID can be used", str(error), False
    return f"{text}, MTU {port.active_mtu}, GID {choice.index}: {choice.why}", choice.warning, True


def memlock(settings: Settings, devices_in_use: int) -> Check:
    """Is the process's limit of locked memory enough? Every device counts the pool anew."""
    name = "locked memory"
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return Check(name, OK, "unlimited")
    if _may_lock_all():
        return Check(name, OK, f"limit {human_bytes(soft)}, which does not bind this user (CAP_IPC_LOCK)")
    if not devices_in_use:
        return Check(name, OK, f"limit {human_bytes(soft)}; only RDMA would need more")
    if settings.node != "embedded":
        return Check(name, SKIPPED, f"limit {human_bytes(soft)} here; what counts is that of the node, which runs by itself")
    need = settings.dram_bytes * devices_in_use
    found = f"limit {human_bytes(soft)}; RDMA locks {human_bytes(need)} ({devices_in_use} devices, each all of dram)"
    if need > soft:
        return Check(name, WARN, f"{found}: tcp would be used", MEMLOCK)
    return Check(name, OK, found)


def _may_lock_all() -> bool:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) >> _CAP_IPC_LOCK & 1)
    return False


# --------------------------------------------------------------------------- what is near what


def placement(settings: Settings, found: topology.Topology, system: numa.System | None = None) -> Check:
    """NUMA nodes, and whether memory and movers can be placed on them."""
    name = "NUMA"
    if len(found.nodes) < 2:
        return Check(name, OK, "one node: nothing to place")
    parts = [
        f"node {node.number}: {len(node.cpus)} processors" + ("" if node.has_memory else ", no memory") for node in found.nodes
    ]
    text = "; ".join(parts)
    if settings.numa == "off":
        source = settings.sources.get("numa", "default")
        return Check(name, WARN, f"{text}; numa=off ({source}): movers and memory may be far from each other", "unset numa")
    system = system or numa.System()
    nodes = numa.spread(found.nodes, system.memory_nodes())
    if not nodes:
        return Check(name, OK, f"{text}; this process may use one of them: nothing to place")
    with mmap.mmap(-1, mmap.PAGESIZE) as page:
        page[0] = 1
        at = ctypes.c_char.from_buffer(page)
        try:
            system.nodes_of_pages(0, [ctypes.addressof(at)])
            system.interleave_memory(ctypes.addressof(at), mmap.PAGESIZE, nodes)
        except OSError as error:
            advice = "allow move_pages and mbind: in a container --cap-add SYS_NICE, or a seccomp profile with them"
            return Check(name, WARN, f"{text}; memory cannot be placed ({error.strerror})", advice)
        finally:
            del at
    return Check(name, OK, f"{text}; movers run beside the engine's memory, the node's is spread over all")


def near_and_far(settings: Settings, found: topology.Topology) -> Check:
    """The matrix, and who uses which NIC."""
    name = "topology"
    used = _up_and_wanted(settings, found)
    table = tuple(tuple(row) for row in topology.matrix(found))
    if not table:
        return Check(name, OK, "no RDMA device and no GPU is seen")
    gpus = found.of("gpu")
    text = f"{len(gpus)} GPUs, {len(used)} of {len(found.of('rdma'))} RDMA devices in use"
    if not used:
        return Check(name, OK, text, table=table)
    if gpus:
        shares = topology.share(used, gpus, found)
        near = {gpu.name: share for gpu, share in zip(gpus, shares, strict=True)}
    else:
        near = {f"NUMA node {node.number}": topology.nearest(used, node.number, found) for node in found.nodes if node.cpus}
    text += "".join(f"; {user}: {' '.join(device.name for device in share)}" for user, share in near.items())
    if len(found.nodes) < 2:
        return Check(name, OK, text, table=table)
    bare = [node.number for node in found.nodes if node.cpus and not any(device.numa_node == node.number for device in used)]
    unknown = [device.name for device in used if device.numa_node < 0]
    if unknown:
        advice = "expect it on any; in a virtual machine, have the hypervisor pass its NUMA node on"
        return Check(name, WARN, f"{text}; of {', '.join(unknown)} the NUMA node is not known", advice, table)
    if bare:
        listed = ", ".join(map(str, bare))
        advice = (
            "bytes of memory there cross the link between the processors: use a NIC of that node, or run engines on the other"
        )
        return Check(name, WARN, f"{text}; NUMA node {listed} has no NIC of its own", advice, table)
    return Check(name, OK, text, table=table)


def _up_and_wanted(settings: Settings, found: topology.Topology) -> list[topology.Device]:
    wanted = _wanted_ports(settings)
    return [
        device
        for device in found.of("rdma")
        if (not wanted or device.name in wanted) and any(port.state == "ACTIVE" for port in device.ports)
    ]


# --------------------------------------------------------------------------- tcp


def data_port(settings: Settings) -> Check:
    """Where a node of these settings would listen, and what it would tell others."""
    name = "data port"
    if settings.node != "embedded":
        return Check(name, SKIPPED, "the node runs by itself and has its own")
    host, port = split_address(settings.listen)
    listens = f"listens on {settings.listen} ({settings.sources.get('listen', 'default')})"
    try:
        told, told_port = addresses.advertised(settings, host, port)
    except addresses.AddressError as error:
        return Check(name, FAIL, str(error), "the node would not start")
    where = join_address(told, told_port) if told_port else f"{told}, with the port that it gets"
    if settings.masters and is_loopback(told) and any(is_remote_master(master) for master in settings.masters):
        advice = "set interface, or advertise"
        return Check(name, WARN, f"{listens}, advertises {where}, which other hosts cannot reach", advice)
    return Check(
        name, OK, f"{listens}, advertises {where}" if settings.masters else f"{listens}; no master: nobody is told of it"
    )


# --------------------------------------------------------------------------- TLS


def tls(settings: Settings) -> Check:
    name = "TLS"
    if not settings.tls_cert:
        return Check(name, OK, "off: page bytes between hosts travel in the clear")
    if settings.node != "embedded":
        return Check(name, SKIPPED, "the node has the files; engines get what they need from it")
    try:
        loaded = Tls.load(settings.tls_cert, settings.tls_key, settings.tls_ca)
        assert loaded is not None
        left_s = loaded.check() - time.time()
    except TlsError as error:
        return Check(name, FAIL, str(error), "the node would not start")
    found = f"{settings.tls_cert} is signed by {settings.tls_ca} and valid for {left_s / 86_400:.0f} days"
    if left_s < _EXPIRES_SOON_S:
        return Check(name, WARN, found, "renew it and restart the node: afterwards no other node will take it")
    return Check(name, OK, found)


# --------------------------------------------------------------------------- all in one line


def verdict(settings: Settings, open_: Callable[[str, TransportOptions], Transport]) -> Check:
    """Which transport will be used for other hosts, and why."""
    name = "pages of other hosts"
    running = _running(settings)
    if running is not None:
        return running
    if settings.tls_cert:
        return Check(name, OK, "tcp with TLS: RDMA would carry the bytes in the clear")
    if settings.transport == "tcp":
        return Check(name, OK, f"tcp: transport=tcp ({settings.sources.get('transport', 'default')})")
    scheme = "verbs" if settings.transport == "auto" else settings.transport
    options = TransportOptions(
        devices=settings.rdma_devices, gid_index=settings.gid_index, verbs_binding=settings.verbs_binding
    )
    try:
        with closing(open_(scheme, options)) as transport:
            using = ", ".join(f"{key} {value}" for key, value in transport.report().items() if key.endswith("gid"))
    except TransportError as error:
        if settings.transport == "auto":
            return Check(name, OK, f"tcp: {error}")
        return Check(
            name, FAIL, f"tcp, although transport={settings.transport} is asked for: {error}", "correct it, or unset it"
        )
    return Check(name, OK, f"{scheme} with nodes that have it too ({using or 'ready'}), else tcp")


def _running(settings: Settings) -> Check | None:
    """What a node says that serves here already."""
    try:
        _, report = ask_node(settings.socket)
    except Unreachable:
        return None
    used = report.node.get("transport")
    if used is None:
        return None
    why = str(report.node.get("transport_why") or "")
    links = report.node.get("links", 0)
    found = f"the node that runs uses {used}" + (f": {why}" if why else f", {links} links stand") + "; `status` shows each peer"
    forced = settings.transport not in ("auto", "tcp") and used == "tcp"
    return Check("pages of other hosts", WARN if forced else OK, found)
