"""The address on which gloo listens: ranks of other hosts reach this host by the address.

By default gloo listens on the address of the host's name, which is 127.0.1.1 on many machines.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Sequence
from contextlib import suppress

LOOPBACK = "127.0.0.1"


def route(endpoint: tuple[str, int] | None) -> str:
    """Return the address of this host on the way to the store; loopback if the store is local."""
    return LOOPBACK if endpoint is None else towards(*endpoint) or LOOPBACK


def chosen(endpoint: tuple[str, int] | None, own: str, others: Sequence[str]) -> str:
    """Return the address on which gloo of this rank listens.

    Args:
        endpoint: host and port of the store; None if the ranks meet through a file.
        own: the address of this host on the way to the store, see ``route``.
        others: the same address of each rank's host.
    """
    # On the host of the store ``own`` is often a loopback address, which other hosts cannot reach:
    # take the address on the way to a rank of another host.
    far = next((address for address in others if not is_loopback(address)), None)
    if endpoint is not None and far is not None and is_loopback(own):
        return towards(far, endpoint[1]) or LOOPBACK
    return own


def towards(host: str, port: int) -> str | None:
    """Return the address of this host on the way to another host; None if no route exists.

    Nothing is sent.
    """
    with suppress(OSError):  # an unknown name
        for family, kind, protocol, _, address in socket.getaddrinfo(
            host, port, type=socket.SOCK_DGRAM
        ):
            # If a family of addresses has no route, try the next address.
            with suppress(OSError), socket.socket(family, kind, protocol) as probe:
                probe.connect(address)
                name: str = probe.getsockname()[0]
                return LOOPBACK if is_loopback(name) else name
    return None


def is_loopback(address: str) -> bool:
    """Return whether an address reaches nothing but this host."""
    with suppress(ValueError):
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    return False
