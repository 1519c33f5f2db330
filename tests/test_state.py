"""Committed state has the bits of one-token stepping, whatever was proposed and rejected."""

from collections.abc import Iterator
from functools import cache
from itertools import chain
from itertools import count as counter

import numpy as np
import pytest

from tests.committed import (
    History,
    fill_slot,
    first,
    poisoned,
    recurrent,
    rows,
    stash,
    state_differences,
    step_by_step,
)
from tests.scripted import (
    CHUNK,
    FORMATS,
    GREEDY,
    KS,
    Floats,
    Scripted,
    Track,
    Want,
    advance,
    begin,
    counts,
    differences,
    five_lookaheads,
    nothing,
    random_prompts,
    same_bits,
    session,
    solo,
    transitions,
)

LENGTHS = (1, 2, 3, 4, CHUNK, CHUNK + 1, 40)
STEPS = 56


@cache
def histories(format: str) -> list[History]:
    running = session(five_lookaheads(format), max(KS))
    length = STEPS + 2 * max(KS) + 2
    return [step_by_step(running, prompt, length) for prompt in random_prompts(LENGTHS, seed=3)]


def follow(format: str, k: int, script: Iterator[Want]) -> list[Track]:
    """Run every prompt under the script and compare the state after every round."""
    running, tracks = session(five_lookaheads(format), k), []
    again: list[Want] = []  # no transition of the script falls between two prompts
    for history in histories(format):
        drafter = Scripted(history.track.tokens, chain(again, script))
        track = begin(running, Track(history.track.prompt, drafter))
        while len(track.tokens) < STEPS:
            start = running.context_len(track.slot)
            advance(running, [track])
            found = state_differences(history, running, track.slot, start)
            assert found == [], f"after {track.accepted} from {len(track.prompt)} prompt tokens"
        assert differences(history.track, track, STEPS) == []
        running.release(track.slot)
        tracks.append(track)
        again = drafter.wanted[-1:]
    return tracks


@pytest.mark.parametrize("k", KS)
@pytest.mark.parametrize("format", FORMATS)
def test_state_equals_one_token_stepping_after_every_accept_count_after_every_other(
    format: str, k: int
) -> None:
    tracks = follow(format, k, counts(k))
    assert transitions(tracks) == {(a, b) for a in range(k + 1) for b in range(k + 1)}


@pytest.mark.parametrize("k", KS)
def test_state_equals_one_token_stepping_when_nothing_is_ever_accepted(k: int) -> None:
    follow("fp32", k, (Want(0, k) for _ in counter()))


@pytest.mark.parametrize("k", KS)
def test_state_equals_one_token_stepping_when_everything_is_accepted(k: int) -> None:
    follow("fp32", k, (Want(k, k) for _ in counter()))


def test_state_equals_one_token_stepping_when_rounds_have_any_length() -> None:
    draw = np.random.default_rng(0)
    lengths = (int(draw.integers(0, 8)) for _ in counter())
    follow("fp32", 7, (Want(int(draw.integers(0, n + 1)), n) for n in lengths))


@pytest.mark.parametrize("format", FORMATS)
def test_the_conv_window_holds_the_last_three_raw_inputs(format: str) -> None:
    checked = 0
    for history in histories(format):
        for at, states in history.recurrent.items():
            for name in (n for n in states if n.endswith(".conv")):
                inputs = [history.inputs.get(at - i) for i in (3, 2, 1)]
                if None in inputs:
                    continue
                key = name.removesuffix(".conv") + ".stash.u"
                wanted = np.stack([x[key] for x in inputs if x is not None])
                assert same_bits(states[name], wanted)
                checked += 1
    assert checked > 100


def close(wanted: dict[str, Floats], found: dict[str, Floats]) -> None:
    assert wanted.keys() == found.keys()
    for name, value in found.items():
        np.testing.assert_allclose(value, wanted[name], rtol=1e-4, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("length", LENGTHS)
def test_stepping_leaves_the_state_of_a_prefill_of_the_whole_text(length: int) -> None:
    """Another graph with other products and chunks: equal but for rounding, holes would show."""
    history = histories("fp32")[LENGTHS.index(length)]
    running = session(five_lookaheads("fp32"), 3)
    for extra in (1, 2, 3, 4, 17, 50):
        text = [*history.track.prompt, *history.track.tokens][: length + extra]
        slot, _ = running.prefill(text, GREEDY)
        at = len(text)
        close(history.recurrent[at], recurrent(running, slot))
        close(first(at, history.pools), rows(running, slot, "kv", at))
        close(first(at - 1, history.mtp), rows(running, slot, "mtp_kv", at - 1))
        running.release(slot)


@pytest.mark.parametrize("k", [0, 3])
def test_a_slot_starts_from_zero_whatever_its_last_owner_left(k: int) -> None:
    history = histories("fp32")[4]
    running = session(five_lookaheads("fp32"), k)
    solo(running, [9] * 50, nothing, 20)
    for value in (np.nan, 1e3):
        fill_slot(running.engine, 0, value)
        for spec in running.package.manifest.states:
            if not spec.per_slot:
                reserved = running.package.manifest.geometry.block_size
                running.engine.state(spec.name)[:, reserved:] = value
        drafter = Scripted(history.track.tokens, counts(k))
        track = solo(running, history.track.prompt, drafter, STEPS)
        assert differences(history.track, track, STEPS) == []


def test_clearing_a_slot_zeroes_all_of_its_state() -> None:
    running = session(five_lookaheads("fp32"), 3)
    fill_slot(running.engine, 0, 7.0)
    running.engine.clear_slot(0)
    for states in (recurrent(running, 0), stash(running, 0)):
        assert all(not value.any() for value in states.values())


@pytest.mark.parametrize("format", FORMATS)
def test_nothing_uncommitted_can_reach_the_output(format: str) -> None:
    """Rejected rows, stale blocks and rows not yet computed are NaN before every graph."""
    running = session(five_lookaheads(format), 3)
    with poisoned(running):
        for history in histories(format):
            drafter = Scripted(history.track.tokens, counts(3))
            track = solo(running, history.track.prompt, drafter, STEPS)
            assert differences(history.track, track, STEPS) == []
