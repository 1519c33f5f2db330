"""State of GE models after every round is that of one-token stepping on the same graphs."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from itertools import chain
from itertools import count as counter
from typing import Any

import numpy as np
import pytest
import torch

from qwen_mtp.graphs.spec import Lowering
from qwen_mtp.runtime.feeds import feed_verify
from qwen_mtp.runtime.session import Session
from tests.air_packages import air_package
from tests.air_rounds import (
    KEPT,
    Interpreted,
    Seen,
    States,
    at_row,
    follow,
    ge_session,
    margin,
    poisoned,
    slot_states,
)
from tests.committed import History, first, recurrent, rows, stash, step_by_step
from tests.ge_graphs import needs_wheel
from tests.packages import TRAINED, random_checkpoint
from tests.scripted import (
    GREEDY,
    Scripted,
    Track,
    Want,
    advance,
    begin,
    counts,
    nothing,
    random_prompts,
    transitions,
)

pytestmark = needs_wheel
K, VOCABULARY = 2, 256
CHUNK = 16
LENGTHS = (1, 2, 3, CHUNK, CHUNK + 1, 40)
STEPS = 36
STATE = 1e-5
DEEP, NEAR = 0.35, 0.15  # of states behind the first layer; two best logits that may change places
TRAINED_DEEP = 0.02


@pytest.fixture(autouse=True)
def one_torch_thread() -> Iterator[None]:
    """Small products on several threads spend their time waiting for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def model(lowering: Lowering, k: int = K, *custom_ops: str) -> Any:
    """The random model of the default suite, or with three drafts the trained one."""
    if k == K:
        return air_package(random_checkpoint(), lowering, custom_ops=custom_ops)
    options = {"lookaheads": (k,), "max_model_len": 128, "custom_ops": custom_ops}
    return air_package(TRAINED, lowering, **options)


@dataclass(slots=True)
class SlotHistory:
    """One-token stepping where each row of a round leaves a state of its own.

    Attributes:
        track: The request.
        behind: By position of a row: the window and the state that it left.
        pools: Keys and values of the target by position, ``[Nkv, positions, D]``.
        mtp: The same of the MTP head.
    """

    track: Track
    behind: dict[int, States] = field(default_factory=dict)
    pools: States = field(default_factory=dict)
    mtp: States = field(default_factory=dict)


def slot_by_slot(running: Session, prompt: list[int], length: int) -> SlotHistory:
    """Emit one token a round; of every round row 0 alone counts."""
    history = SlotHistory(begin(running, Track(prompt, nothing)))
    slot = history.track.slot
    while len(history.track.tokens) < length:
        at = running.context_len(slot)
        advance(running, [history.track])
        history.behind[at] = at_row(slot_states(running, slot), 0)
    end = running.context_len(slot)
    history.pools = rows(running, slot, "kv", end)
    history.mtp = rows(running, slot, "mtp_kv", end - 1)
    running.release(slot)
    return history


def prompts(k: int) -> list[list[int]]:
    return random_prompts(LENGTHS, VOCABULARY if k == K else 2048, seed=3)


@cache
def stepped(lowering: Lowering, k: int, *custom_ops: str) -> list[Any]:
    step: Any = step_by_step if lowering == "portable" else slot_by_slot
    running = ge_session(model(lowering, k, *custom_ops), k)
    return [step(running, prompt, STEPS + 2 * k + 2) for prompt in prompts(k)]


def lazy_gaps(seen: Seen, history: History, running: Session, slot: int, start: int) -> None:
    """Windows and states stand at ``start``, the rows of the round in the stash."""
    end = running.context_len(slot)
    seen.gaps_of(recurrent(running, slot), history.recurrent[start])
    for name, x in stash(running, slot).items():
        wanted = np.stack([history.inputs[p][name] for p in range(start, end)])
        seen.gaps_of({name: x[: end - start]}, {name: wanted})
    pool_gaps(seen, history, running, slot, start)


def slot_gaps(seen: Seen, history: SlotHistory, running: Session, slot: int, start: int) -> None:
    """Slot t and the window at column t are what the row at ``start + t`` left."""
    states = slot_states(running, slot)
    for t in range(running.context_len(slot) - start):
        for name, value in at_row(states, t).items():
            wanted = history.behind[start + t][name]
            seen.gap(name, value, wanted, float(np.abs(wanted).max(initial=1.0)))
    pool_gaps(seen, history, running, slot, start)


def pool_gaps(seen: Seen, history: Any, running: Session, slot: int, start: int) -> None:
    end = running.context_len(slot)
    seen.gaps_of(rows(running, slot, "kv", end), first(end, history.pools))
    seen.gaps_of(rows(running, slot, "mtp_kv", start), first(start, history.mtp))


Check = Callable[[Seen, Any, Session, int, int], None]


def replay(running: Session, histories: list[Any], script: Iterator[Want], check: Check) -> Seen:
    """Run every prompt under the script, all that must not matter poisoned.

    Where a token is not that of stepping it is noted, and the round goes on as if it were.
    """
    seen, tracks = Seen(), []
    vocabulary = running.package.manifest.config.vocab_size
    again: list[Want] = []  # no transition of the script falls between two prompts
    with poisoned(running):
        for history in histories:
            drafter = Scripted(history.track.tokens, chain(again, script), vocabulary)
            track = begin(running, Track(history.track.prompt, drafter))
            while len(track.tokens) < STEPS:
                start = running.context_len(track.slot)
                advance(running, [track])
                _as_stepped(seen, history.track, running, track, drafter.wanted[-1].accept)
                check(seen, history, running, track.slot, start)
            running.release(track.slot)
            tracks.append(track)
            again = drafter.wanted[-1:]
            seen.accepted.update(track.accepted)
            seen.tokens += len(track.tokens)
    seen.pairs = transitions(tracks)
    return seen


def _as_stepped(seen: Seen, truth: Track, running: Session, track: Track, accept: int) -> None:
    """Replace the tokens of the last round where they are not those of stepping."""
    at = len(track.tokens) - track.accepted[-1] - 1
    wanted = truth.tokens[at : at + accept + 1]
    pairs = enumerate(zip(track.tokens[at:], wanted, strict=False))
    differing = next((i for i, (a, b) in pairs if a != b), None)
    if differing is not None:
        seen.ties.append(margin(truth.logits[at + differing]))
        track.tokens[at:], track.accepted[-1] = wanted, accept
        follow(running, track.slot, wanted)


def every(k: int) -> set[tuple[int, int]]:
    return {(a, b) for a in range(k + 1) for b in range(k + 1)}


def any_length(k: int) -> Iterator[Want]:
    """Rounds of 0 .. k drafts of which any number is right."""
    draw = np.random.default_rng(k)
    lengths = (int(draw.integers(0, k + 1)) for _ in counter())
    return (Want(int(draw.integers(0, n + 1)), n) for n in lengths)


SOURCES = [1, 2, pytest.param(3, marks=pytest.mark.slow)]


@pytest.mark.parametrize("k", SOURCES)
def test_portable_state_equals_one_token_stepping_after_every_count_after_every_other(
    k: int,
) -> None:
    """Passes of one row and of several are products of other sizes: equal but for rounding."""
    histories = stepped("portable", max(k, K))
    running = ge_session(model("portable", max(k, K)), k)
    seen = replay(running, histories, counts(k), lazy_gaps)
    print(seen)
    assert seen.pairs == every(k)
    assert {name: gap for name, gap in seen.gaps.items() if gap > STATE} == {}
    assert seen.ties == []


def test_portable_state_equals_one_token_stepping_when_rounds_have_any_length() -> None:
    running = ge_session(model("portable"), K)
    seen = replay(running, stepped("portable", K), any_length(K), lazy_gaps)
    assert {name: gap for name, gap in seen.gaps.items() if gap > STATE} == {}
    assert seen.ties == []


def in_slots(seen: Seen, deep: float = DEEP) -> None:
    """What may differ and by how much.

    Inside a round the state goes from row to row in float32, between rounds it is a slot in
    bfloat16: with the same tokens the first layer's state differs by its rounding, half a step in
    256, a few times over. Its convolution inputs depend on nothing but tokens: no bit differs.
    Deeper layers see inputs that have moved by then, and a model of random weights keeps little
    of what it is told; a slot of another row would differ by its whole size.
    """
    print(seen)
    assert seen.gaps.pop("layers.0.conv") == 0
    assert seen.gaps.pop("layers.0.ssm") <= 4 / 256
    assert {name: gap for name, gap in seen.gaps.items() if gap > deep} == {}
    assert max(seen.ties, default=0) < NEAR
    assert len(seen.ties) <= 0.08 * seen.tokens


@pytest.mark.parametrize("k", SOURCES)
def test_every_slot_holds_what_its_row_leaves_after_every_count_after_every_other(k: int) -> None:
    histories = stepped("fused", max(k, K))
    running = ge_session(model("fused", max(k, K)), k)
    seen = replay(running, histories, counts(k), slot_gaps)
    in_slots(seen, DEEP if k <= K else TRAINED_DEEP)
    assert seen.pairs == every(k)


def test_every_slot_holds_what_its_row_leaves_when_rounds_have_any_length() -> None:
    """Also rounds without drafts behind rounds of several rows, and the other way round."""
    running = ge_session(model("fused"), K)
    seen = replay(running, stepped("fused", K), any_length(K), slot_gaps)
    in_slots(seen)
    assert set(seen.accepted) == {0, 1, 2}


@pytest.mark.slow
@pytest.mark.parametrize("k", [2, 3])
def test_every_slot_holds_what_its_row_leaves_with_the_convolution_kernel(k: int) -> None:
    custom = "FusedCausalConv1d"
    running = ge_session(model("fused", k, custom), k)
    for script in (counts(k), any_length(k)):
        in_slots(replay(running, stepped("fused", k, custom), script, slot_gaps))


def test_plain_decoding_leaves_the_slots_of_rounds_without_drafts() -> None:
    """The same graph: K = 0 is a round of one row, and n_acc is then 1."""
    for history in stepped("fused", K)[2:5]:
        running = ge_session(model("fused"), 0)
        with poisoned(running):
            track = begin(running, Track(history.track.prompt, nothing))
            while len(track.tokens) < STEPS:
                start = running.context_len(track.slot)
                advance(running, [track])
                left = at_row(slot_states(running, track.slot), 0)
                seen = Seen()
                seen.gaps_of(left, history.behind[start])
                assert set(seen.gaps.values()) == {0.0}
        assert track.tokens == history.track.tokens[: len(track.tokens)]
        running.release(track.slot)


def prefilled(seen: Seen, running: Session, history: Any, extra: int) -> None:
    """Compare a prefill of the prompt and ``extra - 1`` of its tokens with stepping there."""
    text = [*history.track.prompt, *history.track.tokens][: len(history.track.prompt) + extra]
    slot, _ = running.prefill(text, GREEDY)
    at = len(text)
    if isinstance(history, History):
        seen.gaps_of(recurrent(running, slot), history.recurrent[at])
    else:
        left = at_row(slot_states(running, slot), 0)
        seen.gaps_of(left, history.behind[at - 1])
    seen.gaps_of(rows(running, slot, "kv", at), first(at, history.pools))
    seen.gaps_of(rows(running, slot, "mtp_kv", at - 1), first(at - 1, history.mtp))
    running.release(slot)


@pytest.mark.parametrize(("lowering", "bound"), [("portable", STATE), ("fused", DEEP)])
def test_prefill_leaves_in_slot_0_what_stepping_leaves(lowering: Lowering, bound: float) -> None:
    """Sums in chunks: equal but for rounding, in bfloat16 two or three steps of the largest."""
    running, seen = ge_session(model(lowering), K), Seen()
    with poisoned(running):
        for history in stepped(lowering, K):
            for extra in (1, 2, 3, 17):
                prefilled(seen, running, history, extra)
    print(seen)
    assert {name: gap for name, gap in seen.gaps.items() if gap > bound} == {}


class Bench:
    """One verify graph over the state of a running slot, as often as is asked for."""

    def __init__(self, running: Session, slot: int, drafts: list[int]) -> None:
        assert isinstance(running.engine, Interpreted)
        self.running, self.slot, self.drafts = running, slot, drafts
        running._reserve(running._slots[slot])
        self.states = {name: x.clone() for name, x in running.engine._states.items()}

    def run(self, accepted: int, drafts: int, chosen: int = 0) -> list[Any]:
        """Logits and slots of the rows 0 .. ``drafts`` behind ``accepted`` rows.

        Args:
            accepted: What the graph is told of the last round.
            drafts: Drafts to verify.
            chosen: The row of the last round whose slot is first moved to where ``accepted``
                has the graph look for it; all else there is NaN.
        """
        running, slot = self.running, self.slot
        engine, rows = running.engine, running.package.manifest.geometry.max_rows
        place = max(accepted, 1) - 1
        for name, saved in self.states.items():
            state = engine._states[name]  # type: ignore[attr-defined]
            state.copy_(saved)
            if name.endswith(".conv"):
                state[slot] = np.nan
                state[slot, place : place + KEPT] = saved[slot, chosen : chosen + KEPT]
            elif name.endswith(".ssm"):
                state[slot * rows : (slot + 1) * rows] = np.nan
                state[slot * rows + place] = saved[slot * rows + chosen]
        running._slots[slot].pending = accepted
        graph = f"target_verify_r{rows}"
        feed_verify(engine, graph, running._slots, {slot: self.drafts[:drafts]})
        running._run(graph)
        states = slot_states(running, slot)
        left = [at_row(states, t) for t in range(drafts + 1)]
        logits = [row.copy() for row in engine.buffer(graph, "logits")[slot, : drafts + 1]]
        return [logits, left]


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_round_starts_from_the_slot_it_is_told_and_leaves_one_for_each_row(count: int) -> None:
    """Bit by bit: whichever slot the state is in, and however many rows follow."""
    history = stepped("fused", K)[3]
    running = ge_session(model("fused"), K)
    script = iter([Want(0, K), Want(count - 1, K)])
    track = begin(running, Track(history.track.prompt, Scripted(history.track.tokens, script)))
    for _ in range(2):
        advance(running, [track])
    assert track.accepted[-1] == count - 1
    bench = Bench(running, track.slot, history.track.tokens[len(track.tokens) :][:K])
    wanted = bench.run(count, K, count - 1)
    for accepted in range(K + 2):
        assert same(wanted, bench.run(accepted, K, count - 1)), f"slot {accepted} of {count}"
    for drafts in range(K + 1):
        part = [x[: drafts + 1] for x in wanted]
        assert same(part, bench.run(count, drafts, count - 1)), f"{drafts} drafts"
    for other in range(3):
        assert other == count - 1 or not same(wanted, bench.run(count, K, other))
    running.release(track.slot)


def same(one: list[Any], two: list[Any]) -> bool:
    """Whether logits and states have equal bits."""
    rows = zip(one[0], two[0], strict=True)
    states = ((a[n], b[n]) for a, b in zip(one[1], two[1], strict=True) for n in a)
    return all(a.tobytes() == b.tobytes() for a, b in chain(rows, states))
