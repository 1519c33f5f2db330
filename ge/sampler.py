"""The sampler's own operator, for exports that leave the sampler one operator of a package."""

from collections.abc import Sequence

from qwen_mtp.ge.values import Call, Rule, Value, require

OP_TYPE = "MtpRejectionSample"
PROTOTYPE = """
.INPUT(logits, TensorType({DT_FLOAT})).INPUT(draft_ids, TensorType({DT_INT32}))
.INPUT(num_drafts, TensorType({DT_INT32})).INPUT(accept_uniforms, TensorType({DT_FLOAT}))
.INPUT(pick_uniforms, TensorType({DT_FLOAT})).INPUT(temperature, TensorType({DT_FLOAT}))
.INPUT(top_k, TensorType({DT_INT32})).INPUT(top_p, TensorType({DT_FLOAT}))
.INPUT(banned_rows, TensorType({DT_INT32})).INPUT(stop_ids, TensorType({DT_INT32}))
.OPTIONAL_INPUT(draft_probs, TensorType({DT_FLOAT}))
.OUTPUT(tokens, TensorType({DT_INT32})).OUTPUT(num_accepted_drafts, TensorType({DT_INT32}))
"""


def _sample(call: Call) -> Sequence[Value]:
    require(len(call["logits"].shape) == 3, f"logits is {call['logits']}, not [B, R, V]")
    batch, rows, vocabulary = call["logits"].shape
    drafts = rows - 1
    wanted = {
        "draft_ids": (batch, drafts),
        "accept_uniforms": (batch, drafts),
        "pick_uniforms": (batch, rows),
        **dict.fromkeys(("num_drafts", "temperature", "top_k", "top_p", "banned_rows"), (batch,)),
    }
    if call.get("draft_probs") is not None:
        wanted["draft_probs"] = (batch, drafts, vocabulary)
    for name, shape in wanted.items():
        require(call[name].shape == shape, f"{name} is {call[name]}, not {list(shape)}")
    require(call["stop_ids"].shape[:1] == (batch,), f"stop_ids is {call['stop_ids']}")
    return Value("DT_INT32", (batch, rows)), Value("DT_INT32", (batch,))


RULES: dict[str, Rule] = {OP_TYPE: _sample}
