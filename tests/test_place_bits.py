"""A value has the same bits wherever it sits in a buffer, and however many threads share it.

Kernels that round the vector body of a buffer unlike its tail, or split it over threads at any
place, would tie a row to its neighbours. Odd widths and full batches are where that shows.
"""

import numpy as np
import pytest

from qwen_mtp.custom_ops.delta_rule import DELTA_GATES
from qwen_mtp.custom_ops.rotary import ROTARY_TABLE
from qwen_mtp.runtime.session import Session
from tests.operators import compiled
from tests.packages import package, random_checkpoint
from tests.scripted import GREEDY, random_prompts


@pytest.mark.parametrize("heads", [1, 3, 16, 64])
def test_gates_of_a_row_do_not_depend_on_its_place(heads: int) -> None:
    rng = np.random.default_rng(heads)
    decay, bias = (rng.standard_normal(heads).astype(np.float32) for _ in range(2))
    decay = -np.exp(decay)
    a, b = (rng.standard_normal((32, 8, heads)).astype(np.float32) * 4 for _ in range(2))
    whole = compiled(DELTA_GATES, a, b, decay, bias)(a, b, decay, bias)
    alone = compiled(DELTA_GATES, a[:1, :1], b[:1, :1], decay, bias)
    for slot, row in ((0, 0), (0, 7), (5, 3), (31, 6), (31, 7)):
        part = slice(slot, slot + 1), slice(row, row + 1)
        for found, wanted in zip(alone(a[part], b[part], decay, bias), whole, strict=True):
            np.testing.assert_array_equal(found[0, 0], wanted[slot, row])


@pytest.mark.parametrize("dim", [2, 6, 10, 16, 64])
def test_the_table_of_a_position_does_not_depend_on_the_rows(dim: int) -> None:
    start = np.array([3, 250, 4000], np.int32)
    whole = compiled(ROTARY_TABLE, start, 7, dim, 1e7)(start, 7, dim, 1e7)
    alone = compiled(ROTARY_TABLE, start[:1], 1, dim, 1e7)
    for slot in range(3):
        for row in range(7):
            here = alone(start[slot : slot + 1] + np.int32(row), 1, dim, 1e7)
            for found, wanted in zip(here, whole, strict=True):
                np.testing.assert_array_equal(found[0, 0], wanted[slot, row])


@pytest.mark.parametrize(
    ("heads", "slots", "k"), [(3, 1, 2), (3, 3, 2), (64, 32, 7)], ids=["odd", "odd batch", "wide"]
)
def test_drafts_change_no_bit_where_widths_are_odd_or_batches_full(
    heads: int, slots: int, k: int
) -> None:
    sizes = {"linear_key_head_dim": 8, "linear_value_head_dim": 8} if heads == 64 else {}
    checkpoint = random_checkpoint(
        3,
        num_hidden_layers=1,
        linear_num_key_heads=heads,
        linear_num_value_heads=heads,
        **sizes,
    )
    model = package(
        checkpoint, max_num_seqs=slots, max_model_len=64, prefill_chunk=8, lookaheads=(k,)
    )
    prompts = random_prompts((4,) * slots, seed=1)
    running = Session(model, threads=2, keep_logits=True)
    plain = _decode(running, prompts, {slot: [[]] * 24 for slot in range(slots)})
    truth = {slot: [token for token, _ in rows] for slot, rows in plain.items()}
    forced = {slot: _drafts(tokens, k) for slot, tokens in truth.items()}
    assert _decode(running, prompts, forced) == {
        slot: rows[: len(rows)] for slot, rows in plain.items()
    }


Rows = dict[int, list[tuple[int, bytes]]]


def _drafts(tokens: list[int], k: int) -> list[list[int]]:
    """For each count of emitted tokens the true continuation, its last draft spoilt."""
    return [[*tokens[n : n + k - 1], (tokens[min(n + k, len(tokens)) - 1] + 1) % 256][:k]
            for n in range(len(tokens))]  # fmt: skip


def _decode(
    running: Session, prompts: list[list[int]], drafts: dict[int, list[list[int]]]
) -> Rows:
    """Tokens after the first, each with the bits of the logits it was taken from."""
    for prompt in prompts:
        running.prefill(prompt, GREEDY)
    got: Rows = {slot: [] for slot in range(len(prompts))}
    while min(map(len, got.values())) < 20:
        given = {slot: drafts[slot][min(len(got[slot]), 23)] for slot in got}
        rows = max(len(ids) for ids in given.values()) + 1
        buckets = running.package.manifest.geometry.row_buckets
        graph = f"target_verify_r{min(b for b in buckets if b >= rows)}"
        for slot, result in running.step(given).items():
            logits = running.engine.buffer(graph, "logits")[slot]
            got[slot] += [(t, logits[i].tobytes()) for i, t in enumerate(result.tokens)]
    for slot in got:
        running.release(slot)
    return {slot: rows[:20] for slot, rows in got.items()}
