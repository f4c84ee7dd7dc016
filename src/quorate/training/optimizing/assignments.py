"""Assignments: several optimizers in one update, each with parameters chosen by name.

An entry of ``Optimize([...])`` is a tuple ``(pattern, optimizer, schedule, clip_norm)``; a function
may stand in place of a pattern. The first entry that matches a parameter takes the parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, NamedTuple

from quorate.errors import SettingError
from quorate.machine.text import abridged_names
from quorate.settings import function, real

if TYPE_CHECKING:  # settings are read without torch
    import torch
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler

    from quorate.training.optimizing.optimizer import OptimizerFactory

    Choice = str | Callable[[str, torch.nn.Parameter], bool]
    Entry = (
        tuple[Choice, OptimizerFactory]
        | tuple[Choice, OptimizerFactory, Callable[[Optimizer], LRScheduler] | None]
        | tuple[Choice, OptimizerFactory, Callable[[Optimizer], LRScheduler] | None, float | None]
    )

FORM = "(pattern, optimizer, schedule, clip_norm)"
PAGE = "docs/several-models.md"
EXAMPLE = '[("blocks.*", lambda parameters: torch.optim.Muon(parameters)), ("*", ...)]'


class Assignment(NamedTuple):
    """An optimizer, and the choice of its parameters."""

    choice: Choice  # a pattern over names, or a function of name and parameter
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
        """
        if not isinstance(self.choice, str):
            return bool(self.choice(name, parameter))
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
