"""The kernels of Gated DeltaNet: meaning, and the bits of a row wherever it is computed."""

from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
import torch

from qwen_mtp.custom_ops import delta_round
from qwen_mtp.custom_ops.torch_library import ops
from tests.native import native_session
from tests.operators import Array, close, ints, normal, same_bits, tensor
from tests.test_native_math import MACHINES

NAN = np.float32(np.nan)
STATES = ("window", "ssm", "u", "k", "v", "g", "beta")


class Layer:
    """Random weights of a layer and its kernels, one session for each number of rows."""

    def __init__(
        self,
        keys: int = 2,
        ratio: int = 2,
        dims: tuple[int, int] = (24, 40),
        taps: int = 4,
        gate: str = "silu",
        machine: str = "native",
    ) -> None:
        rng = np.random.default_rng(7)
        self.keys, self.heads, (self.key_dim, self.value_dim) = keys, keys * ratio, dims
        self.values = self.heads * self.value_dim
        self.channels = 2 * keys * self.key_dim + self.values
        conv, decay = normal(rng, self.channels, 1, taps), -np.exp(normal(rng, self.heads))
        self.vectors = [conv, decay, normal(rng, self.heads), normal(rng, self.value_dim)]
        self.taps, self.gate, self.machine = taps, gate, machine
        self.sessions: dict[Any, ort.InferenceSession] = {}

    def inputs(self, rng: np.random.Generator, slots: int, rows: int) -> list[Array]:
        width = self.channels + self.values
        return [normal(rng, slots * rows, width), normal(rng, slots * rows, 2 * self.heads) * 3]

    def states(self, rng: np.random.Generator, slots: int, kept: int) -> list[Array]:
        key = normal(rng, slots, kept, self.keys, self.key_dim)
        return [
            normal(rng, slots, self.taps - 1, self.channels),
            normal(rng, slots, self.heads, self.key_dim, self.value_dim),
            normal(rng, slots, kept, self.channels),
            key / np.linalg.norm(key, axis=-1, keepdims=True),
            normal(rng, slots, kept, self.heads, self.value_dim),
            -np.abs(normal(rng, slots, kept, self.heads)),
            rng.random((slots, kept, self.heads), dtype=np.float32),
        ]

    def round(
        self, rows: list[Array], states: list[Array], accepted: Array, *, threads: int = 1
    ) -> list[Array]:
        """The kernel; rows of the stash that it leaves alone are cut off."""
        out = self._run("DeltaRound", rows, states, accepted, threads)
        count = len(rows[0]) // len(accepted)
        return [*out[:3], *(x[:, :count] for x in out[3:])]

    def chunk(self, rows: list[Array], states: list[Array], valid: int) -> list[Array]:
        return self._run("DeltaChunk", rows, states, ints(valid), 2)

    def meaning(self, rows: list[Array], states: list[Array], count: Array) -> list[Array]:
        form = delta_round.delta_round if len(states) > 2 else delta_round.delta_chunk
        return list(form(*rows, *self.vectors, *states, count, 1e-6, self.gate))

    def _run(
        self, kind: str, rows: list[Array], states: list[Array], count: Array, threads: int
    ) -> list[Array]:
        conv, *vectors = self.vectors
        taps = np.ascontiguousarray(conv[:, 0].T)
        args = [*rows, taps, *vectors, *states, count]
        inputs = {f"in{i}": x for i, x in enumerate(args)}
        key = (kind, len(rows[0]), states[-1].shape, threads)
        if key not in self.sessions:
            outs = [np.empty((len(rows[0]), self.values), np.float32), *states]
            self.sessions[key] = native_session(
                kind,
                inputs,
                {f"out{i}": x for i, x in enumerate(outs)},
                threads=threads,
                machine=self.machine,
                **self._attributes(rows[0], states),
            )
        return self.sessions[key].run(None, inputs)  # type: ignore[no-any-return]

    def _attributes(self, qkvz: Array, states: list[Array]) -> dict[str, int | float]:
        conv, (slots, *_) = self.vectors[0], states[0].shape
        sizes = delta_round._attributes(qkvz, conv, states[1], 1e-6, self.gate)
        kept = {"B": slots, "P": states[2].shape[1]} if len(states) > 2 else {}
        return sizes | kept


def of_slot(rows: list[Array], slots: int, slot: int, count: int) -> list[Array]:
    """The first rows of one slot."""
    return [x.reshape(slots, -1, x.shape[1])[slot, :count] for x in rows]


@MACHINES
@pytest.mark.parametrize(
    ("slots", "rows", "kept", "keys", "ratio", "dims", "taps", "gate"),
    [
        (1, 2, 2, 2, 2, (32, 16), 4, "silu"),
        (3, 4, 5, 3, 1, (16, 8), 4, "sigmoid"),
        (2, 16, 16, 1, 2, (128, 128), 4, "silu"),
        (2, 3, 4, 2, 3, (40, 72), 2, "silu"),
    ],
)
def test_a_round_computes_the_meaning(
    slots: int,
    rows: int,
    kept: int,
    keys: int,
    ratio: int,
    dims: tuple[int, int],
    taps: int,
    gate: str,
    machine: str,
) -> None:
    rng, layer = np.random.default_rng(0), Layer(keys, ratio, dims, taps, gate, machine)
    for accepted in ([0] * slots, [kept, 1, 0][:slots], [1, kept, kept - 1][:slots]):
        given, states = layer.inputs(rng, slots, rows), layer.states(rng, slots, kept)
        expected = layer.meaning(given, states, ints(*accepted))
        found = layer.round(given, states, ints(*accepted), threads=2)
        close(found, [*expected[:3], *(x[:, :rows] for x in expected[3:])], 3e-6)


@pytest.mark.parametrize("gate", ["silu", "sigmoid"])
def test_the_parts_that_other_back_ends_run_compute_the_meaning(gate: str) -> None:
    rng, layer = np.random.default_rng(1), Layer(dims=(16, 8), gate=gate)
    rows, states = layer.inputs(rng, 2, 3), layer.states(rng, 2, 4)
    args = [*rows, *layer.vectors, *states, ints(3, 0), 1e-6, gate]
    close(ops.delta_round(*map(tensor, args)), layer.meaning(rows, states, ints(3, 0)))
    chunk = [layer.inputs(rng, 1, 5), layer.states(rng, 1, 2)[:2]]
    short = [*chunk[0], *layer.vectors, *chunk[1], ints(4), 1e-6, gate]
    close(ops.delta_chunk(*map(tensor, short)), layer.meaning(*chunk, ints(4)))
    for operator, example in ((ops.delta_round, args), (ops.delta_chunk, short)):
        kinds = ("test_schema", "test_faketensor")
        torch.library.opcheck(operator.default, tuple(map(tensor, example)), test_utils=kinds)


@MACHINES
def test_lazy_rounds_of_any_width_leave_the_bits_of_stepping_row_by_row(machine: str) -> None:
    rng, slots, kept = np.random.default_rng(2), 3, 16
    layer = Layer(machine=machine)
    states = layer.states(rng, slots, kept)
    accepted = ints(0, 0, 0)
    # Each slot by itself, one row at a time; what it must do is commit the row before.
    alone = [[x[slot : slot + 1] for x in states] for slot in range(slots)]
    stepped = [0] * slots
    for width, kept_rows in ((4, (2, 4, 0)), (16, (16, 1, 5)), (2, (1, 0, 2)), (1, (1, 1, 1))):
        rows = layer.inputs(rng, slots, width)
        out, *after = layer.round(rows, states, accepted, threads=1 + width % 3)
        out = out.reshape(slots, width, -1)
        for slot, count in enumerate(kept_rows):
            for t in range(count):
                row = [x[t : t + 1] for x in of_slot(rows, slots, slot, width)]
                single, *own = layer.round(row, alone[slot], ints(min(stepped[slot], 1)))
                same_bits(single[0], out[slot, t])
                if t == 0:
                    same_bits(own[:2], [x[slot : slot + 1] for x in after[:2]])
                same_bits([x[0, 0] for x in own[2:]], [x[slot, t] for x in after[2:]])
                alone[slot] = [*own[:2], *(np.repeat(x, kept, axis=1) for x in own[2:])]
                stepped[slot] += 1
        accepted, states = ints(*kept_rows), [*after[:2], *map(poisoned_tail(kept), after[2:])]


def poisoned_tail(kept: int) -> Any:
    """Lengthens a stash to ``kept`` rows of NaN."""
    return lambda x: np.pad(
        x, [(0, 0), (0, kept - x.shape[1])] + [(0, 0)] * (x.ndim - 2), constant_values=NAN
    )


def test_rejected_rows_and_neighbours_reach_nothing_and_a_commit_of_none_keeps_the_state() -> None:
    rng, layer = np.random.default_rng(3), Layer(dims=(16, 16))
    rows, states = layer.inputs(rng, 2, 2), layer.states(rng, 2, 4)
    clean = layer.round(rows, states, ints(2, 0))
    for x in states[2:]:
        x[0, 2:], x[1] = NAN, NAN
    same_bits(layer.round(rows, states, ints(2, 0)), clean)
    same_bits([x[1] for x in clean[1:3]], [x[1] for x in states[:2]])
    for x in (*rows, *states):
        x[len(x) // 2 :] = NAN  # the second slot
    found = layer.round(rows, states, ints(2, 4))
    same_bits(found[0][:2], clean[0][:2])
    same_bits([x[0] for x in found[1:]], [x[0] for x in clean[1:]])


@MACHINES
@pytest.mark.parametrize("valid", [0, 1, 7, 20])
def test_a_chunk_computes_the_meaning_with_the_bits_of_one_row_rounds(
    valid: int, machine: str
) -> None:
    rng, layer = np.random.default_rng(4), Layer(dims=(24, 80), machine=machine)
    rows, states = layer.inputs(rng, 1, 20), layer.states(rng, 1, 1)
    start = [x.copy() for x in states[:2]]
    expected = layer.meaning(rows, start, ints(valid))
    for x in rows:
        x[valid:] = NAN
    out, window, ssm = layer.chunk(rows, start, valid)
    close((window, ssm), expected[1:], 3e-6)
    if valid:
        close(out[:valid], expected[0][:valid], 3e-6)
    assert np.isfinite(out).all()
    for t in range(valid):
        one, *states = layer.round([x[t : t + 1] for x in rows], states, ints(min(t, 1)))
        same_bits(one[0], out[t])
    if valid:
        _, *states = layer.round([x[:1] for x in rows], states, ints(1))
    same_bits((window, ssm), states[:2])


@pytest.mark.parametrize("kind", ["DeltaRound", "DeltaChunk"])
def test_states_change_in_place(kind: str) -> None:
    rng, layer = np.random.default_rng(5), Layer(dims=(16, 72))
    rows, states = layer.inputs(rng, 1, 3), layer.states(rng, 1, 4)
    if kind == "DeltaRound":
        expected = layer.round(rows, states, ints(3))
    else:
        states = states[:2]
        expected = layer.chunk(rows, states, 3)
    session = next(iter(layer.sessions.values()))
    taps = np.ascontiguousarray(layer.vectors[0][:, 0].T)
    args = [*rows, taps, *layer.vectors[1:], *states, ints(3)]
    binding, held = (
        session.io_binding(),
        [ort.OrtValue.ortvalue_from_numpy(x.copy()) for x in args],
    )
    for i, value in enumerate(held):
        binding.bind_ortvalue_input(f"in{i}", value)
    binding.bind_ortvalue_output("out1", held[6])
    binding.bind_ortvalue_output("out2", held[7])
    for name in ("out0", *(f"out{i}" for i in range(3, len(states) + 1))):
        binding.bind_output(name)
    session.run_with_iobinding(binding)
    same_bits((held[6].numpy(), held[7].numpy()), expected[1:3])
