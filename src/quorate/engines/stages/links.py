"""Links: what the processes of a replica send each other, over a socket for each pair of them.

A link carries parcels (``data/parcel``): what is large lies in memory without a name, whose
descriptor travels. Each process has a thread per link that reads whatever comes: so a sender is
never held up by one that sends to it meanwhile, and a device computes while values are on their
way. How much may wait is bounded by the schedule, not by the link.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Hashable, Mapping
from contextlib import suppress
from typing import Any

from quorate.data.parcel import pack, unpack
from quorate.engines.stages.arrivals import Arrivals, GoneError

__all__ = ["GoneError", "Links"]


class Links(Arrivals):
    """One process's ends, by the number of the process at the other end.

    One thread sends; one thread receives. Closed ends of others are found when something is
    received.
    """

    def __init__(self, ends: Mapping[int, socket.socket]) -> None:
        super().__init__()
        self._ends = dict(ends)
        self._readers: list[threading.Thread] = []
        try:
            for number, end in self._ends.items():
                name = f"quorate-link-{number}"
                reader = threading.Thread(
                    target=self._read, args=(number, end), name=name, daemon=True
                )
                reader.start()
                self._readers.append(reader)
        except BaseException:  # there is no room for a thread
            self.close()
            raise

    def send(self, to: int, key: Hashable, value: Any) -> None:
        """Send a value. Blocks until it is on its way; one to a process that is gone is lost.

        Raises:
            TypeError: it cannot be sent.
        """
        with suppress(OSError):
            pack(self._ends[to], (key, value))

    def close(self) -> None:
        """Close all ends; threads that read end by it."""
        for end in self._ends.values():
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        for reader in self._readers:
            reader.join()
        for end in self._ends.values():
            end.close()

    def _read(self, number: int, end: socket.socket) -> None:
        try:
            while True:
                sent, problem = unpack(end)
                if problem is not None:
                    self.put("problem", problem)
                    return
                self.put(*sent)
        except (OSError, EOFError):
            pass  # the other end is closed
        except Exception as error:  # the edge of a thread
            text = str(error).partition("\n")[0][:200]
            self.put("problem", f"{type(error).__name__}: {text}")
        finally:
            self.lose(number)
