"""The law that sampled runs must follow: the target's, from plain passes over forced tokens."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from scipy import stats

from tests.sampled import Ask, Bench, Drafter, Floats, Prefix, Run, by_ask

ALPHA = 1e-4
BANNED = 198  # the likeliest token but one after the prompt: two rows of the first round
ASKS = (
    Ask(0.5),
    Ask(1.0),
    Ask(2.0),
    Ask(0.5, top_p=0.85),
    Ask(1.0, top_k=20, top_p=0.9),
    Ask(2.0, top_k=10),
    Ask(2.0, top_p=0.7),
    Ask(1.0, min_tokens=3, banned=BANNED),
    Ask(0.0),
)
FLOOR = 5.0
DESCEND, IMPOSSIBLE, REST = -1, -2, -3


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
        self._rest = 0.0
        level: dict[Prefix, float] = {(): 1.0}
        for depth in range(length):
            target.load([*level])
            grown: dict[Prefix, float] = {}
            for prefix, mass in level.items():
                law = target.law(ask, prefix) * mass
                table = self._tables[prefix] = self._cut(law, count)
                split = np.flatnonzero(law * count >= 2 * FLOOR)
                table[split] = DESCEND if depth < length - 1 else table[split]
                grown |= {(*prefix, int(token)): law[token] for token in split}
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
    assert np.isclose(chances.sum(), 1)
    if found is None:
        return Gap(np.inf)
    expected = chances * len(runs)
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


@cache
def target(format: str = "fp32") -> Target:
    return Target(format)


@cache
def runs(
    k: int, seed: int, count: int, asks: tuple[Ask, ...] = ASKS, format: str = "fp32"
) -> list[Run]:
    return fresh_runs(k, seed, count, asks, format=format)


def fresh_runs(
    k: int,
    seed: int,
    count: int,
    asks: tuple[Ask, ...] = ASKS,
    drafter: Drafter | None = None,
    format: str = "fp32",
) -> list[Run]:
    bench = Bench(k, format)
    try:
        return bench.runs(asks, count, seed, 3, drafter)
    finally:
        bench.close()


Key: TypeAlias = tuple[Ask | None, int]


def misfits(found: Sequence[Run], format: str = "fp32") -> dict[Key, float]:
    """Where the law is not the target's: the ask (None: all together), how many tokens, p."""
    groups = by_ask(found)
    return _rejected({ask: (groups[ask],) for ask in groups}, agreement, format)


def differences(a: Sequence[Run], b: Sequence[Run], format: str = "fp32") -> dict[Key, float]:
    """Where two sets of runs do not have one law, in the same form."""
    ones, others = by_ask(a), by_ask(b)
    return _rejected({ask: (ones[ask], others[ask]) for ask in ones}, likeness, format)


def _rejected(
    groups: dict[Ask, tuple[Sequence[Run], ...]], test: Callable[..., Gap], format: str
) -> dict[Key, float]:
    found: dict[Key, Gap] = {}
    for length in (1, 2, 3):
        found[None, length] = Gap()
        for ask, sets in groups.items():
            found[ask, length] = test(target(format), *sets, length)
            found[None, length] += found[ask, length]
    lowest = min(found, key=lambda key: found[key].p)
    print(f"lowest of {len(found)} p: {found[lowest].p:.3g} {lowest}")
    print("all asks:", *(f"{found[None, n].p:.3g} ({found[None, n].freedom})" for n in (1, 2, 3)))
    return {key: gap.p for key, gap in found.items() if gap.p <= ALPHA}
