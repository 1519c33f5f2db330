"""What a measurement found of one package on one machine."""

from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from qwen_mtp.bench.costs import ContextCost, Decoding, Passes, Prefill, Samples


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Where it ran, and on what.

    Attributes:
        cpu: Name of the processor.
        instructions: Instruction sets that decide how fast products are.
        cores: Cores this process may use.
        threads: Threads inside an operator.
        kernels: ``native``, or ONNX Runtime's own and why.
        memory_bytes: Memory of the machine.
        versions: Names and versions of what computed.
    """

    cpu: str
    instructions: tuple[str, ...]
    cores: int
    threads: int
    kernels: str
    memory_bytes: int
    versions: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """What was measured.

    Attributes:
        package: Name of its directory.
        format: Weight format.
        layout: How state is kept, see ``Geometry``.
        hidden_size: Width.
        layers: Layers of the target.
        vocab_size: Ids.
        max_num_seqs: Batch slots.
        max_model_len: Positions a slot has.
        prefill_chunk: Rows of the prefill graph.
        lookaheads: Drafts a round it was exported for.
        weight_bytes: Stored weights, the drafter's too.
        package_bytes: All files.
        near_ties: Bits of a row depend on its pass here, so texts may differ at near ties.
    """

    package: str
    format: str
    layout: str
    hidden_size: int
    layers: int
    vocab_size: int
    max_num_seqs: int
    max_model_len: int
    prefill_chunk: int
    lookaheads: tuple[int, ...]
    weight_bytes: int
    package_bytes: int
    near_ties: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How it was measured.

    Attributes:
        prompt: Where the prompt came from.
        prompt_tokens: Its length.
        tokens: Tokens each run generates.
        repeat: Runs of each kind.
        rounds: Interleaved rounds of single passes.
        context: Positions before the rows of a pass, where nothing else is said.
    """

    prompt: str
    prompt_tokens: int
    tokens: int
    repeat: int
    rounds: int
    context: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Memory of this process in bytes, before anything is held for measuring alone.

    Attributes:
        interpreter: Resident before the package was loaded.
        resident: Resident after every graph has run.
        file_backed: The part of ``resident`` that is pages of files.
        anonymous: The rest.
        peak: The most that was ever resident, loading included.
        weights: Stored weights, to compare with.
        first_load_s: Seconds of the first load.
        warm_load_s: Seconds of the second.
    """

    interpreter: int
    resident: int
    file_backed: int
    anonymous: int
    peak: int
    weights: int
    first_load_s: float
    warm_load_s: float

    @property
    def resident_over_weights(self) -> float:
        """Resident memory, the interpreter included, as a multiple of the weights."""
        return self.resident / self.weights


@dataclass(frozen=True, slots=True, kw_only=True)
class Bandwidth:
    """Reading memory with as many threads as the passes, between them.

    Attributes:
        buffer_bytes: What one read goes through.
        best: The fastest read, GB/s.
        speed: All reads, GB/s.
    """

    buffer_bytes: int
    best: float
    speed: Samples


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """What a plain token cannot do without moving, in bytes.

    Attributes:
        weights: Stored tensors a plain pass reads whole: not the drafter's, and of the embedding
            one row.
        kv: Keys and values of the context.
        state: Windows, recurrent state and stash of a slot, read and written.
    """

    weights: int
    kv: int
    state: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.kv + self.state


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchReport:
    """One measurement of one package, see docs/benchmarking.md.

    Attributes:
        machine: Where.
        model: What.
        settings: How.
        memory: What it takes.
        bandwidth: What the machine reads.
        traffic: What a plain token moves, at the context of ``passes``.
        passes: What single passes cost.
        prefill: What prompts cost.
        text: The prompt continued by plain decoding, then for each K with the MTP head's drafts.
        forced: The same with scripted drafts: plain decoding, then by K and probability.
        contexts: Passes by context, ascending.
        slots: Plain decoding and scripted drafts by the number of slots in use; empty for
            packages of one slot.
    """

    machine: Machine
    model: Model
    settings: Settings
    memory: Memory
    bandwidth: Bandwidth
    traffic: Traffic
    passes: Passes
    prefill: Prefill
    text: tuple[Decoding, ...]
    forced: tuple[Decoding, ...]
    contexts: tuple[ContextCost, ...]
    slots: tuple[Decoding, ...]

    @property
    def limit_ms(self) -> float:
        """Milliseconds that reading what a plain token moves takes at the median bandwidth."""
        return self.traffic.total / self.bandwidth.speed.median / 1e6

    @property
    def share_of_limit(self) -> float:
        """The limit over the plain pass: 1 is as fast as memory."""
        return self.limit_ms / self.passes.plain.median

    @property
    def plain_over_weights(self) -> float:
        """The plain pass over the time that reading its weights alone takes."""
        return self.passes.plain.median * self.bandwidth.speed.median * 1e6 / self.traffic.weights

    def fastest(self) -> Decoding:
        """The fastest way through the prompt: plain decoding, or the package's own drafts."""
        return max(self.text, key=lambda run: run.speed.median)

    @property
    def equal(self) -> bool:
        """Whether every run gave the tokens of plain decoding."""
        return all(run.equal for run in (*self.text, *self.forced, *self.slots))

    @property
    def tokens_compared(self) -> int:
        """Tokens that were compared with those of plain decoding."""
        return sum(run.tokens for run in (*self.text, *self.forced, *self.slots))

    def speedup(self, run: Decoding) -> float:
        """Speed of a run over plain decoding of the same kind, side by side as many."""
        return run.speed.median / self._plain(run).speed.median

    def expected_speedup(self, run: Decoding) -> float | None:
        """Speed-up at the tokens a round gives in the long run, without the luck of these runs."""
        return run.expected and run.expected * self._plain(run).round_ms / run.round_ms

    def _plain(self, run: Decoding) -> Decoding:
        groups = (self.text, self.forced, self.slots)
        kind = next(group for group in groups if any(run is other for other in group))
        return next(r for r in kind if not r.lookahead and r.slots == run.slots)


def document(report: BenchReport) -> dict[str, Any]:
    """The JSON of a report: fields and properties by name, and the speed-ups of every run."""
    found: dict[str, Any] = as_plain(report)
    for group in ("text", "forced", "slots"):
        for entry, run in zip(found[group], getattr(report, group), strict=True):
            entry["speedup"] = report.speedup(run)
            entry["expected_speedup"] = report.expected_speedup(run)
    found["machine"]["versions"] = dict(report.machine.versions)
    return found


def as_plain(value: Any) -> Any:
    """Fields and properties of a dataclass by name, for JSON."""
    if isinstance(value, tuple):
        return [as_plain(item) for item in value]
    if not is_dataclass(value):
        return value
    names = [field.name for field in fields(value)]
    names += [name for name, item in vars(type(value)).items() if isinstance(item, property)]
    return {name: as_plain(getattr(value, name)) for name in names}
