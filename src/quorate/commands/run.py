"""``quorate run``: a script, with options that override what it passes to ``Trainer``."""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quorate.errors import SettingError
from quorate.machine.dies_with_parent import die_with
from quorate.settings import real
from quorate.training.observer import observing
from quorate.transports.processes.script import Script

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[Any]

OVERRIDES = (
    *("devices", "workers", "shards", "engine", "threads", "update", "seed", "run_dir", "fresh"),
    *("init_from", "save_every_s", "save_every_steps", "max_time_s", "nonfinite"),
    *("memory_fraction", "precision", "compile", "soft_placement", "log_placement", "profile"),
    *("profile_s", "record", "record_updates"),
)
SWITCHES = {
    "fresh": "begin anew; what is in --run-dir is moved aside",
    "compile": "compile the model, once per shape of a shard",
    "soft_placement": "operators without a kernel on the device run on the CPU",
    "log_placement": "show which module and operator ran where",
}


def add_to(commands: Commands) -> None:
    parser = commands.add_parser("run", help="run a training script", description=__doc__)
    parser.add_argument("--devices", help="cpu, cuda, cuda:0,cuda:1, mps")
    parser.add_argument("--workers", type=int, help="how many, dealt over the devices in turn")
    parser.add_argument("--shards", type=int, help="pieces of a batch; the result depends on it")
    parser.add_argument("--engine", help="processes, or towers: a thread per worker")
    parser.add_argument("--threads", type=int, help="intra-op threads of each worker")
    parser.add_argument(
        "--memory-fraction", type=float, help="bound on a worker's share of its GPU's memory"
    )
    parser.add_argument("--precision", help="fp32, tf32, bf16 or fp16")
    for name, text in SWITCHES.items():
        flag = f"--{name.replace('_', '-')}"
        parser.add_argument(flag, action="store_const", const=True, help=text)
    parser.add_argument("--update", help="the rule: sync, quorum:R, async, bounded:K")
    parser.add_argument("--seed", type=int, help="also of Python's, NumPy's and torch's generators")
    parser.add_argument("--run-dir", help="where state and metrics are saved")
    parser.add_argument("--init-from", help="weights to begin from: a file or a run directory")
    parser.add_argument("--save-every-s", type=float, help="seconds between checkpoints (600)")
    parser.add_argument("--save-every-steps", type=int, help="also after every so many updates")
    parser.add_argument("--max-time-s", type=float, help="seconds after which to save and stop")
    parser.add_argument("--nonfinite", help="stop, or skip: what to do before such an update")
    parser.add_argument(
        "--profile",
        metavar="FILE",
        help="measure where a step's time goes, write it as JSON, and end; see quorate bench",
    )
    parser.add_argument("--profile-s", type=float, help="seconds to measure (8), after a warm-up")
    parser.add_argument(
        "--record",
        metavar="FOLDER",
        help="note digests of all that is computed in an empty folder, and end; see quorate verify",
    )
    parser.add_argument("--record-updates", type=int, help="how many updates to record (20)")
    parser.add_argument("--dies-with", type=int, metavar="PID", help=argparse.SUPPRESS)
    parser.add_argument("script", help="a Python file")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="passed on to the script")
    parser.set_defaults(call=run)


def run(options: argparse.Namespace) -> int:
    """Run the script as ``__main__`` in this process.

    Raises:
        SettingError: there is no such script.
        Whatever the script raises: an exception of its own ends in its traceback.
    """
    if options.dies_with is not None:
        die_with(options.dies_with)
    script = Path(options.script)
    if not script.is_file():
        raise SettingError("script", options.script, "a Python file", "check the path")
    given = {n: v for n in OVERRIDES if (v := getattr(options, n)) is not None}
    if options.profile is not None:
        file = Path(options.profile).absolute()  # a script may change its folder
        if not file.parent.is_dir():
            raise SettingError("profile", options.profile, "a file in a folder", "make the folder")
        given["profile"] = str(file)
    if options.record is not None:
        folder = Path(options.record).absolute()
        if not folder.is_dir() or any(folder.iterdir()):
            raise SettingError("record", options.record, "an empty folder", "make one")
        given["record"] = str(folder)
    if options.profile_s is not None:
        real("profile_s", options.profile_s, above=0)
    path = str(script.resolve())
    with ExitStack() as stack:
        if options.profile is not None:
            from quorate.commands.bench.profile import profiled

            stack.enter_context(observing(profiled))
        if options.record is not None:
            from quorate.commands.verify.recorder import recorded

            stack.enter_context(observing(recorded))
        Script(path, None, tuple(options.arguments), str(Path.cwd()), given).run()
    return 0
