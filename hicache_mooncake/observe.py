"""`/metrics` (Prometheus text) and `/health` (JSON) over HTTP, for whatever serves: a node, a master."""

from __future__ import annotations

import json
import socket
import socketserver
import threading
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.registry import Collector

from hicache_mooncake.config_values import join_address, split_address

_TIMEOUT_S = 5.0

Health = Callable[[], tuple[bool, Mapping[str, object]]]
"""Is it well, and what to say about it."""


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def server_bind(self) -> None:
        socketserver.TCPServer.server_bind(self)  # not HTTPServer's: it asks DNS for this host's name, which can take seconds


class _Server6(_Server):
    address_family = socket.AF_INET6


class Observatory:
    """Serves from the moment it is made until `stop()`. Every scrape asks the collector anew, on a thread of its own.

    `listen` is host:port, port 0 for any. Raises ValueError for another form and OSError when the address cannot be bound.
    """

    def __init__(self, listen: str, collector: Collector, health: Health) -> None:
        registry = CollectorRegistry()
        registry.register(collector)

        class Handler(BaseHTTPRequestHandler):
            timeout = _TIMEOUT_S

            def do_GET(self) -> None:
                path = self.path.partition("?")[0]
                if path == "/metrics":
                    self._reply(200, "text/plain; version=0.0.4; charset=utf-8", generate_latest(registry))
                elif path == "/health":
                    well, answer = health()
                    self._reply(200 if well else 503, "application/json", json.dumps(answer).encode())
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

        host, port = split_address(listen)
        self._http = (_Server6 if ":" in host else _Server)((host, port), Handler)
        self.address = join_address(host, int(self._http.server_address[1]))
        self._stopped = False
        threading.Thread(target=self._http.serve_forever, name="metrics", daemon=True).start()

    def stop(self) -> None:
        if not self._stopped:
            self._stopped = True
            self._http.shutdown()
            self._http.server_close()
