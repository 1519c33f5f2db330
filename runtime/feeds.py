"""Fills the input buffers of the graphs from the sequences in the slots."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from qwen_mtp.graphs.spec import GraphSpec
from qwen_mtp.runtime.randomness import Purpose, uniforms
from qwen_mtp.runtime.runner import GraphRunner
from qwen_mtp.runtime.sampling import ResolvedSampling

# What the graphs' int32 and float32 hold; beyond it a parameter changes nothing any more.
LARGEST_INT = int(np.iinfo(np.int32).max)
LARGEST_FLOAT = float(np.finfo(np.float32).max)


@dataclass(slots=True)
class LiveSequence:
    """One occupied slot.

    Attributes:
        sampling: Its parameters.
        banned: Ids that may not be emitted before ``min_tokens``.
        computed: Positions whose rows the target has run and accepted.
        last: The newest committed token; it stands at position ``computed``.
        emitted: Tokens emitted so far.
        pending: Rows of the stash that the next verify graph commits.
        rows: Rows that the drafter has not seen yet, at the start of the slot's part of the
            buffers ``tokens`` and ``hidden``.
        rows_start: Position of the first of them.
        blocks: Blocks of the pool, in order.
    """

    sampling: ResolvedSampling
    banned: tuple[int, ...]
    computed: int = 0
    last: int = 0
    emitted: int = 0
    pending: int = 0
    rows: int = 0
    rows_start: int = 0
    blocks: list[int] = field(default_factory=list)

    def draft_limit(self, lookahead: int, max_model_len: int) -> int:
        """Drafts that can still be of use: the round must fit the context and ``max_tokens``."""
        most = self.sampling.max_tokens
        left = lookahead if most is None else most - self.emitted - 1
        return max(0, min(lookahead, left, max_model_len - self.computed - 2))


def feed_prefill(
    engine: GraphRunner, sequence: LiveSequence, prompt: Sequence[int], start: int, drafting: bool
) -> int:
    """Fill the prefill graph with the chunk at ``start``; answers with its number of rows."""
    spec = engine.package.graph("prefill")
    chunk = prompt[start : start + spec.rows]
    following = prompt[start + 1 : start + 1 + spec.rows]
    _fill_row(engine, "prefill", "token_ids", 0, chunk)
    engine.buffer("prefill", "num_valid")[:] = len(chunk)
    engine.buffer("prefill", "context_len")[:] = start
    if any(tensor.name == "next_token_ids" for tensor in spec.inputs):
        _fill_row(engine, "prefill", "next_token_ids", 0, following)
        engine.buffer("prefill", "num_draft_rows")[:] = len(following) if drafting else 0
    _feed_sampling(engine, spec, {0: sequence}, start + len(chunk))
    return len(chunk)


def feed_draft(engine: GraphRunner, graph: str, sequences: Mapping[int, LiveSequence]) -> None:
    """Fill the draft graph; tokens and hidden rows are in its buffers already."""
    rows, start = (engine.buffer(graph, name) for name in ("num_rows", "context_len"))
    rows[:], start[:] = 0, 0
    for slot, sequence in sequences.items():
        rows[slot], start[slot] = sequence.rows, sequence.rows_start


@dataclass(frozen=True, slots=True)
class WaitingRows:
    """Rows of one slot that the drafter has not seen yet: tokens ``[n]``, hidden ``[n, H]``."""

    tokens: npt.NDArray[np.int32]
    hidden: npt.NDArray[np.float32]


def take_waiting(
    engine: GraphRunner, graph: str, slot: int, sequence: LiveSequence
) -> WaitingRows:
    """Copy the rows that wait, before a verify graph writes over them."""
    tokens, hidden = (engine.buffer(graph, name)[slot] for name in ("tokens", "hidden"))
    return WaitingRows(tokens[: sequence.rows].copy(), hidden[: sequence.rows].copy())


def put_back(
    engine: GraphRunner,
    graph: str,
    slot: int,
    sequence: LiveSequence,
    waiting: WaitingRows | None,
) -> None:
    """Add the rows that a verify graph gave to those that wait, of which None are left."""
    new, old = sequence.pending, 0 if waiting is None else len(waiting.tokens)
    if waiting is None:
        sequence.rows_start = sequence.computed
    else:
        tokens, hidden = (engine.buffer(graph, name)[slot] for name in ("tokens", "hidden"))
        assert old + new <= len(tokens), "the drafter should have run"
        tokens[old : old + new], hidden[old : old + new] = tokens[:new].copy(), hidden[:new].copy()
        tokens[:old], hidden[:old] = waiting.tokens, waiting.hidden
    sequence.rows = old + new


def feed_verify(
    engine: GraphRunner,
    graph: str,
    sequences: Mapping[int, LiveSequence],
    proposals: Mapping[int, Sequence[int]],
) -> None:
    """Fill a verify graph: last token and drafts, positions, what to commit, the sampler."""
    names = ("num_valid", "context_len", "num_accepted")
    valid, start, accepted = (engine.buffer(graph, name) for name in names)
    for buffer in (valid, start, accepted):
        buffer[:] = 0
    for slot, sequence in sequences.items():
        drafts = proposals.get(slot, ())
        _fill_row(engine, graph, "token_ids", slot, [sequence.last, *drafts])
        valid[slot], start[slot] = 1 + len(drafts), sequence.computed
        accepted[slot] = sequence.pending
    _feed_sampling(engine, engine.package.graph(graph), sequences, None)


def _fill_row(engine: GraphRunner, graph: str, name: str, slot: int, ids: Sequence[int]) -> None:
    row = engine.buffer(graph, name)[slot]
    row[: len(ids)] = ids
    row[len(ids) :] = -1


def _feed_sampling(
    engine: GraphRunner,
    spec: GraphSpec,
    sequences: Mapping[int, LiveSequence],
    position: int | None,
) -> None:
    """Fill the sampler's inputs; ``position`` is that of the first token the graph may emit."""
    names = ("temperature", "top_k", "top_p", "banned_rows", "stop_ids", "pick_uniforms")
    temperature, top_k, top_p, banned, stops, pick = (engine.buffer(spec.name, n) for n in names)
    temperature[:], top_k[:], top_p[:], banned[:] = 0, 0, 1, 0
    for slot, sequence in sequences.items():
        sampling = sequence.sampling
        temperature[slot] = min(sampling.temperature, LARGEST_FLOAT)
        top_k[slot] = min(sampling.top_k, LARGEST_INT)
        top_p[slot] = sampling.top_p
        banned[slot] = min(max(0, sampling.min_tokens - sequence.emitted), LARGEST_INT)
        stops[slot] = -1
        stops[slot, : len(sequence.banned)] = sequence.banned
        if sampling.greedy:
            continue
        first = sequence.computed + 1 if position is None else position
        places = first + np.arange(pick.shape[1], dtype=np.int64)
        pick[slot] = uniforms(sampling.seed, places, Purpose.PICK)
        if spec.kind == "target_verify":
            accept = engine.buffer(spec.name, "accept_uniforms")
            accept[slot] = uniforms(sampling.seed, places[:-1], Purpose.ACCEPT)
