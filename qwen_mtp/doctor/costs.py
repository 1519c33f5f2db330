"""What drafts and passes cost relative to each other, and what that makes of a look-ahead."""

from collections.abc import Sequence
from dataclasses import dataclass

from qwen_mtp.bench.costs import Passes, RowsCost
from qwen_mtp.doctor.products import BITS

VOCABULARY, DRAFTED = 248320, 3
_NEAR = 0.98
_HIDDEN, _WEIGHTS, _MTP = 1024, 751e6, 20e6  # of the published model of 0.8 billion weights


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductCost:
    """Products of a few rows in one format on one kind of kernels.

    Attributes:
        format: Weight format.
        kernels: ``native`` or ``onnxruntime``.
        weights: Weights of one run, not bytes.
        rows: Milliseconds by rows, ascending.
        difference: Where a row among others has other bits than alone; empty where it has its own.
        failure: Why nothing was measured; empty where it was.
    """

    format: str
    kernels: str
    weights: int = 0
    rows: tuple[RowsCost, ...] = ()
    difference: str = ""
    failure: str = ""

    @property
    def usable(self) -> bool:
        """Whether it was measured, and a row keeps its bits."""
        return not self.failure and not self.difference

    @property
    def speed(self) -> float:
        """GB of weights a second with one row; 0 where nothing was measured."""
        if not self.rows:
            return 0.0
        return self.weights * BITS[self.format] / 8 / self.rows[0].ms.median / 1e6

    def ms(self, rows: int) -> float:
        """Milliseconds of so many rows, between and beyond those measured on a line."""
        return along([(cost.rows, cost.ms.median) for cost in self.rows], rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Sizes that decide what a model costs.

    Attributes:
        weights: Weights a plain token reads, the output head among them.
        hidden: Width.
        vocabulary: Rows of the output head.
        drafter: Weights of the drafter but for its output head.
    """

    weights: float
    hidden: int
    vocabulary: int
    drafter: float

    @classmethod
    def of_size(cls, weights: float) -> "ModelShape":
        """The published model of about so many weights; between those sizes, a power law."""
        larger = weights / _WEIGHTS
        hidden = max(1, round(_HIDDEN * larger**0.45 / 256)) * 256
        vocabulary = min(VOCABULARY, int(weights / 2 / hidden))
        return cls(
            weights=weights, hidden=hidden, vocabulary=vocabulary, drafter=_MTP * larger**0.83
        )

    def draft_weights(self, format: str, rows: int) -> float:
        """Weights of one draft, whose float32 projection counts as many of the format."""
        projection = 2 * self.hidden**2 * 32 / BITS[format]
        return self.drafter + projection + rows * self.hidden


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Milliseconds of the passes of one model.

    Attributes:
        plain: A token without drafts, in the smallest verify graph.
        verify: ``(rows, ms)`` of the buckets, ascending.
        draft: One draft.
    """

    plain: float
    verify: tuple[tuple[int, float], ...]
    draft: float

    def round(self, lookahead: int) -> float:
        """Milliseconds of a round of so many drafts."""
        if lookahead == 0:
            return self.plain
        return max(self.plain, along(self.verify, lookahead + 1)) + lookahead * self.draft

    def speedup(self, lookahead: int, acceptance: float) -> float:
        """Tokens a second over plain decoding, where each draft is right with that chance."""
        return expected_tokens(lookahead, acceptance) * self.plain / self.round(lookahead)

    def best_lookahead(self, acceptance: float, most: int) -> int:
        """The least look-ahead within 2 % of the largest speed-up; 0 where drafts do not pay."""
        gains = [self.speedup(k, acceptance) for k in range(most + 1)]
        return next(k for k, gain in enumerate(gains) if gain >= _NEAR * max(gains))


def expected_tokens(lookahead: int, acceptance: float) -> float:
    """Tokens a round gives in the long run: 1 + A + ... + A^K."""
    return sum(acceptance**i for i in range(lookahead + 1))


def estimated(cost: ProductCost, shape: ModelShape, draft_rows: int) -> Costs:
    """Costs of a model of that shape if it were nothing but products."""
    scale = shape.weights / cost.weights
    rows = draft_rows or shape.vocabulary
    return Costs(
        plain=cost.ms(2) * scale,
        verify=tuple((r, cost.ms(r) * scale) for r in (2, 4, 8)),
        draft=cost.ms(1) * shape.draft_weights(cost.format, rows) / cost.weights,
    )


def measured(passes: Passes) -> Costs:
    """Costs of a package as they were measured."""
    return Costs(
        plain=passes.plain.median,
        verify=tuple((cost.rows, cost.ms.median) for cost in passes.verify),
        draft=min((cost.one_ms for cost in passes.drafts), default=0.0),
    )


def draft_rows(shape: ModelShape, format: str) -> int:
    """Rows of an output head with which three drafts cost at most 0.3 of a plain token.

    A power of two, at least 4096; 0 where the whole vocabulary is as cheap.
    """
    most = shape.weights * 0.3 / DRAFTED - shape.draft_weights(format, 0)
    if shape.vocabulary * shape.hidden <= most or shape.vocabulary <= 4096:
        return 0
    rows = max(1, int(most / shape.hidden))
    return int(max(4096, 1 << (rows.bit_length() - 1)))


def along(points: Sequence[tuple[int, float]], x: float) -> float:
    """The value at ``x`` on the line through the two nearest of at least one point."""
    if len(points) == 1:
        return points[0][1]
    place = next((i for i, (at, _) in enumerate(points) if at >= x), len(points) - 1)
    (x0, y0), (x1, y1) = points[max(0, place - 1)], points[max(1, place)]
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)
