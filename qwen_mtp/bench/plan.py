"""What is to be measured: choices, refused before anything is loaded, and their defaults."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from qwen_mtp.errors import MissingExtraError, PackageError, RequestError
from qwen_mtp.graphs.manifest import PackageManifest
from qwen_mtp.runtime.limits import check_request
from qwen_mtp.runtime.package import Package
from qwen_mtp.runtime.sampling import SamplingParams
from qwen_mtp.runtime.text import Text

ACCEPTANCES = (0.0, 0.6, 0.8, 1.0)
CONTEXT = 256
TOKENS = 48
LEAST = 4  # positions: a prompt and some passes
# Continued when no prompt is given; repeated or cut to the length of the context.
TEXT = '''"""Reads records from a text file, one a line, and sums them up by name."""

from collections import defaultdict
from pathlib import Path


class Ledger:
    """Amounts by name, in the order in which the names were first seen."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.amounts: dict[str, float] = defaultdict(float)

    def read(self) -> None:
        """Add every line of the file: a name, a comma, an amount."""
        with open(self.path, encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                name, _, amount = line.partition(",")
                if not amount:
                    raise ValueError(f"{self.path}, line {number}: no comma")
                self.amounts[name.strip()] += float(amount)

    def largest(self, count: int) -> list[str]:
        """The names with the largest amounts, the largest first."""
        ordered = sorted(self.amounts, key=self.amounts.__getitem__, reverse=True)
        return ordered[:count]


def main() -> None:
    ledger = Ledger(Path("ledger.csv"))
    ledger.read()
    for name in ledger.largest(10):
        print(f"{name:<20}{ledger.amounts[name]:>12.2f}")
'''


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions:
    """What may be chosen.

    Attributes:
        prompt: Text or token ids to continue; None takes a text of our own.
        source: What to call the prompt in a report or an error.
        lookaheads: Drafts a round to measure beside plain decoding; None takes those the package
            was exported for.
        acceptances: Probabilities of scripted drafts.
        contexts: Lengths to measure passes at, the first for everything else; None takes 256 and
            longer ones.
        threads: Threads inside an operator; None takes the number of usable cores.
        tokens: Tokens a run generates; None takes 48, or what fits.
        repeat: Runs of each kind.
        native: Run on the native kernels, or not; None takes what a run would take.
    """

    prompt: str | Sequence[int] | None = None
    source: str = "the prompt"
    lookaheads: tuple[int, ...] | None = None
    acceptances: tuple[float, ...] = ACCEPTANCES
    contexts: tuple[int, ...] | None = None
    threads: int | None = None
    tokens: int | None = None
    repeat: int = 3
    native: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchPlan:
    """What will be measured: every choice made and found possible.

    Attributes:
        prompt: Token ids.
        source: Where they came from.
        lookaheads: Drafts a round, 0 first.
        acceptances: Probabilities, ascending.
        contexts: Lengths, ascending.
        context: The one for single passes.
        prefills: Lengths of prompts, ascending.
        tokens: Tokens a run generates.
        repeat: Runs of each kind.
    """

    prompt: tuple[int, ...]
    source: str
    lookaheads: tuple[int, ...]
    acceptances: tuple[float, ...]
    contexts: tuple[int, ...]
    context: int
    prefills: tuple[int, ...]
    tokens: int
    repeat: int

    @property
    def rounds(self) -> int:
        """Rounds of single passes, which are short."""
        return 10 * self.repeat


def plan_bench(package: Package, options: BenchOptions) -> BenchPlan:
    """Settle what to measure.

    Raises:
        MissingExtraError: The prompt is a text and the extra ``text`` is not installed.
        PackageError: The prompt is a text and the package has no usable tokenizer.
        RequestError: The package is for Ascend, or cannot do what is asked.
    """
    manifest = package.manifest
    if manifest.backend != "onnxruntime":
        raise RequestError(
            f"{package.directory}: bench measures ONNX Runtime on the CPU and this package is for "
            "an Ascend device; export with --target onnx, or see qwen-mtp run --json on a device"
        )
    limit, chunk = manifest.geometry.max_model_len, manifest.geometry.prefill_chunk
    contexts = _contexts(manifest, options.contexts)
    tokens = min(TOKENS, limit // 2) if options.tokens is None else options.tokens
    prompt, source = _prompt(package, options, max(1, min(contexts[0], limit - tokens)))
    _check_room(manifest, prompt, tokens, source)
    return BenchPlan(
        prompt=prompt,
        source=source,
        lookaheads=_lookaheads(package, options.lookaheads),
        acceptances=tuple(sorted(set(options.acceptances))),
        contexts=tuple(sorted(set(contexts))),
        context=contexts[0],
        prefills=tuple(
            sorted({n for n in (-(-chunk // 2), chunk, 512) if n < limit} | {min(limit - 1, 512)})
        ),
        tokens=tokens,
        repeat=options.repeat,
    )


def _lookaheads(package: Package, asked: tuple[int, ...] | None) -> tuple[int, ...]:
    exported = package.manifest.geometry.lookaheads
    most = package.max_lookahead
    for k in asked or ():
        if k > most:
            remedy = (
                f"the package allows 0..{most}; export again with a larger -k"
                if most
                else "the package has no MTP head; export it without --no-mtp"
            )
            raise RequestError(f"num_speculative_tokens holds {k}, {remedy}")
    return tuple(sorted({0, *(exported if asked is None else asked)}))


def _contexts(manifest: PackageManifest, asked: tuple[int, ...] | None) -> tuple[int, ...]:
    """Those that are asked for; else 256, four times as long and so on, and the longest."""
    limit = manifest.geometry.max_model_len
    most = limit - manifest.geometry.max_rows
    if limit < LEAST:
        raise RequestError(
            f"max_model_len is {limit}: bench needs {LEAST} positions; export with a larger "
            "--max-model-len"
        )
    for context in asked or ():
        if not 1 <= context <= most:
            raise RequestError(
                f"context holds {context}: with max_model_len {limit} it may be 1..{most}; "
                "or export with a larger --max-model-len"
            )
    if asked:
        return asked
    found = [max(1, min(CONTEXT, limit // 2, most))]
    while 8 * found[-1] <= most:
        found.append(4 * found[-1])
    return tuple(dict.fromkeys((*found, max(1, most))))


def _prompt(package: Package, options: BenchOptions, length: int) -> tuple[tuple[int, ...], str]:
    """Token ids to continue, and what to call them; a prompt of our own has ``length`` ids."""
    given = options.prompt
    if isinstance(given, str):
        return tuple(Text(package.directory).encode(given)), options.source
    if given is not None:
        return tuple(given), options.source
    try:
        ids = Text(package.directory).encode(TEXT)
    except (MissingExtraError, PackageError):
        vocabulary = package.manifest.config.vocab_size
        drawn = np.random.default_rng(0).integers(0, vocabulary, length)
        return tuple(drawn.tolist()), "random ids"
    repeated = [ids[i % len(ids)] for i in range(length)]
    return tuple(repeated), "a Python source of its own"


def _check_room(
    manifest: PackageManifest, prompt: Sequence[int], tokens: int, source: str
) -> None:
    limit = manifest.geometry.max_model_len
    if len(prompt) + tokens > limit:
        raise RequestError(
            f"{source}: {len(prompt)} tokens and {tokens} that follow are more than max_model_len "
            f"{limit}; shorten it, give fewer --tokens, or export with a larger --max-model-len"
        )
    try:
        check_request(manifest, prompt, SamplingParams(temperature=0).resolve())
    except RequestError as error:
        raise RequestError(f"{source}: {error}") from error
