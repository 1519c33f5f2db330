"""Generates a text again and again: plainly, with the MTP head's drafts, with scripted ones.

A scripted draft is right with a chosen probability. The MTP head runs all the same, so a round
costs what it would cost with a head of that acceptance. Every token that comes out is compared
with those of plain decoding.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import zip_longest
from time import perf_counter
from typing import Protocol

import numpy as np

from qwen_mtp.bench.costs import Decoding, Samples
from qwen_mtp.errors import MissingExtraError, PackageError
from qwen_mtp.runtime.llm import LLM
from qwen_mtp.runtime.runner import GraphRunner
from qwen_mtp.runtime.sampling import SamplingParams
from qwen_mtp.runtime.session import Session, StepResult

_SEED = 20


class Course(Protocol):
    """One kind of run, to be taken in turn with others."""

    def run(self) -> None:
        """Generate the text once."""

    def result(self) -> Decoding:
        """Sum up the runs so far, at least one."""


@dataclass(slots=True)
class Tally:
    """What the runs of one kind did; ``result`` gives the finished ``Decoding``."""

    lookahead: int
    reference: Sequence[int]
    adaptive: bool = False
    forced: float | None = None
    slots: int = 1
    tokens: int = 0
    passes: int = 0
    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    draft_ms: float = 0.0
    verify_ms: float = 0.0
    host_ms: float = 0.0
    speeds: list[float] = field(default_factory=list)
    difference: int | None = None

    def __post_init__(self) -> None:
        """No drafts yet at any position."""
        self.drafted, self.accepted = [0] * self.lookahead, [0] * self.lookahead

    def count(self, tokens: int, draft_ms: float, verify_ms: float, host_ms: float) -> None:
        """Count the rounds of one run: their tokens, all slots together, and milliseconds."""
        self.tokens += tokens
        self.draft_ms += draft_ms
        self.verify_ms += verify_ms
        self.host_ms += host_ms
        self.speeds.append(1e3 * tokens / (draft_ms + verify_ms + host_ms))

    def compare(self, tokens: Sequence[int]) -> None:
        """Find the first token that plain decoding would not have given."""
        pairs = enumerate(zip_longest(tokens, self.reference))
        place = next((i for i, (mine, plain) in pairs if mine != plain), None)
        if place is not None:
            self.difference = place if self.difference is None else min(place, self.difference)

    def result(self) -> Decoding:
        """Sum up."""
        return Decoding(
            lookahead=self.lookahead,
            adaptive=self.adaptive,
            forced=self.forced,
            slots=self.slots,
            tokens=self.tokens,
            passes=self.passes,
            drafted=tuple(self.drafted),
            accepted=tuple(self.accepted),
            draft_ms=self.draft_ms,
            verify_ms=self.verify_ms,
            host_ms=self.host_ms,
            speed=Samples.of(self.speeds),
            difference=self.difference,
        )


class TextCourse:
    """Continues a prompt with the package's own drafts."""

    def __init__(
        self,
        engine: GraphRunner,
        lookahead: int,
        prompt: Sequence[int],
        reference: Sequence[int],
        adaptive: bool = False,
    ) -> None:
        """Draft ``lookahead`` tokens a round, or up to so many; compare with ``reference``."""
        self._llm = open_llm(engine, lookahead, adaptive)
        self._prompt, self._tally = list(prompt), Tally(lookahead, reference, adaptive)

    def run(self) -> None:
        """Generate as many tokens as the reference has."""
        tally = self._tally
        start = perf_counter()
        output = self._llm.generate(self._prompt, greedy(len(tally.reference)))[0]
        stats = output.stats
        spent = (perf_counter() - start) * 1e3 - stats.ms_prefill
        graphs = stats.ms_draft + stats.ms_verify
        tally.count(stats.committed, stats.ms_draft, stats.ms_verify, max(0.0, spent - graphs))
        tally.passes += stats.target_passes
        for total, found in ((tally.drafted, stats.drafted), (tally.accepted, stats.accepted)):
            total[:] = [a + b for a, b in zip(total, found, strict=True)]
        tally.compare(output.outputs[0].token_ids)

    def result(self) -> Decoding:
        """Sum up."""
        return self._tally.result()


class ForcedCourse:
    """Continues a prompt with scripted drafts, in one slot or in several that go in step.

    Whether the draft at a place of the text is right is drawn once for the place, so that kinds
    with another probability, look-ahead or number of slots meet the same luck; the next run of a
    kind meets another.
    """

    def __init__(
        self,
        engine: GraphRunner,
        lookahead: int,
        forced: float | None,
        prompt: Sequence[int],
        reference: Sequence[int],
        slots: int = 1,
        adaptive: bool = False,
    ) -> None:
        """Give drafts that are right with probability ``forced``; None for plain decoding."""
        self._session = Session(
            engine.package, num_speculative_tokens=lookahead, adaptive=adaptive, engine=engine
        )
        self._prompt, self._slots = list(prompt), slots
        self._tally = Tally(lookahead, reference, adaptive, forced, slots)

    def run(self) -> None:
        """Generate as many tokens as the reference has, in every slot."""
        session, tally = self._session, self._tally
        sampling, script = greedy(len(tally.reference)).resolve(), self._script()
        texts = {}
        for _ in range(self._slots):
            slot, token = session.prefill(self._prompt, sampling)
            texts[slot] = [token]
        times = np.zeros(3)
        live = dict(texts)
        while live:
            results = session.step(self._drafts(live, script))
            times += (session.times.draft, session.times.verify, session.times.host)
            self._take(results, live)
        made = sum(len(text) for text in texts.values()) - self._slots
        tally.count(made, *times.tolist())
        for text in texts.values():
            tally.compare(text)

    def result(self) -> Decoding:
        """Sum up."""
        return self._tally.result()

    def _script(self) -> list[int]:
        """For every place of the text the token that a draft there will be."""
        vocabulary = self._session.package.manifest.config.vocab_size
        reference = self._tally.reference
        draw = np.random.default_rng((_SEED, len(self._tally.speeds))).random(len(reference))
        right = (draw < (self._tally.forced or 0.0)).tolist()
        pairs = zip(reference, right, strict=True)
        return [token if hit else (token + 1) % vocabulary for token, hit in pairs]

    def _drafts(
        self, live: dict[int, list[int]], script: list[int]
    ) -> dict[int, list[int]] | None:
        """As many as the session would take of its own: those it does not ask for cost nothing."""
        if not self._session.lookahead:
            return None
        wanted = self._session.plan().drafts
        return {b: script[len(live[b]) : len(live[b]) + k] for b, k in wanted.items()}

    def _take(self, results: dict[int, StepResult], live: dict[int, list[int]]) -> None:
        """Take the tokens of a round, and leave the slots that are done."""
        self._tally.passes += 1
        for slot, result in results.items():
            for position in range(result.drafted):
                self._tally.drafted[position] += 1
                self._tally.accepted[position] += position < result.accepted
            live[slot] += result.tokens
            if result.error is not None or len(live[slot]) >= len(self._tally.reference):
                self._session.release(slot)
                del live[slot]


def open_llm(engine: GraphRunner, lookahead: int, adaptive: bool = False) -> LLM:
    """An ``LLM`` on an engine that is loaded already, with its tokenizer where it has one."""
    llm = LLM(
        engine.package.directory,
        num_speculative_tokens=lookahead,
        adaptive=adaptive,
        engine=engine,
    )
    with suppress(MissingExtraError, PackageError):  # it is read once, and not by the first run
        _ = llm.text
    return llm


def greedy(tokens: int) -> SamplingParams:
    """So many tokens, the most likely ones, past the end of the text."""
    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
