"""Measures one package in this process: load, memory, passes, prompts and runs, in turn."""

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from os import PathLike
from time import perf_counter

import numpy as np

from qwen_mtp.bench.costs import Decoding, Prefill, PrefillCost
from qwen_mtp.bench.decoding import Course, ForcedCourse, TextCourse, greedy, open_llm
from qwen_mtp.bench.machine import ReadMeter, Usage, describe_machine, usable_cores, usage
from qwen_mtp.bench.passes import PassTimer, interleaved
from qwen_mtp.bench.plan import BenchOptions, BenchPlan, plan_bench
from qwen_mtp.bench.report import BenchReport, Machine, Memory, Model, Settings
from qwen_mtp.bench.traffic import mtp_share, plain_traffic
from qwen_mtp.graphs.weights import file_bytes
from qwen_mtp.progress import Progress, Silent
from qwen_mtp.runtime.engine import Engine
from qwen_mtp.runtime.engines import prepare_kernels
from qwen_mtp.runtime.native import NativeKernels, find_kernels
from qwen_mtp.runtime.package import Package
from qwen_mtp.runtime.runner import GraphRunner
from qwen_mtp.runtime.session import Session

SLOT_ACCEPTANCE = 0.8  # of the scripted drafts that slots are compared with
_SILENT = Silent()
_NO_OPTIONS = BenchOptions()


def run_bench(
    directory: str | PathLike[str],
    options: BenchOptions = _NO_OPTIONS,
    progress: Progress = _SILENT,
) -> BenchReport:
    """Measure a package: about a minute for a model of 0.8 billion weights.

    Memory is looked at first, while nothing is held but the package; the rest follows in rounds
    that take everything in turn, so that what else the machine does meets all alike.

    Args:
        directory: The package, for ONNX Runtime.
        options: What to measure.
        progress: Gets a phase for each part.

    Raises:
        MissingExtraError: The prompt is a text and the extra ``text`` is not installed.
        PackageError: The package cannot be loaded.
        RequestError: The package cannot do what is asked; nothing was run.
    """
    package = Package.open(directory)
    plan = plan_bench(package, options)
    threads = options.threads or usable_cores()
    prepare_kernels(package, options.native, progress)
    before = usage()
    progress.phase("bench load")
    engine, first = _load(directory, threads, options.native)
    memory, reference = _occupy(engine, plan, before, first, progress)
    with _metered(threads, options.native) as meter:
        machine = describe_machine(threads, engine.kernels)
        found = _Measurement(engine, plan, reference, meter, progress).report(machine, memory)
    del engine
    gc.collect()  # a second load beside the first would not be the load of a server
    progress.phase("bench load again")
    warm = _load(directory, threads, options.native)[1]
    progress.done()
    return replace(found, memory=replace(memory, warm_load_s=warm))


def _load(
    directory: str | PathLike[str], threads: int, native: bool | None
) -> tuple[Engine, float]:
    """An engine, and the seconds it took from the path on; libraries are imported already."""
    start = perf_counter()
    engine = Engine(Package.open(directory), threads=threads, native=native)
    return engine, perf_counter() - start


def _occupy(
    engine: GraphRunner, plan: BenchPlan, before: Usage, first_load: float, progress: Progress
) -> tuple[Memory, tuple[int, ...]]:
    """Run every graph; the memory that takes, and the tokens that plain decoding gives."""
    progress.phase("bench every graph")
    texts = []
    for k in plan.lookaheads:
        with open_llm(engine, k) as llm:
            output = llm.generate(list(plan.prompt), greedy(plan.tokens))[0]
            texts.append(output.outputs[0].token_ids)
    now = usage()
    memory = Memory(
        interpreter=before.resident,
        resident=now.resident,
        file_backed=now.file_backed,
        anonymous=now.anonymous,
        peak=now.peak,
        weights=file_bytes(engine.package.manifest.weights),
        first_load_s=first_load,
        warm_load_s=0.0,
    )
    return memory, tuple(texts[0])


@contextmanager
def _metered(threads: int, native: bool | None) -> Iterator[ReadMeter]:
    kernels = NativeKernels(None) if native is False else find_kernels(build=False)
    meter = ReadMeter(threads, kernels)
    try:
        yield meter
    finally:
        meter.close()


class _Measurement:
    """The parts that run on one loaded engine."""

    def __init__(
        self,
        engine: GraphRunner,
        plan: BenchPlan,
        reference: Sequence[int],
        meter: ReadMeter,
        progress: Progress,
    ) -> None:
        self._engine, self._plan, self._reference = engine, plan, reference
        self._meter, self._progress = meter, progress
        self._manifest = engine.package.manifest

    def report(self, machine: Machine, memory: Memory) -> BenchReport:
        """Measure everything."""
        plan, progress, meter = self._plan, self._progress, self._meter
        timer = PassTimer(self._engine)
        timer.fill(plan.contexts[-1])
        progress.phase("bench passes", plan.rounds, "rounds")
        passes = timer.one_context(plan.context, plan.rounds, meter, progress)
        rounds = max(3, plan.rounds // 3)
        progress.phase("bench contexts", rounds, "rounds")
        contexts = timer.by_context(plan.contexts, rounds, meter, progress)
        prefill = self._prefill()
        text, forced = self._decoding()
        slots = self._slots()
        return BenchReport(
            machine=machine,
            model=_model(self._engine.package),
            settings=self._settings(),
            memory=memory,
            bandwidth=meter.result(),
            traffic=plain_traffic(self._manifest, plan.context),
            passes=passes,
            prefill=prefill,
            text=text,
            forced=forced,
            contexts=contexts,
            slots=slots,
        )

    def _settings(self) -> Settings:
        plan = self._plan
        return Settings(
            prompt=plan.source,
            prompt_tokens=len(plan.prompt),
            tokens=plan.tokens,
            repeat=plan.repeat,
            rounds=plan.rounds,
            context=plan.context,
        )

    def _prefill(self) -> Prefill:
        lengths, chunk = self._plan.prefills, self._manifest.geometry.prefill_chunk
        self._progress.phase("bench prefill", self._plan.repeat, "rounds")
        session = Session(self._engine.package, engine=self._engine)
        drawn = np.random.default_rng(1).integers(0, self._manifest.config.vocab_size, lengths[-1])
        ids = drawn.tolist()
        actions = [lambda n=n: _prefill_ms(session, ids[:n]) for n in lengths]
        samples = interleaved(actions, self._plan.repeat, self._meter, self._progress)
        costs = tuple(
            PrefillCost(tokens=n, passes=-(-n // chunk), padding=-n % chunk, ms=ms)
            for n, ms in zip(lengths, samples, strict=True)
        )
        return Prefill(costs=costs, mtp_share=mtp_share(self._manifest))

    def _decoding(self) -> tuple[tuple[Decoding, ...], tuple[Decoding, ...]]:
        """The text with the MTP head's drafts, and with scripted ones."""
        plan, engine, reference = self._plan, self._engine, self._reference
        kinds = [(k, False) for k in plan.lookaheads]  # drafts, and whether rounds choose fewer
        kinds += [(k, True) for k in plan.lookaheads[-1:] if k]
        text: list[Course] = [
            TextCourse(engine, k, plan.prompt, reference, adaptive) for k, adaptive in kinds
        ]
        forced: list[Course] = [ForcedCourse(engine, 0, None, plan.prompt, reference)]
        forced += [
            ForcedCourse(engine, k, share, plan.prompt, reference, adaptive=adaptive)
            for k, adaptive in kinds[1:]
            for share in plan.acceptances
        ]
        found = self._in_turn("bench text", [*text, *forced])
        return found[: len(text)], found[len(text) :]

    def _slots(self) -> tuple[Decoding, ...]:
        """Plain decoding and scripted drafts in one slot, in two, in four and so on."""
        slots, k = self._manifest.geometry.max_num_seqs, self._plan.lookaheads[-1]
        if slots == 1:
            return ()
        counts = sorted({*(1 << i for i in range(slots.bit_length())), slots})
        kinds = [(0, None), *([(k, SLOT_ACCEPTANCE)] if k else [])]
        courses: list[Course] = [
            ForcedCourse(self._engine, k, share, self._plan.prompt, self._reference, count)
            for count in counts
            for k, share in kinds
        ]
        return self._in_turn("bench slots", courses)

    def _in_turn(self, title: str, courses: Sequence[Course]) -> tuple[Decoding, ...]:
        self._progress.phase(title, self._plan.repeat * len(courses), "runs")
        for _ in range(self._plan.repeat):
            for course in courses:
                course.run()
                self._progress.advance(1)
            self._meter.read()
        return tuple(course.result() for course in courses)


def _prefill_ms(session: Session, ids: Sequence[int]) -> float:
    slot, _ = session.prefill(ids, greedy(1).resolve())
    spent = session.times.prefill
    session.release(slot)
    return spent


def _model(package: Package) -> Model:
    manifest = package.manifest
    config, geometry = manifest.config, manifest.geometry
    return Model(
        package=package.directory.resolve().name,
        format=geometry.format,
        layout=geometry.layout,
        hidden_size=config.hidden_size,
        layers=len(config.layer_kinds),
        vocab_size=config.vocab_size,
        max_num_seqs=geometry.max_num_seqs,
        max_model_len=geometry.max_model_len,
        prefill_chunk=geometry.prefill_chunk,
        lookaheads=geometry.lookaheads,
        weight_bytes=file_bytes(manifest.weights),
        package_bytes=sum(file.bytes for file in manifest.files),
        near_ties=geometry.layout != "lazy",
    )
