"""Runs the graphs against a known future: compiled rounds with scripted drafts, eager modules."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from qwen_mtp.export.blueprint import Blueprint
from qwen_mtp.export.checkpoint import Checkpoint
from qwen_mtp.export.weights import load_weights
from qwen_mtp.graphs.model import Graph, Model
from qwen_mtp.graphs.spec import Geometry, state_specs
from qwen_mtp.runtime.sampling import SamplingParams
from qwen_mtp.runtime.session import Session

Tensor = torch.Tensor
Array = np.ndarray
Script = Sequence[tuple[int, int]]
GREEDY = SamplingParams(temperature=0, max_tokens=None).resolve()


@dataclass(frozen=True, slots=True)
class Round:
    """One round of one slot.

    Attributes:
        start: Position of row 0: that of the last token committed before.
        accepted: Drafts accepted.
        logits: ``[accepted + 1, V]`` of the rows whose prefix was committed.
        draft_ids: ``[K]``.
        draft_logits: ``[K, V]``.
        keys: ``[Nkv, start, D]`` of the committed rows in the pool of the head.
        values: ``[Nkv, start, D]``.
    """

    start: int
    accepted: int
    logits: Array
    draft_ids: list[int]
    draft_logits: Array
    keys: Array
    values: Array


def record(
    session: Session,
    prompts: Sequence[Sequence[int]],
    futures: Sequence[Sequence[int]],
    script: Sequence[Script],
) -> tuple[list[Array], list[list[Round]]]:
    """Prefill every prompt, then run rounds whose accepted counts are known beforehand.

    Args:
        session: Keeps logits, has a slot for every prompt.
        prompts: Token ids.
        futures: The greedy continuation of each prompt.
        script: By prompt, for each round the drafts given and how many of them are right.

    Returns:
        By prompt, the logits ``[V]`` after the prompt, and the rounds.
    """
    first, emitted = [], []
    for prompt, future in zip(prompts, futures, strict=True):
        _, token = session.prefill(prompt, GREEDY)
        assert token == future[0]
        first.append(session.engine.buffer("prefill", "logits")[0, 0].copy())
        emitted.append(1)
    rounds: list[list[Round]] = [[] for _ in prompts]
    for plan in zip(*script, strict=True):
        drafts = {}
        for slot, (given, right) in enumerate(plan):
            drafts[slot] = list(futures[slot][emitted[slot] : emitted[slot] + given])
            assert len(drafts[slot]) == given, "the future is too short for the script"
            if right < given:
                drafts[slot][right] ^= 1
        results = session.step(drafts)
        for slot, (_, right) in enumerate(plan):
            now = emitted[slot]
            assert results[slot].tokens == tuple(futures[slot][now : now + right + 1])
            emitted[slot] += right + 1
            start = len(prompts[slot]) + now - 1
            bucket = 2 if max(given for given, _ in plan) < 2 else session.lookahead + 1
            rounds[slot].append(_round(session, slot, start, right, f"target_verify_r{bucket}"))
    for slot in range(len(prompts)):
        session.release(slot)
    return first, rounds


def _round(session: Session, slot: int, start: int, accepted: int, verify: str) -> Round:
    engine, k = session.engine, session.lookahead
    draft, size = f"mtp_draft_k{k}", session.package.manifest.geometry.block_size
    places = [session._table[slot, p // size] * size + p % size for p in range(start)]
    return Round(
        start,
        accepted,
        engine.buffer(verify, "logits")[slot, : accepted + 1].copy(),
        engine.buffer(draft, "draft_ids")[slot].tolist(),
        np.stack([engine.buffer(draft, f"draft_logits.{j}")[slot] for j in range(k)]),
        engine.state("mtp.key")[:, places],
        engine.state("mtp.value")[:, places],
    )


def gap(found: Any, expected: Any) -> float:
    """Largest absolute difference; infinite when anything is not a number."""
    assert tuple(found.shape) == tuple(expected.shape)
    worst = float(np.abs(np.asarray(found, np.float64) - np.asarray(expected, np.float64)).max())
    return worst if np.isfinite(worst) else float("inf")


Weights = dict[str, np.ndarray]


class EagerGraphs:
    """The torch modules of a package over its state, one slot, not compiled."""

    def __init__(
        self,
        checkpoint: Path,
        geometry: Geometry,
        change: Callable[[Weights], object] | None = None,
        draft_ids: Sequence[int] = (),
    ) -> None:
        """Load the weights; ``change`` may alter the stored tensors by name."""
        source = Checkpoint.open(checkpoint)
        plan = Blueprint(source.config, geometry, draft_ids=draft_ids)
        weights = {k: v.copy() for k, v in load_weights(source, plan.groups, plan.stored).items()}
        if change is not None:
            change(weights)
        self.model = Model(source.config, geometry)
        state = {name: torch.from_numpy(value) for name, value in weights.items()}
        self.model.load_state_dict(state, strict=True)
        self.specs = {spec.name: spec for spec in plan.specs}
        self.geometry = geometry
        self.state = {s.name: torch.zeros(s.shape) for s in state_specs(source.config, geometry)}

    def run(self, graph: str, **inputs: Any) -> dict[str, Tensor]:
        """Run one graph greedily on the state; inputs that are not given are zero."""
        spec = self.specs[graph]
        given = dict(inputs)
        given["block_table"] = np.arange(1, 1 + self.geometry.table_width)[None]
        tensors = []
        for t in spec.inputs:
            kind = torch.float32 if t.dtype == "float32" else torch.int32
            value = self.state[t.name] if t.state else given.get(t.name, np.zeros(t.shape))
            tensors.append(torch.as_tensor(np.asarray(value)).to(kind).reshape(t.shape))
        with torch.inference_mode():
            found = Graph(self.model, spec)(*tensors)
        outputs = {t.name: value for t, value in zip(spec.outputs, found, strict=True)}
        self.state |= {t.state: outputs[t.name] for t in spec.outputs if t.state}
        return outputs

    def prefill(self, ids: Sequence[int]) -> dict[str, Tensor]:
        """Run a prompt in chunks; the outputs of the last chunk."""
        size, outputs = self.geometry.prefill_chunk, {}
        for start in range(0, len(ids), size):
            chunk, following = ids[start : start + size], ids[start + 1 : start + 1 + size]
            outputs = self.run(
                "prefill",
                token_ids=_padded(chunk, size),
                next_token_ids=_padded(following, size),
                num_valid=len(chunk),
                num_draft_rows=len(following),
                context_len=start,
            )
        return outputs

    def draft(self, token: int, hidden: Tensor, start: int) -> dict[str, Tensor]:
        """Draft after one committed row at position ``start``: its next token, its hidden row."""
        rows, (spec,) = (
            self.geometry.max_rows,
            [s for s in self.specs.values() if s.lookahead and s.kind == "mtp_draft"],
        )
        wide = torch.zeros(rows, hidden.shape[-1])
        wide[0] = hidden
        return self.run(
            spec.name, tokens=_padded([token], rows), num_rows=1, context_len=start, hidden=wide
        )


def _padded(ids: Sequence[int], size: int) -> list[int]:
    return [*ids, *[-1] * (size - len(ids))]
