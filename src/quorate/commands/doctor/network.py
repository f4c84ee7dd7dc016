"""Network interfaces for connections between several machines."""

from __future__ import annotations

import socket

import psutil

from quorate.commands.doctor.facts import NetworkInterface


def interfaces() -> tuple[NetworkInterface, ...]:
    """Return the active interfaces with an address; empty if the system does not report any."""
    listed = []
    try:
        stats = psutil.net_if_stats()
    except OSError:  # there is no /proc
        return ()
    for name, addresses in psutil.net_if_addrs().items():
        ips = [a.address for a in addresses if a.family in (socket.AF_INET, socket.AF_INET6)]
        ips = [ip for ip in ips if not ip.startswith("fe80:")]  # link-local addresses need a zone
        if name in stats and stats[name].isup and ips:
            loopback = all(ip.startswith("127.") or ip == "::1" for ip in ips)
            listed.append(NetworkInterface(name, tuple(ips), stats[name].speed or None, loopback))
    return tuple(listed)
