"""Each request of a batch gives the bits it gives alone, whatever its neighbours do."""

from collections.abc import Sequence
from functools import cache
from itertools import permutations
from typing import Any

import numpy as np
import pytest

from qwen_mtp.errors import RequestError
from qwen_mtp.runtime.package import Package
from qwen_mtp.runtime.session import Session
from tests.committed import (
    History,
    fill_slot,
    poisoned,
    recurrent,
    rows,
    stash,
    state_differences,
    step_by_step,
)
from tests.packages import package, random_checkpoint
from tests.scripted import (
    GREEDY,
    Scripted,
    Track,
    Want,
    advance,
    begin,
    counts,
    differences,
    own,
    random_prompts,
    same_bits,
    session,
    solo,
)

K = 3
LENGTHS = (1, 3, 17, 40, 5, 2, 100, 16)
STEPS = (30, 44, 12, 25, 40, 20, 36, 8)


@cache
def model(slots: int, format: str = "fp32") -> Package:
    two = random_checkpoint(5, num_hidden_layers=2, full_attention_interval=2)
    return package(two, max_num_seqs=slots, max_model_len=192, format=format)


@cache
def alone(slots: int, format: str = "fp32", count: int = len(LENGTHS)) -> list[History]:
    """Each request by itself in the same package, one token a round."""
    running = session(model(slots, format), K)
    prompts = random_prompts(LENGTHS[:count], seed=11)
    return [step_by_step(running, p, n + K + 2) for p, n in zip(prompts, STEPS, strict=False)]


def requests(histories: Sequence[History], start: int = 0) -> list[Track]:
    """The same requests, each under another place of the script."""
    drafters = (
        Scripted(history.track.tokens, counts(K, (start + 5 * i) % 16))
        for i, history in enumerate(histories)
    )
    return [Track(h.track.prompt, d) for h, d in zip(histories, drafters, strict=True)]


def serve(running: Session, tracks: Sequence[Track], joins: Sequence[int], ends: Any) -> None:
    """Run requests that join at the rounds ``joins`` (or when a slot is free) and leave when done.

    Args:
        running: A session without requests.
        tracks: In order of arrival.
        joins: Earliest round of each.
        ends: Tokens wanted of each.
    """
    waiting = list(zip(tracks, joins, ends, strict=False))
    live: list[tuple[Track, int]] = []
    turn = 0
    while waiting or live:
        while waiting and running.free_slots and (waiting[0][1] <= turn or not live):
            track, _, end = waiting.pop(0)
            live.append((begin(running, track), end))
        advance(running, [track for track, _ in live])
        for track, end in list(live):
            if len(track.tokens) >= end:
                running.release(track.slot)
                live.remove((track, end))
        turn += 1


def check(histories: Sequence[History], tracks: Sequence[Track], ends: Sequence[int]) -> None:
    for i, (history, track, end) in enumerate(zip(histories, tracks, ends, strict=False)):
        assert differences(history.track, track, end) == [], f"request {i}"


@pytest.mark.parametrize(
    ("slots", "format"), [(1, "fp32"), (2, "fp32"), (4, "fp32"), (2, "int8"), (2, "int4")]
)
def test_requests_that_join_and_leave_give_their_solo_bits(slots: int, format: str) -> None:
    """Ragged prompts and lengths, another accept script each, everything idle poisoned."""
    histories = alone(slots, format)
    tracks = requests(histories)
    running = session(model(slots, format), K)
    with poisoned(running):
        serve(running, tracks, [0, 0, 2, 3, 4, 4, 9, 9], STEPS)
    check(histories, tracks, STEPS)
    assert {track.slot for track in tracks} == set(range(slots))
    assert {a for track in tracks for a in track.accepted} == set(range(K + 1))


@pytest.mark.parametrize("order", list(permutations(range(3)))[1:])
def test_the_order_of_requests_changes_nothing(order: tuple[int, ...]) -> None:
    histories = [alone(4)[i] for i in order]
    tracks, ends = requests(histories, start=order[0]), [STEPS[i] for i in order]
    running = session(model(4), K)
    with poisoned(running):
        serve(running, tracks, [0, 1, 1], ends)
    check(histories, tracks, ends)


def test_the_drafts_of_the_head_do_not_depend_on_neighbours() -> None:
    """The head's own drafts, right or wrong, come out the same in a batch."""
    prompts, running = random_prompts((2, 17, 33), seed=2), session(model(4), K)
    ids = running.engine.buffer("mtp_draft_k3", "draft_ids")
    lone, batch = [], []
    for prompt in prompts:
        track, seen = begin(running, Track(prompt, own)), []
        for _ in range(10):
            advance(running, [track])
            seen.append(ids[track.slot].tolist())
        running.release(track.slot)
        lone.append(seen)
    tracks = [begin(running, Track(prompt, own)) for prompt in prompts]
    for _ in range(10):
        advance(running, tracks)
        batch.append([ids[track.slot].tolist() for track in tracks])
    assert [list(seen) for seen in zip(*batch, strict=True)] == lone


@pytest.mark.parametrize("slots", [2, 4])
def test_the_number_of_slots_of_a_package_changes_nothing(slots: int) -> None:
    ones, many = alone(1), alone(slots)
    check(ones, [history.track for history in many], STEPS)


def test_slots_with_drafts_of_unequal_length_share_a_round() -> None:
    """A slot without drafts beside one with K: both in the bucket of the longer one."""
    histories = alone(4)[:4]
    scripts = [[Want(min(a, n), n) for a in [0, 1, 2, 3] * 20] for n in range(K + 1)]
    tracks = [
        Track(h.track.prompt, Scripted(h.track.tokens, iter(script)))
        for h, script in zip(histories, scripts, strict=True)
    ]
    running = session(model(4), K)
    with poisoned(running):
        serve(running, tracks, [0] * 4, [20, 20, 12, 20])
    check(histories, tracks, [20, 20, 12, 20])
    assert [max(track.drafted) for track in tracks] == [0, 1, 2, 3]


def test_a_neighbour_far_ahead_changes_nothing() -> None:
    """Its context makes the shared block table wider than the short request needs."""
    histories = [alone(2)[6], alone(2)[0]]
    assert LENGTHS[6] + STEPS[6] > 128 > LENGTHS[0] + STEPS[0]
    tracks, running = requests(histories), session(model(2), K)
    serve(running, tracks, [0, 8], [36, 30])
    check(histories, tracks, [36, 30])


def test_state_in_a_batch_equals_one_token_stepping_after_every_round() -> None:
    histories = alone(4)[:4]
    tracks, running = requests(histories), session(model(4), K)
    for track in tracks:
        begin(running, track)
    while all(len(t.tokens) < n for t, n in zip(tracks, STEPS, strict=False)):
        starts = [running.context_len(track.slot) for track in tracks]
        advance(running, tracks)
        for history, track, start in zip(histories, tracks, starts, strict=True):
            assert state_differences(history, running, track.slot, start) == []


def test_a_prefill_leaves_the_state_of_the_other_slots_alone() -> None:
    running = session(model(2), K)
    track = begin(running, requests(alone(2))[3])
    advance(running, [track])
    slot, names = track.slot, ("tokens", "hidden")

    def everything() -> list[Any]:
        end = running.context_len(slot)
        states = recurrent(running, slot) | stash(running, slot) | rows(running, slot, "kv", end)
        buffers = [running.engine.buffer("mtp_draft_k3", n)[slot].copy() for n in names]
        return [*states.values(), *rows(running, slot, "mtp_kv", end - 1).values(), *buffers]

    before = everything()
    other, _ = running.prefill([5] * 50, GREEDY)
    after = everything()
    assert other != slot
    assert all(a.tobytes() == b.tobytes() for a, b in zip(before, after, strict=True))


def test_rounds_of_other_slots_leave_the_state_of_an_idle_slot_alone() -> None:
    running = session(model(2), K)
    fill_slot(running.engine, 1, 0.5)
    before = recurrent(running, 1)
    solo(running, [1, 2, 3], own, 20)
    after = recurrent(running, 1)
    assert all(same_bits(before[name], after[name]) for name in before)


def test_released_slots_give_their_blocks_back() -> None:
    running = session(model(2), K)
    histories = alone(2)[:2]
    blocks = running._pool.num_free
    for _ in range(30):  # more often than there are blocks to leak
        slot, _ = running.prefill(histories[1].track.prompt, GREEDY)
        running.release(slot)
    tracks = requests(histories)
    serve(running, tracks, [0, 0], STEPS[:2])
    check(histories, tracks, STEPS)
    assert running._pool.num_free == blocks


@pytest.mark.parametrize("sick", [0, 1])
def test_a_nan_in_one_slot_ends_that_slot_alone(sick: int) -> None:
    running = session(model(2), K)
    prompts = random_prompts((9, 21), seed=3)
    expected = [plain_tokens(running, prompt, 20) for prompt in prompts]
    got = [[running.prefill(prompt, GREEDY)[1]] for prompt in prompts]
    for turn in range(8):
        if turn == 3:
            running.engine.state("layers.0.ssm")[sick] = np.nan
        for slot, result in running.step().items():
            assert (result.error is None) == (turn != 3 or slot != sick)
            got[slot] += result.tokens
    assert running.free_slots == (sick,)
    for slot in (0, 1):
        assert got[slot] == expected[slot][: len(got[slot])]
    assert len(got[1 - sick]) > len(got[sick])


def plain_tokens(running: Session, prompt: list[int], count: int) -> list[int]:
    """Greedy continuation, one token a round."""
    slot, token = running.prefill(prompt, GREEDY)
    tokens = [token]
    while len(tokens) < count:
        tokens += running.step({slot: []})[slot].tokens
    running.release(slot)
    return tokens


def test_a_round_refuses_what_it_could_not_verify() -> None:
    running = session(model(1), K)
    slot, _ = running.prefill([1, 2, 3], GREEDY)
    for drafts, line in (
        ({slot: [1] * (K + 1)}, "4 drafts, the session takes 3"),
        ({slot: [256]}, "draft ids go from 0 to 255"),
        ({5: [1]}, "slot 5 holds no sequence"),
    ):
        with pytest.raises(RequestError, match=line):
            running.step(drafts)
    while running.context_len(slot) < 191:
        running.step()
    with pytest.raises(RequestError, match="the context is full at 192 positions"):
        running.step()
    running.release(slot)
