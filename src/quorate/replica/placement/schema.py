"""The arguments of an operator's call, as described by the operator's schema."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from quorate.replica.torch_internals import schema_arguments


def arguments(
    operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Iterator[tuple[Any, bool, bool]]:
    """Yield each argument with two flags: written; and written only (an ``out``)."""
    for number, argument in enumerate(schema_arguments(operator)):
        if number < len(args) and not argument.kwarg_only:
            value = args[number]
        elif argument.name in kwargs:
            value = kwargs[argument.name]
        else:
            continue
        written = argument.alias_info is not None and argument.alias_info.is_write
        yield value, written, written and argument.kwarg_only
