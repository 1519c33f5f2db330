"""What a package can serve: refused before anything runs, with the remedy."""

from collections.abc import Collection, Mapping, Sequence

import numpy as np

from qwen_mtp.errors import RequestError
from qwen_mtp.graphs.manifest import PackageManifest
from qwen_mtp.graphs.spec import STOP_IDS, Geometry
from qwen_mtp.runtime.feeds import LiveSequence
from qwen_mtp.runtime.sampling import ResolvedSampling


def chosen_lookahead(geometry: Geometry, asked: int | None) -> int:
    """Most drafts a round, of those that a package was exported for; None takes all.

    Raises:
        RequestError: More are asked for, or fewer than none.
    """
    most = max(geometry.lookaheads, default=0)
    chosen = most if asked is None else asked
    if not 0 <= chosen <= most:
        remedy = (
            f"the package allows 0..{most}; export again with a larger -k"
            if most
            else "the package has no MTP head; export it without --no-mtp"
        )
        raise RequestError(f"num_speculative_tokens is {chosen}, {remedy}")
    return chosen


def check_request(
    manifest: PackageManifest, prompt: Sequence[int], sampling: ResolvedSampling
) -> None:
    """Refuse a prompt or stop ids that the package could not serve.

    Raises:
        RequestError: The prompt is empty, too long or holds an unknown id; a stop id is unknown;
            ``min_tokens`` has to ban more ids than the graphs take.
    """
    banned_ids(manifest, sampling)
    longest, vocabulary = manifest.geometry.max_model_len - 1, manifest.config.vocab_size
    if not prompt:
        raise RequestError("the prompt is empty: give at least one token")
    if len(prompt) > longest:
        raise RequestError(
            f"the prompt has {len(prompt)} tokens, the package takes up to {longest}; "
            "shorten it, or export with a larger --max-model-len"
        )
    for token in sampling.stop_token_ids:
        if token >= vocabulary:
            raise RequestError(f"stop_token_ids holds {token}: ids go from 0 to {vocabulary - 1}")
    for place, token in enumerate(prompt):
        if not isinstance(token, int | np.integer) or not 0 <= token < vocabulary:
            raise RequestError(
                f"prompt token {place} is {token!r}: ids go from 0 to {vocabulary - 1}"
            )


def banned_ids(manifest: PackageManifest, sampling: ResolvedSampling) -> tuple[int, ...]:
    """Ids that may not be emitted before ``min_tokens``; none where it is 0.

    Raises:
        RequestError: There are more than the graphs take.
    """
    if sampling.min_tokens == 0:
        return ()
    eos = () if sampling.ignore_eos else manifest.config.eos_token_ids
    banned = tuple(sorted({*eos, *sampling.stop_token_ids}))
    if len(banned) > STOP_IDS:
        raise RequestError(
            f"min_tokens with {len(banned)} stop ids: at most {STOP_IDS}; give fewer"
        )
    return banned


def check_room(manifest: PackageManifest, sequences: Mapping[int, LiveSequence]) -> None:
    """Refuse a round that would run past the end of a slot's context.

    Raises:
        RequestError: A slot is full.
    """
    limit = manifest.geometry.max_model_len
    for slot, sequence in sequences.items():
        if sequence.computed + 1 >= limit:
            raise RequestError(
                f"slot {slot}: the context is full at {limit} positions; release it"
            )


def check_drafts(
    manifest: PackageManifest,
    drafts: Mapping[int, Sequence[int]],
    occupied: Collection[int],
    lookahead: int,
) -> None:
    """Refuse proposals that no verify graph could take.

    Raises:
        RequestError: For a slot without a sequence, too many drafts or an unknown id.
    """
    vocabulary = manifest.config.vocab_size
    for slot, ids in drafts.items():
        if slot not in occupied:
            raise RequestError(f"slot {slot} holds no sequence: prefill it first")
        if len(ids) > lookahead:
            raise RequestError(f"slot {slot}: {len(ids)} drafts, the session takes {lookahead}")
        if any(not -1 <= token < vocabulary for token in ids):
            raise RequestError(
                f"slot {slot}: draft ids go from 0 to {vocabulary - 1}, -1 for none"
            )
