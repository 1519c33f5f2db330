"""Measures a package's own graphs on each kind of kernels, and says what to make of it."""

import gc
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter

from qwen_mtp.bench.costs import DraftCost, Passes, RowsCost
from qwen_mtp.bench.passes import Action, PassTimer
from qwen_mtp.bench.traffic import plain_traffic
from qwen_mtp.checks_bench import Bench
from qwen_mtp.checks_report import one_line
from qwen_mtp.checks_rows import check_rows
from qwen_mtp.doctor.costs import ModelShape
from qwen_mtp.doctor.products import BITS, in_turn
from qwen_mtp.errors import PackageError, RequestError
from qwen_mtp.graphs.manifest import PackageManifest
from qwen_mtp.progress import Progress
from qwen_mtp.runtime.engine import Engine
from qwen_mtp.runtime.package import Package

CONTEXT, ROUNDS = 256, 9


@dataclass(frozen=True, slots=True, kw_only=True)
class PackageCost:
    """A package on one kind of kernels.

    Attributes:
        kernels: ``native`` or ``onnxruntime``.
        load_s: Seconds to load it.
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


def measure_package(package: Package, threads: int, progress: Progress) -> PackageFacts:
    """Run every graph and the check of rows, on native kernels where there are and without."""
    manifest, geometry = package.manifest, package.manifest.geometry
    context = max(1, min(CONTEXT, geometry.max_model_len - geometry.max_rows - 1))
    kinds = [False] if manifest.native_file is None else [True, False]
    return PackageFacts(
        name=package.directory.resolve().name,
        format=geometry.format,
        lookaheads=geometry.lookaheads,
        draft_rows=getattr(geometry, "draft_vocab", 0),
        context=context,
        shape=shape_of(manifest),
        costs=tuple(_measure(package, kind, threads, context, progress) for kind in kinds),
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


def _measure(
    package: Package, native: bool, threads: int, context: int, progress: Progress
) -> PackageCost:
    kernels = "native" if native else "onnxruntime"
    progress.phase(f"package on {kernels} kernels")
    start = perf_counter()
    try:
        engine = Engine(package, threads=threads, keep_logits=True, native=native)
    except (PackageError, RequestError) as error:
        return PackageCost(kernels=kernels, failure=one_line(error))
    loaded = perf_counter() - start
    try:
        passes = _passes(engine, context)
        found = None
        if package.manifest.geometry.layout == "lazy":
            found = check_rows(Bench(engine), progress)
    except Exception as error:  # the runtime's own exceptions share no base class
        return PackageCost(kernels=kernels, load_s=loaded, failure=one_line(error))
    finally:
        del engine
        gc.collect()
    detail = "standard ONNX promises no bits of a row" if found is None else found.detail
    return PackageCost(
        kernels=kernels,
        load_s=loaded,
        passes=passes,
        rows=detail,
        exact=found is not None and found.passed,
    )


def _passes(engine: Engine, context: int) -> Passes:
    geometry, timer = engine.package.manifest.geometry, PassTimer(engine)
    timer.fill(context)
    buckets, lookaheads = geometry.row_buckets, geometry.lookaheads
    actions: list[Action] = [lambda: timer.plain(context)]
    actions += [lambda r=r: timer.verify(r, r, context) for r in buckets]  # type: ignore[misc]
    actions += [lambda k=k: timer.draft(k, context) for k in lookaheads]  # type: ignore[misc]
    plain, *others = in_turn(actions, ROUNDS)
    verify, drafts = others[: len(buckets)], others[len(buckets) :]
    return Passes(
        plain=plain,
        verify=tuple(RowsCost(rows=r, ms=ms) for r, ms in zip(buckets, verify, strict=True)),
        drafts=tuple(
            DraftCost(lookahead=k, ms=ms) for k, ms in zip(lookaheads, drafts, strict=True)
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
