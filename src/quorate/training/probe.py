"""The probe: a model is made, checked and tried on one shard before anything is started.

A mistake in the model or the loss is found in the caller's own thread, it becomes known whether the
model draws from generators that threads share, and ``channels_last`` is tried.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch.nn.parameter import is_lazy

from quorate.coordination.keys import key
from quorate.coordination.plan import abridged
from quorate.data.source import Batch
from quorate.errors import CompileError, CopyError, SettingError
from quorate.machine import out_of_memory
from quorate.machine.devices import current
from quorate.replica.channels_last import convolves, set_format
from quorate.replica.flat import Flat
from quorate.replica.model import settle, sharing, unchanged
from quorate.replica.notes import Notes
from quorate.replica.replica import Replica
from quorate.replica.streams import Stream
from quorate.replica.torch_internals import has_gradient_hooks
from quorate.replica.turns import Turns
from quorate.replica.witness.again import Computed, Shard, computed, doubts
from quorate.replica.witness.trial import NOTHING, Written, written_in, written_text
from quorate.settings import function
from quorate.training.state import State
from quorate.transports.job import exited

FORMATS = (torch.contiguous_format, torch.channels_last)


def make_model(
    model: torch.nn.Module | Callable[[], torch.nn.Module], seed: int
) -> torch.nn.Module:
    """Return the model itself, or what a function makes while all generators are seeded.

    Raises:
        SettingError: it is no module, or has nothing to train.
    """
    module: object = model
    if not isinstance(model, torch.nn.Module) and callable(model):
        make = function("model", model, "that makes a module", 0)
        with Stream() as stream:

            def build(reseed: Callable[[int], None]) -> object:
                reseed(key("model", seed))
                stream.reseed(key("model", seed))
                return make()

            module = Turns().run(build)
    name = type(module).__name__
    if not isinstance(module, torch.nn.Module):
        expected = "a torch.nn.Module, or a function that makes one"
        raise SettingError("model", name, expected, "pass Net() or Net")
    if any(is_lazy(tensor) for tensor in (*module.parameters(), *module.buffers())):
        fix = "call a lazy module once on a batch before it is trained"
        raise SettingError("model", name, "parameters that have their shapes", fix)
    if any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers())):
        raise SettingError("model", name, "parameters that have values", "it is on device meta")
    for label, parameter in module.named_parameters():
        if has_gradient_hooks(parameter):
            expected = "parameters without gradient hooks, which a worker's copy would not have"
            raise SettingError("model", f"a hook on {label}", expected, "put it into the loss")
    for label, other in sharing(module):
        got = f"{label} and {other}, which lie in the same memory"
        fix = f"make them one parameter: assign {other} itself, and not its .data"
        if label == other:
            got = f"{label}, of which several elements are one in memory"
            fix = "an expanded tensor needs a clone() before it is made a parameter"
        raise SettingError("model", got, "memory for each element of a parameter", fix)
    settle(module)
    if not any(parameter.requires_grad for parameter in module.parameters()):
        expected = "at least one parameter that requires a gradient"
        raise SettingError("model", name, expected, "is everything frozen?")
    return module


def probed(
    model: torch.nn.Module,
    make_state: Callable[..., State],
    make_replica: Callable[[State], Replica],
    batch: Batch,
    *,
    notes: Notes,
    seed: int,
    training: bool,
    watching: Callable[[], AbstractContextManager[None]],
    say: Callable[[str], None],
) -> State:
    """Make the state and compute one shard with it, whose result is thrown away.

    Args:
        make_state: may be given ``mutable_frozen``, see ``Buffers``, and ``written``, see
            ``Writes``: what forward writes is found by trying.
        batch: of shard 0 of step 0.
        notes: what is found goes there.
        watching: the context in which that shard is computed.

    Raises:
        UserError: the model or the loss cannot be trained.
        Whatever the user's code raises, with a note that names the rows.
    """
    probe = _Probe(model, make_state, make_replica, batch, notes, seed, training, watching)
    state: State | None = None
    plain: Yield | None = None
    for memory_format in FORMATS if convolves(model) else FORMATS[:1]:
        is_last = not convolves(model) or memory_format is torch.channels_last
        try:
            tried, found = probe.tried(memory_format, is_last=is_last)
        except SystemExit as error:
            raise exited(error, "shard 0 of step 0, which is tried first") from error
        except (CopyError, CompileError):
            raise
        except Exception as error:  # the user's code
            if state is not None:
                say("channels_last is off: the model does not work with it")
                state, _ = probe.tried(FORMATS[0], is_last=True)
                break
            rows = abridged(batch.rows)
            error.add_note(f"quorate: while trying shard 0 of step 0, rows {rows}")
            if (text := out_of_memory.note(error, probe.device)) is not None:
                error.add_note(text)
            raise
        if plain is not None and not plain.agrees(found):
            say("channels_last is off: the model has another loss or gradient with it")
            state, _ = probe.tried(FORMATS[0], is_last=True)
            break
        plain, state = found, tried
    assert state is not None
    for line in written_text(model, probe.known.trained):
        say(line)
    return state


@dataclass
class _Probe:
    """One model, tried in one memory format after the other; see ``probed``."""

    model: torch.nn.Module
    make_state: Callable[..., State]
    make_replica: Callable[[State], Replica]
    batch: Batch
    notes: Notes
    seed: int
    training: bool
    watching: Callable[[], AbstractContextManager[None]]
    known: Written = NOTHING
    device: torch.device = torch.device("cpu")  # noqa: RUF009  # of the last replica

    def tried(self, memory_format: torch.memory_format, *, is_last: bool) -> tuple[State, Yield]:
        """Return a state in a format, and what its shard yields.

        Args:
            is_last: whether it will be kept; else it is there to be compared with.
        """
        set_format(self.model, memory_format)
        first: Computed | None = None
        while True:
            state = self.make_state(mutable_frozen=self.known.frozen, written=self.known.trained)
            with unchanged(self.model):
                replica = self.make_replica(state)
                self.device = replica.device
                # The first of two formats is not worth compiling.
                as_it_is = nullcontext() if is_last else replica.watched(lambda loss: loss)
                with current(replica.device), Stream() as stream, self.watching(), as_it_is:
                    rows = len(self.batch.rows)
                    shard = Shard(self.batch.data, rows, stream, key("probe", self.seed))
                    compute = partial(self._yield, replica, shard)
                    found, (made, seen) = written_in(replica, compute, self.known)
                    first = first or seen
                    if self.training and is_last and self.known.covers(found):
                        # Once more, on the same replica: what it keeps is filled now.
                        for doubt in doubts(replica, first, self._again(replica, shard), shard):
                            self.notes.doubt(doubt)
            if self.known.covers(found):
                return state, made
            # How it is carried depends on what is written: once more from the start.
            self.known = self.known.joined(found)

    def _again(self, replica: Replica, shard: Shard) -> Computed:
        shard_sum, seen = computed(replica, shard, with_buffers=False)
        replica.recycle(shard_sum)
        return seen

    def _yield(self, replica: Replica, shard: Shard) -> tuple[Yield, Computed]:
        # What forward writes is not carried as long as it is not known; it is in the gradient.
        made, seen = computed(replica, shard, training=self.training, with_buffers=False)
        stream = shard.stream
        if self.training and (stream.drawn or made.weight == 0):
            # Where a tensor is drawn, which of its elements comes first depends on its format.
            try:
                made = replica.evaluation(shard.data, shard.rows, stream, shard.seed)
            except Exception:  # a loss function that is for training only
                return Yield(None, None), seen
        elif self.training:
            return Yield(made.means()["loss"], made.gradient), seen
        return Yield(None if stream.drawn or made.weight == 0 else made.means()["loss"], None), seen


class Yield(NamedTuple):
    """What a shard yields, as far as it does not depend on what was drawn."""

    loss: float | None
    gradient: Flat | None

    def agrees(self, other: Yield) -> bool:
        """Return whether two are equal but for rounding: many layers may make much of that."""
        one, two = self.loss, other.loss
        if one is not None and two is not None and abs(one - two) > 0.02 * max(abs(one), abs(two)):
            return False
        if self.gradient is None or other.gradient is None:
            return True
        distance = norm = 0.0
        for name, view in self.gradient.views.items():
            distance += float((view - other.gradient.views[name]).abs().square().sum())
            norm += float(view.abs().square().sum())
        return not distance > 0.1 * norm
