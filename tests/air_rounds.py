"""Runs GE models through the interpreter, beside ONNX Runtime or beside their own stepping."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from qwen_mtp.custom_ops.pool import by_head
from qwen_mtp.interpreted import InterpretedEngine
from qwen_mtp.runtime.costs import bucket
from qwen_mtp.runtime.package import Package
from qwen_mtp.runtime.session import Session
from tests.committed import places, recurrent, rows, stash
from tests.scripted import Floats, Track, advance, begin, bucket_of, nothing

States = dict[str, Floats]
KEPT = 3  # columns of a convolution window
LEFT = 1e4


class Interpreted(InterpretedEngine):
    """Pools are shown by head; on demand all that must not matter is NaN before every graph."""

    spoiled: Session | None = None

    def state(self, name: str) -> Any:
        found = super().state(name)
        return by_head(found) if name.endswith((".key", ".value")) else found

    def run(self, graph: str, table: npt.NDArray[np.int32], slot: int = 0) -> None:
        if self.spoiled is not None:
            _spoil(self, self.spoiled, graph)
        super().run(graph, table, slot)


@cache
def _engine(directory: Path) -> Interpreted:
    return Interpreted(Package.open(directory))


def ge_session(package: Package, k: int) -> Session:
    """A session on an engine that is loaded once; all that older sessions left in it is NaN."""
    engine = _engine(package.directory)
    for spec in package.manifest.states:
        if spec.per_slot:
            engine._states[spec.name][:] = np.nan
        else:
            engine._states[spec.name][1:] = _leftover(package)
    return Session(package, num_speculative_tokens=k, engine=engine)


def _leftover(package: Package) -> float:
    """What pools hold where nothing counts; the kernel multiplies it by zero, so no NaN there."""
    return LEFT if package.manifest.geometry.layout == "slots" else float("nan")


@contextmanager
def poisoned(running: Session) -> Iterator[None]:
    """Before every graph, make NaN of everything that must not matter to it.

    Slots without a sequence, blocks without an owner, positions that are not computed yet,
    rejected rows of the stash, slots and columns that are not the chosen ones, hidden rows that
    were not committed, and of the reserved block all but its zero.
    """
    engine = running.engine
    assert isinstance(engine, Interpreted)
    engine.spoiled = running
    try:
        yield
    finally:
        engine.spoiled = None


def _spoil(engine: Interpreted, running: Session, graph: str) -> None:
    manifest, kind = running.package.manifest, running.package.graph(graph).kind
    idle = [*running.free_slots]
    for spec in manifest.states:
        state = engine._states[spec.name]
        if spec.kind in ("kv", "mtp_kv"):
            _spoil_pool(state.flatten(0, 1), running, kind, spec.kind)
            continue
        slots = state.view(manifest.geometry.max_num_seqs, -1, *state.shape[1:])
        slots = slots if spec.kind == "ssm" else state
        slots[idle] = np.nan
        for slot, sequence in running._slots.items():
            if spec.kind == "stash" and kind == "target_verify":
                slots[slot, sequence.pending :] = np.nan
            elif manifest.geometry.layout == "slots":
                chosen, width = max(sequence.pending, 1) - 1, 1 if spec.kind == "ssm" else KEPT
                slots[slot, :chosen] = np.nan
                slots[slot, chosen + width :] = np.nan
    if kind == "mtp_draft":
        hidden = engine.buffer(graph, "hidden")
        hidden[idle] = np.nan
        for slot, sequence in running._slots.items():
            hidden[slot, sequence.rows :] = np.nan


def _spoil_pool(pool: Any, running: Session, kind: str, pool_kind: str) -> None:
    """``pool`` is ``[places, Nkv, D]``."""
    size, value = running.package.manifest.geometry.block_size, _leftover(running.package)
    pool[1:size] = value
    for block in running._pool._free:
        pool[block * size : (block + 1) * size] = value
    graphs = ("prefill", "mtp_draft" if pool_kind == "mtp_kv" else "target_verify")
    if kind not in graphs[1:]:
        return
    for slot, sequence in running._slots.items():
        done = sequence.rows_start if pool_kind == "mtp_kv" else sequence.computed
        pool[places(running, slot, done, len(sequence.blocks) * size)] = value


@dataclass(slots=True)
class Seen:
    """What a comparison found.

    Attributes:
        tokens: Emitted tokens that were compared.
        accepted: Rounds by accepted drafts.
        drafts: Drafts of the head that were compared.
        gaps: Largest difference by what it is of.
        ties: Where the tokens differ, how far ONNX Runtime's two best logits are apart.
        draft_ties: The same of the head's drafts.
        pairs: Accepted counts of neighbouring rounds.
    """

    tokens: int = 0
    drafts: int = 0
    accepted: Counter[int] = field(default_factory=Counter)
    gaps: dict[str, float] = field(default_factory=dict)
    ties: list[float] = field(default_factory=list)
    draft_ties: list[float] = field(default_factory=list)
    pairs: set[tuple[int, int]] = field(default_factory=set)

    def gap(self, name: str, found: Floats, wanted: Floats, unit: float = 1.0) -> None:
        """Note a difference in ``unit``; one that is not a number counts as infinite."""
        assert found.shape == wanted.shape, name
        worst = float(np.abs(found - wanted).max()) / unit if found.size else 0.0
        worst = worst if np.isfinite(worst) else float("inf")
        self.gaps[name] = max(self.gaps.get(name, 0.0), worst)

    def gaps_of(self, found: States, wanted: States) -> None:
        """Note differences of states, where a tensor passes 1 as parts of its largest value."""
        assert found.keys() == wanted.keys()
        for name, value in found.items():
            head = "mtp." if name.startswith("mtp.") else ""
            largest = float(np.abs(wanted[name]).max(initial=1.0))
            self.gap(head + name.rpartition(".")[2], value, wanted[name], largest)


def margin(row: Floats) -> float:
    """How far the two best logits of ``[V]`` are apart."""
    second, best = np.partition(row, -2)[-2:]
    return float(best - second)


class Pair:
    """The same requests over ONNX Runtime and over GE models, round by round.

    ONNX Runtime leads: its drafts are verified by both, and where the other one emits something
    else, this is noted and it goes on from ONNX Runtime's tokens.
    """

    def __init__(self, onnx: Session, ge: Session) -> None:
        self.onnx, self.ge, self.seen = onnx, ge, Seen()

    def begin(self, track: Track) -> None:
        """Prefill in both."""
        begin(self.onnx, track)
        twin = begin(self.ge, Track(track.prompt, nothing, track.sampling))
        assert twin.slot == track.slot
        self._emitted(track.slot, track.logits, twin.logits, track.tokens, twin.tokens)

    def advance(self, tracks: Sequence[Track]) -> None:
        """One round."""
        results = advance(self.onnx, tracks)
        graph = bucket_of(self.onnx, results)
        ids = self.onnx.engine.buffer(graph, "token_ids")
        before = {slot: chosen(self.ge, slot) for slot in results}
        found = self.ge.step({b: ids[b, 1 : 1 + r.drafted].tolist() for b, r in results.items()})
        wanted_rows = self.onnx.engine.buffer(graph, "logits")
        found_rows = self.ge.engine.buffer(bucket_of(self.ge, found), "logits")
        assert found.keys() == results.keys()
        for slot, result in results.items():
            rows = np.s_[slot, : 1 + result.drafted]
            emitted = (result.tokens, found[slot].tokens)
            self._emitted(slot, wanted_rows[rows], found_rows[rows], *emitted)
            self.seen.accepted[result.accepted] += 1
            self._drafted(slot)
            self._left(slot, before[slot])

    def release(self, slot: int) -> None:
        """Free a slot in both."""
        self.onnx.release(slot)
        self.ge.release(slot)

    def _emitted(
        self, slot: int, rows: Any, found_rows: Any, tokens: Sequence[int], found: Sequence[int]
    ) -> None:
        for row, found_row in zip(rows, found_rows, strict=True):
            self.seen.gap("logits", found_row, row)
        self.seen.tokens += len(tokens)
        if [*tokens] == [*found]:
            return
        at = next(i for i, (a, b) in enumerate(zip(tokens, found, strict=False)) if a != b)
        self.seen.ties.append(margin(rows[at]))
        follow(self.ge, slot, tokens)

    def _drafted(self, slot: int) -> None:
        for j in range(self.ge.lookahead):
            row, found = (draft_logits(s, j)[slot] for s in (self.onnx, self.ge))
            self.seen.gap("draft logits", found, row)
            self.seen.drafts += 1
            if row.argmax() != found.argmax():
                self.seen.draft_ties.append(margin(row))
                return

    def _left(self, slot: int, before: States) -> None:
        """The state after a round; in the layout of slots its choice by this round."""
        start = self.ge._slots[slot].rows_start
        end = self.ge.context_len(slot)
        assert end == self.onnx.context_len(slot)
        wanted = recurrent(self.onnx, slot)
        lazy = self.ge.package.manifest.geometry.layout != "slots"
        self.seen.gaps_of(recurrent(self.ge, slot) if lazy else before, wanted)
        if lazy:
            pair = (stash(s, slot) for s in (self.ge, self.onnx))
            kept = ({n: x[: end - start] for n, x in found.items()} for found in pair)
            self.seen.gaps_of(*kept)
        self.seen.gaps_of(*(rows(s, slot, "kv", end) for s in (self.ge, self.onnx)))
        if self.ge.lookahead:
            self.seen.gaps_of(*(rows(s, slot, "mtp_kv", start) for s in (self.ge, self.onnx)))


def follow(running: Session, slot: int, tokens: Sequence[int]) -> None:
    """Let a slot have emitted ``tokens`` in its last round; it has run the rows behind them."""
    sequence, count = running._slots[slot], len(tokens)
    sequence.emitted += count - sequence.rows
    sequence.computed = sequence.rows_start + count
    sequence.pending = count if sequence.pending else 0
    sequence.rows, sequence.last = count, tokens[-1]
    if running.lookahead:
        running.engine.buffer(_draft_graph(running), "tokens")[slot, :count] = tokens


def draft_logits(running: Session, j: int) -> Any:
    """``[B, V]`` of draft j of the last round."""
    return running.engine.buffer(_draft_graph(running), f"draft_logits.{j}")


def _draft_graph(running: Session) -> str:
    lookaheads = running.package.manifest.geometry.lookaheads
    return f"mtp_draft_k{bucket(lookaheads, running.lookahead)}"


def slot_states(running: Session, slot: int) -> States:
    """Windows ``[W - 2 + P, C]`` and states ``[P, Nv, Dv, Dk]`` of a slot."""
    rows = running.package.manifest.geometry.max_rows
    found = {}
    for spec in running.package.manifest.states:
        if spec.kind in ("conv", "ssm"):
            state = running.engine.state(spec.name)
            part = state[slot] if spec.kind == "conv" else state[slot * rows : (slot + 1) * rows]
            found[spec.name] = part.copy()
    return found


def at_row(states: States, row: int) -> States:
    """Of what :func:`slot_states` gave, window ``[W - 1, C]`` and state behind one row."""
    return {
        name: value[row : row + KEPT] if name.endswith(".conv") else value[row]
        for name, value in states.items()
    }


def chosen(running: Session, slot: int) -> States:
    """What the next round will start from in the layout of slots, states ``[Nv, Dk, Dv]``."""
    if running.package.manifest.geometry.layout != "slots":
        return {}
    states = at_row(slot_states(running, slot), max(running._slots[slot].pending, 1) - 1)
    return {
        name: value if name.endswith(".conv") else value.swapaxes(-1, -2)
        for name, value in states.items()
    }


def serve(
    pair: Pair, tracks: Sequence[Track], length: int, joins: Callable[[int], int] = int
) -> None:
    """Run requests until ``length`` tokens each; the i-th joins in round ``joins(i)`` or later."""
    waiting = [(track, joins(i)) for i, track in enumerate(tracks)]
    live: list[Track] = []
    turn = 0
    while waiting or live:
        while waiting and pair.ge.free_slots and (waiting[0][1] <= turn or not live):
            live.append(waiting.pop(0)[0])
            pair.begin(live[-1])
        pair.advance(live)
        for track in [t for t in live if len(t.tokens) >= length]:
            pair.release(track.slot)
            live.remove(track)
        turn += 1
