"""The signatures of the three kinds of graph, built from the model and the geometry. Torch-free.

B batch slots, R rows of the bucket, P rows of the largest bucket, C prefill rows, W blocks of a
table, V vocabulary, N draft vocabulary (else V), H hidden size. State inputs and outputs
(:func:`~qwen_mtp.graphs.spec.state_specs`) follow the tensors named here; each graph file opens
with its own table.
"""

from qwen_mtp.config import ModelConfig
from qwen_mtp.graphs.spec import (
    STOP_IDS,
    DType,
    Geometry,
    GraphKind,
    GraphSpec,
    StateKind,
    StateSpec,
    TensorSpec,
    state_specs,
)


def graph_specs(config: ModelConfig, geometry: Geometry) -> tuple[GraphSpec, ...]:
    """Every graph of a package: prefill, one verify per row bucket, one draft per K."""
    verify = (verify_spec(config, geometry, rows) for rows in geometry.row_buckets)
    draft = (draft_spec(config, geometry, k) for k in geometry.lookaheads)
    return (prefill_spec(config, geometry), *verify, *draft)


def prefill_spec(config: ModelConfig, geometry: Geometry) -> GraphSpec:
    """One chunk of one sequence; its state views have a batch dimension of 1."""
    rows = geometry.prefill_chunk
    inputs = [
        _ints("token_ids", 1, rows),
        _ints("num_valid", 1),
        _ints("context_len", 1),
        _ints("block_table", 1, geometry.table_width),
        *_sampling(1, 1),
    ]
    outputs = [
        _ints("tokens", 1, 1),
        _floats("hidden", 1, config.hidden_size),
        _floats("logits", 1, 1, config.vocab_size),
    ]
    kinds: set[StateKind] = {"kv", "conv", "ssm"}
    if geometry.lookaheads:
        inputs[1:1] = [_ints("next_token_ids", 1, rows)]
        inputs[3:3] = [_ints("num_draft_rows", 1)]
        kinds.add("mtp_kv")
    states = _states(config, geometry, kinds, one_slot=True)
    return _spec("prefill", "prefill", rows, 0, inputs, outputs, states)


def verify_spec(config: ModelConfig, geometry: Geometry, rows: int) -> GraphSpec:
    """R rows of each slot: the last committed token, then drafts."""
    slots, width = geometry.max_num_seqs, geometry.max_rows
    inputs = [
        _ints("token_ids", slots, rows),
        _ints("num_valid", slots),
        _ints("context_len", slots),
        _ints("num_accepted", slots),
        _ints("block_table", slots, geometry.table_width),
        _floats("accept_uniforms", slots, rows - 1),
        *_sampling(slots, rows),
    ]
    outputs = [
        _ints("tokens", slots, width),
        _ints("num_accepted_drafts", slots),
        _floats("hidden", slots, width, config.hidden_size),
        _floats("logits", slots, rows, config.vocab_size),
    ]
    states = _states(config, geometry, {"kv", "conv", "ssm", "stash"})
    name = f"target_verify_r{rows}"
    return _spec(name, "target_verify", rows, rows - 1, inputs, outputs, states)


def draft_spec(config: ModelConfig, geometry: Geometry, lookahead: int) -> GraphSpec:
    """Catch-up over the rows the target accepted, then ``lookahead`` chained drafts.

    The logits are those of the draft vocabulary in ascending order of ids: outside of it, the
    drafter's law is 0.
    """
    slots, rows = geometry.max_num_seqs, geometry.max_rows
    inputs = [
        _ints("tokens", slots, rows),
        _ints("num_rows", slots),
        _ints("context_len", slots),
        _ints("block_table", slots, geometry.table_width),
        _floats("hidden", slots, rows, config.hidden_size),
    ]
    width = geometry.draft_vocab or config.vocab_size
    outputs = [
        _ints("draft_ids", slots, lookahead),
        *(_floats(f"draft_logits.{j}", slots, width) for j in range(lookahead)),
    ]
    states = _states(config, geometry, {"mtp_kv"})
    name = f"mtp_draft_k{lookahead}"
    return _spec(name, "mtp_draft", rows, lookahead, inputs, outputs, states)


def _spec(
    name: str,
    kind: GraphKind,
    rows: int,
    lookahead: int,
    inputs: list[TensorSpec],
    outputs: list[TensorSpec],
    states: list[tuple[TensorSpec, bool]],
) -> GraphSpec:
    """Every state is an input; what is not changed in place is an output as well."""
    read = [tensor for tensor, _ in states]
    after = [
        TensorSpec(f"{t.name}.out", t.dtype, t.shape, t.state)
        for t, in_place in states
        if not in_place
    ]
    return GraphSpec(name, kind, rows, lookahead, (*inputs, *read), (*outputs, *after))


def _sampling(slots: int, rows: int) -> list[TensorSpec]:
    return [
        _floats("pick_uniforms", slots, rows),
        _floats("temperature", slots),
        _ints("top_k", slots),
        _floats("top_p", slots),
        _ints("banned_rows", slots),
        _ints("stop_ids", slots, STOP_IDS),
    ]


def _states(
    config: ModelConfig, geometry: Geometry, kinds: set[StateKind], one_slot: bool = False
) -> list[tuple[TensorSpec, bool]]:
    """State tensors, each with whether the graph changes it in place."""

    def shape(spec: StateSpec) -> tuple[int, ...]:
        if not (one_slot and spec.per_slot):
            return spec.shape
        return (spec.shape[0] // geometry.max_num_seqs, *spec.shape[1:])

    return [
        (TensorSpec(s.name, s.dtype, shape(s), s.name), s.in_place)
        for s in state_specs(config, geometry)
        if s.kind in kinds
    ]


def _tensor(name: str, dtype: DType, shape: tuple[int, ...]) -> TensorSpec:
    return TensorSpec(name, dtype, shape)


def _ints(name: str, *shape: int) -> TensorSpec:
    return _tensor(name, "int32", shape)


def _floats(name: str, *shape: int) -> TensorSpec:
    return _tensor(name, "float32", shape)
