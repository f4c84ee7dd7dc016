"""Gradient buckets: ranges of vectors, exchanged one by one, and the gradient that fills them.

A bucket is sent as soon as all gradients in the bucket are complete, while backward continues.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch

from quorate.coordination.ownership import BLOCK, blocks_of_bucket, buckets, slices
from quorate.engines.collective.rank_control import RankControl
from quorate.replica.flat import Flat, Layout
from quorate.replica.torch_internals import version

MOST_MISHAPS = 3


class Bucket(NamedTuple):
    """A range of a vector that is exchanged at once, with the part of each rank."""

    vector: int
    span: range
    of: list[range]  # by rank

    def part(self, whole: Flat, rank: int) -> torch.Tensor:
        """Return a view of a rank's part of this bucket.

        Args:
            whole: vectors of the layout.
            rank: the owner of the part.
        """
        return whole.vectors[self.vector][self.of[rank].start : self.of[rank].stop]


def buckets_of(ranks: RankControl, layout: Layout, most_bytes: int) -> list[Bucket]:
    """Return the buckets of all vectors of a layout, of ``most_bytes`` bytes at most."""
    found: list[Bucket] = []
    for vector, (size, dtype) in enumerate(zip(layout.sizes, layout.dtypes, strict=True)):
        blocks = most_bytes // (BLOCK * dtype.itemsize)
        if ranks.device.type == "cpu" and len(ranks.hosts.ranks) > 1:
            blocks = blocks_of_bucket(size, ranks.size, blocks)
        found += [
            Bucket(vector, span, slices(span, ranks.size, turn))
            for turn, span in enumerate(buckets(size, blocks))
        ]
    return found


class GradientBuckets(Flat):
    """The sum of a rank's shards: the sums of earlier shards plus the gradient of the last shard.

    A compute thread runs the shard, and an exchange thread waits for buckets, in any order.

    Args:
        flat: the memory.
        buckets: of this layout.
    """

    def __init__(self, flat: Flat, buckets: Sequence[Bucket]) -> None:
        super().__init__(flat.layout, flat.vectors, flat.segment)
        self._buckets = buckets
        self._buckets_of = _by_name(flat.layout, buckets)
        self._sizes = [
            sum(n in of for of in self._buckets_of.values()) for n in range(len(buckets))
        ]
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._mishaps = 0  # steps in which gradients changed after they had been copied here
        self._again: Flat | None = None  # the final gradient, if another gradient was sent
        self.clear()

    def clear(self) -> None:
        """Discard all gradients: a step begins. Neither thread is at work."""
        self.came: list[int] = []  # buckets in the order in which they became complete
        self._before: Sequence[Flat] = []
        self._forget()
        self._is_late = self._mishaps >= MOST_MISHAPS  # whether to copy gradients after backward
        self._complete: SimpleQueue[tuple[int, torch.Event | None] | BaseException] = SimpleQueue()
        self._known: dict[int, torch.Event | None] = {}  # complete buckets, for ``wait``
        self._again = None

    # --- the compute thread -----------------------------------------------------------------------

    def begin(self, before: Sequence[Flat]) -> None:
        """Begin the computation of the last shard of a step.

        Args:
            before: sums of the shards to the left in the tree of shards, the nearest first.
        """
        self._before = before

    def expect(self, parameters: Mapping[str, torch.nn.Parameter], factor: float) -> None:
        """Begin backward: copy each gradient, times a factor, when the gradient is complete."""
        self._unhook()
        if self.came:  # the shard is computed again
            self._stop()
        else:
            self._forget()
        if not self._is_late:
            self._factor = factor
            for name, parameter in parameters.items():
                if not parameter.requires_grad:  # frozen by user code
                    self.views[name].zero_()
                    self._frozen.add(name)
                    self._count(name)
                    continue
                hooked: Any = parameter  # torch declares no types here
                take = partial(self._take, name)
                self._hooks.append(hooked.register_post_accumulate_grad_hook(take))

    def fill(self, values: Mapping[str, torch.Tensor], factor: float = 1.0) -> None:
        """Copy the gradients not yet copied by hooks: see ``Flat.fill``."""
        self._unhook()
        is_as_taken = all(
            values.get(name) is value and version(value) == then
            for name, (value, then) in self._taken.items()
        ) and self._frozen.isdisjoint(values)
        if not is_as_taken or (self._taken and factor != self._factor):
            self._stop()
        if (self._taken or self._frozen) and not self._is_late:
            if rest := self.views.keys() - self._taken.keys() - self._frozen:
                self.part(rest).fill(values, factor)
        elif not self.came:
            super().fill(values, factor)
        else:  # memory that is being sent must not change
            self._again = self.layout.new(self.device)
            self._again.fill(values, factor)
        self.release()

    def release(self) -> None:
        """Mark all buckets complete: backward has ended, or user code has raised an error."""
        self._unhook()
        for number in range(len(self._buckets)):
            if self._missing[number]:
                self._missing[number] = 0
                self._put(number)

    @torch.no_grad()
    def _take(self, name: str, parameter: torch.Tensor) -> None:
        gradient = parameter.grad
        if gradient is None or gradient.is_sparse or self._is_late:
            return
        if name in self._taken:  # backward within backward computes gradients in parts
            self._stop()
            return
        view = self.views[name]
        view.copy_(gradient)
        if self._factor != 1.0:
            view.mul_(self._factor)
        self._taken[name] = gradient, version(gradient)
        self._count(name)

    def _count(self, name: str) -> None:
        for number in self._buckets_of[name]:
            self._missing[number] -= 1
            if self._missing[number] == 0:
                self._put(number)

    def _put(self, number: int) -> None:
        event = None
        if self.device.type != "cpu":
            event = torch.accelerator.current_stream(self.device).record_event()
        self.came.append(number)
        self._complete.put((number, event))

    def _forget(self) -> None:
        self._factor = 1.0
        self._taken: dict[str, tuple[torch.Tensor, int]] = {}  # gradients with versions
        self._frozen: set[str] = set()
        self._missing = [*self._sizes]  # by bucket, the number of incomplete tensors

    def _stop(self) -> None:
        """Copy gradients after backward, because they change during backward."""
        if not self._is_late:
            self._is_late, self._mishaps = True, self._mishaps + 1

    def _unhook(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    # --- the exchange thread ----------------------------------------------------------------------

    def wait(self, number: int) -> None:
        """Return when a bucket has the sum over all shards of this rank. Blocks."""
        while number not in self._known:
            came = self._complete.get()
            if isinstance(came, BaseException):
                raise came
            other, event = came
            self._known[other] = event
        if (event := self._known[number]) is not None:
            torch.accelerator.current_stream(self.device).wait_event(event)
        bucket = self._buckets[number]
        own = _of(self, bucket)
        for left in self._before:
            torch.add(_of(left, bucket), own, out=own)

    def leave(self, error: BaseException) -> None:
        """Make ``wait`` raise an error. Any thread calls."""
        self._complete.put(error)

    @property
    def is_to_go_again(self) -> bool:
        """True if the gradient changed after buckets had been sent."""
        return self._again is not None

    def go_again(self) -> None:
        """Replace the sent buckets by the final gradient. No rank reads them now."""
        if self._again is not None:
            self.copy_(self._again)
            self._again = None
            for number in range(len(self._buckets)):
                self.wait(number)


def _of(flat: Flat, bucket: Bucket) -> torch.Tensor:
    return flat.vectors[bucket.vector][bucket.span.start : bucket.span.stop]


def _by_name(layout: Layout, buckets: Sequence[Bucket]) -> dict[str, Collection[int]]:
    """Return by the name of each tensor the numbers of all overlapping buckets."""
    found: dict[str, Collection[int]] = {}
    for name, section in layout.sections.items():
        end = section.start + section.span
        found[name] = [
            number
            for number, (vector, span, _) in enumerate(buckets)
            if vector == section.vector and section.start < span.stop and span.start < end
        ]
    return found
