"""The protocol of a peer: a process that runs a round of training steps whenever it is told to.

The command starts a peer with one JSON object as its argument (see ``Wanted``) and waits for a line
of JSON: ``{"ready": ..., "tuned": ...}``, or ``{"skipped": why}``. Then each line on standard
input, ``{"steps": N}``, is answered by ``{"examples_per_s": ...}``. In between the peer waits, and
takes nothing of the machine. It ends with its standard input.

A peer whose workers are processes of one script starts the others itself: ranks, which get the same
lines and answer to rank 0. Every rank has its own speed; a peer's is their sum.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple


class Wanted(NamedTuple):
    """What a peer is to measure."""

    workload: str
    precision: str  # "fp32" or "bf16"
    workers: int
    variant: str = ""  # of this peer; its own words

    @property
    def is_tuned(self) -> bool:
        """Whether it is to be as an expert would write it."""
        return "tuned" in self.variant


class NotOfferedError(Exception):
    """A peer cannot do what is wanted; the message says why."""


class Ranks(NamedTuple):
    """The processes of a peer."""

    rank: int
    size: int
    others: list[subprocess.Popen[str]]  # where this is rank 0


RANK = "PEERS_RANK"


def wanted() -> Wanted:
    """Return what this process was started for."""
    return Wanted(**json.loads(sys.argv[1]))


def start_ranks(size: int, *, connected: bool) -> Ranks:
    """Return the ranks of this peer, which the first process of it starts.

    Args:
        connected: whether they have the environment of ranks of ``torch.distributed``; else they
            know nothing of each other.
    """
    if RANK in os.environ:
        return Ranks(int(os.environ[RANK]), size, [])
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    others = []
    for rank in reversed(range(size)):
        env = {RANK: str(rank)}
        if connected:
            env |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "GROUP_RANK": "0"}
            env |= {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
            env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            # By this Lightning Fabric knows that somebody else has started the ranks.
            env["TORCHELASTIC_RUN_ID"] = "peers"
        if rank == 0:
            os.environ.update(env)
            continue
        started = subprocess.Popen(
            [sys.executable, *sys.argv],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **env},
        )
        others.append(started)
    return Ranks(0, size, others[::-1])


ALONE = Ranks(0, 1, [])


def serve(
    rows: int,
    step: Callable[[], object],
    *,
    ranks: Ranks = ALONE,
    tuned: str = "",
    finish: Callable[[], dict[str, Any]] = dict,
) -> None:
    """Run rounds until standard input ends.

    Args:
        rows: of all that ``step`` computes in this process, over all its workers.
        step: makes one update, and returns when its loss is known.
        tuned: what was tuned, in words.
        finish: waits, at the end of a round, for work that a device still does; returns further
            fields of the answer.
    """
    for other in ranks.others:
        _answer(other)  # that it is ready
    _say(ready=True, tuned=tuned)
    for line in sys.stdin:
        for other in ranks.others:
            assert other.stdin is not None
            print(line, end="", file=other.stdin, flush=True)
        steps = json.loads(line)["steps"]
        begun = time.perf_counter()
        for _ in range(steps):
            step()
        more = finish()
        speed = rows * steps / (time.perf_counter() - begun)
        speed += sum(_answer(each)["examples_per_s"] for each in ranks.others)
        _say(examples_per_s=speed, **more)
    for other in ranks.others:
        assert other.stdin is not None
        other.stdin.close()
        other.wait()


def run(peer: Callable[[Wanted], None]) -> None:
    """Be a peer: call it with what is wanted; say why if it cannot."""
    try:
        peer(wanted())
    except NotOfferedError as why:
        _say(skipped=str(why))


def _say(**fields: object) -> None:
    print(json.dumps(fields), flush=True)


def _answer(other: subprocess.Popen[str]) -> dict[str, float]:
    assert other.stdout is not None
    for line in other.stdout:
        if line.startswith('{"'):  # else its libraries print
            found: dict[str, float] = json.loads(line)
            return found
    raise SystemExit("a rank has ended")
