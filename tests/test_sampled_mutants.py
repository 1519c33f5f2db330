"""The law check of the sampled loop is sharp: loops with one thing wrong in them fail it."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from qwen_mtp.runtime import feeds
from qwen_mtp.runtime.engine import Engine
from qwen_mtp.runtime.randomness import Purpose, uniforms
from tests.packages import TRAINED
from tests.sampled import K
from tests.sampled_law import ASKS, fresh_runs, misfits

pytestmark = pytest.mark.skipif(
    not (TRAINED / "model.safetensors").is_file(), reason="not trained here"
)
SLOW = pytest.mark.slow  # only to keep the default run short
MIXED = tuple(ASKS[i] for i in (0, 1, 5, 6, 7))


def _one_uniform_for_accept_and_pick(seed: Any, places: Any, purpose: Purpose) -> Any:
    return uniforms(seed, places, Purpose.ACCEPT)


def _the_pick_is_the_next_accept(seed: Any, places: Any, purpose: Purpose) -> Any:
    return uniforms(seed, places + (purpose == Purpose.PICK), Purpose.ACCEPT)


def _constant_in_a_request(seed: Any, places: Any, purpose: Purpose) -> Any:
    return uniforms(seed, 0 * places, purpose)


def _keyed_by_the_row_of_the_round(seed: Any, places: Any, purpose: Purpose) -> Any:
    return uniforms(seed, places - places[0], purpose)


def _one_number_for_a_round(seed: Any, places: Any, purpose: Purpose) -> Any:
    return uniforms(seed, 0 * places + places[0], purpose)


def _seed_ignored(seed: Any, places: Any, purpose: Purpose) -> Any:
    return uniforms(0, places, purpose)


def _accepts_too_often(seed: Any, places: Any, purpose: Purpose) -> Any:
    return uniforms(seed, places, purpose) ** (2 if purpose == Purpose.ACCEPT else 1)


DRAWS = [
    _one_uniform_for_accept_and_pick,
    _the_pick_is_the_next_accept,
    pytest.param(_constant_in_a_request, marks=SLOW),
    _keyed_by_the_row_of_the_round,
    pytest.param(_one_number_for_a_round, marks=SLOW),
    pytest.param(_seed_ignored, marks=SLOW),
    _accepts_too_often,
]


def _temperature_of_the_neighbour(temperature: Any, *_: Any) -> None:
    temperature[:] = np.roll(temperature, 1)


def _top_k_not_fed(_: Any, top_k: Any, *__: Any) -> None:
    top_k[:] = 0


def _top_p_not_fed(_: Any, __: Any, top_p: Any, *___: Any) -> None:
    top_p[:] = 1


def _one_banned_row_less(*buffers: Any) -> None:
    buffers[3][:] -= 1


FEEDS = [
    _temperature_of_the_neighbour,
    pytest.param(_top_k_not_fed, marks=SLOW),
    _top_p_not_fed,
    _one_banned_row_less,
]


def feed_wrongly(patch: pytest.MonkeyPatch, change: Any, names: Sequence[str]) -> None:
    real = feeds._feed_sampling

    def fed(engine: Engine, spec: Any, *args: Any) -> None:
        real(engine, spec, *args)
        change(*(engine.buffer(spec.name, name) for name in names))

    patch.setattr(feeds, "_feed_sampling", fed)


@pytest.mark.parametrize("draw", DRAWS)
def test_the_law_check_fails_wrong_uniforms(draw: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feeds, "uniforms", draw)
    assert misfits(fresh_runs(K, 1, 100, MIXED)) != {}


@pytest.mark.parametrize("change", FEEDS)
def test_the_law_check_fails_wrongly_fed_parameters(
    change: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    feed_wrongly(monkeypatch, change, ("temperature", "top_k", "top_p", "banned_rows"))
    assert misfits(fresh_runs(K, 1, 100, MIXED)) != {}


def _accepts_shifted_by_one(seed: Any, places: Any, purpose: Purpose) -> Any:
    return uniforms(seed, places + (purpose == Purpose.ACCEPT), purpose)


def _pick_keyed_by_the_round(seed: Any, places: Any, purpose: Purpose) -> Any:
    keyed = 0 * places + places[0] if purpose == Purpose.PICK else places
    return uniforms(seed, keyed, purpose)


@pytest.mark.slow
@pytest.mark.parametrize("draw", [_accepts_shifted_by_one, _pick_keyed_by_the_round])
def test_uniforms_that_are_still_independent_keep_the_law(
    draw: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feeds, "uniforms", draw)
    assert misfits(fresh_runs(K, 1, 400, MIXED)) == {}
