"""The sampler as one GE operator of its own: ``MtpRejectionSample``, sources in ``ascend_c/``.

Only an export that asks for it keeps the torch operators, and only a machine where the operator
package is installed can compile the result.
"""

from importlib import import_module
from typing import Any

from qwen_mtp.custom_ops.rejection_onnx import INPUTS

OP_TYPE = "MtpRejectionSample"
ALL_INPUTS = (*INPUTS, "draft_probs")
OUTPUTS = ("tokens", "num_accepted_drafts")


def rejection_sample(*inputs: Any, meta_outputs: Any = None) -> Any:
    """The torchair converter of both operators; ``draft_probs`` is optional in the prototype."""
    named = dict(zip(ALL_INPUTS, inputs, strict=False))
    # Not ``torchair.ge.custom_op``: that asks whether the package is installed on this machine.
    ge_op = import_module("torchair._ge_concrete_graph.compat_ir").ge_op
    return ge_op(op_type=OP_TYPE, inputs=named, outputs=list(OUTPUTS), attrs={})
