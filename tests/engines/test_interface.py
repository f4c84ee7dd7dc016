"""On which interface gloo listens: the one that leads to the other hosts."""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace

import pytest

from quorate.engines.collective import interface
from quorate.engines.collective.interface import chosen, route
from quorate.machine.environment import gloo_on

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="interfaces are left to gloo")
WAY = {"127.0.1.1": "127.0.0.1", "10.0.0.1": "10.0.0.2", "10.0.0.2": "10.0.0.1"}
# A host with two addresses beside its loopback, of which one leads to others.
NETWORKS = {"docker0": ["172.17.0.1"], "lo": ["127.0.0.1"], "eth1": ["fe80::1%eth1", "10.0.0.1"]}


@pytest.fixture(autouse=True)
def two_networks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    listed = {name: [SimpleNamespace(address=a) for a in own] for name, own in NETWORKS.items()}
    monkeypatch.setattr(interface.psutil, "net_if_addrs", lambda: listed)
    monkeypatch.setattr(interface, "towards", lambda host, _: WAY.get(host))


@pytest.mark.parametrize(
    ("store", "others", "expected"),
    [
        ("127.0.1.1", ["127.0.0.1", "10.0.0.2"], "eth1, 10.0.0.1"),  # it leads to another rank
        ("10.0.0.2", ["127.0.0.1"], "eth1, 10.0.0.1"),  # it leads to the store
        # Ranks of one machine listen where nobody else can reach them.
        ("127.0.1.1", ["127.0.0.1", "127.0.0.1"], "lo, 127.0.0.1 (this machine alone)"),
        (None, ["127.0.0.1"], "lo, 127.0.0.1 (this machine alone)"),
        ("10.0.0.1", ["10.0.0.2"], None),  # which no interface has: left to gloo
    ],
)
def test_it_leads_to_the_other_hosts(
    store: str | None, others: list[str], expected: str | None
) -> None:
    at = None if store is None else (store, 29500)
    own = route(at)
    found = chosen(at, own, [own, *others])
    assert (None if found is None else str(found)) == expected


def test_one_that_is_named_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    with gloo_on("eth1"):
        assert os.environ["GLOO_SOCKET_IFNAME"] == "eth1"
    assert "GLOO_SOCKET_IFNAME" not in os.environ
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "docker0")
    at = chosen(("127.0.1.1", 29500), "127.0.0.1", ["127.0.0.1", "10.0.0.2"])
    assert str(at) == "docker0, from GLOO_SOCKET_IFNAME, instead of 10.0.0.1"
    with gloo_on("eth1"):
        assert os.environ["GLOO_SOCKET_IFNAME"] == "docker0"
