"""What the wheel declares of operators, and the corrections to it."""

import ast
from functools import cache

import pytest

from qwen_mtp.ge.check import check_graph
from qwen_mtp.ge.inference import RULES
from qwen_mtp.ge.overlay import OVERLAY, Entry, corrected
from qwen_mtp.ge.prototypes import parse
from qwen_mtp.ge.wheel import find_wheel
from tests.ge_graphs import declared, needs_wheel, prototypes
from tests.ge_kernels import user_of

pytestmark = needs_wheel

# Operators with a rule whose generated function says something else than its own doc string: it
# cannot name an argument ``else``, or was edited by hand.
EDITED = {"SelectV2", "ScatterPaKvCache", "RotaryPositionEmbedding", "RecurrentGatedDeltaRule"}


@cache
def generated() -> dict[str, ast.FunctionDef]:
    folder = find_wheel().torchair / "_ge_concrete_graph"
    tree = ast.parse((folder / "auto_generated_ge_raw_ops.py").read_text(encoding="utf-8"))
    functions = {f.name.lstrip("_"): f for f in tree.body if isinstance(f, ast.FunctionDef)}
    return {
        name: function
        for name, function in functions.items()
        if "REG_OP" in (ast.get_docstring(function) or "") and declared()(name)
    }


def test_declarations_are_read_as_the_generated_functions_take_them() -> None:
    """Each function beside a declaration was generated from the same source by another parser."""
    differing = set()
    for name, function in generated().items():
        found = declared()(name)
        assert found is not None
        inputs = [argument.arg for argument in function.args.args]
        plain = {a.arg for a in function.args.kwonlyargs} - {"dependencies", "node_name"}
        sizes = {f"size_of_{port.name}" for port in found.outputs}  # of dynamic outputs
        attributes = {attribute.name for attribute in found.attributes}
        if [p.name for p in found.inputs] != inputs or attributes != plain - sizes:
            differing.add(name)
    assert len(generated()) > 1700
    assert len(differing) < 25
    assert differing & RULES.keys() == EDITED


def test_optional_inputs_are_those_the_generated_functions_take_as_none() -> None:
    differing = set()
    for name, function in generated().items():
        found = declared()(name)
        assert found is not None
        hints = {a.arg: ast.unparse(a.annotation) for a in function.args.args if a.annotation}
        optional = {argument for argument, hint in hints.items() if "Optional" in hint}
        if {p.name for p in found.inputs if p.arity == "optional"} != optional:
            differing.add(name)
    assert differing & RULES.keys() <= EDITED
    assert len(differing) < 12


def test_a_declaration_is_parsed_into_ports_and_attributes() -> None:
    found = parse(
        "Op",
        '.INPUT(a, "T1").OPTIONAL_INPUT(b, TensorType({DT_FLOAT, DT_BFLOAT16}))'
        ".DYNAMIC_INPUT(c, TensorType::IndexNumberType()).OUTPUT(y, TensorType({BasicType(), "
        'DT_BOOL})).ATTR(mode, String, "a, b").REQUIRED_ATTR(axes, ListInt)'
        ".DATATYPE(T1, TensorType({DT_INT8})).OP_END_FACTORY_REG(Op)",
    )
    assert [(p.name, p.arity) for p in found.inputs] == [
        ("a", "required"),
        ("b", "optional"),
        ("c", "dynamic"),
    ]
    assert [p.dtypes for p in found.inputs] == [
        {"DT_INT8"},
        {"DT_FLOAT", "DT_BF16"},
        {"DT_INT32", "DT_INT64"},
    ]
    assert found.inputs[0].symbol == "T1"
    assert {"DT_BOOL", "DT_BF16", "DT_INT64"} <= found.outputs[0].dtypes
    assert [(a.name, a.type, a.required, a.default) for a in found.attributes] == [
        ("mode", "String", False, '"a, b"'),
        ("axes", "ListInt", True, ""),
    ]


def test_every_rule_is_of_an_operator_that_is_declared() -> None:
    assert [name for name in RULES if prototypes()(name) is None] == []


# The overlay


def test_every_correction_says_why() -> None:
    for entry in OVERLAY:
        assert len(entry.reason.split()) > 5, entry.op


def test_every_correction_changes_what_the_wheel_declares() -> None:
    for entry in OVERLAY:
        assert corrected(declared(), [entry])(entry.op) != declared()(entry.op), entry


@pytest.mark.parametrize("entry", OVERLAY, ids=lambda e: f"{e.op}-{type(e).__name__}")
def test_every_correction_is_needed_by_a_graph_of_its_operator(entry: Entry) -> None:
    model = user_of(entry)
    rest = [other for other in OVERLAY if other is not entry]
    assert [f for f in check_graph(model, prototypes()) if f.rule != "unused"] == []
    refused = check_graph(model, corrected(declared(), rest))
    assert {f.rule for f in refused} <= {"prototype", "dtype", "attribute", "unused"}
    assert {f.rule for f in refused} - {"unused"}
