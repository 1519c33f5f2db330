"""The native sampler against the meaning, token for token, and the native argmax."""

from collections.abc import Sequence
from functools import cache

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch

from qwen_mtp.custom_ops.operator import NAMESPACE
from qwen_mtp.custom_ops.rejection import REJECTION_SAMPLE, Sampling, candidates, meaning
from qwen_mtp.export.aten import NATIVE
from tests.native import library
from tests.rejection_graphs import (
    SHAPES,
    Feeds,
    builder,
    graph_inputs,
    random_case,
    to_proto,
    to_session,
    typed,
    uniform_batch,
)
from tests.rejection_law import SCENARIOS, law_error
from tests.rejection_slots import exact_cases, slot_case

MACHINES = ("native", "x86-64")
ASKS = (
    (0.0, 0, 1.0),
    (0.7, 5, 0.0),
    (1.0, 0, 1.0),
    (1.3, 20, 0.95),
    (0.8, 0, 0.95),
    (1.0, 3000, 1.0),
)
FULL = 248_320


@cache
def _kernel(machine: str = "native", threads: int = 2) -> ort.InferenceSession:
    gb = builder()
    gb.graph.opset_imports[NAMESPACE] = 1
    tokens, accepted = REJECTION_SAMPLE.native(gb.op, *graph_inputs(gb, laws=False))
    proto = to_proto(gb, {"tokens": tokens, "accepted": accepted})
    return to_session(proto, kernels=library(machine), threads=threads)


def _both() -> list[ort.InferenceSession]:
    return [_kernel(machine) for machine in MACHINES]


def _agree(feeds: Feeds, kernels: Sequence[ort.InferenceSession]) -> int:
    """Every kernel gives the meaning's answer; how many slots that were."""
    given = {name: a for name, a in feeds.items() if name != "draft_probs"}
    want = meaning(**given)
    for kernel in kernels:
        got = kernel.run(None, given)
        np.testing.assert_array_equal(got[1], want[1])
        np.testing.assert_array_equal(got[0], want[0])
    return len(want[1])


def test_the_kernel_says_what_the_meaning_says_token_for_token() -> None:
    """Ties, flat rows, rows without a law, bans and absent ids, up to 15 drafts in 8 slots."""
    rng, slots = np.random.default_rng(0), 0
    for v, batches in ((2, 90), (5, 90), (64, 80), (65, 80), (1000, 20), (3001, 8), (5000, 4)):
        for _ in range(batches):
            slots += _agree(slot_case(rng, 8, v, laws=False), _both())
            drafts = int(rng.choice([0, 1, 3, 7, 15]))
            slots += _agree(random_case(rng, int(rng.integers(1, 9)), drafts, v, False), _both())
    assert slots >= 4500


def test_a_chunk_more_or_less_changes_nothing() -> None:
    rng = np.random.default_rng(7)
    for v in (8191, 8192, 8193, 20_000):
        for _ in range(2):
            _agree(slot_case(rng, 4, v, laws=False), _both())


def test_the_kernel_hits_exact_boundaries() -> None:
    assert sum(_agree(feeds, _both()) for feeds in exact_cases()) >= 1000


def test_a_draft_where_top_p_cuts_a_flat_row_is_judged_by_its_place() -> None:
    """Logits on the edges of the bins; the last token that is kept and the first that is not."""
    rng = np.random.default_rng(9)
    for p in (0.5, 0.8, 0.95, 0.999):
        logits = np.round(rng.standard_normal((16, 2, 4000)) * 24) / 64
        feeds = uniform_batch(logits, rng, 1.0, 0, p)
        feeds["accept_uniforms"][:] = 1e-9
        for b, row in enumerate(feeds["logits"][:, 0]):
            kept = len(candidates(row, Sampling(1.0, top_p=float(np.float32(p))))[0])
            place = kept - 1 + b % 2
            feeds["draft_ids"][b, 0] = np.argsort(-row, kind="stable")[place]
        _agree(feeds, _both())
        accepted = _kernel().run(None, feeds)[1]
        np.testing.assert_array_equal(accepted, [1, 0] * 8)


def test_the_law_of_the_kernel_is_the_targets_law() -> None:
    def step(*args: np.ndarray) -> list[np.ndarray]:
        return _kernel().run(None, typed(dict(zip(SHAPES, args, strict=False))))

    assert max(law_error(step, s) for s in SCENARIOS if not s.laws) <= 1e-6


@pytest.mark.parametrize("scale", [6.0, 0.5, 0.0])
def test_a_vocabulary_of_full_size_gives_the_meanings_tokens_on_any_threads(scale: float) -> None:
    rng = np.random.default_rng(1)
    for ask in ASKS:
        feeds = uniform_batch(rng.standard_normal((1, 2, FULL)) * scale, rng, *ask)
        feeds["accept_uniforms"][:] *= 1e-6
        feeds["stop_ids"][:], feeds["banned_rows"][:] = FULL - 1, 1
        _agree(feeds, [_kernel(), _kernel(threads=1)])


def test_a_slot_answers_the_same_in_any_batch_and_with_more_rows() -> None:
    rng = np.random.default_rng(11)
    for v in (300, 9000):
        feeds = slot_case(rng, 6, v, laws=False)
        together = _kernel().run(None, feeds)
        for b in range(6):
            n = int(feeds["num_drafts"][b])
            cut = {"logits": n + 1, "pick_uniforms": n + 1, "draft_ids": n, "accept_uniforms": n}
            one = {name: np.ascontiguousarray(a[b : b + 1]) for name, a in feeds.items()}
            one |= {name: np.ascontiguousarray(one[name][:, :k]) for name, k in cut.items()}
            alone = _kernel().run(None, one)
            np.testing.assert_array_equal(together[0][b, : n + 1], alone[0][0])
            assert together[1][b] == alone[1][0]


def test_the_argmax_of_a_drafter_is_torchs() -> None:
    gb = builder()
    gb.graph.opset_imports[NAMESPACE] = 1
    x = gb.input("x", ir.DataType.FLOAT, ["B", "N"])
    best = NATIVE[torch.ops.aten.argmax.default](gb.op, x, -1)
    assert best.producer().domain == NAMESPACE
    best.type, best.shape = ir.TensorType(ir.DataType.INT64), ir.Shape(["B"])
    proto = to_proto(gb, {"best": best})
    kernels = [to_session(proto, kernels=library(machine)) for machine in MACHINES]
    rng = np.random.default_rng(4)
    for n in (1, 2, 63, 64, 65, 8192, 30_001):
        rows = np.round(rng.standard_normal((3, n)), 1).astype(np.float32)
        rows[0] = rng.choice([0.0, -0.0, -np.inf], n)
        rows[1, rng.integers(n)] = np.inf
        for kernel in kernels:
            (got,) = kernel.run(None, {"x": rows})
            np.testing.assert_array_equal(got, torch.argmax(torch.from_numpy(rows), -1))
    broken = np.full((2, 100), np.nan, np.float32)
    for kernel in kernels:
        (got,) = kernel.run(None, {"x": broken})
        assert ((got >= 0) & (got < 100)).all()
