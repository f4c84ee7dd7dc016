"""Change the source in small ways, and see whether a test fails.

    python tests/mutants.py --record build/executed -- -n 2 -m "not slow"
    python tests/mutants.py --executed build/executed --per-room 8 --seed 1

Mutants are drawn from a seed, in each room in turn of the kinds in ``support/mutants/kinds.py``,
from the source as it is. Each mutant runs against the tests of the changed line, fastest first,
until the first failure, for at most a minute. The table at the end has the share of killed mutants
by kind and by room; ``--json`` writes all verdicts; ``--again`` tries the mutants of such a file
once more, on another tree for example.
"""

import argparse
import json
import queue
import random
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from support.mutants import executed, trees
from support.mutants.kinds import KINDS, Mutation, mutations
from support.mutants.trial import Mutant, Trials, Verdict

HERE = Path(__file__).parents[1]


def draw(source: Path, rooms: list[str], per_room: int, seed: int) -> list[Mutant]:
    """Return mutants of a source folder: of each room as many, in turn of each kind."""
    by_room: dict[str, dict[str, list[Mutant]]] = defaultdict(lambda: defaultdict(list))
    for path in sorted(source.rglob("*.py")):
        for mutation in mutations(path.read_text()):
            mutant = Mutant(str(path.relative_to(source)), mutation)
            by_room[mutant.room][mutation.kind].append(mutant)
    drawn = []
    for room in rooms or sorted(by_room):
        generator = random.Random(f"{seed} {room}")
        kinds = generator.sample(sorted(KINDS), len(KINDS))
        for turn in range(per_room):
            # A room without mutants of a kind has a mutant of the next kind instead.
            for kind in kinds[turn % len(kinds) :] + kinds:
                if candidates := by_room[room][kind]:
                    drawn.append(candidates.pop(generator.randrange(len(candidates))))
                    break
    return drawn


def tried(
    tree: Path, mutants: list[Mutant], found: executed.Executed, jobs: int, limit_s: float
) -> Iterator[tuple[Mutant, Verdict]]:
    """Yield the verdicts on mutants, of several at a time."""
    fails: dict[str, bool] = {}
    idle: queue.SimpleQueue[Trials] = queue.SimpleQueue()

    def try_one(mutant: Mutant) -> tuple[Mutant, Verdict]:
        trials = idle.get()
        try:
            return mutant, trials.run(mutant)
        finally:
            idle.put(trials)

    with (
        tempfile.TemporaryDirectory(prefix="quorate-mutants-") as folder,
        ThreadPoolExecutor(jobs) as pool,
    ):
        for number in range(jobs):
            trees.copy(tree, Path(folder, str(number)))
            idle.put(Trials(Path(folder, str(number)), found, fails, limit_s))
        yield from pool.map(try_one, mutants)


def table(title: str, verdicts: list[tuple[Mutant, Verdict]], by: dict[Mutant, str]) -> None:
    """Print the shares of killed mutants."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for mutant, verdict in verdicts:
        for row in (by[mutant], "all"):
            counts[row][verdict.outcome] += 1
    print(f"\n{title:14}  mutants  killed  hung  survived  unexecuted  found")
    for row in [*sorted(counts.keys() - {"all"}), "all"]:
        of = counts[row]
        share = (of["killed"] + of["hung"]) / of.total()
        print(
            f"{row:14}{of.total():9}{of['killed']:8}{of['hung']:6}{of['survived']:10}"
            f"{of['unexecuted']:12}{share:7.0%}"
        )


def main() -> None:
    """Record the executed lines of tests, or try mutants."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--tree", type=Path, default=HERE, help="source tree (default: this one)")
    parser.add_argument("--record", type=Path, help="write which test executes which line, and end")
    parser.add_argument("--executed", type=Path, action="append", default=[], help="recordings")
    parser.add_argument("--rooms", nargs="*", default=[], help="default: all")
    parser.add_argument("--per-room", type=int, default=8)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=2, help="mutants at a time")
    parser.add_argument("--limit-s", type=float, default=60.0, help="of the tests of one mutant")
    parser.add_argument("--json", type=Path, help="write all verdicts")
    parser.add_argument("--again", type=Path, help="try the survivors of a file of verdicts")
    parser.add_argument("--list", action="store_true", help="print the mutants, and end")
    parser.add_argument("selection", nargs="*", help="arguments of pytest, after --")
    asked = parser.parse_args()
    tree = asked.tree.resolve()
    if asked.record:
        executed.record(tree, asked.record.resolve(), asked.selection)
        return
    source = tree / "src" / "quorate"
    mutants = draw(source, asked.rooms, asked.per_room, asked.seed)
    if asked.again:
        survivors = {
            (line["file"], *line["mutation"])
            for line in json.loads(asked.again.read_text())
            if line["outcome"] in ("survived", "unexecuted")
        }
        mutants = [Mutant(file, Mutation(*mutation)) for file, *mutation in sorted(survivors)]
    if asked.list:
        for mutant in mutants:
            print(mutant, mutant.mutation.replacement, sep="   ")
        return
    if not asked.executed:
        parser.error("--executed: record what tests execute first, see --record")
    began = time.monotonic()
    verdicts = []
    found = executed.load(asked.executed)
    for mutant, verdict in tried(tree, mutants, found, asked.jobs, asked.limit_s):
        verdicts.append((mutant, verdict))
        print(f"{verdict.outcome:11}{mutant}   {verdict.by}", flush=True)
    table("kind", verdicts, {mutant: mutant.mutation.kind for mutant, _ in verdicts})
    table("room", verdicts, {mutant: mutant.room for mutant, _ in verdicts})
    print(f"\n{time.monotonic() - began:.0f} s")
    if asked.json:
        lines = [{"file": m.file, "mutation": m.mutation, **v._asdict()} for m, v in verdicts]
        asked.json.write_text(json.dumps(lines, indent=1))


if __name__ == "__main__":
    main()
