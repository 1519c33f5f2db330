"""The sampler's own operator, where it is exported as one operator instead of a graph."""

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
    logits = call["logits"]
    require(len(logits.shape) == 3, f"logits is {logits}, not slots by rows by vocabulary")
    slots, rows, vocabulary = logits.shape
    each, drafts = (slots,), (slots, rows - 1)
    wanted: dict[str, tuple[int, ...]] = {
        **dict.fromkeys(("num_drafts", "temperature", "top_k", "top_p", "banned_rows"), each),
        **dict.fromkeys(("draft_ids", "accept_uniforms"), drafts),
        "pick_uniforms": (slots, rows),
        "stop_ids": (slots, *call["stop_ids"].shape[1:2]),
        "draft_probs": (*drafts, vocabulary),
    }
    for name, shape in wanted.items():
        given = call.get(name)
        require(given is None or given.shape == shape, f"{name} is {given}, not {list(shape)}")
    return Value("DT_INT32", (slots, rows)), Value("DT_INT32", (slots,))


RULES: dict[str, Rule] = {OP_TYPE: _sample}
