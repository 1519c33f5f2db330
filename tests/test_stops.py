"""Where a request ends, against a second reading of the rules over whole sequences."""

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from qwen_mtp.errors import RequestError
from qwen_mtp.runtime.outputs import StatsCounter
from qwen_mtp.runtime.sampling import SamplingParams
from qwen_mtp.runtime.stops import StopChecker, Verdict
from qwen_mtp.runtime.text import Detokenizer

EOS = (90, 91)
PROMPT = 10
PIECES = {0: "", 1: "a", 2: "b", 3: "ab", 4: "ba", 5: "aab", 6: "c", 90: "</s>", 91: ""}


def checker(
    *, eos: tuple[int, ...] = EOS, room: int = 1000, pieces: bool = True, **asked: Any
) -> StopChecker:
    sampling = SamplingParams(**{"max_tokens": None, **asked}).resolve()
    detokenizer = Detokenizer(lambda token: PIECES[token].encode()) if pieces else None
    return StopChecker(
        sampling,
        eos_ids=eos,
        prompt_length=PROMPT,
        max_model_len=PROMPT + room,
        detokenizer=detokenizer,
    )


def byte_checker(**asked: Any) -> StopChecker:
    """A checker whose tokens are the 256 bytes."""
    return StopChecker(
        SamplingParams(**asked).resolve(),
        eos_ids=EOS[:0],
        prompt_length=1,
        max_model_len=99,
        detokenizer=Detokenizer(lambda token: bytes([token])),
    )


def summary(made: StopChecker, verdicts: list[Verdict]) -> tuple[object, ...]:
    last = verdicts[-1]
    assert made.text == "".join(v.text for v in verdicts)
    assert len(made.token_ids) == sum(v.kept for v in verdicts)
    return made.token_ids, made.text, last.finish_reason, last.stop_reason


@pytest.mark.parametrize("eos", EOS)
@pytest.mark.parametrize("length", range(1, 9))
def test_eos_at_each_index_of_a_run_ends_it_there(length: int, eos: int) -> None:
    for index in range(length):
        run = [1] * index + [eos] + [2] * (length - index - 1)
        made = checker()
        assert made.push(run) == Verdict(index + 1, "a" * index, "stop", None)
        assert made.token_ids == tuple(run[: index + 1])


@pytest.mark.parametrize("limit", ["max_tokens", "room"])
@pytest.mark.parametrize("length", range(1, 9))
def test_a_cap_inside_the_run_cuts_it_there(length: int, limit: str) -> None:
    for cap in range(1, length + 1):
        expected = Verdict(cap, "a" * cap, "length", None)
        assert checker(**{limit: cap}).push([1] * length) == expected
    assert checker(**{limit: length + 1}).push([1] * length).finish_reason is None


@pytest.mark.parametrize("limit", ["max_tokens", "room"])
def test_a_stop_at_or_before_the_cap_beats_it_and_one_after_it_is_never_seen(limit: str) -> None:
    for cap in range(1, 7):
        for index in range(6):
            for token, asked in ((90, {}), (6, {"stop_token_ids": [6]}), (6, {"stop": "c"})):
                run = [1] * index + [token] + [1] * (5 - index)
                found = checker(**{limit: cap}, **asked).push(run)
                stopped = index + 1 <= cap
                assert found.finish_reason == ("stop" if stopped else "length")
                assert found.kept == min(index + 1, cap)
                assert found.text == "a" * min(index, cap)


def test_the_lower_of_both_limits_holds() -> None:
    assert checker(max_tokens=2, room=3).push([1] * 5).kept == 2
    assert checker(max_tokens=3, room=2).push([1] * 5).kept == 2


def test_stop_reasons_tell_eos_ids_and_texts_apart() -> None:
    assert checker(stop_token_ids=[6]).push([6]).stop_reason == 6
    assert checker(stop="c").push([6]).stop_reason == "c"
    assert checker(stop="c", stop_token_ids=[6]).push([6]).stop_reason == 6
    assert checker(stop_token_ids=[90]).push([90]) == Verdict(1, "", "stop", None)


def test_ignore_eos_goes_on_but_a_stop_id_still_stops() -> None:
    assert checker(ignore_eos=True).push([1, 90, 91, 2]) == Verdict(4, "a</s>b", None, None)
    asked = {"ignore_eos": True, "stop_token_ids": [90]}
    assert checker(**asked).push([1, 90, 2]) == Verdict(2, "a", "stop", 90)


def test_a_stop_text_across_two_tokens_cuts_the_text_and_drops_later_tokens() -> None:
    assert checker(stop="bb").push([1, 2, 4, 6]) == Verdict(3, "a", "stop", "bb")


def test_a_stop_text_across_two_pushes_is_never_shown() -> None:
    made = checker(stop="bc")
    assert made.push([1, 2]) == Verdict(2, "a", None, None)
    assert made.push([2]) == Verdict(1, "b", None, None)
    assert made.push([6, 1]) == Verdict(1, "", "stop", "bc")
    assert (made.text, made.token_ids) == ("ab", (1, 2, 2, 6))


def test_text_held_back_comes_out_once_it_cannot_be_a_stop_text() -> None:
    made = checker(stop="aab", max_tokens=9)
    assert [made.push([t]).text for t in (1, 1, 1, 6, 1)] == ["", "", "a", "aac", ""]
    assert made.push([90]) == Verdict(1, "a", "stop", None)
    made = checker(stop="aab", max_tokens=2)
    assert made.push([1, 1]) == Verdict(2, "aa", "length", None)
    made = checker(stop="aab")
    assert made.push([1]).text == ""
    assert made.flush() == made.text == "a"


def test_of_several_stop_texts_the_first_completed_counts_then_the_first_listed() -> None:
    assert checker(stop=["ba", "aa"]).push([5, 4]) == Verdict(1, "", "stop", "aa")
    assert checker(stop=["b", "ab"]).push([3]) == Verdict(1, "a", "stop", "b")
    assert checker(stop=["ab", "b"]).push([3]) == Verdict(1, "", "stop", "ab")


def test_min_tokens_in_the_middle_of_a_run_delays_matching_not_appending() -> None:
    run = [90, 6, 2, 6, 90]
    for least, kept in ((0, 1), (1, 2), (2, 4), (3, 4), (4, 5)):
        found = checker(min_tokens=least, stop_token_ids=[6]).push(run)
        assert (found.kept, found.finish_reason) == (kept, "stop")
    assert checker(min_tokens=5, stop_token_ids=[6]).push(run).finish_reason is None
    assert checker(min_tokens=3, max_tokens=3).push(run) == Verdict(3, "</s>cb", "length", None)
    assert checker(min_tokens=9, room=3).push(run).finish_reason == "length"


def test_a_stop_text_counts_when_it_is_completed_after_min_tokens() -> None:
    assert checker(min_tokens=1, stop="ab").push([1, 2]) == Verdict(2, "", "stop", "ab")
    assert checker(min_tokens=2, stop="ab").push([1, 2, 6]) == Verdict(3, "abc", None, None)


def test_a_stop_text_of_split_characters_is_found() -> None:
    made = byte_checker(stop="😀!")
    run = list("é😀?😀!".encode())
    assert [made.push([byte]).text for byte in run[:7]] == ["", "é", "", "", "", "", "😀?"]
    assert made.push(run[7:]) == Verdict(5, "", "stop", "😀!")


def test_an_unfinished_character_at_the_end_is_shown_as_decode_shows_it() -> None:
    half = "😀".encode()[:2]
    assert byte_checker(max_tokens=2).push(half) == Verdict(2, "\ufffd", "length", None)
    held = byte_checker(max_tokens=3, stop="ab")
    assert held.push(b"a" + half) == Verdict(3, "a\ufffd", "length", None)


def test_without_a_tokenizer_tokens_stop_and_stop_texts_are_refused() -> None:
    assert checker(pieces=False).push([1, 90, 1]) == Verdict(2, "", "stop", None)
    with pytest.raises(RequestError, match="stop 'x' needs the package's tokenizer"):
        checker(pieces=False, stop="x")


def test_nothing_is_kept_after_the_end() -> None:
    made = checker()
    made.push([1, 90])
    assert made.push([1, 1]) == Verdict(0, "", "stop", None)
    assert made.flush() == ""
    assert made.push([]) == Verdict(0, "", "stop", None)
    assert made.token_ids == (1, 90)


def first_match(text: str, after: int, stops: list[str]) -> tuple[int, str] | None:
    """The stop text that ends first beyond ``after`` and where it begins."""
    ends = [
        (end, place, end - len(stop), stop)
        for place, stop in enumerate(stops)
        for end in range(max(after + 1, len(stop)), len(text) + 1)
        if text[end - len(stop) : end] == stop
    ]
    return min(ends)[2:] if ends else None


def reading(
    run: list[int], stops: list[str], ids: list[int], least: int, cap: int, room: int
) -> tuple[object, ...]:
    """The rules read once more: the shortest prefix of the run that ends the request."""
    for count in range(1, len(run) + 1):
        kept, last = tuple(run[:count]), run[count - 1]
        texts = [PIECES[token] for token in kept]
        if count > least and (last in EOS or last in ids):
            return kept, "".join(texts[:-1]), "stop", None if last in EOS else last
        text, gated = "".join(texts), len("".join(texts[:least]))
        match = first_match(text, gated, stops)
        if match is not None:
            return kept, text[: match[0]], "stop", match[1]
        if count >= min(cap, room):
            return kept, text, "length", None
    return tuple(run), "".join(PIECES[token] for token in run), None, None


@settings(max_examples=1500, deadline=None)
@given(
    run=st.lists(st.sampled_from(sorted(PIECES)), max_size=12),
    stops=st.lists(st.text("abc", min_size=1, max_size=4), max_size=3),
    ids=st.lists(st.sampled_from([5, 6]), max_size=1),
    limits=st.tuples(st.integers(0, 6), st.integers(0, 8), st.integers(1, 14)),
    cuts=st.lists(st.integers(0, 12), max_size=5),
)
@example(run=[1, 1, 1, 2], stops=["aab"], ids=[], limits=(0, 9, 9), cuts=[2])
@example(run=[2, 1], stops=["a", "bcb"], ids=[], limits=(2, 9, 9), cuts=[])
@example(run=[1, 2, 90, 1], stops=["bc", "b"], ids=[], limits=(2, 0, 9), cuts=[1, 1])
def test_any_chunking_gives_the_result_of_the_rules(
    run: list[int],
    stops: list[str],
    ids: list[int],
    limits: tuple[int, int, int],
    cuts: list[int],
) -> None:
    least, more, room = limits
    cap = max(least + more, 1)
    asked = {"stop": stops, "stop_token_ids": ids, "min_tokens": least, "max_tokens": cap}
    edges = sorted({0, len(run), *(min(cut, len(run)) for cut in cuts)})
    chunks = [run[a:b] for a, b in pairwise(edges)] or [[]]
    expected = reading(run, stops, ids, least, cap, room)
    for parts in (chunks, [[token] for token in run] or [[]], [run]):
        made = checker(room=room, **asked)
        verdicts = [made.push(part) for part in parts]
        if expected[2] is None:
            held = made.flush()
            assert not held or any(s.startswith(held) and s != held for s in stops)
            verdicts.append(Verdict(0, held, None, None))
        assert summary(made, verdicts) == expected


def test_stats_count_rounds_per_position_and_leave_draftless_rounds_out_of_the_histogram() -> None:
    counter = StatsCounter(3)
    assert counter.freeze().tokens_per_pass == 0.0
    for drafted, accepted, committed in ((3, 3, 4), (3, 0, 1), (2, 1, 2), (0, 0, 1), (3, 2, 1)):
        counter.count_round(drafted, accepted, committed)
    counter.add_ms("verify", 1.5)
    counter.add_ms("verify", 2.0)
    counter.add_ms("host", 0.25)
    assert json.loads(json.dumps(counter.freeze().as_json())) == {
        "target_passes": 5,
        "tokens_per_pass": 9 / 5,
        "drafted": [4, 4, 3],
        "accepted": [3, 2, 1],
        "rounds_by_drafts": [1, 0, 1, 3],
        "accepted_histogram": [1, 1, 1, 1],
        "ms": {"prefill": 0.0, "draft": 0.0, "verify": 3.5, "host": 0.25},
    }


def test_frozen_stats_do_not_change_and_plain_decoding_has_no_positions() -> None:
    counter = StatsCounter(0)
    before = counter.freeze()
    counter.count_round(0, 0, 1)
    assert before.target_passes == 0
    after = counter.freeze()
    assert (after.drafted, after.accepted, after.accepted_histogram) == ((), (), (0,))
    assert (before.rounds_by_drafts, after.rounds_by_drafts) == ((0,), (1,))
    assert after.tokens_per_pass == 1.0
