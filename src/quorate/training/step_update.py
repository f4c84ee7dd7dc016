"""The update of a step from the sums of its shards, on every engine, with second passes if needed.

An engine supplies the sums and the second passes; the coordinator's process makes the update, or
all ranks in lockstep. Three kinds of second pass compute the shards of the step once more:

    TrainingAgain     the gradient at parameters that the optimizer moved: for closures
    PassWithTotals    the gradient, once the totals of all terms of the loss are known
    BackThrough       gradients back through shards, from a loss over the whole batch

The shards have the same rows and random numbers as before, and are summed along the same tree: the
bits do not depend on the workers. The coordinator's workers compute a second pass as a job of its
own, dealt like any step: the shards of a worker that is slow, raises or dies are computed by other
workers. Ranks compute their own shards again (``RankWorker.second_pass``).

Legend: V shards of a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

import torch

from quorate.coordination import rules
from quorate.coordination.tree import tree_sum
from quorate.data.source import Source
from quorate.engines import Transport
from quorate.engines.job import PassWithTotals, TrainingAgain
from quorate.engines.seeded_draws import seeded_draws
from quorate.errors import SettingError
from quorate.replica.flat import Flat
from quorate.replica.loss_terms import Denominators
from quorate.replica.shard_sum import Part, ShardSum
from quorate.services.display.raised_shards import RaisedShards
from quorate.training.batch_loss import BackThrough, BatchLoss, of_shards, with_loss
from quorate.training.drive import ReadyStep, run_job
from quorate.training.optimizing.closure import needs_closure
from quorate.training.optimizing.update import UpdateResult
from quorate.training.state import State
from quorate.training.worker_group import WorkerGroup

T = TypeVar("T")
Use = Callable[[ShardSum], T]  # uses the new sum of a step, whose memory is the workers'
Apply = Callable[[list[Part]], UpdateResult]  # makes the update of a step from parts of its sum


class SecondPass(Protocol):
    """Computes the shards of a step once more, on any engine."""

    def __call__(self, kind: type[TrainingAgain], step: int, use: Use[T], **inputs: Any) -> T:
        """Return the result of ``use`` for the new sum of a step. Blocks.

        The memory of the sum is the workers' again when ``use`` returns.

        Args:
            kind: the job.
            inputs: further arguments of the job.

        Raises:
            Exception: the error of user code in a shard that failed on all attempts.
        """


class WithoutCopies(rules.Sync):
    """A rule without copies of shards, for jobs that end with their last shard.

    The job would not wait for the results of copies, and those would be written to memory lent to
    the next job.
    """

    copies = False


@dataclass(eq=False, kw_only=True)
class PassByWorkers:
    """A second pass by the workers of the coordinator; see ``SecondPass``.

    Args:
        transport: the transport of the loop.
        source: the source of the loop.
        parameters: the coordinator's.
        threads: intra-op threads of a worker.
        timeout_s: how long a worker may be silent, in seconds; None: without a limit.
        say: shows a line to the user, such as the worker that raised in a shard now computed by
            another worker.
    """

    transport: Transport
    source: Source
    parameters: Flat
    threads: int
    timeout_s: float | None
    say: Callable[[str], None]

    def __post_init__(self) -> None:
        self._raised = RaisedShards()  # each worker is named once

    def __call__(self, kind: type[TrainingAgain], step: int, use: Use[T], **inputs: Any) -> T:
        """Return the result of ``use`` for the new sum of a step."""
        leaves, results = self.source.plan.shards_of(step), list[T]()

        def apply(ready: ReadyStep) -> None:
            results.append(use(tree_sum(ready.parts, leaves, ShardSum.add)))

        # A separate job: workers read parameters anew for each job.
        job = kind(
            self.source, self.parameters, range(step, step + 1), threads=self.threads, **inputs
        )
        run_job(
            *(self.transport, job, apply, WithoutCopies(), self.timeout_s),
            say=self.say,
            raised_shards=self._raised,
        )
        return results[0]


class StepUpdate:
    """Makes the updates of a loop.

    Args:
        workers: the workers of the trainer.
        state: the state to update.
        source: the rows of each shard.
        second_pass: computes the shards of a step again.
        batch_loss: computes the loss over a whole batch; None without such a loss.

    Raises:
        SettingError: the optimizer needs a closure, but under the rule workers go on while the
            optimizer steps.
    """

    def __init__(
        self,
        workers: WorkerGroup,
        state: State,
        source: Source,
        second_pass: SecondPass,
        batch_loss: BatchLoss | None,
    ) -> None:
        self._state, self._plan, self._second_pass = state, source.plan, second_pass
        self._batch_loss, self._rule = batch_loss, workers.rule
        self._servers = workers.config.workers.servers
        optimizer, is_sync = state.optimizer, isinstance(workers.rule, rules.Sync)
        if optimizer.takes_closure and not is_sync:
            if needs_closure(optimizer.user_optimizer):
                kind = type(optimizer.user_optimizer).__name__
                raise SettingError(
                    "update",
                    workers.rule.name,
                    f"sync, as {kind} asks for a step's gradient again",
                    "pass update='sync', or take an optimizer that steps from one gradient",
                )
            workers.replicas.notes.add(
                f"{state.phases.kind}.step() accepts a closure and receives none under "
                f"{workers.rule.name}, because workers compute while the optimizer steps"
            )
        self._gives_closure = optimizer.takes_closure and is_sync and batch_loss is None

    def __call__(self, ready: ReadyStep) -> UpdateResult:
        """Make the update of a step. Blocks.

        Raises:
            NotFiniteError: a gradient in a closure is not finite.
            SettingError: the terms of the loss need a second pass, which the settings do not allow.
            Exception: the error of user code in a shard that failed on all attempts.
        """
        state, plan, step = self._state, self._plan, ready.step
        shards = plan.shards_of(step)
        state.begin_phase(plan.phase(step))
        again = None
        if self._gives_closure:
            again = partial(self._gradient_again, step, shards)
        present = len(ready.shards)
        update = partial(state.update.apply, shards=shards, present=present, recompute=again)
        with seeded_draws("update", plan, state.global_step + 1):
            if self._batch_loss is not None:
                if shards > 1:
                    return self._with_batch_loss(self._batch_loss, ready, update)
            elif any(part.denominators is not None for _, part in ready.parts):
                totals = summed_denominators(ready.parts, shards, present)
                if totals.awaits_totals:
                    return self._with_totals(step, shards, totals, update)
            return update(ready.parts)

    def _with_batch_loss(
        self, batch_loss: BatchLoss, ready: ReadyStep, update: Apply
    ) -> UpdateResult:
        """Make an update from the representations of all shards of a step."""
        step, plan = ready.step, self._plan
        leaves = plan.shards_of(step)
        result = batch_loss(step, tree_sum(ready.parts, leaves, ShardSum.add).represented)

        def use(total: ShardSum) -> UpdateResult:
            if result.of_parameters:
                assert total.gradient is not None
                # After the ordered sum, once: the order of additions is the same on any workers.
                # The product is rounded before the addition: a kernel that does both at once may
                # round differently at the end of a vector, and vectors end at other places on
                # ranks, which have slices of them.
                own = {name: g * total.weight for name, g in result.of_parameters.items()}
                with torch.no_grad():
                    batch_loss.add_to(total.gradient, own)
            return update(at_root(with_loss(total, result), leaves))

        gradients = of_shards(result, plan, step)
        return self._second_pass(BackThrough, step, use, gradients=gradients)

    def _with_totals(
        self, step: int, shards: int, totals: Denominators, update: Apply
    ) -> UpdateResult:
        """Make an update by a second pass with the totals of the terms of the loss.

        Raises:
            SettingError: updates are made without some shards, or on servers.
        """
        names = ", ".join(totals.names)
        fix = f"or give the terms of the loss ({names}) the same weight"
        if not isinstance(self._rule, rules.Sync):
            expected = "sync, as terms of the loss are divided by totals over all shards"
            raise SettingError("update", self._rule.name, expected, f"pass update='sync' {fix}")
        if self._servers is not None:
            expected = "none, as terms of the loss are divided by totals over all shards"
            raise SettingError("servers", self._servers, expected, f"leave servers out, {fix}")

        def use(total: ShardSum) -> UpdateResult:
            return update(at_root(total, shards))

        if self._state.optimizer.takes_closure:  # its passes take the memory of this pass
            return use(self._pass_with_totals(step, shards, totals, ShardSum.copied))
        return self._pass_with_totals(step, shards, totals, use)

    def _gradient_again(self, step: int, shards: int, use: Use[T]) -> T:
        """Return the result of ``use`` for the sum of a step at the present parameters. Blocks."""

        def use_if_complete(total: ShardSum) -> T | Denominators:
            if total.denominators is not None and total.awaits_totals:
                return total.denominators
            return use(total)

        found = self._second_pass(TrainingAgain, step, use_if_complete)
        if isinstance(found, Denominators):
            return self._pass_with_totals(step, shards, found, use)
        return found

    def _pass_with_totals(self, step: int, shards: int, totals: Denominators, use: Use[T]) -> T:
        """Return the result of ``use`` for a sum with the gradient of all terms of the loss.

        Args:
            shards: V.
            totals: N_k of all terms k.

        Raises:
            LossError: the second pass has other totals.
        """
        scales = totals.scales(shards)

        def checked(total: ShardSum) -> T:
            assert total.denominators is not None
            total.denominators.require_same_totals(scales, shards)
            return use(total)

        return self._second_pass(PassWithTotals, step, checked, scales=scales)


def summed_denominators(
    parts: Iterable[Part], shards: int, present: int | None = None
) -> Denominators:
    """Return the denominators of the sum of a step; the parts are not changed.

    Args:
        present: number of the shards, if some are absent.
    """
    found = [(node, part.copied_denominators()) for node, part in parts]
    return tree_sum(found, shards, Denominators.add, present)


def at_root(total: ShardSum, leaves: int) -> list[Part]:
    """Return the sum over all shards of a step as the only part of its tree."""
    return [(((leaves - 1).bit_length(), 0), total)]
