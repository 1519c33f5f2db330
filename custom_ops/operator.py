"""The shape of an operator: one record with every form the operator has."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy.typing as npt

NAMESPACE = "qwen_mtp"
MICROSOFT = "com.microsoft"


def _no_form(*_: Any) -> Any:
    raise AssertionError("a composite operator was traced whole for a back end without it")


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """One operator of the graphs; every file beside this one defines one or a few.

    The forms only import NumPy at module level, so a machine without torch or onnx can still
    evaluate the meaning: tensors and graph values are used through their methods alone.

    Attributes:
        name: The name inside the ``qwen_mtp`` namespace, e.g. ``"rms_norm"``.
        schema: The torch signature, e.g. ``"(Tensor x, Tensor weight, float eps) -> Tensor"``.
        meaning: The operator in NumPy. It is the oracle of every other form and the eager
            implementation of the torch op.
        fake: Shapes and dtypes: called with torch tensors, answers with ``x.new_empty(...)``.
        onnx: Called with an onnxscript ``OpBuilder`` and the inputs as graph values (numbers for
            attributes), answers with the output value(s).
        composed: A torch function of smaller operators that says what this one does: it is
            traced in its place wherever there is no kernel for the whole (``composites.py``).
            Such an operator has no ONNX form of its own.
        native: The same call as ``onnx``, answered with one node of the domain ``qwen_mtp``: a
            kernel of ``native/``, for machines where those have been compiled. None where
            standard operators serve as well.
        decomposed: The operator in aten calls on torch tensors, every shape static: what a back
            end without a kernel of its own runs (portable GE graphs, standard ONNX). None where
            the operator is a primitive there; it then has a ``ge`` form.
        fused: The operator in calls of ``torch.ops.npu``: the kernels of Ascend chips.
        ge: A torchair converter: called with GE tensors and ``meta_outputs``, emits GE nodes.
        kernels: GE operators that ``fused``, or else ``ge``, needs a chip to have. An operator
            with ``decomposed`` falls back to that where one is missing.
    """

    name: str
    schema: str
    meaning: Callable[..., Any]
    fake: Callable[..., Any]
    onnx: Callable[..., Any] = field(default=_no_form)
    composed: Callable[..., Any] | None = None
    native: Callable[..., Any] | None = None
    decomposed: Callable[..., Any] | None = None
    fused: Callable[..., Any] | None = None
    ge: Callable[..., Any] | None = None
    kernels: tuple[str, ...] = ()


def const(op: Any, array: npt.NDArray[Any]) -> Any:
    """Give the model of ``op`` a constant; equal constants are stored once.

    Args:
        op: The onnxscript ``OpBuilder`` of the graph being written.
        array: The value.
    """
    key = ("const", array.dtype.str, array.shape, array.tobytes())
    root = op.builder.root
    memo = root.graph.meta.setdefault(NAMESPACE, {})
    if key not in memo:
        name = f"const_{len(memo)}"
        memo[key] = op.builder.initializer(_tensor(array, name), name, qualify=False)
    return memo[key]


def shared(op: Any, key: tuple[Any, ...], make: Callable[[], Any]) -> Any:
    """Emit ``make()`` once per graph and answer with the same value(s) afterwards.

    For index arithmetic that every layer needs: block tables and masks.
    """
    memo = op.builder.graph.meta.setdefault(f"{NAMESPACE}.shared", {})
    if key not in memo:
        memo[key] = make()
    return memo[key]


def alias(op: Any, weight: Any, suffix: str) -> Any:
    """The same stored bytes under another shape, a second initializer of the model.

    A Reshape would be folded into a copy of the whole tensor when the session loads.
    """
    return op.builder.root.graph.initializers[f"{weight.name}.{suffix}"]


def _tensor(array: npt.NDArray[Any], name: str) -> Any:
    import onnx_ir

    return onnx_ir.tensor(array, name=name)
