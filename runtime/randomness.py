"""Uniform numbers that depend on (seed, position, purpose) and on nothing else.

The generator is counter based: there is no state to advance, so a request draws the same numbers
whatever else is in its batch and however its rounds were cut. One draw is one Philox-4x32 block
with 10 rounds (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011):

    key     = (seed low word, seed high word)
    counter = (position low word, position high word, purpose, 0)
    uniform = (first output word >> 8) * 2^-24

The last counter word and the other three output words are free for later purposes that need more
than one number a position.
"""

import secrets
from enum import IntEnum

import numpy as np
import numpy.typing as npt

SEEDS = 2**64
"""Seeds are integers from 0 to this, exclusive."""

_WORD = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_ROUNDS = 10


class Purpose(IntEnum):
    """What a uniform is for. The values are part of the stream: never renumber them."""

    ACCEPT = 0
    """Whether the draft at this position is accepted."""
    PICK = 1
    """Which token the target emits at this position."""
    DRAFT = 2
    """Which token the drafter proposes for this position."""


def uniforms(
    seed: int | npt.NDArray[np.uint64], positions: npt.NDArray[np.int64], purpose: Purpose
) -> npt.NDArray[np.float32]:
    """Draw one uniform for each position.

    A call costs about the same for 1 number and for 100: ask once for a whole batch, with
    ``seed`` [B, 1] and ``positions`` [B, R].

    Args:
        seed: 0..2^64-1, or uint64 that broadcasts against ``positions``.
        positions: int64, any shape, >= 0: index in the sequence of the token decided.
        purpose: What the numbers are for; purposes are independent streams.

    Returns:
        float32 of the broadcast shape, in [0, 1), multiples of 2^-24.
    """
    places = np.asarray(positions, np.uint64)
    zeros = np.zeros_like(places)
    counter = (places & _WORD, places >> _HALF, zeros + np.uint64(purpose), zeros)
    word = philox(counter, seed)[0]
    return ((word >> np.uint64(8)).astype(np.float32) * np.float32(2.0**-24)).astype(np.float32)


def philox(
    counter: tuple[npt.NDArray[np.uint64], ...], seed: int | npt.NDArray[np.uint64]
) -> tuple[npt.NDArray[np.uint64], ...]:
    """Mix four 32-bit counter words under a 64-bit key with Philox-4x32-10.

    Args:
        counter: Four uint64 arrays of one shape, each below 2^32.
        seed: The key, 0..2^64-1, or uint64 keys that broadcast against the counter.

    Returns:
        Four uint64 arrays of the broadcast shape, each below 2^32.
    """
    c0, c1, c2, c3 = counter
    key = np.asarray(seed, np.uint64)
    low, high = key & _WORD, key >> _HALF
    for _ in range(_ROUNDS):
        p0, p2 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            (p2 >> _HALF) ^ c1 ^ low,
            p2 & _WORD,
            (p0 >> _HALF) ^ c3 ^ high,
            p0 & _WORD,
        )
        low, high = (low + _WEYL[0]) & _WORD, (high + _WEYL[1]) & _WORD
    return c0, c1, c2, c3


def fresh_seed() -> int:
    """Draw a seed for a request that brought none, from the operating system.

    Below 2^53, so that it survives a trip through JSON numbers and can be sent back.
    """
    return secrets.randbits(53)
