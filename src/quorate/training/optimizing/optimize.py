"""The settings of an update: optimizer, schedule, clipping, averaged weights; for each phase.

An update may have several optimizers, each with parameters chosen by name. An entry of
``Optimize([...])`` is a tuple ``(pattern, optimizer, schedule, clip_norm)``; a function may stand
in place of a pattern. The first entry that matches a parameter takes the parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from quorate.errors import SettingError
from quorate.machine.text import abridged_names
from quorate.replica.phases.losses import PhaseLosses
from quorate.settings import (
    REQUIRED,
    AtResume,
    Settings,
    between,
    declare,
    function,
    one_of,
    real,
    resolved,
    switch,
)

if TYPE_CHECKING:
    import torch
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler

    from quorate.replica.loss import Loss
    from quorate.training.optimizing.optimizer import OptimizerFactory

    Pattern = str | Callable[[str, torch.nn.Parameter], bool]
    Entry = (
        tuple[Pattern, OptimizerFactory]
        | tuple[Pattern, OptimizerFactory, Callable[[Optimizer], LRScheduler] | None]
        | tuple[Pattern, OptimizerFactory, Callable[[Optimizer], LRScheduler] | None, float | None]
    )
    Choice: TypeAlias = OptimizerFactory | list[Entry] | "Optimize"
    Optimizers: TypeAlias = Choice | Mapping[str, Choice]

FORM = "(pattern, optimizer, schedule, clip_norm)"
PAGE = "docs/several-models.md"
EXAMPLE = '[("blocks.*", lambda parameters: torch.optim.Muon(parameters)), ("*", ...)]'


class Assignment(NamedTuple):
    """An optimizer, and the choice of its parameters."""

    choice: Pattern  # a pattern over names, or a function of name and parameter
    optimizer: OptimizerFactory
    schedule: Callable[[Optimizer], LRScheduler] | None = None
    clip_norm: float | None = None  # largest norm of the gradient of its own parameters

    @property
    def text(self) -> str:
        """The choice as text for people."""
        if isinstance(self.choice, str):
            return repr(self.choice)
        return getattr(self.choice, "__name__", type(self.choice).__name__)

    def takes(self, name: str, parameter: torch.nn.Parameter) -> bool:
        """Return whether the entry matches a parameter.

        A pattern matches the name of the parameter, or of a module around the parameter.

        Raises:
            SettingError: a function returns neither True nor False.
        """
        if not isinstance(self.choice, str):
            found: object = self.choice(name, parameter)
            try:
                return bool(found)
            except (RuntimeError, ValueError):  # a tensor or an array of several elements
                got = f"a {type(found).__name__} from {self.text} for {name}"
                fix = "compare names or shapes, not values"
                raise SettingError("optimizer", got, "True or False", fix) from None
        return fnmatchcase(name, self.choice) or fnmatchcase(name, f"{self.choice}.*")


def read_assignments(
    name: str,
    entries: Sequence[Any],
    optimizer: Callable[[str, Any], OptimizerFactory],
    schedule: Callable[[str, Any], Any],
) -> list[Assignment]:
    """Check the entries of a list of optimizers.

    Args:
        name: of the setting, for messages.
        entries: the list that the script passes.
        optimizer: checks the function that makes an optimizer.
        schedule: checks the function that makes a schedule.

    Raises:
        SettingError: an entry has another form, or a value is not valid.
    """
    if not entries:
        raise SettingError(name, "an empty list", f"entries {FORM}", f"for example {EXAMPLE}")
    return [
        _read(f"{name} {number}", entry, optimizer, schedule)
        for number, entry in enumerate(entries)
    ]


def _read(
    name: str,
    entry: Any,
    optimizer: Callable[[str, Any], OptimizerFactory],
    schedule: Callable[[str, Any], Any],
) -> Assignment:
    if isinstance(entry, Assignment):  # checked before
        return entry
    if not isinstance(entry, tuple) or not 2 <= len(entry) <= len(Assignment._fields):
        got = f"{len(entry)} values" if isinstance(entry, tuple) else type(entry).__name__
        fix = f"for example {EXAMPLE}; or pass a dict where the loss has phases: {PAGE}"
        raise SettingError(name, got, f"a tuple {FORM}", fix)
    choice, make, own_schedule, clip_norm = (*entry, None, None)[: len(Assignment._fields)]
    if hasattr(choice, "named_parameters"):
        got, fix = f"a module, {type(choice).__name__}", "pass the name of the module in the model"
        raise SettingError(f"{name}: pattern", got, 'a pattern, "blocks.*"', fix)
    if not isinstance(choice, str):
        what = "from the name of a parameter and the parameter to True or False"
        choice = function(f"{name}: pattern", choice, what, 2, 'or pass a pattern, "blocks.*"')
    if own_schedule is not None:
        own_schedule = schedule(f"{name}: schedule", own_schedule)
    if clip_norm is not None:
        clip_norm = real(f"{name}: clip_norm", clip_norm, above=0)
    return Assignment(choice, optimizer(f"{name}: optimizer", make), own_schedule, clip_norm)


def assign(
    assignments: Sequence[Assignment], parameters: Mapping[str, torch.nn.Parameter], of: str = ""
) -> list[list[str]]:
    """Return the names of the parameters of each entry, in the order of ``parameters``.

    Args:
        parameters: the trainable parameters by name.
        of: the phase of the optimizers, for messages: " in phase 'd'".

    Raises:
        SettingError: an entry takes no parameter, or no entry takes a parameter.
    """
    taken: list[list[str]] = [[] for _ in assignments]
    left = []
    for name, parameter in parameters.items():
        for names, assignment in zip(taken, assignments, strict=True):
            if assignment.takes(name, parameter):
                names.append(name)
                break
        else:
            left.append(name)
    texts = ", ".join(assignment.text for assignment in assignments)
    if left:
        raise SettingError(
            "optimizer",
            f"no entry{of} for {abridged_names(left)}",
            f"an entry for each trainable parameter, and these are for {texts}",
            'add a last entry ("*", ...), or call requires_grad_(False) on the rest',
        )
    for number, (names, assignment) in enumerate(zip(taken, assignments, strict=True)):
        if names:
            continue
        earlier = any(assignment.takes(*named) for named in parameters.items())
        raise SettingError(
            "optimizer",
            f"no parameter for entry {number}{of}, {assignment.text}",
            f"at least one of {abridged_names([*parameters])}",
            "move the entry up: earlier entries take its parameters"
            if earlier
            else "correct the pattern, or leave the entry out",
        )
    return taken


NOT_FINITE = ("stop", "skip")


def _optimizer_function(name: str, value: Any) -> OptimizerFactory:
    """Check the function that makes an optimizer; for an optimizer, show the function to write."""
    kind, lr = "torch.optim.Adam", 0.001
    groups = getattr(value, "param_groups", None)
    if groups:  # an optimizer made outside of the trainer, from the parameters of one replica
        is_of_torch = type(value).__module__.startswith("torch.optim.")
        kind = f"{'torch.optim.' if is_of_torch else ''}{type(value).__name__}"
        lr = float(groups[0].get("lr", lr))
    fix = f"pass {_argument(name)}lambda parameters: {kind}(parameters, lr={lr:g})"
    if isinstance(value, tuple):
        fix += ", or a list of entries (pattern, function): docs/several-models.md"
    made: OptimizerFactory = function(name, value, "from parameters to a torch optimizer", 1, fix)
    return made


def _optimizers(name: str, value: Any) -> Any:
    """Check the function that makes an optimizer, or a list of entries with such functions."""
    if isinstance(value, list):
        return read_assignments(name, value, _optimizer_function, _schedule_function)
    return _optimizer_function(name, value)


def _schedule_function(name: str, value: Any) -> Any:
    """Check the function that makes a schedule; for a scheduler, show the function to write."""
    kind = type(value).__name__ if hasattr(value, "get_last_lr") else "CosineAnnealingLR"
    fix = f"pass {_argument(name)}lambda optimizer: torch.optim.lr_scheduler.{kind}(optimizer, ...)"
    return function(name, value, "from an optimizer to a scheduler", 1, fix)


def _argument(name: str) -> str:
    """Return the beginning of an argument in a script; nothing for a value of an entry."""
    return "" if ":" in name else f"{name}="


@dataclass(frozen=True)
class Optimize(Settings):
    """Settings of an update: optimizer, schedule, clipping, averaging, non-finite gradients.

    A plain function or list instead of ``Optimize(...)`` sets ``optimizer``.

    Args:
        optimizer: a function from a list of parameters to a torch optimizer. A function whose first
            parameter is called ``named_parameters`` receives pairs of a name and a parameter. Or a
            list of entries ``(pattern, optimizer, schedule, clip_norm)`` for several optimizers in
            each update; the last two may be left out or None. A pattern such as "blocks.*" matches
            the name of a parameter, or of a module around it; a function from a name and a
            parameter to a truth value may stand in its place. The first entry that matches takes
            the parameter. An entry's ``clip_norm`` is for the norm of its own parameters.
        schedule: a function from the optimizer to a torch LR scheduler. The scheduler is stepped
            once per update. With a list, for each entry without a schedule of its own. Default:
            constant learning rates.
        schedule_metric: the metric for a schedule that is a ``ReduceLROnPlateau``. For a metric of
            the validation set, such as "validation/loss", the scheduler is stepped once per
            evaluation; for a metric of the updates, such as "loss", once per update.
        clip_norm: largest global norm of the mean gradient; a larger gradient is scaled down to
            this norm. Set ``clip_norm`` if the loss spikes. With a list, the norm is over the
            parameters of all entries, and entries clip afterwards. Default: no clipping.
        ema_decay: decay of an exponential moving average of the parameters. After n updates the
            decay is min(ema_decay, (1 + n) / (10 + n)). The averaged weights are used in
            evaluations and saved with the plain weights. Set ``ema_decay`` if the validation metric
            is noisy. Default: no averaged weights.
        nonfinite: what to do if the loss or gradient of an update is not finite. "stop" (the
            default) ends the run and names the step, shards, rows and parameters; "skip" skips the
            update, with a message and a count.
        shard_optimizer: whether each rank of a collective keeps the optimizer's state only for its
            own slices of the parameters, where the optimizer works element by element. False: each
            rank keeps the whole state. The bits are the same. Default: True.
    """

    optimizer: OptimizerFactory | list[Entry] = declare(
        REQUIRED,
        "function from a list of parameters to a torch optimizer, or a list of (pattern, "
        "function, schedule, clip_norm)",
        check=_optimizers,
    )
    _: KW_ONLY
    schedule: Callable[[Optimizer], LRScheduler] | None = declare(
        None, "function from the optimizer to a torch LR scheduler", check=_schedule_function
    )
    schedule_metric: str | None = declare(None, "metric for a schedule that is a ReduceLROnPlateau")
    clip_norm: float | None = declare(
        None,
        "clip the global norm of the mean gradient to this value",
        kind=float,
        check=between(0),
        at_resume=AtResume.SAID,
    )
    ema_decay: float | None = declare(
        None,
        "keep an exponential moving average of the parameters, with this decay",
        kind=float,
        check=between(0, 1),
        at_resume=AtResume.SAID,
    )
    nonfinite: str = declare(
        "stop",
        "if a loss or gradient is not finite: stop the run, or skip the update (default: stop)",
        kind=str,
        check=lambda name, value: one_of(name, value, NOT_FINITE),
    )
    shard_optimizer: bool = declare(
        True,
        "split the optimizer's state over the ranks of a collective (default: yes)",
        kind=bool,
        check=switch,
    )

    @property
    def assignments(self) -> list[Assignment]:
        """The optimizers of an update; a single function takes all parameters."""
        if isinstance(self.optimizer, list):
            own: Any = self.optimizer  # checked: see ``read_assignments``
            return [each._replace(schedule=each.schedule or self.schedule) for each in own]
        return [Assignment("*", self.optimizer, self.schedule)]

    @property
    def has_optimizer_list(self) -> bool:
        """True if the optimizers are a list, each with a choice of parameters."""
        return isinstance(self.optimizer, list)

    def require_validation(self, *, is_there: bool) -> None:
        """Check that a loop supplies the metric of the schedule.

        Raises:
            SettingError: the schedule uses a validation metric, but the loop has no validation set.
        """
        metric = self.schedule_metric
        if metric is not None and metric.startswith("validation/") and not is_there:
            expected = "a metric of the updates, as this loop has no validation set"
            fix = "pass fit(validation=), or schedule_metric='loss'"
            raise SettingError("schedule_metric", metric, expected, fix)


def optimize_of(optimizer: Optimizers, loss: Loss) -> dict[str | None, Optimize]:
    """Return how updates are made, by phase, including the options of the command line.

    Args:
        optimizer: the argument of ``Trainer``. A value that is not a dict is used for each phase,
            and each phase makes its own optimizer from it.
        loss: the loss function, or the loss functions of the phases.

    Raises:
        SettingError: a value cannot work, or phases and optimizers have different names.
    """
    if not isinstance(loss, PhaseLosses):
        if isinstance(optimizer, Mapping):
            expected = "one function from parameters to a torch optimizer, as there is one loss"
            fix = "or pass a dict of losses by the same names"
            raise SettingError("optimizer", f"a dict of {_names(optimizer)}", expected, fix)
        return {None: resolved(Optimize, optimizer)}
    names = [*loss.by_name]
    if not isinstance(optimizer, Mapping):
        optimizer = dict.fromkeys(names, optimizer)
    if optimizer.keys() != loss.by_name.keys():
        expected = f"one for each phase: {_names(names)}"
        raise SettingError("optimizer", _names(optimizer), expected, "name them as the losses")
    return {name: resolved(Optimize, optimizer[name]) for name in names}


def _names(names: Iterable[Any]) -> str:
    return ", ".join(map(str, names)) or "no names"
