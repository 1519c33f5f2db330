"""Speculation on against off where a row's bits depend on the pass it stands in.

The forced accept counts are those of :mod:`qwen_mtp.checks_decoding`; logits must agree as far as
rounding lets them, tokens must be equal. Where plain decoding itself can hardly tell two tokens
apart, either may come. Such a near tie is counted, and what is left of the script goes on behind
another prompt: the texts have parted.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from qwen_mtp.checks_bench import Bench
from qwen_mtp.checks_decoding import (
    MOST_TOKENS,
    Decoding,
    Difference,
    Line,
    Script,
    accept_counts,
    count_rounds,
    run_lookahead,
    scripts,
)
from qwen_mtp.checks_golden import CEILING, MOVES, logit_moves, tolerance
from qwen_mtp.checks_report import Check
from qwen_mtp.graphs.weights import file_bytes
from qwen_mtp.progress import Progress
from qwen_mtp.runtime.runner import Array

LARGE = 1 << 30  # bytes of weights from which few accept counts are forced
PROMPTS = 8  # that a script may take
DEEP = 4  # times the tolerance where no golden values say how far logits move: for large models


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the check found.

    Attributes:
        check: The check.
        patterns: Forced rounds that were compared.
        near_ties: Ties that ended a run.
    """

    check: Check
    patterns: int = 0
    near_ties: int = 0


class Tolerant(Decoding):
    """Keeps logits whole and compares them within a tolerance.

    Attributes:
        ties: Near ties so far.
        left: Forced rounds that no prompt had room for between its ties.
        max_error: Largest relative difference of a row of logits.
    """

    def __init__(self, bench: Bench, most: int, allowed: float) -> None:
        """Compare within ``allowed``, relative to the norm of a row of logits."""
        super().__init__(bench, most)
        self.ties = self.left = 0
        self.max_error, self._allowed = 0.0, allowed

    def mark(self, logits: Array) -> Array:
        """The row."""
        return logits.copy()

    def difference(self, line: Line, prompt: tuple[int, ...]) -> Difference | None:
        """Hold a continuation against plain decoding, up to the first token that differs."""
        plain = self.oracle(prompt)
        for i, (token, mark) in enumerate(zip(line.tokens, line.marks, strict=True)):
            wanted = plain.marks[i]
            error = float(np.linalg.norm(mark - wanted) / np.linalg.norm(wanted))
            if not error <= self._allowed:  # a NaN is no agreement
                allowed = f"allowed {self._allowed:.1e}"
                text = f"the logits of token {i} are off by {error:.1e} ({allowed})"
                return Difference(f"{text} from plain decoding")
            self.max_error = max(self.max_error, error)
            if token != plain.tokens[i]:
                text = f"token {i} is {token}, plain decoding gives {plain.tokens[i]}"
                return Difference(text, self._near_tie(wanted, token, plain.tokens[i]))
        return None

    def forced(self, lookahead: int, scripts: Sequence[Script]) -> str | None:
        """Force scripts at once; where a near tie ends them, the rest behind other prompts."""
        for _ in range(PROMPTS):
            done, difference = self.play(lookahead, scripts)
            if difference is None or not difference.tie:
                return None if difference is None else difference.text
            self.ties += 1
            scripts = [self._rest(script, done) for script in scripts]
        self.left += count_rounds(scripts)
        return None

    def own(self, lookahead: int) -> str | None:
        """As for exact graphs; a near tie ends the comparison."""
        difference = self.drafted(lookahead)
        if difference is None or not difference.tie:
            return None if difference is None else difference.text
        self.ties += 1
        return None

    def _near_tie(self, logits: Array, a: int, b: int) -> bool:
        gap = abs(float(logits[a]) - float(logits[b]))
        return gap <= 2 * self._allowed * float(np.abs(logits).max())

    def _rest(self, script: Script, done: int) -> Script:
        """From the last forced round on: every transition is forced."""
        prompt = self._bench.some_ids(300 + self.ties, len(script.prompt))
        return Script(prompt, script.accepts[max(done - 1, 0) :])


def check_tolerant(bench: Bench, progress: Progress) -> Outcome:
    """Compare all lookaheads with plain decoding."""
    lookaheads, manifest = bench.geometry.lookaheads, bench.engine.package.manifest
    if not lookaheads:
        return Outcome(Check("decoding", True, "skipped: the package has no MTP head"))
    large = file_bytes(manifest.weights) > LARGE
    counts = {k: _few(k) if large else accept_counts(k) for k in lookaheads}
    most = max(sum(c) + len(c) for c in counts.values()) if large else MOST_TOKENS
    decoding = Tolerant(bench, min(most, MOST_TOKENS), _allowed(bench))
    plans = {k: _plan(decoding, counts[k], k, large) for k in lookaheads}
    rounds = sum(count_rounds(part) for plan in plans.values() for part in plan)
    progress.phase("verify decoding", rounds, "rounds")
    for lookahead, plan in plans.items():
        if (problem := run_lookahead(decoding, lookahead, plan, progress)) is not None:
            check = Check("decoding", False, problem)
            return Outcome(check, decoding.patterns, decoding.ties)
    check = Check("decoding", True, _detail(decoding, lookaheads, large))
    return Outcome(check, decoding.patterns, decoding.ties)


def _allowed(bench: Bench) -> float:
    """Relative difference of logits that rounding explains: four times what it was seen to do."""
    least, moves = tolerance(bench.geometry), logit_moves(bench.engine.package)
    return DEEP * least if moves is None else max(least, min(MOVES * moves, CEILING))


def _few(lookahead: int) -> tuple[int, ...]:
    return lookahead, 0, (lookahead + 1) // 2, lookahead


def _plan(
    decoding: Decoding, counts: Sequence[int], lookahead: int, large: bool
) -> list[list[Script]]:
    plan = scripts(decoding, counts, lookahead, decoding.slots)
    return plan[-1:] if large else plan


def _detail(decoding: Tolerant, lookaheads: Sequence[int], large: bool) -> str:
    names = ", ".join(map(str, lookaheads))
    parts = [
        f"K={names} equals plain decoding over {decoding.patterns} forced rounds and the head's "
        f"own drafts; logits within a relative {decoding.max_error:.1e} of plain decoding's",
        f"{decoding.ties} near ties" if decoding.ties else "no near ties",
    ]
    if decoding.left:
        parts.append(f"{decoding.left} rounds left out behind near ties")
    if large:
        parts.append("few accept counts were forced: the model is large")
    return ", ".join(parts)
