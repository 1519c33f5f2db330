"""The compiled sampler against its NumPy meaning, on the logits of the pass it sat in."""

from dataclasses import dataclass

import numpy as np

from qwen_mtp.checks_bench import Bench, Lane
from qwen_mtp.checks_report import Check
from qwen_mtp.custom_ops import rejection
from qwen_mtp.progress import Progress
from qwen_mtp.runtime.runner import Array

# Exponentials of two libraries may differ in the last bit, so a uniform that close to a boundary
# between two tokens may fall on either side.
NUDGE = 1e-6
INPUTS = ("temperature", "top_k", "top_p", "banned_rows", "stop_ids")


@dataclass(frozen=True, slots=True)
class Ask:
    """Sampling parameters of one slot; ``banned`` rows may not emit the likeliest token."""

    temperature: float
    top_k: int = 0
    top_p: float = 1.0
    banned: int = 0


ASKS = (
    Ask(0.0),
    Ask(0.0, banned=2),
    Ask(0.7, 20, 0.8),
    Ask(1.0),
    Ask(1.0, top_p=0.9),
    Ask(1.5, 50, banned=1),
    Ask(0.6, 1100, 0.95),
    Ask(0.3),
)


class SamplerProbe:
    """One sequence a slot in the largest verify graph; only the sampler's inputs change."""

    def __init__(self, bench: Bench) -> None:
        """Prefill every slot and begin with drafts that mean nothing."""
        self.bench = bench
        self.rows = bench.geometry.row_buckets[-1]
        self.graph = bench.graph(self.rows)
        length = max(1, min(4, bench.geometry.max_model_len - self.rows))
        self._starts = [length] * bench.slots
        for slot in range(bench.slots):
            bench.prefill(slot, bench.some_ids(50 + slot, length))
        self._base = bench.snapshot()
        shape = (bench.slots, self.rows)
        self._ids = np.array(bench.some_ids(60, shape[0] * shape[1])).reshape(shape)
        self._random = np.random.default_rng(61)

    def compare(self, asks: tuple[Ask, ...]) -> tuple[str | None, int]:
        """One pass with an ask a slot; what differs, and the drafts that were accepted."""
        bench, graph = self.bench, self.graph
        bench.restore(self._base)
        lanes = [Lane(tuple(r.tolist()), s) for r, s in zip(self._ids, self._starts, strict=True)]
        bench.feed(graph, lanes)
        self._fill(asks)
        bench.run(graph, self._starts[0] + self.rows)
        logits = self._buffer("logits")
        tokens = self._buffer("tokens")[:, : self.rows]
        problem = self._difference(logits, tokens)
        accepted = int(self._buffer("num_accepted_drafts").sum())
        # The likeliest tokens are the next drafts, so that acceptance is tried as well.
        self._ids[:, 1:] = logits.argmax(-1)[:, :-1]
        return problem, accepted

    def _fill(self, asks: tuple[Ask, ...]) -> None:
        likeliest = self._buffer("logits").argmax(-1)
        for slot, ask in enumerate(asks):
            row = (ask.temperature, ask.top_k, ask.top_p, ask.banned)
            for name, value in zip(INPUTS, row, strict=False):
                self._buffer(name)[slot] = value
            stops = [int(likeliest[slot, 0]), *range(3)]
            self._buffer("stop_ids")[slot, : len(stops)] = stops
        for name in ("accept_uniforms", "pick_uniforms"):
            buffer = self._buffer(name)
            buffer[:] = self._random.random(buffer.shape, dtype=np.float32)

    def _difference(self, logits: Array, tokens: Array) -> str | None:
        wanted = self._meaning(logits, 0.0)
        differ = (tokens != wanted).any(axis=1)
        for slot in np.flatnonzero(differ):
            near = (self._meaning(logits, nudge)[slot] for nudge in (-NUDGE, NUDGE))
            if not any((tokens[slot] == other).all() for other in near):
                ask = ", ".join(f"{n} {self._buffer(n)[slot]:g}" for n in INPUTS[:4])
                found, right = tokens[slot].tolist(), wanted[slot].tolist()
                return f"with {ask} slot {slot} emits {found}, its meaning {right}"
        return None

    def _meaning(self, logits: Array, nudge: float) -> Array:
        accept, pick = (
            np.clip(self._buffer(name).astype(np.float64) + nudge, 0, 1 - 2**-53)
            for name in ("accept_uniforms", "pick_uniforms")
        )
        ids, valid = self._buffer("token_ids"), self._buffer("num_valid")
        rest = (self._buffer(name) for name in INPUTS)
        return rejection.meaning(logits, ids[:, 1:], valid - 1, accept, pick, *rest)[0]

    def _buffer(self, name: str) -> Array:
        return self.bench.engine.buffer(self.graph, name)


def check_sampler(bench: Bench, progress: Progress) -> Check:
    """Greedy, sorted and plain temperature slots, with and without bans, in one batch."""
    repeats = 3
    progress.phase("verify sampler", repeats * len(ASKS), "passes")
    probe, accepted = SamplerProbe(bench), 0
    for number in range(repeats * len(ASKS)):
        asks = tuple(ASKS[(number + slot) % len(ASKS)] for slot in range(bench.slots))
        problem, more = probe.compare(asks)
        if problem is not None:
            return Check("sampler", False, problem)
        accepted += more
        progress.advance(1)
    slots = repeats * len(ASKS) * bench.slots
    detail = f"{slots} draws equal their meaning token for token ({accepted} drafts accepted)"
    return Check("sampler", True, detail)
