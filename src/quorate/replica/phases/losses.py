"""The losses of several phases, as one loss function, and the round of updates."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from quorate.coordination.epochs import Round, takes_of
from quorate.errors import LossError, SettingError
from quorate.replica.beside.composed import Composed
from quorate.replica.phases.phase import Phase

if TYPE_CHECKING:  # settings are read without torch
    import torch

    from quorate.replica.beside.at import At
    from quorate.replica.loss import Loss

    Losses = Loss | Mapping[str, Loss] | Sequence[tuple[str, Loss] | Phase]

FIX = 'for example {"d": d_loss, "g": g_loss}, or [("d", d_loss), ("d", d_loss), ("g", g_loss)]'
EXPECTED = "a function, a dict from phases to functions, or a list of (phase, function)"


class PhaseLosses(Composed):
    """The losses of a training with phases. A call returns the sum of all losses over a batch.

    So an evaluation has the metrics of each phase, and a trial shard before training covers all
    losses. An update uses a single loss.

    Args:
        phases: the updates of a round, in order; a repeated name is the same phase.
        totals: names of counts in the results of losses; they get no prefix.

    Raises:
        SettingError: there are no phases, or two phases have the same name.
    """

    def __init__(self, phases: Sequence[Phase], totals: Collection[str] = ()) -> None:
        self._totals = frozenset(totals)
        self.by_name: dict[str, Phase] = {}
        for phase in phases:
            first = self.by_name.setdefault(phase.name, phase)
            if (first.loss, first.parts) != (phase.loss, phase.parts):
                expected = "one loss, and one choice of what it trains, for each name"
                raise SettingError("loss", f"two phases {phase.name!r}", expected, "rename one")
        if not phases:
            raise SettingError("loss", "no phase", EXPECTED, FIX)
        names = [phase.name for phase in phases]
        takes = takes_of(names, [phase.new_batch for phase in phases])
        self.round = Round(tuple(names), takes)

    @property
    def functions(self) -> Mapping[str, Callable[..., Any]]:
        """The loss functions as written by the user."""
        return {f"the loss of phase {name!r}": p.loss for name, p in self.by_name.items()}

    def __call__(self, model: torch.nn.Module, batch: Any, at: At) -> dict[str, Any]:
        """Return the sum of the losses, and the results of each under the name of its phase.

        A phase's means have the weight that the phase returned.

        Raises:
            LossError: a result has no loss.
        """
        joined: dict[str, Any] = {}
        losses: list[Any] = []
        for name, phase in self.by_name.items():
            returned = phase.with_at(model, batch, at)
            values = dict(returned) if isinstance(returned, Mapping) else {"loss": returned}
            if "loss" not in values:
                raise LossError(
                    f"loss of phase {name!r}",
                    got=f"a dict with {', '.join(map(repr, values)) or 'nothing'}",
                    expected='a dict with the key "loss"',
                )
            losses.append(values["loss"])
            weight = values.pop("weight", None)
            for key, value in values.items():
                label = key if key in self._totals else f"{name}/{key}"
                if label in joined:
                    raise LossError(
                        "totals",
                        f"two phases return {key!r}",
                        fix="return the total in one phase only",
                    )
                weighs = weight is not None and key not in self._totals
                joined[label] = _with_weight(value, weight) if weighs else value
        scalars = [_scalar(loss) for loss in losses]
        return {"loss": sum(scalars[1:], scalars[0]), **joined}

    def trained(self, model: torch.nn.Module, name: str) -> list[str]:
        """Return the names of the parameters trained by a phase, in the order of the model."""
        trainable = {*_trainable(model)}
        return [each for each in self.by_name[name].covered(model) if each in trainable]

    def require_parts(self, model: torch.nn.Module) -> None:
        """Compare the parts trained by phases with a model.

        Raises:
            SettingError: a part is missing or has nothing to train, or a parameter is trained by no
                phase.
        """
        parts = ", ".join(repr(name) for name, _ in model.named_children())
        there = {name for name, _ in (*model.named_modules(), *model.named_parameters())}
        for name, phase in self.by_name.items():
            label = f"trains of phase {name!r}"
            for part in phase.parts:
                if part not in there:
                    fix = "name the phase like the part, or pass quorate.Phase(..., trains=)"
                    raise SettingError(label, part, f"a part of the model, {parts}", fix)
            if not self.trained(model, name):
                expected = "a part with parameters that require a gradient"
                raise SettingError(label, ", ".join(phase.parts), expected, "is it frozen?")
        covered = {each for phase in self.by_name.values() for each in phase.covered(model)}
        for each in _trainable(model):
            if each not in covered:
                expected = "each trainable parameter in a part that a phase trains"
                fix = (
                    f"switch {each.partition('.')[0]!r} off with requires_grad_(False), or train it"
                )
                raise SettingError("loss", f"no phase for {each}", expected, fix)


def _with_weight(value: Any, weight: Any) -> Any:
    """Return a metric, a term, or all terms of a loss, with a weight unless they have their own."""
    if not isinstance(value, Mapping):
        return {"loss": value, "weight": weight}
    if "weight" in value:
        return value
    return {name: _with_weight(term, weight) for name, term in value.items()}


def _scalar(loss: Any) -> Any:
    """Return a loss, or the sum of its terms without terms of weight 0."""
    if not isinstance(loss, Mapping):
        return loss
    terms = [term if isinstance(term, Mapping) else {"loss": term} for term in loss.values()]
    scalars = [term["loss"] for term in terms if term.get("weight", 1) > 0]
    return sum(scalars[1:], scalars[0]) if scalars else terms[0]["loss"] * 0


def _trainable(model: torch.nn.Module) -> list[str]:
    return [name for name, parameter in model.named_parameters() if parameter.requires_grad]


def losses_of(loss: Losses, totals: Mapping[str, Any] | None) -> Loss:
    """Return the user's loss function, or the joint loss function of the user's phases.

    Args:
        loss: the argument of ``Trainer``.
        totals: the argument of ``Trainer``.

    Raises:
        SettingError: the argument is neither a function nor phases.
    """
    given: Any = loss
    if callable(given) or not isinstance(given, (Mapping, list, tuple)):
        return given  # type: ignore[no-any-return]  # it is checked with the other settings
    items: Any = given.items() if isinstance(given, Mapping) else given
    phases = []
    for item in items:
        if isinstance(item, Phase):
            phases.append(item)
        elif isinstance(item, tuple) and len(item) == 2:
            phases.append(Phase(*item))
        else:
            raise SettingError("loss", f"an item {item!r:.60}", EXPECTED, FIX)
    return PhaseLosses(phases, totals if isinstance(totals, Mapping) else ())
