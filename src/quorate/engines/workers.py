"""The settings of the workers of a run: number, engine, threads, limits."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass

from quorate.errors import SettingError
from quorate.settings import AtResume, Settings, at_least, between, declare, integer, one_of

# Beyond what any machine has: what is meant for another option is no crash, and no full memory.
MOST_WORKERS, MOST_THREADS, MOST_SERVERS = 4096, 1024, 1024

ORDERED, NATIVE = "ordered", "native"  # ways to add the gradients of ranks


def number_of_workers(name: str, value: object) -> int | str:
    """Check how many workers there are to be; return a number, or "N:M", N of them less than M.

    Raises:
        SettingError: it is neither, too small or too large.
    """
    if not isinstance(value, str):
        return integer(name, value, least=1, most=MOST_WORKERS)
    words = [word.strip() for word in value.split(":")]
    if len(words) > 2 or not all(w.isascii() and w.isdecimal() and len(w) < 99 for w in words):
        fix = "N:M is for a Ray cluster: N to begin with, and up to M as nodes come"
        raise SettingError(name, value, "a whole number, or two of them, N:M", fix)
    least, most = (integer(name, int(w), least=1, most=MOST_WORKERS) for w in (words[0], words[-1]))
    if least > most:
        raise SettingError(name, value, "N:M with N <= M", f"did you mean {most}:{least}?")
    return least if least == most else f"{least}:{most}"


@dataclass(frozen=True)
class Workers(Settings):
    """Settings of the workers of a run: number, engine, threads, limits.

    A plain number instead of ``Workers(...)`` sets ``count``.

    Args:
        count: number of workers, dealt over the devices in turn. Default: one per device; if
            ``devices`` is not set, one per GPU, or one per CPU core and at most 8. With engine
            "ray" also "N:M": the run starts with N workers and grows up to M workers as nodes join.
        engine: how workers run. "processes": worker processes on this machine, which run the script
            again up to the first training loop. "towers": threads of this process. "collective":
            ranks that make each update together, on one machine, or on several machines under
            torchrun. "ray": processes on the nodes of a Ray cluster. Default: collective under
            torchrun; processes for several CPU workers of a script; towers in a notebook, at a
            Python prompt and on GPUs.
        threads: intra-op threads of each worker. The bits depend on ``threads``. Default: 1.
        timeout_s: seconds after which a worker process without progress is replaced. A worker makes
            no progress if its current shard takes longer than ``timeout_s`` and 3 times longer than
            usual, or if the worker has not reached the training loop within ``timeout_s``. Ranks of
            a collective end together instead. Increase ``timeout_s`` if a step or the start of the
            script takes longer. Default: 300.
        exchange: how the ranks of a collective add gradients. "ordered" (the default): along the
            tree of shards. "native": by the reduce-scatter of torch.distributed; the bits then
            depend on the number of ranks. Use "native" to measure the cost of the ordered sum.
        bucket_mb: megabytes of gradients that the ranks of a collective exchange at a time, while
            further gradients are computed. Default: 16.
        address: address of a Ray cluster as "HOST:PORT", or "auto" for the cluster of this machine.
            Default: start a local cluster, which ends with the run.
        worker_resources: resources that each worker takes of its Ray node, by Ray's names:
            "CPU=1,GPU=1". Default: "CPU=1".
        working_dir: folder that Ray copies to every node and that workers run in: the folder of the
            script, or a parent folder. Default: no copy; the script must be at the same path on
            every node.
        servers: number of parameter servers on the nodes of a Ray cluster. Each server holds a
            slice of the parameters and of the optimizer's state. Set ``servers`` if the network
            link of the coordinator's machine limits the speed. The bits do not depend on
            ``servers``. Default: no servers, the coordinator holds all parameters.
        memory_fraction: share of its device's memory that the tensors of a worker may use, above 0
            and at most 1. Set ``memory_fraction`` if other programs need the rest. Has no effect on
            a CPU. Default: no limit; memory is allocated as needed.
    """

    count: int | str | None = declare(
        None,
        "number of workers, dealt over the devices in turn; on Ray also N:M, from N up to M",
        name="workers",
        kind=str,
        metavar="N",
        check=number_of_workers,
    )
    _: KW_ONLY
    engine: str | None = declare(
        None,
        "how workers run: processes, towers (one thread each), collective (ranks) or ray",
        kind=str,
    )
    threads: int = declare(
        1,
        "intra-op threads of each worker; the result depends on this number (default: 1)",
        kind=int,
        check=at_least(1, MOST_THREADS),
        at_resume=AtResume.SAID,
    )
    timeout_s: float = declare(
        300.0,
        "seconds without progress after which a worker process is replaced (default: 300)",
        name="worker_timeout_s",
        kind=float,
        check=between(0),
    )
    exchange: str = declare(
        ORDERED,
        "how ranks add gradients: ordered, or native (torch's reduce-scatter; other bits)",
        kind=str,
        check=lambda name, value: one_of(name, value, (ORDERED, NATIVE)),
    )
    bucket_mb: float = declare(
        16.0,
        "megabytes of gradients that ranks exchange at a time (default: 16)",
        kind=float,
        check=between(0),
    )
    address: str | None = declare(
        None,
        "address of a Ray cluster, or auto; without an address, start a local cluster",
        kind=str,
    )
    worker_resources: str = declare(
        "CPU=1", "resources of each worker on its Ray node: CPU=1,GPU=1 (default: CPU=1)", kind=str
    )
    working_dir: str | None = declare(
        None, "folder with the script, for Ray to copy to every node", kind=str
    )
    servers: int | None = declare(
        None,
        "number of parameter servers on a Ray cluster, with a slice of the parameters each",
        kind=int,
        check=at_least(1, MOST_SERVERS),
    )
    memory_fraction: float | None = declare(
        None,
        "share of a GPU's memory that each worker may use, above 0 and at most 1",
        kind=float,
        check=between(0),
    )

    def bounds(self) -> tuple[int, int] | None:
        """Return the number of workers at the start, and the largest number; None if not set."""
        if self.count is None:
            return None
        least, _, most = str(self.count).partition(":")
        return int(least), int(most or least)

    def number(self) -> int | None:
        """Return the number of workers, for an engine with a constant number of workers.

        Raises:
            SettingError: ``count`` is N:M.
        """
        if isinstance(self.count, str):
            fix = "N:M is for engine='ray', whose nodes come and go"
            raise SettingError("workers", self.count, "one number for another engine", fix)
        return self.count
