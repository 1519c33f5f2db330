"""The shape of an operator: one record with every form the operator has."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

NAMESPACE = "qwen_mtp"
MICROSOFT = "com.microsoft"


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
    """

    name: str
    schema: str
    meaning: Callable[..., Any]
    fake: Callable[..., Any]
    onnx: Callable[..., Any]
