"""Wrong GE graphs made from a right one: one change each, the same ones every time.

``static_mutants`` are wrong by their structure, their prototypes or their shapes, which the checks
must see. ``value_mutants`` are well-formed graphs that compute something else: nothing but running
them can tell.
"""

import re
from collections.abc import Iterable, Iterator
from typing import Any

from tests.ge_changes import Change, Place
from tests.ge_static_changes import STATIC
from tests.ge_value_changes import VALUES

SITES = 3  # operators of a kind that each change is tried on: first, middle and last


def static_mutants(model: Any) -> Iterator[tuple[str, Any]]:
    """Mutants that a check without execution must refuse."""
    return _made(model, STATIC)


def value_mutants(model: Any) -> Iterator[tuple[str, Any]]:
    """Mutants that are well-formed and compute something else."""
    return _made(model, VALUES)


def _made(model: Any, table: dict[str, tuple[str, Change]]) -> Iterator[tuple[str, Any]]:
    for what, (types, change) in table.items():
        pattern = re.compile(types)
        sites = [i for i, op in enumerate(model.graph[0].op) if pattern.fullmatch(op.type)]
        done = 0
        for site in _spread(sites):
            if done == SITES:
                break
            copy = type(model)()
            copy.CopyFrom(model)
            if change(Place(copy.graph[0], site)):
                done += 1
                yield f"{what} at {model.graph[0].op[site].name}", copy


def _spread(sites: list[int]) -> Iterable[int]:
    """First, middle, last, then the rest: a change that does not apply moves on."""
    chosen = [sites[i] for i in sorted({0, len(sites) // 2, len(sites) - 1})] if sites else []
    return [*chosen, *(site for site in sites if site not in chosen)]
