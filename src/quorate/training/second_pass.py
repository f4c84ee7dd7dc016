"""Second passes over the shards of a step, as a part of the step's update.

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
from typing import Any, Protocol, TypeVar

from quorate.coordination import rules
from quorate.coordination.tree import tree_sum
from quorate.data.source import Source
from quorate.engines import Transport
from quorate.engines.job import PassWithTotals, TrainingAgain
from quorate.errors import SettingError
from quorate.replica.flat import Flat
from quorate.replica.loss_terms import Denominators
from quorate.replica.shard_sum import Part, ShardSum
from quorate.services.display.raised_shards import RaisedShards
from quorate.training.drive import ReadyStep, run_job
from quorate.training.optimizing.closure import needs_closure
from quorate.training.optimizing.optimizer import FlatOptimizer

T = TypeVar("T")
Take = Callable[[ShardSum], None]
ApplyParts = Callable[[list[Part]], T]  # makes the update of a step from the parts of its sum


class SecondPass(Protocol):
    """Computes the shards of a step once more, on any engine."""

    def __call__(self, kind: type[TrainingAgain], step: int, take: Take, **inputs: Any) -> None:
        """Pass the new sum of a step to ``take``. Blocks.

        The memory of the sum is the workers' again when ``take`` returns.

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

    def __call__(self, kind: type[TrainingAgain], step: int, take: Take, **inputs: Any) -> None:
        """Pass the new sum of a step to ``take``."""
        leaves = self.source.plan.shards_of(step)

        def add(ready: ReadyStep) -> None:
            take(tree_sum(ready.parts, leaves, ShardSum.add))

        # A separate job: workers read parameters anew for each job.
        job = kind(
            self.source, self.parameters, range(step, step + 1), threads=self.threads, **inputs
        )
        run_job(
            *(self.transport, job, add, WithoutCopies(), self.timeout_s),
            say=self.say,
            raised_shards=self._raised,
        )


# --- closures -------------------------------------------------------------------------------------


def receives_closure(optimizer: FlatOptimizer, rule: rules.Rule) -> bool:
    """Return whether the optimizer is given a closure.

    Raises:
        SettingError: the optimizer needs a closure, but under the rule workers go on while the
            optimizer steps.
    """
    if not optimizer.takes_closure:
        return False
    if not isinstance(rule, rules.Sync) and needs_closure(optimizer.user_optimizer):
        raise SettingError(
            "update",
            rule.name,
            f"sync, as {type(optimizer.user_optimizer).__name__} asks for a step's gradient again",
            "pass update='sync', or take an optimizer that steps from one gradient",
        )
    return isinstance(rule, rules.Sync)


def gradient_again(second_pass: SecondPass, step: int, shards: int, take: Take) -> None:
    """Pass the sum of a step at the present parameters to ``take``. Blocks."""
    awaited: list[Denominators] = []

    def look(total: ShardSum) -> None:
        if total.denominators is not None and total.awaits_totals:
            awaited.append(total.denominators)
        else:
            take(total)

    second_pass(TrainingAgain, step, look)
    for totals in awaited:
        pass_with_totals(second_pass, step, shards, totals, take)


# --- terms of a loss ------------------------------------------------------------------------------


def summed_denominators(
    parts: Iterable[Part], shards: int, present: int | None = None
) -> Denominators:
    """Return the denominators of the sum of a step; the parts are not changed.

    Args:
        present: number of the shards, if some are absent.
    """
    found = [(node, part.copied_denominators()) for node, part in parts]
    return tree_sum(found, shards, Denominators.add, present)


def pass_with_totals(
    second_pass: SecondPass, step: int, shards: int, totals: Denominators, take: Take
) -> None:
    """Pass the sum of a step to ``take``, with the gradient of all terms of the loss. Blocks.

    Args:
        shards: V.
        totals: N_k of all terms k.

    Raises:
        LossError: the second pass has other totals.
    """
    scales = totals.scales(shards)

    def check(total: ShardSum) -> None:
        assert total.denominators is not None
        total.denominators.require_same_totals(scales, shards)
        take(total)

    second_pass(PassWithTotals, step, check, scales=scales)


@dataclass(eq=False)
class UpdateWithTerms:
    """Makes the update of a step, with a second pass where terms of the loss have other totals.

    Args:
        second_pass: computes shards again.
        optimizer: makes the updates.
        shards_of: returns V of a step.
        refuse: raises the error of a setting that allows no second pass, if any.
    """

    second_pass: SecondPass
    optimizer: FlatOptimizer
    shards_of: Callable[[int], int]
    refuse: Callable[[Denominators], None]

    def __call__(self, ready: ReadyStep, update: ApplyParts[T]) -> T:
        """Return the result of ``update`` for the step's gradient. Blocks until workers are done.

        Raises:
            SettingError: the settings allow no second pass.
            Exception: the error of user code in a shard that failed on all attempts.
        """
        if all(part.denominators is None for _, part in ready.parts):
            return update(ready.parts)
        step, shards = ready.step, self.shards_of(ready.step)
        totals = summed_denominators(ready.parts, shards, len(ready.shards))
        if not totals.awaits_totals:
            return update(ready.parts)
        self.refuse(totals)
        made: list[T] = []
        kept: list[ShardSum] = []

        def add(total: ShardSum) -> None:
            if self.optimizer.takes_closure:  # whose passes take the memory of this pass
                kept.append(total.copied())
            else:
                made.append(update(at_root(total, shards)))

        pass_with_totals(self.second_pass, step, shards, totals, add)
        made += [update(at_root(total, shards)) for total in kept]
        return made[0]


def refuse_totals(rule: rules.Rule, servers: int | None, totals: Denominators) -> None:
    """Refuse settings that allow no second pass for the terms of a loss.

    Raises:
        SettingError: updates are made without some shards, or on servers.
    """
    names = ", ".join(totals.names)
    fix = f"or give the terms of the loss ({names}) the same weight"
    if not isinstance(rule, rules.Sync):
        expected = "sync, as terms of the loss are divided by totals over all shards"
        raise SettingError("update", rule.name, expected, f"pass update='sync' {fix}")
    if servers is not None:
        expected = "none, as terms of the loss are divided by totals over all shards"
        raise SettingError("servers", servers, expected, f"leave servers out, {fix}")


def at_root(total: ShardSum, leaves: int) -> list[Part]:
    """Return the sum over all shards of a step as the only part of its tree."""
    return [(((leaves - 1).bit_length(), 0), total)]
