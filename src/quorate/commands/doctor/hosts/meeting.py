"""The meeting of hosts: each host examines itself, then pairs of hosts examine the network.

One process of each host takes part. The processes meet in the store that the ranks would use,
exchange their findings there, and take turns: a measurement has the network to itself.
"""

from __future__ import annotations

import json
import platform
import secrets
import socket
import time
from collections.abc import Mapping
from contextlib import closing, suppress
from dataclasses import asdict
from datetime import timedelta
from itertools import combinations
from pathlib import Path
from typing import Any

import torch.distributed

from quorate.commands.doctor.examination import examine
from quorate.commands.doctor.facts import Facts
from quorate.commands.doctor.hosts.facts import Crossing, Hosts, Report
from quorate.commands.doctor.hosts.probe import ProbeServer, measure
from quorate.commands.doctor.verdicts import verdicts
from quorate.commands.doctor.wanted import Wanted
from quorate.engines.collective.network import listening_address, own_address
from quorate.machine.environment import gloo_interface
from quorate.machine.processor import processors

MEET_S = 120.0  # allowed difference of the hosts' start times
SEEN_S = 5.0  # limit until a file of one host is visible on another: NFS caches names
MOST_PAIRED = 4  # with more hosts, only neighbours and pairs with the first are measured

_dist: Any = torch.distributed


def pairs(hosts: int) -> list[tuple[int, int]]:
    """Return the pairs of hosts to measure, in turn."""
    if hosts <= MOST_PAIRED:
        return list(combinations(range(hosts), 2))
    ring = [(host, host + 1) for host in range(hosts - 1)]
    return [*ring, *((0, host) for host in range(2, hosts))]


def meet(environment: Mapping[str, str], wanted: Wanted, run_dir: str | None) -> Hosts | None:
    """Examine all hosts together; return the findings on the first host, None on all others.

    Args:
        environment: torchrun's variables, of the process that represents its host.
        run_dir: a directory to look for on all hosts.

    Raises:
        RuntimeError: a host does not arrive.
    """
    # 1. Open the common store, and choose the address for the other hosts.
    endpoint = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
    own, count = int(environment["GROUP_RANK"]), int(environment["GROUP_WORLD_SIZE"])
    store = _store(environment)
    address = own_address(endpoint)
    address = listening_address(
        endpoint, address, _said_by_all(store, "address", own, count, address)
    )
    # 2. Examine each host alone. All hosts look for a file of the first host in the run directory.
    mark = None
    if own == 0:
        mark = None if run_dir is None else _mark(run_dir)
        store.set("word", json.dumps([secrets.token_hex(8), mark]))
    word, mark = json.loads(store.get("word"))
    unseen = None if mark is None else _unseen(mark)
    report = _report(environment, wanted, address, unseen)
    reports = [
        Report.from_json(said) for said in _said_by_all(store, "report", own, count, asdict(report))
    ]
    # 3. Measure two hosts at a time.
    with closing(ProbeServer(report.address, word)) as listener:
        ports = _said_by_all(store, "port", own, count, listener.port)
        crossings = []
        for one, other in pairs(count):
            if one == own:
                found = _crossing(one, other, reports[other].address, ports[other], word)
                store.set(f"crossing-{one}-{other}", json.dumps(asdict(found)))
            crossings.append(Crossing(**json.loads(store.get(f"crossing-{one}-{other}"))))
    if own == 0 and mark is not None:
        with suppress(OSError):
            Path(mark).unlink()
    _said_by_all(store, "left", own, count, None)  # the store may end with the first host
    if own > 0:
        return None
    return Hosts(
        tuple(reports),
        tuple(crossings),
        store=f"{endpoint[0]}:{endpoint[1]}",
        run_dir=run_dir,
        restarts=int(environment.get("TORCHELASTIC_MAX_RESTARTS", "0")),
        is_store_shared=environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )


def _store(environment: Mapping[str, str]) -> Any:
    rank, size = int(environment["RANK"]), int(environment["WORLD_SIZE"])
    timeout = timedelta(seconds=MEET_S)
    store, _, _ = next(_dist.rendezvous("env://", rank, size, timeout=timeout))
    attempt = environment.get("TORCHELASTIC_RESTART_COUNT", "0")
    return _dist.PrefixStore(f"quorate-doctor-{attempt}", store)


def _said_by_all(store: Any, what: str, own: int, count: int, said: Any) -> list[Any]:
    """Return the message of each host; all hosts call this function. Blocks."""
    store.set(f"{what}-{own}", json.dumps(said))
    return [json.loads(store.get(f"{what}-{host}")) for host in range(count)]


def _report(
    environment: Mapping[str, str], wanted: Wanted, address: str, unseen: str | None
) -> Report:
    facts = examine()
    interface, address = _interface(facts, address)
    speeds = {each.name: each.mbit_per_s or 0 for each in facts.interfaces}
    speed = speeds.get(interface or "", 0)
    faster = {name: its for name, its in speeds.items() if 0 < speed < its}
    return Report(
        name=socket.gethostname(),
        address=address,
        interface=interface,
        mbit_per_s=speed or None,
        faster=faster,
        ranks=int(environment.get("LOCAL_WORLD_SIZE", "1")),
        torch=facts.torch.version,
        cuda=facts.torch.cuda,
        python=platform.python_version(),
        kernels=processors(())[0],
        gpus=tuple(sorted({_kind(facts, each.device) for each in facts.accelerators})),
        driver=facts.driver.version,
        sees_run_dir=unseen,
        verdicts=tuple(verdicts(facts, wanted)),
    )


def _interface(facts: Facts, address: str) -> tuple[str | None, str]:
    """Return the interface on which gloo listens, and the address of the interface.

    Args:
        address: address on which gloo listens unless the user has named an interface.
    """
    named = gloo_interface()
    for each in facts.interfaces:
        if each.name == named:
            return named, address if address in each.addresses else each.addresses[0]
        if named is None and address in each.addresses:
            return each.name, address
    return named, address


def _kind(facts: Facts, device: str) -> str:
    accelerator = next(each for each in facts.accelerators if each.device == device)
    if accelerator.visible is not None:
        for gpu in facts.gpus:
            if gpu.index == accelerator.visible.index and gpu.name is not None:
                return gpu.name
    return device.partition(":")[0]


def _crossing(one: int, other: int, address: str, port: int, word: str) -> Crossing:
    try:
        found = measure(address, port, word)
    except OSError as error:
        why = error.strerror or str(error) or type(error).__name__
        return Crossing(one, other, failure=f"{address} port {port}: {why}")
    return Crossing(one, other, *found)


def _mark(run_dir: str) -> str:
    """Create a file in a run directory, or in its nearest existing parent, and return the path."""
    folder = Path(run_dir).absolute()
    while not folder.is_dir():
        folder = folder.parent
    mark = folder / f".quorate-doctor-{secrets.token_hex(4)}"
    with suppress(OSError):  # the verdict will be that no host sees the file
        mark.write_text("")
    return str(mark)


def _unseen(mark: str) -> str | None:
    """Return why a file is invisible after a while; None if the file is visible."""
    deadline = time.monotonic() + SEEN_S
    while True:
        try:
            listed = [entry.name for entry in Path(mark).parent.iterdir()]
        except OSError as error:
            failure = f"{Path(mark).parent}: {error.strerror}"
        else:
            if Path(mark).name in listed:
                return None
            failure = f"what the first host writes to {Path(mark).parent} does not come to be there"
        if time.monotonic() > deadline:
            return failure
        time.sleep(0.1)
