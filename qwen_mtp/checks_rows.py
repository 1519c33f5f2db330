"""Row invariance on this machine: a row's bits may depend on the row and its past alone.

The reference is one-row stepping: one token a pass, committed by the next. Against it stand
passes of every row bucket in which other rows, other slots and the width of the block table vary.
Every kernel of the graphs is covered where it stands, on its real weights: the inputs each layer
stashes, the keys and values it stores, the committed windows and states, hidden rows and logits
must carry the same bits. Greedy decoding is independent of speculation only where this holds, and
which kernel a matrix product runs on is chosen by the processor.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from qwen_mtp.checks_bench import Bench, Lane
from qwen_mtp.checks_report import Check, digest
from qwen_mtp.progress import Progress
from qwen_mtp.runtime.engine import POSITION_STEP, Array

Digests = dict[str, bytes]
_KERNELS = {
    "stash.u": "the matrix product of the layer's input, or a kernel of the layer before,",
    "stash.k": "the convolution or the norm",
    "stash.v": "the convolution",
    "stash.g": "the fp32 matrix product of the gates",
    "stash.beta": "the fp32 matrix product of the gates",
    "key": "the matrix product, norm or rotary kernel, or a kernel of the layer before,",
    "value": "the matrix product of the layer's input, or a kernel of the layer before,",
    "conv": "the commit of the window",
    "ssm": "the masked replay of the delta rule",
    "hidden": "the last layer or the final norm",
    "logits": "the matrix product of the output head",
}


@dataclass(frozen=True, slots=True)
class Trail:
    """One-row stepping: digests of every row and of the states committed before it."""

    rows: tuple[Digests, ...]
    committed: tuple[Digests, ...]


@dataclass(frozen=True, slots=True)
class Case:
    """One wide pass: ``count`` rows of the trail in a bucket of ``rows``, and what surrounds it.

    Attributes:
        home: The slot that holds the sequence.
        rows: Row bucket.
        count: Rows of the trail; the rows after them hold other tokens.
        extra: Positions the block table covers beyond what is needed.
        next_rows: Row bucket of the pass that commits ``count`` rows.
    """

    home: int
    rows: int
    count: int
    extra: int
    next_rows: int

    def __str__(self) -> str:
        """For messages."""
        return f"{self.count} rows in a pass of {self.rows}, slot {self.home}"


class RowProbe:
    """Holds the base state and the trail while the cases run."""

    def __init__(self, bench: Bench) -> None:
        """Choose the sequence; its rows straddle a step of the block table where they can."""
        self.bench = bench
        geometry = bench.geometry
        self.start = max(1, min(POSITION_STEP - 2, geometry.max_model_len - bench.max_rows))
        self.prompt = bench.some_ids(1, self.start)
        self.tokens = bench.some_ids(2, bench.max_rows + 1)
        self._base: dict[str, Array] = {}
        self._starts: tuple[int, ...] = ()

    def settle(self, home: int) -> None:
        """Put the sequence into ``home`` and other, shorter ones everywhere else."""
        bench, lengths = self.bench, []
        for slot in range(bench.slots):
            short = bench.some_ids(10 + slot, min(3 + slot, self.start))
            prompt = self.prompt if slot == home else short
            bench.prefill(slot, prompt)
            lengths.append(len(prompt))
        self._starts = tuple(lengths)
        self._base = bench.snapshot()

    def step_through(self) -> Trail:
        """Run the tokens one row a pass in slot 0, the others idle."""
        self._restore()
        bench, rows, committed = self.bench, [], []
        graph = bench.graph(2)
        for i, token in enumerate(self.tokens):
            lane = Lane((token,), self.start + i, min(i, 1))
            bench.feed(graph, [lane])
            bench.run(graph, self.start + i + 1)
            rows.append(self._row(graph, 0, 0, self.start + i))
            committed.append(self._committed(0))
        return Trail(tuple(rows), tuple(committed))

    def compare(self, case: Case, trail: Trail) -> str | None:
        """Run one wide pass and the pass that commits it; the first difference by name."""
        self._restore()
        bench, graph = self.bench, self.bench.graph(case.rows)
        bench.feed(graph, self._lanes(case))
        bench.run(graph, self.start + 2 * bench.max_rows + case.extra)
        if (name := _first(self._committed(case.home), trail.committed[0])) is not None:
            return _explain(name, f"the state before {case}")
        for i in range(case.count):
            found = self._row(graph, case.home, i, self.start + i)
            if (name := _first(found, trail.rows[i])) is not None:
                return _explain(name, f"row {i} of {case}")
        graph = bench.graph(case.next_rows)
        token, end = self.tokens[case.count], self.start + case.count
        bench.feed(graph, self._around(case, Lane((token,), end, case.count), 1))
        bench.run(graph, end + bench.max_rows)
        found = self._committed(case.home)
        if (name := _first(found, trail.committed[case.count])) is not None:
            return _explain(name, f"the state after committing {case}")
        found = self._row(graph, case.home, 0, end)
        name = _first(found, trail.rows[case.count])
        return None if name is None else _explain(name, f"the row after committing {case}")

    def _lanes(self, case: Case) -> list[Lane]:
        others = self.bench.some_ids(100 * case.rows + case.count, case.rows - case.count)
        return self._around(case, Lane((*self.tokens[: case.count], *others), self.start), 0)

    def _around(self, case: Case, home: Lane, commit: int) -> list[Lane]:
        """The lane of the sequence among slots that run other tokens."""
        ids = self.bench.some_ids(case.count, case.rows if commit == 0 else case.next_rows)
        lanes = [Lane(ids, start + commit, commit) for start in self._starts]
        lanes[case.home] = home
        return lanes

    def _restore(self) -> None:
        self.bench.restore(self._base)

    def _row(self, graph: str, slot: int, row: int, position: int) -> Digests:
        return {n: digest(data) for n, data in self.bench.row(graph, slot, row, position)}

    def _committed(self, slot: int) -> Digests:
        return {name: digest(state[slot]) for name, state in self.bench.recurrent()}


def check_rows(bench: Bench, progress: Progress) -> Check:
    """Compare every row bucket, accept count, slot and table width with one-row stepping."""
    cases = list(_cases(bench))
    progress.phase("verify rows", len(cases), "passes")
    probe = RowProbe(bench)
    probe.settle(0)
    trail, home = probe.step_through(), 0
    for case in cases:
        if case.home != home:
            home = case.home
            probe.settle(home)
        if (difference := probe.compare(case, trail)) is not None:
            return Check("rows", False, difference)
        progress.advance(1)
    buckets = ", ".join(map(str, bench.geometry.row_buckets))
    tensors = len(trail.rows[0]) + len(trail.committed[0])
    detail = f"{len(cases)} passes of {buckets} rows: {tensors} tensors have the bits of one row"
    return Check("rows", True, detail)


def _cases(bench: Bench) -> Iterator[Case]:
    buckets = bench.geometry.row_buckets
    for rows in buckets:
        for count in range(1, rows + 1):
            extra = POSITION_STEP * (count % 2)
            yield Case(0, rows, count, extra, buckets[count % len(buckets)])
    for slot in range(1, bench.slots):  # a kernel may split a full batch over threads anywhere
        yield Case(slot, buckets[-1], buckets[-1], 0, buckets[-1])


def _first(found: Digests, wanted: Digests) -> str | None:
    return next((name for name in wanted if found[name] != wanted[name]), None)


def _explain(name: str, where: str) -> str:
    kind = name.split(".", 2)[-1]
    return (
        f"{name} differs in {where}: {_KERNELS[kind]} of this machine is not row-exact; "
        "decode without speculation here, or export another format"
    )
