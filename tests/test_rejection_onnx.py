"""The compiled function against the meaning: every mode, every rung, anywhere in a model."""

import json
from collections import Counter
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from scipy import stats

from qwen_mtp.custom_ops import rejection_ladder as ladder
from qwen_mtp.custom_ops import rejection_onnx
from qwen_mtp.custom_ops.rejection import (
    REJECTION_SAMPLE,
    REJECTION_SAMPLE_LAWS,
    Sampling,
    candidates,
    meaning,
)
from tests.rejection_graphs import (
    Feeds,
    builder,
    compiled,
    graph_inputs,
    model,
    random_case,
    to_proto,
    to_session,
    uniform_batch,
)


def _rung(feeds: Feeds, b: int) -> str:
    """What a slot asks of the function, judged by the meaning's candidates."""
    t, k, p, v = (
        *(feeds[n][b] for n in ("temperature", "top_k", "top_p")),
        feeds["logits"].shape[2],
    )
    if t < 1e-5:
        return "greedy"
    if k == 0 and p >= 1:
        return "plain"
    rows = feeds["logits"][b, : feeds["num_drafts"][b] + 1]
    if np.isnan(rows).any():
        return "no law"
    ask = Sampling(float(t), int(k), float(p))
    need = k if k else max(len(candidates(row, ask)[0]) for row in rows)
    return next((f"rung {m}" for m in ladder.RUNGS if min(need, v) <= m), "everything")


def _agree(feeds: Feeds) -> None:
    got = compiled("draft_probs" in feeds).run(None, feeds)
    want = meaning(**feeds)
    np.testing.assert_array_equal(got[1], want[1])
    np.testing.assert_array_equal(got[0], want[0])


SIZES = [
    (5, 40),
    (17, 40),
    (64, 20),
    (200, 15),
    (500, 10),
    (1000, 5),
    (2000, 5),
    (3001, 6),
    (4096, 6),
]
RUNGS = ("greedy", "plain", "rung 64", "rung 1024", "everything")


@pytest.mark.parametrize("laws", [False, True])
@pytest.mark.parametrize("k", [0, 1, 2, 3, 7])
def test_the_compiled_function_says_what_the_meaning_says_token_for_token(
    k: int, laws: bool
) -> None:
    rng, counted = np.random.default_rng([k, laws]), Counter[str]()
    for v, batches in SIZES:
        for _ in range(batches):
            feeds = random_case(rng, 8, k, v, laws)
            _agree(feeds)
            counted.update(_rung(feeds, b) for b in range(8))
    assert counted.total() >= 1000
    assert min(counted[rung] for rung in RUNGS) >= 10, counted


@pytest.mark.parametrize(
    ("ask", "entered", "skipped"),
    [
        ((0.0, 0, 1.0), {"greedy_yes"}, {"sorted_yes", "plain_yes"}),
        ((1.0, 0, 1.0), {"plain_yes"}, {"sorted_yes", "greedy_yes"}),
        ((1.0, 20, 0.9), {"rung64_no"}, {"nucleus_yes", "rung64_yes", "greedy_yes"}),
        ((1.0, 65, 1.0), {"rung1024_no"}, {"nucleus_yes", "rung1024_yes", "rung64_no"}),
        ((1.0, 2000, 1.0), {"rung1024_yes"}, {"nucleus_yes", "rung1024_no"}),
        ((0.1, 0, 0.5), {"nucleus_yes", "rung64_no"}, {"rung64_yes", "plain_yes"}),
        ((1.0, 0, 0.4), {"nucleus_yes", "rung1024_no"}, {"rung1024_yes", "plain_yes"}),
        ((1.0, 0, 0.95), {"nucleus_yes", "rung1024_yes"}, {"rung1024_no", "plain_yes"}),
    ],
)
def test_a_batch_runs_only_the_branches_it_asks_for(
    ask: tuple[float, int, float], entered: set[str], skipped: set[str], tmp_path: Path
) -> None:
    rng = np.random.default_rng(5)
    session = to_session(model(REJECTION_SAMPLE), tmp_path)
    feeds = uniform_batch(rng.standard_normal((2, 3, 3000)), rng, *ask)
    feeds["num_drafts"][:], feeds["logits"][:, 2] = 1, np.nan
    session.run(None, feeds)
    events = json.loads(Path(session.end_profiling()).read_text())
    ran = {scope for e in events if e["cat"] == "Node" for scope in e["name"].split("/")}
    ran |= {scope.split("RejectionSample_")[-1] for scope in ran}
    assert entered <= ran
    assert not skipped & ran


@pytest.mark.parametrize("laws", [False, True])
def test_a_slot_answers_the_same_whatever_its_neighbours_ask(laws: bool) -> None:
    rng = np.random.default_rng(11)
    for _ in range(15):
        feeds = random_case(rng, 6, 3, 3000, laws)
        together = compiled(laws).run(None, feeds)
        for b in range(6):
            alone = compiled(laws).run(None, {n: a[b : b + 1] for n, a in feeds.items()})
            np.testing.assert_array_equal(together[0][b], alone[0][0])
            assert together[1][b] == alone[1][0]


@pytest.mark.parametrize("v", [3000, 1500, 1025])
def test_every_rung_gives_the_same_bits(v: int) -> None:
    gb = builder()
    inputs = graph_inputs(gb, laws=False)
    sorts = gb.op.Greater(inputs[6], 0)
    slots = rejection_onnx._shared(gb.op, gb.op.Not(sorts), sorts, inputs)
    named = {}
    for rung, pair in (
        *((m, ladder._best(gb.op, slots, m)) for m in ladder.RUNGS),
        ("all", ladder._everything(gb.op, slots)),
    ):
        c = ladder._candidates(gb.op, slots, *pair)
        named |= {f"{n}_{rung}": getattr(c, n) for n in ("ids", "weights", "before", "mass")}
    session = to_session(to_proto(gb, named))
    rng = np.random.default_rng(3)
    logits = np.round(rng.standard_normal((4, 4, v)) * 40) / 8
    feeds = uniform_batch(logits, rng, 0.7, 1, 1.0) | {
        "top_k": np.array([1, 20, 63, 64], np.int32)
    }
    out = dict(zip(named, session.run(list(named), feeds), strict=True))
    order = np.argsort(-logits, kind="stable")[..., :64]
    for rung in (*ladder.RUNGS, "all"):
        np.testing.assert_array_equal(out[f"ids_{rung}"][..., :64], order)
        for name in ("weights", "before"):
            want = out[f"{name}_64"]
            assert out[f"{name}_{rung}"][..., :64].tobytes() == want.tobytes()
        assert out[f"mass_{rung}"].tobytes() == out["mass_64"].tobytes()


def test_one_function_serves_calls_inside_the_branches_of_a_model() -> None:
    gb = builder()
    inputs = graph_inputs(gb, laws=True)
    which = gb.input("which", ir.DataType.BOOL, [])
    twice = lambda o: REJECTION_SAMPLE.onnx(o, *inputs[:-1])  # noqa: E731
    inner = lambda o: REJECTION_SAMPLE_LAWS.onnx(o, *inputs)  # noqa: E731
    outer = ladder.branch(gb.op, "outer", which, twice, inner)
    again = ladder.branch(gb.op, "again", which, inner, twice)
    names = ("tokens", "accepted", "tokens_again", "accepted_again")
    proto = to_proto(gb, dict(zip(names, (*outer, *again), strict=True)))
    assert [f.name for f in proto.functions] == ["RejectionSample", "RejectionSampleLaws"]
    session, rng = to_session(proto), np.random.default_rng(8)
    for _ in range(20):
        feeds = random_case(rng, 4, 3, 700, laws=True)
        plain = meaning(**{n: a for n, a in feeds.items() if n != "draft_probs"})
        laws = meaning(**feeds)
        for flag, want in ((True, (*plain, *laws)), (False, (*laws, *plain))):
            got = session.run(None, feeds | {"which": np.array(flag)})
            for have, need in zip(got, want, strict=True):
                np.testing.assert_array_equal(have, need)


@pytest.mark.parametrize("laws", [False, True])
def test_poisoned_rows_nobody_reads_change_nothing(laws: bool) -> None:
    rng = np.random.default_rng(21)
    for v in (50, 1200, 3000):
        feeds = random_case(rng, 8, 3, v, laws)
        feeds["logits"] = np.nan_to_num(feeds["logits"])
        clean = compiled(laws).run(None, feeds)
        for b, n in enumerate(feeds["num_drafts"]):
            feeds["logits"][b, n + 1 :] = rng.choice([np.nan, np.inf, -np.inf], (3 - n, v))
        for have, want in zip(compiled(laws).run(None, feeds), clean, strict=True):
            np.testing.assert_array_equal(have, want)


def test_no_stop_ids_at_all_and_a_broken_draft_law_are_served() -> None:
    rng = np.random.default_rng(2)
    feeds = random_case(rng, 8, 2, 30, laws=True)
    feeds["stop_ids"] = np.zeros((8, 0), np.int32)
    _agree(feeds)
    feeds["draft_probs"][:4, :, 3] = np.nan
    _agree(feeds)


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("laws", [False, True])
@pytest.mark.parametrize("ask", [(0.8, 0, 1.0), (1.2, 4, 1.0), (0.9, 0, 0.8)], ids=str)
def test_compiled_draws_follow_the_targets_law(
    ask: tuple[float, int, float], laws: bool, seed: int
) -> None:
    rng, n, v = np.random.default_rng([seed, laws]), 20_000, 6
    rows = rng.standard_normal((2, v)).astype(np.float32)
    targets = []
    for row in rows.astype(np.float64):
        ids, weights = candidates(row, Sampling(*ask))
        targets.append(np.zeros(v))
        targets[-1][ids] = weights / weights.sum()
    feeds = uniform_batch(np.broadcast_to(rows, (n, 2, v)), rng, *ask)
    law = rng.dirichlet(np.ones(v)) if laws else np.eye(v)[rows[0].argmax()]
    feeds["draft_ids"] = rng.choice(v, (n, 1), p=law).astype(np.int32)
    if laws:
        feeds["draft_probs"] = np.broadcast_to(law, (n, 1, v)).astype(np.float32)
    tokens, accepted = compiled(laws).run(None, feeds)
    second = np.where(accepted == 1, tokens[:, 1], rng.choice(v, n, p=targets[1]))
    seen = np.bincount(tokens[:, 0] * v + second, minlength=v * v)
    want = np.outer(*targets).reshape(-1) * n
    assert seen[want == 0].sum() == 0
    assert stats.chisquare(seen[want > 0], want[want > 0]).pvalue > 1e-4
