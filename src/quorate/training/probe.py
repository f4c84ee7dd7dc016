"""The probe: a model is made, checked and tried on one shard before anything is started.

A mistake in the model or the loss is found in the caller's own thread, it becomes known whether the
model draws from generators that threads share, and ``channels_last`` is tried.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch.nn.parameter import is_lazy

from quorate.coordination.keys import key
from quorate.coordination.plan import abridged
from quorate.data.source import Batch
from quorate.errors import CopyError, SettingError
from quorate.machine import out_of_memory
from quorate.machine.devices import current
from quorate.replica.channels_last import convolves, set_format
from quorate.replica.model import settle, unchanged
from quorate.replica.replica import Replica
from quorate.replica.streams import Stream
from quorate.replica.torch_internals import has_gradient_hooks, version
from quorate.replica.turns import Turns
from quorate.training.state import State
from quorate.transports.job import exited


def make_model(
    model: torch.nn.Module | Callable[[], torch.nn.Module], seed: int
) -> torch.nn.Module:
    """Return the model itself, or what a function makes while all generators are seeded.

    Raises:
        SettingError: it is no module, or has nothing to train.
    """
    module: object = model
    if not isinstance(model, torch.nn.Module) and callable(model):
        make = model
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
    seed: int,
    training: bool,
    watching: Callable[[], AbstractContextManager[None]],
    say: Callable[[str], None],
) -> State:
    """Make the state and compute one shard with it, whose result is thrown away.

    Args:
        make_state: may be given ``mutable_frozen``, see ``Buffers``.
        watching: the context in which that shard is computed.

    Raises:
        UserError: the model or the loss cannot be trained.
        Whatever the user's code raises, with a note that names the rows.
    """
    formats = [torch.contiguous_format]
    if convolves(model):
        formats.insert(0, torch.channels_last)
    while True:
        memory_format = formats.pop(0)
        set_format(model, memory_format)
        state = make_state()
        with unchanged(model):
            replica = make_replica(state)
            work = replica.gradient if training else replica.evaluation
            before = [version(parameter) for parameter in replica.model.parameters()]
            try:
                with current(replica.device), Stream() as stream, watching():
                    work(batch.data, len(batch.rows), stream, key("probe", seed))
            except SystemExit as error:
                raise exited(error, "shard 0 of step 0, which is tried first") from error
            except CopyError:
                raise
            except Exception as error:  # the user's code: tried again in the other format
                if not formats:
                    rows = abridged(batch.rows)
                    error.add_note(f"quorate: while trying shard 0 of step 0, rows {rows}")
                    if (text := out_of_memory.note(error, replica.device)) is not None:
                        error.add_note(text)
                    raise
                continue
            after = [version(parameter) for parameter in replica.model.parameters()]
        if convolves(model) and memory_format is torch.contiguous_format:
            say("channels_last is off: the model does not work with it")
        mutable_frozen = frozenset(n for n, old in enumerate(before) if after[n] != old)
        if not mutable_frozen:
            return state
        return make_state(mutable_frozen=mutable_frozen)
