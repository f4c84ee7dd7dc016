"""The outbox: vectors that take in the gradient of a rank's last shard while backward makes it.

So a bucket can go to the other ranks as soon as all of it is there, and backward goes on meanwhile.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from queue import SimpleQueue
from typing import Any

import torch

from quorate.engines.collective.rank_slices import Bucket
from quorate.replica.flat import Flat, Layout
from quorate.replica.torch_internals import version

MOST_MISHAPS = 3


class GradientBuckets(Flat):
    """The sum of a rank's shards: what it had before its last one, and the gradient of that.

    One thread computes the shard, another one takes buckets out, in the order that it wants.

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
        self._mishaps = 0  # steps in which gradients changed after they were made
        self._again: Flat | None = None  # what was there to be sent, if that was not what was sent
        self.clear()

    def clear(self) -> None:
        """Forget what is here: a step begins. No other thread is at work."""
        self.came: list[int] = []  # buckets in the order in which they were whole
        self._before: Sequence[Flat] = []
        self._forget()
        self._is_late = self._mishaps >= MOST_MISHAPS  # whether gradients are taken at the end
        self._whole: SimpleQueue[tuple[int, torch.Event | None] | BaseException] = SimpleQueue()
        self._known: dict[int, torch.Event | None] = {}  # buckets that are whole
        self._again = None

    # --- the thread that computes -----------------------------------------------------------------

    def begin(self, before: Sequence[Flat]) -> None:
        """Note that the last shard of a step is about to be computed.

        Args:
            before: sums of what lies to the left of it in the tree of shards, the nearest first.
        """
        self._before = before

    def expect(self, parameters: Mapping[str, torch.nn.Parameter], factor: float) -> None:
        """Note that backward begins, and take each gradient, times a factor, when it is made."""
        self._unhook()
        if self.came:  # the shard is computed anew
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

                def take(parameter: torch.Tensor, name: str = name) -> None:
                    self._take(name, parameter.grad)

                hooked: Any = parameter  # torch declares no types here
                self._hooks.append(hooked.register_post_accumulate_grad_hook(take))

    def fill(self, values: Mapping[str, torch.Tensor], factor: float = 1.0) -> None:
        """Take what has not come by itself: see ``Flat.fill``."""
        self._unhook()
        is_as_taken = all(
            values.get(name) is value and version(value) == then
            for name, (value, then) in self._taken.items()
        ) and self._frozen.isdisjoint(values)
        if not is_as_taken or (self._taken and factor != self._factor):
            self._stop()
        if (self._taken or self._frozen) and not self._is_late:
            self._fill_rest(values, factor)
        elif not self.came:
            super().fill(values, factor)
        else:  # what is here must not change while it is sent
            self._again = self.layout.new(self.device)
            self._again.fill(values, factor)
        self.release()

    def release(self) -> None:
        """Have every bucket go: all is here that will come, or something was raised."""
        self._unhook()
        for number in range(len(self._buckets)):
            if self._missing[number]:
                self._missing[number] = 0
                self._put(number)

    @torch.no_grad()
    def _take(self, name: str, gradient: torch.Tensor | None) -> None:
        if gradient is None or gradient.is_sparse or self._is_late:
            return
        if name in self._taken:  # backward within backward: it comes in parts
            self._stop()
            return
        view = self.views[name]
        view.copy_(gradient)
        if self._factor != 1.0:
            view.mul_(self._factor)
        self._taken[name] = gradient, version(gradient)
        self._count(name)

    def _fill_rest(self, values: Mapping[str, torch.Tensor], factor: float) -> None:
        for name, view in self.views.items():
            if name in self._taken or name in self._frozen:
                continue
            value = values.get(name)
            if value is None:
                view.zero_()
            else:
                view.copy_(value.to_dense() if value.is_sparse else value)
                if factor != 1.0:
                    view.mul_(factor)

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
        self._whole.put((number, event))

    def _forget(self) -> None:
        self._factor = 1.0
        self._taken: dict[str, tuple[torch.Tensor, int]] = {}  # a gradient, and its version then
        self._frozen: set[str] = set()
        self._missing = [*self._sizes]  # tensors that a bucket waits for

    def _stop(self) -> None:
        """Take gradients at the end of backward: they are not final before."""
        if not self._is_late:
            self._is_late, self._mishaps = True, self._mishaps + 1

    def _unhook(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    # --- the thread that exchanges ----------------------------------------------------------------

    def wait(self, number: int) -> None:
        """Return when a bucket is whole, and the sum over all of this rank's shards. Blocks."""
        while number not in self._known:
            came = self._whole.get()
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
        """Have ``wait`` raise, where it waits. Any thread."""
        self._whole.put(error)

    @property
    def is_to_go_again(self) -> bool:
        """Whether something else was sent than what there was in the end."""
        return self._again is not None

    def go_again(self) -> None:
        """Have all buckets as they should have been. Nobody reads what is here meanwhile."""
        if self._again is not None:
            self.copy_(self._again)
            self._again = None
            for number in range(len(self._buckets)):
                self.wait(number)


def _of(flat: Flat, bucket: Bucket) -> torch.Tensor:
    return flat.vectors[bucket.vector][bucket.span.start : bucket.span.stop]


def _by_name(layout: Layout, buckets: Sequence[Bucket]) -> dict[str, Collection[int]]:
    """Return the buckets that each tensor has a part in."""
    found: dict[str, Collection[int]] = {}
    for name, section in layout.sections.items():
        end = section.start + section.span
        found[name] = [
            number
            for number, (vector, span, _) in enumerate(buckets)
            if vector == section.vector and section.start < span.stop and span.start < end
        ]
    return found
