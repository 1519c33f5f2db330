"""Writes ``golden.npz``: what the torch definition computes on a package's own weights.

A script of a few passes (prefill, then draft and verify of every bucket with forced commits) runs
through the torch modules, whose operators are their NumPy meanings. Inputs and outputs go into the
package, so that a machine without torch can hold the compiled graphs against the one definition.
Weights are views of the weight file's pages; nothing is copied.

How exactly a graph can follow depends on the model: where activations are rounded, a difference in
the last bit of a sum may become a whole step, and the steps add up over the layers. So every slot
has a twin whose recurrent state starts ``NUDGE`` away from zero, and how far each tensor of the
twin has moved is recorded as well.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from qwen_mtp.checks_golden import GOLDEN
from qwen_mtp.graphs.manifest import FileEntry, PackageManifest, load_manifest
from qwen_mtp.graphs.model import Graph, Model
from qwen_mtp.graphs.signature import graph_specs
from qwen_mtp.graphs.spec import (
    Geometry,
    GraphSpec,
    StateSpec,
    TensorSpec,
    WeightFormat,
    state_specs,
)
from qwen_mtp.graphs.weights import StoredTensor
from qwen_mtp.progress import Progress, Silent

Array = npt.NDArray[Any]
LARGEST = 3 << 30  # bytes of weights; NumPy takes seconds a pass up to here, minutes beyond
PROMPT = 5
LIVE = 2  # slots that are recorded
# fp32: the last bits. int8, int4: enough to move some roundings in every layer, as another order
# of the sums does in time; a smaller one moves none until late and says too little.
NUDGE: dict[WeightFormat, float] = {"fp32": 3e-8, "int8": 1e-6, "int4": 1e-6}
SEED = 20
STATE_VALUES = 32  # values kept of each state tensor
ROW_VALUES = 512  # and of hidden rows and logits
_SILENT = Silent()


def write_golden(directory: Path, progress: Progress = _SILENT) -> bool:
    """Write ``golden.npz`` into a complete package directory and list it in the manifest.

    Args:
        directory: What ``write_package`` filled.
        progress: Gets one phase, counted in passes.

    Returns:
        Whether it was written. A package with more than ``LARGEST`` bytes of weights, or too
        short for the script, goes without; ``verify`` says so.

    Raises:
        OSError: The file cannot be written.
    """
    manifest = load_manifest(directory)
    if manifest.ascend is not None:
        return False
    geometry = _small(manifest.geometry)
    size = (directory / manifest.weights_file).stat().st_size
    if size > LARGEST or geometry.max_model_len > manifest.geometry.max_model_len:
        return False
    weights = _load(directory / manifest.weights_file, manifest.weights)
    arrays = _Recorder(manifest, geometry, weights).play(progress)
    np.savez_compressed(directory / GOLDEN, allow_pickle=False, **arrays)
    _list_file(directory, manifest)
    return True


def _small(geometry: Geometry) -> Geometry:
    """The same graphs for the recorded slots and their twins, over pools that hold the script.

    A slot's values do not depend on how many there are, and its block ids are valid in both.
    """
    return replace(
        geometry,
        max_num_seqs=2 * min(LIVE, geometry.max_num_seqs),
        max_model_len=PROMPT + sum(geometry.row_buckets) + 1,
        prefill_chunk=min(PROMPT, geometry.prefill_chunk),
    )


def _load(path: Path, stored: tuple[StoredTensor, ...]) -> dict[str, torch.Tensor]:
    data = np.memmap(path, np.uint8, mode="c")  # private pages: torch wants writable memory
    return {
        t.name: torch.from_numpy(
            data[t.offset : t.offset + t.nbytes].view(t.dtype).reshape(t.shape)
        )
        for t in stored
    }


def _list_file(directory: Path, manifest: PackageManifest) -> None:
    data = (directory / GOLDEN).read_bytes()
    entry = FileEntry(path=GOLDEN, bytes=len(data), sha256=sha256(data).hexdigest())
    others = (file for file in manifest.files if file.path != GOLDEN)
    files = tuple(sorted((*others, entry), key=lambda file: file.path))
    msgspec.structs.replace(manifest, files=files).save(directory)


@dataclass(frozen=True, slots=True)
class _Result:
    """One run: inputs that are not state, and all outputs, by name."""

    spec: GraphSpec
    slot: int
    inputs: dict[str, Array]
    outputs: dict[str, Array]


class _Recorder:
    """Plays the script through the torch modules and keeps what went in and came out."""

    def __init__(
        self, manifest: PackageManifest, geometry: Geometry, weights: dict[str, torch.Tensor]
    ) -> None:
        with torch.device("meta"):
            self._model = Model(manifest.config, geometry)
        own = {name: weights[name] for name in self._model.state_dict()}
        self._model.load_state_dict(own, assign=True)
        self._geometry, self._config = geometry, manifest.config
        self._specs = {spec.name: spec for spec in graph_specs(manifest.config, geometry)}
        self._random = np.random.default_rng(SEED)
        self._states = {s.name: self._first(s) for s in state_specs(manifest.config, geometry)}
        slots, self._live = geometry.max_num_seqs, geometry.max_num_seqs // 2
        blocks = np.arange(1, geometry.num_blocks, dtype=np.int32)
        self._table = blocks.reshape(slots, geometry.table_width)
        self._arrays: dict[str, Array] = {}
        self._count = 0
        self._start, self._pending = (np.zeros(slots, np.int32) for _ in range(2))
        self._rows = np.ones(slots, np.int32)
        self._next = np.full((slots, geometry.max_rows), -1, np.int32)
        self._hidden = np.zeros((*self._next.shape, manifest.config.hidden_size), np.float32)

    def play(self, progress: Progress) -> dict[str, Array]:
        """The whole script."""
        buckets, lookaheads = self._geometry.row_buckets, self._geometry.lookaheads
        progress.phase("golden values", self._live + len(buckets) + len(lookaheads), "passes")
        for slot in range(self._live):
            self._prefill(slot)
            progress.advance(1)
        for rows in buckets:
            if rows - 1 in lookaheads:
                self._draft(rows - 1)
                progress.advance(1)
            self._verify(rows)
            progress.advance(1)
        return self._arrays

    def _first(self, state: StateSpec) -> Array:
        """Zeros; a little off in the windows and recurrent states of the twins."""
        data = np.zeros(state.shape, np.float32)
        if state.kind in ("conv", "ssm"):
            twins = data[len(data) // 2 :]
            twins[:] = NUDGE[self._geometry.format] * self._random.standard_normal(
                twins.shape, np.float32
            )
        return data

    def _prefill(self, slot: int) -> None:
        """A chunk whose last row is padding, so that padding is covered too."""
        chunk = self._geometry.prefill_chunk
        count = max(1, chunk - 1)
        ids = np.full((1, chunk), -1, np.int32)
        ids[0, :count] = self._ids(count)
        given = {"token_ids": ids, "num_valid": [count], "num_draft_rows": [count - 1]}
        given["next_token_ids"] = np.roll(ids, -1)
        following = self._ids(1)
        results = []
        for own in (slot, slot + self._live):
            table = self._table[own : own + 1]
            results.append(self._run("prefill", own, given | {"block_table": table}))
            self._start[own], self._next[own, 0] = count, following[0]
            self._hidden[own, 0] = results[-1].outputs["hidden"][0]
        self._keep(results[0], results[1], np.array([count]))

    def _draft(self, lookahead: int) -> None:
        given = {"tokens": self._next, "num_rows": self._rows, "hidden": self._hidden}
        given["context_len"] = self._start - self._rows
        given["block_table"] = self._table
        result = self._run(f"mtp_draft_k{lookahead}", 0, given)
        self._keep(result, result, self._rows)

    def _verify(self, rows: int) -> None:
        """Slot 0 runs all rows and commits them; slot 1 runs and commits one fewer."""
        ids = np.full((len(self._rows), rows), -1, np.int32)
        following = np.full_like(self._next, -1)
        for slot in range(self._live):
            last, new = self._next[slot, self._rows[slot] - 1], self._ids(rows)
            for own in (slot, slot + self._live):
                ids[own, : rows - slot] = [last, *new[1 : rows - slot]]
                following[own, : rows - slot] = [*new[1 : rows - slot], new[0]]
        valid = (ids >= 0).sum(axis=1).astype(np.int32)
        given = {"token_ids": ids, "num_valid": valid, "num_accepted": self._pending}
        given |= {"context_len": self._start, "block_table": self._table}
        result = self._run(f"target_verify_r{rows}", 0, given)
        self._keep(result, result, valid)
        self._next, self._hidden = following, result.outputs["hidden"]
        self._start = self._start + valid
        self._rows = self._pending = valid

    def _ids(self, count: int) -> list[int]:
        ids: list[int] = self._random.integers(0, self._config.vocab_size, count).tolist()
        return ids

    def _run(self, graph: str, slot: int, given: Mapping[str, Any]) -> _Result:
        spec, inputs, outputs = self._specs[graph], {}, {}
        for tensor in spec.inputs:
            view = tensor.state is not None
            inputs[tensor.name] = self._view(tensor, slot) if view else _input(tensor, given)
        with torch.no_grad():
            flat = (torch.from_numpy(data.copy()) for data in inputs.values())
            results = Graph(self._model, spec)(*flat)
        for tensor, result in zip(spec.outputs, results, strict=True):
            outputs[tensor.name] = result.numpy()
            if tensor.state is not None:
                self._view(tensor, slot)[:] = outputs[tensor.name]
        own = {t.name: inputs[t.name] for t in spec.inputs if t.state is None}
        return _Result(spec, slot, own, outputs)

    def _view(self, tensor: TensorSpec, slot: int) -> Array:
        assert tensor.state is not None
        whole: Array = self._states[tensor.state]
        return whole if whole.shape == tensor.shape else whole[slot : slot + 1]

    def _keep(self, own: _Result, twin: _Result, live: Array) -> None:
        """Record a pass of the recorded slots; ``live`` are the rows that mean something."""
        prefix = f"{self._count:02}/{own.spec.name}/{own.slot}"
        self._count += 1
        batched = own is twin
        for name, data in own.inputs.items():
            self._arrays[f"{prefix}/in/{name}"] = data[: self._live]
        for tensor in own.spec.outputs:
            data, name = own.outputs[tensor.name], tensor.name
            if tensor.dtype == "int32":
                self._arrays[f"{prefix}/out/{name}"] = data[: self._live]
                continue
            places = self._choose(own.spec, tensor, data, live)
            values, across = data[tuple(places)], places.copy()
            if _pool(tensor):
                across[1] += self._live * self._geometry.table_width * self._geometry.block_size
            elif batched:
                across[0] += self._live
            elif tensor.state:
                places[0] += own.slot
            moved = float(np.linalg.norm(twin.outputs[name][tuple(across)] - values))
            size = max(float(np.linalg.norm(values)), 1e-30)
            self._arrays[f"{prefix}/out/{name}"] = values
            self._arrays[f"{prefix}/at/{name}"] = places.astype(np.int32)
            self._arrays[f"{prefix}/moves/{name}"] = np.array(moved / size)

    def _choose(self, spec: GraphSpec, tensor: TensorSpec, data: Array, live: Array) -> Array:
        """Places ``[ndim, n]``: an even choice among nonzero values that a live row made."""
        kept = data != 0
        if _pool(tensor):
            size = self._geometry.block_size  # block 0 belongs to nobody, the last ones to twins
            kept[:, :size] = kept[:, (1 + self._live * self._table.shape[1]) * size :] = False
        elif spec.kind != "prefill":
            kept[self._live :] = False
            if ".stash." in tensor.name or tensor.name in ("hidden", "logits"):
                kept[np.arange(data.shape[1]) >= live[:, None]] = False
        places = np.array(np.nonzero(kept))
        most = STATE_VALUES if tensor.state else ROW_VALUES
        chosen = np.linspace(0, places.shape[1] - 1, min(most, places.shape[1])).astype(int)
        return places[:, chosen]


def _input(tensor: TensorSpec, given: Mapping[str, Any]) -> Array:
    absent = {"stop_ids": -1, "top_p": 1}.get(tensor.name, 0)
    data = np.full(tensor.shape, absent, tensor.dtype)
    data[:] = given.get(tensor.name, absent)
    return data


def _pool(tensor: TensorSpec) -> bool:
    return tensor.name.endswith((".key.out", ".value.out"))
