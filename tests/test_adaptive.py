"""Whatever number of drafts each round has, text, logits and state are those of plain decoding."""

from collections.abc import Iterator
from functools import cache
from itertools import chain, cycle, pairwise

import numpy as np
import pytest

from qwen_mtp.graphs.spec import GraphSpec
from qwen_mtp.runtime.lookahead import AdaptiveLookahead
from qwen_mtp.runtime.package import Package
from qwen_mtp.runtime.sampling import SamplingParams
from qwen_mtp.runtime.session import Session
from tests.committed import History, first, poisoned, rows, state_differences, step_by_step
from tests.packages import TRAINED, package, random_checkpoint
from tests.scripted import (
    LIMIT,
    Floats,
    Forced,
    Track,
    advance,
    begin,
    differences,
    every_pair,
    following,
    nothing,
    own,
    random_prompts,
    same_bits,
    session,
    solo,
)

K, P, LONG = 3, 4, 96
LENGTHS, LENGTH = (1, 17, 33), 44
SOURCES = [
    "random",
    pytest.param(
        "trained",
        marks=pytest.mark.skipif(
            not (TRAINED / "model.safetensors").is_file(), reason="not trained here"
        ),
    ),
]


@cache
def model(source: str = "random") -> Package:
    """Two slots, draft graphs of 1 and 3; other tests share the packages."""
    if source == "random":
        return package(random_checkpoint(0), format="int8", max_num_seqs=2, lookaheads=(1, K))
    return package(TRAINED, format="fp32", max_num_seqs=2, max_model_len=LIMIT, lookaheads=(1, K))


@cache
def alone(source: str = "random") -> list[History]:
    """Plain decoding, with the drafter taking every row in at once."""
    running = session(model(source), K)
    prompts = random_prompts(LENGTHS, running.package.manifest.config.vocab_size, seed=11)
    return [step_by_step(running, prompt, LENGTH + K + 2) for prompt in prompts]


@cache
def drafts(source: str, number: int) -> dict[int, Floats]:
    """By position of the newest token, the logits ``[K, V]`` that a drafter without gaps gives."""
    running, found = session(model(source), K), {}
    track = begin(running, Track(alone(source)[number].track.prompt, nothing))
    while len(track.tokens) < LENGTH:
        at = running.context_len(track.slot)
        advance(running, [track])
        found[at] = _draft_logits(running, track.slot, K)
    running.release(track.slot)
    return found


def _draft_logits(running: Session, slot: int, count: int) -> Floats:
    names = (f"draft_logits.{j}" for j in range(count))
    graph = f"mtp_draft_k{count}"
    return np.stack([running.engine.buffer(graph, name)[slot] for name in names])


def numbers(seed: int, most: int = K) -> Iterator[int]:
    """0..most in any order."""
    draw = np.random.default_rng(seed)
    return (int(draw.integers(0, most + 1)) for _ in cycle([0]))


def waits() -> Iterator[int]:
    """Numbers of drafts with 0..P rounds without any between them."""
    return cycle(chain.from_iterable((k, *[0] * wait) for wait in range(P + 1) for k in (K, 1)))


@pytest.mark.parametrize("source", SOURCES)
def test_every_number_of_drafts_after_every_other_gives_the_bits_of_plain_decoding(
    source: str,
) -> None:
    """And the drafter has taken in what it would have seen in every round, and drafts the same."""
    histories = alone(source)
    drafted = [drafts(source, i) for i in range(len(histories))]
    running = session(model(source), K)
    scripts = [chain(every_pair(K), numbers(1)), waits(), chain(every_pair(K)[7:], waits())]
    Forced(running, scripts)
    chosen, taken, tracks = set[tuple[int, int]](), set[int](), []
    with poisoned(running):
        for i, history in enumerate(histories):
            track = begin(running, following(running, history.track, numbers(i)))
            while len(track.tokens) < LENGTH:
                at, choice = running.context_len(track.slot), running.plan()
                sequence = running._slots[track.slot]
                waiting = sequence.rows
                advance(running, [track])
                assert state_differences(history, running, track.slot, at, mtp=False) == []
                if choice.lookahead:
                    taken.add(waiting)
                    found = _draft_logits(running, track.slot, choice.lookahead)
                    wanted = drafted[i].get(at, found)[: choice.lookahead]
                    assert same_bits(np.ascontiguousarray(wanted), found), f"drafts at {at}"
                caught_up = rows(running, track.slot, "mtp_kv", sequence.rows_start)
                wanted_rows = first(sequence.rows_start, history.mtp)
                assert all(same_bits(wanted_rows[n], x) for n, x in caught_up.items())
            assert differences(history.track, track, LENGTH) == []
            running.release(track.slot)
            tracks.append(track)
            chosen |= {*zip(track.drafted, track.accepted, strict=True)}
    assert chosen == {(k, a) for k in range(K + 1) for a in range(k + 1)}
    assert taken == {*range(1, P + 1)}
    pairs = {pair for track in tracks for pair in pairwise(track.drafted)}
    assert pairs == {(a, b) for a in range(K + 1) for b in range(K + 1)}


def test_slots_that_choose_apart_from_each_other_give_their_solo_bits() -> None:
    """Requests join and leave; one drafts while the other one's rows wait."""
    histories = alone() * 2
    running = session(model(), K)
    Forced(running, (waits() if i % 2 else numbers(i) for i in range(len(histories))))
    waiting, live, unequal = list(enumerate(histories)), list[tuple[Track, History]](), 0
    with poisoned(running):
        while waiting or live:
            if waiting and running.free_slots:
                i, history = waiting.pop()
                track = begin(running, following(running, history.track, numbers(20 + i)))
                live.append((track, history))
            unequal += len(live) - len(running.plan().drafts) == 1 and len(live) == 2
            advance(running, [track for track, _ in live])
            for track, history in list(live):
                if len(track.tokens) >= LENGTH:
                    assert differences(history.track, track, LENGTH) == []
                    running.release(track.slot)
                    live.remove((track, history))
    assert unequal > 20


@pytest.mark.parametrize("end", ["context", "max_tokens"])
def test_the_end_may_fall_into_any_round(end: str) -> None:
    whole = alone()[1].track
    text = [*whole.prompt, *whole.tokens]
    for left in range(1, P + 3):
        prompt = (text * 4)[: LIMIT - left] if end == "context" else whole.prompt
        most = None if end == "context" else left
        sampling = SamplingParams(temperature=0, max_tokens=most, ignore_eos=True).resolve()
        truth = solo(session(model(), 0), prompt, nothing, left)
        for script in (waits(), cycle([0, K])):
            running = session(model(), K)
            Forced(running, [script])
            track = following(running, truth, numbers(left))
            track.sampling = sampling
            begin(running, track)
            while len(track.tokens) < left:
                advance(running, [track])
            assert len(track.tokens) == left, "a round ran past the end"
            assert differences(truth, track, left) == []


PRICES = {
    "target_verify_r2": 100.0,
    "target_verify_r4": 105.0,
    "mtp_draft_k1": 10.0,
    "mtp_draft_k3": 30.0,
}


class Priced(AdaptiveLookahead):
    """Finds graphs to take what :data:`PRICES` says, and adds it up."""

    spent = 0.0

    dear = 1.0

    def measure(self, spec: GraphSpec, ms: float) -> None:
        price = PRICES[spec.name] * (self.dear if spec.kind == "mtp_draft" else 1)
        self.spent += price
        super().measure(spec, price)


@pytest.mark.parametrize("wrong", [False, True])
def test_adaptive_rounds_cost_little_more_than_the_best_fixed_ones(wrong: bool) -> None:
    """All drafts wrong, then all of them right; the text is that of plain decoding."""
    truth = solo(session(model(), 0), [7], nothing, LONG)
    running = session(model(), K)
    running.policy = policy = Priced(model(), K)
    track = begin(running, following(running, truth, cycle([0 if wrong else K])))
    while len(track.tokens) < LONG - K - 2:
        advance(running, [track])
    assert differences(truth, track, len(track.tokens)) == []
    count = len(track.tokens) - 1
    best = 100.0 * count if wrong else 135.0 * count / (K + 1)
    assert best <= policy.spent < 1.07 * best, track.drafted


def test_drafts_that_are_found_too_dear_are_given_up_though_all_are_right() -> None:
    """What is measured decides, not what the sizes of the model promise."""
    truth = solo(session(model(), 0), [7], nothing, LONG)
    running = session(model(), K)
    running.policy = policy = Priced(model(), K)
    policy.dear = 50.0
    track = begin(running, following(running, truth, cycle([K])))
    while len(track.tokens) < LONG - K - 2:
        advance(running, [track])
    assert differences(truth, track, len(track.tokens)) == []
    assert track.drafted[0] == K
    assert track.drafted[-30:].count(0) >= 18, track.drafted


@pytest.mark.parametrize("source", SOURCES)
def test_a_session_that_adapts_gives_the_bits_of_plain_decoding(source: str) -> None:
    """The drafts of the head, at the costs of this machine."""
    histories = alone(source)
    running = session(model(source), K)
    running.policy = AdaptiveLookahead(model(source), K)
    tracks = [solo(running, history.track.prompt, own, LENGTH) for history in histories]
    for history, track in zip(histories, tracks, strict=True):
        assert differences(history.track, track, LENGTH) == []
    assert tracks[0].drafted[0] == K  # later ones begin as measured costs have it
