"""Strangers' trainings on several engines: the outcome of each, and whether a line reports it."""

import importlib
import io
import random
import sys
import tempfile
from collections.abc import Mapping
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch.distributed
from safetensors.torch import load_file
from support.digests import digest
from support.runs import command, inspected, run

import quorate
from quorate.errors import OneLineError

FOLDER = Path(__file__).parents[1] / "strangers"
SCRIPT = FOLDER / "stranger.py"

# Ways of running a case by the command: engine, workers and steps of each part, all in the same run
# directory. All ways have the bits of a single tower.
WAYS = {"resumed": [("towers", "2", "4"), ("processes", "2", "8")]}
if torch.distributed.is_available() and Path("/proc/self").exists():  # else none can be forked
    WAYS["2 ranks"] = [("collective", "2", "8")]


class Outcome(NamedTuple):
    """The outcome of a way of running a case."""

    code: int
    said: str  # the last line of output, after a failure
    digest: str | None = None
    doubts: tuple[str, ...] = ()
    tensors: Mapping[str, torch.Tensor] = {}


class Verdict(NamedTuple):
    """The verdict on a case."""

    name: str
    kind: str  # same, said, refused; or: silent, half said, wrong, changed, crash
    why: str
    notices: str = ""  # messages logged on the towers of this process


def makers() -> dict[str, Any]:
    """Return the maker of each case, by name."""
    if str(FOLDER) not in sys.path:
        sys.path.insert(0, str(FOLDER))
    made: dict[str, Any] = importlib.import_module("case").CASES
    importlib.import_module("cases")
    return made


def is_right(case: Any, verdict: Verdict) -> bool:
    """Return whether a verdict is among a case's allowed outcomes, with the required name."""
    allowed = (case.outcome,) if isinstance(case.outcome, str) else case.outcome
    named = verdict.kind == "same" or case.names in verdict.why
    return verdict.kind in allowed and named


# --- in this process ------------------------------------------------------------------------------


class Doubts(quorate.Callback):
    """Notes the doubts of all updates."""

    def __init__(self) -> None:
        self.found: list[str] = []

    def updated(self, report: quorate.Report) -> None:
        self.found += report.doubts


def judged_here(name: str) -> Verdict:
    """Run a case on one and on three towers of this process, and by a plain loop."""
    outcomes: dict[str, Outcome] = {}
    with redirect_stdout(io.StringIO()) as said:
        for workers, compute in ((1, {}), (3, {"spot_check_every": 1})):
            before = process_state()  # of the last way: the first way may import modules
            outcomes[f"{workers} towers"] = _towers(name, workers, **compute)
    changed = [part for part, value in process_state().items() if value != before[part]]
    kind, why = _verdict(name, outcomes)
    if changed and kind == "same":
        kind, why = "changed", f"{', '.join(changed)} of this process"
    return Verdict(name, kind, why, said.getvalue())


def process_state() -> dict[str, Any]:
    """Return the state of a process that user code can leave changed: generators and switches."""
    backends: Any = torch.backends
    numbers = np.random.RandomState()
    numbers.set_state(np.random.get_state())
    readers = (
        *(torch.get_default_dtype, torch.get_float32_matmul_precision, torch.is_grad_enabled),
        *(torch.get_deterministic_debug_mode, torch.get_num_threads),
        *(backends.cuda.flash_sdp_enabled, backends.cuda.mem_efficient_sdp_enabled),
        *(backends.cuda.math_sdp_enabled, backends.cuda.cudnn_sdp_enabled),
    )
    return {
        "random": hash(random.getstate()),
        "numpy": numbers.randn(3).tolist(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "backends": [
            *(backends.mkldnn.enabled, backends.cudnn.enabled, backends.cudnn.benchmark),
            *(backends.cudnn.deterministic, backends.cuda.matmul.fp32_precision),
            *(backends.cudnn.conv.fp32_precision, backends.cudnn.rnn.fp32_precision),
        ],
        **{reader.__name__: reader() for reader in readers},
    }


def _towers(name: str, count: int, **compute: Any) -> Outcome:
    state = torch.get_rng_state()
    torch.manual_seed(0)
    case, doubts = makers()[name](), Doubts()
    torch.set_rng_state(state)
    more = {name[2:]: int(value) for name, value in zip(*[iter(case.options)] * 2, strict=True)}
    workers = quorate.Workers(count, engine="towers", **more)
    chosen: dict[str, Any] = {"workers": workers, "compute": quorate.Compute(**compute)}
    try:
        model = case.fit(callbacks=[doubts], devices="cpu", **chosen)
    except OneLineError as error:
        return Outcome(error.exit_code, str(error))
    except Exception as error:
        return Outcome(1, repr(error))
    tensors = {n: t for n, t in model.state_dict().items() if isinstance(t, torch.Tensor)}
    return Outcome(0, "", digest(tensors.items()), tuple(doubts.found), tensors)


# --- by the command -------------------------------------------------------------------------------


def judged(name: str) -> Verdict:
    """Run a case on a tower of this process, and in all ways by the command."""
    options = makers()[name]().options
    outcomes = {"1 tower": _towers(name, 1)}
    with tempfile.TemporaryDirectory() as folder:
        for way, parts in WAYS.items():
            outcomes[way] = _outcome(name, Path(folder) / way, parts, options)
    return Verdict(name, *_verdict(name, outcomes))


def _outcome(name: str, run_dir: Path, parts: Any, options: tuple[str, ...]) -> Outcome:
    for engine, workers, steps in parts:
        chosen = ("--engine", engine, "--workers", workers, "--run-dir", str(run_dir), *options)
        ended = run(command(SCRIPT, name, "--steps", steps, options=chosen))
        if ended.code != 0:
            lines = ended.err.strip().splitlines() or ended.out.strip().splitlines() or [""]
            return Outcome(ended.code, lines[-1] if ended.code != 2 else ended.err.strip())
    facts = inspected(run_dir)
    tensors = load_file(Path(facts["checkpoint"]) / "model.safetensors")
    return Outcome(0, "", facts["digest"], tuple(facts["doubts"]), tensors)


# --- the verdict ----------------------------------------------------------------------------------


def _verdict(name: str, outcomes: Mapping[str, Outcome]) -> tuple[str, str]:
    for way, outcome in outcomes.items():
        if outcome.code not in (0, 2):
            return "crash", f"{way}: {outcome.said}"
        if "\n" in outcome.said:
            return "crash", f"{way}: more than one line: {outcome.said}"
    done = {way: o for way, o in outcomes.items() if o.code == 0}
    doubts = [doubt for o in done.values() for doubt in o.doubts]
    certain = [way for way, o in done.items() if not o.doubts]
    if len({o.digest for o in done.values()}) > 1:
        if not doubts:
            return "silent", ", ".join(f"{way} {str(o.digest)[:8]}" for way, o in done.items())
        if certain:
            return "half said", f"no doubt on {', '.join(certain)}; elsewhere {doubts[0]}"
    if doubts:
        return "said", "\n".join(doubts)
    for outcome in [*done.values()][:1]:  # all have the same bits
        torch.manual_seed(0)
        case = makers()[name]()
        if case.plain and (wrong := _difference(outcome.tensors, plain(case))):
            return "wrong", wrong
    for way, outcome in outcomes.items():
        if outcome.code == 2:
            return "refused", f"{way}: {outcome.said}"
    return "same", ""


def _difference(ours: Mapping[str, torch.Tensor], plain: Mapping[str, torch.Tensor]) -> str | None:
    for name, value in plain.items():
        if name not in ours:
            return f"{name} is not there"
        is_exact = not (value.dtype.is_floating_point or value.dtype.is_complex)
        tolerance = 0.0 if is_exact else 2e-4
        try:
            torch.testing.assert_close(ours[name], value, rtol=tolerance, atol=tolerance / 10)
        except AssertionError as error:
            return f"{name}: {error}"
    return None


def plain(case: Any) -> dict[str, torch.Tensor]:
    """Return the state dict after a plain loop over the same shards.

    The loop is torch alone: shard after shard, gradients of means weighted by rows, a step of the
    optimizer, buffers of each shard from the same values and averaged.
    """
    steps, batch_size, shards = (vars(sys.modules["case"])[n] for n in ("STEPS", "BATCH", "SHARDS"))
    model, data, size = case.model, case.data, batch_size // shards
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = case.optimizer(parameters)
    for step in range(steps):
        buffers = [b.clone() for b in model.buffers()]
        sums: list[Any] = [None] * len(parameters)
        seen: list[list[torch.Tensor]] = []  # buffers after each shard
        for shard in range(shards):
            start = step * batch_size % len(data) + shard * size
            rows = [data[row] for row in range(start, start + size)]
            for buffer, value in zip(model.buffers(), buffers, strict=True):
                buffer.data.copy_(value)
            model.train()
            for p in parameters:
                p.grad = None
            returned = case.loss(model, torch.utils.data.default_collate(rows))
            (returned["loss"] if isinstance(returned, dict) else returned).backward()
            for n, p in enumerate(parameters):
                if p.grad is not None:
                    grad = p.grad.detach().to_dense() / shards
                    sums[n] = grad if sums[n] is None else sums[n] + grad
            seen.append([b.detach().clone() for b in model.buffers()])
        for buffer, *values in zip(model.buffers(), *seen, strict=True):
            mean = torch.stack(values).double().mean(0) if buffer.is_floating_point() else values[0]
            buffer.data.copy_(mean)
        for p, total in zip(parameters, sums, strict=True):
            p.grad = total
        if (norm := case.optimize.get("clip_norm")) is not None:
            torch.nn.utils.clip_grad_norm_(parameters, norm)
        optimizer.step()
        if case.after is not None:
            case.after(model, optimizer, step + 1)
    torch.set_num_threads(threads)
    return {name: t for name, t in model.state_dict().items() if isinstance(t, torch.Tensor)}
