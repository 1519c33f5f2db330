"""What ``inspect`` and ``--dry-run`` show: plans, packages and checkpoints as text or JSON."""

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING

from qwen_mtp.config import ModelConfig
from qwen_mtp.errors import CheckpointError, MissingExtraError
from qwen_mtp.ge.soc import find_soc
from qwen_mtp.graphs.manifest import MANIFEST, Verification
from qwen_mtp.graphs.spec import AscendChoice, Geometry, GraphSpec, StateSpec, state_specs
from qwen_mtp.graphs.weights import file_bytes
from qwen_mtp.progress import byte_text
from qwen_mtp.runtime.package import Package

if TYPE_CHECKING:
    from qwen_mtp.export.plan import Plan

_LISTED = 12
_SOURCES = {"Const", "Data", "FileConstant", "NetOutput", "RefData"}  # they compute nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class AscendDescription:
    """What GE models are, or would be, made for.

    Attributes:
        choice: The lowering, the chip and its operator packages.
        writer: ``cann``, the native core of torchair, or its ``stand-in``; "" for a plan.
        model_bytes: Bytes of all ``.air`` files; 0 for a plan.
        operators: By graph, how many operators of each type compute something, most first; empty
            for a plan.
        device_bytes: Weights once, and the state, on the device; scratch memory comes on top, and
            whether the models share the weights is up to CANN.
        card_bytes: Memory of the smallest card with the chip.
    """

    choice: AscendChoice
    device_bytes: int
    card_bytes: int
    writer: str = ""
    model_bytes: int = 0
    operators: dict[str, dict[str, int]] = field(default_factory=dict)

    def as_lines(self, dtype: str) -> list[str]:
        """For a person."""
        chip, card = self.choice.soc_version, f"{self.card_bytes / 1e9:.0f} GB"
        how = {"cann": ", written with CANN", "stand-in": ", written without CANN"}
        lines = [
            f"ascend    {self.choice.lowering} operators in {dtype} for {chip}"
            f"{how.get(self.writer, '')}"
        ]
        if self.choice.custom_ops:
            lines.append(f"  custom  {', '.join(self.choice.custom_ops)}")
        if self.model_bytes:
            lines.append(f"models    {byte_text(self.model_bytes)} of .air, to be compiled by ATC")
        needed = byte_text(self.device_bytes)
        lines.append(f"device    at least {needed} of weights and state; {chip} has {card} and up")
        if self.device_bytes > self.card_bytes:
            lines.append(
                f"warning   that is more than a card of {card} holds: choose a smaller --format, "
                "--max-model-len or --max-num-seqs"
            )
        return lines


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """One model, planned or exported.

    Attributes:
        what: ``plan`` or ``package``.
        path: The checkpoint of a plan, the directory of a package.
        target: The directory that a plan would write; "" for a package.
        config: Sizes of the model.
        geometry: The static choices.
        graphs: Every graph with its inputs and outputs.
        weight_bytes: Bytes of the weight file.
        package_bytes: Bytes on disk; for a plan, the weights alone.
        state_bytes: Bytes of state by kind; pools take memory as contexts grow.
        peak_bytes: Estimated peak memory of the export; 0 for a package.
        tensors_used: Checkpoint tensors that are read; 0 for a package.
        tensors_unused: Tensors that stay behind, by name.
        tensors_ignored: Tensors of the vision tower.
        verification: What the last parity check found; None where it did not run.
        native: Whether there is a model for kernels compiled on the machine that runs it.
        ascend: What GE models are made for; None for other back ends.
    """

    what: str
    path: str
    config: ModelConfig
    geometry: Geometry
    graphs: tuple[GraphSpec, ...]
    weight_bytes: int
    package_bytes: int
    state_bytes: dict[str, int]
    target: str = ""
    peak_bytes: int = 0
    tensors_used: int = 0
    tensors_unused: tuple[str, ...] = ()
    tensors_ignored: int = 0
    verification: Verification | None = None
    native: bool = False
    ascend: AscendDescription | None = None

    def as_text(self, tables: bool = False) -> str:
        """Several lines for a person; with ``tables``, every input and output of the graphs."""
        planned = self.what == "plan"
        lines = [f"{self.what}  {self.path}", *([f"target    {self.target}"] if planned else [])]
        lines += [*_model_lines(self.config, self.geometry), *self._size_lines()]
        lines += _tensor_lines(self)
        if not planned:
            lines.append(f"verified  {_verification_line(self.verification)}")
        return "\n".join([*lines, "", "graphs", *self._graph_lines(tables)])

    def _size_lines(self) -> list[str]:
        states = ", ".join(f"{kind} {byte_text(n)}" for kind, n in self.state_bytes.items())
        state = sum(self.state_bytes.values()) + self.state_bytes.get("stash", 0)  # two buffers
        running = byte_text(self.weight_bytes + state)
        disk = " on disk" if self.what == "plan" else ""
        lines = [f"weights   {byte_text(self.weight_bytes)} in {self.geometry.format}{disk}"]
        if self.what == "package":
            lines.append(f"package   {byte_text(self.package_bytes)} on disk")
        lines.append(f"state     {states}")
        if self.ascend is None:
            lines.append(f"memory    about {running} of weights and state while running")
            if self.what == "package":
                models = "ONNX Runtime's and native ones" if self.native else "ONNX Runtime's"
                lines.append(f"kernels   {models}")
        else:
            lines += self.ascend.as_lines(self.geometry.dtype)
        if self.what == "plan":
            lines.append(f"export    about {byte_text(self.peak_bytes)} of memory at the peak")
        return lines

    def _graph_lines(self, tables: bool) -> list[str]:
        states = state_specs(self.config, self.geometry)
        stash = {state.name for state in states if state.kind == "stash"}
        lines = []
        for graph in self.graphs:
            types = None if self.ascend is None else self.ascend.operators.get(graph.name, {})
            lines.append(_graph_line(graph, stash) if types is None else _air_line(graph, types))
            lines += _table_lines(graph) if tables else []
            lines += _operator_lines(types) if tables and types else []
        return lines


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointDescription:
    """A checkpoint as the exporter sees it."""

    path: str
    config: ModelConfig
    tensors: int
    mtp_tensors: int
    ignored: int
    dtypes: dict[str, int]

    def as_text(self, tables: bool = False) -> str:
        """Several lines for a person; there are no ``tables`` to show."""
        kinds = ", ".join(f"{n} {dtype}" for dtype, n in self.dtypes.items())
        head = f"{self.mtp_tensors} MTP tensors" if self.mtp_tensors else "no MTP tensors"
        return "\n".join(
            [
                f"checkpoint  {self.path}",
                *_model_lines(self.config, None),
                f"tensors   {self.tensors} ({kinds}), {head}, {self.ignored} ignored (vision)",
            ]
        )


def describe_plan(plan: "Plan", target: Path) -> Description:
    """What an export to ``target`` would do."""
    return Description(
        what="plan",
        path=_shown(plan.checkpoint.directory),
        target=_shown(target),
        config=plan.config,
        geometry=plan.geometry,
        graphs=plan.blueprint.specs,
        weight_bytes=plan.weight_bytes,
        package_bytes=plan.weight_bytes,
        state_bytes=_state_bytes(state_specs(plan.config, plan.geometry)),
        peak_bytes=plan.peak_bytes,
        tensors_used=len(plan.used),
        tensors_unused=plan.unused,
        tensors_ignored=len(plan.checkpoint.ignored),
        ascend=_planned(plan),
    )


def describe_package(package: Package) -> Description:
    """What a package holds."""
    manifest = package.manifest
    return Description(
        what="package",
        path=_shown(package.directory),
        config=manifest.config,
        geometry=manifest.geometry,
        graphs=manifest.graphs,
        weight_bytes=file_bytes(manifest.weights),
        package_bytes=sum(file.bytes for file in manifest.files),
        state_bytes=_state_bytes(manifest.states),
        tensors_unused=manifest.source.unused,
        tensors_ignored=len(manifest.source.ignored),
        verification=manifest.verification,
        native=manifest.native_file is not None,
        ascend=_written(package),
    )


def _planned(plan: "Plan") -> AscendDescription | None:
    if plan.ascend is None:
        return None
    states = state_specs(plan.config, plan.geometry)
    return AscendDescription(
        choice=plan.ascend,
        device_bytes=_device_bytes(plan.weight_bytes, states),
        card_bytes=find_soc(plan.ascend.soc_version).memory_gb * 10**9,
    )


def _written(package: Package) -> AscendDescription | None:
    manifest = package.manifest
    if manifest.ascend is None:
        return None
    choice = manifest.ascend.choice
    models = [package.directory / manifest.model_path(graph.name) for graph in manifest.graphs]
    return AscendDescription(
        choice=choice,
        device_bytes=_device_bytes(file_bytes(manifest.weights), manifest.states),
        card_bytes=find_soc(choice.soc_version).memory_gb * 10**9,
        writer=manifest.ascend.writer,
        model_bytes=sum(path.stat().st_size for path in models),
        operators={path.stem: _operators(path.with_suffix(".pbtxt")) for path in models},
    )


def _device_bytes(weights: int, states: Sequence[StateSpec]) -> int:
    """A state that a graph answers with has two buffers."""
    return weights + sum(state.nbytes * (1 if state.in_place else 2) for state in states)


def _operators(text: Path) -> dict[str, int]:
    """Operators by type in the text form of a model, which is read without protobuf."""
    if not text.is_file():
        return {}
    with open(text, encoding="utf-8", errors="replace") as lines:
        found = Counter(line[11:-2] for line in lines if line.startswith('    type: "'))
    return dict(Counter({k: n for k, n in found.items() if k not in _SOURCES}).most_common())


def describe_path(path: Path) -> Description | CheckpointDescription:
    """Look at a directory: a package if it has a manifest, else a checkpoint.

    Raises:
        CheckpointError: It is neither, or cannot be read.
        MissingExtraError: It is a checkpoint and the extra ``export`` is not installed.
        PackageError: The package contradicts itself.
    """
    if (path / MANIFEST).exists():
        return describe_package(Package.open(path))
    if path.is_dir() and not (path / "config.json").exists():
        raise CheckpointError(
            f"{path} is neither a package (manifest.json) nor a checkpoint (config.json); "
            "give the directory of one"
        )
    ModelConfig.from_checkpoint(path)  # what is no checkpoint needs no extra to be refused
    try:
        from qwen_mtp.export.checkpoint import Checkpoint
    except ModuleNotFoundError as missing:
        raise MissingExtraError(
            f"reading a checkpoint needs {missing.name}: pip install 'qwen-mtp[export]'"
        ) from missing
    checkpoint = Checkpoint.open(path)
    return CheckpointDescription(
        path=_shown(path),
        config=checkpoint.config,
        tensors=len(checkpoint.names),
        mtp_tensors=sum(name.startswith("mtp.") for name in checkpoint.names),
        ignored=len(checkpoint.ignored),
        dtypes=dict(Counter(checkpoint.dtype(name) for name in sorted(checkpoint.names))),
    )


def _pools(geometry: Geometry) -> str:
    return "" if geometry.pool_dtype == "float32" else f" of {geometry.pool_dtype}"


def _model_lines(config: ModelConfig, geometry: Geometry | None) -> list[str]:
    lines = [
        f"model     {config.model_type}: hidden {config.hidden_size}, "
        f"{config.num_linear_layers} linear + {config.num_full_layers} full attention layers, "
        f"vocabulary {config.vocab_size}{' (tied)' if config.tie_word_embeddings else ''}"
    ]
    if geometry is not None:
        drafts = ", ".join(map(str, geometry.lookaheads)) or "none (target alone)"
        lines.append(
            f"choices   K {drafts}; {_count(geometry.max_num_seqs, 'slot')} x "
            f"{geometry.max_model_len} positions in blocks of {geometry.block_size}"
            f"{_pools(geometry)}; prefill {geometry.prefill_chunk} rows"
        )
        if geometry.draft_vocab:
            lines.append(f"drafts    of {geometry.draft_vocab} of {config.vocab_size} tokens")
    return lines


def _graph_line(graph: GraphSpec, stash: set[str]) -> str:
    plain = [sum(t.state is None for t in side) for side in (graph.inputs, graph.outputs)]
    turns = sum(t.state in stash for t in graph.inputs)
    placed = len(graph.inputs) - plain[0] - turns
    aside = f", {turns} in the stash" if turns else ""
    return (
        f"  {graph.name:<18}{_count(graph.rows, 'row'):>9}  {_count(plain[0], 'input')}, "
        f"{_count(plain[1], 'output')}; {_count(placed, 'state tensor')} in place{aside}"
    )


def _air_line(graph: GraphSpec, types: dict[str, int]) -> str:
    plain = [sum(t.state is None for t in side) for side in (graph.inputs, graph.outputs)]
    held = len(graph.inputs) - plain[0]
    made = f"; {sum(types.values())} operators of {len(types)} types" if types else ""
    return (
        f"  {graph.name:<18}{_count(graph.rows, 'row'):>9}  {_count(plain[0], 'input')}, "
        f"{_count(plain[1], 'output')}; {_count(held, 'state tensor')}, {len(graph.in_place)} in "
        f"place{made}"
    )


def _operator_lines(types: dict[str, int]) -> list[str]:
    whole = ", ".join(f"{name}\0{count}" for name, count in types.items())
    lines = wrap(whole, 95, initial_indent="    ops ", subsequent_indent="        ")
    return [line.replace("\0", " ") for line in lines]


def _table_lines(graph: GraphSpec) -> list[str]:
    lines = []
    for mark, tensors in (("in ", graph.inputs), ("out", graph.outputs)):
        for tensor in tensors:
            if tensor.state is None:
                shape = "x".join(map(str, tensor.shape))
                lines.append(f"    {mark} {tensor.name:<20} {tensor.dtype:<8} {shape}")
    return lines


def _tensor_lines(found: Description) -> list[str]:
    used = f"{found.tensors_used} used, " if found.tensors_used else ""
    lines = [
        f"tensors   {used}{len(found.tensors_unused)} unused, "
        f"{found.tensors_ignored} ignored (vision)"
    ]
    lines += [f"  unused {name}" for name in found.tensors_unused[:_LISTED]]
    if len(found.tensors_unused) > _LISTED:
        lines.append(f"  and {len(found.tensors_unused) - _LISTED} more")
    return lines


def _verification_line(record: Verification | None) -> str:
    if record is None:
        return "no; run qwen-mtp verify"
    equal = "equal" if record.greedy_equal else "NOT equal"
    if record.near_ties and not record.greedy_equal:
        equal = f"equal but for {_count(record.near_ties, 'near tie')}"
    return (
        f"speculation on and off {equal} over {record.patterns} forced rounds ({record.machine})"
    )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _state_bytes(states: Sequence[StateSpec]) -> dict[str, int]:
    total: dict[str, int] = {}
    for state in states:
        total[state.kind] = total.get(state.kind, 0) + state.nbytes
    return total


def _shown(path: Path) -> str:
    """A path as text that JSON can hold, whatever bytes the name has."""
    return os.fsencode(path).decode(errors="replace")
