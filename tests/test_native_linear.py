"""The native kernels for products, vocabularies and norms: meaning, bits of a row, absent rows."""

import numpy as np
import pytest

from qwen_mtp.custom_ops import linear, norm
from qwen_mtp.custom_ops.operator import Operator
from tests.native import native_session

Array = np.ndarray
MACHINES = ["native", "x86-64"]
SHAPES = [(1, 64, 9), (4, 96, 50), (6, 160, 33), (7, 1024, 130), (16, 224, 64), (40, 64, 17)]
QUANTISED = {"LinearInt8": linear.quantize_int8, "LinearInt4": linear.quantize_int4}


def stored(kind: str, weight: Array) -> list[Array]:
    if kind.endswith("Int8"):
        values, scale = linear.quantize_int8(weight)
        return [np.ascontiguousarray(values.T), scale]
    return [*linear.quantize_int4(weight)]


def product(kind: str, x: Array, weight: list[Array], batch: int = 0, **how: object) -> Array:
    out = np.empty((len(x), len(weight[0])), np.float32)
    inputs = dict(zip(("x", "w", "s"), (x, *weight), strict=True))
    sizes = {"M": len(x), "K": x.shape[1], "N": len(weight[0]), "B": batch}
    session = native_session(kind, inputs, {"y": out}, **how, **sizes)
    found: Array = session.run(None, inputs)[0]
    return found


def rows_of(rng: np.random.Generator, rows: int, width: int) -> Array:
    return rng.standard_normal((rows, width), np.float32) * rng.exponential(1, (rows, 1)).astype(
        np.float32
    )


@pytest.mark.parametrize("machine", MACHINES)
def test_int8_products_are_the_meaning_bit_for_bit(machine: str) -> None:
    rng = np.random.default_rng(0)
    for rows, width, out in SHAPES:
        x, weight = rows_of(rng, rows, width), stored("LinearInt8", rows_of(rng, out, width))
        expected = linear.linear_int8_rows(x, *weight)
        np.testing.assert_array_equal(product("LinearInt8", x, weight, machine=machine), expected)


@pytest.mark.parametrize("machine", MACHINES)
def test_int4_products_are_the_meaning_up_to_the_order_of_a_sum(machine: str) -> None:
    rng = np.random.default_rng(1)
    for rows, width, out in SHAPES:
        x, weight = rows_of(rng, rows, width), stored("LinearInt4", rows_of(rng, out, width))
        expected = linear.linear_int4(x, *weight)
        found = product("LinearInt4", x, weight, machine=machine)
        assert np.abs(found - expected).max() <= 2e-6 * np.abs(expected).max()


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("kind", sorted(QUANTISED))
def test_a_row_has_its_own_bits_and_rows_of_zeros_stay_zeros(kind: str, machine: str) -> None:
    rng = np.random.default_rng(2)
    x, weight = rows_of(rng, 13, 96), stored(kind, rows_of(rng, 70, 96))
    alone = np.concatenate(
        [product(kind, x[i : i + 1], weight, machine=machine) for i in range(13)]
    )
    np.testing.assert_array_equal(product(kind, x, weight, machine=machine), alone)
    holes = x.copy()
    holes[[0, 4, 5, 12]], holes[7, 3] = 0, np.nan
    for threads in (1, 2):
        found = product(kind, holes, weight, machine=machine, threads=threads)
        assert (found[[0, 4, 5, 12]] == 0).all()
        assert np.isnan(found[7]).any()
        others = [1, 2, 3, 6, 8, 9, 10, 11]
        np.testing.assert_array_equal(found[others], alone[others])
    assert (product(kind, np.zeros_like(x), weight, machine=machine) == 0).all()


def test_a_product_can_come_by_batch_slot() -> None:
    rng = np.random.default_rng(3)
    x, weight = rows_of(rng, 6, 64), stored("LinearInt8", rows_of(rng, 10, 64))
    flat = product("LinearInt8", x, weight)
    inputs = dict(zip(("x", "w", "s"), (x, *weight), strict=True))
    by_slot = np.empty((2, 3, 10), np.float32)
    session = native_session("LinearInt8", inputs, {"y": by_slot}, M=6, K=64, N=10, B=2)
    np.testing.assert_array_equal(session.run(None, inputs)[0], flat.reshape(2, 3, 10))


@pytest.mark.parametrize(
    ("kind", "operator"),
    [("EmbeddingInt8", linear.EMBEDDING_INT8), ("EmbeddingInt4", linear.EMBEDDING_INT4)],
)
def test_a_vocabulary_is_read_by_rows_and_an_absent_token_is_zeros(
    kind: str, operator: Operator
) -> None:
    rng = np.random.default_rng(4)
    weight = stored(kind, rows_of(rng, 20, 64))
    ids = np.array([3, -1, 0, 19, -1], np.int32)
    inputs = dict(zip(("ids", "w", "s"), (ids, *weight), strict=True))
    out = np.empty((5, 64), np.float32)
    found = native_session(kind, inputs, {"y": out}, M=5, D=64).run(None, inputs)[0]
    expected = np.where(ids[:, None] < 0, 0, operator.meaning(ids, *weight))
    np.testing.assert_array_equal(found, expected)


def normed(kind: str, named: dict[str, Array], machine: str) -> list[Array]:
    outputs = {f"y{i}": np.empty_like(named["x"]) for i in range(len(named) - 1)}
    sizes = {"M": len(named["x"]), "D": named["x"].shape[1], "epsilon": 1e-6}
    session = native_session(kind, named, outputs, machine=machine, **sizes)
    found: list[Array] = session.run(None, named)
    return found


@pytest.mark.parametrize("machine", MACHINES)
def test_norms_are_the_meaning_and_a_row_has_its_own_bits(machine: str) -> None:
    rng = np.random.default_rng(5)
    for rows, width in ((1, 8), (3, 100), (70, 1024)):
        x, added, weight = (rows_of(rng, n, width) for n in (rows, rows, 1))
        w = weight[0]
        (alone,) = normed("RMSNorm", {"x": x, "w": w}, machine)
        close = {"rtol": 2e-6, "atol": 1e-7}
        np.testing.assert_allclose(alone, norm.rms_norm(x, w, 1e-6), **close)
        total, both = normed("AddNorm", {"x": x, "a": added, "w": w}, machine)
        np.testing.assert_array_equal(total, x + added)
        np.testing.assert_allclose(both, norm.rms_norm(x + added, w, 1e-6), **close)
        last = normed("AddNorm", {"x": x[-1:], "a": added[-1:], "w": w}, machine)
        np.testing.assert_array_equal(last[1][0], both[-1])
