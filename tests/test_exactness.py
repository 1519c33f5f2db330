"""Greedy output is the same, token by token and logit bit by bit, with speculation on and off."""

import argparse
import bisect
import calendar
import heapq
import shlex
import string
import textwrap
import wave
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from itertools import count as counter
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from qwen_mtp.runtime.sampling import SamplingParams
from tests.checkpoints import transformers_model
from tests.packages import TRAINED, package, random_checkpoint
from tests.scripted import (
    CHUNK,
    FORMATS,
    KS,
    LIMIT,
    Scripted,
    Track,
    Want,
    counts,
    differences,
    every_pair,
    five_lookaheads,
    nothing,
    own,
    random_prompts,
    scripted,
    session,
    solo,
    transitions,
)

# 1..4 around the conv window, the chunk and one more, 2.5 chunks, and across the step of 128
LENGTHS = (1, 2, 3, 4, CHUNK, CHUNK + 1, 40, 100)
PLAIN_ROUNDS = 64


@cache
def plain(format: str, threads: int = 1) -> list[Track]:
    """Plain decoding, far enough to know the drafts of the last scripted round."""
    running = session(five_lookaheads(format), 0, threads)
    prompts = random_prompts(LENGTHS)
    return [solo(running, prompt, nothing, PLAIN_ROUNDS + max(KS) + 1) for prompt in prompts]


def check(truths: list[Track], tracks: list[Track], length: int) -> None:
    for i, (truth, track) in enumerate(zip(truths, tracks, strict=True)):
        assert differences(truth, track, length) == [], f"prompt {i}"


def test_a_script_has_every_count_after_every_other() -> None:
    for k in KS:
        cycled = every_pair(k)
        assert len(cycled) == (k + 1) ** 2
        pairs = {*zip(cycled, cycled[1:] + cycled[:1], strict=True)}
        assert pairs == {(a, b) for a in range(k + 1) for b in range(k + 1)}


@pytest.mark.parametrize("k", KS)
@pytest.mark.parametrize("format", FORMATS)
def test_every_accept_count_after_every_other_gives_the_bits_of_plain_decoding(
    format: str, k: int
) -> None:
    truths = plain(format)
    tracks = scripted(session(five_lookaheads(format), k), truths, PLAIN_ROUNDS, counts(k))
    check(truths, tracks, PLAIN_ROUNDS)
    assert transitions(tracks) == {(a, b) for a in range(k + 1) for b in range(k + 1)}


@pytest.mark.parametrize("k", KS)
@pytest.mark.parametrize("format", FORMATS)
def test_the_drafts_of_the_head_give_the_bits_of_plain_decoding(format: str, k: int) -> None:
    truths = plain(format)[::3]
    running = session(five_lookaheads(format), k)
    check(truths, [solo(running, truth.prompt, own, 24) for truth in truths], 24)


@pytest.mark.parametrize("format", FORMATS)
def test_two_threads_give_the_bits_of_one(format: str) -> None:
    truths, k = plain(format)[4:], 7
    tracks = scripted(session(five_lookaheads(format), k, threads=2), truths, 32, counts(k))
    check(truths, tracks, 32)


@pytest.mark.parametrize("k", KS)
def test_rounds_of_every_length_in_any_order_change_nothing(k: int) -> None:
    """Short and empty drafts move a sequence from bucket to bucket and back."""
    draw = np.random.default_rng(k)

    def ragged() -> Want:
        length = int(draw.integers(0, k + 1))
        return Want(int(draw.integers(0, length + 1)), length)

    truths = plain("fp32")[4:]
    tracks = scripted(
        session(five_lookaheads("fp32"), k), truths, PLAIN_ROUNDS, (ragged() for _ in counter())
    )
    check(truths, tracks, PLAIN_ROUNDS)
    used = Counter(d for track in tracks for d in track.drafted)
    assert set(used) == set(range(k + 1)), "a length did not occur"


@pytest.mark.parametrize("k", KS)
def test_a_round_without_drafts_commits_whatever_the_round_before_accepted(k: int) -> None:
    truths = plain("fp32")[3:]
    script = [want for a in range(k + 1) for want in (Want(a, k), Want(0, 0), Want(a, a))]
    endless = (script[i % len(script)] for i in counter())
    tracks = scripted(session(five_lookaheads("fp32"), k), truths, PLAIN_ROUNDS, endless)
    check(truths, tracks, PLAIN_ROUNDS)
    assert sum(len(track.accepted) for track in tracks) > len(script)


@pytest.mark.parametrize("accept", ["all", "none", "half"])
@pytest.mark.parametrize("k", KS)
def test_the_context_may_end_at_any_place_of_a_round(k: int, accept: str) -> None:
    """Prompts that leave 1 .. 2K + 3 tokens: the last rounds are cut at each place."""
    whole = plain("fp32")[-1]
    text, cuts = [*whole.prompt, *whole.tokens], set[int]()
    for left in range(1, 2 * k + 4):
        prompt = (text + text)[: LIMIT - left]
        base = session(five_lookaheads("fp32"), 0)
        truth = solo(base, prompt, nothing, left)
        wanted = {"all": k, "none": 0, "half": (k + 1) // 2}[accept]
        running = session(five_lookaheads("fp32"), k)
        drafter = Scripted(truth.tokens, (Want(wanted, k) for _ in counter()))
        track = solo(running, prompt, drafter, left)
        assert len(track.tokens) == left, "a round ran past the end of the context"
        assert differences(truth, track, left) == [], f"{left} tokens left"
        cuts.update(track.drafted)
    assert cuts == set(range(k + 1)), "a cut did not occur"


@pytest.mark.parametrize("k", [1, 3, 7])
def test_max_tokens_may_end_at_any_place_of_a_round(k: int) -> None:
    truth = plain("fp32")[2]
    for most in range(1, 2 * k + 4):
        sampling = SamplingParams(temperature=0, max_tokens=most, ignore_eos=True).resolve()
        for script in (iter([Want(k, k)] * most), counts(k)):
            drafter = Scripted(truth.tokens, script)
            track = solo(
                session(five_lookaheads("fp32"), k), truth.prompt, drafter, most, sampling
            )
            assert len(track.tokens) == most
            assert differences(truth, track, most) == []


@pytest.fixture
def one_torch_thread() -> Iterator[None]:
    """Small products on several threads spend their time waiting for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@cache
def written_prompts() -> list[list[int]]:
    """Beginnings of sources of the standard library, in the tokens of the bundled checkpoint."""
    tokenizer = Tokenizer.from_file(str(TRAINED / "tokenizer.json"))
    modules = (argparse, bisect, calendar, heapq, shlex, string, textwrap, wave)
    texts = (Path(str(module.__file__)).read_text(encoding="utf-8") for module in modules)
    return [tokenizer.encode(text[:400]).ids[: 20 + 9 * i] for i, text in enumerate(texts)]


@pytest.mark.usefixtures("one_torch_thread")
@pytest.mark.parametrize("source", ["random", "trained"])
def test_speculation_gives_the_greedy_output_of_transformers(
    source: str, record_property: Callable[[str, object], None]
) -> None:
    """Its best token after each of our prefixes; where it differs, its two best are a near tie."""
    trained, length, ties, accepted = source == "trained", 48, [], 0
    oracle = transformers_model(TRAINED if trained else random_checkpoint())
    running = session(package(TRAINED) if trained else five_lookaheads("fp32"), 3)
    prompts = written_prompts() if trained else random_prompts(LENGTHS)
    for prompt in prompts:
        track = solo(running, prompt, own, length)
        accepted += sum(track.accepted)
        ids = torch.tensor([[*prompt, *track.tokens]])
        logits = oracle(ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
        best = logits.topk(2)
        for i, token in enumerate(track.tokens):
            gap = float(best.values[i, 0] - best.values[i, 1])
            if token != int(best.indices[i, 0]):
                ties.append(gap)
            assert token == int(best.indices[i, 0]) or gap < 1e-3, f"token {i}, gap {gap:.1e}"
    record_property("near_ties", ties)
    assert len(ties) < len(prompts)
    assert accepted > length or not trained, "the trained head was of no use"


@pytest.mark.slow
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("source", ["random", "trained"])
def test_fifty_prompts_of_128_tokens_give_the_bits_of_plain_decoding(
    source: str, format: str
) -> None:
    """Every K, scripted drafts and those of the head."""
    checkpoint = random_checkpoint(1) if source == "random" else TRAINED
    big = package(checkpoint, lookaheads=KS, max_model_len=LIMIT, format=format)
    lengths = (*LENGTHS, *range(5, 89, 2))
    prompts = random_prompts(lengths, big.manifest.config.vocab_size, seed=7)
    if source == "trained":
        prompts = [*written_prompts(), *prompts[len(written_prompts()) :]]
    assert len(prompts) >= 50
    base = session(big, 0)
    truths = [solo(base, prompt, nothing, 128 + max(KS) + 1) for prompt in prompts]
    for k in KS:
        tracks = scripted(session(big, k), truths, 128, counts(k))
        check(truths, tracks, 128)
        assert transitions(tracks) == {(a, b) for a in range(k + 1) for b in range(k + 1)}
        forced = Counter(a for track in tracks for a in track.accepted)
        running = session(big, k)
        tracks = [solo(running, prompt, own, 128) for prompt in prompts]
        check(truths, tracks, 128)
        real = Counter(a for track in tracks for a in track.accepted)
        print(
            f"{source} {format} K={k}: forced {sorted(forced.items())} own {sorted(real.items())}"
        )
