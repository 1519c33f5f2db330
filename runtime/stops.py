"""Where one request ends: stop tokens, stop texts and limits, applied token by token.

The tokens of a verified run are looked at one at a time, in order, as if they had been decoded one
a round; the first hit ends the request and drops the rest of the run. For each token:

1. append it; an end-of-sequence id or a stop id ends with "stop", and its text is left out;
2. add its text; a stop text that is complete ends with "stop" and is cut from the text;
3. ``max_tokens`` reached, or the context full, ends with "length".

The first ``min_tokens`` tokens are appended but do not end the request by rules 1 and 2. Where one
token completes several stop texts, the one that completes first counts; where they complete
together, the one listed first.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from qwen_mtp.errors import RequestError
from qwen_mtp.runtime.outputs import StopReason
from qwen_mtp.runtime.sampling import ResolvedSampling


class TokenDecoder(Protocol):
    """An incremental detokenizer, see ``qwen_mtp.runtime.text.Detokenizer``."""

    def push(self, token: int) -> str:
        """Take one token; return the text that is now certain."""

    def flush(self) -> str:
        """Return what was held back; no token follows."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of one run of tokens.

    Attributes:
        kept: How many of its tokens belong to the output, from the front.
        text: Text that is now certain; never the beginning of a stop text still undecided.
        finish_reason: Why the request ended; None while it goes on.
        stop_reason: The stop id or stop text that matched.
    """

    kept: int
    text: str
    finish_reason: Literal["stop", "length"] | None
    stop_reason: StopReason


class StopChecker:
    """The tokens and text of one request, and whether it has ended."""

    def __init__(
        self,
        sampling: ResolvedSampling,
        *,
        eos_ids: Collection[int],
        prompt_length: int,
        max_model_len: int,
        detokenizer: TokenDecoder | None = None,
    ) -> None:
        """Start before the first emitted token.

        Args:
            sampling: The request's limits and stops.
            eos_ids: The model's end-of-sequence ids; every one of them stops.
            prompt_length: Tokens of the prompt, below ``max_model_len``.
            max_model_len: Most tokens of prompt and output together.
            detokenizer: A fresh one; None gives no text.

        Raises:
            RequestError: If there are stop texts but no detokenizer to find them with.
        """
        if sampling.stop and detokenizer is None:
            raise RequestError(
                f"stop {sampling.stop[0]!r} needs the package's tokenizer: "
                "install qwen-mtp[text], or give stop_token_ids"
            )
        self._sampling = sampling
        self._eos = frozenset() if sampling.ignore_eos else frozenset(eos_ids)
        room = max_model_len - prompt_length
        self._limit = room if sampling.max_tokens is None else min(room, sampling.max_tokens)
        self._decoder = detokenizer
        self._matcher = _StopTexts(sampling.stop)
        self._tokens: list[int] = []
        self._text: list[str] = []
        self._finish: Literal["stop", "length"] | None = None
        self._stop: StopReason = None

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Every token kept so far, the stop token included."""
        return tuple(self._tokens)

    @property
    def text(self) -> str:
        """All text given out so far."""
        return "".join(self._text)

    @property
    def finish_reason(self) -> Literal["stop", "length"] | None:
        """Why the request ended; None while it goes on."""
        return self._finish

    @property
    def stop_reason(self) -> StopReason:
        """The stop id or stop text that matched."""
        return self._stop

    def push(self, tokens: Sequence[int]) -> Verdict:
        """Take the next emitted tokens, in order.

        Args:
            tokens: Token ids; those after the end of the request are dropped.
        """
        tokens_before, texts_before = len(self._tokens), len(self._text)
        for token in tokens:
            if self._finish is not None:
                break
            self._text.append(self._take(token))
        text = "".join(self._text[texts_before:])
        return Verdict(len(self._tokens) - tokens_before, text, self._finish, self._stop)

    def flush(self) -> str:
        """Give out the text still held back, for a request that is cancelled.

        A request that ended by itself holds nothing back.
        """
        if self._finish is not None:
            return ""
        self._text.append(self._rest())
        return self._text[-1]

    def _take(self, token: int) -> str:
        """Append one token; set the finish where it ends the request; return certain text."""
        self._tokens.append(token)
        may_stop = len(self._tokens) > self._sampling.min_tokens
        if may_stop and (token in self._eos or token in self._sampling.stop_token_ids):
            self._finish, self._stop = "stop", None if token in self._eos else token
            return self._rest()
        new = "" if self._decoder is None else self._decoder.push(token)
        text, match = self._matcher.push(new, may_stop)
        if match is not None:
            self._finish, self._stop = "stop", match
        elif len(self._tokens) >= self._limit:
            self._finish = "length"
            text += self._rest()
        return text

    def _rest(self) -> str:
        tail = "" if self._decoder is None else self._decoder.flush()
        return self._matcher.take_held() + tail


class _StopTexts:
    """Finds stop texts in a stream, giving out only what cannot become part of one."""

    def __init__(self, texts: tuple[str, ...]) -> None:
        self._texts = texts
        self._longest = max(map(len, texts), default=0)
        self._held = ""

    def push(self, text: str, may_stop: bool) -> tuple[str, str | None]:
        """Take text; return what is certain, and the stop text that ended it if any."""
        if not self._texts:
            return text, None
        certain: list[str] = []
        for character in text:
            self._held += character
            match = next((t for t in self._texts if self._held.endswith(t)), None)
            if may_stop and match is not None:
                certain.append(self._held[: -len(match)])
                self._held = ""
                return "".join(certain), match
            certain.append(self._release())
        return "".join(certain), None

    def take_held(self) -> str:
        """Give out what was held back."""
        held, self._held = self._held, ""
        return held

    def _release(self) -> str:
        """Keep the longest tail that begins a stop text without completing it."""
        for start in range(max(0, len(self._held) - self._longest + 1), len(self._held)):
            tail = self._held[start:]
            if any(len(t) > len(tail) and t.startswith(tail) for t in self._texts):
                released, self._held = self._held[:start], tail
                return released
        return self.take_held()
