"""Configurations: a training, its engine and an event during the run, as a line of words.

    model=mlp optimizer=adam with=ema+clip data=short shards=4 engine=towers:3

``str`` writes a configuration as a line and ``parse`` reads the line: a failure is repeated by the
line. Random configurations follow from a seed alone.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from support.trainings.datasets import DATASETS
from support.trainings.engines import ENGINES, MORTAL
from support.trainings.faults import faults_of
from support.trainings.models import DRAWN, MODELS
from support.trainings.optimizers import LISTS, OPTIMIZERS, UPDATE_OPTIONS

T = TypeVar("T")

STEPS = 8  # updates of a run: a whole epoch of five and three of the next

RUN_OPTIONS: dict[str, tuple[str, ...]] = {
    "validation": (),  # read by the script
    "bf16": ("--precision", "bf16"),
    **{name: ("--precision", name) for name in ("tf32", "fp16")},
    "compiled": ("--compile",),
    "checks": ("--spot-check-every", "1"),
}
RUN_SHARES = {"validation": 0.5, "bf16": 0.1}  # how often they are drawn

# none: the run makes all updates.
# resume: the run ends after update ``at``, and is resumed with the engine ``then``.
# kill-worker: a worker process is killed after update ``at``. A killed rank ends the run: the run
#     is resumed with the engine ``then``.
# kill-run: the main process is killed after update ``at``; the run is resumed with ``then``.
EVENTS = ("none", "resume", "kill-worker", "kill-run")

# Combinations refused by quorate: optimizers outside these lists, and stages of uncut models.
ONCE = tuple(name for name in OPTIMIZERS if name != "lbfgs")  # a step computes the loss once
OPTIMIZERS_OF = {
    **{"sparse": ("sgd", "adagrad"), "phases": ONCE, "convolution": ONCE, "experts": ONCE}
}
UNCUT = ("phases", "buffers", "contrastive", "sparse", "experts")
REFUSED_SHARE = 0.1  # of configurations with a possible refusal


@dataclass(frozen=True)
class Configuration:
    """A run to compute and to compare."""

    model: str = "mlp"
    optimizer: str = "sgd"
    options: tuple[str, ...] = ()  # of ``UPDATE_OPTIONS`` and ``RUN_OPTIONS``
    data: str = "plain"
    shards: int = 4
    seed: int = 0
    engine: str = "inline"
    event: str = "none"
    at: int = 3  # the update before the event
    then: str = "inline"  # engine of the second part, if the event makes two parts
    # For scenarios, see ``support/scenarios.py``. Random and golden runs have no such fields.
    rule: str = "sync"  # of updates
    steps: int = STEPS
    fault: str = ""  # see ``faults``; may make more parts
    pause: int = 0  # additional milliseconds of each phase of a shard
    timeout: int = 0  # seconds until a worker is given up; 0: quorate's default

    def __post_init__(self) -> None:
        tables: dict[str, tuple[Sequence[str], Sequence[str]]] = {
            "model": ([self.model], [*MODELS]),
            "optimizer": ([self.optimizer], [*OPTIMIZERS, *LISTS]),
            "options": (self.options, [*UPDATE_OPTIONS, *RUN_OPTIONS]),
            "data": ([self.data], [*DATASETS]),
            "engine": ([self.engine], [*ENGINES]),
            "event": ([self.event], EVENTS),
            "then": ([self.then], [*ENGINES]),
        }
        faults_of(self.fault)
        for name, (words, known) in tables.items():
            for word in words:
                if word not in known:
                    raise ValueError(f"{name}: got {word!r}, expected one of {', '.join(known)}")

    @property
    def has_two_parts(self) -> bool:
        """True if the run ends once and is then resumed."""
        if self.event == "kill-worker":
            return self.engine.startswith("ranks")
        return self.event in ("resume", "kill-run") or "/" in self.fault

    @property
    def engines(self) -> list[str]:
        """The engine of each part of the run."""
        parts = 1 + max(self.has_two_parts, self.fault.count("/"))
        return [(self.engine, self.then)[part % 2] for part in range(parts)]

    @property
    def undisturbed(self) -> "Configuration":
        """The same training on a single worker, in a single part."""
        kept = ("model", "optimizer", "options", "data", "shards", "seed", "rule", "steps")
        return Configuration(**{name: getattr(self, name) for name in kept})

    def __str__(self) -> str:
        shown = {"model", "optimizer", "data", "shards", "engine"}
        unused = set() if self.has_two_parts else {"then"}
        if self.event == "none":
            unused |= {"event", "at"}
        else:
            shown |= {"at"}
        if self.has_two_parts:
            shown |= {"then"}
        words = []
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in shown or (field.name not in unused and value != field.default):
                text = "+".join(value) if isinstance(value, tuple) else value
                words.append(f"{field.name}={text}")
        return " ".join(words)


def parse(line: str) -> Configuration:
    """Return the configuration of a line; missing fields have their default values.

    Raises:
        ValueError: a word is no field, or its value is in no table.
    """
    kinds = {field.name: type(field.default) for field in fields(Configuration)}
    values: dict[str, object] = {}
    for word in line.split():
        name, separator, text = word.partition("=")
        if not separator or name not in kinds:
            raise ValueError(f"got {word!r}, expected NAME=VALUE with one of {', '.join(kinds)}")
        if kinds[name] is tuple:
            values[name] = tuple(text.split("+")) if text else ()
        else:
            values[name] = kinds[name](text) if kinds[name] is str else _whole(name, text)
    return Configuration(**values)  # type: ignore[arg-type]


def _whole(name: str, text: str) -> int:
    if not text.isdecimal():
        raise ValueError(f"{name}: got {text!r}, expected a whole number")
    return int(text)


class _Deck:
    """Values dealt in random order, each once before any comes again."""

    def __init__(self, generator: random.Random) -> None:
        self._generator = generator
        self._cards: dict[str, list[Any]] = {}

    def deal(self, name: str, values: Sequence[T]) -> T:
        """Return the next value of a field."""
        cards: list[T] = self._cards.setdefault(name, [])
        if not cards:
            cards += self._generator.sample(values, len(values))
        return cards.pop()


def draw_configurations(seed: int) -> Iterator[Configuration]:
    """Yield random configurations for ever: number n follows from the seed alone.

    Fields go through all of their values before repeating any, so forty configurations have every
    model, dataset, optimizer, engine and event several times.
    """
    generator = random.Random(f"quorate configurations {seed}")
    deck = _Deck(generator)
    while True:
        allows_refused = generator.random() < REFUSED_SHARE
        event = deck.deal("event", (*EVENTS, "none", "resume"))
        engines = MORTAL if event == "kill-worker" else tuple(ENGINES)
        engine = deck.deal(f"engine of {len(engines)}", engines)
        then = deck.deal("then", tuple(ENGINES))
        models, optimizers = DRAWN, tuple(OPTIMIZERS)
        if not allows_refused and "stages" in engine + then:
            models = tuple(name for name in models if name not in UNCUT)
        model = deck.deal(f"model of {len(models)}", models)
        if not allows_refused:
            optimizers = OPTIMIZERS_OF.get(model, optimizers)
        options = [name for name in UPDATE_OPTIONS if generator.random() < 0.4]
        options += [name for name, share in RUN_SHARES.items() if generator.random() < share]
        drawn = Configuration(
            model,
            deck.deal(f"optimizer of {len(optimizers)}", optimizers),
            tuple(options),
            deck.deal("data", tuple(DATASETS)),
            deck.deal("shards", (1, 2, 3, 4, 4, 5, 6)),
            generator.randrange(4),
            engine,
            event,
            generator.randrange(2, STEPS - 1),
            then,
        )
        yield parse(str(drawn))  # without fields unused by the event
