"""quorate beside its peers: examples per second on two workers of one machine, in one run.

    python benchmarks/peers.py [--rounds 5] [--seconds 2] [--json FILE] [--markdown FILE]
    python benchmarks/peers.py --workloads seed --precisions fp32 --only DDP "quorate, processes"

A loop by hand, DDP over gloo, Accelerate, Lightning Fabric, TensorFlow 1's towers,
MirroredStrategy and JAX on host devices, quorate on each engine; and copies that know nothing of
each other: what the machine gives without communication. All have the same arrays, the same rows
per worker and one intra-op thread per worker. TensorFlow and JAX come with as many as there are
cores, and have a second row with one thread each. fp32; and bf16 (autocast, or what a peer has in
its place) where the processor has instructions for it.

Each peer is a process of its own (``benchmarks/peers/``) that is started, warmed up, and then makes
a round of updates when it is its turn; meanwhile the others wait, so that nobody's start is
measured and a drift of the machine hits all alike. Printed are medians over the rounds, and medians
of the ratios within a round. Peers that need other packages have requirements in
``benchmarks/peers/`` and environments that this command makes, in ``benchmarks/.environments`` or
where --environments says.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import select
import statistics
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple, Self

from quorate.replica.torch_internals import cpu_has_bfloat16

HERE = Path(__file__).resolve().parent
PEERS = HERE / "peers"
WORKLOADS = {
    "seed": "network of the multi-tower tutorials (3.3 M parameters), 64 rows per worker, SGD",
    "lenet5": "LeNet-5 of examples/cifar10 (1.7 M), 64 rows per worker, Adam",
    "chatbot": "LSTMs with attention of examples/chatbot, 32 pairs per worker, Adam, clipped",
    "unet": "U-Net of examples/segmentation, 16 tiles of 256 x 256 per worker, AdamW",
}
PRECISIONS = ("fp32", "bf16")
WARM_UP_STEPS, WARM_UP_ROUNDS = 5, 2
LIMIT_S = 600.0  # that a peer may take to start, or for a round


class Peer(NamedTuple):
    """Who is measured."""

    file: str  # in ``peers/``
    workers: int
    variant: str = ""
    environment: str | None = None  # the requirements that it needs; None: this one


CONTENDERS = {
    "loop": Peer("plain.py", 1),
    "loop, tuned": Peer("plain.py", 1, "tuned"),
    "quorate, 1 worker": Peer("ours.py", 1, "towers"),
    "DDP": Peer("ddp.py", 2),
    "DDP, tuned": Peer("ddp.py", 2, "tuned"),
    "Accelerate": Peer("accelerate_loop.py", 2, "", "torch"),
    "Accelerate, tuned": Peer("accelerate_loop.py", 2, "tuned", "torch"),
    "Fabric": Peer("fabric.py", 2, "", "torch"),
    "Fabric, tuned": Peer("fabric.py", 2, "tuned", "torch"),
    "TF1 towers": Peer("tf1_towers.py", 2, "", "tensorflow"),
    "TF1 towers, one thread each": Peer("tf1_towers.py", 2, "one thread each", "tensorflow"),
    "MirroredStrategy": Peer("mirrored.py", 2, "", "tensorflow"),
    "JAX": Peer("jax_devices.py", 2, "", "jax"),
    "JAX, one thread each": Peer("jax_devices.py", 2, "one thread each", "jax"),
    "quorate, towers": Peer("ours.py", 2, "towers"),
    "quorate, processes": Peer("ours.py", 2, "processes"),
    "quorate, collective": Peer("ours.py", 2, "collective"),
    "quorate, collective, native": Peer("ours.py", 2, "collective, native"),
    "2 loops, tuned, unconnected": Peer("plain.py", 2, "tuned"),
    "2 quorate, unconnected": Peer("ours.py", 2, "alone"),
}
# What each of ours is compared with: one worker with one, two with two.
ONE, TWO = ("loop", "loop, tuned"), [name for name, peer in CONTENDERS.items() if peer.workers == 2]
RATIOS = [("quorate, 1 worker", other) for other in ONE]
RATIOS += [
    (ours, other)
    for ours in ("quorate, towers", "quorate, processes", "quorate, collective")
    for other in TWO
    if not other.startswith("quorate,")
]
RATIOS.append(("quorate, collective", "quorate, collective, native"))  # the price of order


class PeerError(Exception):
    """A peer does not run; the message says why."""


class Running:
    """A peer that is there. ``close`` it.

    Args:
        peer: what it is.
        python: the interpreter of its environment.
        workload: what it trains.
        precision: "fp32" or "bf16".

    Raises:
        PeerError: it has no such workload, or does not work.
    """

    def __init__(self, peer: Peer, python: Path, workload: str, precision: str) -> None:
        wanted = {
            "workload": workload,
            "precision": precision,
            "workers": peer.workers,
            "variant": peer.variant,
        }
        self._errors = tempfile.TemporaryFile(mode="w+")  # noqa: SIM115  a pipe would fill up
        path = os.pathsep.join([str(HERE.parent / "src"), os.environ.get("PYTHONPATH", "")])
        self._process = subprocess.Popen(
            [str(python), str(PEERS / peer.file), json.dumps(wanted)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env={**os.environ, "PYTHONPATH": path.rstrip(os.pathsep)},
        )
        self._heard = b""
        try:
            ready = self._answer()
            if "skipped" in ready:
                raise PeerError(str(ready["skipped"]))
            self.tuned = str(ready["tuned"])
            self._per_step_s = self._warm_up()
        except BaseException:
            self.close()
            raise

    def round(self, seconds: float) -> float:
        """Return the examples per second of so many seconds of updates, or about so many."""
        return self._run(max(2, round(seconds / self._per_step_s)))

    def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(10.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._errors.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _warm_up(self) -> float:
        """Return the seconds of a step, when it has made some."""
        for _ in range(WARM_UP_ROUNDS):
            begun = time.perf_counter()
            self._run(WARM_UP_STEPS)
            taken = time.perf_counter() - begun
        return taken / WARM_UP_STEPS

    def _run(self, steps: int) -> float:
        assert self._process.stdin is not None
        try:
            print(json.dumps({"steps": steps}), file=self._process.stdin, flush=True)
        except BrokenPipeError:
            raise PeerError(self._last_words()) from None
        return float(self._answer()["examples_per_s"])

    def _answer(self) -> dict[str, object]:
        """Return its next line of JSON; what its libraries print besides is passed over."""
        assert self._process.stdout is not None
        until = time.monotonic() + LIMIT_S
        while True:
            while b"\n" not in self._heard:
                left_s = until - time.monotonic()
                if not select.select([self._process.stdout], [], [], max(0.0, left_s))[0]:
                    raise PeerError(f"it does not answer within {LIMIT_S:.0f} s")
                if not (data := os.read(self._process.stdout.fileno(), 1 << 16)):
                    raise PeerError(self._last_words())
                self._heard += data
            line, _, self._heard = self._heard.partition(b"\n")
            if line.startswith(b'{"'):
                found: dict[str, object] = json.loads(line)
                return found

    def _last_words(self) -> str:
        code = self._process.wait(30.0)
        self._errors.seek(0)
        lines = self._errors.read().strip().splitlines()
        return f"it ended with exit code {code}: {lines[-1] if lines else 'it said nothing'}"


def python_of(environment: str | None, folder: Path) -> Path:
    """Return the interpreter that has a peer's requirements; its environment is made if need be.

    Raises:
        PeerError: they cannot be installed.
    """
    if environment is None:
        return Path(sys.executable)
    requirements = PEERS / f"requirements-{environment}.txt"
    place = folder / environment
    python, stamp = place / "bin" / "python", place / "installed"
    digest = hashlib.sha256(requirements.read_bytes()).hexdigest()
    if not stamp.exists() or stamp.read_text() != digest:
        print(f"making {place}", file=sys.stderr, flush=True)
        venv.create(place, clear=True, with_pip=True)
        words = [str(python), "-m", "pip", "install", "-q", "-r", str(requirements)]
        if subprocess.run(words, check=False, stdout=sys.stderr).returncode != 0:
            raise PeerError(f"{requirements.name} cannot be installed")
        stamp.write_text(digest)
    return python


class Table:
    """What was measured of one workload in one precision."""

    def __init__(self, workload: str, precision: str) -> None:
        self.workload, self.precision = workload, precision
        self.speeds: dict[str, list[float]] = {}
        self.tuned: dict[str, str] = {}
        self.left_out: dict[str, str] = {}

    def measure(
        self, names: Sequence[str], rounds: int, seconds: float, environments: Path
    ) -> None:
        """Start all, run the rounds, and end all."""
        with ExitStack() as stack:
            running: dict[str, Running] = {}
            for name in names:
                peer = CONTENDERS[name]
                try:
                    python = python_of(peer.environment, environments)
                    started = Running(peer, python, self.workload, self.precision)
                except PeerError as why:
                    self.left_out[name] = str(why)
                    continue
                running[name] = stack.enter_context(started)
                self.tuned[name], self.speeds[name] = started.tuned, []
            for _ in range(rounds):
                for name, one in list(running.items()):
                    try:
                        self.speeds[name].append(one.round(seconds))
                    except PeerError as why:
                        self.left_out[name] = str(why)
                        del self.speeds[name], running[name]

    def ratios(self) -> dict[str, float]:
        """Return the medians of the ratios within a round."""
        return {
            f"{one} / {other}": statistics.median(
                a / b for a, b in zip(self.speeds[one], self.speeds[other], strict=True)
            )
            for one, other in RATIOS
            if {one, other} <= self.speeds.keys()
        }

    def markdown(self) -> str:
        """Return the table."""
        engines = ("1 worker", "towers", "processes", "collective")
        head = ["", "workers", "examples/s", "from", "to", *(f"{e} / it" for e in engines), "tuned"]
        title = f"### {self.workload}, {self.precision}: {WORKLOADS[self.workload]}"
        lines = [title, "", f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
        ratios = self.ratios()
        for name, speeds in self.speeds.items():
            figures = [f"{f(speeds):,.0f}" for f in (statistics.median, min, max)]
            cells = [ratios.get(f"quorate, {engine} / {name}") for engine in engines]
            shown = ["" if cell is None else f"{cell:.3f}" for cell in cells]
            row = [name, str(CONTENDERS[name].workers), *figures, *shown, self.tuned[name]]
            lines.append(f"| {' | '.join(row)} |")
        lines += [f"\nWithout {name}: {why}." for name, why in self.left_out.items()]
        return "\n".join(lines) + "\n"

    def record(self) -> dict[str, object]:
        """Return all of it, for JSON."""
        return {**vars(self), "ratios": self.ratios()}


def chosen(words: Sequence[str] | None) -> list[str]:
    """Return the contenders whose names contain one of these texts."""
    if words is None:
        return list(CONTENDERS)
    return [name for name in CONTENDERS if any(word in name for word in words)]


def main() -> None:
    """Run the rounds and print a table for each workload and precision."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0, help="of a round")
    parser.add_argument("--workloads", default=",".join(WORKLOADS))
    parser.add_argument("--precisions", default=",".join(PRECISIONS))
    parser.add_argument("--only", nargs="+", help="contenders whose names contain one of these")
    parser.add_argument("--environments", type=Path, default=HERE / ".environments")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    options = parser.parse_args()
    workloads, precisions = options.workloads.split(","), options.precisions.split(",")
    if unknown := {*workloads} - {*WORKLOADS}:
        parser.error(f"--workloads: got {unknown.pop()!r}, expected some of {', '.join(WORKLOADS)}")
    if "bf16" in precisions and not cpu_has_bfloat16():
        precisions.remove("bf16")
        print("without bf16: the processor has no instructions for it", file=sys.stderr)
    names = chosen(options.only)
    machine = f"{platform.machine()}, {os.cpu_count()} cores"
    texts, records = [], []
    for workload in workloads:
        for precision in precisions:
            table = Table(workload, precision)
            table.measure(names, options.rounds, options.seconds, options.environments)
            load = os.getloadavg()[0]
            text = f"{table.markdown()}\n{machine}, a load of {load:.1f} at the end.\n"
            print(text, flush=True)
            texts.append(text)
            records.append({**table.record(), "load": load})
            # After each: a run of all takes an hour, and may be cut off.
            if options.json:
                options.json.write_text(json.dumps(records, indent=1) + "\n")
            if options.markdown:
                options.markdown.write_text("\n".join(texts))


if __name__ == "__main__":
    main()
