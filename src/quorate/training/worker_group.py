"""The workers of a trainer: their devices, how they are reached, and the memory they share.

A worker group outlives its training loops. Workers are made for each loop and end with the loop;
so do replicas.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch

from quorate.coordination import rules
from quorate.coordination.plan import Plan, from_json
from quorate.data.source import Source, length
from quorate.engines import Transport, process_group, selection
from quorate.engines.collective.rank_group import RankGroup
from quorate.engines.local.towers import Towers
from quorate.engines.processes.agreement import Agreement
from quorate.engines.processes.arena import Arena
from quorate.engines.processes.process_start import end_standby, fork_server_starting
from quorate.engines.processes.transport import Processes
from quorate.engines.processes.worker import here
from quorate.engines.processes.worker_loop import WorkerProgram
from quorate.engines.ray.demand import demanded, groups_of, require_servers_fit
from quorate.engines.spot_check import Ask, SpotChecks
from quorate.errors import CopyError, SettingError, UserError
from quorate.machine.devices import Group, kinds, worker_devices
from quorate.machine.limits import COMPILE_S
from quorate.machine.memory_fraction import bound_memory, checked_fraction
from quorate.machine.surroundings import require_surroundings
from quorate.replica.compiling import as_given
from quorate.replica.flat import Flat
from quorate.replica.replica import Replica
from quorate.replica.witness.places import reads_of_shards
from quorate.services.display.straggler import Stragglers
from quorate.training.config import DatasetConfig, TrainerConfig
from quorate.training.notices import once
from quorate.training.optimizing.owners import Owners
from quorate.training.owners.parted_optimizer import PartedOptimizer
from quorate.training.owners.rank_owners import RankOwners
from quorate.training.owners.server_owners import HANDLER, ServerStandIn
from quorate.training.replicas import ReplicaFactory
from quorate.training.state import State

# Number of shard results per worker that may wait until older results are applied. Only memory
# bounds the value.
RESULTS_PER_WORKER = 4

# True once a training loop was begun in this process. Worker processes stop at the first loop of a
# script, so only the first loop can have worker processes.
_loop_was_run = False

# Number of calls of training, evaluation and prediction on trainers of this process.
_uses = 0


def uses() -> int:
    """Return how often trainers of this process were called to train, evaluate or predict."""
    return _uses


class WorkerGroup:
    """The workers of a trainer.

    Args:
        config: the settings of the trainer.
        make_model: returns the model; called last, after all settings are checked.

    Raises:
        SettingError: a device is missing, or settings do not go together.
    """

    def __init__(self, config: TrainerConfig, make_model: Callable[[], torch.nn.Module]) -> None:
        require_surroundings()
        self.config = config
        self.groups = self._groups()
        engine = selection.chosen(config.workers.engine, [d for g in self.groups for d in g])
        self.rule = rules.parse(config.update)
        require_servers_fit(config.workers)
        self.rank_group: RankGroup | None = None
        if engine.name == selection.COLLECTIVE:
            self.rank_group = RankGroup(self.groups, config.workers, self.rule)
            self.groups = self.rank_group.groups
        self.devices = [device for group in self.groups for device in group]
        self.memory_fraction = checked_fraction(config.workers.memory_fraction, self.devices)
        self.replicas = ReplicaFactory(config, self.groups)
        self.model = make_model()
        self.model_as_given = as_given(
            self.model
        )  # the script's torch.compile wrapper, or the model itself
        if here() is None and (obstacle := self.replicas.obstacle(self.model)) is not None:
            engine = selection.suited(config.workers.engine, engine, obstacle)
        self.engine, self.script, self.why = engine
        if self.script is None:
            end_standby()
        self.replicas.take(self.model, self.engine)
        self._datasets: Mapping[str, Any] | None = None  # of the script's first loop
        self._collates: list[tuple[Any, Any]] = []  # by dataset: the collate function of workers
        self.stragglers = Stragglers.none()  # of the loop, evaluation or prediction under way
        self.loader_messages: list[
            str
        ] = []  # lines on settings taken from each ``DataLoader`` of a loop

    def _groups(self) -> tuple[Group, ...]:
        """Return the devices of each worker, as seen by the worker's process."""
        devices, workers = self.config.devices, self.config.workers
        if workers.engine == selection.RAY:
            return groups_of(demanded(workers), devices)
        for name in ("address", "working_dir"):
            if (value := getattr(workers, name)) is not None:
                fix = "it is for a Ray cluster: add engine='ray', or leave it out"
                raise SettingError(name, value, "none for another engine", fix)
        return worker_devices(devices, workers.number())

    @property
    def least_workers(self) -> int:
        """The number of workers needed to begin."""
        bounds = self.config.workers.bounds()
        if self.engine != selection.RAY or bounds is None:
            return len(self.groups)
        return bounds[0]

    @property
    def has_processes(self) -> bool:
        """True if workers are processes that read the host's memory, on this host or another."""
        return self.engine in selection.OF_PROCESSES

    @property
    def master_device(self) -> torch.device:
        """The device of the coordinator's parameters and updates."""
        is_host = self.has_processes or self.replicas.spread is not None
        rank = 0 if self.rank_group is None else self.rank_group.rank
        return torch.device("cpu") if is_host else self.groups[rank][0]

    @property
    def shares_parameters(self) -> bool:
        """True if other processes read the parameters from the coordinator's memory."""
        is_rank = self.rank_group is not None and self.master_device.type == "cpu"
        is_rank = is_rank and sys.platform == "linux"  # ranks read each other's memory
        return self.has_processes or is_rank or self.replicas.are_in_stages

    @property
    def most_open(self) -> int:
        """The number of steps that may be open under any rule."""
        return RESULTS_PER_WORKER * len(self.groups)

    @property
    def timeout_s(self) -> float:
        """The time that a worker may be silent, in seconds; compiling a new shape is included."""
        return self.config.workers.timeout_s + (
            COMPILE_S if self.replicas.computing.compile else 0.0
        )

    @property
    def on_snapshots(self) -> bool:
        """True if workers compute while an update is made; a single worker does not."""
        return self.rule.staleness > 0 and len(self.groups) > 1

    def keeps_bits(self, shards: int) -> bool:
        """Return whether a number of shards gives the same bits on any number of devices."""
        return rules.keeps_bits(self.rule, shards)

    def bound_memory(self) -> None:
        """Bound the device memory that this process allocates.

        Worker processes bound their own; this process has a replica like the first worker's for a
        while.
        """
        own = self.devices if self.engine == selection.TOWERS else self.groups[0]
        bound_memory(own, self.memory_fraction)

    def give_up_towers(self, reason: str) -> None:
        """Choose processes after all, because towers cannot have copies of the model.

        Raises:
            CopyError: the user asked for towers, or no engine is left.
        """
        engine = selection.EngineChoice(self.engine, self.script)
        engine = selection.suited(self.config.workers.engine, engine, reason)
        self.engine, self.script, self.why = engine
        self.replicas.give_up_copies(reason)

    def new_state(
        self,
        *,
        mutable_frozen: frozenset[int] = frozenset(),
        written: frozenset[str] = frozenset(),
        by_rows: frozenset[str] = frozenset(),
    ) -> State:
        """Return a new state of the model, on the device and in the memory of these workers.

        Args: see ``State``.
        """
        return State(
            self.model,
            self.master_device,
            shared=self.shares_parameters,
            mutable_frozen=mutable_frozen,
            written=written,
            by_rows=by_rows,
            optimize=self.config.optimize,
            loss=self.config.loss,
            notes=self.replicas.notes,
            owners=self._owners,
        )

    def _owners(self, parameters: Flat) -> Owners:
        """Return the owners of parameters."""
        exchanging = None if self.rank_group is None else self.rank_group.exchanging
        if exchanging is not None:
            return RankOwners(parameters, exchanging(parameters.layout))
        if self.config.workers.servers is not None:
            return ServerStandIn(parameters)
        if self.replicas.are_in_stages and len(self.groups[0]) > 1:
            return Owners(parameters, partial(PartedOptimizer, parts=len(self.groups[0])))
        return Owners(parameters)

    def evaluation_source(
        self, data: DatasetConfig, shards: int, kind: type[Plan] = Plan
    ) -> Source:
        """Return the rows of a dataset in their order, in batches as in training.

        Args:
            shards: number of pieces of a batch.
            kind: the kind of the plan.
        """
        rows, seed = length(data.dataset), self.config.seed
        size = min(self.config.batch_size, rows)
        plan = kind(rows=rows, batch_size=size, shards=shards, seed=seed, shuffle=False)
        return Source(data.dataset, plan, data.loading.collate)

    # --- worker processes -------------------------------------------------------------------------

    def begin_loop(self, data: DatasetConfig, validated: DatasetConfig | None = None) -> None:
        """Note the data of the first loop; in a worker process, compute shards and never return.

        A worker process runs the script up to the first training loop. The process does not have
        the data of later loops, nor changes made by the script since.
        """
        global _loop_was_run
        self.note_use()
        process_group.require_none()
        if self.rank_group is not None and self.rank_group.is_of_torchrun:
            reads = reads_of_shards(self.model, self.config.loss, process_group.MAKERS)
            process_group.require_none_made(reads)
        self.config = self.config.with_loading(data.loading)
        given = {"dataset": data, "validation": validated or data._replace(dataset=None)}
        datasets = {name: each.dataset for name, each in given.items()}
        self.loader_messages = [d.loader_line for d in (data, validated) if d and d.loader_line]
        if self.rank_group is not None:
            if _loop_was_run:
                why = (
                    "this training loop computes on towers (threads), because ranks compute only "
                    "the first training loop of a script"
                )
                self.stay_alone(why)
        elif (worker := here()) is not None:
            group = self.groups[worker.number]
            bound_memory(group, self.memory_fraction)
            program = WorkerProgram(
                model=self.model,
                group=group,
                threads=self.config.workers.threads,
                computing=self.replicas.computing,
                notes=self.replicas.notes,
                new_source=partial(self._source_in_worker, given),
                new_replica=partial(self.replicas.in_worker, self.model, group),
            )
            worker.serve(program)
        elif not _loop_was_run:
            _loop_was_run, self._datasets = True, datasets
            self._collates = [(each.dataset, each.loading.collate) for each in given.values()]
        else:
            self._collates = []

    def _source_in_worker(
        self, given: Mapping[str, DatasetConfig], name: str, plan: dict[str, Any], augments: bool
    ) -> Source:
        """Return the rows of a job of the coordinator, in a worker process.

        Raises:
            UserError: the script made another dataset in this process.
        """
        data, loading = given[name], self.config.loading
        dealt = from_json(plan, loading.order, loading.sampling)
        if (rows := length(data.dataset)) != dealt.rows:
            raise UserError(
                f"a worker that ran the script again made another {name}",
                got=f"{rows} rows",
                expected=f"{dealt.rows} as in the coordinator",
                fix="make the script repeatable, or use engine='towers'",
            )
        augment = loading.augment if augments else None
        return Source(data.dataset, dealt, data.loading.collate, augment)

    @staticmethod
    def note_use() -> None:
        """Count a call of the trainer; see ``uses``."""
        global _uses
        _uses += 1

    def collates(self, data: DatasetConfig) -> bool:
        """Return whether workers of the current loop make batches with the collate of a dataset.

        Worker processes have the collate functions found in the script.
        """
        known = (collate for dataset, collate in self._collates if dataset is data.dataset)
        collate = data.loading.collate
        return not self.has_processes or next(known, collate) is collate

    def begin_prediction(self, data: DatasetConfig) -> None:
        """Begin a prediction in the way of ``begin_loop``; ranks take no part in predictions."""
        if self.rank_group is None:
            self.begin_loop(data)

    # --- ranks ------------------------------------------------------------------------------------

    def start_ranks(self) -> None:
        """Start the further ranks, if this process has to start them.

        Called after all checks without ranks: ranks take part in one loop only, and a refused call
        must not use up this chance.
        """
        global _loop_was_run
        if self.rank_group is not None:
            _loop_was_run = True
            self.rank_group.begin(self.script, self.config.workers.threads)

    @property
    def follows(self) -> bool:
        """True if this process is a rank other than 0."""
        return self.rank_group is not None and self.rank_group.rank > 0

    def stay_alone(self, why: str) -> None:
        """Go on with towers of this process, after the other ranks have ended."""
        self.rank_group, self.engine, self.script, self.why = None, selection.TOWERS, None, why

    # --- engines ----------------------------------------------------------------------------------

    def starting(self) -> AbstractContextManager[None]:
        """Return a context in which worker processes start faster, if the loop uses processes."""
        are_processes = self.engine == selection.PROCESSES and self._datasets is not None
        script, threads = self.script if are_processes else None, self.config.workers.threads
        return fork_server_starting(script, len(self.groups), threads)

    def new_transport(self, state: State, source: Source, say: Callable[[str], None]) -> Transport:
        """Return new workers for a training loop; the caller closes them."""
        datasets, self._datasets = self._datasets, None
        if self.script is None:
            return self._towers(state, say)
        if datasets is None or datasets["dataset"] is not source.dataset:
            once(say)(
                "this training loop computes on towers (threads), because worker processes compute "
                "only the first training loop of a script"
            )
            if self.replicas.are_in_stages and len(self.groups) > 1:
                fix = "one worker for a second training loop of a script, as these are towers"
                raise SettingError("workers", len(self.groups), fix, "leave split out, or take one")
            return self._towers(state, say)
        arena = Arena.create(
            state.model,
            state.parameters,
            None if state.average is None else state.average.shadow,
            mutable_frozen=state.mutable_frozen,
            written=state.written,
            results=self.most_open if self.rule.by_shard else source.plan.shards,
            again=state.optimizer.takes_closure or self.config.gather is not None,
            on_snapshots=self.on_snapshots,
            workers=len(self.groups),
            in_stages=self.replicas.are_in_stages,
        )
        agreement = Agreement(
            model=state.model,
            arena=arena,
            buffers=state.buffers,
            probe=partial(self.probe_replica, state),
            groups=self.groups,
            datasets=datasets,
            threads=self.config.workers.threads,
            say=say,
            changes=state.model_edits.original.changes,
        )
        return Processes(
            self.script,
            self.config.workers,
            agreement,
            state.model_edits.original.model_changes,
            decided=self.replicas.computing.decided,
            timeout_s=self.timeout_s,
            notes=self.replicas.notes,
            handler=None if self.config.workers.servers is None else HANDLER,
        )

    def spot_checks(self, state: State, source: Source, ask: Ask) -> SpotChecks | None:
        """Return the spot checks of a loop; None where bits differ for a known reason."""
        every, plan = self.config.compute.spot_check_every, source.plan
        are_alike = self.keeps_bits(plan.shards) and len(kinds(self.groups)) == 1
        if every == 0 or not are_alike:
            return None
        return SpotChecks(
            ask,
            (source, state.parameters, self.config.workers.threads),
            every,
            self.replicas.notes,
            (state.model, self.config.loss),
            alone=self.has_processes,
        )

    def evaluators(self, state: State) -> Transport:
        """Return workers for an evaluation outside of a training loop; the caller closes them."""
        try:
            return self._towers(state)
        except CopyError:
            if not self.has_processes and self.engine != selection.COLLECTIVE:
                raise
            # The state is on the CPU, and no other replica uses the model now.
            return self._towers(state, groups=[Group([self.master_device])], own=True)

    def predictors(self, state: State, source: Source, say: Callable[[str], None]) -> Transport:
        """Return workers for a prediction: processes, if this is the first loop of the script."""
        datasets = self._datasets
        if datasets is not None and datasets["dataset"] is source.dataset:
            return self.new_transport(state, source, say)
        return self.evaluators(state)

    def probe_replica(self, state: State) -> Replica:
        """Return a replica to compute a trial shard before there are workers."""
        is_tower = self.engine == selection.TOWERS
        return self.replicas.probe(state, self.master_device, copies=is_tower)

    def _towers(
        self,
        state: State,
        say: Callable[[str], None] | None = None,
        groups: Sequence[Group] | None = None,
        *,
        own: bool = False,
    ) -> Transport:
        return Towers(
            self.groups[: self.least_workers] if groups is None else groups,
            partial(self.replicas.replica, state, own=own),
            state.buffers,
            threads=self.config.workers.threads,
            original=state.model_edits.original,
            say=say,
        )
