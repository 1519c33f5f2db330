"""The gate of the MLP and the functions of vectors that kernels share."""

import ctypes
import platform
import subprocess
from typing import Any

import numpy as np
import pytest

from qwen_mtp.runtime.native import sources
from tests.native import library, native_session
from tests.operators import Array, normal, same_bits
from tests.packages import scratch

# What a compiler may assume of a processor: all it has, or what every one has.
PLAIN = pytest.param(
    "x86-64",
    marks=[
        pytest.mark.slow,
        pytest.mark.skipif(platform.machine() != "x86_64", reason="-march of x86"),
    ],
)
MACHINES = pytest.mark.parametrize("machine", ["native", PLAIN])


@MACHINES
def test_swiglu_is_exact_to_three_ulps_with_the_same_bits_in_any_row(machine: str) -> None:
    width, edges = 4099, [0.0, -0.0, 88.0, -88.0, -150.0, 1e-30, 1e4]
    x = normal(np.random.default_rng(6), 5, 2 * width) * 8
    x[:, : len(edges)] = edges
    x[3] = x[1]
    x[4, 3:5] = np.nan, np.inf
    sessions = [
        native_session(
            "SwiGLU",
            {"x": x[:rows]},
            {"y": x[:rows, :width]},
            threads=2,
            machine=machine,
            M=rows,
            I=width,
        )
        for rows in (1, 5)
    ]
    found = sessions[1].run(None, {"x": x})[0]
    same_bits(found[3], found[1])
    same_bits(found[1:2], sessions[0].run(None, {"x": x[1:2]})[0])
    assert np.isnan(found[4, 3])
    assert np.isinf(found[4, 4])
    gate, up = np.split(x[:4].astype(np.float64), 2, axis=1)
    exact = gate / (1 + np.exp(-gate)) * up
    assert np.all(np.abs(found[:4] - exact) <= 3.5 * np.spacing(np.abs(exact).astype(np.float32)))


@MACHINES
def test_vector_functions_are_those_of_numpy_wherever_an_element_stands(machine: str) -> None:
    functions = _functions(machine)
    x = np.linspace(-87, 88, 100_001, dtype=np.float32)
    wide = x.astype(np.float64)
    truth = {
        "exp": (np.exp(wide), 1.1),
        "sigmoid": (1 / (1 + np.exp(-wide)), 2.6),
        "silu": (wide / (1 + np.exp(-wide)), 2.6),
        "softplus": (np.logaddexp(0, wide), 2.8),
    }
    for name, (exact, ulps) in truth.items():
        found = functions(name, x)
        assert np.all(np.abs(found - exact) <= ulps * np.spacing(np.abs(exact).astype(np.float32)))
        for shift in range(1, 17):
            same_bits(functions(name, x[shift : shift + 21]), found[shift : shift + 21])
    ends = np.array([np.nan, np.inf, -np.inf, 89, -104, -95, -0.0], np.float32)
    with np.errstate(all="ignore"):
        np.testing.assert_allclose(functions("exp", ends), np.exp(ends), rtol=1e-6)


def _functions(machine: str) -> Any:
    """The functions of ``math.h``, compiled for themselves."""
    lines = ['#include "math.h"', "using namespace qwen_mtp::vec;"]
    loop = "for (long i = 0; i < n; i += kLanes) store(y + i, {0}(load(x + i, n - i)), n - i);"
    form = 'extern "C" void of_{0}(const float* x, float* y, long n) {{ ' + loop + " }}"
    lines += [form.format(name) for name in ("exp", "sigmoid", "silu", "softplus")]
    library(machine)  # skips where there is no compiler
    source, binary = scratch() / "functions.cc", scratch() / f"functions-{machine}.so"
    source.write_text("\n".join(lines))
    flags = ["-std=c++20", "-O2", f"-march={machine}", "-ffp-contract=off", "-fPIC", "-shared"]
    command = ["c++", *flags, "-w", f"-I{sources()[0].parent}", "-o", str(binary), str(source)]
    subprocess.run(command, check=True, capture_output=True)
    loaded = ctypes.CDLL(str(binary))

    def call(name: str, x: Array) -> Array:
        x, y = np.ascontiguousarray(x), np.empty_like(x)
        pointers = [ctypes.c_void_p(a.ctypes.data) for a in (x, y)]
        getattr(loaded, f"of_{name}")(*pointers, ctypes.c_long(len(x)))
        return y

    return call
