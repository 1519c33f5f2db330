"""Runs sessions over prompts with drafts that force a chosen number of accepted tokens."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import chain, cycle, pairwise
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from qwen_mtp.graphs.spec import GraphSpec
from qwen_mtp.runtime.costs import bucket
from qwen_mtp.runtime.engine import Engine
from qwen_mtp.runtime.lookahead import Choice, Need
from qwen_mtp.runtime.package import Package
from qwen_mtp.runtime.sampling import ResolvedSampling, SamplingParams
from qwen_mtp.runtime.session import Session, StepResult
from tests.packages import package, random_checkpoint

Floats: TypeAlias = npt.NDArray[np.float32]
KS = (1, 2, 3, 5, 7)
FORMATS = ("fp32", "int8", "int4")
LIMIT = 256
CHUNK = 16
GREEDY = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True).resolve()


@dataclass(slots=True)
class Track:
    """One request and what came of it.

    Attributes:
        prompt: Its token ids.
        drafter: Proposes drafts each round; None leaves that to the MTP head.
        sampling: Its parameters.
        slot: Where it runs or ran.
        tokens: Everything emitted.
        logits: The row that gave each token, ``[V]``.
        accepted: Accepted drafts of each round.
        drafted: Verified drafts of each round.
    """

    prompt: Sequence[int]
    drafter: "Drafter"
    sampling: ResolvedSampling = GREEDY
    slot: int = -1
    tokens: list[int] = field(default_factory=list)
    logits: list[Floats] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    drafted: list[int] = field(default_factory=list)

    def take(self, result: StepResult, rows: Floats) -> None:
        """Append what one round gave; ``rows`` are its logits ``[R, V]``."""
        self.tokens += result.tokens
        self.logits += [row.copy() for row in rows[: len(result.tokens)]]
        self.accepted.append(result.accepted)
        self.drafted.append(result.drafted)


Drafter: TypeAlias = Callable[[Track], Sequence[int] | None]


def nothing(_: Track) -> Sequence[int]:
    """No drafts: one token a round."""
    return ()


def own(_: Track) -> None:
    """The drafts of the MTP head."""
    return


@dataclass(frozen=True, slots=True)
class Want:
    """One round of a script: propose ``length`` drafts of which the first ``accept`` are right."""

    accept: int
    length: int


class Scripted:
    """Drafts from the true continuation, wrong from a chosen place on."""

    def __init__(
        self, truth: Sequence[int], script: Iterator[Want], vocabulary: int = 256
    ) -> None:
        """Follow ``script`` along the emitted tokens ``truth``; it knows no more than these."""
        self._truth, self._script, self._vocabulary = truth, script, vocabulary
        self.wanted: list[Want] = []

    def __call__(self, track: Track) -> list[int]:
        """Right tokens, then one wrong one, then right ones again: those must not count."""
        want = next(self._script)
        self.wanted.append(want)
        at = len(track.tokens)
        drafts = [*self._truth[at : at + want.length]]
        drafts += [0] * (want.length - len(drafts))
        if want.accept < want.length:
            drafts[want.accept] = (drafts[want.accept] + 1) % self._vocabulary
        return drafts


class Forced:
    """Takes the place of a session's choice: drafts by a script for each sequence in turn."""

    def __init__(self, running: Session, scripts: Iterable[Iterator[int]]) -> None:
        """Choose for ``running`` from now on; a new sequence takes the next of ``scripts``."""
        self._lookaheads = running.package.manifest.geometry.lookaheads
        self._scripts, self._live = iter(scripts), dict[int, Iterator[int]]()
        self._next: dict[int, int] = {}
        running.policy = self

    def admit(self, slot: int) -> None:
        self._live[slot] = next(self._scripts)
        self._next[slot] = next(self._live[slot])

    def choose(self, needs: Mapping[int, Need]) -> Choice:
        """What the script says; where that is nothing, rows wait as long as they fit."""
        wanted = {slot: min(self._next[slot], need.room) for slot, need in needs.items()}
        drafts = {slot: k for slot, k in wanted.items() if k or needs[slot].due}
        return Choice(drafts, bucket(self._lookaheads, max(drafts.values())) if drafts else 0)

    def observe(self, slot: int, drafted: int, accepted: int) -> None:
        self._next[slot] = next(self._live[slot])

    def measure(self, spec: GraphSpec, ms: float) -> None:
        """Costs do not count."""


def following(running: Session, truth: Track, accepts: Iterator[int]) -> Track:
    """The request of ``truth``: as many drafts as the session wants, right up to a chosen one."""
    track = Track(truth.prompt, nothing)

    def script() -> Iterator[Want]:
        for accept in accepts:
            length = running.plan().drafts.get(track.slot, 0)
            yield Want(min(accept, length), length)

    track.drafter = Scripted(truth.tokens, script(), running.package.manifest.config.vocab_size)
    return track


def every_pair(k: int) -> list[int]:
    """A cycle of ``(k + 1)^2`` counts in which every count 0..k follows every one once."""
    words = ((i, *((i, j) for j in range(i + 1, k + 1))) for i in range(k + 1))
    return [x for i, *pairs in words for x in (i, *(y for pair in pairs for y in pair))]


def counts(k: int, start: int = 0) -> Iterator[Want]:
    """The cycle of :func:`every_pair` over and over, with k drafts a round."""
    cycled = every_pair(k)
    return (Want(a, k) for a in cycle((*cycled[start:], *cycled[:start])))


def transitions(tracks: Sequence[Track]) -> set[tuple[int, int]]:
    """Accepted counts of neighbouring rounds."""
    return {pair for track in tracks for pair in pairwise(track.accepted)}


@cache
def five_lookaheads(format: str) -> Package:
    """A random model with every K of :data:`KS`, one slot, contexts up to :data:`LIMIT`.

    Quantised models have two layers: they are exported for their products alone.
    """
    few = {} if format == "fp32" else {"num_hidden_layers": 2, "full_attention_interval": 2}
    model = random_checkpoint(**few)
    return package(model, lookaheads=KS, max_model_len=LIMIT, format=format)


@cache
def _engine(directory: Any, threads: int) -> Engine:
    return Engine(Package.open(directory), threads=threads, keep_logits=True)


def session(package: Package, k: int, threads: int = 1) -> Session:
    """A session on an engine that is loaded once; all that older sessions left in it is NaN."""
    engine = _engine(package.directory, threads)
    poison_states(engine)
    return Session(package, num_speculative_tokens=k, engine=engine)


def poison_states(engine: Engine) -> None:
    """Make all state NaN but block 0, which belongs to nobody."""
    reserved = engine.package.manifest.geometry.block_size
    for (name, _), state in engine._states.items():
        pool = name.endswith((".key", ".value"))
        state[:, reserved if pool else 0 :] = np.nan


def begin(running: Session, track: Track) -> Track:
    """Prefill."""
    track.slot, token = running.prefill(track.prompt, track.sampling)
    track.tokens.append(token)
    track.logits.append(running.engine.buffer("prefill", "logits")[0, 0].copy())
    return track


def advance(running: Session, tracks: Sequence[Track]) -> Mapping[int, StepResult]:
    """One round for all of them."""
    proposals = {track.slot: track.drafter(track) for track in tracks}
    results = running.step({slot: p for slot, p in proposals.items() if p is not None})
    logits = running.engine.buffer(bucket_of(running, results), "logits")
    for track in tracks:
        track.take(results[track.slot], logits[track.slot])
    return results


def bucket_of(running: Session, results: Mapping[int, StepResult]) -> str:
    """The verify graph that gave ``results``."""
    rows = 1 + max(result.drafted for result in results.values())
    buckets = running.package.manifest.geometry.row_buckets
    return f"target_verify_r{min(b for b in buckets if b >= rows)}"


def solo(
    running: Session,
    prompt: Sequence[int],
    drafter: Drafter,
    length: int,
    sampling: ResolvedSampling = GREEDY,
) -> Track:
    """Run one request alone until it has at least ``length`` tokens."""
    track = begin(running, Track(prompt, drafter, sampling))
    while len(track.tokens) < length:
        advance(running, [track])
    running.release(track.slot)
    return track


def scripted(
    running: Session,
    truths: Sequence[Track],
    length: int,
    script: Iterator[Want],
    vocabulary: int = 256,
) -> list[Track]:
    """Run the requests of ``truths`` one after the other under one ``script``.

    A request starts with the last round of the one before, so that no transition of the script
    falls between two requests. The forced counts must be the ones that come out.
    """
    tracks: list[Track] = []
    again: list[Want] = []
    for truth in truths:
        drafter = Scripted(truth.tokens, chain(again, script), vocabulary)
        tracks.append(solo(running, truth.prompt, drafter, length))
        again = drafter.wanted[-1:]
        wanted = [want.accept for want in drafter.wanted]
        assert tracks[-1].accepted == wanted, "a forced count did not come out"
    return tracks


def differences(truth: Track, track: Track, length: int) -> list[str]:
    """Where the first ``length`` tokens and the bits of their logits differ; at most one line."""
    if min(len(truth.tokens), len(track.tokens)) < length:
        return [f"{len(track.tokens)} and {len(truth.tokens)} tokens, wanted {length}"]
    for i, (mine, theirs) in enumerate(zip(truth.logits, track.logits, strict=False)):
        if i == length:
            break
        if truth.tokens[i] != track.tokens[i]:
            return [f"token {i} is {track.tokens[i]}, plain decoding says {truth.tokens[i]}"]
        if not same_bits(mine, theirs):
            return [f"logits of token {i} differ by {np.abs(mine - theirs).max():.1e}"]
    return []


def same_bits(a: Floats, b: Floats) -> bool:
    """Equal shapes and equal bits: -0.0 is not 0.0, a NaN is itself."""
    return a.shape == b.shape and np.array_equal(a.view(np.uint32), b.view(np.uint32))


def random_prompts(
    lengths: Sequence[int], vocabulary: int = 256, seed: int = 0
) -> list[list[int]]:
    """Random ids."""
    draw = np.random.default_rng(seed)
    return [draw.integers(0, vocabulary, length).tolist() for length in lengths]
