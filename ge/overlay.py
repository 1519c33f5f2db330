"""What the wheel's prototypes lack, each correction with the reason it stands here.

The list is short on purpose: an entry says that GE takes something the wheel does not declare, and
nothing here can try that out. Evidence is either the wheel itself (its converters write what its
declarations lack) or a newer declaration in CANN's published operator repositories.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

from qwen_mtp.ge import sampler
from qwen_mtp.ge.prototypes import Attribute, Port, Prototype, Prototypes, parse

_CAST = (
    "TensorType({DT_BOOL, DT_FLOAT16, DT_FLOAT, DT_INT8, DT_INT32, DT_UINT32, DT_UINT8, DT_INT64, "
    "DT_UINT64, DT_INT16, DT_UINT16, DT_DOUBLE, DT_BF16})"
)


@dataclass(frozen=True, slots=True)
class Declared:
    """A whole prototype that the wheel does not have.

    Attributes:
        op: Operator type.
        text: The declaration, as in :func:`~qwen_mtp.ge.prototypes.parse`.
        reason: Why the wheel lacks it and where this comes from.
    """

    op: str
    text: str
    reason: str


@dataclass(frozen=True, slots=True)
class Widened:
    """More dtypes for some ports.

    Attributes:
        op: Operator type.
        ports: Names of inputs and outputs.
        dtypes: The dtypes they take beside the declared ones.
        reason: Evidence.
    """

    op: str
    ports: tuple[str, ...]
    dtypes: tuple[str, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class Extended:
    """One more attribute.

    Attributes:
        op: Operator type.
        attribute: The attribute.
        reason: Evidence.
    """

    op: str
    attribute: Attribute
    reason: str


Entry = Declared | Widened | Extended

_DEFORMED = "the wheel's generator skips it as 'deformed prototype'; "
_OLD_COPY = "the list is older than bfloat16 graphs: "

OVERLAY: tuple[Entry, ...] = (
    Declared(
        "Cast",
        f".INPUT(x, {_CAST}).OUTPUT(y, {_CAST}).REQUIRED_ATTR(dst_type, Int)",
        _DEFORMED + "the declaration stands in the doc string of torchair's Cast",
    ),
    Declared(
        "Data",
        ".INPUT(x, TensorType::ALL()).OUTPUT(y, TensorType::ALL()).ATTR(index, Int, 0)",
        _DEFORMED + "as for RefData, which the wheel has",
    ),
    Declared(
        "Const",
        ".OUTPUT(y, TensorType::ALL()).REQUIRED_ATTR(value, Tensor)",
        _DEFORMED + "the attribute is what torchair's Const writes",
    ),
    Declared(
        "NetOutput",
        ".DYNAMIC_INPUT(input, TensorType::ALL())",
        "it ends every graph and is no operator of a library; torchair names its inputs so",
    ),
    Declared(
        sampler.OP_TYPE,
        sampler.PROTOTYPE,
        "the product's own operator, for which the product declares the prototype",
    ),
    Widened(
        "FileConstant",
        ("y",),
        ("DT_BF16",),
        _OLD_COPY + "torchair writes every weight of a large bfloat16 model as FileConstant",
    ),
    Widened(
        "Identity",
        ("x", "y"),
        ("DT_BF16",),
        _OLD_COPY + "torchair converts aten.clone to Identity whatever the dtype",
    ),
    Widened(
        "TensorMove",
        ("x", "y"),
        ("DT_BF16",),
        _OLD_COPY + "torchair's functional in-place operators copy a cache by TensorMove",
    ),
    Widened(
        "TopKV2",
        ("k",),
        ("DT_INT64",),
        "torchair's converter of aten.topk writes k as int64; CANN's newer declaration takes it",
    ),
    Extended(
        "TopKV2",
        Attribute("sort_policy", "Int", False, "1"),
        "torchair's converter of aten.topk writes it; GE keeps attributes it does not know",
    ),
    Widened(
        "RecurrentGatedDeltaRule",
        ("query", "key", "value", "beta", "state", "out"),
        ("DT_FLOAT16",),
        "vllm-ascend's operator package for 310P declares float16 under the same name",
    ),
    Widened(
        "WeightQuantBatchMatmulV2",
        ("weight",),
        ("DT_INT32",),
        "torch_npu documents int4 weights as int32, eight to one; CANN's newer definition of the "
        "operator lists int32",
    ),
    Widened(
        "Muls",
        ("x", "y"),
        ("DT_BF16",),
        "torchair's converter writes it for a bfloat16 tensor times a number; CANN's newer "
        "declaration takes it",
    ),
)


def corrected(prototypes: Prototypes, entries: Sequence[Entry] = OVERLAY) -> Prototypes:
    """The same look-up with the entries applied."""
    by_op: Mapping[str, list[Entry]] = {
        op: [e for e in entries if e.op == op] for op in {e.op for e in entries}
    }

    @cache
    def find(op_type: str) -> Prototype | None:
        prototype = prototypes(op_type)
        for entry in by_op.get(op_type, ()):
            prototype = _apply(prototype, entry)
        return prototype

    return find


def _apply(prototype: Prototype | None, entry: Entry) -> Prototype:
    if isinstance(entry, Declared):
        return parse(entry.op, entry.text)
    assert prototype is not None, f"{entry.op}: nothing to correct"
    if isinstance(entry, Extended):
        return replace(prototype, attributes=(*prototype.attributes, entry.attribute))
    return replace(
        prototype,
        inputs=tuple(_wider(port, entry) for port in prototype.inputs),
        outputs=tuple(_wider(port, entry) for port in prototype.outputs),
    )


def _wider(port: Port, entry: Widened) -> Port:
    if port.name not in entry.ports:
        return port
    return replace(port, dtypes=port.dtypes | set(entry.dtypes))
