"""What a request gives back: texts, tokens, reasons and counts, under vLLM's names."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

FinishReason: TypeAlias = Literal["stop", "length", "cancelled"]
"""Why a request ended: a stop token or text, a limit, or its caller."""
StopReason: TypeAlias = int | str | None
"""The stop id or the stop text that matched; None for end of sequence and for limits."""
Phase: TypeAlias = Literal["prefill", "draft", "verify", "host"]
"""Where time goes; host is everything outside the graphs."""


@dataclass(frozen=True, slots=True)
class Stats:
    """What speculation did for one request.

    A round is one verify pass. The prompt's passes and the token they give are not counted.

    Attributes:
        target_passes: Verify passes run.
        committed: Tokens those passes added to the output, after stops.
        drafted: Per draft position, the rounds that proposed a draft there.
        accepted: Per draft position, the rounds that accepted the draft there.
        rounds_by_drafts: Entry k counts the rounds that proposed k drafts, k = 0..K.
        accepted_histogram: Entry a counts the rounds that accepted exactly a drafts, a = 0..K;
            rounds that proposed none are left out.
        ms_prefill: Milliseconds in the prefill graph.
        ms_draft: Milliseconds in the draft graph.
        ms_verify: Milliseconds in the verify graph.
        ms_host: Milliseconds outside the graphs.
    """

    target_passes: int
    committed: int
    drafted: tuple[int, ...]
    accepted: tuple[int, ...]
    rounds_by_drafts: tuple[int, ...]
    accepted_histogram: tuple[int, ...]
    ms_prefill: float
    ms_draft: float
    ms_verify: float
    ms_host: float

    @property
    def tokens_per_pass(self) -> float:
        """Committed tokens per verify pass; 0.0 before the first pass."""
        return self.committed / self.target_passes if self.target_passes else 0.0

    def as_json(self) -> dict[str, object]:
        """Return the counts as plain JSON values."""
        return {
            "target_passes": self.target_passes,
            "tokens_per_pass": self.tokens_per_pass,
            "drafted": list(self.drafted),
            "accepted": list(self.accepted),
            "rounds_by_drafts": list(self.rounds_by_drafts),
            "accepted_histogram": list(self.accepted_histogram),
            "ms": {
                "prefill": self.ms_prefill,
                "draft": self.ms_draft,
                "verify": self.ms_verify,
                "host": self.ms_host,
            },
        }


class StatsCounter:
    """The loop's own count of one request; ``freeze`` gives the finished ``Stats``."""

    def __init__(self, num_speculative_tokens: int) -> None:
        """Start at zero for at most ``num_speculative_tokens`` (K >= 0) drafts a round."""
        self._passes = self._committed = 0
        self._drafted = [0] * num_speculative_tokens
        self._accepted = [0] * num_speculative_tokens
        self._histogram = [0] * (num_speculative_tokens + 1)
        self._rounds = [0] * (num_speculative_tokens + 1)
        self._ms: dict[Phase, float] = dict.fromkeys(("prefill", "draft", "verify", "host"), 0.0)

    def count_round(self, drafted: int, accepted: int, committed: int) -> None:
        """Count one verify pass.

        Args:
            drafted: Drafts proposed, 0..K.
            accepted: Drafts accepted, 0..drafted, whether or not a stop cut them off later.
            committed: Tokens kept, 0..accepted + 1.
        """
        assert 0 <= accepted <= drafted <= len(self._drafted), (drafted, accepted)
        assert 0 <= committed <= accepted + 1, (accepted, committed)
        self._passes += 1
        self._committed += committed
        self._rounds[drafted] += 1
        for position in range(drafted):
            self._drafted[position] += 1
            self._accepted[position] += position < accepted
        if drafted:
            self._histogram[accepted] += 1

    def add_ms(self, phase: Phase, ms: float) -> None:
        """Add milliseconds spent in one phase."""
        self._ms[phase] += ms

    def freeze(self) -> Stats:
        """Return what was counted so far."""
        return Stats(
            target_passes=self._passes,
            committed=self._committed,
            drafted=tuple(self._drafted),
            accepted=tuple(self._accepted),
            rounds_by_drafts=tuple(self._rounds),
            accepted_histogram=tuple(self._histogram),
            ms_prefill=self._ms["prefill"],
            ms_draft=self._ms["draft"],
            ms_verify=self._ms["verify"],
            ms_host=self._ms["host"],
        )


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One answer.

    Attributes:
        index: Which of the request's answers this is; 0 while one is given.
        text: The text without the stop token or text; "" where the package has no tokenizer.
        token_ids: Every kept token, the stop token included.
        finish_reason: Why it ended; None while it goes on.
        stop_reason: What matched, see ``StopReason``.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    stop_reason: StopReason


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """One request's answer.

    Attributes:
        request_id: The caller's name for it, or a drawn one.
        prompt: The prompt's text; None when token ids were given.
        prompt_token_ids: The prompt's tokens.
        outputs: One ``CompletionOutput`` each answer.
        finished: Whether every answer has ended.
        seed: The seed used; passing it again repeats the answer.
        stats: What speculation did.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    finished: bool
    seed: int
    stats: Stats


@dataclass(frozen=True, slots=True)
class Delta:
    """What one round added to one answer while streaming; concatenated, deltas are the answer.

    Attributes:
        request_id: The request it belongs to.
        index: Which of the request's answers it extends.
        text: Text now decided; later than its tokens where a stop text might be starting.
        token_ids: Tokens kept in this round, verified ones only.
        finish_reason: Why the answer ended; None while it goes on.
        stop_reason: What matched, see ``StopReason``.
        drafted: Drafts that the round proposed; 0 for the prompt's own token.
    """

    request_id: str
    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    stop_reason: StopReason
    drafted: int = 0
