"""Logits of the compiled and of the eager target against transformers' Qwen3.5."""

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from qwen_mtp.custom_ops import delta_parts
from qwen_mtp.custom_ops.attention_project import ATTENTION_PROJECT
from qwen_mtp.custom_ops.torch_library import ops
from qwen_mtp.graphs.spec import Geometry
from qwen_mtp.runtime.session import Session
from tests.checkpoints import tiny_config, write_checkpoint
from tests.eager import Reference
from tests.packages import TRAINED, package, scratch
from tests.rounds import EagerGraphs, Weights, gap, record

TOLERANCE = 1e-4
CHUNK = 16
LENGTHS = (1, 2, 3, 4, CHUNK, CHUNK + 1, 5 * CHUNK // 2)
# (drafts given, drafts right) of each round; the last pair of rounds meets the two-row graph.
SCRIPT = ((3, 1), (3, 3), (0, 0), (3, 0), (3, 2), (3, 3), (3, 1), (1, 1), (1, 0), (3, 3))
OTHER = ((3, 3), (2, 1), (3, 0), (3, 3), (1, 0), (0, 0), (3, 2), (1, 0), (1, 1), (3, 1))
# Linear value heads per key head, tied embeddings, prefix of the keys.
VARIANTS = {
    "ratio1-tied": (1, True, "model.language_model."),
    "ratio2-untied-text": (2, False, "model."),
    "ratio3-tied-text": (3, True, "model."),
    "ratio4-untied": (4, False, "model.language_model."),
}


@lru_cache
def _checkpoint(variant: str) -> Path:
    ratio, tied, prefix = VARIANTS[variant]
    config = tiny_config(linear_num_value_heads=2 * ratio, tie_word_embeddings=tied)
    return write_checkpoint(scratch() / variant, config, seed=ratio, prefix=prefix)  # type: ignore[arg-type]


@lru_cache
def _session(checkpoint: Path) -> Session:
    chosen = package(checkpoint, max_num_seqs=2, prefill_chunk=CHUNK)
    return Session(chosen, threads=1, keep_logits=True)


@lru_cache
def _reference(checkpoint: Path) -> Reference:
    return Reference(checkpoint)


def _prompt(length: int, vocabulary: int = 256) -> list[int]:
    return np.random.default_rng(length).integers(0, vocabulary, length).tolist()  # type: ignore[no-any-return]


def _rounds_gap(session: Session, reference: Reference, lengths: tuple[int, int]) -> float:
    """Largest gap of all rows with a committed prefix over two slots of scripted rounds."""
    script = (SCRIPT, OTHER)
    prompts = [_prompt(length, reference.config.vocab_size) for length in lengths]
    counts = [1 + sum(right + 1 for _, right in plan) + 3 for plan in script]
    futures = [reference.continuation(p, n) for p, n in zip(prompts, counts, strict=True)]
    first, rounds = record(session, prompts, futures, script)
    worst = 0.0
    for prompt, future, after, run in zip(prompts, futures, first, rounds, strict=True):
        expected = reference.logits([*prompt, *future])
        worst = max(worst, gap(after, expected[len(prompt) - 1]))
        for r in run:
            worst = max(worst, gap(r.logits, expected[r.start : r.start + r.accepted + 1]))
    return worst


@pytest.mark.parametrize("variant", VARIANTS)
def test_prefill_ends_in_the_logits_of_transformers(variant: str) -> None:
    checkpoint = _checkpoint(variant)
    session, reference = _session(checkpoint), _reference(checkpoint)
    for length in LENGTHS:
        prompt = _prompt(length)
        expected = reference.logits(prompt)[-1]
        first, _ = record(session, [prompt], [[int(expected.argmax())]], [()])
        assert gap(first[0], expected) <= TOLERANCE, length


@pytest.mark.parametrize("variant", VARIANTS)
def test_verified_rows_have_the_logits_of_transformers_after_any_accepted_count(
    variant: str,
) -> None:
    checkpoint = _checkpoint(variant)
    session, reference = _session(checkpoint), _reference(checkpoint)
    assert _rounds_gap(session, reference, (3, CHUNK + 7)) <= TOLERANCE


@pytest.mark.skipif(not (TRAINED / "model.safetensors").is_file(), reason="not trained here")
def test_the_trained_model_has_the_logits_of_transformers() -> None:
    assert _rounds_gap(_session(TRAINED), _reference(TRAINED), (4, 2 * CHUNK + 9)) <= TOLERANCE


PUBLISHED = {
    "hidden_size": 1024,
    "num_hidden_layers": 24,
    "intermediate_size": 3584,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "vocab_size": 248320,
    "tie_word_embeddings": True,
}


@pytest.mark.slow
def test_the_shape_of_the_smallest_published_model_has_the_logits_of_transformers(
    tmp_path: Path,
) -> None:
    checkpoint = write_checkpoint(tmp_path / "checkpoint", tiny_config(**PUBLISHED))
    prompt, script = _prompt(CHUNK + 9, PUBLISHED["vocab_size"]), ((3, 3), (3, 1), (3, 0))
    reference = Reference(checkpoint, threads=2)
    future = reference.continuation(prompt, 10)
    expected = reference.logits([*prompt, *future]).clone()
    del reference  # one copy of the model in memory at a time
    session = Session(package(checkpoint, prefill_chunk=CHUNK), threads=2, keep_logits=True)
    first, (rounds,) = record(session, [prompt], [future], [script])
    assert gap(first[0], expected[len(prompt) - 1]) <= TOLERANCE
    for r in rounds:
        assert gap(r.logits, expected[r.start : r.start + r.accepted + 1]) <= TOLERANCE


GEOMETRY = Geometry(
    max_num_seqs=1,
    max_model_len=64,
    block_size=16,
    prefill_chunk=CHUNK,
    lookaheads=(3,),
    format="fp32",
)
VARIANT = "ratio2-untied-text"


def _eager_gap(change: Callable[[Weights], object] | None = None) -> float:
    """Gap of the eager modules after a prompt of two chunks."""
    checkpoint, prompt = _checkpoint(VARIANT), _prompt(CHUNK + 8)
    found = EagerGraphs(checkpoint, GEOMETRY, change).prefill(prompt)["logits"][0, 0]
    return gap(found, _reference(checkpoint).logits(prompt)[-1])


def test_the_eager_modules_have_the_logits_of_transformers() -> None:
    assert _eager_gap() <= TOLERANCE


def _replace(monkeypatch: pytest.MonkeyPatch, module: str, **wrong: Callable[..., Any]) -> None:
    """Give one module of the graphs other operators."""
    names = ("rms_norm", "rotary_table", "rotary_embedding", "causal_conv", "conv_window")
    names += ("delta_gates", "gated_delta_rule", "kv_write", "paged_attention", "pad_rows")
    changed = SimpleNamespace(**{name: getattr(ops, name) for name in names} | wrong)
    if module == "deltanet":  # its operators are the parts of a composite
        monkeypatch.setattr(delta_parts, "_ops", lambda: changed)
    else:
        monkeypatch.setattr(f"qwen_mtp.graphs.{module}.ops", changed)


def _late_decay(q: Any, k: Any, v: Any, g: Any, beta: Any, state: Any, count: Any) -> Any:
    """Read before the decay."""
    ratio = v.shape[2] // q.shape[2]
    q, k = (x.repeat_interleave(ratio, dim=2) * 1.0 for x in (q, k))
    out = []
    for t in range(int(count[0])):
        delta = beta[:, t, :, None] * (v[:, t] - torch.einsum("bhkv,bhk->bhv", state, k[:, t]))
        state = state * g[:, t].exp()[..., None, None] + k[:, t, :, :, None] * delta[:, :, None]
        out.append(torch.einsum("bhkv,bhk->bhv", state, q[:, t]) * q.shape[-1] ** -0.5)
    missing = [torch.zeros_like(out[0])] * (v.shape[1] - len(out))
    return torch.stack(out + missing, dim=1), state


def _unscaled(q: Any, *rest: Any) -> Any:
    return ops.gated_delta_rule(q * q.shape[-1] ** 0.5, *rest)


def _tiled_heads(q: Any, k: Any, v: Any, *rest: Any) -> Any:
    ratio = v.shape[2] // q.shape[2]
    return ops.gated_delta_rule(*(x.repeat(1, 1, ratio, 1) for x in (q, k)), v, *rest)


def _late_conv(u: Any, weight: Any, window: Any) -> Any:
    line = torch.cat([window, u], dim=1)
    return ops.causal_conv(line[:, 2:-1], weight, torch.nn.functional.pad(window, (0, 0, 1, -1)))


def _late_window(window: Any, rows: Any, count: Any) -> Any:
    return ops.conv_window(window, rows, count - 1)


def _rotated_tail(x: Any, cos: Any, sin: Any) -> Any:
    return ops.rotary_embedding(x.flip(-1), cos, sin).flip(-1)


def _rotated_pairs(x: Any, cos: Any, sin: Any) -> Any:
    """Neighbours instead of halves."""
    width = 2 * cos.shape[-1]
    order = torch.cat([torch.arange(0, width, 2), torch.arange(1, width, 2)])
    order = torch.cat([order, torch.arange(width, x.shape[-1])])
    return ops.rotary_embedding(x[..., order], cos, sin)[..., order.argsort()]


OPERATOR_MISTAKES: dict[str, tuple[str, dict[str, Callable[..., Any]]]] = {
    "decay after the read": ("deltanet", {"gated_delta_rule": _late_decay}),
    "query not scaled": ("deltanet", {"gated_delta_rule": _unscaled}),
    "key heads tiled instead of repeated": ("deltanet", {"gated_delta_rule": _tiled_heads}),
    "convolution one row late": ("deltanet", {"causal_conv": _late_conv}),
    "window one row late": ("deltanet", {"conv_window": _late_window}),
}
ROTATION_MISTAKES = {"last dimensions": _rotated_tail, "neighbours": _rotated_pairs}


@pytest.mark.parametrize("mistake", OPERATOR_MISTAKES)
def test_a_wrong_operator_breaks_the_comparison(
    mistake: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, wrong = OPERATOR_MISTAKES[mistake]
    _replace(monkeypatch, module, **wrong)
    assert _eager_gap() > 100 * TOLERANCE


@pytest.mark.parametrize("mistake", ROTATION_MISTAKES)
def test_a_wrong_rotation_breaks_the_comparison(
    mistake: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts, turn = ATTENTION_PROJECT.composed, ROTATION_MISTAKES[mistake]
    assert parts is not None

    def project(projected: Any, q: Any, k: Any, cos: Any, sin: Any, *sizes: Any) -> Any:
        still = torch.ones_like(cos), torch.zeros_like(sin)
        query, key, *rest = parts(projected, q, k, *still, *sizes)
        return turn(query, cos, sin), turn(key, cos, sin), *rest

    wrong = replace(ATTENTION_PROJECT, composed=project)
    monkeypatch.setattr("qwen_mtp.graphs.attention.ATTENTION_PROJECT", wrong)
    assert _eager_gap() > 100 * TOLERANCE


def _halves(weights: Weights) -> None:
    """Stacked rows as if all queries came before all gates."""
    heads, dim = 4, 32
    for name, value in weights.items():
        if name.endswith("mixer.qkv.weight"):
            gated = value[: 2 * heads * dim]
            parts = gated.reshape(2, heads, dim, -1).swapaxes(0, 1)
            value[: 2 * heads * dim] = parts.reshape(gated.shape)


def _bare_norms(weights: Weights) -> None:
    for name, value in weights.items():
        if name.endswith("norm.weight") and not name.endswith("mixer.norm.weight"):
            value -= 1


def _raised_gated_norm(weights: Weights) -> None:
    for name, value in weights.items():
        if name.endswith("mixer.norm.weight"):
            value += 1


def _swapped_gates(weights: Weights) -> None:
    for name, value in weights.items():
        if name.endswith("mixer.ba.weight"):
            value[:] = np.roll(value, len(value) // 2, axis=0)


MISTAKES = {
    "queries and gates in halves": _halves,
    "norm without the one": _bare_norms,
    "one added to the gated norm": _raised_gated_norm,
    "beta and decay exchanged": _swapped_gates,
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_wrong_reading_of_the_weights_breaks_the_comparison(mistake: str) -> None:
    assert _eager_gap(MISTAKES[mistake]) > 100 * TOLERANCE
