"""Strangers' trainings on several engines: what becomes of each, and whether it was said."""

from __future__ import annotations

import importlib
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed
from safetensors.torch import load_file
from support.runs import Ended, command, inspected, run

SCRIPT = Path(__file__).parents[1] / "strangers" / "stranger.py"
TOWERS = ("--engine", "towers", "--workers")
PROCESSES = ("--engine", "processes", "--workers")
RANKS = ("--engine", "collective", "--workers")


class Part(NamedTuple):
    """One command of a way."""

    options: tuple[str, ...]  # of the command
    arguments: tuple[str, ...] = ()  # of the script


# Ways of running a case, in steps that go on in one run directory: the same bits in all of them.
WAYS = {
    "1 tower": [Part((*TOWERS, "1"))],
    "3 towers": [Part((*TOWERS, "3"))],
    "2 processes": [Part((*PROCESSES, "2"))],
    "resumed": [Part((*TOWERS, "2"), ("--steps", "5")), Part((*PROCESSES, "3"))],
}
if torch.distributed.is_available() and Path("/proc/self").exists():  # else none can be forked
    WAYS["2 ranks"] = [Part((*RANKS, "2"))]


class Outcome(NamedTuple):
    """What became of one way of running a case."""

    code: int
    said: str  # the last line of what was printed, if it failed
    digest: str | None
    doubts: list[str]
    tensors: Mapping[str, torch.Tensor]


class Verdict(NamedTuple):
    """What became of a case."""

    name: str
    kind: str  # same, said, refused; or: silent, half said, wrong, crash
    why: str
    outcomes: Mapping[str, Outcome]


def judged(name: str, options: Iterable[str] = (), *, has_plain: bool) -> Verdict:
    """Run a case in all ways, and by a plain loop if there is one."""
    with tempfile.TemporaryDirectory() as folder:
        outcomes = {
            way: _outcome(name, Path(folder) / way.replace(" ", "-"), parts, tuple(options))
            for way, parts in WAYS.items()
        }
        plain = None
        if has_plain:
            file = Path(folder) / "plain.pt"
            done = run(command(SCRIPT, name, "--plain", str(file)))
            assert done.code == 0, done.err
            plain = torch.load(file, weights_only=True)
    kind, why = _verdict(outcomes, plain)
    return Verdict(name, kind, why, outcomes)


def verdicts(cases: Mapping[str, tuple[tuple[str, ...], bool]]) -> Iterator[Verdict]:
    """Judge cases, two at a time: from names to options and whether there is a plain loop."""
    with ThreadPoolExecutor(2) as pool:
        yield from pool.map(
            lambda item: judged(item[0], item[1][0], has_plain=item[1][1]), cases.items()
        )


def _outcome(name: str, run_dir: Path, parts: Sequence[Part], options: tuple[str, ...]) -> Outcome:
    ended = Ended(0, "", "")
    for part in parts:
        chosen = (*part.options, *options, "--run-dir", str(run_dir))
        ended = run(command(SCRIPT, name, *part.arguments, options=chosen))
        if ended.code != 0:
            break
    if ended.code != 0:
        lines = ended.err.strip().splitlines() or ended.out.strip().splitlines() or [""]
        return Outcome(
            ended.code, lines[-1] if ended.code != 2 else ended.err.strip(), None, [], {}
        )
    facts = inspected(run_dir)
    tensors = load_file(Path(facts["checkpoint"]) / "model.safetensors")
    return Outcome(0, "", facts["digest"], facts["doubts"], tensors)


def _verdict(
    outcomes: Mapping[str, Outcome], plain: Mapping[str, torch.Tensor] | None
) -> tuple[str, str]:
    crashed = {way: o for way, o in outcomes.items() if o.code not in (0, 2)}
    if crashed:
        way, outcome = next(iter(crashed.items()))
        return "crash", f"{way}: {outcome.said}"
    done = {way: o for way, o in outcomes.items() if o.code == 0}
    refused = {way: o for way, o in outcomes.items() if o.code == 2}
    for way, outcome in refused.items():
        if "\n" in outcome.said:
            return "crash", f"{way}: more than one line: {outcome.said}"
    doubts = [doubt for o in done.values() for doubt in o.doubts]
    digests = {o.digest for o in done.values()}
    if len(digests) > 1:
        certain = {o.digest for o in done.values() if not o.doubts}
        if not doubts:
            return "silent", ", ".join(f"{way} {str(o.digest)[:8]}" for way, o in done.items())
        if certain:
            ways = [way for way, o in done.items() if not o.doubts]
            return "half said", f"no doubt on {', '.join(ways)}; elsewhere {doubts[0]}"
        return "said", doubts[0]
    if doubts:
        return "said", doubts[0]
    if plain is not None and done:
        way, outcome = next(iter(done.items()))
        if (wrong := _difference(outcome.tensors, plain)) is not None:
            return "wrong", wrong
    if refused:
        way, outcome = next(iter(refused.items()))
        return "refused", f"{way}: {outcome.said}"
    return "same", ""


def _difference(ours: Mapping[str, torch.Tensor], plain: Mapping[str, torch.Tensor]) -> str | None:
    for name, value in plain.items():
        mine = ours.get(name)
        if mine is None:
            return f"{name} is not there"
        if mine.shape != value.shape or mine.dtype != value.dtype:
            return (
                f"{name}: {mine.dtype} {tuple(mine.shape)}, not {value.dtype} {tuple(value.shape)}"
            )
        if value.dtype.is_floating_point or value.dtype.is_complex:
            tolerance = 1e-10 if value.dtype == torch.float64 else 2e-4
            if not torch.allclose(mine, value, rtol=tolerance, atol=tolerance / 10):
                return f"{name}: off by {float((mine - value).abs().max()):.2g}"
        elif not torch.equal(mine, value):
            return f"{name}: {mine.flatten()[:4].tolist()}, not {value.flatten()[:4].tolist()}"
    return None


def catalogue() -> dict[str, Any]:
    """Return all cases by name, made."""
    if str(SCRIPT.parent) not in sys.path:
        sys.path.insert(0, str(SCRIPT.parent))
    cases = importlib.import_module("case").CASES
    importlib.import_module("cases")
    return {name: make() for name, make in cases.items()}


def is_right(case: Any, verdict: Verdict) -> bool:
    """Return whether a verdict is one of those that a case may have, with what it has to name."""
    named = verdict.kind == "same" or case.names in verdict.why
    return verdict.kind in case.outcomes and named


def main() -> None:
    """Print the table of all cases, or of those whose names have a word in them."""
    words = sys.argv[1:]
    chosen = {n: c for n, c in catalogue().items() if not words or any(w in n for w in words)}
    count: dict[str, int] = {}
    for verdict in verdicts({n: (c.options, c.plain) for n, c in chosen.items()}):
        mark = " " if is_right(chosen[verdict.name], verdict) else "!"
        count[mark + verdict.kind] = count.get(mark + verdict.kind, 0) + 1
        print(f"{mark} {verdict.kind:10} {verdict.name:36} {verdict.why[:300]}", flush=True)
    print({name.strip(): n for name, n in sorted(count.items())})


if __name__ == "__main__":
    main()
