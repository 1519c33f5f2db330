"""Many short sampled runs after one prompt, and the law that their tokens must follow.

The prompt is prefilled once into every slot; a run starts from the state after it, under its own
seed, as soon as a slot is free. The law is the target's, from plain passes over forced tokens.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from scipy import stats

from qwen_mtp.custom_ops.rejection import Sampling, ban_stops, candidates
from qwen_mtp.runtime.engine import Engine
from qwen_mtp.runtime.package import Package
from qwen_mtp.runtime.sampling import ResolvedSampling, SamplingParams
from qwen_mtp.runtime.session import Session
from tests.packages import TRAINED, package

Prefix: TypeAlias = tuple[int, ...]
Floats: TypeAlias = npt.NDArray[np.float64]
K, SLOTS, FLOOR = 3, 16, 5.0
DESCEND, IMPOSSIBLE, REST = -1, -2, -3
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
        s.sampling, s.banned = sampling, self.session._banned_ids(sampling)
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


class Target:
    """The target's law after the prompt, a row at a time."""

    def __init__(self, format: str = "fp32") -> None:
        self.format = format
        self._rows: dict[Prefix, npt.NDArray[np.float32]] = {}

    def load(self, prefixes: Sequence[Prefix]) -> None:
        new = [p for p in dict.fromkeys(prefixes) if p not in self._rows]
        if new:
            bench = Bench(0, self.format)
            self._rows |= dict(zip(new, bench.rows_after(new), strict=True))
            bench.close()

    def law(self, ask: Ask, prefix: Prefix) -> Floats:
        return ask.law(self._rows[prefix], 1 + len(prefix))


class Bins:
    """The tree of continuations cut where ``count`` runs would leave fewer than FLOOR in a bin.

    What is rarer is put together with its likeliest siblings, so the tail of every row that is
    reached often has bins of its own.
    """

    def __init__(self, target: Target, ask: Ask, length: int, count: int) -> None:
        self.chances: list[float] = []
        self._tables: dict[Prefix, npt.NDArray[np.int64]] = {}
        self._rest, level = 0.0, {(): 1.0}
        for depth in range(length):
            target.load([*level])
            grown: dict[Prefix, float] = {}
            for prefix, mass in level.items():
                law = target.law(ask, prefix) * mass
                table = self._tables[prefix] = self._cut(law, count)
                for token in (
                    np.flatnonzero(law * count >= 2 * FLOOR) if depth < length - 1 else ()
                ):
                    table[token] = DESCEND
                    grown[(*prefix, int(token))] = law[token]
            level = grown
        self._settle(count)

    def _cut(self, law: Floats, count: int) -> npt.NDArray[np.int64]:
        """A bin for each token of a row; tokens that will be split further get theirs later."""
        table = np.full(law.size, IMPOSSIBLE)
        order, first, mass = np.argsort(-law, kind="stable")[: np.count_nonzero(law)], 0, 0.0
        for last, chance in enumerate(law[order].tolist(), 1):
            mass += chance
            if mass * count >= FLOOR:
                table[order[first:last]] = len(self.chances)
                self.chances.append(mass)
                first, mass = last, 0.0
        table[order[first:]] = REST
        self._rest += mass
        return table

    def _settle(self, count: int) -> None:
        """Empty the bins that were split, and give the rest of all rows a bin."""
        used = np.unique(np.concatenate([*self._tables.values()]))
        self._names = {int(old): new for new, old in enumerate(used[used >= 0])}
        self.chances = [self.chances[old] for old in self._names]
        self._names[REST] = len(self.chances)
        if self._rest * count >= FLOOR:
            self.chances.append(self._rest)
        else:
            self._names[REST] = int(np.argmax(self.chances))
            self.chances[self._names[REST]] += self._rest

    def counts(self, runs: Sequence[Run]) -> npt.NDArray[np.int64] | None:
        """Runs in each bin; None if one of them cannot have happened."""
        found = np.zeros(len(self.chances), np.int64)
        for run in runs:
            depth = 0
            while (place := self._tables[(*run.tokens[:depth],)][run.tokens[depth]]) == DESCEND:
                depth += 1
            if place == IMPOSSIBLE:
                return None
            found[self._names[int(place)]] += 1
        return found


@dataclass(frozen=True, slots=True)
class Gap:
    """A chi-square statistic and its degrees of freedom; those of independent runs add up."""

    square: float = 0.0
    freedom: int = 0

    def __add__(self, other: "Gap") -> "Gap":
        return Gap(self.square + other.square, self.freedom + other.freedom)

    @property
    def p(self) -> float:
        if self.freedom == 0:
            return float(self.square == 0)
        return float(stats.chi2.sf(self.square, self.freedom))


def agreement(target: Target, runs: Sequence[Run], length: int) -> Gap:
    """The first ``length`` tokens of runs with one ask against the target's law."""
    bins = Bins(target, runs[0].ask, length, len(runs))
    found, chances = bins.counts(runs), np.array(bins.chances)
    if found is None:
        return Gap(np.inf)
    expected = chances / chances.sum() * found.sum()
    return Gap(float(((found - expected) ** 2 / expected).sum()), len(chances) - 1)


def likeness(target: Target, a: Sequence[Run], b: Sequence[Run], length: int) -> Gap:
    """Two sets of runs with one ask against each other, whatever their law is."""
    bins = Bins(target, a[0].ask, length, min(len(a), len(b)))
    found = [bins.counts(a), bins.counts(b)]
    if any(counts is None for counts in found):
        return Gap(np.inf)
    table = np.array(found)
    table = table[:, table.sum(0) > 0]
    expected = np.outer(table.sum(1), table.sum(0)) / table.sum()
    return Gap(float(((table - expected) ** 2 / expected).sum()), table.shape[1] - 1)


def by_ask(runs: Sequence[Run]) -> dict[Ask, list[Run]]:
    return {ask: [r for r in runs if r.ask == ask] for ask in dict.fromkeys(r.ask for r in runs)}


def histogram(runs: Sequence[Run]) -> list[int]:
    """Rounds that accepted 0, 1, .. K drafts."""
    rounds = Counter(a for run in runs for a in run.accepted)
    return [rounds[a] for a in range(K + 1)]
