"""The sampled law is the target's: exact enumeration, and properties."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qwen_mtp.custom_ops.rejection import Sampling, candidates, meaning, pick
from tests.rejection_law import BOTH, LARGE, PLAIN, SCENARIOS, TOP_P, Scenario, law_error


@pytest.mark.parametrize("scenario", SCENARIOS + LARGE, ids=str)
def test_the_emitted_law_is_the_targets_law(scenario: Scenario) -> None:
    assert law_error(meaning, scenario) <= 1e-12


@pytest.mark.parametrize("seed", range(1, 6))
def test_the_emitted_law_is_the_targets_for_other_tables(seed: int) -> None:
    assert max(law_error(meaning, replace(s, seed=seed)) for s in SCENARIOS) <= 1e-12


rows = st.integers(0, 2**32 - 1).map(np.random.default_rng)
ASKS = st.sampled_from([Sampling(0.0), PLAIN, TOP_P, BOTH, Sampling(2.0, top_k=5)])


def _one(
    rng: np.random.Generator, ask: Sampling, logits: np.ndarray, ids: Any, **over: Any
) -> tuple[list[int], int]:
    """One slot through the meaning, uniforms drawn from ``rng``."""
    k = logits.shape[0] - 1
    args: dict[str, Any] = {
        "logits": logits[None],
        "draft_ids": np.array([ids], np.int32).reshape(1, k),
        "num_drafts": np.array([k]),
        "accept_uniforms": rng.random((1, k)),
        "pick_uniforms": rng.random((1, k + 1)),
        "temperature": np.array([ask.temperature]),
        "top_k": np.array([ask.top_k]),
        "top_p": np.array([ask.top_p]),
        "banned_rows": np.array([0]),
        "stop_ids": np.array([[-1]]),
    }
    tokens, accepted = meaning(**(args | over))
    return tokens[0].tolist(), int(accepted[0])


@given(rows)
def test_near_zero_temperature_is_greedy(rng: np.random.Generator) -> None:
    logits = np.stack([rng.permutation(9) for _ in range(4)]).astype(np.float64)
    ids = np.where(rng.random(3) < 0.7, logits[:3].argmax(-1), rng.integers(0, 9, 3))
    greedy = _one(rng, Sampling(0.0), logits, ids)
    for ask in (Sampling(2e-5), Sampling(1e-3, top_k=4, top_p=0.5)):
        assert _one(rng, ask, logits, ids) == greedy


@given(rows, ASKS, st.integers(0, 4))
def test_banned_rows_never_emit_a_stop_id(
    rng: np.random.Generator, ask: Sampling, banned: int
) -> None:
    logits, stops = rng.standard_normal((4, 6)) * 3, rng.choice(6, 2, replace=False)
    over = {"banned_rows": np.array([banned]), "stop_ids": np.array([[*stops, -1]])}
    tokens, _ = _one(rng, ask, logits, rng.integers(0, 6, 3), **over)
    assert not set(tokens[:banned]) & set(stops.tolist())


@given(rows, ASKS, st.integers(0, 3), st.sampled_from([np.nan, np.inf, -np.inf]))
def test_a_row_without_a_law_ends_in_minus_one_and_keeps_the_drafts_before_it(
    rng: np.random.Generator, ask: Sampling, bad: int, value: float
) -> None:
    logits = rng.standard_normal((4, 6))
    logits[bad] = value
    best = logits.argmax(-1)[:3]
    tokens, accepted = _one(rng, ask, logits, best, accept_uniforms=np.zeros((1, 3)))
    assert (accepted, tokens) == (bad, [*best[:bad].tolist(), *[-1] * (4 - bad)])


@given(rows, st.sampled_from([PLAIN, TOP_P, BOTH]))
def test_equal_laws_accept_everything_and_an_empty_residual_draws_from_the_target(
    rng: np.random.Generator, ask: Sampling
) -> None:
    logits = rng.standard_normal((2, 6))
    ids, weights = candidates(logits[0], ask)
    law = np.zeros((1, 1, 6))
    law[0, 0, ids] = weights / weights.sum()
    draft = [int(ids[-1])]
    high = {"accept_uniforms": np.full((1, 1), 1 - 2**-24)}
    assert _one(rng, ask, logits, draft, draft_probs=law, **high)[1] == 1
    tokens, accepted = _one(rng, ask, logits, draft, draft_probs=law * 2, **high)
    assert accepted == 0
    assert tokens[0] in ids


@given(rows, ASKS)
def test_an_absent_draft_is_refused_and_its_token_drawn_as_without_drafts(
    rng: np.random.Generator, ask: Sampling
) -> None:
    logits, picks = rng.standard_normal((2, 6)), {"pick_uniforms": rng.random((1, 2))}
    law = {"draft_probs": rng.dirichlet(np.ones(6), (1, 1))}
    drafted = _one(rng, ask, logits, [-1], accept_uniforms=np.zeros((1, 1)), **picks, **law)
    assert drafted == _one(rng, ask, logits, [0], num_drafts=np.array([0]), **picks)


@given(st.lists(st.floats(0, 1, width=32), min_size=1, max_size=9), st.floats(0, 1))
@settings(max_examples=300)
def test_a_draw_lands_on_positive_weight_whatever_the_uniform(
    weights: list[float], uniform: float
) -> None:
    array = np.array([*weights, 1e-3])
    assert array[pick(array, uniform)] > 0
