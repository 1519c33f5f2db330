"""Speculation on against off: the same tokens from the same bits of logits.

Plain decoding is the oracle. Scripted drafts then force every accept count after every other one,
for every lookahead of the package, in one slot and in two at once; the MTP head's own drafts come
last. How many of its drafts are accepted proves nothing and is not looked at.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from qwen_mtp.checks_bench import Bench
from qwen_mtp.checks_report import Check, digest
from qwen_mtp.progress import Progress
from qwen_mtp.runtime.sampling import ResolvedSampling, SamplingParams
from qwen_mtp.runtime.session import Session, StepResult

MOST_TOKENS = 48  # of one continuation: oracles stay short, more patterns take more prompts
OWN_TOKENS = 24
EVERY_PAIR = 7  # largest lookahead for which every pair of accept counts is forced


@dataclass(slots=True)
class Line:
    """One continuation: tokens and the digests of the logits behind them."""

    tokens: list[int] = field(default_factory=list)
    bits: list[bytes] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Script:
    """A prompt and the accept count to force in each round."""

    prompt: tuple[int, ...]
    accepts: tuple[int, ...]


class Decoding:
    """Runs continuations in sessions that share one engine."""

    def __init__(self, bench: Bench) -> None:
        """Choose two prompts; a chunk boundary lies inside the longer one."""
        geometry = bench.geometry
        longest = max(1, geometry.max_model_len // 4)
        lengths = min(3, longest), min(geometry.prefill_chunk + 2, longest)
        self.prompts = [bench.some_ids(30 + i, n) for i, n in enumerate(lengths)]
        self.patterns = 0
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
        return min(MOST_TOKENS, longest - max(map(len, self.prompts)) - lookahead - 3)

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
        return slot, Line([token], [digest(self._engine.buffer("prefill", "logits")[0, 0])])

    def add(self, line: Line, slot: int, result: StepResult, rows: int) -> None:
        """Append a round whose largest proposal had ``rows`` drafts."""
        bucket = min(r for r in self._bench.geometry.row_buckets if r >= rows + 1)
        logits = self._engine.buffer(self._bench.graph(bucket), "logits")
        line.tokens += result.tokens
        line.bits += [digest(logits[slot, i]) for i in range(len(result.tokens))]

    def forced(self, lookahead: int, scripts: Sequence[Script]) -> str | None:
        """Force scripts at once, one a slot, all of one length; the first difference."""
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
            self.patterns += len(results)
            for (slot, line), script in zip(lines.items(), scripts, strict=True):
                self.add(line, slot, results[slot], lookahead)
                where = f"K={lookahead}, slot {slot}, accept counts {script.accepts[: number + 1]}"
                if results[slot].accepted != script.accepts[number]:
                    return f"{results[slot].accepted} drafts accepted in round {number} of {where}"
                if (problem := self._difference(line, script.prompt)) is not None:
                    return f"{problem} with {where}"
        for slot in lines:
            session.release(slot)
        return None

    def own(self, lookahead: int) -> str | None:
        """The MTP head drafts for as many slots as there are prompts."""
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
        for (slot, line), prompt in zip(lines.items(), prompts, strict=True):
            session.release(slot)
            if (problem := self._difference(line, prompt)) is not None:
                return f"{problem} with K={lookahead}, slot {slot}, own drafts"
        return None

    def _drafts(self, lookahead: int, script: Script, line: Line, number: int) -> list[int]:
        """The oracle's tokens, and wrong ones from the accept count on."""
        begin, vocabulary = len(line.tokens), self._bench.config.vocab_size
        right = self.oracle(script.prompt).tokens[begin : begin + lookahead]
        right += [0] * (lookahead - len(right))
        accept = script.accepts[number]
        return right[:accept] + [(token + 1) % vocabulary for token in right[accept:]]

    def _difference(self, line: Line, prompt: tuple[int, ...]) -> str | None:
        plain = self.oracle(prompt)
        for i, (token, bits) in enumerate(zip(line.tokens, line.bits, strict=True)):
            if token != plain.tokens[i]:
                return f"token {i} is {token}, plain decoding gives {plain.tokens[i]}"
            if bits != plain.bits[i]:
                return f"the logits of token {i} differ from plain decoding"
        return None


def check_decoding(bench: Bench, progress: Progress) -> tuple[Check, int]:
    """Compare all lookaheads with plain decoding; also the number of forced rounds compared."""
    lookaheads = bench.geometry.lookaheads
    if not lookaheads:
        return Check("decoding", True, "skipped: the package has no MTP head"), 0
    decoding = Decoding(bench)
    plans = {k: _scripts(decoding, k, bench.slots) for k in lookaheads}
    rounds = sum(_rounds(scripts) for plan in plans.values() for scripts in plan)
    progress.phase("verify decoding", rounds, "rounds")
    for lookahead, plan in plans.items():
        problem = _one_lookahead(decoding, lookahead, plan, progress)
        if problem is not None:
            return Check("decoding", False, problem), decoding.patterns
    names = ", ".join(map(str, lookaheads))
    detail = (
        f"K={names} equals plain decoding bit for bit over {decoding.patterns} forced rounds "
        "and the head's own drafts"
    )
    return Check("decoding", True, detail), decoding.patterns


def _one_lookahead(
    decoding: Decoding, lookahead: int, plan: Sequence[Sequence[Script]], progress: Progress
) -> str | None:
    for scripts in plan:
        if (problem := decoding.forced(lookahead, scripts)) is not None:
            return problem
        progress.advance(_rounds(scripts))
    return decoding.own(lookahead)


def _scripts(decoding: Decoding, lookahead: int, slots: int) -> list[list[Script]]:
    """What is forced for a lookahead: scripts one by one, then two at once if there are slots."""
    pieces = list(_pieces(accept_counts(lookahead), decoding.room(lookahead)))
    first, second = decoding.prompts
    plan = [[Script((first, second)[i % 2], piece)] for i, piece in enumerate(pieces)]
    if slots > 1 and pieces:
        plan.append([Script(first, pieces[0]), Script(second, pieces[0][::-1])])
    return plan


def _rounds(scripts: Sequence[Script]) -> int:
    return sum(len(script.accepts) for script in scripts)


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


def _pieces(accepts: Sequence[int], room: int) -> Iterator[tuple[int, ...]]:
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
