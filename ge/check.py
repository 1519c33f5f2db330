"""Every static check of a GE graph: what can be told without running it and without CANN."""

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from qwen_mtp.ge import states, structure
from qwen_mtp.ge.conformity import check_dtypes, check_prototypes
from qwen_mtp.ge.inference import RULES, Inferred, infer
from qwen_mtp.ge.prototypes import Prototypes
from qwen_mtp.ge.soc import Soc, kernel_dtypes
from qwen_mtp.ge.values import Call
from qwen_mtp.ge.view import SOURCES, Finding, Node, nodes_of
from qwen_mtp.graphs.spec import GraphSpec


def check_graph(
    model: Any,
    prototypes: Prototypes,
    soc: Soc | None = None,
    spec: GraphSpec | None = None,
    weights_dir: Path | None = None,
    custom_ops: Collection[str] = (),
) -> tuple[Finding, ...]:
    """Check one graph.

    Args:
        model: The ``ModelDef``.
        prototypes: The wheel's, corrected by the overlay.
        soc: The processor it is for; None skips what depends on that.
        spec: Its interface in the graph tables; None skips the comparison.
        weights_dir: The directory that weight files are relative to; None skips them.
        custom_ops: Operators that a package beside CANN brings.

    Returns:
        What is wrong with it, in the order of the checks; empty if nothing is.
    """
    nodes = nodes_of(model)
    found = list(_structure(model, nodes, spec, weights_dir))
    found += check_prototypes(nodes, prototypes)
    inferred = infer(nodes)
    found += inferred.findings
    found += check_dtypes(nodes, inferred, prototypes)
    if soc is not None:
        found += check_soc(nodes, inferred, soc, custom_ops)
    return tuple(found)


def _structure(
    model: Any, nodes: Sequence[Node], spec: GraphSpec | None, weights_dir: Path | None
) -> Iterator[Finding]:
    yield from structure.check_edges(nodes)
    yield from structure.check_port_names(nodes)
    yield from states.check_used(nodes)
    yield from states.check_states(nodes)
    yield from structure.check_constants(nodes)
    yield from structure.check_reproducible(model)
    if spec is not None:
        yield from structure.check_interface(nodes, spec)
    if weights_dir is not None:
        yield from structure.check_files(nodes, weights_dir)


def check_soc(
    nodes: Sequence[Node], inferred: Inferred, soc: Soc, custom_ops: Collection[str] = ()
) -> Iterator[Finding]:
    """Operator types and dtypes are among those the processor, or a package for it, has."""
    allowed = (RULES.keys() | SOURCES | {"NetOutput"}) - (soc.lacks - set(custom_ops))
    for node in nodes:
        if node.type not in allowed:
            yield Finding(node.name, "soc", f"{node.type}: {soc.name} has no such operator")
    for name, value in inferred.values.items():
        if value.dtype not in soc.dtypes:
            yield Finding(name, "soc", f"{value}: {soc.name} does not have {value.dtype}")
    for call in inferred.calls:
        yield from _kernel(call, soc)


def _kernel(call: Call, soc: Soc) -> Iterator[Finding]:
    node, taken = call.node, kernel_dtypes(soc, call.node.type)
    first = next(iter(call.inputs.values()), None)
    if taken is not None and first is not None and first.dtype not in taken:
        message = f"{node.type}: on {soc.name} it takes {', '.join(sorted(taken))}"
        yield Finding(node.name, "soc", f"{message}, not {first.dtype}")
