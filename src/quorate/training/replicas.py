"""Replicas: how copies of a trainer's model are made, on any device and in any process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from typing import Any

import torch

from quorate.coordination import rules
from quorate.coordination.run_event import NOTE, WARNING, RunEvent
from quorate.engines.processes.arena import Arena
from quorate.engines.stages.new_replica import DeviceSpread, Replica, Split, new_replica, parts_of
from quorate.errors import CopyError, SameBitsError, UserError
from quorate.machine.devices import Group
from quorate.replica import host_draws, precision
from quorate.replica.buffers import Buffers
from quorate.replica.compute import DEVICE
from quorate.replica.computing import Computing
from quorate.replica.deterministic import are_any_nvidia, fix_workspace
from quorate.replica.flat import Flat
from quorate.replica.kernels import choice
from quorate.replica.notes import Notes
from quorate.replica.placement import placement
from quorate.replica.shared.containers import SharedContents
from quorate.replica.shared.copies import refused
from quorate.replica.shared.sharing import SharingFindings, rows_use
from quorate.replica.totals import Totals
from quorate.replica.turns import Turns
from quorate.replica.witness.stray_writes import StrayWrites
from quorate.training.config import Loading, TrainerConfig
from quorate.training.notices import once
from quorate.training.state import State

MOST_WRAPPED = 8  # largest number of nested datasets, such as subsets, to look at


def _deterministic(config: TrainerConfig, devices: Sequence[torch.device]) -> bool:
    """Return the user's choice; by default, whether threads would add in varying order."""
    if config.compute.deterministic is not None:
        return config.compute.deterministic
    keeps_bits = rules.keeps_bits(rules.parse(config.update), config.shards or 0)
    return keeps_bits and (are_any_nvidia(devices) or config.workers.threads > 1)


class ReplicaFactory:
    """A factory for replicas of one model.

    Args:
        config: settings of the computation.
        groups: the devices of each worker.

    Raises:
        SettingError: the devices cannot compute as the settings say.
    """

    def __init__(self, config: TrainerConfig, groups: Sequence[Group]) -> None:
        devices = [device for group in groups for device in group]
        self.computing = Computing(
            precision.parse(config.precision, devices),
            compile=config.compute.compile,
            soft_placement=config.compute.soft_placement,
            log_placement=config.compute.log_placement,
            deterministic=_deterministic(config, devices),
            # CPUs have no choice: the bits are the same.
            random=config.compute.random if any(d.type != "cpu" for d in devices) else DEVICE,
        )
        placement.check(self.computing, devices)
        host_draws.check(self.computing)
        self.totals = Totals(config.totals)
        self.notes = Notes()
        self.spread: DeviceSpread | Split | None = None
        self._config = config
        self._groups = groups
        self._turns = Turns(side_by_side=True)
        self._sharing: SharingFindings | None = None
        self._obstacle: str | None = None
        if self.computing.deterministic and (why := fix_workspace(devices)) is not None:
            self.notes.doubt(why)

    def obstacle(self, model: torch.nn.Module) -> str | None:
        """Inspect model and loss function; return why towers cannot copy them, None if they can."""
        self._sharing = SharingFindings(model, self._config.loss)
        self._sharing.tell(self._turns)
        self._obstacle = self._sharing.obstacle
        return self._obstacle

    def look_at_rows(self, model: torch.nn.Module, dataset: object, loading: Loading) -> None:
        """Report rows made by the trained model as a doubt, and note an uncalled ``set_epoch``."""
        loads = {"the dataset": dataset, "collate": loading.collate, "augment": loading.augment}
        if (way := rows_use(model, loads)) is not None:
            self.notes.doubt(
                f"{way}, and workers load rows ahead while training changes the weights; load rows "
                "with a copy of the model"
            )
        inner: Any = dataset
        for _ in range(MOST_WRAPPED):
            if callable(getattr(type(inner), "set_epoch", None)):
                self.notes.add(
                    f"nothing calls {type(inner).__name__}.set_epoch(), because rows of two epochs "
                    "load at the same time; read the epoch of a row from quorate.data.at().epoch"
                )
            inner = getattr(inner, "dataset", None)

    def watching(self, *, towers: bool) -> AbstractContextManager[None]:
        """Return a context for a single shard, in which shared containers are found."""
        if self._sharing is None:
            return nullcontext()
        number, compiled = len(self._groups) if towers else 0, self.computing.compile
        return self._sharing.watching(self._turns, towers=number, compiled=compiled)

    def contents(self) -> SharedContents:
        """Return the present content of all containers shared by code."""
        return SharedContents(()) if self._sharing is None else self._sharing.contents()

    def stray_writes(self, state: State) -> StrayWrites:
        """Return the watcher of parameters between updates."""
        return StrayWrites(
            state.model,
            self._config.loss,
            self.notes,
            trained=state.parameters.views.keys(),
            written=state.written,
            mutable_frozen=state.mutable_frozen,
        )

    def give_up_copies(self, reason: str) -> None:
        """Make no further copies of the model, for a reason found while a shard was computed."""
        self._obstacle = reason

    def take(self, model: torch.nn.Module, engine: str) -> None:
        """Note how the parts of the model lie on several devices.

        Raises:
            SettingError: workers of the engine cannot have the parts on these devices.
        """
        self.spread = parts_of(
            model,
            self._groups,
            self._config.compute,
            engine=engine,
            threads=self._config.workers.threads,
        )

    @property
    def are_in_stages(self) -> bool:
        """True if shards flow through stages of each replica."""
        return isinstance(self.spread, Split)

    @property
    def pipeline(self) -> str | None:
        """The order in which stages compute; None: there are no stages."""
        return self.spread.schedule if isinstance(self.spread, Split) else None

    def give_up_compiling(self) -> None:
        """Compute without torch.compile: once for all workers, as the bits depend on it."""
        self.computing = replace(self.computing, compile=False)

    def choose_kernels(self, model: torch.nn.Module, was: str | None) -> list[str]:
        """Choose the kernels of float32 matrix products once for all workers; see ``choice``.

        Args:
            was: the kernels recorded in the resumed checkpoint.

        Returns:
            Lines for the user.
        """
        asked, devices = self._config.compute.kernels, [d for group in self._groups for d in group]
        kernels, said = choice.chosen(asked, was, self.computing, model, devices)
        self.computing = replace(self.computing, kernels=kernels)
        return said

    def compute_as(self, decided: Mapping[str, Any]) -> None:
        """Compute as the coordinator, or rank 0, decided; see ``Computing``."""
        self.computing = self.computing.as_decided(decided)

    def tell(self, say: Callable[[str], None]) -> None:
        """Show the notes of replicas since the last call.

        Raises:
            SameBitsError: there is a doubt about the bits, and the run is strict.
            UserError: there is a doubt about the values, and the run is strict.
        """
        if not (notes := self.notes.take()):
            return
        for note in notes:
            is_warning = note.is_doubt or note.questions_values
            once(say)(RunEvent(str(note), WARNING if is_warning else NOTE))
        if not self._config.compute.strict:
            return
        for note in notes:
            about = note.text.partition("\n")[0]
            if note.is_doubt:
                raise SameBitsError("strict", f"the same bits cannot be kept, because {about}")
            if note.questions_values:
                raise UserError("strict", f"the values are in doubt: {about}")

    def alone(
        self,
        state: State,
        device: torch.device,
        set_buffers: Callable[[Buffers], None] | None = None,
    ) -> Replica:
        """Return the model itself as a replica, for times when no other replica uses the model.

        Args:
            set_buffers: see ``Replica``.
        """
        return self.replica(state, Group([device]), own=True, set_buffers=set_buffers)

    def probe(self, state: State, master_device: torch.device, *, copies: bool) -> Replica:
        """Return a replica for a trial shard before there are workers.

        For towers, the trial shows whether the model can be copied; worker processes make no
        copies. If worker processes have GPUs, the coordinator tries a copy on a GPU: kernels and
        bits depend on the device.

        Args:
            copies: whether workers are towers.
        """
        first = self._groups[0]
        if copies:
            return self.replica(state, first, logs=False)
        if first != Group([master_device]) and self.spread is None:
            with suppress(CopyError):
                return self.replica(state, first, logs=False)
        return self.replica(state, Group([master_device]), own=True, logs=False)

    def replica(
        self,
        state: State,
        group: Group,
        *,
        own: bool = False,
        logs: bool = True,
        set_buffers: Callable[[Buffers], None] | None = None,
    ) -> Replica:
        """Return a replica on the devices of a worker.

        Args:
            own: whether the replica is the model itself.
            logs: whether the replica may log where operators are placed.
            set_buffers: see ``Replica``.
        """
        if not own and self._obstacle is not None:
            raise refused(self._obstacle)
        logs = logs and self.computing.log_placement
        return self._new(
            state.model,
            state.parameters,
            group,
            mutable_frozen=state.mutable_frozen,
            written=state.written,
            own=own,
            set_buffers=set_buffers,
            computing=replace(self.computing, log_placement=logs),
        )

    def in_worker(
        self, model: torch.nn.Module, group: Group, arena: Arena, decided: Mapping[str, Any]
    ) -> Replica:
        """Return the model of a worker process itself as a replica, on the coordinator's memory.

        Args:
            decided: see ``Computing``: all workers compute alike.
        """
        self.compute_as(decided)
        SharingFindings(model, self._config.loss, copies=False).tell(self._turns)
        return self._new(
            model,
            arena.parameters,
            group,
            mutable_frozen=arena.sizes.mutable_frozen,
            written=arena.sizes.written,
            own=True,
            set_buffers=arena.current.set,
            computing=self.computing,
        )

    def _new(
        self, model: torch.nn.Module, parameters: Flat, group: Group, **options: Any
    ) -> Replica:
        return new_replica(
            model,
            parameters,
            group,
            spread=self.spread if len(group) > 1 else None,
            loss=self._config.loss,
            totals=self.totals.wanted,
            turns=self._turns,
            notes=self.notes,
            **options,
        )
