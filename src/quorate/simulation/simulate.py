"""``quorate.simulate``: predict a run of any size, with the real coordinator in virtual time.

Steps are simulated (``virtual_run.py``). Failures are too rare to simulate in full. Instead, the
cost of a failure is simulated, and the speed of a run while one, two or more workers are away; the
frequency of failures then follows from the time between failures. If a failure ends the run, or the
coordinator fails, the work since the last checkpoint is lost too (``checkpoint_interval.py``).

Legend: V shards of a batch, N workers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import inf
from statistics import fmean, median

from quorate.coordination.rules import Rule, parse
from quorate.errors import SettingError
from quorate.settings import integer
from quorate.simulation.checkpoint_interval import best_s, daly_s, goodput, young_s
from quorate.simulation.inputs import (
    Checkpoints,
    Cores,
    Failures,
    Network,
    ShardTimes,
    Stragglers,
    not_negative,
    positive,
)
from quorate.simulation.models import ServerTraffic, ShardTimeModel, SharedCores
from quorate.simulation.prediction import Prediction
from quorate.simulation.virtual_run import TIMEOUT_S, UpdateRecord, VirtualRun, WorkerFailure

SHARDS_PLAYED = 8_000  # of a run without ``steps``, about
WARM_UP = 3  # batches until the coordinator knows the usual times of shards
RARE = 1e-4  # share of the time; rarer numbers of absent workers are not played
BACKUP = "quorum"  # without a number: spares are backup workers, and an update needs N shards


def rule_for(update: str, workers: int) -> Rule:
    """Return the rule of a name; ``quorum`` without a number waits for N shards.

    Args:
        update: ``sync``, ``quorum``, ``quorum:R``, ``async`` or ``bounded:K``.
        workers: N, without spares.

    Raises:
        SettingError: no rule has this name.
    """
    return parse(f"{BACKUP}:{workers}" if update == BACKUP else update)


def simulate(
    workers: int,
    *,
    shard_times: ShardTimes | None = None,
    rows_per_shard: float = 1.0,
    update: str = "sync",
    spares: int = 0,
    shards: int | None = None,
    per_host: int = 8,
    update_s: float = 0.0,
    stragglers: Stragglers | None = None,
    failures: Failures | None = None,
    network: Network | None = None,
    checkpoints: Checkpoints | None = None,
    cores: Cores | None = None,
    dollars_per_worker_h: float = 0.0,
    steps: int | None = None,
    seed: int = 0,
) -> Prediction:
    """Predict speed, losses and cost of a run with a given number of workers.

    Args:
        workers: number of workers N, without spares.
        shard_times: how long a shard takes. Default: one second.
        rows_per_shard: number of rows in a shard. A batch has V times as many rows.
        update: the update rule: "sync", "quorum", "quorum:R", "async" or "bounded:K". "quorum"
            without a number waits for N shards of N + spares, like backup workers in TensorFlow 1.
        spares: number of workers in addition to N. Under "sync" spares compute copies of late
            shards.
        shards: number of shards V of a batch. Default: N; under "quorum", N + spares.
        per_host: number of workers per host. Consecutive workers share a host.
        update_s: time of the optimizer for an update, in seconds.
        stragglers: which workers are slow. Default: none.
        failures: how often workers and hosts fail. Default: never.
        network: how much is sent, and how fast. Default: sending costs nothing.
        checkpoints: cost and interval of checkpoints. Default: no cost.
        cores: cores that the workers of a host share. Default: workers do not slow each other down.
        dollars_per_worker_h: price of a worker per hour; spares cost the same.
        steps: number of batches to simulate. Default: enough for ``SHARDS_PLAYED`` shards.
        seed: seed of the random numbers.

    Raises:
        SettingError: a value is not valid.
    """
    integer("workers", workers, least=1, most=1_000_000)
    integer("spares", spares, least=0, most=1_000_000)
    integer("per_host", per_host, least=1)
    v = shards if shards is not None else workers + spares * (update == BACKUP)
    integer("shards", v, least=1, most=2_000_000)
    rule = rule_for(update, workers)
    if rule.least_shards > v:
        raise SettingError("update", rule.name, f"at most the {v} shards", "choose more shards")
    network = network or Network()
    network.require(rule, spares)
    if steps is not None:
        integer("steps", steps, least=2)
    return _Simulation(
        rule=rule,
        workers=workers,
        spares=spares,
        shards=v,
        per_host=per_host,
        rows=positive("rows_per_shard", rows_per_shard),
        times=shard_times or ShardTimes(),
        update_s=not_negative("update_s", update_s),
        stragglers=stragglers or Stragglers(),
        failures=failures or Failures(),
        network=network,
        checkpoints=checkpoints or Checkpoints(),
        cores=cores or Cores(),
        price=not_negative("dollars_per_worker_h", dollars_per_worker_h),
        batches=steps or max(8, SHARDS_PLAYED // v),
        seed=seed,
    ).prediction()


@dataclass(frozen=True)
class _Simulation:
    rule: Rule
    workers: int
    spares: int
    shards: int
    per_host: int
    rows: float
    times: ShardTimes
    update_s: float
    stragglers: Stragglers
    failures: Failures
    network: Network
    checkpoints: Checkpoints
    cores: Cores
    price: float
    batches: int
    seed: int

    @property
    def _all(self) -> int:
        """The number of workers and spares."""
        return self.workers + self.spares

    @property
    def _hosts(self) -> int:
        return -(-self._all // self.per_host)

    @property
    def _on_a_host(self) -> int:
        """The number of workers of a host that compute at once."""
        return min(self._all, self.per_host, self.shards)

    # --- simulated runs ---------------------------------------------------------------------------

    @cached_property
    def _traffic(self) -> ServerTraffic:
        return ServerTraffic(self.network, [w // self.per_host for w in range(self._all)])

    def _apply_s(self, vectors: int) -> float:
        return self.update_s + self.network.exchange_s(vectors, self._hosts)

    def _vectors(self, held: Mapping[int, int], shards: int) -> int:
        waits_for_all = self.rule.needed(shards) == shards
        return self.network.vectors(held, shards, self.per_host, self._hosts, waits_for_all)

    def _play(self, away: int = 0, lost: Sequence[WorkerFailure] = ()) -> VirtualRun:
        """Play the run.

        Args:
            away: number of absent workers, the last ones.
            lost: failures during the run.
        """
        model = ShardTimeModel(self.times, self.stragglers, self._all, self.per_host, self.seed)
        hosts = [worker // self.per_host for worker in range(self._all - away)]
        beside = -(-away // max(1, self._hosts))  # the start of an absent worker takes a core
        shared = SharedCores(hosts, self.cores, beside)
        run = VirtualRun(
            places=[f"host-{host}" for host in hosts],
            shards=self.shards,
            batches=self.batches + WARM_UP,
            rule=self.rule,
            shard_s=self._traffic.around(model),
            apply_s=self._apply_s,
            vectors=self._vectors,
            latency_s=self.network.latency_s,
            failures=lost,
            leaves_off_s=model.leaves_off_s,
            cores=None if self.cores.per_host is None else shared,
            # Users with shards of several minutes set a longer timeout.
            timeout_s=max(TIMEOUT_S, 20 * (model.mean_s + self._traffic.median_s)),
        )
        run.play()
        return run

    @cached_property
    def _whole(self) -> VirtualRun:
        """The run without failures."""
        return self._play()

    def _counted(self, run: VirtualRun) -> list[UpdateRecord]:
        """Return the last update of the warm-up, and all later updates."""
        of_batch = self.shards if self.rule.by_shard else 1
        return run.updates[WARM_UP * of_batch - 1 :]

    def _update_s(self, run: VirtualRun) -> float:
        """Return the mean time from one update to the next."""
        updates = self._counted(run)
        return (updates[-1].at_s - updates[0].at_s) / (len(updates) - 1)

    @cached_property
    def _healthy_s(self) -> float:
        return self._update_s(self._whole)

    def _slowdown(self, away: int) -> float:
        """Return the speed while a number of workers are away, relative to the usual speed."""
        return 0.0 if away >= self._all else self._healthy_s / self._update_s(self._play(away))

    # --- failures ---------------------------------------------------------------------------------

    def _kept(self, units: int, of_unit: int, mtbf_s: float) -> float:
        """Return the speed with failures that do not end the run, relative to the usual speed.

        Args:
            units: number of workers, or of hosts, that fail independently.
            of_unit: number of workers of a unit.
            mtbf_s: mean time between failures of a unit.
        """
        if mtbf_s == inf:
            return 1.0
        detection_s = self.failures.detection_s
        restart_s = self.failures.restart_s * self.cores.start_slowdown(self._on_a_host)
        # 1. Absent units, each with the same chance; more than three are taken together.
        chance = restart_s / (mtbf_s + restart_s + detection_s)
        chances, speed = [(1.0 - chance) ** units], 0.0
        while 1.0 - sum(chances) > RARE and len(chances) <= min(3, units):
            away = len(chances)
            more = (units - away + 1) / away * chance / (1.0 - chance) if chance < 1.0 else 0.0
            chances.append(chances[-1] * more)
        rest = max(0.0, 1.0 - sum(chances))
        for away, part in enumerate(chances):
            speed += part * (self._slowdown(away * of_unit) if away else 1.0)
        if rest > RARE:
            mean = sum(away * part for away, part in enumerate(chances))
            speed += rest * self._slowdown(round((units * chance - mean) / rest) * of_unit)
        else:
            speed += rest * (speed / (1.0 - rest))
        # 2. The time until failures are detected.
        per_s = units / (mtbf_s + restart_s + detection_s)  # absent units do not fail
        return speed / (1.0 + per_s * self._stall_s(of_unit))

    def _stall_s(self, of_unit: int) -> float:
        """Return the seconds lost by a failure of some workers, apart from their absence."""
        if of_unit >= self._all:
            return self.failures.detection_s + self.times.undisturbed_s / 2
        of_batch = self.shards if self.rule.by_shard else 1
        total = self.batches + WARM_UP
        batch_s = self._healthy_s * of_batch
        at_s = self._counted(self._whole)[0].at_s + 0.5 * batch_s
        window_s = max(batch_s, (self.batches - 4) * batch_s)
        detection_s = min(self.failures.detection_s, window_s)
        lost = [
            WorkerFailure(at_s, self._all - 1 - n, detection_s, away_s=inf) for n in range(of_unit)
        ]
        played_s = self._play(lost=lost).now
        later_s = (total - WARM_UP - 0.5) * batch_s / max(self._slowdown(of_unit), 1e-9)
        stall_s = max(0.0, played_s - at_s - later_s)
        scale = self.failures.detection_s / detection_s if detection_s else 1.0
        return stall_s * scale

    def _run_failures_per_s(self) -> float:
        """Return how many times per second the run has to begin again at a checkpoint."""
        told = self.failures
        per_h = told.of_coordinator_per_h
        if self.network.engine == "collective":
            per_h += self._all / told.worker_mtbf_h + self._hosts / told.host_mtbf_h
        else:
            per_h += 1 / told.host_mtbf_h  # of the coordinator's host
        return per_h / 3600

    # --- the result -------------------------------------------------------------------------------

    def prediction(self) -> Prediction:
        """Return the prediction."""
        run, told = self._whole, self.failures
        updates = self._counted(run)
        intervals = [after.at_s - before.at_s for before, after in pairwise(updates)]
        rows = self.rows * fmean(update.shards for update in updates[1:])
        running = rows / self._healthy_s
        # 1. Failures of workers and hosts.
        kept = 1.0
        if self.network.engine != "collective":
            kept = self._kept(self._all, 1, told.worker_mtbf_h * 3600)
            if self._hosts > 1:
                kept *= self._kept(self._hosts - 1, self.per_host, told.host_mtbf_h * 3600)
        # 2. Checkpoints, and the work lost since the last checkpoint.
        per_s = self._run_failures_per_s()
        run_mtbf_s = inf if per_s == 0 else 1 / per_s
        stall_s = self.checkpoints.stall_s
        every_s = self.checkpoints.every_s or best_s(stall_s, run_mtbf_s)
        again_s = told.detection_s + told.run_restart_s
        saved = goodput(every_s, stall_s, run_mtbf_s, again_s)
        stays = kept * saved
        saving = stall_s / (every_s + stall_s) if every_s + stall_s > 0 else 0.0
        # 3. Sums over the whole run.
        tally = run.coordinator.tally
        counts = tally.to_json()
        applied = sum(counts["fresh"]) + sum(counts["stale"])
        dropped = sum(counts["dropped"])
        per_s, cost_per_s = running * stays, self.price * self._all / 3600
        shares = {part: of * stays for part, of in self._parts(run).items()}
        shares["checkpoints"] = min(saving, 1 - stays)
        shares["failures"] = max(0.0, 1 - stays - shares["checkpoints"])
        intervals.sort()
        hosts_per_h = self._hosts / told.host_mtbf_h
        return Prediction(
            update=self.rule.name,
            workers=self.workers,
            spares=self.spares,
            shards=self.shards,
            rows_per_update=rows,
            running_examples_per_s=running,
            step_s=median(intervals),
            step_p99_s=intervals[min(len(intervals) - 1, int(0.99 * len(intervals)))],
            efficiency=running / (self._all * self._of_one_per_s()),
            dropped=dropped / (applied + dropped),
            copies=run.copies / run.begun,
            staleness_mean=tally.staleness_sum / applied,
            staleness_max=tally.staleness_max,
            vectors=fmean(u.vectors for u in updates),
            holders=fmean(u.holders for u in updates),
            examples_per_s=per_s,
            goodput=stays,
            goodput_of_workers=kept,
            failures_per_day=24 * (self._all / told.worker_mtbf_h + hosts_per_h),
            run_mtbf_h=run_mtbf_s / 3600,
            save_every_s=every_s,
            young_s=young_s(stall_s, run_mtbf_s) if stall_s else 0.0,
            daly_s=daly_s(stall_s, run_mtbf_s) if stall_s else 0.0,
            dollars_per_million=cost_per_s * 1e6 / per_s if per_s else inf if cost_per_s else 0.0,
            shares=shares,
        )

    def _of_one_per_s(self) -> float:
        """Return examples/s of one worker alone, without delays."""
        shards = 1 if self.rule.by_shard else self.shards
        alone_s = shards * self.times.undisturbed_s + self.update_s
        return shards * self.rows / (alone_s + self.network.exchange_s(1, 1))

    def _parts(self, run: VirtualRun) -> dict[str, float]:
        """Return the shares of the time of a run without failures, by cause.

        Under rules that apply shard by shard, the time is the time of a worker. The wait for the
        coordinator is divided between updates and network like the coordinator's own time.
        """
        updates = self._counted(run)
        exchange_s = fmean(self.network.exchange_s(u.vectors, self._hosts) for u in updates)
        undisturbed_s = self.times.undisturbed_s
        busy = min(self._all, self.shards)
        if self.rule.by_shard:
            round_s = self._healthy_s * self._all
            even_s = uneven_s = undisturbed_s
            # In the queue, and for the update of the shard: the next shard comes afterwards.
            waited_s = run.queued_s / run.begun + self.update_s + exchange_s
            messages = 2
        else:
            round_s = self._healthy_s
            needed = self.rule.needed(self.shards)
            even_s = undisturbed_s * needed / min(busy, needed)
            uneven_s = undisturbed_s * -(-needed // min(busy, needed))
            waited_s = self.update_s + exchange_s
            messages = 2 * -(-needed // min(busy, needed))
        applies_s = self.update_s + exchange_s
        of_update = self.update_s / applies_s if applies_s else 0.0
        seconds = {
            "arithmetic": even_s,
            "cores": even_s * (self.cores.slowdown(self._on_a_host * self.cores.threads) - 1.0),
            "uneven": uneven_s - even_s,
            "updates": waited_s * of_update,
            "network": waited_s * (1 - of_update) * bool(applies_s)
            + messages * self.network.latency_s
            + self._traffic.median_s,
        }
        # A worker that waits for a core does not wait for other workers or for the coordinator.
        left_s = max(0.0, round_s - sum(of for part, of in seconds.items() if part != "cores"))
        seconds["cores"] = min(seconds["cores"], left_s)
        # The drawn times may be shorter than their mean: then the shares are shares of the sum.
        whole_s = max(round_s, sum(seconds.values()))
        shares = {part: of / whole_s for part, of in seconds.items()}
        return shares | {"stragglers": 1 - sum(shares.values())}
