"""A worker process: it runs the script up to the training loop, and computes shards from there on.

It owns nothing that is lost with it: parameters, results and position are the coordinator's.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
import traceback
from contextlib import suppress
from dataclasses import replace
from typing import NoReturn

import torch

from quorate.coordination.plan import from_json
from quorate.data.feed import Feed
from quorate.data.source import Source, length
from quorate.errors import UserError
from quorate.machine.dies_with_parent import JOB_SIGNALS
from quorate.machine.shared_memory import Segment
from quorate.replica.deterministic import deterministic
from quorate.replica.notes import Notes
from quorate.replica.precision import tensor_float
from quorate.replica.replica import Replica
from quorate.replica.snapshots import Snapshot
from quorate.replica.streams import Stream
from quorate.replica.totals import to_json
from quorate.replica.turns import Turns
from quorate.transports.job import (
    Job,
    NotWanted,
    Task,
    Training,
    class_of,
    data_fingerprint,
    probe_fingerprint,
)
from quorate.transports.processes import remote_error
from quorate.transports.processes.arena import Arena
from quorate.transports.processes.program import Program
from quorate.transports.processes.script import Script
from quorate.transports.processes.wire import Message, Wire

_here: Worker | None = None  # a fact of the process: it was started to be a worker


def here() -> Worker | None:
    """What this process is to become at the first training loop; None in a coordinator."""
    return _here


def run(*, wire: int, output: int) -> None:
    """Run the script; it does not come back from its first training loop.

    Args:
        wire: descriptor of its end of the wire. The first message says who it is, and holds the
            fields of a ``Script``.
        output: descriptor of what takes the place of standard output and error until then: the
            coordinator has said all of that already, and shows it only if something goes wrong.
    """
    global _here
    end = Wire(socket.socket(fileno=wire))
    start = end.receive()
    if start is None:
        return
    _here = Worker(start["number"], end, output)
    Script(**start["script"]).run()
    sys.exit("the script came to its end without a training loop")


class Worker:
    """This process."""

    def __init__(self, number: int, wire: Wire, output: int) -> None:
        self.number = number
        self._wire = wire
        self._notes = Notes()
        self._outputs = {fd: os.dup(fd) for fd in (1, 2)}
        for fd in self._outputs:
            os.dup2(output, fd)
        os.close(output)

    def serve(self, program: Program) -> NoReturn:
        """Compute what the coordinator asks for, and end this process when it says so.

        Nothing of the script runs after this, no ``finally`` and no ``atexit``: they are the
        coordinator's to run, once.
        """
        code = 1
        for number in JOB_SIGNALS:
            with suppress(ValueError):  # the script trains in another thread than the main one
                signal.signal(number, signal.SIG_IGN)  # whatever the script made of them

        def serve() -> None:
            nonlocal code
            try:
                with tensor_float(program.computing.precision), deterministic(program.group):
                    self._serve(program)
                code = 0
            except UserError as error:
                self._wire.send({"kind": "refuses", "message": str(error)})
            except BaseException:  # the edge of the process
                traceback.print_exc()

        # In a thread of its own, as a tower: what the script has around its loop (autocast, a
        # default device) is the thread's that it runs in, and reaches no shard.
        thread = threading.Thread(target=serve, name=f"quorate-worker-{self.number}")
        thread.start()
        thread.join()
        self._flush()
        os._exit(code)

    def _serve(self, program: Program) -> None:
        # 1. As in a tower: see there.
        torch.set_num_threads(program.threads)
        torch.set_autocast_cache_enabled(False)
        device = program.group[0]
        if device.type != "cpu":
            torch.accelerator.set_device_index(device.index or 0)
        # 2. What is shared.
        if device.type == "cpu":
            program.model.to(device)
        self._wire.send({"kind": "here"})
        answer = self._wire.receive()
        if answer is None:
            return
        description, *fds = self._wire.fds
        text = Segment(os.fstat(description).st_size, description)
        arena = Arena.attach(json.loads(text.map[:].rstrip(b"\0")), fds, program.model)
        replica = Replica(
            program.model,
            arena.parameters,
            program.group,
            spread=program.spread,
            written=arena.written,
            own=True,
            set_buffers=arena.read,
            loss=program.loss,
            totals=program.totals,
            turns=Turns(side_by_side=True),
            computing=replace(program.computing, compile=answer["compile"]),  # all workers alike
            notes=self._notes,
        )
        # 3. From here on what user code prints is news.
        self._flush()
        for fd, original in self._outputs.items():
            os.dup2(original, fd)
            os.close(original)
        # 4. Shards.
        loop = _Loop(self.number, self._wire, arena, replica, program)
        with Stream() as stream:
            arena.tell(self.number, "waiting")
            while (message := self._wire.receive()) is not None and message["kind"] != "end":
                loop.handle(message, stream)
                for line in self._notes.take():
                    self._wire.send({"kind": "note", "line": line})

    def _flush(self) -> None:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError, AttributeError):  # closed, or None
                stream.flush()


class _Work:
    """A job that is open, and the rows that are fetched for it."""

    def __init__(self, job: Job, moves_to: torch.device) -> None:
        self.job = job
        self._moves_to = moves_to
        self._rank_of: tuple[int, int] | None = None
        self._feed: Feed | None = None

    def feed(self, rank_of: tuple[int, int], step: int, shard: int) -> Feed:
        """Rows of the home shards of this rank; a new feed when workers have come or gone."""
        if self._feed is None or rank_of != self._rank_of:
            self.close()
            self._feed = self.job.feed(rank_of, (step, shard), self._moves_to)
            self._rank_of = rank_of
        return self._feed

    def close(self) -> None:
        if self._feed is not None:
            self._feed.close()
            self._feed = None


class _Loop:
    """Carries out messages, one at a time, in order."""

    def __init__(
        self, number: int, wire: Wire, arena: Arena, replica: Replica, program: Program
    ) -> None:
        self._number = number
        self._wire = wire
        self._arena = arena
        self._replica = replica
        self._program = program
        self._works: dict[int, _Work] = {}

    def handle(self, message: Message, stream: Stream) -> None:
        match message["kind"]:
            case "open":
                self._open(message, stream)
            case "compute":
                self._compute(message, stream)
                self._arena.tell(self._number, "waiting")
            case "close":
                self._works.pop(message["job"]).close()

    def _open(self, message: Message, stream: Stream) -> None:
        name, plan = message["dataset"], from_json(message["plan"], self._program.order)
        dataset = self._program.datasets[name]
        if (rows := length(dataset)) != plan.rows:
            raise UserError(
                f"a worker that ran the script again made another {name}: got {rows} rows, "
                f"expected {plan.rows} as in the coordinator; make the script repeatable, or use "
                "engine='towers'"
            )
        kind = class_of(message["work"])
        parameters = self._arena.average if message["averaged"] else self._arena.parameters
        assert parameters is not None
        augment = self._program.augment if issubclass(kind, Training) else None
        source = Source(dataset, plan, self._program.collate, augment)
        self._works[message["job"]] = _Work(
            kind(source, parameters, range(*message["steps"]), **message["options"]),
            self._replica.device,
        )
        answer: Message = {"kind": "ready", "job": message["job"]}
        try:
            if "data" in message["checks"]:
                answer["data"] = data_fingerprint(source)
            if "gradient" in message["checks"]:
                answer["gradient"] = probe_fingerprint(self._replica, source, stream)
        except Exception:
            pass  # the edge of user code: it raises again in its shard, where it is told
        self._wire.send(answer)

    def _compute(self, message: Message, stream: Stream) -> None:
        number, step, shard, slot = (message[name] for name in ("job", "step", "shard", "slot"))
        ticket, snapshot = message["ticket"], message["snapshot"]
        work = self._works[number]
        answer: Message = {"job": number, "ticket": ticket}

        def at(phase: str) -> None:
            if self._arena.is_cancelled(self._number, ticket):
                raise NotWanted
            self._arena.tell(self._number, phase, step, shard)

        into = None if slot is None else self._arena.slot(slot)
        task = Task(self._number, step, shard, None if into is None else into.flat, at)
        try:
            at("fetching")
            result = work.job.compute(
                self._replica,
                stream,
                work.feed(tuple(message["rank_of"]), step, shard),
                task,
                snapshot=snapshot and Snapshot(self._arena.slot(snapshot[0]), *snapshot),
                is_only=True,
            )
            if into is not None and result.buffers is not None:
                into.floats.copy_(result.buffers)
            if into is not None and result.counts is not None:
                into.counts.copy_(result.counts)
        except NotWanted:
            self._wire.send({"kind": "left off", **answer})
            return
        except BaseException as error:  # the edge of the process: the coordinator decides
            work.job.annotate(error, task, self._replica.device)
            self._wire.send({"kind": "failed", "error": remote_error.to_json(error), **answer})
            return
        missing = None if result.missing is None else sorted(result.missing)
        answer |= {"weight": result.weight, "metrics": result.metrics, "missing": missing}
        answer["totals"] = to_json(result.totals)
        self._wire.send({"kind": "done", **answer})
