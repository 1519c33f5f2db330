"""The graphs of a package against ``golden.npz``, the values of the torch definition."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import numpy.typing as npt

from qwen_mtp.checks_bench import Bench
from qwen_mtp.checks_report import Check
from qwen_mtp.graphs.manifest import PackageManifest
from qwen_mtp.graphs.spec import Activation, Geometry, GraphSpec, TensorSpec, WeightFormat
from qwen_mtp.progress import Progress
from qwen_mtp.runtime.package import Package

Array = npt.NDArray[Any]
GOLDEN = "golden.npz"
ASCEND_GOLDEN = f"ascend/{GOLDEN}"  # beside the models: it goes to the device with them
# Relative error of a tensor, ||got - wanted|| / ||wanted||, that is always allowed.
# fp32: sums in another order.
# int8, int4: sums in another order move an activation across a rounding boundary now and then,
# which changes it by a whole step (1/127 of the largest in its row or block): one such step moves
# a row of 64 by 3e-3 and what is computed from it by more.
FLOOR: dict[WeightFormat, float] = {"fp32": 1e-4, "int8": 5e-2, "int4": 5e-2}
# float16, bfloat16: every activation is rounded, and the residual stream adds up what that does.
HALF_FLOOR: dict[Activation, float] = {"float32": 0.0, "float16": 2e-3, "bfloat16": 1.6e-2}
# Where the definition itself moves by more when it is disturbed (recorded beside the values),
# this many times as much is allowed, up to what no rounding explains.
MOVES, CEILING = 4, 0.5


def golden_path(manifest: PackageManifest) -> str:
    """Where the values lie in a package."""
    return GOLDEN if manifest.ascend is None else ASCEND_GOLDEN


def tolerance(geometry: Geometry) -> float:
    """Relative error of a tensor that is always allowed."""
    halves = HALF_FLOOR[geometry.dtype], HALF_FLOOR[geometry.pool_dtype]
    return max(FLOOR.get(geometry.format, 0.0), *halves)


def results(spec: GraphSpec) -> tuple[TensorSpec, ...]:
    """The outputs of a graph, then the states that it changes in place, named like outputs."""
    inputs = {tensor.name: tensor for tensor in spec.inputs}
    changed = (inputs[name] for name in spec.in_place)
    return (
        *spec.outputs,
        *(TensorSpec(f"{t.name}.out", t.dtype, t.shape, t.state) for t in changed),
    )


@dataclass(frozen=True, slots=True)
class Pass:
    """One recorded run of a graph.

    Attributes:
        graph: Its name.
        slot: For a prefill, the batch slot.
        inputs: Inputs that are not state, by name.
        values: Outputs by name: integers whole, of others some values.
        places: Coordinates ``[ndim, n]`` of those values.
        moves: How far, relatively, those values of the definition move when it is disturbed.
    """

    graph: str
    slot: int
    inputs: Mapping[str, Array]
    values: Mapping[str, Array]
    places: Mapping[str, Array]
    moves: Mapping[str, Array]


class Replay:
    """Runs the recorded passes and compares.

    Attributes:
        max_logit_error: Largest absolute difference of a logit so far.
        max_error: Largest relative error of a tensor so far.
        allowed: What was allowed where it occurred.
    """

    def __init__(self, bench: Bench) -> None:
        """Clear the slots, as the recording did; pools are written before they are read."""
        self.max_logit_error = self.max_error = self.allowed = 0.0
        self._bench, self._engine = bench, bench.engine
        self._floor = tolerance(bench.geometry)
        for slot in range(bench.slots):
            self._engine.clear_slot(slot)

    def run(self, step: Pass) -> str | None:
        """Run one pass; the first tensor that differs by more than the tolerance."""
        self._bench.neutral(step.graph)
        for name, data in step.inputs.items():
            if name != "block_table":
                buffer = self._engine.buffer(step.graph, name)
                buffer[tuple(slice(0, size) for size in data.shape)] = data
        self._engine.run(step.graph, self._table(step), step.slot)
        flipped = None
        if step.graph.startswith("mtp_draft"):
            flipped = self._first_flip(step)
        for tensor in results(self._engine.package.graph(step.graph)):
            if flipped is not None and _after(tensor, flipped):
                continue
            if (problem := self._compare(step, tensor)) is not None:
                return f"{step.graph}: {problem}"
        return None

    def _table(self, step: Pass) -> Array:
        """The recorded rows of the block table; idle slots own no blocks."""
        recorded = step.inputs["block_table"]
        if step.graph == "prefill":
            return recorded
        table = np.zeros((self._bench.slots, recorded.shape[1]), np.int32)
        table[: len(recorded)] = recorded
        return table

    def _first_flip(self, step: Pass) -> int | None:
        """First draft that differs: what follows it has another history."""
        wanted = step.values["draft_ids"]
        found = self._engine.buffer(step.graph, "draft_ids")[: len(wanted)]
        columns = np.flatnonzero((wanted != found).any(axis=0))
        return int(columns[0]) if len(columns) else None

    def _compare(self, step: Pass, tensor: TensorSpec) -> str | None:
        wanted, name = step.values[tensor.name], tensor.name.removesuffix(".out")
        if tensor.dtype == "int32":
            return self._compare_ids(step, tensor.name, wanted)
        whole = (
            self._engine.buffer(step.graph, name)
            if tensor.state is None
            else self._engine.state(tensor.state)
        )
        if wanted.size == 0:
            return None
        found = whole[tuple(step.places[tensor.name])]
        gap = np.abs(found - wanted)
        if "logits" in name:
            self.max_logit_error = float(np.fmax(self.max_logit_error, gap.max()))
        error = float(np.linalg.norm(gap) / np.linalg.norm(wanted))
        allowed = self._allowed(step, tensor.name)
        if error > self.max_error:
            self.max_error, self.allowed = error, allowed
        if error <= allowed:  # false for a NaN
            return None
        return f"{name} is off by {error:.1e} (allowed {allowed:.1e})"

    def _allowed(self, step: Pass, name: str) -> float:
        return max(self._floor, min(MOVES * float(step.moves[name]), CEILING))

    def _compare_ids(self, step: Pass, name: str, wanted: Array) -> str | None:
        found = self._engine.buffer(step.graph, name)
        if name == "num_accepted_drafts":  # follows from the tokens, which are compared
            return None
        for slot in range(len(wanted)):
            columns = np.flatnonzero(found[slot] != wanted[slot])
            if len(columns) == 0:
                continue
            j = int(columns[0])
            pair = int(found[slot, j]), int(wanted[slot, j])
            if not self._near_tie(step, name, slot, j, pair):
                return f"{name}[{slot}, {j}] is {pair[0]}, not {pair[1]}, and no near tie"
        return None

    def _near_tie(self, step: Pass, name: str, slot: int, j: int, pair: tuple[int, int]) -> bool:
        """Whether two ids are as likely as the tolerance can tell."""
        if min(pair) < 0:
            return False
        draft = name == "draft_ids"
        source = f"draft_logits.{j}" if draft else "logits"
        logits = self._engine.buffer(step.graph, source)
        row = logits[slot] if draft else logits[slot, j]
        if draft:
            ids = self._engine.package.draft_ids()
            if not set(pair) <= set(ids.tolist()):
                return False
            pair = int(np.searchsorted(ids, pair[0])), int(np.searchsorted(ids, pair[1]))
        gap = abs(float(row[pair[0]]) - float(row[pair[1]]))
        return gap <= 2 * self._allowed(step, source) * float(np.abs(row).max())


def check_golden(bench: Bench, progress: Progress) -> tuple[Check, float | None]:
    """Replay the recording; also the largest difference of a logit."""
    manifest = bench.engine.package.manifest
    if golden_path(manifest) not in {file.path for file in manifest.files}:
        reason = "no golden.npz: exported without, too large a model, or too short a max_model_len"
        return Check("golden", True, f"skipped: {reason}"), None
    steps = list(_read(bench))
    progress.phase("verify golden values", len(steps), "passes")
    missing = {graph.name for graph in manifest.graphs} - {step.graph for step in steps}
    if missing:
        return Check("golden", False, f"{GOLDEN} has no values for {sorted(missing)[0]}"), None
    replay = Replay(bench)
    for step in steps:
        if (problem := replay.run(step)) is not None:
            return Check("golden", False, problem), replay.max_logit_error
        progress.advance(1)
    detail = (
        f"{len(steps)} passes within a relative {replay.max_error:.1e} of the torch modules "
        f"(allowed there: {replay.allowed:.1e}), "
        f"logits within an absolute {replay.max_logit_error:.1e}"
    )
    geometry = bench.geometry
    if geometry.layout == "lazy" and geometry.kv_dtype != "float32":
        detail += (
            f" (kv error: the modules keep keys and values in float32, not {geometry.kv_dtype})"
        )
    return Check("golden", True, detail), replay.max_logit_error


def logit_moves(package: Package) -> float | None:
    """How far, relatively, logits of a verify pass move when the definition is disturbed."""
    path = package.directory / golden_path(package.manifest)
    if not path.is_file():
        return None
    with np.load(path, allow_pickle=False) as file:
        return max((float(file[k]) for k in file.files if k.endswith("/moves/logits")), default=0)


def _read(bench: Bench) -> Iterator[Pass]:
    package = bench.engine.package
    path = package.directory / golden_path(package.manifest)
    with np.load(path, allow_pickle=False) as file:
        arrays = {tuple(key.split("/")): file[key] for key in sorted(file.files)}
    for (_, graph, slot), keys in groupby(arrays, key=lambda key: key[:3]):
        parts: dict[str, dict[str, Array]] = {"in": {}, "out": {}, "at": {}, "moves": {}}
        for key in keys:
            parts[key[3]][key[4]] = arrays[key]
        yield Pass(graph, int(slot), parts["in"], parts["out"], parts["at"], parts["moves"])


def _after(tensor: TensorSpec, flipped: int) -> bool:
    """Whether an output of a draft graph depends on the draft that flipped."""
    if tensor.state is not None:
        return True
    return tensor.name.startswith("draft_logits.") and int(tensor.name[13:]) > flipped
