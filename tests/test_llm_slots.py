"""``LLM`` over a real package: slots, chance, failures and damage."""

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qwen_mtp.errors import RequestError
from qwen_mtp.runtime.llm import LLM
from qwen_mtp.runtime.outputs import Delta
from qwen_mtp.runtime.package import Package
from qwen_mtp.runtime.sampling import SamplingParams
from tests.answers import (
    LONG,
    PROMPT,
    PROMPTS,
    K,
    accept_all,
    greedy,
    joined,
    loaded,
    session_of,
    tokens,
)
from tests.commands import package_copy, two_slots, verified_package


@pytest.fixture
def llm() -> LLM:
    return loaded(two_slots())


@pytest.fixture
def one_slot() -> LLM:
    return loaded(verified_package())


@pytest.fixture
def truth(llm: LLM) -> tuple[int, ...]:
    """The greedy continuation of ``PROMPT``."""
    return tokens(llm.generate(PROMPT, LONG)[0])


@pytest.fixture
def accepted(truth: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Every draft is right; the sizes of the rounds, as they come."""
    return accept_all(monkeypatch, truth)


# --- slots ----------------------------------------------------------------------------------


@pytest.mark.parametrize("slots", [1, 2])
def test_more_prompts_than_slots_are_all_answered_in_order(
    llm: LLM, one_slot: LLM, slots: int
) -> None:
    runs = {1: one_slot, 2: llm}[slots]
    several = [greedy(max_tokens=n) for n in (2, 20, 7, 1, 12)]
    together = runs.generate(PROMPTS, several)
    assert [o.prompt_token_ids for o in together] == [tuple(p) for p in PROMPTS]
    alone = [runs.generate(p, s)[0] for p, s in zip(PROMPTS, several, strict=True)]
    assert [o.outputs for o in together] == [o.outputs for o in alone]
    assert len(session_of(runs).free_slots) == slots


def test_a_free_slot_is_filled_before_the_other_one_is_done(llm: LLM) -> None:
    order = [d.index for d in llm.stream(PROMPTS[:3], [greedy(max_tokens=n) for n in (2, 24, 2)])]
    assert order.index(2) < len(order) - 1 - order[::-1].index(1)


def test_without_speculation_greedy_answers_are_the_same(llm: LLM) -> None:
    plain = LLM(two_slots(), threads=1, num_speculative_tokens=0)
    fewer = LLM(two_slots(), threads=1, num_speculative_tokens=1)
    expected = [o.outputs for o in plain.generate(PROMPTS, LONG)]
    assert [o.outputs for o in llm.generate(PROMPTS, LONG)] == expected
    assert [o.outputs for o in fewer.generate(PROMPTS, LONG)] == expected
    stats = plain.generate(PROMPT, LONG)[0].stats
    assert (stats.target_passes, stats.drafted, stats.tokens_per_pass) == (23, (), 1.0)


def test_an_adaptive_answer_is_the_fixed_one_and_tells_its_rounds(llm: LLM) -> None:
    fixed = LLM(two_slots(), threads=1, adaptive=False)
    several = [greedy(max_tokens=n) for n in (40, 30, 24, 12, 3)]
    adaptive, expected = (runs.generate(PROMPTS, several) for runs in (llm, fixed))
    assert [o.outputs for o in adaptive] == [o.outputs for o in expected]
    for output in adaptive:
        rounds = output.stats.rounds_by_drafts
        assert sum(rounds) == output.stats.target_passes
        assert sum(k * n for k, n in enumerate(rounds)) == sum(output.stats.drafted)
    # of a random model, hardly a draft is accepted
    assert adaptive[0].stats.rounds_by_drafts[0] > expected[0].stats.rounds_by_drafts[0]


def test_stats_count_what_the_rounds_did(
    llm: LLM, truth: tuple[int, ...], accepted: list[int]
) -> None:
    stats = llm.generate(PROMPT, greedy(max_tokens=2 * K + 3))[0].stats
    assert stats.target_passes == 2
    assert stats.committed == 2 * (K + 1)
    assert stats.drafted == stats.accepted == (2, 2, 2)
    assert stats.rounds_by_drafts == (0, 0, 0, 2)
    assert stats.accepted_histogram == (0, 0, 0, 2)
    assert min(stats.ms_prefill, stats.ms_draft, stats.ms_verify, stats.ms_host) > 0


def test_a_closed_model_refuses_and_may_be_closed_again() -> None:
    with LLM(verified_package(), threads=1) as closed:
        pass
    closed.close()
    for action in (closed.generate, lambda p: next(closed.stream(p))):
        with pytest.raises(RequestError, match="this LLM is closed: make a new one"):
            action(PROMPT)


def test_closing_a_stream_early_frees_its_slots(llm: LLM, truth: tuple[int, ...]) -> None:
    for rounds in (1, 2, 3, 4):
        stream = llm.stream(PROMPTS, LONG)
        for _ in range(rounds):
            next(stream)
        stream.close()  # type: ignore[attr-defined]
        assert len(session_of(llm).free_slots) == 2
    assert tokens(llm.generate(PROMPT, LONG)[0]) == truth


def test_a_second_stream_is_refused_and_the_first_goes_on(llm: LLM) -> None:
    stream = llm.stream(PROMPT, LONG)
    started = [next(stream)]
    with pytest.raises(RequestError, match="another stream of this LLM is not finished"):
        next(llm.stream(PROMPTS[1]))
    with pytest.raises(RequestError, match="another stream of this LLM is not finished"):
        llm.generate(PROMPTS[1])
    whole = joined([*started, *stream])
    answer = llm.generate(PROMPT, LONG)[0]
    assert whole == (tokens(answer), answer.outputs[0].text)


@pytest.mark.parametrize("place", ["prefill", "step"])
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_exception_in_a_round_leaves_the_model_usable(
    llm: LLM,
    truth: tuple[int, ...],
    monkeypatch: pytest.MonkeyPatch,
    place: str,
    error: type[BaseException],
) -> None:
    calls = []

    def failing(graph: str, *given: Any) -> None:
        calls.append(graph)
        if (len(calls) > 5) if place == "step" else (graph == "prefill" and len(calls) > 1):
            raise error("halfway")
        run(graph, *given)

    run = session_of(llm).engine.run
    with monkeypatch.context() as patch:
        patch.setattr(session_of(llm).engine, "run", failing)
        with pytest.raises(error, match="halfway"):
            llm.generate(PROMPTS, LONG)
    assert len(session_of(llm).free_slots) == 2
    assert tokens(llm.generate(PROMPT, LONG)[0]) == truth


# --- chance ---------------------------------------------------------------------------------


def test_a_seed_repeats_a_text_alone_and_in_a_batch_and_others_differ(llm: LLM) -> None:
    def params(seed: int | None) -> SamplingParams:
        return SamplingParams(temperature=1.0, seed=seed, max_tokens=12, ignore_eos=True)

    alone = [llm.generate(PROMPT, params(seed))[0] for seed in (1, 2, 3, 2**64 - 1)]
    assert len({tokens(output) for output in alone}) == 4
    batched = llm.generate([PROMPT] * 4, [params(seed) for seed in (1, 2, 3, 2**64 - 1)])
    assert [o.outputs for o in batched] == [o.outputs for o in alone]
    drawn = llm.generate([PROMPT] * 2, params(None))
    assert drawn[0].seed != drawn[1].seed
    assert tokens(drawn[0]) != tokens(drawn[1])
    assert llm.generate(PROMPT, params(drawn[1].seed))[0].outputs == drawn[1].outputs


# --- damage ---------------------------------------------------------------------------------


def with_nan(directory: Path, name: str) -> Path:
    """A package whose stored tensor begins with a NaN."""
    path = package_copy(directory)
    stored = {t.name: t for t in Package.open(path).manifest.weights}[name]
    weights = np.memmap(path / "weights.bin", np.uint8, mode="r+")
    values = weights[stored.offset : stored.offset + stored.nbytes].view(np.float32)
    values[0] = math.nan
    weights.flush()
    return path


def test_nan_weights_are_an_error_and_never_a_token(tmp_path: Path) -> None:
    with LLM(with_nan(tmp_path, "target.layers.0.input_norm.weight"), threads=1) as damaged:
        for params in (LONG, SamplingParams(temperature=1.0)):
            shown: list[Delta] = []
            with pytest.raises(RequestError, match=r"NaN logits after position \d+; run qwen-mtp"):
                shown.extend(damaged.stream(PROMPT, params))
            assert shown == []
        assert len(session_of(damaged).free_slots) == 1


def test_a_nan_in_the_drafter_changes_no_answer(tmp_path: Path, one_slot: LLM) -> None:
    with LLM(with_nan(tmp_path, "mtp.embedding_norm.weight"), threads=1) as damaged:
        found, whole = damaged.generate(PROMPT, LONG)[0], one_slot.generate(PROMPT, LONG)[0]
    assert found.outputs == whole.outputs
    assert found.stats.drafted[0] > 0


def test_a_nan_in_the_middle_of_an_answer_frees_every_slot(
    llm: LLM, truth: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = session_of(llm).engine
    stream = llm.stream(PROMPTS[:2], LONG)
    shown = [next(stream) for _ in range(4)]
    for slot in range(2):
        engine.state("layers.0.ssm")[slot] = math.nan
    with pytest.raises(RequestError, match="NaN logits"):
        shown.extend(stream)
    assert all(-1 not in delta.token_ids for delta in shown)
    assert len(session_of(llm).free_slots) == 2
    assert tokens(llm.generate(PROMPT, LONG)[0]) == truth


BARE = """
import sys
for name in ("torch", "onnx", "onnx_ir", "onnxscript", "transformers", "safetensors"):
    sys.modules[name] = None
from qwen_mtp import LLM, SamplingParams
with LLM(sys.argv[1], threads=1) as llm:
    (output,) = llm.generate("Once upon", SamplingParams(temperature=0, max_tokens=4))
assert len(output.outputs[0].token_ids) == 4
print([m for m in sys.modules if m.split(".")[0] == "torch" and sys.modules[m] is not None])
"""


def test_a_package_runs_where_the_export_tools_are_not_installed() -> None:
    command = [sys.executable, "-W", "error", "-c", BARE, str(verified_package())]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[]\n", "")
