"""What a run asks of a Ray cluster, and what it says where that cannot be had. Without Ray."""

from __future__ import annotations

import sys

import pytest
import torch
from support.messages import expect_error

import quorate
from quorate.coordination import rules
from quorate.errors import SettingError
from quorate.machine.environment import ray_address
from quorate.transports import engines
from quorate.transports.ray.demand import Demand, demanded, groups_of, require_servers_fit
from quorate.transports.workers import Workers


def test_a_worker_takes_a_core_unless_it_is_said() -> None:
    demand = demanded(Workers(3, engine="ray"))
    assert (demand.workers, demand.resources) == (3, {"CPU": 1.0})
    assert [str(group) for group in groups_of(demand, None)] == ["cpu"] * 3
    assert groups_of(demand, "cpu") == groups_of(demand, None)


def test_resources_by_rays_names() -> None:
    demand = demanded(Workers(2, engine="ray", worker_resources="CPU=4, GPU=1,fast=0.5"))
    assert demand.options() == {"num_cpus": 4.0, "num_gpus": 1.0, "resources": {"fast": 0.5}}
    assert [str(group) for group in groups_of(demand, None)] == ["cuda:0"] * 2


@pytest.mark.parametrize("text", ["", "CPU", "CPU=many", "=1", "CPU=-1", "CPU=inf", "CPU=nan"])
def test_what_is_no_resource(text: str) -> None:
    with expect_error(SettingError, name="worker_resources"):
        demanded(Workers(2, engine="ray", worker_resources=text))


def test_a_worker_has_one_device() -> None:
    with expect_error(SettingError, name="worker_resources", got="GPU=2"):
        demanded(Workers(2, engine="ray", worker_resources="GPU=2"))
    with expect_error(SettingError, name="devices", got="cpu"):
        groups_of(demanded(Workers(2, engine="ray", worker_resources="GPU=1")), "cpu")


def test_of_a_cluster_of_others_it_is_said_how_much() -> None:
    with expect_error(SettingError, name="workers"):
        demanded(Workers(engine="ray", address="127.0.0.1:6379"))
    assert demanded(Workers(engine="ray")).workers >= 1


def test_what_a_cluster_lacks_is_said_with_both_figures() -> None:
    demand = Demand(3, {"CPU": 2.0, "GPU": 1.0})
    assert demand.missing({"CPU": 6.0, "GPU": 3.0, "memory": 1.0}) == []
    assert demand.missing({"CPU": 6.0}) == ["3 workers of GPU=1 take 3, and it has 0"]


def test_a_crew_that_grows_begins_with_the_least() -> None:
    demand = demanded(Workers("2:8", engine="ray", address="127.0.0.1:6379"))
    assert (demand.workers, demand.least) == (8, 2)
    assert len(groups_of(demand, None)) == 8
    assert demand.missing({"CPU": 1.0}) == []  # nodes may be yet to come
    assert demand.text() == "CPU=1"
    assert 2 <= demand.of_one_machine <= 8
    assert demanded(Workers("3:3", engine="ray")).least is None


@pytest.mark.parametrize("engine", [None, "towers", "processes", "collective"])
def test_a_crew_that_grows_is_rays(engine: str | None) -> None:
    with expect_error(SettingError, name="workers", got="1:2"):
        quorate.Trainer(
            torch.nn.Linear(1, 1),
            lambda model, batch: model(batch).mean(),
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
            batch_size=2,
            workers=Workers("1:2", engine=engine),
        )


def test_an_address_is_a_ray_clusters() -> None:
    with expect_error(SettingError, name="address", got="127.0.0.1:6379"):
        quorate.Trainer(
            torch.nn.Linear(1, 1),
            lambda model, batch: model(batch).mean(),
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
            batch_size=2,
            workers=Workers(2, address="127.0.0.1:6379"),
        )


def test_the_address_of_a_job_is_in_its_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for value, expected in (("10.0.0.1:6379", "10.0.0.1:6379"), ("local", None), ("", None)):
        monkeypatch.setenv("RAY_ADDRESS", value)
        assert ray_address() == expected
    monkeypatch.delenv("RAY_ADDRESS")
    assert ray_address() is None


def test_without_ray_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.setattr(engines, "find_spec", lambda _: None)
    with expect_error(SettingError, name="engine", got="ray"):
        engines.chosen("ray", [])


@pytest.mark.parametrize(
    ("workers", "update"),
    [
        (Workers(2, engine="processes", servers=2), "sync"),
        (Workers(2, engine="ray", servers=2), "async"),
        (Workers(2, engine="ray", servers=2), "bounded:2"),
    ],
)
def test_servers_are_refused_where_they_are_of_no_use(workers: Workers, update: str) -> None:
    with expect_error(SettingError, name="servers", got=2):
        require_servers_fit(workers, rules.parse(update))
    require_servers_fit(Workers(2, engine="ray", servers=2), rules.parse("quorum:3"))
