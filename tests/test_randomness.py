"""The uniforms: fixed forever, and as good as the paper's generator."""

import hashlib

import numpy as np
import pytest
from scipy import stats

from qwen_mtp.runtime.randomness import SEEDS, Purpose, fresh_seed, philox, uniforms

ROWS = np.arange(200_000, dtype=np.int64)


@pytest.mark.parametrize(
    ("counter", "seed", "expected"),
    [
        ("00000000 " * 4, 0, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff " * 4, SEEDS - 1, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (
            "243f6a88 85a308d3 13198a2e 03707344",
            0x299F31D0A4093822,
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)
def test_philox_gives_the_published_known_answers(counter: str, seed: int, expected: str) -> None:
    words = tuple(np.array([int(word, 16)], np.uint64) for word in counter.split())
    assert " ".join(f"{int(word[0]):08x}" for word in philox(words, seed)) == expected


GOLDEN = [
    (0, Purpose.ACCEPT, [6694888, 16311500, 326307, 699867, 2024930]),
    (0, Purpose.PICK, [8668437, 13270262, 12974611, 1398595, 836084]),
    (0, Purpose.DRAFT, [418262, 7869198, 14513103, 3043925, 10121916]),
    (1, Purpose.ACCEPT, [14936070, 11274260, 4150707, 3042122, 4960911]),
    (SEEDS - 1, Purpose.PICK, [10961462, 2178184, 16384051, 11757922, 2559492]),
    (1234567890123456789, Purpose.DRAFT, [6536640, 3638521, 13362663, 6741337, 6886584]),
]


@pytest.mark.parametrize(("seed", "purpose", "expected"), GOLDEN)
def test_the_stream_never_changes(seed: int, purpose: Purpose, expected: list[int]) -> None:
    drawn = uniforms(seed, np.array([0, 1, 2, 1000, 2**40]), purpose)
    assert (drawn * 2.0**24).tolist() == expected


def test_a_million_numbers_never_change() -> None:
    drawn = uniforms(20261130, np.arange(1_000_000).reshape(1000, 1000), Purpose.ACCEPT)
    digest = hashlib.sha256(drawn.astype("<f4").tobytes()).hexdigest()
    assert digest == "b5b651bd2ea5b9b63b28b5c5ae2a3e7fdc1a0d7569db2e4a2f28e3dee36a18f5"


def test_uniforms_are_float32_on_the_grid_below_one() -> None:
    drawn = uniforms(7, ROWS.reshape(400, 500), Purpose.PICK)
    assert drawn.dtype == np.float32
    assert drawn.shape == (400, 500)
    assert drawn.min() >= 0
    assert drawn.max() < 1
    steps = drawn.astype(np.float64) * 2**24
    assert np.array_equal(steps, np.round(steps))
    assert np.any(steps % 2 == 1)


def test_a_number_depends_on_its_own_position_only() -> None:
    together = uniforms(7, ROWS[:64], Purpose.DRAFT)
    shuffled = np.random.default_rng(0).permutation(64)
    assert np.array_equal(uniforms(7, ROWS[:64][shuffled], Purpose.DRAFT), together[shuffled])
    alone = [uniforms(7, ROWS[i : i + 1], Purpose.DRAFT)[0] for i in range(64)]
    assert np.array_equal(alone, together)
    assert uniforms(7, ROWS[:0], Purpose.DRAFT).shape == (0,)


def test_a_batch_of_seeds_draws_what_each_seed_draws_alone() -> None:
    seeds = [0, 41, 2**40 + 3, SEEDS - 1]
    positions = np.array([[0, 1, 2], [9, 9, 9], [5, 6, 7], [2**33, 1, 0]])
    batch = uniforms(np.array(seeds, np.uint64)[:, None], positions, Purpose.ACCEPT)
    alone = [uniforms(s, p, Purpose.ACCEPT) for s, p in zip(seeds, positions, strict=True)]
    assert np.array_equal(batch, alone)
    assert batch.dtype == np.float32


@pytest.mark.parametrize("purpose", Purpose)
@pytest.mark.parametrize("seed", [0, 1, 2**32, SEEDS - 1])
def test_uniforms_are_uniform(seed: int, purpose: Purpose) -> None:
    drawn = uniforms(seed, ROWS, purpose)
    bins = np.bincount((drawn * 1024).astype(int), minlength=1024)
    assert stats.chisquare(bins).pvalue > 1e-4
    low_bits = (drawn.astype(np.float64) * 2**24).astype(int) % 256
    assert stats.chisquare(np.bincount(low_bits, minlength=256)).pvalue > 1e-4


def pair(kind: str) -> tuple[np.ndarray, np.ndarray]:
    """Two streams that differ in one part of the key only."""
    base = uniforms(41, ROWS, Purpose.ACCEPT)
    return {
        "purpose": lambda: (base, uniforms(41, ROWS, Purpose.PICK)),
        "second purpose": lambda: (base, uniforms(41, ROWS, Purpose.DRAFT)),
        "seed": lambda: (base, uniforms(42, ROWS, Purpose.ACCEPT)),
        "seed high word": lambda: (base, uniforms(41 + 2**32, ROWS, Purpose.ACCEPT)),
        "position": lambda: (base[:-1], base[1:]),
        "position high word": lambda: (base, uniforms(41, ROWS + 2**32, Purpose.ACCEPT)),
        "seed over fixed position": lambda: (
            np.concatenate([uniforms(s, ROWS[:1], Purpose.ACCEPT) for s in range(5000)]),
            np.concatenate([uniforms(s + 1, ROWS[:1], Purpose.ACCEPT) for s in range(5000)]),
        ),
    }[kind]()


@pytest.mark.parametrize(
    "kind",
    [
        "purpose",
        "second purpose",
        "seed",
        "seed high word",
        "position",
        "position high word",
        "seed over fixed position",
    ],
)
def test_streams_that_differ_in_one_part_of_the_key_are_independent(kind: str) -> None:
    one, two = pair(kind)
    assert not np.array_equal(one, two)
    assert stats.pearsonr(one, two).pvalue > 1e-4
    table = np.zeros((16, 16))
    np.add.at(table, ((one * 16).astype(int), (two * 16).astype(int)), 1)
    assert stats.chi2_contingency(table).pvalue > 1e-4


def test_fresh_seeds_differ_and_survive_json() -> None:
    seeds = {fresh_seed() for _ in range(100)}
    assert len(seeds) == 100
    assert all(0 <= seed < 2**53 for seed in seeds)
    assert all(int(float(seed)) == seed for seed in seeds)
