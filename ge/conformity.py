"""Checks of operators against their prototypes: ports by name, dtypes, attributes."""

import re
from collections.abc import Iterable, Iterator, Sequence

from qwen_mtp.ge.inference import Inferred
from qwen_mtp.ge.prototypes import Attribute, Port, Prototype, Prototypes
from qwen_mtp.ge.view import SOURCES, Descriptor, Finding, Node

# Which field of ``AttrDef`` holds an attribute of a declared type.
_FIELDS = {
    "Int": ("i", "dt"),  # a dtype in an Int attribute is written as either
    "Float": ("f",),
    "Bool": ("b",),
    "String": ("s",),
    "Type": ("dt",),
    "Tensor": ("t",),
    "ListListInt": ("list_list_int",),
    "ListListFloat": ("list_list_float",),
}
# Values beside which an attribute makes no sense, whatever its type admits.
_CHOICES: dict[tuple[str, str], frozenset[object]] = {
    ("ScatterElements", "reduction"): frozenset({"none", "add", "mul"}),
    ("Scatter", "reduce"): frozenset({"update", "add", "mul"}),
    ("FusedInferAttentionScore", "input_layout"): frozenset(
        {"BSH", "BSND", "BNSD", "BNSD_BSND", "TND"}
    ),
    ("FusedInferAttentionScore", "inner_precise"): frozenset(range(4)),
    ("ScatterPaKvCache", "cache_mode"): frozenset({"Norm", "PA_NZ"}),
    ("ScatterPaKvCache", "scatter_mode"): frozenset({"None", "Nct", "Alibi", "Rope", "Omni"}),
    ("FusedCausalConv1d", "activation_mode"): frozenset({0, 1, 2}),
    ("FusedCausalConv1d", "run_mode"): frozenset({0, 1}),
    ("PadV3", "mode"): frozenset({"constant", "reflect", "edge"}),
    ("Exp", "base"): frozenset({-1.0}),  # e; converters never write another
    ("Exp", "scale"): frozenset({1.0}),
    ("Exp", "shift"): frozenset({0.0}),
    ("Log", "base"): frozenset({-1.0}),
    ("Log", "scale"): frozenset({1.0}),
    ("Log", "shift"): frozenset({0.0}),
    ("Swish", "scale"): frozenset({1.0}),
    ("WeightQuantBatchMatmulV2", "inner_precise"): frozenset({0, 1}),
    ("RotaryPositionEmbedding", "mode"): frozenset({0, 1}),
    ("StridedSliceV2", "begin_mask"): frozenset({0}),
}


def check_prototypes(nodes: Sequence[Node], prototypes: Prototypes) -> Iterator[Finding]:
    """Every operator has a prototype, its ports and its attributes."""
    for node in nodes:
        prototype = prototypes(node.type)
        if prototype is None:
            yield Finding(node.name, "prototype", f"{node.type}: no such operator type")
            continue
        if node.type not in SOURCES:
            yield from _ports(node, "input", node.inputs, prototype.inputs)
            yield from _fed(node, prototype)
        if node.type != "Const":  # torchair leaves its output without a name
            yield from _ports(node, "output", node.outputs, prototype.outputs)
        yield from _attributes(node, prototype)


def check_dtypes(
    nodes: Sequence[Node], inferred: Inferred, prototypes: Prototypes
) -> Iterator[Finding]:
    """Inferred dtypes are among those declared; a type variable means one dtype."""
    for node in nodes:
        prototype = prototypes(node.type)
        if prototype is None:
            continue
        inputs = ((d.name, ref) for d, ref in zip(node.inputs, node.refs, strict=False) if ref)
        outputs = ((d.name, f"{node.name}:{i}") for i, d in enumerate(node.outputs))
        bound: dict[str, str] = {}
        yield from _dtypes(node, inputs, prototype.inputs, inferred, bound)
        if node.type != "Const":
            yield from _dtypes(node, outputs, prototype.outputs, inferred, bound)


def _dtypes(
    node: Node,
    edges: Iterable[tuple[str, str]],
    ports: Sequence[Port],
    inferred: Inferred,
    bound: dict[str, str],
) -> Iterator[Finding]:
    for name, ref in edges:
        port, value = _port_of(name, ports), inferred.values.get(ref)
        if port is None or value is None:
            continue
        if port.dtypes and value.dtype not in port.dtypes:
            message = f"{name} is {value.dtype}, which is not declared for it"
            yield Finding(node.name, "dtype", f"{node.type}: {message}")
        if port.symbol and bound.setdefault(port.symbol, value.dtype) != value.dtype:
            message = f"{name} is {value.dtype}, {port.symbol} is {bound[port.symbol]}"
            yield Finding(node.name, "dtype", f"{node.type}: {message}")


def _port_of(name: str, ports: Sequence[Port]) -> Port | None:
    for port in ports:
        if port.name == name and port.arity != "dynamic":
            return port
    stem = name.rstrip("0123456789")
    return next((p for p in ports if p.arity == "dynamic" and p.name == stem != name), None)


def _ports(
    node: Node, side: str, descs: Sequence[Descriptor], ports: Sequence[Port]
) -> Iterator[Finding]:
    """Names are declared, in the declared order, once each; dynamic ones count from 0."""
    given = [desc.name for desc in descs]
    for name in given:
        if _port_of(name, ports) is None:
            yield Finding(node.name, "port", f"{node.type}: no {side} {name!r} is declared")
    expected = [name for port in ports for name in _names(port, given)]
    if sorted(expected) == sorted(given) and expected != given:
        yield Finding(node.name, "port", f"{node.type}: {side}s are out of order: {given}")
    for name in set(expected) - set(given):
        yield Finding(node.name, "port", f"{node.type}: {side} {name} is missing")
    if len(set(given)) != len(given):
        yield Finding(node.name, "port", f"{node.type}: {side}s {given} repeat a name")


def _names(port: Port, given: Sequence[str]) -> list[str]:
    if port.arity == "dynamic":
        pattern = re.compile(rf"{re.escape(port.name)}\d+")
        count = sum(1 for name in given if pattern.fullmatch(name))
        return [f"{port.name}{i}" for i in range(count)]
    return [port.name] if port.arity == "required" or port.name in given else []


def _fed(node: Node, prototype: Prototype) -> Iterator[Finding]:
    for desc, ref in zip(node.inputs, node.refs, strict=False):
        port = _port_of(desc.name, prototype.inputs)
        if not ref and port is not None and port.arity != "optional":
            yield Finding(node.name, "port", f"{node.type}: input {desc.name} is left out")


def _attributes(node: Node, prototype: Prototype) -> Iterator[Finding]:
    declared = {attribute.name: attribute for attribute in prototype.attributes}
    for name in node.attributes:
        if not name.startswith("_") and name not in declared:
            yield Finding(node.name, "attribute", f"{node.type}: {name} is not declared")
    for attribute in prototype.attributes:
        if attribute.name in node.attributes:
            yield from _attribute(node, attribute)
        elif attribute.required:
            yield Finding(node.name, "attribute", f"{node.type}: {attribute.name} is missing")


def _attribute(node: Node, attribute: Attribute) -> Iterator[Finding]:
    value = node.attributes[attribute.name]
    field = value.WhichOneof("value") or ""
    wanted = _FIELDS.get(attribute.type, ("list",))
    if field not in wanted:
        message = f"{attribute.name} is written as {field or 'nothing'}, {attribute.type} is due"
        yield Finding(node.name, "attribute", f"{node.type}: {message}")
        return
    choices = _CHOICES.get((node.type, attribute.name))
    found = getattr(value, field)
    found = found.decode() if isinstance(found, bytes) else found
    if choices is not None and found not in choices:
        message = f"{attribute.name} is {found!r}, none of {sorted(map(str, choices))}"
        yield Finding(node.name, "attribute", f"{node.type}: {message}")
