"""Draft logits and the draft cache against an MTP head built from transformers' modules."""

from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qwen_mtp.custom_ops.torch_library import ops
from qwen_mtp.graphs.spec import Geometry
from qwen_mtp.graphs.target import target_prefill
from qwen_mtp.runtime.session import Session
from tests.eager import Reference
from tests.packages import TRAINED, package, random_checkpoint
from tests.rounds import EagerGraphs, Round, Weights, gap, record

TOLERANCE = 1e-4
K = 3
# (drafts given, drafts right): after prefill, then after no, one, two and all accepted drafts,
# after a round of plain decoding and after rounds that verify fewer drafts than K.
SCRIPT = ((3, 0), (3, 1), (3, 3), (3, 2), (3, 3), (0, 0), (3, 3), (1, 1), (1, 0), (3, 0))
OTHER = ((3, 3), (3, 3), (3, 0), (3, 1), (0, 0), (0, 0), (2, 2), (1, 0), (1, 1), (3, 2))
CHUNKS = (4, 7, 16)


@lru_cache
def _checkpoint() -> Path:
    """One recurrent and one full layer: the head sees the target's hidden rows alone."""
    return random_checkpoint(5, num_hidden_layers=2, full_attention_interval=2)


@lru_cache
def _reference(checkpoint: Path) -> Reference:
    return Reference(checkpoint)


def _prompt(length: int, vocabulary: int) -> list[int]:
    return np.random.default_rng(length).integers(0, vocabulary, length).tolist()  # type: ignore[no-any-return]


Recorded = tuple[list[list[int]], list[list[Round]]]


def _record(checkpoint: Path, chunk: int, lengths: tuple[int, int]) -> Recorded:
    """Two slots side by side; each sequence with its continuation, and its rounds."""
    reference = _reference(checkpoint)
    chosen = package(checkpoint, max_num_seqs=2, prefill_chunk=chunk)
    session = Session(chosen, threads=1, keep_logits=True)
    prompts = [_prompt(length, reference.config.vocab_size) for length in lengths]
    counts = [sum(right + 1 for _, right in plan) + K + 1 for plan in (SCRIPT, OTHER)]
    futures = [reference.continuation(p, n) for p, n in zip(prompts, counts, strict=True)]
    _, rounds = record(session, prompts, futures, (SCRIPT, OTHER))
    return [p + f for p, f in zip(prompts, futures, strict=True)], rounds


def _check(checkpoint: Path, recorded: Recorded) -> None:
    reference = _reference(checkpoint)
    for ids, rounds in zip(*recorded, strict=True):
        for r in rounds:
            expected = reference.drafts(ids[: r.start + 1], r.draft_ids)
            assert gap(r.draft_logits, expected.logits) <= TOLERANCE, r.start
            assert gap(r.keys, expected.keys) <= TOLERANCE, r.start
            assert gap(r.values, expected.values) <= TOLERANCE, r.start
            assert r.draft_ids == r.draft_logits.argmax(axis=-1).tolist()
            assert r.draft_ids == expected.logits.argmax(dim=-1).tolist()


@pytest.mark.parametrize("chunk", CHUNKS)
def test_drafts_and_their_cache_are_those_of_the_head_over_the_whole_sequence(chunk: int) -> None:
    recorded = _record(_checkpoint(), chunk, (5 * chunk // 2, 1))
    starts = [[r.start for r in rounds] for rounds in recorded[1]]
    for begin, plan, found in zip((5 * chunk // 2, 1), (SCRIPT, OTHER), starts, strict=True):
        assert found == list(accumulate((right + 1 for _, right in plan[:-1]), initial=begin))
    _check(_checkpoint(), recorded)


@pytest.mark.skipif(not (TRAINED / "model.safetensors").is_file(), reason="not trained here")
def test_the_trained_head_drafts_what_the_reference_drafts() -> None:
    _check(TRAINED, _record(TRAINED, 16, (40, 5)))


GEOMETRY = Geometry(
    max_num_seqs=1,
    max_model_len=64,
    block_size=16,
    prefill_chunk=16,
    lookaheads=(K,),
    format="fp32",
)


def _eager_gap(change: Any = None) -> float:
    """Largest gap of the draft logits of the eager modules after a prompt of two chunks."""
    checkpoint = _checkpoint()
    graphs, reference = EagerGraphs(checkpoint, GEOMETRY, change), _reference(checkpoint)
    prompt = _prompt(24, reference.config.vocab_size)
    token = reference.continuation(prompt, 1)[0]
    after = graphs.prefill(prompt)
    found = graphs.draft(token, after["hidden"][0], len(prompt) - 1)
    expected = reference.drafts([*prompt, token], found["draft_ids"][0].tolist())
    return max(gap(found[f"draft_logits.{j}"][0], expected.logits[j]) for j in range(K))


def test_the_eager_head_is_the_reference() -> None:
    assert _eager_gap() <= TOLERANCE


def test_hidden_rows_before_the_final_norm_break_the_comparison(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def prefill(target: Any, io: Any) -> Any:
        kept: list[Any] = []
        norm = target.norm.after

        def after(x: Any, added: Any) -> Any:
            total, normed = norm(x, added)
            kept.append(total)
            return total, normed

        monkeypatch.setattr(target.norm, "after", after)
        target_prefill(target, io)
        io["hidden"] = ops.take_row(kept[0][None], io["num_valid"] - 1)
        return kept[0]

    monkeypatch.setattr("qwen_mtp.graphs.model.target_prefill", prefill)
    assert _eager_gap() > 100 * TOLERANCE


def test_hidden_rows_of_the_neighbour_break_the_comparison(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def prefill(target: Any, io: Any) -> Any:
        return target_prefill(target, io).roll(1, dims=0)

    monkeypatch.setattr("qwen_mtp.graphs.model.target_prefill", prefill)
    assert _eager_gap() > 100 * TOLERANCE


def _swapped_halves(weights: Weights) -> None:
    weights["mtp.fc.weight"][:] = np.roll(weights["mtp.fc.weight"], 64, axis=1)


def _swapped_norms(weights: Weights) -> None:
    names = "mtp.embedding_norm.weight", "mtp.hidden_norm.weight"
    first, second = (weights[n].copy() for n in names)
    weights[names[0]], weights[names[1]] = second, first


def _bare_norm(weights: Weights) -> None:
    weights["mtp.norm.weight"] -= 1


MISTAKES = {
    "hidden row before embedding": _swapped_halves,
    "norms of embedding and hidden row exchanged": _swapped_norms,
    "last norm without the one": _bare_norm,
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_wrong_reading_of_the_weights_breaks_the_comparison(mistake: str) -> None:
    assert _eager_gap(MISTAKES[mistake]) > 100 * TOLERANCE
