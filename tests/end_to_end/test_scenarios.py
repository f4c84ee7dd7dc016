"""Scenarios: trainings with faults on every engine, a line each; see ``support/scenarios.py``."""

from pathlib import Path

import pytest
from support.references import References
from support.scenarios import Scenario, check

pytestmark = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="looks into /proc")

KILLED = "was killed by signal 9 (SIGKILL)"
ANOTHER = "another is starting"
PHASES = ("fetching", "starting", "forward", "backward", "pushing", "waiting")
IN_ALL_PHASES = "+".join(f"kill@{phase}" for phase in PHASES)
IGNORED = ("int", "term", "hup", "pause")  # by all processes but the run's own
ROWS_OF = ["(cpu), step 3, shard ", ", rows ["]


def signals(place: str, deadly: str) -> str:
    """Return faults: a process gets a sequence of signals, one for each update."""
    names = enumerate((*IGNORED, *deadly.split()), 2)
    return "+".join(f"{name}@{place}:{step}" for step, name in names)


ONE_KILL = Scenario(
    "model=mlp optimizer=adam options=ema data=augmented shards=6 engine=processes:2 steps=12"
    " pause=10 fault=kill@fetching",
    says=[KILLED, ANOTHER],
)
# Killed, stopped, slow, or once wrong workers: the bits of one worker.
WORKERS = [
    Scenario(
        "model=convolution optimizer=adam data=augmented shards=6 engine=processes:3 steps=16"
        f" pause=10 fault={IN_ALL_PHASES}",
        says=[KILLED, ANOTHER],
    ),
    Scenario(
        "model=mlp optimizer=adam options=ema+clip data=short shards=4 engine=processes:2 timeout=5"
        " fault=raise@shard:2+hang@shard:3+hang@shard:3+exit@shard:4+segfault@shard:5",
        says=[
            "no answer for 5 s in step 3",
            "ended with exit code 3 in step 4, shard ",
            "was killed by signal 11 (SIGSEGV) in step 5, shard ",
        ],
    ),
    # Short shards are dealt in runs.
    Scenario(
        "model=linear data=short shards=6 engine=processes:2 steps=30"
        " fault=kill@worker:10+pause@worker:15+kill@worker:20"
    ),
    # A caller waiting for the run takes 3 s for each update.
    Scenario(
        "model=mlp shards=6 engine=processes:3 steps=16 pause=10 fault=slow@one:2",
        median_s=2.0,
        end_s=2.5,
    ),
    Scenario(
        "model=mlp shards=6 engine=processes:3 steps=24 timeout=5 pause=10"
        " fault=stop@forward+stop@waiting",
        median_s=4.0,
        end_s=4.0,
    ),
    Scenario(
        "model=mlp shards=6 engine=processes:3 steps=12 timeout=4 pause=80"
        " fault=kill@worker:2+stop@starting",
        says=["took more than worker_timeout_s=4 s to start; another is starting"],
    ),
    # With a check after every update, most kills hit a check.
    Scenario(
        "model=mlp options=checks shards=6 engine=processes:3 steps=16 pause=10"
        " fault=kill@forward+kill@backward+kill@forward+kill@backward",
        hides=["same bits: no"],
    ),
    Scenario("model=mlp engine=processes:2 timeout=5 fault=stop@server:2+kill@worker:3"),
    Scenario("model=tied engine=stages:2 timeout=5 fault=stop@shard:2"),
    # Gradients computed again at other parameters, with totals of terms, and back through
    # represented shards of a loss over the whole batch; gradients by rows.
    *(
        Scenario(
            f"{training} engine=processes:2 steps=6 pause=10 fault=kill@forward+kill@backward",
            says=[KILLED],
        )
        for training in (
            "model=mlp optimizer=lbfgs shards=3",
            "model=contrastive optimizer=adam options=ema+clip data=short",
            "model=terms optimizer=adam options=ema+clip data=short shards=5",
            "model=sparse optimizer=adagrad options=ema+clip data=short",
        )
    ),
    # Models in turns, and workers killed while their loaders start.
    Scenario(
        "model=phases optimizer=adam options=ema+clip+schedule data=short engine=processes:3"
        " event=kill-worker at=5"
    ),
    Scenario("model=phases options=ema+schedule data=short engine=ranks:2"),
    # Several optimizers in each update.
    *(
        Scenario(f"{training} data=short {engines}", codes=(code, 0))
        for training in (
            "model=mlp optimizer=several options=ema+clip",
            "model=phases optimizer=several options=schedule",
        )
        for engines, code in (
            ("engine=processes:2 event=resume then=ranks:2", 0),
            ("engine=ranks:4 event=kill-worker then=towers:3", 1),
        )
    ),
    Scenario("model=mlp optimizer=several engine=stages:2 event=resume then=ranks:2", [0, 0]),
    Scenario("model=mlp optimizer=several rule=async steps=40 engine=processes:2"),
    # Terms of a loss, in stages and on ranks, after kills.
    *(
        Scenario(
            f"model=terms optimizer={optimizer} data=short shards=5 event=kill-run {engines}",
            codes=(-9, 0),
        )
        for optimizer, engines in (
            ("adam", "engine=stages:2 then=ranks:2"),
            ("lbfgs", "engine=ranks:4 then=processes:2"),
        )
    ),
    Scenario(
        "model=mlp data=loaded engine=processes:2 steps=16 pause=5"
        " fault=kill@worker:2+kill@starting+kill@fetching"
    ),
]
# Each update rule; of async and bounded each shard is an update.
RULES = [
    Scenario(
        "model=mlp data=plain rule=async steps=60 engine=processes:3 then=processes:2 pause=3"
        " fault=kill@forward+kill@pushing+term@run:40/slow@one:44",
        codes=(143, 0),
        says=["resumed step 4"],
        end_s=2.5,
    ),
    Scenario(
        "model=mlp data=short rule=bounded:4 steps=80 engine=processes:3 pause=3"
        " fault=kill@forward+kill@backward"
    ),
    Scenario(
        "model=mlp data=short rule=quorum:3 steps=20 engine=processes:3 pause=3"
        " fault=kill@forward+slow@one:3",
        median_s=1.5,
        end_s=2.5,
    ),
    Scenario("model=mlp data=augmented rule=async steps=40 engine=processes:1"),
]
# Runs killed or told to stop, and resumed elsewhere.
PARTS = [
    Scenario(
        "model=convolution optimizer=adam options=ema+clip+schedule+validation data=augmented"
        " steps=16 engine=processes:2 then=stages pause=2"
        " fault=kill@save:2/kill@save:5/kill@forward+kill@save:9/",
        codes=(-9, -9, -9, 0),
    ),
    Scenario(
        "model=experts optimizer=adamw options=ema+schedule data=short shards=3 steps=16"
        " engine=towers:2 then=processes:3 fault=term@save:2/term@run:5/int@run:11/",
        codes=(143, 143, 130, 0),
        says=["resumed step 5 ", "resumed step 11 "],
    ),
    # Every signal to the run itself.
    Scenario(
        "model=mlp options=validation data=loaded steps=15 engine=processes:2 then=towers:2 fault="
        "int@run:3/term@run:5/hup@all:7/abrt@run:9/hang@one:9+kill@run:11/usr1@run:12+pipe@run:13",
        codes=(130, 143, 129, -6, -9, 0),
        says=[": SIGINT\n", ": SIGTERM\n", ": SIGHUP\n", *(f"saved step {n}" for n in (3, 5, 7))],
        hides=[ANOTHER],
    ),
    *(
        Scenario(
            "model=mlp data=loaded steps=16 engine=processes:2 pause=5"
            f" fault={signals(place, deadly)}"
        )
        for place, deadly in (("server", "kill"), ("worker", "segv quit"), ("loader", "kill"))
    ),
]
MISTAKES = [
    Scenario(
        "model=mlp engine=processes:2 fault=raise!@shard:3",
        codes=[1],
        says=[
            *ROWS_OF,
            *("in fail\n    raise MineError(3, 4)\n", "MineError: 3 and 4\n"),
            *("a worker's own words", "faults.py"),
        ],
        tracebacks=1,
        saved=3,
    ),
    Scenario(
        "model=mlp engine=processes:2 fault=segfault!@shard:3",
        codes=[1],
        says=["was killed by signal 11 (SIGSEGV)", "step 3, shard ", ", rows ["],
        tracebacks=1,
        saved=3,
    ),
    Scenario(
        "model=mlp engine=processes:2 fault=memory!@shard:3",
        codes=[1],
        says=[
            *("step 3, shard ", ", rows ["),
            *("4503599627370496 bytes", "quorate: out of memory on cpu: "),
            "MiB free, this process has",
            "What helps: more shards than 4 (each is smaller)",
        ],
        tracebacks=1,
        saved=3,
    ),
    Scenario(
        "model=mlp engine=processes:2 fault=vector!@shard:3",
        codes=[2],
        says=["\nquorate: loss: got a tensor of shape "],
        saved=3,
    ),
    Scenario(
        "model=mlp engine=processes:2 fault=nan@one:3",
        codes=[1],
        says=[" is not finite in step 3: shard ", "look for what is different on worker "],
        saved=3,
    ),
    Scenario(
        "model=sparse optimizer=adagrad data=short engine=ranks:2",
        codes=[2],
        says=["expected one that hands over the gradient of", "leave sparse=True out"],
    ),
    # Scripts with differences in workers.
    Scenario(
        "model=mlp engine=processes:2 fault=data@script",
        codes=[2],
        says=["has another dataset", "its first shard, rows [", "engine='towers'"],
    ),
    Scenario(
        "model=mlp engine=processes:2 fault=model@script",
        codes=[2],
        says=["made another model: got", "expected", "engine='towers'"],
    ),
]


def test_a_worker_that_is_killed_changes_nothing(references: References) -> None:
    check(ONE_KILL, references)


@pytest.mark.slow
@pytest.mark.parametrize("scenario", [*WORKERS, *RULES, *PARTS, *MISTAKES], ids=str)
def test_what_becomes_of_a_run(scenario: Scenario, references: References) -> None:
    check(scenario, references)
