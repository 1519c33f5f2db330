"""The compiled loop samples the target's law, whatever is drafted."""

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import pytest

from qwen_mtp.runtime.session import Session
from tests.packages import TRAINED
from tests.sampled import Ask, Drafter, K, Run, by_ask, engine, histogram, prompt, trained
from tests.sampled_law import (
    ALPHA,
    ASKS,
    Target,
    agreement,
    differences,
    fresh_runs,
    misfits,
    runs,
)

pytestmark = pytest.mark.skipif(
    not (TRAINED / "model.safetensors").is_file(), reason="not trained here"
)
SEEDS = (1, 2, 3)


def any_drafts(seed: int) -> Drafter:
    """Zero to K drafts at random: what followed in some other run, or anything."""
    rng = np.random.default_rng(seed)
    others = [run for run in runs(0, 11, 60) if run.ask.temperature < 2]
    vocabulary = trained().manifest.config.vocab_size

    def draft(run: Run) -> list[int]:
        count = int(rng.integers(0, K + 1))
        if rng.random() < 0.3:
            return [int(token) for token in rng.integers(0, vocabulary, count)]
        other = others[rng.integers(len(others))]
        return other.tokens[len(run.tokens) :][:count]

    return draft


@pytest.mark.parametrize("seed", SEEDS)
def test_with_speculation_two_and_three_tokens_have_the_targets_joint_law(seed: int) -> None:
    assert misfits(runs(K, seed, 50)) == {}


def test_the_runs_of_all_seeds_together_have_the_targets_joint_law() -> None:
    assert misfits([run for seed in SEEDS for run in runs(K, seed, 50)]) == {}


def test_without_speculation_the_law_is_the_targets_too() -> None:
    assert misfits(runs(0, 11, 60)) == {}


def test_the_law_is_the_same_with_speculation_on_and_off() -> None:
    on = [run for seed in SEEDS for run in runs(K, seed, 50)]
    assert differences(on, runs(0, 11, 60)) == {}


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_rounds_of_the_law_tests_accept_every_number_of_drafts(temperature: float) -> None:
    found = [run for seed in SEEDS for run in runs(K, seed, 50)]
    rounds = histogram([run for run in found if run.ask.temperature == temperature])
    print("accepted 0..K:", rounds)
    assert all(rounds)


def test_forced_drafts_do_not_change_the_law() -> None:
    found = fresh_runs(K, 21, 60, drafter=any_drafts(0))
    assert misfits(found) == {}
    assert all(histogram([run for run in found if run.ask.temperature > 0]))


class FirstToken(Target):
    """The law of the token that a prefill gives."""

    def load(self, prefixes: Iterable[tuple[int, ...]]) -> None:
        self._rows[()] = engine().buffer("prefill", "logits")[0, 0].copy()

    def law(self, ask: Ask, prefix: tuple[int, ...]) -> npt.NDArray[np.float64]:
        return ask.law(self._rows[prefix], 0)


def first_tokens(count: int) -> list[Run]:
    session = Session(trained(), engine=engine())
    found = []
    for seed in range(count):
        for number, ask in enumerate(ASKS[2:5]):
            slot, token = session.prefill(prompt(), ask.resolve(7000 + 3 * seed + number))
            session.release(slot)
            found.append(Run(ask, [token]))
    return found


def test_the_first_token_of_a_prefill_has_the_targets_law() -> None:
    for group in by_ask(first_tokens(60)).values():
        assert agreement(FirstToken(), group, 1).p > ALPHA


@pytest.mark.slow
@pytest.mark.parametrize("format", ["fp32", "int8"])
def test_many_runs_have_the_targets_law_on_off_and_forced(format: str) -> None:
    on = [run for seed in SEEDS for run in runs(K, seed, 400, ASKS, format)]
    off = runs(0, 11, 600, ASKS, format)
    forced = fresh_runs(K, 21, 400, ASKS, any_drafts(1), format)
    for found in (on, off, forced):
        assert misfits(found, format) == {}
    assert differences(on, off, format) == {}
    for ask, group in by_ask(on).items():
        print(ask, histogram(group))
        assert all(histogram(group)) or ask.temperature == 0 or ask.min_tokens
