"""The peer's side of `make bench`: a client of Redis or Valkey. Argument: the server's port. Lines: as in `pool_script`.

It speaks the protocol itself, so that no package's overhead counts as the server's: a batch is pipelined, values are sent from
the pages and received into them.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Sequence

from benchmarks.pool_script import serve


class Client:
    def __init__(self, port: int) -> None:
        self._sock = socket.create_connection(("127.0.0.1", port))
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._answers = self._sock.makefile("rb", buffering=1 << 16)

    def put(self, keys: Sequence[str], pages: Sequence[memoryview]) -> None:
        for key, page in zip(keys, pages, strict=True):
            head = command_head(b"SET", key.encode(), len(page))
            sent = self._sock.sendmsg([head, page, b"\r\n"])
            if sent < len(head) + len(page) + 2:
                self._sock.sendall(memoryview(b"".join([head, page, b"\r\n"]))[sent:])
        for _ in keys:
            self._expect(b"+OK\r\n")

    def get(self, keys: Sequence[str], pages: Sequence[memoryview]) -> None:
        self._sock.sendall(b"".join(command(b"GET", key.encode()) for key in keys))
        for page in pages:
            self._expect(b"$%d\r\n" % len(page))
            got = 0
            while got < len(page):
                got += self._answers.readinto(page[got:])
            self._expect(b"\r\n")

    def drop(self) -> None:
        self._sock.sendall(command(b"FLUSHALL", b"SYNC"))
        self._expect(b"+OK\r\n")

    def _expect(self, wanted: bytes) -> None:
        if (line := self._answers.readline()) != wanted:
            raise SystemExit(f"the server answered {line!r} and not {wanted!r}")


def command(*words: bytes) -> bytes:
    return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%s\r\n" % (len(word), word) for word in words)


def command_head(name: bytes, key: bytes, size: int) -> bytes:
    """Of a command whose third word, of `size` bytes, and its end follow."""
    return command(name, key).replace(b"*2", b"*3", 1) + b"$%d\r\n" % size


def main() -> None:
    client = Client(int(sys.argv[1]))
    serve(client.put, client.get, client.drop)


if __name__ == "__main__":
    main()
