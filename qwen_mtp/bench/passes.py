"""Times single passes of one package: any graph, at any context, in any number of slots.

Nothing here is a text: rows are random ids, and the pools are filled with noise up to the context,
because what a pass costs depends on where it stands and not on what it reads there.
"""

from collections.abc import Callable, Sequence
from time import perf_counter

import numpy as np

from qwen_mtp.bench.costs import ContextCost, DraftCost, Passes, RowsCost, Samples
from qwen_mtp.bench.machine import ReadMeter
from qwen_mtp.bench.traffic import kv_bytes
from qwen_mtp.checks_bench import Bench, Lane
from qwen_mtp.graphs.spec import StateSpec
from qwen_mtp.progress import Progress
from qwen_mtp.runtime.runner import GraphRunner

Action = Callable[[], float]
_READS = 8  # of the memory, among the rounds


class PassTimer:
    """Runs passes on an engine that holds no sequences."""

    def __init__(self, engine: GraphRunner) -> None:
        """Take the engine over: its slots and pools are written."""
        self._bench, self._engine = Bench(engine), engine
        self._geometry = engine.package.manifest.geometry
        self._commit = 0

    def fill(self, context: int) -> None:
        """Put noise where the keys and values of the first slot's ``context`` positions lie."""
        blocks = self._bench.table[0][: -(-(context + 1) // self._geometry.block_size)]
        for state in self._engine.package.manifest.states:
            if state.kind in ("kv", "mtp_kv"):
                self._fill_blocks(state, blocks.tolist())

    def _fill_blocks(self, state: StateSpec, blocks: Sequence[int]) -> None:
        """Write the same random block over each of the ``blocks``, whatever the pool's layout."""
        data, count = self._engine.state(state.name), self._geometry.num_blocks
        flat = count * self._geometry.block_size
        axis = data.shape.index(flat if flat in data.shape else count)
        size = data.shape[axis] // count
        view = np.moveaxis(data, axis, 0)
        noise = np.random.default_rng(0).standard_normal((size, *view.shape[1:]))
        for block in blocks:
            view[block * size : (block + 1) * size] = noise

    def verify(self, bucket: int, rows: int, context: int) -> float:
        """Run ``rows`` rows in the graph of a bucket; milliseconds.

        The rows of the pass before are committed, as the loop does it.
        """
        graph, seed = self._bench.graph(bucket), rows
        lane = Lane(self._bench.some_ids(seed, rows), context, self._commit)
        self._bench.feed(graph, [lane])
        self._commit = rows
        start = perf_counter()
        self._bench.run(graph, context + bucket)
        return (perf_counter() - start) * 1e3

    def plain(self, context: int) -> float:
        """Run one row in the smallest verify graph, which is plain decoding; milliseconds."""
        return self.verify(self._geometry.row_buckets[0], 1, context)

    def draft(self, lookahead: int, context: int) -> float:
        """Run a draft graph that catches up on one row; milliseconds."""
        graph = f"mtp_draft_k{lookahead}"
        for name in ("tokens", "num_rows", "context_len"):
            self._engine.buffer(graph, name)[:] = 0
        self._engine.buffer(graph, "num_rows")[0] = 1
        self._engine.buffer(graph, "context_len")[0] = context - 1
        start = perf_counter()
        self._bench.run(graph, context + lookahead)
        return (perf_counter() - start) * 1e3

    def one_context(
        self, context: int, rounds: int, meter: ReadMeter, progress: Progress
    ) -> Passes:
        """Time every verify and draft graph in turn."""
        buckets, lookaheads = self._geometry.row_buckets, self._geometry.lookaheads
        actions: list[Action] = [lambda: self.plain(context)]
        actions += [lambda r=r: self.verify(r, r, context) for r in buckets]  # type: ignore[misc]
        actions += [lambda k=k: self.draft(k, context) for k in lookaheads]  # type: ignore[misc]
        plain, *others = interleaved(actions, rounds, meter, progress)
        verify, drafts = others[: len(buckets)], others[len(buckets) :]
        return Passes(
            plain=plain,
            verify=tuple(RowsCost(rows=r, ms=s) for r, s in zip(buckets, verify, strict=True)),
            drafts=tuple(
                DraftCost(lookahead=k, ms=s) for k, s in zip(lookaheads, drafts, strict=True)
            ),
        )

    def by_context(
        self, contexts: Sequence[int], rounds: int, meter: ReadMeter, progress: Progress
    ) -> tuple[ContextCost, ...]:
        """Time plain, largest verify and largest draft pass at every context, in turn."""
        most, k = self._geometry.row_buckets[-1], max(self._geometry.lookaheads, default=0)
        actions: list[Action] = []
        for c in contexts:
            actions.append(lambda c=c: self.plain(c))  # type: ignore[misc]
            actions.append(lambda c=c: self.verify(most, most, c))  # type: ignore[misc]
            if k:
                actions.append(lambda c=c: self.draft(k, c))  # type: ignore[misc]
        samples = interleaved(actions, rounds, meter, progress)
        each = len(actions) // len(contexts)
        return tuple(
            ContextCost(
                context=c,
                plain=samples[i],
                verify=samples[i + 1],
                draft=samples[i + 2] if k else None,
                kv_bytes=kv_bytes(self._engine.package.manifest, c),
            )
            for i, c in zip(range(0, len(samples), each), contexts, strict=True)
        )


def interleaved(
    actions: Sequence[Action], rounds: int, meter: ReadMeter, progress: Progress
) -> list[Samples]:
    """Take all actions in turn, round by round, after one that does not count.

    What else happens on the machine meets all of them alike that way. Memory is read now and then
    in between.
    """
    for action in actions:
        action()
    taken: list[list[float]] = [[] for _ in actions]
    pause = -(-rounds // _READS)
    for i in range(rounds):
        for action, values in zip(actions, taken, strict=True):
            values.append(action())
        if i % pause == 0:
            meter.read()
        progress.advance(1)
    return [Samples.of(values) for values in taken]
