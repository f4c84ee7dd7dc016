"""The interface on which gloo listens: the one by which the ranks of other hosts are reached.

By itself gloo listens at the address of the host's name, which on many machines is 127.0.1.1.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

import psutil

from quorate.machine.environment import gloo_interface

LOOPBACK = "127.0.0.1"


class Interface(NamedTuple):
    """An interface of this host."""

    name: str
    address: str

    def __str__(self) -> str:
        where = f"{self.name}, {self.address}"
        return f"{where} (this machine alone)" if _is_loopback(self.address) else where


def route(endpoint: tuple[str, int] | None) -> str:
    """Return this host's address on the way to the store; a loopback one if that is here too."""
    return LOOPBACK if endpoint is None else towards(*endpoint) or LOOPBACK


def chosen(endpoint: tuple[str, int] | None, own: str, others: Sequence[str]) -> Interface | None:
    """Return the interface for this rank; None where that is left to gloo.

    Args:
        endpoint: of the store, if it is no file.
        own: this host's address on the way to it, see ``route``.
        others: that of each rank's host.
    """
    # On the host of the store that is often a loopback address, which tells nothing: from there
    # it is the way to a rank of another host.
    far = next((address for address in others if not _is_loopback(address)), None)
    if endpoint is not None and far is not None and _is_loopback(own):
        own = towards(far, endpoint[1]) or LOOPBACK
    if (named := gloo_interface()) is not None:
        return Interface(named, f"from GLOO_SOCKET_IFNAME, instead of {own}")
    for name, addresses in psutil.net_if_addrs().items():
        if own in (address.address.partition("%")[0] for address in addresses):
            return Interface(name, own)
    return None


def towards(host: str, port: int) -> str | None:
    """Return this host's address on the way to another one; None if there is no way.

    Nothing is sent.
    """
    with suppress(OSError):  # a name that is not known
        for family, kind, protocol, _, address in socket.getaddrinfo(
            host, port, type=socket.SOCK_DGRAM
        ):
            # Of a family that has no route the next address is tried.
            with suppress(OSError), socket.socket(family, kind, protocol) as probe:
                probe.connect(address)
                name: str = probe.getsockname()[0]
                return LOOPBACK if _is_loopback(name) else name.partition("%")[0]
    return None


def _is_loopback(address: str) -> bool:
    with suppress(ValueError):
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    return False
