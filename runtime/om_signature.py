"""Compares a compiled model with the signature of its graph in the manifest."""

import math
from collections.abc import Sequence
from pathlib import Path

from qwen_mtp.errors import PackageError
from qwen_mtp.graphs.spec import ITEM_BYTES, GraphSpec, TensorSpec
from qwen_mtp.runtime.acl import Port

REMEDY = "compile the graph again with ascend/atc.sh"


def nbytes(tensor: TensorSpec) -> int:
    """Bytes of a tensor."""
    return math.prod(tensor.shape) * ITEM_BYTES[tensor.dtype]


def inputs_in_order(path: Path, graph: GraphSpec, ports: Sequence[Port]) -> tuple[TensorSpec, ...]:
    """The inputs of the manifest in the order of the model; they are matched by name.

    Raises:
        PackageError: A name is missing or unknown, or a size differs.
    """
    wanted, found = {t.name: t for t in graph.inputs}, [port.name for port in ports]
    for name in wanted:
        if name not in found:
            raise _odd(path, graph, f"has no input {name}", "lists it")
    if len(set(found)) != len(found):
        raise _odd(path, graph, "has several inputs of one name", "has none")
    for port in ports:
        if port.name not in wanted:
            raise _odd(path, graph, f"has an input {port.name!r}", "does not list it")
        _check_size(path, graph, f"input {port.name}", port, wanted[port.name])
    return tuple(wanted[name] for name in found)


def check_outputs(path: Path, graph: GraphSpec, ports: Sequence[Port]) -> None:
    """Outputs keep their order; compiling gives them names of its own.

    Raises:
        PackageError: Their number or a size differs.
    """
    if len(ports) != len(graph.outputs):
        raise _odd(path, graph, f"has {len(ports)} outputs", f"lists {len(graph.outputs)}")
    for port, tensor in zip(ports, graph.outputs, strict=True):
        _check_size(path, graph, f"output {tensor.name}", port, tensor)


def _check_size(path: Path, graph: GraphSpec, what: str, port: Port, tensor: TensorSpec) -> None:
    if port.nbytes != nbytes(tensor):
        raise _odd(path, graph, f"has {port.nbytes} bytes for {what}", f"says {nbytes(tensor)}")


def _odd(path: Path, graph: GraphSpec, found: str, wanted: str) -> PackageError:
    return PackageError(f"{path}: {graph.name} {found}, the manifest {wanted}; {REMEDY}")
