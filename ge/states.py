"""Checks of what a graph changes in place, and of what leads to nothing.

GE keeps what leads to ``NetOutput``, by values or by control edges, and is free to order the rest
as edges allow. So a state is written for certain only where the write leads to the output, and a
reader sees the old value for certain only where the write comes after it.
"""

from collections.abc import Iterator, Mapping, Sequence

from qwen_mtp.ge.view import Finding, Node, split_ref

# Their result may share the memory of their input, and need not.
_VIEWS = ("Reshape", "Identity", "TensorMove", "Unsqueeze", "Squeeze")
_SOURCES = ("Data", "RefData", "NetOutput")


def check_used(nodes: Sequence[Node]) -> Iterator[Finding]:
    """Every operator but an input leads to ``NetOutput``."""
    by_name = {node.name: node for node in nodes}
    ends = [node.name for node in nodes if node.type == "NetOutput"]
    live = _before(ends, by_name)
    for node in nodes:
        if node.name not in live and node.type not in _SOURCES:
            yield Finding(node.name, "unused", f"{node.type}: it leads to no output")


def check_states(nodes: Sequence[Node]) -> Iterator[Finding]:
    """Every state is written, directly, and after whatever reads its old value."""
    by_name = {node.name: node for node in nodes}
    views = {f"{n.name}:0": n.refs[0] for n in nodes if n.type in _VIEWS and n.refs}
    writers: dict[str, list[tuple[Node, str]]] = {}
    readers: dict[str, list[Node]] = {}
    for node in nodes:
        for ref in _changed(node):
            writers.setdefault(_origin(ref, views), []).append((node, ref))
        for ref in node.refs:
            readers.setdefault(ref, []).append(node)
    for state in (node for node in nodes if node.type == "RefData"):
        edge = f"{state.name}:0"
        yield from _state(state.name, edge, writers.get(edge, []), readers, by_name)


def _state(
    name: str,
    edge: str,
    writers: Sequence[tuple[Node, str]],
    readers: Mapping[str, Sequence[Node]],
    by_name: Mapping[str, Node],
) -> Iterator[Finding]:
    if not writers:
        yield Finding(name, "state", "RefData: it is never written")
    for _, ref in writers:
        if ref != edge:
            message = f"it is written through {ref}, which may be a copy"
            yield Finding(name, "state", f"RefData: {message}")
    direct = [node for node, ref in writers if ref == edge]
    if len(direct) > 1:
        listed = ", ".join(node.name for node in direct)
        yield Finding(name, "state", f"RefData: {listed} write it in no order")
    for writer in direct:
        past = _before([writer.name], by_name)
        for reader in readers.get(edge, ()):
            if reader.name not in past:
                message = f"{reader.name} reads it in no order with {writer.name}"
                yield Finding(name, "state", f"RefData: {message}")


def _changed(node: Node) -> set[str]:
    """Edges whose tensor the operator overwrites: inputs that are outputs by the same name."""
    names = {desc.name for desc in node.outputs}
    pairs = zip(node.inputs, node.refs, strict=False)
    return {ref for desc, ref in pairs if desc.name in names and node.type not in _SOURCES}


def _origin(ref: str, views: Mapping[str, str]) -> str:
    while ref in views:
        ref = views[ref]
    return ref


def _before(names: Sequence[str], by_name: Mapping[str, Node]) -> set[str]:
    """These operators and all that lead to them."""
    found: set[str] = set()
    left = list(names)
    while left:
        name = left.pop()
        if name not in found and name in by_name:
            found.add(name)
            node = by_name[name]
            left += [split_ref(ref)[0] for ref in node.refs if ref]
            left += node.controls
    return found
