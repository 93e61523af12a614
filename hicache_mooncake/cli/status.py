"""`hicache-mooncake status`: asks a node on its UNIX socket, or a master, and prints the answer."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from hicache_mooncake import protocol
from hicache_mooncake.config import join_address, split_address
from hicache_mooncake.config_values import is_etcd

if TYPE_CHECKING:
    from rich.console import RenderableType

    from hicache_mooncake.security import ClusterKey

TIMEOUT_S = 3.0
_HANDSHAKES = 3
"""So many that fail in a row are no accident."""
_HOST_CHARACTERS = 12


class Unreachable(Exception):
    """Nobody gave a usable answer. The text says what was tried and what to do next."""


# --------------------------------------------------------------------------- asking


def ask_node(socket_path: str, timeout_s: float = TIMEOUT_S) -> tuple[protocol.Welcome, protocol.AdminReport]:
    """The node's greeting and its account of itself. Raises Unreachable."""
    from hicache_mooncake import wire

    deadline = time.monotonic() + timeout_s
    decoder = protocol.decoder(protocol.FromNode)
    hint = "start one with `hicache-mooncake node`, or give its socket with --socket"
    try:
        connection = wire.connect(socket_path, timeout_s)
    except (OSError, wire.WireClosed, wire.WireTimeout) as error:
        raise Unreachable(f"no node answers on {socket_path} ({error}): {hint}") from None
    try:
        client = f"{os.getpid()}:admin:0"
        connection.send(protocol.Hello(protocol.PROTOCOL_MIN, protocol.PROTOCOL_MAX, "admin", client), deadline=deadline)
        welcome = connection.receive(decoder, deadline)
        if not isinstance(welcome, protocol.Welcome):
            raise Unreachable(f"the node on {socket_path} refuses: {_reason(welcome)}")
        connection.send(protocol.AdminStatus(), deadline=deadline)
        report = connection.receive(decoder, deadline)
        if not isinstance(report, protocol.AdminReport):
            raise Unreachable(f"the node on {socket_path} gives no report: {_reason(report)}")
        return welcome, report
    except (OSError, wire.WireClosed, wire.WireTimeout, protocol.ProtocolError) as error:
        raise Unreachable(
            f"the node on {socket_path} took the connection but did not answer properly ({error}): look at its log, restart it"
        ) from None
    finally:
        connection.close()


def ask_master(address: str, timeout_s: float = TIMEOUT_S, key: ClusterKey | None = None) -> protocol.ClusterReport:
    """A master's view of the cluster. `address` is host:port, `key` the cluster's. Raises Unreachable."""
    import zmq

    from hicache_mooncake import security

    host, port = split_address(address)
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.linger = 0
    socket.ipv6 = True
    deadline = time.monotonic() + timeout_s
    watch = security.HandshakeWatch(socket)
    failed = 0
    try:
        security.secure_client(socket, key)
        socket.connect(f"tcp://{join_address(host, port)}")
        socket.send(protocol.encode(protocol.ClusterStatus()))
        while not socket.poll(100):
            failed += watch.failed()
            late = time.monotonic() > deadline
            if failed >= _HANDSHAKES or (failed and late):  # after some kinds of failure ZeroMQ does not try again
                mine = f"the key {key.fingerprint} was offered" if key else "no key was offered: set key_file (--key-file)"
                raise Unreachable(f"{address} turns us away, it has another key, or none, or is no master; {mine}")
            if late:
                raise Unreachable(
                    f"no master answers on {address} in {timeout_s:g} s: start one with `hicache-mooncake master`"
                )
        report = protocol.decoder(protocol.FromMaster).decode(socket.recv())
    except (zmq.ZMQError, msgspec.MsgspecError) as error:
        raise Unreachable(
            f"{address} gives no answer that this version reads ({error}): is it a hicache-mooncake master?"
        ) from None
    finally:
        watch.close()
        socket.close()
        context.term()
    if not isinstance(report, protocol.ClusterReport):
        raise Unreachable(f"the master on {address} gives no report: {_reason(report)}")
    return report


class _Kept(logging.Handler):
    """Keeps what is logged, for a message of our own."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def find_masters(masters: Sequence[str]) -> list[str]:
    """Addresses of these masters, with those that etcd knows where it is named. Raises Unreachable."""
    found: list[str] = []
    for master in masters:
        if not is_etcd(master):
            found.append(master)
            continue
        from hicache_mooncake.discovery import Discovery

        kept, log = _Kept(), logging.Logger("discovery")
        log.addHandler(kept)
        before = len(found)
        try:
            Discovery(master, found.extend, log).poll()
        except ValueError as error:
            raise Unreachable(str(error)) from None
        if len(found) == before:
            raise Unreachable(f"{master} names no master: {'; '.join(kept.lines) or 'nothing is there'}")
    return found


def _reason(message: protocol.Message) -> str:
    return message.reason if isinstance(message, protocol.Refused) else f"answered with {type(message).__name__}"


# --------------------------------------------------------------------------- showing


def human_bytes(size: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def rate(part: float, whole: float) -> str:
    return f"{part / whole:.1%}" if whole else "-"


def _figure(name: str, value: float | str | bool) -> str:
    if name == "pid" or isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    return human_bytes(value) if name.endswith(("_bytes", " bytes")) else f"{value:,.10g}"


_PEER = "peer "
"""Of the names in a node's report under which it says how it reaches each other node."""


def _links_table(report: protocol.AdminReport) -> RenderableType | None:
    """How this node reaches others, where it does not reach all by tcp, and what its transport says of itself."""
    from rich.table import Table

    scheme = str(report.node.get("transport", ""))
    peers = {name.removeprefix(_PEER): value for name, value in report.node.items() if name.startswith(_PEER)}
    own = {name: value for name, value in report.node.items() if scheme and name.startswith(f"{scheme} ")}
    if not peers and not own:
        return None
    table = Table("how other nodes are reached", "", title_justify="left")
    for name, value in peers.items():
        table.add_row(f"node {name}", str(value))
    table.add_section()
    for name, value in own.items():
        table.add_row(name, _figure(name, value))
    return table


def _node_table(report: protocol.AdminReport) -> RenderableType:
    from rich.table import Table

    table = Table("this node", "", title_justify="left")
    figures = report.node
    scheme = str(figures.get("transport", ""))
    for name, value in figures.items():
        if not name.startswith((_PEER, f"{scheme} ")):
            table.add_row(name, _figure(name, value))
    used, capacity = figures.get("used_bytes"), figures.get("capacity_bytes")
    if isinstance(used, int) and isinstance(capacity, int):
        table.add_row("full", rate(used, capacity))
    hits, lookups = figures.get("hit_keys"), figures.get("lookup_keys")
    if isinstance(hits, int) and isinstance(lookups, int):
        table.add_row("hit rate", rate(hits, lookups))
    if "cold_pages" in figures:
        table.add_row("cold tier", _cold_line(figures))
    return table


def _engines_table(report: protocol.AdminReport) -> RenderableType | None:
    from rich.table import Table

    from hicache_mooncake.cli import engines

    found = engines.uses(report.ranks, report.unshared)
    if not found:
        return None
    table = Table(*engines.TITLES, title="engines of this host, in pages", title_justify="left")
    for use in found:
        table.add_row(*use.row())
    return table


def _unshared_lines(unshared: Sequence[protocol.Unshared]) -> list[str]:
    from hicache_mooncake.sharing import sentence

    return [f"not shared: {sentence(pair)}" for pair in unshared]


def _cold_line(figures: Mapping[str, int | float | str | bool]) -> str:
    used, capacity, written = (float(figures.get(f"cold_{name}_bytes", 0)) for name in ("used", "capacity", "written"))
    line = f"{figures['cold_pages']:,} pages, {human_bytes(used)} of {human_bytes(capacity)} used ({rate(used, capacity)})"
    line += f", {human_bytes(written)} written × {figures.get('cold_write_amplification', 1.0)}"
    problem = figures.get("cold_problem")
    return f"{line}; {problem}" if problem else line


def _cluster_table(nodes: Sequence[protocol.NodeInfo], title: str) -> RenderableType:
    from rich.table import Table

    table = Table(
        "node", "address", "host", "state", "used", "capacity", "full", "objects", "keys", "hit rate", "last seen", title=title
    )
    show_host = any(info.host_id for info in nodes)
    for info in nodes:
        table.add_row(
            info.node,
            join_address(info.host, info.port),
            info.host_id[:_HOST_CHARACTERS],
            info.state,
            human_bytes(info.used_bytes),
            human_bytes(info.capacity_bytes),
            rate(info.used_bytes, info.capacity_bytes),
            f"{info.objects:,}",
            f"{info.keys:,}",
            rate(info.hits, info.lookups),
            f"{info.age_s:.1f} s ago",
        )
    if len(nodes) > 1:
        used, capacity = sum(info.used_bytes for info in nodes), sum(info.capacity_bytes for info in nodes)
        table.add_section()
        table.add_row(
            f"{len(nodes)} nodes",
            "",
            f"{len({info.host_id or info.node for info in nodes})} hosts" if show_host else "",
            "",
            human_bytes(used),
            human_bytes(capacity),
            rate(used, capacity),
            f"{sum(info.objects for info in nodes):,}",
            f"{sum(info.keys for info in nodes):,}",
            rate(sum(info.hits for info in nodes), sum(info.lookups for info in nodes)),
            "",
        )
    return table


def _kind(cluster: protocol.ClusterReport) -> str:
    """What sort of master this is, where that is worth a word."""
    words = [f"shard {cluster.shard}/{cluster.shards}"] if cluster.shards > 1 else []
    words += [cluster.role] if cluster.role else []
    words += ["warming: it does not know all keys yet"] if cluster.warming else []
    return "".join(f", {word}" for word in words)


def _shard_trouble(reports: Mapping[str, protocol.ClusterReport]) -> list[str]:
    """Masters that do not divide the keys alike cannot serve one cluster."""
    counts = {address: report.shards for address, report in reports.items()}
    if len(set(counts.values())) < 2:
        return []
    said = ", ".join(f"{address} {count}" for address, count in counts.items())
    return [f"the masters disagree about the number of shards ({said}): start all with the same --shard NUMBER/SHARDS"]


def _engines(report: protocol.AdminReport) -> list[dict[str, object]]:
    from hicache_mooncake.cli import engines

    return [
        {
            "engine": use.label,
            "role": use.role or "both",
            "writer": use.writer,
            "ranks": use.ranks,
            "pages": dict(use.counts),
            "why": engines.explain(use),
        }
        for use in engines.uses(report.ranks, report.unshared)
    ]


def _plain(info: protocol.NodeInfo) -> dict[str, object]:
    return {name: getattr(info, name) for name in info.__struct_fields__}


def run_status(socket_path: str | None, masters: Sequence[str], *, key: ClusterKey | None = None, as_json: bool = False) -> int:
    """Ask and print. Exit status 1 when one of those asked gives no answer; what the others said is printed all the same."""
    from rich.text import Text

    result: dict[str, object] = {}
    shown: list[RenderableType] = []
    problems: list[str] = []
    if socket_path is not None:
        try:
            welcome, report = ask_node(socket_path)
            result["node"] = {"name": welcome.node, "protocol": welcome.version, **report.node}
            result["cluster"] = [_plain(info) for info in report.cluster]
            result["engines"] = _engines(report)
            result["unshared"] = _unshared_lines(report.unshared)
            if not as_json:
                shown.append(_node_table(report))
                links = _links_table(report)
                shown += [links] if links is not None else []
                engines = _engines_table(report)
                shown += [engines] if engines is not None else []
                shown += [Text(line) for line in _unshared_lines(report.unshared)]
                if report.cluster:
                    shown.append(_cluster_table(report.cluster, "cluster, as this node's master sees it"))
        except Unreachable as error:
            problems.append(str(error))
    answers: dict[str, object] = {}
    reports: dict[str, protocol.ClusterReport] = {}
    try:
        addresses = find_masters(masters)
    except Unreachable as error:
        addresses = []
        problems.append(str(error))
    for address in addresses:
        try:
            cluster = reports[address] = ask_master(address, key=key)
            answers[address] = {
                "keys": cluster.keys,
                "protocol": cluster.version,
                "shard": cluster.shard,
                "shards": cluster.shards,
                "role": cluster.role,
                "warming": cluster.warming,
                "masters": cluster.masters,
                "nodes": [_plain(info) for info in cluster.nodes],
                "engines": cluster.engines,
                "unshared": _unshared_lines(cluster.unshared),
            }
            if not as_json:
                title = f"cluster, as {address} sees it: {cluster.keys:,} keys{_kind(cluster)}"
                shown.append(_cluster_table(cluster.nodes, title))
                shown += [Text(line) for line in _unshared_lines(cluster.unshared)]
        except Unreachable as error:
            problems.append(str(error))
    problems += _shard_trouble(reports)
    if masters:
        result["masters"] = answers
    if as_json:
        print(json.dumps(result | ({"problems": problems} if problems else {}), indent=2))
    else:
        from rich.console import Console

        # In a pipe there is no width to keep to.
        console = Console(highlight=False) if sys.stdout.isatty() else Console(highlight=False, width=200)
        for item in shown:
            console.print(item)
    for problem in problems:
        print(f"hicache-mooncake: {problem}", file=sys.stderr)
    return 1 if problems else 0
