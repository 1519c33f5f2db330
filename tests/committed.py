"""What one-token stepping leaves in the state, position by position, and how a session differs.

Commits are lazy: the verify graph of a round that starts at position c first folds in what the
round before accepted. So right after that round windows and recurrent state stand at c exactly.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from unittest import mock

import numpy as np
import numpy.typing as npt

from qwen_mtp.runtime.engine import Engine
from qwen_mtp.runtime.session import Session
from tests.scripted import Floats, Track, advance, begin, nothing, same_bits


@dataclass(slots=True)
class History:
    """One-token stepping of one request.

    Attributes:
        track: The request.
        recurrent: By number of committed positions: conv windows and recurrent states.
        inputs: By position: the raw conv inputs ``u`` and the other rows of the stash.
        pools: Keys and values of the target by position, ``[Nkv, positions, D]``.
        mtp: The same of the MTP head, one position fewer: its last row is not drafted from yet.
    """

    track: Track
    recurrent: dict[int, dict[str, Floats]] = field(default_factory=dict)
    inputs: dict[int, dict[str, Floats]] = field(default_factory=dict)
    pools: dict[str, Floats] = field(default_factory=dict)
    mtp: dict[str, Floats] = field(default_factory=dict)


def recurrent(running: Session, slot: int) -> dict[str, Floats]:
    """Conv windows and recurrent states of a slot."""
    return _of_kind(running, slot, ("conv", "ssm"))


def stash(running: Session, slot: int) -> dict[str, Floats]:
    """The rows of the last round, ``[P, ...]``."""
    return _of_kind(running, slot, ("stash",))


def _of_kind(running: Session, slot: int, kinds: tuple[str, ...]) -> dict[str, Floats]:
    states = running.package.manifest.states
    chosen = [spec.name for spec in states if spec.kind in kinds]
    return {name: running.engine.state(name)[slot].copy() for name in chosen}


def places(running: Session, slot: int, start: int, stop: int) -> npt.NDArray[np.int64]:
    """Where positions ``start .. stop - 1`` of a slot lie in the pools."""
    size = running.package.manifest.geometry.block_size
    position = np.arange(start, stop)
    blocks = np.array(running._slots[slot].blocks)
    return blocks[position // size] * size + position % size


def rows(running: Session, slot: int, kind: str, count: int) -> dict[str, Floats]:
    """The first ``count`` positions in the pools of one kind."""
    at = places(running, slot, 0, count)
    names = [spec.name for spec in running.package.manifest.states if spec.kind == kind]
    return {name: running.engine.state(name)[:, at] for name in names}


def first(count: int, pools: dict[str, Floats]) -> dict[str, Floats]:
    """The first ``count`` positions of what :func:`rows` gave."""
    return {name: x[:, :count] for name, x in pools.items()}


def step_by_step(running: Session, prompt: Sequence[int], length: int) -> History:
    """Emit one token a round, with the MTP head catching up, and note the state each time."""
    history = History(begin(running, Track(prompt, nothing)))
    slot = history.track.slot
    while len(history.track.tokens) < length:
        at = running.context_len(slot)
        advance(running, [history.track])
        history.recurrent[at] = recurrent(running, slot)
        history.inputs[at] = {name: x[0] for name, x in stash(running, slot).items()}
    end = running.context_len(slot)
    history.pools = rows(running, slot, "kv", end)
    history.mtp = rows(running, slot, "mtp_kv", end - 1)
    running.release(slot)
    return history


def state_differences(
    history: History, running: Session, slot: int, start: int, *, mtp: bool = True
) -> list[str]:
    """Names of what differs from one-token stepping after a round that started at ``start``.

    Compared bit by bit: windows and recurrent states at ``start``; the target's pools up to the
    last accepted row; the head's pools up to ``start``; the accepted rows of the stash.
    """
    end = running.context_len(slot)
    found = _differing(history.recurrent[start], recurrent(running, slot))
    kept = rows(running, slot, "kv", end)
    found += _differing(first(end, history.pools), kept)
    if mtp:
        caught_up = rows(running, slot, "mtp_kv", start)
        found += _differing(first(start, history.mtp), caught_up)
    for name, x in stash(running, slot).items():
        wanted = [history.inputs[p][name] for p in range(start, end)]
        found += _differing({name: np.stack(wanted)}, {name: x[: end - start]})
    return found


def _differing(wanted: dict[str, Floats], found: dict[str, Floats]) -> list[str]:
    assert wanted.keys() == found.keys()
    return [name for name in wanted if not same_bits(wanted[name], found[name])]


@contextmanager
def poisoned(running: Session) -> Iterator[None]:
    """Before every graph, make NaN of everything that must not matter to it.

    Slots without a sequence, blocks without an owner, positions that are not computed yet,
    rejected rows of the stash, hidden rows that were not committed.
    """
    engine, real = running.engine, running.engine.run

    def run(graph: str, table: npt.NDArray[np.int32], slot: int = 0) -> None:
        _poison(running, graph)
        real(graph, table, slot)

    with mock.patch.object(engine, "run", run):
        yield


def _poison(running: Session, graph: str) -> None:
    engine, live = running.engine, running._slots
    kind = running.package.graph(graph).kind
    idle = [*running.free_slots]
    _poison_pools(running, kind)
    for spec in running.package.manifest.states:
        if spec.per_slot:
            for (name, _), state in engine._states.items():
                if name == spec.name:
                    state[idle] = np.nan
        if spec.kind == "stash" and kind == "target_verify":
            for slot, sequence in live.items():
                engine.state(spec.name)[slot, sequence.pending :] = np.nan
    if kind == "mtp_draft":
        hidden = engine.buffer(graph, "hidden")
        hidden[idle] = np.nan
        for slot, sequence in live.items():
            hidden[slot, sequence.rows :] = np.nan


def _poison_pools(running: Session, kind: str) -> None:
    size = running.package.manifest.geometry.block_size
    free = np.array(running._pool._free)[:, None] * size + np.arange(size)
    for spec in running.package.manifest.states:
        if spec.per_slot:
            continue
        pool = running.engine.state(spec.name)
        pool[:, free.ravel()] = np.nan
        for slot, sequence in running._slots.items():
            done = _computed(running, slot, kind, spec.kind)
            if done is not None:
                reach = len(sequence.blocks) * size
                pool[:, places(running, slot, done, reach)] = np.nan


def _computed(running: Session, slot: int, kind: str, pool: str) -> int | None:
    """Positions of a slot that a graph may read in a pool before it writes; None: not touched."""
    sequence = running._slots[slot]
    if pool == "mtp_kv":
        return {"prefill": None, "mtp_draft": sequence.rows_start}.get(kind)
    return {"prefill": None, "target_verify": sequence.computed}.get(kind)


def fill_slot(engine: Engine, slot: int, value: float) -> None:
    """Overwrite the per-slot state of one slot, both buffers of the stash."""
    per_slot = {spec.name for spec in engine.package.manifest.states if spec.per_slot}
    for (name, _), state in engine._states.items():
        if name in per_slot:
            state[slot] = value
