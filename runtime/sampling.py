"""What one request asks of the sampler: vLLM's names, checked when made, concrete when run."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields
from difflib import get_close_matches
from numbers import Integral, Real
from typing import Protocol, Self, TypeVar

from qwen_mtp.errors import RequestError
from qwen_mtp.runtime.randomness import SEEDS, fresh_seed

_T = TypeVar("_T")

GREEDY_BELOW = 1e-5
"""A temperature below this is greedy decoding."""

# Names other engines take. They are refused by name: a parameter must never be ignored in silence.
_NOT_YET = (
    "allowed_token_ids bad_words best_of detokenize extra_args flat_logprobs frequency_penalty "
    "guided_decoding include_stop_str_in_output logit_bias logits_processors logprob_token_ids "
    "logprobs min_p n output_kind presence_penalty prompt_logprobs repetition_penalty "
    "skip_special_tokens spaces_between_special_tokens structured_outputs thinking_token_budget "
    "truncate_prompt_tokens"
)


class SamplingDefaults(Protocol):
    """What a package's generation defaults must offer; None leaves that knob neutral."""

    @property
    def temperature(self) -> float | None:
        """Softmax temperature."""

    @property
    def top_k(self) -> int | None:
        """Number of tokens kept; 0 or -1 keeps all."""

    @property
    def top_p(self) -> float | None:
        """Probability mass kept; 1 keeps all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationDefaults:
    """Sampling defaults of one package; None leaves that knob neutral."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedSampling:
    """A request's sampling with every choice made.

    Attributes:
        temperature: Softmax temperature; exactly 0.0 when greedy.
        top_k: Number of tokens kept; 0 keeps all.
        top_p: Probability mass kept, in (0, 1]; 1 keeps all.
        seed: Key of the request's uniforms, 0..2^64-1.
        max_tokens: Most tokens emitted; None stops only at the end of the context.
        stop: Texts that end the request.
        stop_token_ids: Tokens that end the request, besides the end-of-sequence ids.
        ignore_eos: End-of-sequence ids do not end the request.
        min_tokens: The first so many tokens never end the request early.
    """

    temperature: float
    top_k: int
    top_p: float
    seed: int
    max_tokens: int | None
    stop: tuple[str, ...]
    stop_token_ids: frozenset[int]
    ignore_eos: bool
    min_tokens: int

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken, ties to the lowest id."""
        return self.temperature == 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to sample one request; keywords only.

    Attributes:
        temperature: Softmax temperature; 0 is greedy. None takes the package's default.
        top_k: Keep the k likeliest tokens; 0 or -1 keeps all. None takes the package's default.
        top_p: Keep the likeliest tokens up to this mass. None takes the package's default.
        seed: 0..2^64-1; the same seed repeats the text. None draws one, reported in the output.
        max_tokens: Most tokens emitted; None goes on to the end of the context.
        stop: A text, or several, that ends the request and is cut from the output.
        stop_token_ids: Tokens that end the request, besides the end-of-sequence ids.
        ignore_eos: Go on after end-of-sequence ids.
        min_tokens: The first so many tokens never end the request early.

    Raises:
        RequestError: If a value is outside its range.
        TypeError: If a keyword is unknown or not supported yet.
    """

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None
    max_tokens: int | None = 16
    stop: str | list[str] | tuple[str, ...] | None = None
    stop_token_ids: list[int] | tuple[int, ...] | None = None
    ignore_eos: bool = False
    min_tokens: int = 0

    def __new__(cls, *args: object, **keywords: object) -> Self:
        """Refuse unknown keywords with a hint, before the generated ``__init__`` would without."""
        for name in keywords:
            _check_keyword(name, [field.name for field in fields(cls)])
        return object.__new__(cls)

    def __post_init__(self) -> None:
        """Check every value and store it in one form: float, int, tuple."""
        _store(self, "temperature", _temperature(self.temperature))
        _store(self, "top_k", _integer("top_k", self.top_k, -1, "0 or -1 keeps all"))
        _store(self, "top_p", _top_p(self.top_p))
        _store(self, "seed", _seed(self.seed))
        _store(self, "max_tokens", _integer("max_tokens", self.max_tokens, 1, "None = no limit"))
        _store(self, "stop", _stop_texts(self.stop))
        _store(self, "stop_token_ids", _stop_ids(self.stop_token_ids))
        _store(self, "min_tokens", _integer("min_tokens", self.min_tokens, 0, "0 = off"))
        if not isinstance(self.ignore_eos, bool):
            raise RequestError(f"ignore_eos is {self.ignore_eos!r}: give True or False")
        if self.min_tokens is None:
            raise RequestError("min_tokens is None: give an integer >= 0 (0 = off)")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens is {self.min_tokens}, above max_tokens {self.max_tokens}: lower it"
            )

    def resolve(self, defaults: SamplingDefaults | None = None) -> ResolvedSampling:
        """Make every choice: package defaults for what is None, a fresh seed, greedy as 0.0.

        Args:
            defaults: The package's generation defaults; None means neutral ones (1, all, 1).
        """
        package = GenerationDefaults() if defaults is None else defaults
        temperature = _first(self.temperature, package.temperature, 1.0)
        greedy = temperature < GREEDY_BELOW
        return ResolvedSampling(
            temperature=0.0 if greedy else temperature,
            top_k=0 if greedy else max(_first(self.top_k, package.top_k, 0), 0),
            top_p=1.0 if greedy else _first(self.top_p, package.top_p, 1.0),
            seed=fresh_seed() if self.seed is None else self.seed,
            max_tokens=self.max_tokens,
            stop=tuple(self.stop or ()),
            stop_token_ids=frozenset(self.stop_token_ids or ()),
            ignore_eos=self.ignore_eos,
            min_tokens=self.min_tokens,
        )


def _first(own: _T | None, package: _T | None, neutral: _T) -> _T:
    if own is not None:
        return own
    return neutral if package is None else package


def _store(params: SamplingParams, name: str, value: object) -> None:
    object.__setattr__(params, name, value)


def _check_keyword(name: str, known: list[str]) -> None:
    if name in known:
        return
    if name in _NOT_YET.split():
        raise TypeError(f"SamplingParams: {name!r} is not supported yet; leave it out")
    near = get_close_matches(name, [*known, *_NOT_YET.split()], n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
    raise TypeError(f"SamplingParams got an unknown keyword {name!r}; {hint}")


def _number(name: str, value: object, need: str) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise RequestError(f"{name} is {value!r}: give {need}")
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _temperature(value: object) -> float | None:
    if value is None:
        return None
    need = "a finite number >= 0 (0 = greedy)"
    number = _number("temperature", value, need)
    if not (math.isfinite(number) and number >= 0):
        raise RequestError(f"temperature is {number}: give {need}")
    return number


def _top_p(value: object) -> float | None:
    if value is None:
        return None
    need = "a number above 0 and at most 1 (1 keeps all)"
    number = _number("top_p", value, need)
    if not 0 < number <= 1:
        raise RequestError(f"top_p is {number}: give {need}")
    return number


def _integer(name: str, value: object, least: int, meaning: str) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, Integral) or int(value) < least:
        raise RequestError(f"{name} is {value!r}: give an integer >= {least} ({meaning})")
    return int(value)


def _seed(value: object) -> int | None:
    seed = _integer("seed", value, 0, "below 2^64")
    if seed is not None and seed >= SEEDS:
        raise RequestError(f"seed is {seed}: give an integer from 0 to 2^64-1")
    return seed


def _stop_texts(value: object) -> tuple[str, ...]:
    texts = (value,) if isinstance(value, str) else _items("stop", value)
    for text in texts:
        if not isinstance(text, str) or not text:
            raise RequestError(f"stop holds {text!r}: give non-empty strings")
    return tuple(str(text) for text in texts)


def _stop_ids(value: object) -> tuple[int, ...]:
    ids = [_integer("stop_token_ids", i, 0, "each one") for i in _items("stop_token_ids", value)]
    if None in ids:
        raise RequestError("stop_token_ids holds None: give token ids")
    return tuple(i for i in ids if i is not None)


def _items(name: str, value: object) -> tuple[object, ...]:
    if value is None:
        return ()
    if not isinstance(value, Iterable) or isinstance(value, str | bytes):
        raise RequestError(f"{name} is {value!r}: give a list")
    return tuple(value)
