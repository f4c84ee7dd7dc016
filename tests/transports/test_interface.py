"""On which interface gloo listens: the one that leads to the other hosts."""

from __future__ import annotations

import os
import socket
import sys

import pytest

from quorate.machine.environment import gloo_on
from quorate.transports.collective import interface
from quorate.transports.collective.interface import Interface, chosen, route, towards

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="interfaces are left to gloo")
WAY = {"127.0.1.1": "127.0.0.1", "10.0.0.1": "10.0.0.2", "10.0.0.2": "10.0.0.1"}


@pytest.fixture(autouse=True)
def nothing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)


@pytest.fixture
def two_networks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host with two addresses beside its loopback, of which one leads to others."""

    def address(text: str) -> object:
        return type("Address", (), {"address": text})

    listed = {"docker0": ["172.17.0.1"], "lo": ["127.0.0.1"], "eth1": ["fe80::1%eth1", "10.0.0.1"]}
    addresses = {name: [address(text) for text in texts] for name, texts in listed.items()}
    monkeypatch.setattr(interface.psutil, "net_if_addrs", lambda: addresses)
    monkeypatch.setattr(interface, "towards", lambda host, _: WAY.get(host))


def test_on_the_host_of_the_store_it_leads_to_another_rank(two_networks: None) -> None:
    own = route(("127.0.1.1", 29500))
    assert own == "127.0.0.1"
    at = chosen(("127.0.1.1", 29500), own, [own, own, "10.0.0.2"])
    assert at == Interface("eth1", "10.0.0.1")


def test_elsewhere_it_leads_to_the_store(two_networks: None) -> None:
    own = route(("10.0.0.2", 29500))
    at = chosen(("10.0.0.2", 29500), own, ["127.0.0.1", own])
    assert at == Interface("eth1", "10.0.0.1")


def test_ranks_of_one_machine_listen_where_nobody_else_can_reach_them(two_networks: None) -> None:
    own = route(None)
    assert chosen(None, own, [own, own]) == Interface("lo", "127.0.0.1")
    alone = chosen(("127.0.1.1", 29500), own, [own, own])
    assert str(alone) == "lo, 127.0.0.1 (this machine alone)"


def test_what_cannot_be_told_is_left_to_gloo(two_networks: None) -> None:
    own = route(("10.0.0.1", 29500))
    assert own == "10.0.0.2"  # which no interface has
    assert chosen(("10.0.0.1", 29500), own, [own, own]) is None


def test_one_that_is_named_stays(two_networks: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "docker0")
    at = chosen(("127.0.1.1", 29500), "127.0.0.1", ["127.0.0.1", "10.0.0.2"])
    assert str(at) == "docker0, from GLOO_SOCKET_IFNAME, instead of 10.0.0.1"
    with gloo_on("eth1"):
        assert os.environ["GLOO_SOCKET_IFNAME"] == "docker0"


def test_the_way_of_this_machine() -> None:
    assert towards("127.0.1.1", 29500) == "127.0.0.1"
    assert towards("nowhere.invalid", 29500) is None
    own = towards("192.0.2.77", 29500)  # an address of documentation: nobody's
    assert own is None or socket.inet_aton(own)


def test_the_environment_is_as_it_was() -> None:
    with gloo_on("eth1"):
        assert os.environ["GLOO_SOCKET_IFNAME"] == "eth1"
    assert "GLOO_SOCKET_IFNAME" not in os.environ
