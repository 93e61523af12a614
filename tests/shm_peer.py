"""A process at the other end of a link through shared memory, for tests: `python shm_peer.py SOCKET memfd|heap`.

It registers memory full of `FILL` and connects; over the link it tells its address and token, and is told what to do:
`write ADDRESS LENGTH TOKEN` writes 0xff there again and again, from all of its memory, until the link ends.
"""

from __future__ import annotations

import ctypes
import socket
import sys
import time

from hicache_mooncake.transfer.mapping import Mapping, create_memfd
from hicache_mooncake.transfer.shm import ShmTransport
from hicache_mooncake.transfer.transport import Piece, TransportError, TransportOptions

LENGTH = 8 << 20
FILL = 0xA5
PATIENCE_S = 60.0


def main() -> None:
    channel = socket.socket(socket.AF_UNIX)
    channel.connect(sys.argv[1])
    transport = ShmTransport(TransportOptions())
    if sys.argv[2] == "memfd":
        fd = create_memfd("peer", LENGTH)
        mapping = Mapping(fd, LENGTH, writable=True)
        address = mapping.address
    else:
        fd = -1
        heap = ctypes.create_string_buffer(LENGTH)
        address = ctypes.addressof(heap)
    ctypes.memset(address, FILL, LENGTH)
    token = transport.register(address, LENGTH, fd)
    link = transport.connect([channel], time.monotonic() + PATIENCE_S)
    link.notify(f"{address} {token.hex()}".encode(), time.monotonic() + PATIENCE_S)
    while link.alive:
        for order in link.notices():
            verb, at, length, peer_token = order.decode().split()
            assert verb == "write"
            link.learn(int(at), int(length), bytes.fromhex(peer_token))
            ctypes.memset(address, 0xFF, LENGTH)
            try:
                while True:
                    link.submit("write", [Piece(address, int(at), int(length))], time.monotonic() + PATIENCE_S).wait()
            except TransportError:
                break
        time.sleep(0.01)
    link.close()
    transport.close()


if __name__ == "__main__":
    main()
