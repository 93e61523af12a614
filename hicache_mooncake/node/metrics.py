"""The node's `/metrics` (Prometheus text) and `/health` (JSON)."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from hicache_mooncake.config_values import join_address, split_address

if TYPE_CHECKING:
    from hicache_mooncake.node.service import Node

_GAUGES = {
    "capacity_bytes": "Bytes of the segment.",
    "used_bytes": "Bytes allocated, objects and pages being written.",
    "pinned_bytes": "Bytes that readers hold.",
    "objects": "Objects held.",
    "namespaces": "Namespaces with at least one object.",
    "connections": "Ranks and movers connected.",
    "remote_readers": "Connections of other hosts' movers.",
    "uptime_s": "Seconds since start.",
}
_COUNTERS = {
    "lookup_keys": "Keys asked for by ranks.",
    "hit_keys": "Keys asked for and held here.",
    "loaded": "Objects read, by ranks of this host and by other hosts.",
    "loaded_bytes": "Bytes of the objects read.",
    "stored": "Objects stored.",
    "stored_bytes": "Bytes of the objects stored.",
    "had": "Stores of objects that were here already: nothing copied.",
    "evicted": "Objects evicted.",
    "evicted_bytes": "Bytes evicted.",
    "refused": "Stores refused for want of room: everything is pinned, or the object is larger than the segment.",
    "discarded": "Objects dropped because their bytes failed the checksum.",
    "abandoned": "Objects whose writer died or gave up before the commit.",
    "expired_pins": "Pins that ended by their expiry and not by their reader.",
    "pin_limit": "Reads turned into misses because too much of the segment was pinned.",
    "wrong_length": "Objects found with another length than asked for: misses.",
    "connections_refused": "Connections refused: protocol version or too many.",
    "remote_sent_pages": "Pages sent to other hosts.",
    "remote_sent_bytes": "Bytes of pages sent to other hosts.",
    "remote_failed_readers": "Other hosts' connections that failed.",
    "remote_refused_readers": "Other hosts' connections refused: too many.",
}


class NodeMetrics(Collector):  # type: ignore[misc]
    """Reads the node's report at scrape time; nothing is counted twice."""

    def __init__(self, node: Node) -> None:
        self._node = node

    def collect(self) -> Iterable[Metric]:
        report = self._node.report()
        for name, text in _GAUGES.items():
            yield GaugeMetricFamily(f"hicache_node_{name}", text, value=float(report[name]))
        for name, text in _COUNTERS.items():
            yield CounterMetricFamily(f"hicache_node_{name}", text, value=float(report[name]))
        missed = CounterMetricFamily(
            "hicache_node_client_misses", "Pages that ranks of this host did not get or store.", labels=["reason"]
        )
        with self._node.lock:
            reasons = dict(self._node.missed)
        for reason, count in sorted(reasons.items()):
            missed.add_metric([reason], float(count))
        yield missed
        info = GaugeMetricFamily("hicache_node_info", "Who this is.", labels=["node", "incarnation", "version", "master"])
        info.add_metric([str(report[name]) for name in ("name", "incarnation", "version", "master")], 1.0)
        yield info

    def health(self) -> dict[str, int | float | str | bool]:
        report = self._node.report()
        return {"status": "ok", "node": report["name"], "master": report["master"], "objects": report["objects"]}


class _Server(ThreadingHTTPServer):
    daemon_threads = True


def serve_metrics(address: str, metrics: NodeMetrics) -> tuple[str, Callable[[], None]]:
    """Serve on `host:port` (0: any port). Returns the bound address and a function that stops it. Raises OSError."""
    registry = CollectorRegistry()
    registry.register(metrics)

    class Handler(BaseHTTPRequestHandler):
        timeout = 5

        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            if path == "/metrics":
                self._reply(200, "text/plain; version=0.0.4; charset=utf-8", generate_latest(registry))
            elif path == "/health":
                self._reply(200, "application/json", json.dumps(metrics.health()).encode())
            else:
                self._reply(404, "text/plain", b"/metrics or /health\n")

        def _reply(self, status: int, kind: str, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    host, port = split_address(address)
    kind = type("Server", (_Server,), {"address_family": socket.AF_INET6 if ":" in host else socket.AF_INET})
    server = kind((host, port), Handler)
    threading.Thread(target=server.serve_forever, name="metrics", daemon=True).start()

    def stop() -> None:
        server.shutdown()
        server.server_close()

    bound_host, bound_port = server.server_address[:2]
    return join_address(str(bound_host), int(bound_port)), stop
