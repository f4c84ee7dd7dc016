"""Workers: how many there are, how they are reached, and what each of them may take."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, field

from quorate.settings import AtResume, Settings, about, at_least, between, one_of

# Beyond what any machine has: what is meant for another option is no crash, and no full memory.
MOST_WORKERS, MOST_THREADS = 4096, 1024

ORDERED, NATIVE = "ordered", "native"  # ways to add the gradients of ranks


@dataclass(frozen=True)
class Workers(Settings):
    """The workers of a run. A plain number in its place is how many there are.

    Args:
        count: how many, dealt over the devices in turn. Default: one per device; without devices
            named, one per GPU, or one per CPU core and at most 8.
        engine: how workers are reached: "processes" of their own, which run the script again up to
            the first training loop, "towers", threads of this process, or "collective", ranks that
            make each update together, on one machine or, started by torchrun, on many, or "ray",
            processes on the nodes of a Ray cluster. Default:
            collective under torchrun, processes for several CPU workers of a script; towers in a
            notebook, at a prompt and on GPUs.
        threads: intra-op threads of each worker. The bits depend on it.
        timeout_s: seconds after which a worker process that is still at one shard, and has been
            for 3 times its usual time, is replaced, and one that has not reached the training loop
            by then. Ranks of a collective end together where one of them is. Turn it up if a step
            or the start of the script may take longer.
        exchange: how the ranks of a collective add gradients: "ordered", along the tree of shards,
            or "native", by torch.distributed's own reduce-scatter: then the bits depend on the
            number of ranks. It is there to measure what order costs.
        bucket_mb: how many megabytes of gradients the ranks of a collective exchange at a time,
            while others are still computed.
        address: of a Ray cluster, "HOST:PORT", or "auto" for the one of this machine. Default: a
            local one, which ends with the run.
        worker_resources: what each worker takes of its node in a Ray cluster, by Ray's names:
            "CPU=1,GPU=1".
        working_dir: a folder that Ray copies to every node, and that workers run in: the script's,
            or one above it. Default: the script is at the same path on every node.
        memory_fraction: how much of its device's memory each worker's tensors may take, above 0
            and at most 1: set it where others need the rest. Default: no bound, memory is taken
            as it is needed. It has no effect on a CPU.
    """

    count: int | None = field(
        default=None,
        metadata=about(
            "how many, dealt over the devices in turn",
            name="workers",
            kind=int,
            check=at_least(1, MOST_WORKERS),
        ),
    )
    _: KW_ONLY
    engine: str | None = field(
        default=None,
        metadata=about("processes, towers (a thread per worker), collective, or ray", kind=str),
    )
    threads: int = field(
        default=1,
        metadata=about(
            "intra-op threads of each worker",
            kind=int,
            check=at_least(1, MOST_THREADS),
            at_resume=AtResume.SAID,
        ),
    )
    timeout_s: float = field(
        default=300.0,
        metadata=about(
            "seconds of silence after which a worker process is replaced (300)",
            name="worker_timeout_s",
            kind=float,
            check=between(0),
        ),
    )
    exchange: str = field(
        default=ORDERED,
        metadata=about(
            "how ranks add gradients: ordered, or native (torch's; other bits)",
            kind=str,
            check=lambda name, value: one_of(name, value, (ORDERED, NATIVE)),
        ),
    )
    bucket_mb: float = field(
        default=16.0,
        metadata=about(
            "megabytes of gradients that ranks exchange at a time (16)",
            kind=float,
            check=between(0),
        ),
    )
    address: str | None = field(
        default=None,
        metadata=about("of a Ray cluster, HOST:PORT; without it a local one", kind=str),
    )
    worker_resources: str = field(
        default="CPU=1", metadata=about("what a worker takes of a Ray node: CPU=1,GPU=1", kind=str)
    )
    working_dir: str | None = field(
        default=None,
        metadata=about("folder with the script that Ray copies to every node", kind=str),
    )
    memory_fraction: float | None = field(
        default=None,
        metadata=about(
            "bound on a worker's share of its GPU's memory", kind=float, check=between(0)
        ),
    )
