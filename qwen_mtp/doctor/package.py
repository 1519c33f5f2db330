"""Measures a package's own graphs on each kind of kernels, and says what to make of it."""

import gc
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter, sleep

from qwen_mtp.bench.costs import DraftCost, Passes, RowsCost, Samples
from qwen_mtp.bench.passes import Action, PassTimer
from qwen_mtp.bench.traffic import plain_traffic
from qwen_mtp.checks_bench import Bench
from qwen_mtp.checks_report import one_line
from qwen_mtp.checks_rows import check_rows
from qwen_mtp.doctor.costs import ModelShape
from qwen_mtp.doctor.products import BITS, in_turn
from qwen_mtp.errors import RequestError
from qwen_mtp.graphs.manifest import PackageManifest
from qwen_mtp.graphs.weights import file_bytes
from qwen_mtp.progress import Progress
from qwen_mtp.runtime.engine import Engine
from qwen_mtp.runtime.engines import kernels_of
from qwen_mtp.runtime.package import Package

CONTEXT, ROUNDS = 256, 9
PAUSE_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class PackageCost:
    """A package on one kind of kernels.

    Attributes:
        kernels: ``native`` or ``onnxruntime``.
        load_s: Seconds to load it and run each graph once.
        passes: Its graphs; None where it could not be run.
        rows: What the check of its rows found.
        exact: Whether every row has its own bits.
        failure: Why it could not be run; empty where it could.
    """

    kernels: str
    load_s: float = 0.0
    passes: Passes | None = None
    rows: str = ""
    exact: bool = False
    failure: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackageFacts:
    """What is measured of a package, and what was exported.

    Attributes:
        name: Its directory.
        format: Weight format.
        lookaheads: Drafts a round.
        draft_rows: Rows of the drafter's own output head; 0 where it uses the target's.
        context: Positions before the rows of a pass.
        shape: Its sizes.
        costs: By kernels.
    """

    name: str
    format: str
    lookaheads: tuple[int, ...]
    draft_rows: int
    context: int
    shape: ModelShape
    costs: tuple[PackageCost, ...]


def open_measurable(directory: object) -> Package:
    """Open a package that ``doctor`` can measure.

    Raises:
        PackageError: It contradicts itself.
        RequestError: It is not for ONNX Runtime.
    """
    package = Package.open(str(directory))
    if package.manifest.backend != "onnxruntime":
        raise RequestError(f"{directory} runs on an NPU; doctor looks at packages for the CPU")
    return package


def measure_package(
    package: Package, threads: int, free_bytes: int, progress: Progress
) -> PackageFacts:
    """Run every graph and the check of rows, on native kernels where there are and without."""
    manifest, geometry = package.manifest, package.manifest.geometry
    context = max(1, min(CONTEXT, geometry.max_model_len - geometry.max_rows - 1))
    short = 0 < free_bytes < 3 * file_bytes(manifest.weights)
    measure = _apart if short else _together
    return PackageFacts(
        name=package.directory.resolve().name,
        format=geometry.format,
        lookaheads=geometry.lookaheads,
        draft_rows=geometry.draft_vocab,
        context=context,
        shape=shape_of(manifest),
        costs=measure(package, threads, context, progress),
    )


def shape_of(manifest: PackageManifest) -> ModelShape:
    """Sizes of a package, its weights counted in those of its format."""
    bits, config = BITS[manifest.geometry.format], manifest.config
    drafter = sum(
        tensor.nbytes
        for tensor in manifest.weights
        if tensor.name.startswith("mtp.") and not tensor.name.startswith(("mtp.draft.", "mtp.fc."))
    )
    return ModelShape(
        weights=plain_traffic(manifest, 1).weights * 8 / bits,
        hidden=config.hidden_size,
        vocabulary=config.vocab_size,
        drafter=drafter * 8 / bits,
    )


def _together(
    package: Package, threads: int, context: int, progress: Progress
) -> tuple[PackageCost, ...]:
    """Both kinds of kernels in turn, so that what else the machine does meets both alike."""
    progress.phase("package passes")
    loaded = [_load(package, native, threads) for native in _kinds(package)]
    engines = [engine for engine in loaded if isinstance(engine, _Loaded)]
    timers = [_Timed(found.engine, context) for found in engines]
    taken = in_turn([action for timer in timers for action in timer.actions], ROUNDS)
    costs = [cost for cost in loaded if isinstance(cost, PackageCost)]
    for found, timer in zip(engines, timers, strict=True):
        samples, taken = taken[: len(timer.actions)], taken[len(timer.actions) :]
        costs.append(_checked(found, timer.passes(samples), progress))
    return tuple(costs)


def _apart(
    package: Package, threads: int, context: int, progress: Progress
) -> tuple[PackageCost, ...]:
    """One after the other, where memory is short."""
    costs = []
    for native in _kinds(package):
        progress.phase("package passes")
        found = _load(package, native, threads)
        if isinstance(found, _Loaded):
            timer = _Timed(found.engine, context)
            passes = timer.passes(in_turn(timer.actions, ROUNDS))
            costs.append(_checked(found, passes, progress))
            del timer
        else:
            costs.append(found)
        del found
        gc.collect()
    return tuple(costs)


def _kinds(package: Package) -> tuple[bool, ...]:
    return (False,) if package.manifest.native_file is None else (True, False)


@dataclass(frozen=True, slots=True)
class _Loaded:
    engine: Engine
    seconds: float

    @property
    def kernels(self) -> str:
        return kernels_of(self.engine)


def _load(package: Package, native: bool, threads: int) -> _Loaded | PackageCost:
    start = perf_counter()
    try:
        engine = Engine(package, threads=threads, keep_logits=True, native=native)
        _Timed(engine, 1).run_all()
    except Exception as error:  # the runtime's own exceptions share no base class
        kernels = "native" if native else "onnxruntime"
        return PackageCost(kernels=kernels, failure=one_line(error))
    return _Loaded(engine, perf_counter() - start)


def _checked(found: _Loaded, passes: Passes, progress: Progress) -> PackageCost:
    """The cost, and what the check of rows says."""
    detail, exact = "standard ONNX promises no bits of a row", False
    if found.engine.package.manifest.geometry.layout == "lazy":
        check = check_rows(Bench(found.engine), progress)
        detail, exact = check.detail, check.passed
    return PackageCost(
        kernels=found.kernels, load_s=found.seconds, passes=passes, rows=detail, exact=exact
    )


def _after_a_pause(action: Action) -> float:
    """Let the threads of another engine come to rest, which wait for more work for a while."""
    sleep(PAUSE_S)
    action()  # wakes the own ones
    return action()


class _Timed:
    """The graphs of an engine as actions that take milliseconds."""

    def __init__(self, engine: Engine, context: int) -> None:
        self._geometry, timer = engine.package.manifest.geometry, PassTimer(engine)
        timer.fill(context)
        buckets, lookaheads = self._geometry.row_buckets, self._geometry.lookaheads
        self.actions: list[Action] = [lambda: _after_a_pause(lambda: timer.plain(context))]
        self.actions += [lambda r=r: timer.verify(r, r, context) for r in buckets]  # type: ignore[misc]
        self.actions += [lambda k=k: timer.draft(k, context) for k in lookaheads]  # type: ignore[misc]

    def run_all(self) -> None:
        """Run every graph once: the first run of each is part of what loading takes."""
        for action in self.actions:
            action()

    def passes(self, samples: Sequence[Samples]) -> Passes:
        """What was taken, by graph."""
        buckets, lookaheads = self._geometry.row_buckets, self._geometry.lookaheads
        plain, *others = samples
        verify, drafts = others[: len(buckets)], others[len(buckets) :]
        return Passes(
            plain=plain,
            verify=tuple(RowsCost(rows=r, ms=s) for r, s in zip(buckets, verify, strict=True)),
            drafts=tuple(
                DraftCost(lookahead=k, ms=s) for k, s in zip(lookaheads, drafts, strict=True)
            ),
        )


def usable(costs: Sequence[PackageCost]) -> list[PackageCost]:
    """Those that were run and whose rows have their own bits, the fastest first.

    Native kernels come first where it is a tie, because they pack nothing.
    """
    sound = [cost for cost in costs if cost.passes is not None and cost.exact]
    return sorted(sound, key=_time)


def _time(cost: PackageCost) -> float:
    if cost.passes is None:
        return float("inf")
    spent = cost.passes.plain.median + cost.passes.verify[-1].ms.median
    return spent if cost.kernels == "native" else spent * 1.05
