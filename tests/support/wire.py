"""A slow wire between two interfaces: whatever comes in at one goes out at the other, later.

    python wire.py DELAY_MS ONE OTHER

The kernel's own (netem) is a module that many machines lack. Frames are handed on as the kernel has
them, up to 64 KB each with their checksums still to be made, so that 1 Gb/s is a tenth of a core.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import sys
import time
from collections import deque

ETH_P_ALL, SOL_PACKET, PACKET_VNET_HDR, PACKET_IGNORE_OUTGOING = 3, 263, 15, 23
SO_RCVBUFFORCE, SO_SNDBUFFORCE = 33, 32
MOST = (1 << 16) + 256  # bytes of a frame, with what the kernel says of it


def tap(interface: str) -> socket.socket:
    """Return a socket that reads what arrives at an interface, and writes what leaves it."""
    end = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_P_ALL))
    end.setsockopt(SOL_PACKET, PACKET_VNET_HDR, struct.pack("i", 1))
    end.setsockopt(SOL_PACKET, PACKET_IGNORE_OUTGOING, struct.pack("i", 1))
    for option in (SO_RCVBUFFORCE, SO_SNDBUFFORCE):
        end.setsockopt(socket.SOL_SOCKET, option, 1 << 26)
    end.bind((interface, 0))
    end.setblocking(False)
    return end


def carry(delay_s: float, one: socket.socket, other: socket.socket) -> None:
    """Hand frames on, for ever."""
    across = {one: other, other: one}
    under_way: deque[tuple[float, socket.socket, bytes]] = deque()  # in the order of due times
    while True:
        wait_s = max(0.0, under_way[0][0] - time.monotonic()) if under_way else None
        ready, _, _ = select.select([one, other], [], [], wait_s)
        now = time.monotonic()
        for end in ready:
            with contextlib.suppress(BlockingIOError):
                for _ in range(64):
                    under_way.append((now + delay_s, across[end], end.recv(MOST)))
        while under_way and under_way[0][0] <= now:
            _, end, frame = under_way.popleft()
            with contextlib.suppress(OSError):  # a link that is down loses what is on it
                end.send(frame)


if __name__ == "__main__":
    carry(float(sys.argv[1]) / 1000, tap(sys.argv[2]), tap(sys.argv[3]))
