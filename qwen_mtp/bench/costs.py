"""What passes, prompts and runs cost: samples as they were taken, and arithmetic over them.

A field was measured or given; a property is computed from fields. Both are in the JSON.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Self


@dataclass(frozen=True, slots=True)
class Samples:
    """One quantity, taken several times.

    Attributes:
        count: How often.
        minimum: The least.
        median: The middle one.
        p90: Nine of ten are not above it.
    """

    count: int
    minimum: float
    median: float
    p90: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Self:
        """Sum up at least one value."""
        ordered = sorted(values)
        place = -(-9 * len(ordered) // 10) - 1
        return cls(len(ordered), ordered[0], median(ordered), ordered[place])


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsCost:
    """A verify pass: milliseconds by the rows of its bucket."""

    rows: int
    ms: Samples


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftCost:
    """A draft pass: milliseconds for ``lookahead`` drafts."""

    lookahead: int
    ms: Samples

    @property
    def name(self) -> str:
        """``1 draft``, ``3 drafts``."""
        return "1 draft" if self.lookahead == 1 else f"{self.lookahead} drafts"

    @property
    def one_ms(self) -> float:
        """Milliseconds of one draft."""
        return self.ms.median / self.lookahead


@dataclass(frozen=True, slots=True, kw_only=True)
class Passes:
    """Single passes of one slot at one context, in turn.

    Attributes:
        plain: The smallest verify graph with one row.
        verify: Every bucket, all its rows in use.
        drafts: Every draft graph.
    """

    plain: Samples
    verify: tuple[RowsCost, ...]
    drafts: tuple[DraftCost, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillCost:
    """A prompt of ``tokens`` random ids: milliseconds, and the rows that were padding."""

    tokens: int
    passes: int
    padding: int
    ms: Samples

    @property
    def tokens_per_s(self) -> float:
        """Tokens of the prompt per second."""
        return 1e3 * self.tokens / self.ms.median


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefill:
    """Prompts of several lengths.

    Attributes:
        costs: One each length, ascending.
        mtp_share: Share of the multiply-adds of a full chunk that fill the drafter's cache.
    """

    costs: tuple[PrefillCost, ...]
    mtp_share: float

    @property
    def mtp_ms(self) -> float:
        """Of the longest prompt, the milliseconds that share stands for."""
        return self.mtp_share * self.costs[-1].ms.median


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextCost:
    """Single passes of one slot after ``context`` positions."""

    context: int
    plain: Samples
    verify: Samples
    draft: Samples | None
    kv_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoding:
    """Runs of one kind; the prompt's passes and the token they give are not counted.

    Attributes:
        lookahead: Drafts a round, at most.
        adaptive: Whether each round chose how many.
        forced: The probability with which a scripted draft is right; None for the MTP head's own.
        slots: Sequences side by side.
        tokens: Tokens of all runs and slots.
        passes: Rounds of all runs.
        drafted: Per position, drafts verified in all runs and slots.
        accepted: Per position, drafts accepted.
        draft_ms: Milliseconds in draft graphs, all runs.
        verify_ms: The same in verify graphs.
        host_ms: The same outside the graphs.
        speed: Tokens per second of each run, all slots together.
        difference: The first token that differs from plain decoding; None where all are equal.
    """

    lookahead: int
    adaptive: bool
    forced: float | None
    slots: int
    tokens: int
    passes: int
    drafted: tuple[int, ...]
    accepted: tuple[int, ...]
    draft_ms: float
    verify_ms: float
    host_ms: float
    speed: Samples
    difference: int | None

    @property
    def tokens_per_pass(self) -> float:
        """Tokens a round gives one sequence."""
        return self.tokens / (self.passes * self.slots)

    @property
    def expected(self) -> float | None:
        """Tokens a round gives in the long run, where chance alone decides: 1 + A + ... + A^K."""
        if self.forced is None or self.adaptive:
            return None
        return sum(self.forced**i for i in range(self.lookahead + 1))

    @property
    def acceptance(self) -> tuple[float, ...]:
        """Per position, the share of the drafts there that were accepted."""
        pairs = zip(self.accepted, self.drafted, strict=True)
        return tuple(kept / tried for kept, tried in pairs if tried)

    @property
    def round_ms(self) -> float:
        """Milliseconds of a round."""
        return (self.draft_ms + self.verify_ms + self.host_ms) / self.passes

    @property
    def host_share(self) -> float:
        """Share of a round that is spent outside the graphs."""
        return self.host_ms / (self.draft_ms + self.verify_ms + self.host_ms)

    @property
    def equal(self) -> bool:
        """Whether all its tokens are those of plain decoding."""
        return self.difference is None
