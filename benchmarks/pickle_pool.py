"""A peer of `make bench`: a dict behind pickles over TCP, which is what one would write in an hour.

Arguments: a port, and `serve` for the server. Else a client; lines: as in `pool_script`. Each message is a pickle behind its
length, and a batch is one message each way.
"""

from __future__ import annotations

import pickle
import socket
import sys
from collections.abc import Sequence
from typing import Any, BinaryIO

from benchmarks.pool_script import serve


def send(stream: BinaryIO, message: object) -> None:
    body = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    stream.write(len(body).to_bytes(8, "little"))
    stream.write(body)
    stream.flush()


def receive(stream: BinaryIO) -> Any:
    """None at the end."""
    head = stream.read(8)
    return pickle.loads(stream.read(int.from_bytes(head, "little"))) if head else None


def serve_dict(port: int) -> None:
    kept: dict[str, bytes] = {}
    with socket.create_server(("127.0.0.1", port)) as listener:
        while True:
            sock, _ = listener.accept()
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with sock, sock.makefile("rwb") as stream:
                while request := receive(stream):
                    op, content = request
                    if op == "put":
                        kept.update(content)
                    elif op == "drop":
                        kept.clear()
                    send(stream, [kept.get(key) for key in content] if op == "get" else len(kept))


class Client:
    def __init__(self, port: int) -> None:
        sock = socket.create_connection(("127.0.0.1", port))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._stream = sock.makefile("rwb")

    def put(self, keys: Sequence[str], pages: Sequence[memoryview]) -> None:
        held = self._ask("put", {key: bytes(page) for key, page in zip(keys, pages, strict=True)})
        if held != len(keys):
            raise SystemExit(f"the dict has {held} of {len(keys)} pages")

    def get(self, keys: Sequence[str], pages: Sequence[memoryview]) -> None:
        for page, body in zip(pages, self._ask("get", list(keys)), strict=True):
            page[:] = body

    def drop(self) -> None:
        self._ask("drop", None)

    def _ask(self, op: str, content: object) -> Any:
        send(self._stream, (op, content))
        return receive(self._stream)


def main() -> None:
    port = int(sys.argv[1])
    if sys.argv[2:] == ["serve"]:
        serve_dict(port)
    client = Client(port)
    serve(client.put, client.get, client.drop)


if __name__ == "__main__":
    main()
