"""Writes ``golden.npz``: what the torch definition computes on a package's own weights.

A script of a few passes (prefill, then draft and verify of every bucket with forced commits) runs
through the torch modules, whose operators are their NumPy meanings. It starts from zero state, so
the inputs in the file are all that it needs. Inputs and outputs go into the package, so that a
machine without torch, or an NPU, can be held against the one definition. Weights in float32 or
integers are views of the files' pages; nothing is copied. Half-precision ones are widened: the
values are those of float32 arithmetic on the package's weights.

How exactly a graph can follow depends on the model: where activations are rounded, a difference in
the last bit of a sum may become a whole step, and the steps add up over the layers. So the script
runs a second time, disturbed: for float32 graphs the recurrent state starts ``NUDGE`` away from
zero, for half-precision ones the result of every operator is rounded; keys and values are stored
as the package stores them. How far each tensor moves by
that is recorded as well.
"""

from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from qwen_mtp.checks_golden import golden_path, results
from qwen_mtp.config import ModelConfig
from qwen_mtp.golden_passes import HALVES, Player, Result
from qwen_mtp.graphs.manifest import FileEntry, PackageManifest, load_manifest
from qwen_mtp.graphs.model import Model
from qwen_mtp.graphs.spec import (
    Geometry,
    StateSpec,
    TensorSpec,
    WeightFormat,
    state_specs,
)
from qwen_mtp.graphs.weights import StoredTensor, file_bytes
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
ROW_VALUES = 512  # and of hidden rows, logits and rows written to pools, where positions show
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
    geometry = _small(manifest.geometry)
    too_long = geometry.max_model_len > manifest.geometry.max_model_len
    if _wide_bytes(manifest.weights) > LARGEST or too_long:
        return False
    arrays = _Recorder(manifest, geometry, _load(directory, manifest)).play(progress)
    np.savez_compressed(directory / golden_path(manifest), allow_pickle=False, **arrays)
    _list_file(directory, manifest)
    return True


def _rounds(geometry: Geometry) -> tuple[int, ...]:
    """Rows of each verify pass; what one leaves is committed by the next."""
    buckets = geometry.row_buckets
    return buckets if len(buckets) > 1 else 2 * buckets


def _small(geometry: Geometry) -> Geometry:
    """The same graphs in float32 for the recorded slots, over pools that hold the script.

    A slot's values do not depend on how many there are, and its block ids are valid in both.
    """
    half = geometry.format in ("fp16", "bf16")
    return replace(
        geometry,
        max_num_seqs=min(LIVE, geometry.max_num_seqs),
        max_model_len=PROMPT + sum(_rounds(geometry)) + 1,
        prefill_chunk=min(PROMPT, geometry.prefill_chunk),
        format="fp32" if half else geometry.format,
        dtype="float32",
        kv_dtype="float32",
    )


def _wide_bytes(stored: tuple[StoredTensor, ...]) -> int:
    """Bytes of the weights where half-precision ones are widened."""
    return file_bytes(stored) + sum(t.nbytes for t in stored if t.dtype in HALVES)


def _load(directory: Path, manifest: PackageManifest) -> dict[str, torch.Tensor]:
    return {t.name: _mapped(directory / manifest.weight_path(t.name), t) for t in manifest.weights}


def _mapped(path: Path, stored: StoredTensor) -> torch.Tensor:
    """A view of the file's pages, private because torch wants writable memory."""
    data = np.memmap(path, np.uint8, "c", stored.offset, (stored.nbytes,))
    flat = torch.from_numpy(data).view(getattr(torch, stored.dtype))
    tensor = flat.reshape(stored.shape)
    return tensor.float() if stored.dtype in HALVES else tensor


def _list_file(directory: Path, manifest: PackageManifest) -> None:
    name = golden_path(manifest)
    data = (directory / name).read_bytes()
    entry = FileEntry(path=name, bytes=len(data), sha256=sha256(data).hexdigest())
    others = (file for file in manifest.files if file.path != name)
    files = tuple(sorted((*others, entry), key=lambda file: file.path))
    msgspec.structs.replace(manifest, files=files).save(directory)


def _model(config: ModelConfig, geometry: Geometry, weights: dict[str, torch.Tensor]) -> Model:
    """The torch definition on weights that are shared, not copied."""
    with torch.device("meta"):
        model = Model(config, geometry)
    own = {name: weights[name] for name in model.state_dict()}
    model.load_state_dict(own, assign=True)
    return model


class _Recorder:
    """Plays the script through the torch modules and keeps what went in and came out."""

    def __init__(
        self, manifest: PackageManifest, geometry: Geometry, weights: dict[str, torch.Tensor]
    ) -> None:
        rounded = replace(geometry, kv_dtype=manifest.geometry.kv_dtype)
        model, twin = (_model(manifest.config, g, weights) for g in (geometry, rounded))
        self._geometry, self._config = geometry, manifest.config
        self._random = np.random.default_rng(SEED)
        dtype = manifest.geometry.dtype
        self._player = Player(model, self._zeros(0.0, geometry))
        nudge = NUDGE[geometry.format] if dtype == "float32" else 0.0
        self._twin = Player(twin, self._zeros(nudge, rounded), dtype)
        slots, blocks = geometry.max_num_seqs, np.arange(1, geometry.num_blocks, dtype=np.int32)
        self._table = blocks.reshape(slots, geometry.table_width)
        self._arrays: dict[str, Array] = {}
        self._count = 0
        self._start, self._pending = (np.zeros(slots, np.int32) for _ in range(2))
        self._rows = np.ones(slots, np.int32)
        self._next = np.full((slots, geometry.max_rows), -1, np.int32)

    def play(self, progress: Progress) -> dict[str, Array]:
        """The whole script."""
        rounds, slots = _rounds(self._geometry), len(self._table)
        drafts = {rows: self._drafts_before(rows) for rows in rounds}
        passes = slots + sum(1 + len(drafts[rows]) for rows in rounds)
        progress.phase("golden values", passes, "passes")
        for slot in range(slots):
            self._prefill(slot)
            progress.advance(1)
        for rows in rounds:
            for lookahead in drafts[rows]:
                self._draft(lookahead)
                progress.advance(1)
            self._verify(rows)
            progress.advance(1)
        return self._arrays

    def _drafts_before(self, rows: int) -> list[int]:
        """Lookaheads whose rounds are verified in this bucket."""
        buckets = self._geometry.row_buckets
        return [k for k in self._geometry.lookaheads if min(b for b in buckets if b > k) == rows]

    def _zeros(self, nudge: float, geometry: Geometry) -> dict[str, Array]:
        """First states: zeros, or a little off in the windows and recurrent states."""
        states = state_specs(self._config, geometry)
        return {state.name: self._first(state, nudge) for state in states}

    def _first(self, state: StateSpec, nudge: float) -> Array:
        data = np.zeros(state.shape, state.dtype)
        if nudge and state.kind in ("conv", "ssm"):
            data[:] = nudge * self._random.standard_normal(data.shape, np.float32)
        return data

    def _prefill(self, slot: int) -> None:
        """A chunk whose last row is padding, so that padding is covered too."""
        chunk = self._geometry.prefill_chunk
        count = max(1, chunk - 1)
        ids = np.full((1, chunk), -1, np.int32)
        ids[0, :count] = self._ids(count)
        given = {"token_ids": ids, "num_valid": [count], "num_draft_rows": [count - 1]}
        given["next_token_ids"] = np.roll(ids, -1)
        given["block_table"] = self._table[slot : slot + 1]
        own, twin = (p.run("prefill", slot, given) for p in (self._player, self._twin))
        for player, result in ((self._player, own), (self._twin, twin)):
            player.hidden[slot, 0] = result.outputs["hidden"][0]
        self._start[slot], self._next[slot, 0] = count, self._ids(1)[0]
        self._keep(own, twin, np.array([count]))

    def _draft(self, lookahead: int) -> None:
        given = {"tokens": self._next, "num_rows": self._rows, "block_table": self._table}
        given["context_len"] = self._start - self._rows
        graph = f"mtp_draft_k{lookahead}"
        own, twin = (p.run(graph, 0, given) for p in (self._player, self._twin))
        self._keep(own, twin, self._rows)

    def _verify(self, rows: int) -> None:
        """Slot 0 runs all rows and commits them; slot 1 runs and commits one fewer."""
        ids = np.full((len(self._rows), rows), -1, np.int32)
        following = np.full_like(self._next, -1)
        for slot, own in enumerate(ids):
            last, new = self._next[slot, self._rows[slot] - 1], self._ids(rows)
            own[: rows - slot] = [last, *new[1 : rows - slot]]
            following[slot, : rows - slot] = [*new[1 : rows - slot], new[0]]
        valid = (ids >= 0).sum(axis=1).astype(np.int32)
        given = {"token_ids": ids, "num_valid": valid, "num_accepted": self._pending}
        given |= {"context_len": self._start, "block_table": self._table}
        graph = f"target_verify_r{rows}"
        found = [p.run(graph, 0, given) for p in (self._player, self._twin)]
        for player, result in zip((self._player, self._twin), found, strict=True):
            player.hidden = result.outputs["hidden"]
        self._keep(found[0], found[1], valid)
        self._next = following
        self._start = self._start + valid
        self._rows = self._pending = valid

    def _ids(self, count: int) -> list[int]:
        ids: list[int] = self._random.integers(0, self._config.vocab_size, count).tolist()
        return ids

    def _keep(self, own: Result, twin: Result, live: Array) -> None:
        """Record a pass; ``live`` are the rows of each slot that mean something."""
        prefix = f"{self._count:02}/{own.spec.name}/{own.slot}"
        self._count += 1
        for name, data in own.inputs.items():
            self._arrays[f"{prefix}/in/{name}"] = data
        for tensor in results(own.spec):
            data, name = own.outputs[tensor.name], tensor.name
            if tensor.dtype == "int32":
                self._arrays[f"{prefix}/out/{name}"] = data
                continue
            places = self._choose(own, tensor, live)
            values = data[tuple(places)]
            moved = float(np.linalg.norm(twin.outputs[name][tuple(places)] - values))
            size = max(float(np.linalg.norm(values)), 1e-30)
            if own.spec.kind == "prefill" and tensor.state and not _pool(tensor):
                places[0] += own.slot * tensor.shape[0]
            self._arrays[f"{prefix}/out/{name}"] = values
            self._arrays[f"{prefix}/at/{name}"] = places.astype(np.int32)
            self._arrays[f"{prefix}/moves/{name}"] = np.array(moved / size)

    def _choose(self, run: Result, tensor: TensorSpec, live: Array) -> Array:
        """Places ``[ndim, n]``: an even choice among nonzero values that a live row made."""
        data = run.outputs[tensor.name]
        kept = data != 0
        if _pool(tensor):
            kept &= data != run.before[tensor.name]
            size = self._geometry.block_size  # block 0 belongs to nobody
            paged = self._geometry.layout != "lazy"
            (kept[:1] if paged else kept[:, :size])[:] = False
        elif run.spec.kind != "prefill":
            self._drop_dead_rows(tensor, kept, live)
        places = np.array(np.nonzero(kept))
        most = STATE_VALUES if tensor.state and not _pool(tensor) else ROW_VALUES
        chosen = np.linspace(0, places.shape[1] - 1, min(most, places.shape[1])).astype(int)
        return places[:, chosen]

    def _drop_dead_rows(self, tensor: TensorSpec, kept: Array, live: Array) -> None:
        """Leave out what rows beyond the valid ones made."""
        by_row = self._geometry.layout == "slots"
        if ".stash." in tensor.name or tensor.name in ("hidden", "logits"):
            kept[np.arange(kept.shape[1]) >= live[:, None]] = False
        elif by_row and tensor.name.endswith(".ssm.out"):
            states = kept.reshape(len(live), -1, *kept.shape[1:])
            states[np.arange(states.shape[1]) >= live[:, None]] = False
        elif by_row and tensor.name.endswith(".conv.out"):
            columns = np.arange(kept.shape[1]) - (self._config.conv_kernel - 2)
            kept[columns >= live[:, None]] = False


def _pool(tensor: TensorSpec) -> bool:
    return tensor.name.endswith((".key.out", ".value.out"))
