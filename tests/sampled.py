"""Many short sampled runs after one prompt.

The prompt is prefilled once into every slot; a run starts from the state after it, under its own
seed, as soon as a slot is free.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from qwen_mtp.custom_ops.rejection import Sampling, ban_stops, candidates
from qwen_mtp.runtime.engine import Engine
from qwen_mtp.runtime.limits import banned_ids
from qwen_mtp.runtime.package import Package
from qwen_mtp.runtime.sampling import ResolvedSampling, SamplingParams
from qwen_mtp.runtime.session import Session
from tests.packages import TRAINED, package

Prefix: TypeAlias = tuple[int, ...]
Floats: TypeAlias = npt.NDArray[np.float64]
K, SLOTS = 3, 16
# After this and the greedy token that follows, the head's drafts are sometimes refused at a low
# temperature and all kept now and then at a high one.
TEXT = " denominator = 1\n                    decimal ="


@dataclass(frozen=True, slots=True)
class Ask:
    """What a run asks of the sampler; ``banned`` may not be emitted before ``min_tokens``."""

    temperature: float
    top_k: int = 0
    top_p: float = 1.0
    min_tokens: int = 0
    banned: int | None = None

    def resolve(self, seed: int = 0) -> ResolvedSampling:
        return SamplingParams(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            seed=seed,
            max_tokens=None,
            ignore_eos=True,
            stop_token_ids=[] if self.banned is None else [self.banned],
            min_tokens=self.min_tokens,
        ).resolve()

    def law(self, row: npt.NDArray[np.float32], emitted: int) -> Floats:
        """Probabilities ``[V]`` of the token that logits ``[V]`` give after ``emitted`` ones."""
        stops = np.array([-1 if self.banned is None else self.banned])
        rows = ban_stops(row[None].astype(np.float64), int(emitted < self.min_tokens), stops)
        ids, weights = candidates(rows[0], Sampling(self.temperature, self.top_k, self.top_p))
        law = np.zeros(row.size)
        law[ids] = weights / weights.sum()
        return law


@dataclass(slots=True)
class Run:
    """One seed: its tokens after the prompt's first one, and each round's accepted count."""

    ask: Ask
    tokens: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)


Drafter: TypeAlias = Callable[[Run], Sequence[int]]


@cache
def trained(format: str = "fp32", slots: int = SLOTS) -> Package:
    """The bundled checkpoint with short contexts."""
    return package(TRAINED, max_num_seqs=slots, max_model_len=64, lookaheads=(K,), format=format)


@cache
def engine(format: str = "fp32", slots: int = SLOTS) -> Engine:
    """One engine for all sessions of a format: they take turns."""
    return Engine(trained(format, slots), threads=1, keep_logits=True)


@cache
def prompt() -> list[int]:
    from tokenizers import Tokenizer

    ids: list[int] = Tokenizer.from_file(str(TRAINED / "tokenizer.json")).encode(TEXT).ids
    return ids


class Bench:
    """A session whose slots all hold the prompt."""

    def __init__(self, k: int, format: str = "fp32") -> None:
        self.engine = engine(format)
        self.session = Session(trained(format), num_speculative_tokens=k, engine=self.engine)
        self._saved: dict[str, Any] = {}
        greedy = Ask(0.0).resolve()
        for _ in range(SLOTS):
            _, self.first = self.session.prefill(prompt(), greedy)
        self._saved = {name: array.copy() for name, array in self._arrays()}

    def _arrays(self) -> Iterator[tuple[str, Any]]:
        for spec in trained().manifest.states:
            if spec.per_slot and spec.kind != "stash":
                yield spec.name, self.engine.state(spec.name)
        if self.session.lookahead:
            for name in ("tokens", "hidden"):
                yield name, self.engine.buffer(f"mtp_draft_k{K}", name)

    def start(self, slot: int, sampling: ResolvedSampling) -> None:
        """Put a slot back behind the prompt. What later rows left in the pools stays there."""
        for name, array in self._arrays():
            array[slot] = self._saved[name][slot]
        s = self.session._slots[slot]
        s.sampling, s.banned = sampling, banned_ids(self.session.package.manifest, sampling)
        s.computed, s.last, s.emitted, s.pending = len(prompt()), self.first, 1, 0
        s.rows, s.rows_start = 1, s.computed - 1

    def runs(
        self, asks: Sequence[Ask], count: int, seed: int, length: int, draft: Drafter | None = None
    ) -> list[Run]:
        """``count`` runs of each ask, neighbours in the batch, until ``length`` tokens each."""
        jobs = iter([(Run(ask), n) for n, ask in enumerate([*asks] * count)])
        live: dict[int, Run] = {}
        done: list[Run] = []
        while len(done) < len(asks) * count:
            for slot in set(range(SLOTS)) - set(live):
                run, number = next(jobs, (None, 0))
                if run is not None:
                    live[slot] = run
                self.start(slot, (run.ask if run else Ask(0.0)).resolve(seed * 10**6 + number))
            drafts = {slot: draft(run) for slot, run in live.items()} if draft else None
            for slot, result in self.session.step(drafts).items():
                if slot in live:
                    live[slot].tokens += result.tokens
                    live[slot].accepted.append(result.accepted)
                    if len(live[slot].tokens) >= length:
                        done.append(live.pop(slot))
        return done

    def rows_after(self, prefixes: Sequence[Prefix]) -> list[npt.NDArray[np.float32]]:
        """Logits ``[V]`` after each forced continuation, all of one length, by plain passes."""
        found = []
        for at in range(0, len(prefixes), SLOTS):
            group = prefixes[at : at + SLOTS]
            for slot in range(SLOTS):
                self.start(slot, Ask(0.0).resolve())
            for step in range(len(group[0]) + 1):
                self.session.step(dict.fromkeys(range(SLOTS), ()))
                for slot, prefix in enumerate(group):
                    if step < len(prefix):
                        self.session._slots[slot].last = prefix[step]
            rows = self.engine.buffer("target_verify_r2", "logits")
            found += [rows[slot, 0].copy() for slot in range(len(group))]
        return found

    def close(self) -> None:
        for slot in range(SLOTS):
            self.session.release(slot)


def by_ask(runs: Sequence[Run]) -> dict[Ask, list[Run]]:
    return {ask: [r for r in runs if r.ask == ask] for ask in dict.fromkeys(r.ask for r in runs)}


def histogram(runs: Sequence[Run]) -> list[int]:
    """Rounds that accepted 0, 1, .. K drafts."""
    rounds = Counter(a for run in runs for a in run.accepted)
    return [rounds[a] for a in range(K + 1)]
