"""An optimizer whose updates are made by several processes, each for a part of the parameters.

The processes are forks of this one. Parameters, gradients and the optimizer's state per element lie
in memory mapped by all processes; counters are exchanged with each update. So between two updates
all of the state is present for checkpoints and callbacks, and the processes own nothing: a lost
process is replaced. If a process ends in the middle of an update, its part of the parameters may be
half updated: then the run ends.
"""

from __future__ import annotations

from collections.abc import Collection
from itertools import accumulate
from typing import Any

import torch

from quorate.engines import remote_error
from quorate.engines.stages.links import PARENT, GoneError, StageLinks, serve_parent
from quorate.engines.stages.stage_devices import StageProcesses
from quorate.errors import ServerError
from quorate.machine.shared_memory import Segment
from quorate.replica.flat import Flat
from quorate.training.optimizing.closure import Closure
from quorate.training.optimizing.cores import intra_op_threads
from quorate.training.optimizing.known_optimizers import put_values, sent_values
from quorate.training.optimizing.optimizer import FlatOptimizer, OptimizerFactory
from quorate.training.owners.state_memory import StateMemory, Told


class PartedOptimizer(FlatOptimizer):
    """The user's optimizer over flat parameters in shared memory.

    An optimizer that does not work element by element makes its updates in this process.

    Args:
        factory: the user's function from a list of parameters to an optimizer.
        model: the model whose trainable parameters are views of ``parameters``.
        parameters: parameters in a shared segment.
        names, prefix: see ``FlatOptimizer``.
        parts: number of parts.
    """

    def __init__(
        self,
        factory: OptimizerFactory,
        model: torch.nn.Module,
        parameters: Flat,
        names: Collection[str] | None,
        prefix: str,
        parts: int,
    ) -> None:
        super().__init__(factory, model, parameters, names, prefix)
        assert parameters.segment is not None
        self._part_of = _parts(parameters, parts)
        self._parts = 1 + max(self._part_of.values(), default=0)
        self._memory: StateMemory | None = None
        self._processes: StageProcesses | None = None
        # The tensors and segments of gradients present when the processes were forked.
        self._tensors: list[torch.Tensor] = []
        self._segments: list[Segment] = []

    def step(
        self, gradient: Flat, missing: Collection[str] = (), closure: Closure | None = None
    ) -> None:
        """Update the parameters in place; see ``FlatOptimizer``. Blocks.

        Raises:
            ServerError: a process ended in the middle of the update.
        """
        if (
            not self.uses_vectors
            or closure is not None
            or gradient.segment is None
            or gradient.rows
        ):
            super().step(gradient, missing, closure)
            return
        self.require_same_groups()
        self._cut_where(lambda name: (self._part_of[name], name in missing))
        processes = self._started(gradient.segment)
        where = (self._segments.index(gradient.segment), gradient.start)
        groups = [*map(sent_values, self.param_groups)]
        for part in range(self._parts):
            order = (where, groups, [*missing], self._told(part))
            processes.links.send(part, "step", order)
        for part in range(self._parts):
            self._take(part, self._answer(processes, part))
        # No tensor has a gradient in this process: the step changes nothing, and a schedule counts
        # it.
        for tensor in self._names_of:
            tensor.grad = None
        self.user_optimizer.step()

    def close(self) -> None:
        """End the processes. All of the state is in this process."""
        processes, self._processes = self._processes, None
        if processes is not None:
            processes.close()

    # --- in this process --------------------------------------------------------------------------

    def _started(self, gradients: Segment) -> StageProcesses:
        """Return the processes; new ones if the tensors or segments are unknown to the former."""
        tensors = [*self._names_of]
        knows = len(tensors) == len(self._tensors) and all(
            mine is theirs for mine, theirs in zip(tensors, self._tensors, strict=True)
        )
        if self._processes is not None:
            knows = knows and gradients in self._segments and self._processes.are_alive
        if self._processes is None or not knows:
            self.close()
            if gradients not in self._segments:
                self._segments = [*self._segments[-1:], gradients]
            self._tensors = tensors
            self._memory = self._memory or StateMemory(self.flat_parameters.layout)
            with intra_op_threads(1):  # OpenMP's threads do not survive a fork
                self._processes = StageProcesses(
                    self._parts,
                    lambda device: self._serve(device.number, device.links),
                    name="part",
                )
        return self._processes

    def _told(self, part: int) -> list[Told]:
        """Return the message about the state of the tensors of a part."""
        assert self._memory is not None
        return [
            self._memory.told(dict.get(self.user_optimizer.state, tensor, {}), tensor, names[0])
            for tensor, names in self._of(part)
        ]

    def _take(self, part: int, said: list[Told]) -> None:
        """Apply the answer of a part: its state after an update."""
        assert self._memory is not None
        for (tensor, names), told in zip(self._of(part), said, strict=True):
            mine = dict.setdefault(self.user_optimizer.state, tensor, {})
            for entry, value in self._memory.entries(told, tensor, names[0]).items():
                if isinstance(mine.get(entry), torch.Tensor) and isinstance(value, torch.Tensor):
                    if mine[entry].data_ptr() != value.data_ptr():
                        mine[entry].copy_(value)
                else:
                    mine[entry] = value

    def _of(self, part: int) -> list[tuple[torch.Tensor, list[str]]]:
        return [each for each in self._names_of.items() if self._part_of[each[1][0]] == part]

    def _answer(self, processes: StageProcesses, part: int) -> list[Told]:
        try:
            key, said = processes.links.take("failed", ("done", part))
        except GoneError as gone:
            self.close()
            raise ServerError(
                f"the process of part {gone.number} of the optimizer ended in the middle of an "
                "update",
                fix="run the same command again: the run resumes from the newest checkpoint",
            ) from None
        if key == "failed":
            self.close()
            raise remote_error.from_json(said)
        answer: list[Told] = said
        return answer

    # --- in the process of a part -----------------------------------------------------------------

    def _serve(self, part: int, links: StageLinks) -> None:
        """Run the process of a part until the parent ends."""
        others = [name for name, of in self._part_of.items() if of != part]
        gradients: dict[tuple[int, int], Flat] = {}

        def step(order: Any) -> None:
            where, groups, missing, said = order
            if where not in gradients:
                layout = self.flat_parameters.layout.gradients
                gradients[where] = layout.over(self._segments[where[0]], where[1])
            with torch.no_grad():
                answer = self._stepped(part, gradients[where], groups, missing, others, said)
            links.send(PARENT, ("done", part), answer)

        serve_parent(links, "step", step, remote_error.to_json)

    def _stepped(
        self,
        part: int,
        gradient: Flat,
        groups: list[dict[str, Any]],
        missing: list[str],
        others: list[str],
        said: list[Told],
    ) -> list[Told]:
        assert self._memory is not None
        for group, values in zip(self.param_groups, groups, strict=True):
            put_values(group, values)
        own = self._of(part)
        for (tensor, names), told in zip(own, said, strict=True):
            dict.pop(self.user_optimizer.state, tensor, None)
            if told:
                entries = self._memory.entries(told, tensor, names[0])
                dict.__setitem__(self.user_optimizer.state, tensor, entries)
        super().step(gradient, {*missing, *others})
        return self._told(part)


def _parts(parameters: Flat, parts: int) -> dict[str, int]:
    """Return the part of each parameter: consecutive runs with about the same number of bytes."""
    sections = sorted(parameters.layout.sections.values(), key=lambda s: (s.vector, s.start))
    nbytes = [s.span * parameters.layout.dtypes[s.vector].itemsize for s in sections]
    whole = max(1, sum(nbytes))
    middles = (end - own / 2 for end, own in zip(accumulate(nbytes), nbytes, strict=True))
    found = [min(parts - 1, int(parts * middle / whole)) for middle in middles]
    numbers = {part: number for number, part in enumerate(sorted(set(found)))}
    return {section.name: numbers[part] for section, part in zip(sections, found, strict=True)}
