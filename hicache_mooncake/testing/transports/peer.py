"""The process of a `ProcessPeer`: one end of one link, told what to do by lines of JSON.

    python -m hicache_mooncake.testing.transports.peer SCHEME LENGTH CONTROL MEMORY CHANNEL...

where the last ones are descriptors. It registers LENGTH bytes of MEMORY, accepts the link, and says where they lie.
"""

from __future__ import annotations

import json
import socket
import sys
import threading
import time
from typing import Any

from hicache_mooncake.transfer.mapping import Mapping
from hicache_mooncake.transfer.transport import Link, Piece, TransportError, TransportOptions, open_transport

_LONG = 60.0


def _pieces(command: dict[str, Any], start: int) -> list[Piece]:
    return [Piece(start + local, remote, length) for local, remote, length in command["pieces"]]


def _loop(link: Link, command: dict[str, Any], start: int) -> None:
    try:
        while True:
            link.submit(command["op"], _pieces(command, start), time.monotonic() + _LONG).wait()
    except TransportError:
        return


def _do(link: Link, command: dict[str, Any], start: int) -> dict[str, Any]:
    match command["do"]:
        case "learn":
            link.learn(command["address"], command["length"], bytes.fromhex(command["token"]))
        case "loop":
            threading.Thread(target=_loop, args=(link, command, start), daemon=True).start()
        case "move":
            try:
                link.submit(command["op"], _pieces(command, start), time.monotonic() + command["seconds"]).wait()
            except TransportError as error:
                return {"reason": error.reason}
        case "alive":
            return {"alive": link.alive}
        case unknown:
            return {"broken": f"no command {unknown}"}
    return {}


def main() -> None:
    scheme, length = sys.argv[1], int(sys.argv[2])
    control_fd, memory_fd, *channels = map(int, sys.argv[3:])
    control = socket.socket(fileno=control_fd)
    memory = Mapping(memory_fd, length, writable=True)
    transport = open_transport(scheme, TransportOptions())
    token = transport.register(memory.address, length, memory_fd)
    link = transport.accept([socket.socket(fileno=fd) for fd in channels], time.monotonic() + _LONG)
    with control, control.makefile("rwb") as lines:
        answer: dict[str, Any] = {"address": memory.address, "token": token.hex()}
        while True:
            lines.write(json.dumps(answer).encode() + b"\n")
            lines.flush()
            line = lines.readline()
            if not line:
                return
            answer = _do(link, json.loads(line), memory.address)


if __name__ == "__main__":
    main()
