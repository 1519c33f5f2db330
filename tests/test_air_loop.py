"""The loop over GE models emits what it emits over ONNX Runtime, pass by pass."""

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import chain, cycle, repeat
from itertools import count as counter
from typing import Any

import numpy as np
import pytest
import torch

from qwen_mtp.runtime.package import Package
from qwen_mtp.runtime.sampling import SamplingParams
from tests.air_packages import air_package
from tests.air_rounds import Pair, Seen, ge_session, poisoned, serve
from tests.ge_graphs import needs_wheel
from tests.packages import TRAINED, package
from tests.scripted import (
    GREEDY,
    Drafter,
    Forced,
    Scripted,
    Track,
    Want,
    advance,
    begin,
    counts,
    differences,
    following,
    nothing,
    own,
    random_prompts,
    session,
    solo,
    transitions,
)

pytestmark = [
    needs_wheel,
    pytest.mark.skipif(not (TRAINED / "model.safetensors").is_file(), reason="not trained here"),
]
LENGTH, LIMIT, VOCABULARY = 48, 128, 2048
# around the convolution window and the chunk of 16, and as long as the context allows
LENGTHS = (1, 2, 3, 4, 5, 8, 12, 15, 16, 17, 20, 24, 31, 32, 33, 40, 48, 56, 64, 70)
BOUNDS = {"logits": 1e-4, "draft logits": 1e-4}
STATE = 1e-5
# What bfloat16 may do to the trained model: its best logits are near 10, where a step is 1/16.
NEAR, MOVED = 0.1, 0.3  # two best logits that may change places; any logit


@pytest.fixture(autouse=True)
def one_torch_thread() -> Iterator[None]:
    """Small products on several threads spend their time waiting for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@cache
def onnx(format: Any = "fp32", slots: int = 2) -> Package:
    return package(
        TRAINED, lookaheads=(1, 3), max_num_seqs=slots, max_model_len=LIMIT, format=format
    )


@cache
def portable(slots: int = 2) -> Package:
    return air_package(TRAINED, lookaheads=(3,), max_num_seqs=slots, max_model_len=LIMIT)


@cache
def fused(*custom_ops: str, **options: Any) -> Package:
    return air_package(
        TRAINED, "fused", lookaheads=(3,), max_model_len=LIMIT, custom_ops=custom_ops, **options
    )


@cache
def truths(format: Any = "fp32") -> list[Track]:
    """Plain decoding by ONNX Runtime, far enough to know the drafts of the last round."""
    running = session(onnx(format), 0)
    prompts = random_prompts(LENGTHS, VOCABULARY)
    return [solo(running, prompt, nothing, LENGTH + 4) for prompt in prompts]


def scripts(known: Sequence[Track], k: int) -> list[Track]:
    """The same requests, each under another place of the script of all transitions."""
    pairs = (k + 1) ** 2
    drafters = (
        Scripted(t.tokens, counts(k, 5 * i % pairs), VOCABULARY) for i, t in enumerate(known)
    )
    return [Track(t.prompt, drafter) for t, drafter in zip(known, drafters, strict=True)]


def any_length(seed: int, k: int) -> Iterator[Want]:
    """Rounds of 0 .. k drafts of which any number is right."""
    draw = np.random.default_rng(seed)
    lengths = (int(draw.integers(0, k + 1)) for _ in counter())
    return (Want(int(draw.integers(0, n + 1)), n) for n in lengths)


def run(
    ge: Package, k: int, tracks: Sequence[Track], leader: Package, length: int = LENGTH
) -> Seen:
    """Serve the requests in a batch that they join one by one, everything idle poisoned."""
    pair = Pair(session(leader, k), ge_session(ge, k))
    with poisoned(pair.ge):
        serve(pair, tracks, length, lambda i: 3 * i)
    return pair.seen


def equal(seen: Seen) -> None:
    """Tokens and drafts are the same, logits and state but for rounding."""
    assert seen.ties == []
    assert seen.draft_ties == []
    over = {name: gap for name, gap in seen.gaps.items() if gap > BOUNDS.get(name, STATE)}
    assert over == {}


def same_tokens(known: Sequence[Track], tracks: Sequence[Track], length: int = LENGTH) -> None:
    for i, (truth, track) in enumerate(zip(known, tracks, strict=True)):
        assert differences(truth, track, length) == [], f"prompt {i}"


@pytest.mark.parametrize(
    ("k", "part"), [(1, 2), (3, 1), pytest.param(1, 1, marks=pytest.mark.slow)]
)
def test_portable_models_give_the_tokens_logits_and_state_of_onnx_runtime(
    k: int, part: int
) -> None:
    """Every count of accepted drafts after every other, two slots that start and end ragged."""
    known = truths()[::part]
    tracks = scripts(known, k)
    seen = run(portable(), k, tracks, onnx())
    print(seen)
    equal(seen)
    same_tokens(known, tracks)
    assert seen.tokens >= len(known) * LENGTH
    assert set(seen.accepted) == set(range(k + 1))
    assert transitions(tracks) == {(a, b) for a in range(k + 1) for b in range(k + 1)}


@pytest.mark.parametrize("k", [0, 3])
def test_portable_models_draft_and_decode_by_themselves_as_onnx_runtime_does(k: int) -> None:
    known = truths()[2::5]
    tracks = [Track(truth.prompt, own) for truth in known]
    seen = run(portable(), k, tracks, onnx())
    equal(seen)
    same_tokens(known, tracks)
    assert k == 0 or sum(seen.accepted[a] * a for a in seen.accepted) > LENGTH


def test_portable_rounds_of_every_length_in_any_order_change_nothing() -> None:
    known = truths()[::4]
    tracks = [
        Track(t.prompt, Scripted(t.tokens, any_length(i, 3), VOCABULARY))
        for i, t in enumerate(known)
    ]
    equal(run(portable(), 3, tracks, onnx()))
    same_tokens(known, tracks)
    assert {d for track in tracks for d in track.drafted} == {0, 1, 2, 3}


SAMPLED = [(0.7, 0, 0.95), (0.7, 20, 1.0), (1.0, 0, 1.0), (1.0, 40, 0.9)]


@pytest.mark.parametrize(("temperature", "top_k", "top_p"), SAMPLED)
def test_portable_models_sample_the_text_of_onnx_runtime_under_the_same_seed(
    temperature: float, top_k: int, top_p: float
) -> None:
    asks = [
        SamplingParams(
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            seed=seed,
            max_tokens=None,
            ignore_eos=True,
        ).resolve()
        for seed in (1, 2)
    ]
    prompts = [truths()[i].prompt for i in (4, 13)]
    tracks = [Track(p, own, ask) for p, ask in zip(prompts, asks, strict=True)]
    seen = run(portable(), 3, tracks, onnx(), 40)
    equal(seen)
    assert seen.tokens >= 80
    greedy = [truths()[i].tokens[:40] for i in (4, 13)]
    assert [track.tokens[:40] for track in tracks] != greedy, "nothing was sampled"


@pytest.mark.slow
@pytest.mark.parametrize("k", [1, 3])
def test_portable_models_with_one_slot_give_the_tokens_of_onnx_runtime(k: int) -> None:
    tracks = scripts(truths(), k)
    equal(run(portable(1), k, tracks, onnx(slots=1)))
    same_tokens(truths(), tracks)


def near(seen: Seen, tie: float = NEAR, moved: float = MOVED, few: float = 0.03) -> None:
    """Tokens differ where the two best logits are nearly equal and nowhere else; few do."""
    print(seen)
    assert max(seen.ties, default=0) < tie
    assert len(seen.ties) <= few * seen.tokens
    assert max(seen.draft_ties, default=0) < tie
    assert len(seen.draft_ties) <= few * max(seen.drafts, 1)
    assert seen.gaps["logits"] < moved
    assert seen.gaps.get("draft logits", 0) < moved


@pytest.mark.slow
@pytest.mark.parametrize("custom_ops", [(), ("FusedCausalConv1d",)], ids=["kernels", "all"])
@pytest.mark.parametrize("k", [1, 3])
def test_fused_models_give_the_tokens_of_onnx_runtime_but_for_near_ties(
    k: int, custom_ops: tuple[str, ...]
) -> None:
    tracks = scripts(truths(), k)
    seen = run(fused(*custom_ops), k, tracks, onnx())
    near(seen)
    same_tokens(truths(), tracks)
    assert set(seen.accepted) == set(range(k + 1))
    assert transitions(tracks) == {(a, b) for a in range(k + 1) for b in range(k + 1)}


@pytest.mark.parametrize(
    "made", [portable, pytest.param(fused, marks=pytest.mark.slow)], ids=["portable", "fused"]
)
def test_rows_wait_for_the_drafter_of_ge_models(made: Callable[[], Package]) -> None:
    """Rounds of 0 to 3 drafts as a session that adapts has them, the drafter running when due."""
    truth = truths()[2]
    running = ge_session(made(), 3)
    Forced(running, [chain([3, 0, 0, 0, 0, 1, 0, 2, 0, 0, 3, 0], repeat(0))])
    track = following(running, truth, cycle([3, 1, 0]))
    with poisoned(running):
        begin(running, track)
        while len(track.tokens) < 24:
            advance(running, [track])
    running.release(track.slot)
    assert {*track.drafted} == {0, 1, 2, 3}
    pairs = zip(track.tokens, truth.tokens, strict=False)
    for i, (mine, theirs) in enumerate(pairs):
        if mine != theirs:  # what follows has another past
            assert made is fused, f"token {i}"
            assert truth.logits[i][theirs] - truth.logits[i][mine] < NEAR, f"token {i}"
            break


@pytest.mark.slow
@pytest.mark.parametrize("k", [0, 3])
@pytest.mark.parametrize("drafter", [own, nothing])
def test_fused_models_decode_with_and_without_drafts_in_one_package(
    k: int, drafter: Drafter
) -> None:
    known = truths()[2::5]
    tracks = [Track(truth.prompt, drafter) for truth in known]
    near(run(fused(), k, tracks, onnx()))


@pytest.mark.slow
def test_fused_models_sample_as_onnx_runtime_until_a_draw_falls_between_them() -> None:
    """The laws of two precisions differ; a seed leads both along for a while."""
    ask = SamplingParams(temperature=1, seed=5, max_tokens=None, ignore_eos=True).resolve()
    assert ask != GREEDY
    tracks = [Track(truths()[4].prompt, own, ask), Track(truths()[13].prompt, own, ask)]
    seen = run(fused(), 3, tracks, onnx(), 40)
    print(seen)
    assert len(seen.ties) <= 0.25 * seen.tokens


@pytest.mark.slow
def test_portable_float16_models_for_310p_give_the_tokens_of_onnx_runtime() -> None:
    half = air_package(
        TRAINED, format="fp16", lookaheads=(3,), max_model_len=LIMIT, soc_version="Ascend310P3"
    )
    tracks = scripts(truths(), 3)
    near(run(half, 3, tracks, onnx()), 0.02, 0.05)


@pytest.mark.slow
def test_int8_models_with_float32_activations_give_the_logits_of_onnx_runtime() -> None:
    """A sum that is rounded the other way moves one activation by a whole step of its scale."""
    whole = air_package(
        TRAINED, format="int8", dtype="float32", lookaheads=(3,), max_model_len=LIMIT
    )
    tracks = scripts(truths("int8"), 3)
    near(run(whole, 3, tracks, onnx("int8")), 0.1, 0.3)


@pytest.mark.slow
@pytest.mark.parametrize(("format", "tie", "moved"), [("int8", 0.3, 0.6), ("int4", 1.0, 3.0)])
def test_quantised_fused_models_stay_close_to_those_of_onnx_runtime(
    format: str, tie: float, moved: float
) -> None:
    """Of int4 the two have other groups, so these are two models of one checkpoint.

    Each is as far from the model in fp32 as they are from each other.
    """
    tracks = scripts(truths(format), 3)
    near(run(fused(format=format), 3, tracks, onnx(format)), tie, moved, few=0.1)
