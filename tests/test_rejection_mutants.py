"""The law check is sharp: samplers with one thing wrong fail it."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from qwen_mtp.custom_ops import rejection
from qwen_mtp.custom_ops.rejection import Sampling, candidates, meaning, pick, residual
from tests.rejection_law import SCENARIOS, Step, law_error


def _plus_one_row(step: Step, *args: Any) -> Any:
    """Draws the replacement of a refused draft from the row after the refused one's."""
    logits, ids, count, _, picks, temperature, top_k, top_p, *_ = args
    tokens, taken = step(*args)
    for b, a in enumerate(taken):
        if a < count[b] and ids[b, a] >= 0:
            ask = Sampling(temperature[b], top_k[b], top_p[b])
            order, weights = candidates(logits[b, a + 1], ask)
            law = args[10][b, a] if len(args) > 10 else np.eye(logits.shape[-1])[ids[b, a]]
            tokens[b, a] = order[pick(residual(weights, law[order]), picks[b, a])]
    return tokens, taken


def _bonus_from_the_last_draft_row(step: Step, *args: Any) -> Any:
    logits, count = args[0].copy(), args[2]
    slots = np.arange(len(logits))
    logits[slots, count] = logits[slots, np.maximum(count - 1, 0)]
    return step(logits, *args[1:])


def _one_uniform_for_both(step: Step, *args: Any) -> Any:
    picks = np.concatenate([args[3], args[4][:, -1:]], axis=1)
    return step(*args[:4], picks, *args[5:])


def _absent_means_last_id(step: Step, *args: Any) -> Any:
    return step(args[0], np.where(args[1] < 0, args[0].shape[-1] - 1, args[1]), *args[2:])


def _one_less_in_top_p(row: Any, ask: Sampling) -> Any:
    ids, weights = candidates(row, ask)
    cut = max(len(ids) - 1, 1) if ask.top_p < 1 else len(ids)
    return ids[:cut], weights[:cut]


def _ties_to_the_higher_id(row: Any, ask: Sampling) -> Any:
    ids, weights = candidates(row[::-1], ask)
    return row.size - 1 - ids, weights


def _temperature_after_top_p(row: Any, ask: Sampling) -> Any:
    if ask.temperature < 1e-5:
        return candidates(row, ask)
    ids, weights = candidates(row, replace(ask, temperature=1.0))
    return ids, weights ** (1 / ask.temperature)


def _top_p_of_the_full_law(row: Any, ask: Sampling) -> Any:
    ids, weights = candidates(row, replace(ask, top_k=0))
    return (ids[: ask.top_k], weights[: ask.top_k]) if ask.top_k else (ids, weights)


def _one_row_late(rows: Any, banned: int, stops: Any, real: Step = rejection.ban_stops) -> Any:
    return real(rows, banned - 1, stops)


PIECES: dict[str, tuple[str, Step]] = {
    "resamples from p": ("residual", lambda w, q: w),
    "inverted ratio": ("accepts", lambda u, p, q: u * p < q),
    "accepts at equality": ("accepts", lambda u, p, q: u * q <= p),
    "always accepts": ("accepts", lambda u, p, q: True),
    "scores sampled drafts as one-hot": ("accepts", lambda u, p, q: u < p),
    "picks the last index at a boundary": (
        "pick",
        lambda w, u: (np.cumsum(w) < u * w.sum()).sum(),
    ),
    "top-p keeps one less": ("candidates", _one_less_in_top_p),
    "ties to the higher id": ("candidates", _ties_to_the_higher_id),
    "temperature after top-p": ("candidates", _temperature_after_top_p),
    "top-p before top-k": ("candidates", _top_p_of_the_full_law),
    "bans one row late": ("ban_stops", _one_row_late),
}
WHOLES: dict[str, Step] = {
    "recovers from the next row": _plus_one_row,
    "bonus from the last draft row": _bonus_from_the_last_draft_row,
    "one uniform for accept and pick": _one_uniform_for_both,
    "an absent draft is the last id": _absent_means_last_id,
}


@pytest.mark.parametrize("name", PIECES)
def test_the_law_check_fails_a_sampler_with_a_wrong_piece(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rejection, *PIECES[name])
    assert max(law_error(meaning, s) for s in SCENARIOS) > 1e-3


@pytest.mark.parametrize("name", WHOLES)
def test_the_law_check_fails_a_sampler_wrongly_put_together(name: str) -> None:
    def mutant(*args: Any) -> Any:
        return WHOLES[name](meaning, *args)

    assert max(law_error(mutant, s) for s in SCENARIOS) > 1e-3
