"""Checks of structure: names, edges, order, interface, weights, and what must not be in a file.

They need no knowledge of operators. The interface is the one of the graph tables
(:class:`~qwen_mtp.graphs.spec.GraphSpec`): inputs that the graph changes in place are ``RefData``
and come after the others, outputs are in order and each is produced under its own name.
"""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from qwen_mtp.ge.dtypes import nbytes
from qwen_mtp.ge.proto import TENSOR_TYPES
from qwen_mtp.ge.values import Call, InferenceError
from qwen_mtp.ge.view import SOURCES, Finding, Node, split_ref
from qwen_mtp.graphs.spec import GraphSpec, TensorSpec

_INPUTS = ("Data", "RefData")
# What differs between two exports of the same thing, or tells where one was made.
_TRACES = {
    "an address or a time": re.compile(rb"\d{9,}|0x[0-9a-fA-F]{6,}|\d{4}-\d\d-\d\d[T ]\d\d:"),
    "an absolute path": re.compile(rb"(?:^|[\s'\"=(:])(?:[A-Za-z]:\\|/(?:[\w.-]+/)+)"),
}
_NOTES = ("_meta", "_fx_tensor_name", "_readable_value")


def check_edges(nodes: Sequence[Node]) -> Iterator[Finding]:
    """Unique names, every edge from an earlier operator's existing output, one ``NetOutput``."""
    outputs: dict[str, int] = {}
    for node in nodes:
        yield from _edges(node, outputs)
        if node.name in outputs or not node.name:
            yield Finding(node.name, "name", f"{node.type}: the name is not unique")
        outputs[node.name] = len(node.outputs)
    ends = [node.name for node in nodes if node.type == "NetOutput"]
    if len(ends) != 1 or nodes[-1].type != "NetOutput":
        yield Finding("", "output", f"{len(ends)} NetOutput, one is needed as the last operator")


def _edges(node: Node, outputs: dict[str, int]) -> Iterator[Finding]:
    if len(node.refs) != len(node.inputs) and node.type not in SOURCES:
        counts = f"{len(node.refs)} edges for {len(node.inputs)} declared inputs"
        yield Finding(node.name, "edge", f"{node.type}: {counts}")
    for ref in filter(None, node.refs):
        producer, index = split_ref(ref)
        if producer not in outputs:
            yield Finding(node.name, "edge", f"{node.type}: {ref} is not computed before it")
        elif not 0 <= index < outputs[producer]:
            yield Finding(node.name, "edge", f"{node.type}: {ref} is no output of its producer")
    for control in node.controls:
        if control not in outputs:
            yield Finding(node.name, "edge", f"{node.type}: {control} does not run before it")


def check_port_names(nodes: Sequence[Node]) -> Iterator[Finding]:
    """The lists by which GE finds ports (``_input_name_key``, ...) repeat the descriptors."""
    for node in nodes:
        for side, descs in (("input", node.inputs), ("output", node.outputs)):
            keys, places = (node.attributes.get(f"_{side}_name_{p}") for p in ("key", "value"))
            if keys is None or places is None:
                yield Finding(node.name, "port names", f"{node.type}: no names of its {side}s")
                continue
            listed = [name.decode(errors="replace") for name in keys.list.s]
            if listed != [d.name for d in descs] or list(places.list.i) != [*range(len(descs))]:
                wanted = [d.name for d in descs]
                message = f"{side}s are listed as {listed}, declared {wanted}"
                yield Finding(node.name, "port names", f"{node.type}: {message}")


def check_interface(nodes: Sequence[Node], spec: GraphSpec) -> Iterator[Finding]:
    """Inputs and outputs are those of the graph tables: names, order, dtypes, shapes, kinds."""
    changed = set(spec.in_place)
    order = [t for t in spec.inputs if t.name not in changed]
    order += [t for t in spec.inputs if t.name in changed]
    found = [node for node in nodes if node.type in _INPUTS]
    yield from _indices(found)
    by_name = {node.name: node for node in found}
    for index, tensor in enumerate(order):
        if tensor.name not in by_name:
            yield Finding(tensor.name, "interface", "no such input")
            continue
        node = by_name.pop(tensor.name)
        kind = "RefData" if tensor.name in changed else "Data"
        yield from _input_fits(node, tensor, kind, index)
    for name in by_name:
        yield Finding(name, "interface", "an input that the graph tables do not have")
    yield from _outputs_fit(nodes, spec.outputs)


def _indices(found: Sequence[Node]) -> Iterator[Finding]:
    indices = [_int(node, "index") for node in found]
    if sorted(indices) != list(range(len(found))):
        twice = [str(i) for i, n in Counter(indices).items() if n > 1]
        yield Finding("", "interface", f"input indices are no count from 0 ({', '.join(twice)})")


def _int(node: Node, name: str) -> int:
    return int(node.attributes[name].i) if name in node.attributes else -1


def _input_fits(node: Node, tensor: TensorSpec, kind: str, index: int) -> Iterator[Finding]:
    if node.type != kind:
        yield Finding(node.name, "interface", f"the input is {node.type}, {kind} is needed")
    if _int(node, "index") != index:
        at = _int(node, "index")
        yield Finding(node.name, "interface", f"the input has index {at}, its place is {index}")
    for desc in node.outputs:
        if (desc.dtype, desc.shape) != (TENSOR_TYPES[tensor.dtype], tensor.shape):
            declared, wanted = f"{desc.dtype}{list(desc.shape)}", f"{tensor.dtype}{tensor.shape}"
            yield Finding(node.name, "interface", f"the input is {declared}, {wanted} is needed")


def _outputs_fit(nodes: Sequence[Node], outputs: Sequence[TensorSpec]) -> Iterator[Finding]:
    end = next((node for node in nodes if node.type == "NetOutput"), None)
    if end is None:
        return
    if len(end.refs) != len(outputs):
        counts = f"{len(end.refs)} outputs, {len(outputs)} are needed"
        yield Finding(end.name, "interface", counts)
    for ref, desc, tensor in zip(end.refs, end.inputs, outputs, strict=False):
        if ref != f"{tensor.name}:0":
            yield Finding(end.name, "interface", f"output {tensor.name} comes from {ref}")
        if (desc.dtype, desc.shape) != (TENSOR_TYPES[tensor.dtype], tensor.shape):
            declared, wanted = f"{desc.dtype}{list(desc.shape)}", f"{tensor.dtype}{tensor.shape}"
            yield Finding(end.name, "interface", f"{tensor.name} is {declared}, not {wanted}")


def check_constants(nodes: Sequence[Node]) -> Iterator[Finding]:
    """A constant holds exactly the bytes of its shape."""
    for node in nodes:
        if node.type == "Const" and "value" in node.attributes and node.outputs:
            data = len(node.attributes["value"].t.data)
            wanted = nbytes(node.outputs[0].dtype, node.outputs[0].shape)
            if data != wanted:
                yield Finding(node.name, "constant", f"{data} bytes, its shape needs {wanted}")


def check_files(nodes: Sequence[Node], folder: Path) -> Iterator[Finding]:
    """Weights lie where the graph says, inside the package, with the bytes of their shapes.

    Args:
        nodes: The graph.
        folder: The directory that ``file_path`` is relative to.
    """
    seen: Counter[str] = Counter()
    for node in nodes:
        if node.type != "FileConstant":
            continue
        call = Call(node, {})
        try:
            path, shape = call.text("file_path"), tuple(call.list_attr("shape"))
            wanted = nbytes(call.dtype_attr("dtype"), shape)
        except InferenceError as error:
            yield Finding(node.name, "file", str(error))
            continue
        seen[call.text("file_id", "")] += 1
        yield from _file_fits(node.name, path, folder, wanted)
    for name in (name for name, count in seen.items() if count > 1):
        yield Finding("", "file", f"file_id {name!r} is used twice")


def _file_fits(name: str, path: str, folder: Path, wanted: int | None) -> Iterator[Finding]:
    parts = PurePosixPath(path)
    if not path or parts.is_absolute() or ".." in parts.parts:
        yield Finding(name, "file", f"{path!r} does not lie in the package")
        return
    file = folder / parts
    size = file.stat().st_size if file.is_file() else None
    if size != wanted:
        found = "is missing" if size is None else f"has {size} bytes"
        yield Finding(name, "file", f"{path} {found}, {wanted} are needed")


def check_reproducible(model: Any) -> Iterator[Finding]:
    """No text in the file depends on when, where or by whom it was made; no debugging notes."""
    graph = model.graph[0]
    yield from _attributes("", {**dict(model.attr.items()), **dict(graph.attr.items())})
    yield from _text("", "name", f"{model.name}\n{graph.name}".encode())
    for op in graph.op:
        yield from _text(op.name, "name", op.name.encode())
        yield from _attributes(op.name, op.attr)
        for desc in (*op.input_desc, *op.output_desc):
            if desc.attr:
                yield from _attributes(op.name, desc.attr)


def _attributes(op: str, attributes: Any) -> Iterator[Finding]:
    for name, value in attributes.items():
        if name in _NOTES:
            yield Finding(op, "reproducible", f"attribute {name} is a debugging note")
        for text in (value.s, *value.list.s):
            if text:
                yield from _text(op, name, text)


def _text(op: str, where: str, text: bytes) -> Iterator[Finding]:
    for what, pattern in _TRACES.items():
        match = pattern.search(text)
        if match:
            found = match[0].decode(errors="replace").strip()
            yield Finding(op, "reproducible", f"{where} holds {what}: {found}")
