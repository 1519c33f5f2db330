"""The sampler's own operator, where it is exported as one operator instead of a graph."""

from collections.abc import Sequence

from qwen_mtp.ge.values import Call, Rule, Value, require

OP_TYPE = "MtpRejectionSample"
PROTOTYPE = """
.INPUT(target_probs, TensorType({DT_FLOAT})).INPUT(draft_probs, TensorType({DT_FLOAT}))
.INPUT(draft_ids, TensorType({DT_INT32})).INPUT(u, TensorType({DT_FLOAT}))
.INPUT(r, TensorType({DT_FLOAT})).OUTPUT(tokens, TensorType({DT_INT32}))
.OUTPUT(num_accepted, TensorType({DT_INT32})).REQUIRED_ATTR(lookahead, Int)
"""


def _sample(call: Call) -> Sequence[Value]:
    rows, vocabulary = call["target_probs"].shape
    drafts = call.int_attr("lookahead")
    require(rows == drafts + 1, f"lookahead is {drafts}, target_probs has {rows} rows")
    wanted = {"draft_probs": (drafts, vocabulary), "draft_ids": (drafts,), "u": (drafts,)}
    for name, shape in wanted.items():
        require(call[name].shape == shape, f"{name} is {call[name]}, not {list(shape)}")
    return Value("DT_INT32", (rows,)), Value("DT_INT32", (1,))


RULES: dict[str, Rule] = {OP_TYPE: _sample}
