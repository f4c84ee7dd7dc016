"""Compare the bits of random runs with those of a base commit.

    python tests/compare_with_base.py --configurations 40 --seed 1
    python tests/compare_with_base.py --base HEAD~1 --only "model=mlp engine=towers:3"

Every configuration (model, optimizer, data, engine, event) runs with the code of the base commit
and with the code of this tree, side by side. Digests, metrics apart from times, and exit codes have
to be equal; the wording of messages may differ. The base commit is built as a git worktree in a
temporary folder. Configurations follow from the seed alone: configuration 7 of a seed does not
depend on the number of configurations.

Exit code 0: all configurations are equal. Exit code 1: some configurations differ; a line under
each shows the command that repeats the difference. Exit code 2: a mistake in the options.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from itertools import islice

from support.trainings.configuration import Configuration, draw_configurations, parse
from support.trainings.runner import Outcome, differences, run_configuration
from support.trainings.trees import BASE, CURRENT, NoBaseError, Tree, worktree


def main() -> int:
    """Run the command."""
    options = arguments()
    configurations = options.only or [
        *islice(draw_configurations(options.seed), options.configurations)
    ]
    if options.list:
        print(*configurations, sep="\n")
        return 0
    with ExitStack() as stack:
        try:
            folder = stack.enter_context(worktree(options.base))
        except NoBaseError as error:
            print(f"compare_with_base: {error}", file=sys.stderr)
            return 2
        trees = [stack.enter_context(Tree(each)) for each in (folder, CURRENT)]
        return compare(configurations, trees, options)


def arguments() -> argparse.Namespace:
    """Return the options of the command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--base", default=BASE[:7], metavar="COMMIT", help="%(default)s")
    parser.add_argument(
        "--configurations", type=number, default=40, metavar="N", help="%(default)s"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="%(default)s")
    parser.add_argument(
        "--only",
        action="append",
        type=line,
        metavar="WORDS",
        help="run this configuration instead of random configurations; may be repeated",
    )
    parser.add_argument("--first", action="store_true", help="end with the first difference")
    parser.add_argument("--list", action="store_true", help="print the configurations and end")
    parser.add_argument("--verbose", action="store_true", help="print last lines of failed runs")
    return parser.parse_args()


def line(text: str) -> Configuration:
    """Return the configuration of ``--only``."""
    try:
        return parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def number(text: str) -> int:
    """Return the number of ``--configurations``."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a whole number >= 1")
    return int(text)


def outcomes(trees: list[Tree], configurations: list[Configuration]) -> Iterator[list[Outcome]]:
    """Yield the outcomes with both trees, which run at the same time."""
    with ThreadPoolExecutor(len(trees)) as pool:
        for configuration in configurations:
            yield [*pool.map(partial(run_configuration, configuration=configuration), trees)]


def compare(
    configurations: list[Configuration], trees: list[Tree], options: argparse.Namespace
) -> int:
    """Compare all configurations, print a line for each, and return the exit code."""
    start = time.monotonic()
    different = refused = 0
    pairs = zip(configurations, outcomes(trees, configurations), strict=True)
    for count, (configuration, (base, current)) in enumerate(pairs, 1):
        took_s, last = time.monotonic() - start, current.codes[-1]
        found = differences(base, current)
        refused += not found and last != 0
        state = "DIFFERENT" if found else "equal" if last == 0 else f"equal, exit code {last}"
        print(f"{count:3} {took_s:6.1f} s  {state:20} {configuration}", flush=True)
        for each in found:
            print(f"      {each}")
        if options.verbose and base.codes[-1] != 0:
            print(f"      base:    {base.said}")
        if options.verbose and last != 0:
            print(f"      current: {current.said}")
        if found:
            different += 1
            words = ["--base", options.base, "--only", str(configuration)]
            print(
                f"      repeat: python tests/compare_with_base.py {shlex.join(words)}", flush=True
            )
            if options.first:
                break
    print(
        f"{count} configurations in {time.monotonic() - start:.0f} s: {different} differ from "
        f"{options.base}, {refused} fail alike with both"
    )
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
