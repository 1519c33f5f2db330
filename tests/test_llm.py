"""``LLM`` over a real package: what it takes, what it streams, where answers end."""

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from qwen_mtp.config import GenerationDefaults
from qwen_mtp.errors import RequestError
from qwen_mtp.runtime.llm import LLM
from qwen_mtp.runtime.sampling import SamplingParams
from qwen_mtp.runtime.session import Session, StepResult
from tests.answers import (
    LONG,
    PROMPT,
    PROMPTS,
    K,
    accept_all,
    first_seen,
    greedy,
    joined,
    loaded,
    reason,
    session_of,
    texts,
    tokens,
    with_manifest,
)
from tests.commands import two_slots


@pytest.fixture
def llm() -> LLM:
    return loaded(two_slots())


@pytest.fixture
def truth(llm: LLM) -> tuple[int, ...]:
    """The greedy continuation of ``PROMPT``."""
    return tokens(llm.generate(PROMPT, LONG)[0])


@pytest.fixture
def accepted(truth: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Every draft is right; the sizes of the rounds, as they come."""
    return accept_all(monkeypatch, truth)


# --- what goes in ---------------------------------------------------------------------------


def test_a_text_and_its_ids_have_one_answer_alone_or_in_a_list(llm: LLM) -> None:
    text = "Once upon a time"
    ids = llm.text.encode(text)
    forms: list[Any] = [text, [text], ids, [ids], tuple(ids), np.array(ids), np.array([ids])]
    answers = [llm.generate(form, LONG) for form in forms]
    assert {len(answer) for answer in answers} == {1}
    assert len({answer[0].outputs for answer in answers}) == 1
    assert {answer[0].prompt_token_ids for answer in answers} == {tuple(ids)}
    assert [answer[0].prompt for answer in answers] == [text, text, *[None] * 5]
    json.dumps(answers[-1][0].prompt_token_ids)  # plain numbers, whatever came in


def test_texts_and_ids_can_be_mixed_and_are_answered_in_order(llm: LLM) -> None:
    mixed = ["Hello", PROMPT, "world"]
    answers = llm.generate(mixed, LONG)
    assert [a.prompt for a in answers] == ["Hello", None, "world"]
    assert [a.outputs for a in answers] == [llm.generate([p], LONG)[0].outputs for p in mixed]
    assert texts(answers) == [llm.text.decode(tokens(answer)) for answer in answers]


@pytest.mark.parametrize(
    "prompts",
    [[], (), b"bytes", [b"bytes"], {"a": 1}, None, 5, [1, "a"], ["a", 5], [1.0], [[]], [[None]],
     [["a"]], np.array(3), [[1.5]], [[5000]], [[-1]]],
    ids=repr,
)  # fmt: skip
def test_what_is_no_prompt_is_refused_before_anything_runs(llm: LLM, prompts: Any) -> None:
    with pytest.raises(RequestError) as caught:
        llm.generate(prompts)
    assert "\n" not in str(caught.value)
    with pytest.raises(RequestError):
        llm.stream(prompts)


def test_a_bad_prompt_in_a_list_leaves_the_others_unanswered(llm: LLM) -> None:
    with pytest.raises(RequestError, match="prompt token 1 is 2048: ids go from 0 to 2047"):
        llm.generate([PROMPT, [1, 2048]], LONG)
    assert len(session_of(llm).free_slots) == 2


def test_each_prompt_can_have_its_own_parameters(llm: LLM) -> None:
    several = [greedy(max_tokens=n) for n in (1, 5, 9)]
    answers = llm.generate([PROMPT] * 3, several)
    assert [len(tokens(answer)) for answer in answers] == [1, 5, 9]
    assert tokens(answers[2])[:5] == tokens(answers[1])


@pytest.mark.parametrize("params", [[], [LONG], [LONG] * 3, {"temperature": 0}, [LONG, None], 0])
def test_parameters_that_do_not_fit_the_prompts_are_refused(llm: LLM, params: Any) -> None:
    with pytest.raises(RequestError, match=r"sampling.params|sampling parameters for 2 prompts"):
        llm.generate([PROMPT, PROMPT], params)


def test_a_stop_id_outside_the_vocabulary_is_refused(llm: LLM) -> None:
    with pytest.raises(RequestError, match="stop_token_ids holds 2048"):
        llm.generate(PROMPT, greedy(stop_token_ids=[2048], min_tokens=1))


def test_numbers_beyond_what_the_graphs_hold_change_nothing(llm: LLM) -> None:
    sampled = SamplingParams(temperature=2.0, seed=3, top_k=2048, max_tokens=None, ignore_eos=True)
    usual = llm.generate(PROMPT, sampled)[0]
    odd = dataclasses.replace(sampled, top_k=10**30)
    assert tokens(llm.generate(PROMPT, odd)[0]) == tokens(usual)
    stop = tokens(usual)[5]
    late = dataclasses.replace(sampled, min_tokens=10**30, stop_token_ids=[stop])
    assert stop not in tokens(llm.generate(PROMPT, late)[0])
    llm.generate(PROMPT, SamplingParams(temperature=1e300))


def test_without_parameters_the_packages_own_count(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert tokens(llm.generate(PROMPT)[0]) == tokens(
        llm.generate(PROMPT, greedy(max_tokens=16))[0]
    )
    defaults = GenerationDefaults(temperature=1.5, top_k=40, top_p=0.9, do_sample=True)
    with_manifest(monkeypatch, llm, generation=defaults)
    written = SamplingParams(temperature=1.5, top_k=40, top_p=0.9, seed=8)
    given = SamplingParams(seed=8)
    assert llm.generate(PROMPT, given)[0].outputs == llm.generate(PROMPT, written)[0].outputs
    free = dataclasses.replace(written, top_k=0, top_p=1.0)
    assert llm.generate(PROMPT, given)[0].outputs != llm.generate(PROMPT, free)[0].outputs


# --- streams --------------------------------------------------------------------------------


def test_deltas_joined_are_the_answers_of_generate(llm: LLM) -> None:
    several = [greedy(max_tokens=n) for n in (3, 24, 11, 1, 17)]
    answers = llm.generate(PROMPTS, several)
    deltas = list(llm.stream(PROMPTS, several))
    for i, answer in enumerate(answers):
        assert joined(deltas, i) == (tokens(answer), answer.outputs[0].text)
        own = [delta for delta in deltas if delta.index == i]
        assert [d.finish_reason for d in own] == [None] * (len(own) - 1) + ["length"]
        assert len({delta.request_id for delta in own}) == 1


def test_a_stream_shows_what_is_committed_and_nothing_else(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    committed: dict[int, list[int]] = {}
    prefill, step = Session.prefill, Session.step

    def recording_prefill(self: Session, *given: Any) -> tuple[int, int]:
        slot, token = prefill(self, *given)
        committed[slot] = [token]
        return slot, token

    def recording_step(self: Session) -> dict[int, StepResult]:
        results = step(self)
        for slot, result in results.items():
            committed[slot] += result.tokens
        return results

    monkeypatch.setattr(Session, "prefill", recording_prefill)
    monkeypatch.setattr(Session, "step", recording_step)
    shown: dict[int, list[int]] = {0: [], 1: []}
    drafted = 0
    for delta in llm.stream(PROMPTS[:2], LONG):
        assert len(delta.token_ids) <= K + 1
        shown[delta.index] += delta.token_ids
        behind = committed[delta.index][: len(shown[delta.index])]
        assert shown[delta.index] == behind
        drafted += 1
    assert drafted > 4


def test_tokens_come_before_the_next_round_runs(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    rounds = []
    step = Session.step

    def counting(self: Session) -> dict[int, StepResult]:
        rounds.append(None)
        return step(self)

    monkeypatch.setattr(Session, "step", counting)
    stream = llm.stream(PROMPT, LONG)
    assert len(next(stream).token_ids) == 1
    assert len(rounds) == 0
    next(stream)
    assert len(rounds) == 1
    stream.close()  # type: ignore[attr-defined]


def spanning_stop(llm: LLM, truth: Sequence[int]) -> tuple[int, str, str]:
    """A text that only the token at the returned place completes; the text before it."""
    whole = llm.text.decode(truth)
    for i in range(2, len(truth) - K):
        left, right = llm.text.decode(truth[i - 1 : i]), llm.text.decode(truth[i : i + 1])
        stop = left[-1:] + right[:1]
        at = len(llm.text.decode(truth[:i])) - 1
        if left and right and "�" not in stop and whole.find(stop) == at:
            return i, stop, whole[:at]
    raise AssertionError("no pair of neighbouring tokens will do")


def test_a_stop_text_across_two_tokens_never_shows(
    llm: LLM, truth: tuple[int, ...], accepted: list[int]
) -> None:
    place, stop, before = spanning_stop(llm, truth)
    deltas = list(llm.stream(PROMPT, greedy(stop=stop)))
    assert joined(deltas) == (truth[: place + 1], before)
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == ("stop", stop)
    shown = ""
    for delta in deltas:
        shown += delta.text
        assert before.startswith(shown)
    assert max(accepted) == K + 1
    other = llm.generate(PROMPT, greedy(stop=[stop, "never"]))[0]
    assert (tokens(other), other.outputs[0].text) == joined(deltas)


# --- where answers end ----------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["end of sequence", "stop id"])
def test_a_stop_at_each_index_of_an_accepted_run_ends_there(
    llm: LLM,
    truth: tuple[int, ...],
    accepted: list[int],
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
) -> None:
    places = first_seen(truth, range(2 * K + 3))
    assert {(place - 1) % (K + 1) for place in places if place} == {0, 1, 2, 3}
    for place in places:
        params = greedy(ignore_eos=False, stop_token_ids=[truth[place]])
        if kind == "end of sequence":
            config = llm.package.manifest.config
            own = dataclasses.replace(config, eos_token_ids=(2047, truth[place]))
            with_manifest(monkeypatch, llm, config=own)
            params = greedy(ignore_eos=False)
        output = llm.generate(PROMPT, params)[0]
        assert tokens(output) == truth[: place + 1]
        assert reason(output) == ("stop", truth[place] if kind == "stop id" else None)
        assert output.outputs[0].text == llm.text.decode(truth[:place])
        assert output.finished
    assert max(accepted) == K + 1


def test_a_cap_inside_an_accepted_run_cuts_it(
    llm: LLM, truth: tuple[int, ...], accepted: list[int]
) -> None:
    for cap in range(1, 2 * K + 4):
        output = llm.generate(PROMPT, greedy(max_tokens=cap))[0]
        assert (tokens(output), reason(output)) == (truth[:cap], ("length", None))
        assert output.outputs[0].text == llm.text.decode(truth[:cap])
    assert max(accepted) == K + 1


@pytest.mark.parametrize("after", [0, 1, 2])
def test_a_stop_at_the_cap_beats_it_and_one_behind_it_is_never_seen(
    llm: LLM, truth: tuple[int, ...], accepted: list[int], after: int
) -> None:
    stop = first_seen(truth, range(4, 9))[0]
    cap = stop + 1 - after
    output = llm.generate(PROMPT, greedy(max_tokens=cap, stop_token_ids=[truth[stop]]))[0]
    assert tokens(output) == truth[:cap]
    assert reason(output) == (("length", None) if after else ("stop", truth[stop]))
    assert max(accepted) > 1


@pytest.mark.parametrize("accept", [True, False], ids=["all accepted", "own drafts"])
def test_the_end_of_the_context_ends_the_answer_exactly_there(
    llm: LLM, accept: bool, request: pytest.FixtureRequest
) -> None:
    if accept:
        request.getfixturevalue("accepted")
    for length in (1, 40, 58, 59, 60, 61, 62, 63):
        prompt = [*PROMPT, *[8] * (length - 3)][:length]
        output = llm.generate(prompt, greedy(max_tokens=None))[0]
        assert len(tokens(output)) == 64 - length
        assert reason(output) == ("length", None)


def test_a_prompt_that_fills_the_context_is_refused(llm: LLM) -> None:
    with pytest.raises(RequestError, match="64 tokens, the package takes up to 63"):
        llm.generate([1] * 64)


def test_min_tokens_bans_the_stop_ids_and_only_so_long(llm: LLM, truth: tuple[int, ...]) -> None:
    stops = sorted({*truth[:6]})
    output = llm.generate(PROMPT, greedy(min_tokens=9, stop_token_ids=stops, max_tokens=24))[0]
    assert not set(tokens(output)[:9]) & set(stops)
    first = truth[0]
    forced = greedy(min_tokens=1, stop_token_ids=[first])
    early = llm.generate(PROMPT, forced)[0]
    assert tokens(early)[0] != first
    plain = LLM(two_slots(), threads=1, num_speculative_tokens=0)
    both = [greedy(min_tokens=9, stop_token_ids=stops), forced]
    assert [o.outputs for o in plain.generate([PROMPT] * 2, both)] == [
        o.outputs for o in llm.generate([PROMPT] * 2, both)
    ]


def test_min_tokens_with_more_stop_ids_than_the_graph_takes_is_refused(llm: LLM) -> None:
    params = greedy(min_tokens=2, stop_token_ids=range(17))
    with pytest.raises(RequestError, match="17 stop ids: at most 16"):
        llm.generate(PROMPT, params)
