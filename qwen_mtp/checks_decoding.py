"""Speculation on against off: the same tokens from the same bits of logits.

Plain decoding is the oracle. Scripted drafts then force every accept count after every other one,
for every lookahead of the package, in one slot and in two at once; the MTP head's own drafts come
last. How many of its drafts are accepted proves nothing and is not looked at.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from qwen_mtp.checks_bench import Bench
from qwen_mtp.checks_report import Check, digest
from qwen_mtp.progress import Progress
from qwen_mtp.runtime.runner import Array
from qwen_mtp.runtime.sampling import ResolvedSampling, SamplingParams
from qwen_mtp.runtime.session import Session, StepResult

MOST_TOKENS = 48  # of one continuation: oracles stay short, more patterns take more prompts
OWN_TOKENS = 24
EVERY_PAIR = 7  # largest lookahead for which every pair of accept counts is forced


@dataclass(slots=True)
class Line:
    """One continuation: tokens and a mark of the logits behind each of them."""

    tokens: list[int] = field(default_factory=list)
    marks: list[Any] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Difference:
    """Where a continuation leaves plain decoding.

    Attributes:
        text: One line.
        tie: Both tokens are as likely as rounding can tell.
    """

    text: str
    tie: bool = False


@dataclass(frozen=True, slots=True)
class Script:
    """A prompt and the accept count to force in each round."""

    prompt: tuple[int, ...]
    accepts: tuple[int, ...]


class Decoding:
    """Runs continuations in sessions that share one engine."""

    def __init__(self, bench: Bench, most: int = MOST_TOKENS) -> None:
        """Choose two prompts; a chunk boundary lies inside the longer one.

        Args:
            bench: The graphs.
            most: Tokens a prompt is continued by.
        """
        geometry = bench.geometry
        longest = max(1, geometry.max_model_len // 4)
        lengths = min(3, longest), min(geometry.prefill_chunk + 2, longest)
        self.prompts = [bench.some_ids(30 + i, n) for i, n in enumerate(lengths)]
        self.patterns, self.slots, self._most = 0, bench.slots, most
        self._bench, self._engine = bench, bench.engine
        self._greedy = _greedy(bench)
        self._plain: dict[tuple[int, ...], Line] = {}

    def session(self, lookahead: int) -> Session:
        """A session over the shared engine."""
        package = self._engine.package
        return Session(package, num_speculative_tokens=lookahead, engine=self._engine)

    def room(self, lookahead: int) -> int:
        """Tokens that every prompt can be continued by with full rounds."""
        longest = self._bench.geometry.max_model_len
        return min(self._most, longest - max(map(len, self.prompts)) - lookahead - 3)

    def oracle(self, prompt: tuple[int, ...]) -> Line:
        """Plain decoding of a prompt, once; no other sequence may be running."""
        if prompt not in self._plain:
            session = self.session(0)
            slot, line = self.begin(session, prompt)
            for _ in range(self.room(0)):
                self.add(line, slot, session.step()[slot], 0)
            session.release(slot)
            self._plain[prompt] = line
        return self._plain[prompt]

    def begin(self, session: Session, prompt: tuple[int, ...]) -> tuple[int, Line]:
        """Prefill."""
        slot, token = session.prefill(prompt, self._greedy)
        return slot, Line([token], [self.mark(self._engine.buffer("prefill", "logits")[0, 0])])

    def mark(self, logits: Array) -> Any:
        """What is kept of a row of logits: here all its bits."""
        return digest(logits)

    def add(self, line: Line, slot: int, result: StepResult, rows: int) -> None:
        """Append a round whose largest proposal had ``rows`` drafts."""
        bucket = min(r for r in self._bench.geometry.row_buckets if r >= rows + 1)
        logits = self._engine.buffer(self._bench.graph(bucket), "logits")
        line.tokens += result.tokens
        line.marks += [self.mark(logits[slot, i]) for i in range(len(result.tokens))]

    def forced(self, lookahead: int, scripts: Sequence[Script]) -> str | None:
        """Force scripts at once, one a slot, all of one length; the first difference."""
        _, difference = self.play(lookahead, scripts)
        return None if difference is None else difference.text

    def play(self, lookahead: int, scripts: Sequence[Script]) -> tuple[int, Difference | None]:
        """Rounds that were as forced, and the difference that ended them."""
        for script in scripts:
            self.oracle(script.prompt)
        session, lines = self.session(lookahead), {}
        for script in scripts:
            slot, line = self.begin(session, script.prompt)
            lines[slot] = line
        for number in range(len(scripts[0].accepts)):
            drafts = {
                slot: self._drafts(lookahead, script, line, number)
                for (slot, line), script in zip(lines.items(), scripts, strict=True)
            }
            results = session.step(drafts)
            found = []
            for (slot, line), script in zip(lines.items(), scripts, strict=True):
                self.add(line, slot, results[slot], lookahead)
                found.append(self._round(line, slot, results[slot].accepted, script, number))
            if (worst := _worst(found)) is not None:
                return number, worst
            self.patterns += len(results)
        return len(scripts[0].accepts), None

    def _round(
        self, line: Line, slot: int, accepted: int, script: Script, number: int
    ) -> Difference | None:
        """Whether a round was as forced."""
        counts = script.accepts[: number + 1]
        where = f"slot {slot}, accept counts {counts}"
        if (difference := self.difference(line, script.prompt)) is not None:
            return Difference(f"{difference.text} with {where}", difference.tie)
        if accepted != counts[-1]:
            return Difference(f"{accepted} drafts accepted in round {number} of {where}")
        return None

    def own(self, lookahead: int) -> str | None:
        """The MTP head drafts for as many slots as there are prompts; the first difference."""
        difference = self.drafted(lookahead)
        return None if difference is None else difference.text

    def drafted(self, lookahead: int) -> Difference | None:
        """The difference that matters most of a run on the head's own drafts."""
        session, lines = self.session(lookahead), {}
        prompts = self.prompts[: self._bench.slots]
        for prompt in prompts:
            self.oracle(prompt)
        for prompt in prompts:
            slot, line = self.begin(session, prompt)
            lines[slot] = line
        most = min(OWN_TOKENS, self.room(lookahead) - lookahead)
        while min(len(line.tokens) for line in lines.values()) < most:
            results = session.step()
            for slot, line in lines.items():
                if len(line.tokens) < most:
                    self.add(line, slot, results[slot], max(r.drafted for r in results.values()))
        found = []
        for (slot, line), prompt in zip(lines.items(), prompts, strict=True):
            difference = self.difference(line, prompt)
            if difference is not None:
                text = f"{difference.text} with slot {slot}, own drafts"
                found.append(Difference(text, difference.tie))
        return _worst(found)

    def _drafts(self, lookahead: int, script: Script, line: Line, number: int) -> list[int]:
        """The oracle's tokens, and wrong ones from the accept count on."""
        begin, vocabulary = len(line.tokens), self._bench.config.vocab_size
        right = self.oracle(script.prompt).tokens[begin : begin + lookahead]
        right += [0] * (lookahead - len(right))
        accept = script.accepts[number]
        return right[:accept] + [(token + 1) % vocabulary for token in right[accept:]]

    def difference(self, line: Line, prompt: tuple[int, ...]) -> Difference | None:
        """Hold a continuation against plain decoding."""
        plain = self.oracle(prompt)
        for i, (token, mark) in enumerate(zip(line.tokens, line.marks, strict=True)):
            if token != plain.tokens[i]:
                return Difference(f"token {i} is {token}, plain decoding gives {plain.tokens[i]}")
            if mark != plain.marks[i]:
                return Difference(f"the logits of token {i} differ from plain decoding")
        return None


def check_decoding(bench: Bench, progress: Progress) -> tuple[Check, int]:
    """Compare all lookaheads with plain decoding; also the number of forced rounds compared."""
    lookaheads = bench.geometry.lookaheads
    if not lookaheads:
        return Check("decoding", True, "skipped: the package has no MTP head"), 0
    decoding = Decoding(bench)
    plans = {k: scripts(decoding, accept_counts(k), k, bench.slots) for k in lookaheads}
    rounds = sum(count_rounds(part) for plan in plans.values() for part in plan)
    progress.phase("verify decoding", rounds, "rounds")
    for lookahead, plan in plans.items():
        if (problem := run_lookahead(decoding, lookahead, plan, progress)) is not None:
            return Check("decoding", False, problem), decoding.patterns
    names = ", ".join(map(str, lookaheads))
    detail = (
        f"K={names} equals plain decoding bit for bit over {decoding.patterns} forced rounds "
        "and the head's own drafts"
    )
    return Check("decoding", True, detail), decoding.patterns


def run_lookahead(
    decoding: Decoding, lookahead: int, plan: Sequence[Sequence[Script]], progress: Progress
) -> str | None:
    """Run every script of a lookahead and its own drafts; the first difference."""
    problem = None
    for part in plan:
        if (problem := decoding.forced(lookahead, part)) is not None:
            break
        progress.advance(count_rounds(part))
    problem = problem or decoding.own(lookahead)
    return problem and f"K={lookahead}: {problem}"


def scripts(
    decoding: Decoding, accepts: Sequence[int], lookahead: int, slots: int
) -> list[list[Script]]:
    """What is forced for a lookahead: scripts one by one, then two at once if there are slots."""
    cut = list(pieces(accepts, decoding.room(lookahead)))
    first, second = decoding.prompts
    plan = [[Script((first, second)[i % 2], piece)] for i, piece in enumerate(cut)]
    if slots > 1 and cut:
        plan.append([Script(first, cut[0]), Script(second, cut[0][::-1])])
    return plan


def count_rounds(part: Sequence[Script]) -> int:
    """Forced rounds of scripts that run at once."""
    return sum(len(script.accepts) for script in part)


def _worst(found: Sequence[Difference | None]) -> Difference | None:
    """The first that is no tie, else the first."""
    some = [difference for difference in found if difference is not None]
    return next((d for d in some if not d.tie), next(iter(some), None))


def accept_counts(lookahead: int) -> tuple[int, ...]:
    """Accept counts in an order that tries transitions between them.

    Up to a lookahead of 7 every count follows every other and itself: the order-2 de Bruijn
    cycle, opened. Beyond, where that grows to hundreds of rounds, every count follows 0 and
    itself and is followed by the largest.
    """
    counts, order = range(lookahead + 1), list[int]()
    if lookahead > EVERY_PAIR:
        for i in counts:
            order += [0, i, i, lookahead]
        return tuple(order)
    for i in counts:
        order.append(i)
        for j in counts[i + 1 :]:
            order += [i, j]
    return (*order, order[0])


def pieces(accepts: Sequence[int], room: int) -> Iterator[tuple[int, ...]]:
    """Cut into pieces that fit ``room`` tokens; a piece begins with the last of the one before."""
    piece: list[int] = []
    for accept in accepts:
        if piece and sum(piece) + len(piece) + accept + 1 > room:
            yield tuple(piece)
            piece = piece[-1:] if piece[-1] + accept + 2 <= room else []
        if accept + 1 <= room:
            piece.append(accept)
    if piece:
        yield tuple(piece)


def _greedy(bench: Bench) -> ResolvedSampling:
    return SamplingParams(temperature=0, max_tokens=None, ignore_eos=True).resolve()
