"""Compare the bits of random runs with the bits of a base commit.

    python tests/compare_with_base.py --configurations 40 --seed 1
    python tests/compare_with_base.py --base HEAD~1 --only "model=mlp engine=towers:3"
    python tests/compare_with_base.py --base HEAD --golden --devices sim:0,sim:1
    python tests/compare_with_base.py --record

Every configuration (model, optimizer, data, engine, event) runs with the code of the base commit
and with the code of this tree, side by side. Digests, metrics apart from times, and exit codes have
to be equal; the wording of messages may differ. The base commit is built as a git worktree in a
temporary folder. Configurations follow from the seed alone: configuration 7 of a seed does not
depend on the number of configurations.

``--record`` writes the golden digests of this kind of processor, with the code of commit 1ed5e4f:
of all runs of ``tests/golden/configurations.txt``, and of runs that go on from the checkpoints of
``tests/fixtures/checkpoints-1ed5e4f``. Record after a new line in the list, and on machines without
a record: there the tests compare live, and take twice as long.

Exit code 0: all configurations are equal. Exit code 1: some configurations differ; a line under
each shows the command that repeats the difference; or a golden run fails. Exit code 2: a mistake in
the options.
"""

import argparse
import json
import shlex
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from itertools import islice
from pathlib import Path

from support.accelerator.runs import OnDevices
from support.trainings import checkpoints, golden
from support.trainings.configuration import Configuration, draw_configurations, parse
from support.trainings.runner import differences, run_configuration
from support.trainings.trees import BASE, CURRENT, NoBaseError, Runs, Tree, base_tree

TWO_RANKS_ON_ONE = "expected a device for each rank"  # refused as on GPUs: by NCCL's rule


def main() -> int:
    """Run the command."""
    options = arguments()
    drawn = islice(draw_configurations(options.seed), options.configurations)
    configurations = options.only or (golden.configurations() if options.golden else [*drawn])
    if options.list:
        print(*configurations, sep="\n")
        return 0
    with ExitStack() as stack:
        try:
            base = stack.enter_context(base_tree(BASE if options.record else options.base))
        except NoBaseError as error:
            print(f"compare_with_base: {error}", file=sys.stderr)
            return 2
        if options.record:
            return record(base)
        current: Runs = (
            OnDevices(*options.devices.split(","), delays=(0.3, 300, options.seed))
            if options.devices
            else stack.enter_context(Tree(CURRENT))
        )
        return compare(configurations, [base, current], options)


def arguments() -> argparse.Namespace:
    """Return the options of the command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--base", default=BASE[:7], metavar="COMMIT", help="%(default)s")
    add("--configurations", type=int, default=40, metavar="N", help="%(default)s")
    add("--seed", type=int, default=0, metavar="S", help="%(default)s")
    only = "run this configuration instead of random configurations; may be repeated"
    add("--only", action="append", type=configuration, metavar="WORDS", help=only)
    add("--golden", action="store_true", help="run the golden configurations")
    devices = "run this tree on these simulated devices, and the base on the CPU"
    add("--devices", default="", metavar="D[,D...]", help=devices)
    add("--record", action="store_true", help="write the golden digests of this processor")
    add("--list", action="store_true", help="print the configurations and end")
    options = parser.parse_args()
    if options.configurations < 1:
        parser.error(f"--configurations: got {options.configurations}, expected a number >= 1")
    return options


def configuration(text: str) -> Configuration:
    """Return the configuration of ``--only``."""
    try:
        return parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def compare(
    configurations: list[Configuration], trees: list[Runs], options: argparse.Namespace
) -> int:
    """Compare all configurations, print a line for each, and return the exit code."""
    start = time.monotonic()
    different = failed = refused = count = 0
    on_devices = ["--devices", options.devices] if options.devices else []
    with ThreadPoolExecutor(len(trees)) as pool:
        for count, line in enumerate(configurations, 1):
            base, current = pool.map(partial(run_configuration, configuration=line), trees)
            found, last = differences(base, current), current.codes[-1]
            failed += not found and last != 0
            state = "DIFFERENT" if found else "equal" if last == 0 else f"equal, exit code {last}"
            is_one = bool(options.devices) and "," not in options.devices
            if is_one and current.codes == [2] and TWO_RANKS_ON_ONE in current.said:
                found, state, refused = [], "refused", refused + 1
            print(f"{count:3} {time.monotonic() - start:6.1f} s  {state:20} {line}", flush=True)
            if found:
                different += 1
                ends = [f"base:    {base.said}", f"current: {current.said}"]
                words = shlex.join(["--base", options.base, *on_devices, "--only", str(line)])
                repeat = f"repeat: python tests/compare_with_base.py {words}"
                print(*(f"      {each}" for each in (*found, *ends, repeat)), sep="\n", flush=True)
    print(
        f"{count} configurations in {time.monotonic() - start:.0f} s: {different} differ from "
        f"{options.base}, {failed} fail alike with both, {refused} are refused on these devices"
    )
    return 1 if different else 0


def record(base: Tree) -> int:
    """Write the base commit's results on this kind of processor, and return the exit code."""
    with tempfile.TemporaryDirectory(prefix="quorate-") as folder:
        resumed = {
            name: checkpoints.resume(base, name, Path(folder, name)).facts
            for name in checkpoints.CHECKPOINTS
        }
    results = golden.results(base, golden.configurations())
    failed = {run: result["codes"] for run, result in results.items() if result["codes"][-1] != 0}
    if failed:
        print(*(f"{run}: {codes}" for run, codes in failed.items()), sep="\n", file=sys.stderr)
        return 1
    golden_file = golden.file_of(golden.processor())
    for file, found in ((golden_file, results), (checkpoints.digests_file(), resumed)):
        content = {"base": BASE, "processor": golden.processor(), "results": found}
        file.write_text(json.dumps(content, indent=1) + "\n")
        print(f"{len(found)} runs: {file.relative_to(CURRENT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
