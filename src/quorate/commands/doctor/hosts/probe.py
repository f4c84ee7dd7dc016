"""Probes of the network between two hosts: the latency and the throughput.

Plain TCP on any free port, like gloo and NCCL: a network that admits the probes admits both.
"""

from __future__ import annotations

import socket
import statistics
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple

PINGS = 20
SECONDS = 0.5  # time of sending, in each direction
LIMIT_S = 5.0  # longest silence of a host
_PING, _TAKE, _GIVE = b"p", b"t", b"g"
_CHUNK = bytes(1 << 18)


class PathSpeed(NamedTuple):
    """The measured network between this host and another."""

    ms: float  # round trip
    mbit_per_s: float
    back_mbit_per_s: float
    ahead_ms: float  # lead of the other host's clock


class ProbeServer:
    """A server for the probes of other hosts, in a separate thread. Call ``close`` at the end.

    Args:
        address: the address of this host to listen on.
        word: a secret of the probes; 16 characters.

    Raises:
        OSError: listening on the address is not possible.
    """

    def __init__(self, address: str, word: str) -> None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._server = socket.create_server((address, 0), family=family)
        self.port: int = self._server.getsockname()[1]
        self._word = word.encode()
        self._thread = threading.Thread(target=self._run, name="quorate-doctor", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening."""
        with suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        self._thread.join(LIMIT_S)

    def _run(self) -> None:
        while True:
            try:
                asker, _ = self._server.accept()
            except OSError:  # the listener was closed
                return
            # A probe that breaks off does not affect the next probe.
            with asker, suppress(OSError, struct.error):
                asker.settimeout(LIMIT_S)
                if _exactly(asker, len(self._word)) == self._word:
                    self._answer(asker)

    def _answer(self, asker: socket.socket) -> None:
        asker.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while what := asker.recv(1):
            if what == _PING:
                asker.sendall(struct.pack("<d", time.time()))
            elif what == _TAKE:
                asker.sendall(struct.pack("<d", _taken(asker)))
            elif what == _GIVE:
                _give(asker)
                return


def measure(address: str, port: int, word: str) -> PathSpeed:
    """Return the measured network between this host and a listener's. Takes about a second.

    Raises:
        OSError: the listener cannot be reached.
    """
    with _asking(address, port, word) as asked:
        pings = [_ping(asked) for _ in range(PINGS)]
        asked.sendall(_TAKE)
        _give(asked)
        (there,) = struct.unpack("<d", _exactly(asked, 8))
    with _asking(address, port, word) as asked:
        asked.sendall(_GIVE)
        back = _taken(asked)
    _, ahead_s = min(pings)  # of the shortest ping: the least disturbed
    return PathSpeed(1000 * statistics.median(s for s, _ in pings), there, back, 1000 * ahead_s)


@contextmanager
def _asking(address: str, port: int, word: str) -> Iterator[socket.socket]:
    with socket.create_connection((address, port), LIMIT_S) as asked:
        asked.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        asked.sendall(word.encode())
        yield asked


def _ping(asked: socket.socket) -> tuple[float, float]:
    """Return the time of an answer, and how far the peer's clock is ahead, in seconds."""
    begun, at = time.perf_counter(), time.time()
    asked.sendall(_PING)
    (there,) = struct.unpack("<d", _exactly(asked, 8))
    took = time.perf_counter() - begun
    return took, there - (at + took / 2)


def _give(taker: socket.socket) -> None:
    """Send data for some time, then stop."""
    deadline = time.perf_counter() + SECONDS
    while time.perf_counter() < deadline:
        taker.sendall(_CHUNK)
    taker.shutdown(socket.SHUT_WR)


def _taken(giver: socket.socket) -> float:
    """Return the received Mbit per second, up to the last byte."""
    room = bytearray(1 << 20)
    size, begun = giver.recv_into(room), time.perf_counter()
    total = 0
    while size:
        size = giver.recv_into(room)
        total += size
    return 8e-6 * total / max(time.perf_counter() - begun, 1e-9)


def _exactly(giver: socket.socket, size: int) -> bytes:
    found = b""
    while len(found) < size:
        if not (more := giver.recv(size - len(found))):
            raise ConnectionResetError("it was closed")
        found += more
    return found
