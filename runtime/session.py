"""Batch slots, prefill and the speculative round: the one loop of the runtime (docs/loop.md).

A slot holds one sequence. ``prefill`` puts a prompt in and gives its first token; every ``step``
then drafts K tokens, verifies them in one target pass and commits what was accepted. State is
committed lazily: the accepted rows of a round are folded in by the next verify graph.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter

import numpy as np

from qwen_mtp.errors import RequestError
from qwen_mtp.runtime.blocks import BlockPool
from qwen_mtp.runtime.closing import Closing
from qwen_mtp.runtime.costs import bucket
from qwen_mtp.runtime.engines import close_engine, open_engine
from qwen_mtp.runtime.feeds import (
    LiveSequence,
    WaitingRows,
    feed_draft,
    feed_prefill,
    feed_verify,
    put_back,
    take_waiting,
)
from qwen_mtp.runtime.limits import (
    banned_ids,
    check_drafts,
    check_request,
    check_room,
    chosen_lookahead,
)
from qwen_mtp.runtime.lookahead import AdaptiveLookahead, Choice, FixedLookahead, Lookahead, Need
from qwen_mtp.runtime.package import Package
from qwen_mtp.runtime.runner import GraphRunner
from qwen_mtp.runtime.sampling import ResolvedSampling

Proposals = Mapping[int, Sequence[int]]


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one round did for one slot.

    Attributes:
        tokens: Committed tokens: accepted drafts, then one token of the target.
        drafted: Drafts that were verified.
        accepted: Drafts among ``tokens``.
        error: Why the slot was released instead: the model gave a NaN. Its tokens are empty.
    """

    tokens: tuple[int, ...]
    drafted: int
    accepted: int
    error: str | None = None


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Milliseconds of the last prefill or step, by phase."""

    prefill: float = 0.0
    draft: float = 0.0
    verify: float = 0.0
    host: float = 0.0


class Session(Closing):
    """Sequences in batch slots over the compiled graphs of one package; a context manager."""

    def __init__(
        self,
        package: Package,
        *,
        threads: int | None = None,
        num_speculative_tokens: int | None = None,
        adaptive: bool = False,
        keep_logits: bool = False,
        device: int | None = None,
        native: bool | None = None,
        engine: GraphRunner | None = None,
    ) -> None:
        """Load the package.

        Args:
            package: The package.
            threads: ONNX Runtime: threads inside an operator; None takes the number of usable
                cores.
            num_speculative_tokens: Drafts a round, 0 = plain decoding; None takes the largest
                the package was exported for.
            adaptive: At most so many: as many as pay, chosen each round.
            keep_logits: Keep the logits of each pass readable in ``engine``.
            device: Ascend: which NPU, as ``npu-smi info`` counts; None takes the first.
            native: ONNX Runtime: run on the native kernels of this machine, which may compile
                them, or not; None where that can be.
            engine: What runs the graphs of this package and holds no sequences of another
                session; ``threads``, ``keep_logits``, ``device`` and ``native`` are its own then,
                and it is not closed here. None loads one.

        Raises:
            MissingExtraError: Ascend: CANN's module ``acl`` cannot be imported.
            PackageError: The model cannot be loaded, or is not compiled yet.
            RequestError: A number is out of range.
        """
        geometry = package.manifest.geometry
        k = chosen_lookahead(geometry, num_speculative_tokens)
        self.package, self.lookahead = package, k
        self.engine: GraphRunner = engine or open_engine(
            package, threads=threads, device=device, keep_logits=keep_logits, native=native
        )
        self._owns_engine = engine is None
        self.times = StepTimes()
        self.policy: Lookahead = (
            AdaptiveLookahead(package, k) if adaptive and k else FixedLookahead(geometry, k)
        )
        self._slots: dict[int, LiveSequence] = {}
        self._pool = BlockPool(geometry.num_blocks)
        self._table = np.zeros((geometry.max_num_seqs, geometry.table_width), np.int32)

    def close(self) -> None:
        """Give back the device of an engine that was loaded here; closing twice is harmless.

        Raises:
            PackageError: AscendCL refused to release something; the rest was released.
        """
        if self._owns_engine:
            close_engine(self.engine)

    @property
    def free_slots(self) -> tuple[int, ...]:
        """Slots that ``prefill`` may use, ascending."""
        count = self.package.manifest.geometry.max_num_seqs
        return tuple(slot for slot in range(count) if slot not in self._slots)

    def prefill(self, prompt: Sequence[int], sampling: ResolvedSampling) -> tuple[int, int]:
        """Put a prompt into a free slot and run it in chunks.

        Args:
            prompt: Token ids, at least one, fewer than ``max_model_len``.
            sampling: Complete sampling parameters, see ``SamplingParams.resolve``.

        Returns:
            The slot and the first token after the prompt.

        Raises:
            RequestError: The prompt is empty, too long or holds an unknown id, no slot is free,
                or the model gave a NaN.
        """
        begin = perf_counter()
        check_request(self.package.manifest, prompt, sampling)
        if not self.free_slots:
            raise RequestError("no free slot: release one, or export with a larger --max-num-seqs")
        slot = self.free_slots[0]
        self._slots[slot] = LiveSequence(sampling, banned_ids(self.package.manifest, sampling))
        self.policy.admit(slot)
        self.engine.clear_slot(slot)
        try:
            token = self._run_chunks(slot, list(prompt))
        except BaseException:
            self.release(slot)
            raise
        self.times = StepTimes(prefill=(perf_counter() - begin) * 1e3)
        return slot, token

    def step(self, drafts: Proposals | None = None) -> dict[int, StepResult]:
        """Run one round over every occupied slot.

        Args:
            drafts: By slot, proposals that replace those of the MTP head (which runs all the
                same); at most K each, -1 for none. They also decide how many the slot has. The
                output law does not depend on them.

        Returns:
            By slot, what was committed, or the error that released the slot.

        Raises:
            RequestError: A slot has reached the end of its context, or a given draft is not one
                that the package could verify; nothing was run.
        """
        begin, given = perf_counter(), drafts or {}
        check_room(self.package.manifest, self._slots)
        check_drafts(self.package.manifest, given, self._slots, self.lookahead)
        for sequence in self._slots.values():
            self._reserve(sequence)
        choice = self.plan(given)
        draft_ms, proposals = self._propose(choice, given)
        rows = max((len(p) for p in proposals.values()), default=0) + 1
        graph = f"target_verify_r{bucket(self.package.manifest.geometry.row_buckets, rows)}"
        waiting = self._set_aside(graph, choice)
        feed_verify(self.engine, graph, self._slots, proposals)
        verify_ms = self._run(graph)
        results = self._commit(graph, proposals, waiting)
        whole = (perf_counter() - begin) * 1e3
        self.times = StepTimes(0.0, draft_ms, verify_ms, whole - draft_ms - verify_ms)
        return results

    def plan(self, drafts: Proposals | None = None) -> Choice:
        """What the next :meth:`step` with these drafts will propose; nothing is run."""
        limit, given = self.package.manifest.geometry.max_model_len, drafts or {}
        needs = {}
        for slot, sequence in self._slots.items():
            room = sequence.draft_limit(self.lookahead, limit)
            due = room > 0 and sequence.rows >= self.package.manifest.geometry.max_rows
            own = len(given[slot]) if slot in given else None
            needs[slot] = Need(room, due, not sequence.sampling.greedy, own)
        return self.policy.choose(needs)

    def release(self, slot: int) -> None:
        """Free a slot and its blocks; a slot that is free already is left alone."""
        if slot in self._slots:
            self._pool.give_back(self._slots.pop(slot).blocks)
            self._table[slot] = 0

    def context_len(self, slot: int) -> int:
        """Positions of a slot that are computed and accepted; one committed token follows."""
        return self._slots[slot].computed

    def _propose(self, choice: Choice, given: Proposals) -> tuple[float, Proposals]:
        """Drafts of each slot, and the milliseconds the draft graph took."""
        if not choice.lookahead:
            return 0.0, {}
        graph = f"mtp_draft_k{choice.lookahead}"
        feed_draft(self.engine, graph, {slot: self._slots[slot] for slot in choice.drafts})
        took = self._run(graph)
        ids = self.engine.buffer(graph, "draft_ids")
        drafts = choice.drafts.items()
        return took, {b: list(given.get(b, ids[b].tolist()))[:k] for b, k in drafts}

    def _set_aside(self, graph: str, choice: Choice) -> dict[int, WaitingRows]:
        """Save what the drafter has not taken in where the verify graph will write."""
        limit = self.package.manifest.geometry.max_model_len
        return {
            slot: take_waiting(self.engine, graph, slot, sequence)
            for slot, sequence in self._slots.items()
            if slot not in choice.drafts and sequence.draft_limit(self.lookahead, limit)
        }

    def _commit(
        self, graph: str, proposals: Proposals, waiting: Mapping[int, WaitingRows]
    ) -> dict[int, StepResult]:
        tokens = self.engine.buffer(graph, "tokens").tolist()
        counts = self.engine.buffer(graph, "num_accepted_drafts").tolist()
        results = {}
        for slot, sequence in list(self._slots.items()):
            accepted, drafted = counts[slot], len(proposals.get(slot, ()))
            emitted = tokens[slot][: accepted + 1]
            if -1 in emitted:  # the other slots have been run and must go on
                results[slot] = StepResult((), drafted, 0, self._nan_line(slot))
                self.release(slot)
                continue
            sequence.pending = accepted + 1
            put_back(self.engine, graph, slot, sequence, waiting.get(slot))
            sequence.computed += accepted + 1
            sequence.emitted += accepted + 1
            sequence.last = emitted[-1]
            self.policy.observe(slot, drafted, accepted)
            results[slot] = StepResult(tuple(emitted), drafted, accepted)
        return results

    def _run_chunks(self, slot: int, prompt: list[int]) -> int:
        """Run a whole prompt and leave its last row where the drafter looks for it."""
        sequence, engine = self._slots[slot], self.engine
        while sequence.computed < len(prompt):
            start = sequence.computed
            rows = feed_prefill(engine, sequence, prompt, start, self.lookahead > 0)
            sequence.computed += rows
            self._reserve(sequence)
            self._table[slot, : len(sequence.blocks)] = sequence.blocks
            width = engine.table_width(sequence.computed)
            engine.run("prefill", self._table[slot : slot + 1, :width], slot)
        token = int(engine.buffer("prefill", "tokens")[0, 0])
        if token == -1:
            raise RequestError(self._nan_line(slot))
        sequence.last, sequence.emitted = token, 1
        sequence.rows, sequence.rows_start = 1, sequence.computed - 1
        if self.lookahead:
            draft = f"mtp_draft_k{self.package.max_lookahead}"
            engine.buffer(draft, "tokens")[slot, 0] = token
            engine.buffer(draft, "hidden")[slot, 0] = engine.buffer("prefill", "hidden")[0]
        return token

    def _run(self, graph: str) -> float:
        """Run a batched graph; milliseconds."""
        start = perf_counter()
        for slot, sequence in self._slots.items():
            self._table[slot, : len(sequence.blocks)] = sequence.blocks
        furthest = max((self._reach(s) for s in self._slots.values()), default=1)
        width = self.engine.table_width(furthest)
        self.engine.run(graph, self._table[:, :width])
        took = (perf_counter() - start) * 1e3
        self.policy.measure(self.package.graph(graph), took)
        return took

    def _reach(self, sequence: LiveSequence) -> int:
        """Positions a round may touch."""
        geometry = self.package.manifest.geometry
        most = geometry.table_width * geometry.block_size
        return min(sequence.computed + geometry.max_rows, most)

    def _reserve(self, sequence: LiveSequence) -> None:
        size = self.package.manifest.geometry.block_size
        while len(sequence.blocks) * size < self._reach(sequence):
            sequence.blocks.append(self._pool.take())

    def _nan_line(self, slot: int) -> str:
        return (
            f"slot {slot}: the model gave NaN logits after position "
            f"{self._slots[slot].computed}; run qwen-mtp verify on the package"
        )
