"""Ways to break the loop and the commit, and one run that must notice each of them."""

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pytest

from qwen_mtp.errors import RequestError
from qwen_mtp.runtime import session as session_module
from qwen_mtp.runtime.engine import Engine
from qwen_mtp.runtime.package import Package
from qwen_mtp.runtime.session import Session
from tests.committed import (
    History,
    first,
    places,
    recurrent,
    rows,
    state_differences,
    step_by_step,
)
from tests.scripted import (
    GREEDY,
    Floats,
    Scripted,
    Track,
    Want,
    advance,
    begin,
    counts,
    differences,
    random_prompts,
)

K = 3
STEPS = 36
Mutant: TypeAlias = Callable[[pytest.MonkeyPatch], None]
Ints: TypeAlias = npt.NDArray[np.int32]


def noticed(package: Package, *, native: bool | None = None) -> list[str]:
    """What the checks of the exactness and state tests find in a package of two slots."""
    running = Session(
        package,
        num_speculative_tokens=K,
        engine=Engine(package, threads=1, keep_logits=True, native=native),
    )
    try:
        prompts = random_prompts((3, 21), seed=4)
        histories = [step_by_step(running, prompt, STEPS + K + 2) for prompt in prompts]
        found = [line for history in histories for line in _prefill(running, history)]
        for start in (0, 7):
            found += _batch(running, histories, start)
        return found
    except RequestError as error:
        return [str(error)]


def _prefill(running: Session, history: History) -> list[str]:
    """Stepping against one prefill of the whole text: equal but for rounding."""
    at = len(history.track.prompt) + STEPS - 3
    text = [*history.track.prompt, *history.track.tokens][:at]
    slot, _ = running.prefill(text, GREEDY)
    pairs: list[tuple[dict[str, Floats], dict[str, Floats]]] = [
        (history.recurrent[at], recurrent(running, slot)),
        (first(at, history.pools), rows(running, slot, "kv", at)),
        (first(at - 1, history.mtp), rows(running, slot, "mtp_kv", at - 1)),
    ]
    running.release(slot)
    return [
        f"prefill {name}"
        for wanted, found in pairs
        for name, value in found.items()
        if not np.allclose(value, wanted[name], rtol=1e-4, atol=1e-4)
    ]


def _batch(running: Session, histories: list[History], start: int) -> list[str]:
    """Both requests together under different scripts, each second cycle with ragged drafts."""
    scripts = (counts(K, start), _ragged(start))
    tracks = [
        Track(history.track.prompt, Scripted(history.track.tokens, script))
        for history, script in zip(histories, scripts, strict=True)
    ]
    for track in tracks:
        begin(running, track)
    found: list[str] = []
    while not found and all(len(track.tokens) < STEPS for track in tracks):
        starts = [running.context_len(track.slot) for track in tracks]
        advance(running, tracks)
        for history, track, at in zip(histories, tracks, starts, strict=True):
            length = min(STEPS, len(track.tokens))
            found += differences(history.track, track, length)
            found += [f"state {x}" for x in state_differences(history, running, track.slot, at)]
    for track in tracks:
        running.release(track.slot)
    return found


def _ragged(start: int) -> Any:
    for want in counts(K, start):
        yield want
        yield Want(0, 0)


def _after_feed(name: str, change: Callable[[Engine, str, Mapping[int, Any]], None]) -> Mutant:
    """Change what a graph is fed."""

    def mutate(patch: pytest.MonkeyPatch) -> None:
        real = getattr(session_module, name)

        def feed(engine: Engine, graph: str, sequences: Mapping[int, Any], *rest: Any) -> None:
            real(engine, graph, sequences, *rest)
            change(engine, graph, sequences)

        patch.setattr(session_module, name, feed)

    return mutate


def _accepted(change: Callable[[Ints, Ints], Ints]) -> Mutant:
    """Change the counts to commit, given them and the rows of this round."""

    def apply(engine: Engine, graph: str, _: Mapping[int, Any]) -> None:
        counts = engine.buffer(graph, "num_accepted")
        counts[:] = change(counts.copy(), engine.buffer(graph, "num_valid"))

    return _after_feed("feed_verify", apply)


def _add(feed: str, name: str, amount: int) -> Mutant:
    def apply(engine: Engine, graph: str, sequences: Mapping[int, Any]) -> None:
        engine.buffer(graph, name)[list(sequences)] += amount

    return _after_feed(feed, apply)


def _rows_seen(change: Callable[[Ints], Ints]) -> Mutant:
    """Change how many rows the MTP head catches up on."""

    def apply(engine: Engine, graph: str, _: Mapping[int, Any]) -> None:
        rows = engine.buffer(graph, "num_rows")
        rows[:] = change(rows.copy())

    return _after_feed("feed_draft", apply)


def _around_verify(change: Callable[[Engine, Callable[[], None]], None]) -> Mutant:
    """Change what running a verify graph does."""

    def mutate(patch: pytest.MonkeyPatch) -> None:
        real = Engine.run

        def run(engine: Engine, graph: str, table: Ints, slot: int = 0) -> None:
            if graph.startswith("target_verify"):
                change(engine, lambda: real(engine, graph, table, slot))
            else:
                real(engine, graph, table, slot)

        patch.setattr(Engine, "run", run)

    return mutate


def _twice(engine: Engine, run: Callable[[], None]) -> None:
    parity = engine._parity
    run()
    engine._parity = parity
    run()


def _never_swapped(engine: Engine, run: Callable[[], None]) -> None:
    run()
    engine._parity = 0


def _without(kind: str) -> Callable[[Engine, Callable[[], None]], None]:
    """Put the states of one kind back to what they were."""

    def change(engine: Engine, run: Callable[[], None]) -> None:
        names = [spec.name for spec in engine.package.manifest.states if spec.kind == kind]
        before = {name: engine.state(name).copy() for name in names}
        run()
        for name, value in before.items():
            engine.state(name)[:] = value

    return change


def _late_write(patch: pytest.MonkeyPatch) -> None:
    """Keys and values of rejected rows land after the next round instead of in their own."""
    real = Session._commit

    def commit(self: Session, graph: str, *rest: Any) -> Any:
        late = getattr(self, "_late", [])
        results = real(self, graph, *rest)
        for name, at, values in late:
            self.engine.state(name)[:, at] = values
        self._late = []  # type: ignore[attr-defined]
        for slot, result in results.items():
            start = self.context_len(slot)
            at = places(self, slot, start, start + result.drafted - result.accepted)
            for spec in self.package.manifest.states:
                if spec.kind == "kv":
                    self._late.append((spec.name, at, self.engine.state(spec.name)[:, at]))  # type: ignore[attr-defined]
        return results

    patch.setattr(Session, "_commit", commit)


def _no_clear(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Engine, "clear_slot", lambda *_: None)


def _no_hidden(patch: pytest.MonkeyPatch) -> None:
    """The last hidden row of a prompt does not reach the MTP head."""
    real = Session._run_chunks

    def chunks(self: Session, slot: int, prompt: list[int]) -> int:
        token = real(self, slot, prompt)
        self.engine.buffer(f"mtp_draft_k{K}", "hidden")[slot, 0] = 0
        return token

    patch.setattr(Session, "_run_chunks", chunks)


def _chunk_edge(patch: pytest.MonkeyPatch) -> None:
    """The last row of a chunk is paired with a wrong next token."""
    real = session_module.feed_prefill

    def feed(engine: Engine, *rest: Any) -> int:
        count = real(engine, *rest)
        engine.buffer("prefill", "next_token_ids")[0, -1] = 0
        return count

    patch.setattr(session_module, "feed_prefill", feed)


RUNTIME: dict[str, Mutant] = {
    "one row too few is committed": _accepted(lambda n, _: np.maximum(n - 1, 0)),
    "one row too many is committed": _accepted(lambda n, _: np.where(n > 0, n % (K + 1) + 1, 0)),
    "the count is clamped to the conv window": _accepted(lambda n, _: np.minimum(n, 3)),
    "the count is clamped to the rows of this round": _accepted(np.minimum),
    "a round without drafts commits one row": _accepted(
        lambda n, valid: np.where(valid == 1, np.minimum(n, 1), n)
    ),
    "the count is taken from the other slot": _accepted(lambda n, _: np.roll(n, 1)),
    "rows stand one position too far": _add("feed_verify", "context_len", 1),
    "rows are committed twice": _around_verify(_twice),
    "the two stashes never take turns": _around_verify(_never_swapped),
    "windows are not committed": _around_verify(_without("conv")),
    "recurrent state is not committed": _around_verify(_without("ssm")),
    "rejected keys are written late": _late_write,
    "a slot is not cleared": _no_clear,
    "the head catches up on one row": _rows_seen(lambda n: np.minimum(n, 1)),
    "the head misses the last row of a full round": _rows_seen(lambda n: np.minimum(n, K)),
    "the head stands one position too far": _add("feed_draft", "context_len", 1),
    "the head misses the last hidden row of a prompt": _no_hidden,
    "the head misreads the edge of a chunk": _chunk_edge,
}
