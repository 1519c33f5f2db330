"""Bytes that a pass has to move, by the manifest of the package."""

import math

from qwen_mtp.bench.report import Traffic
from qwen_mtp.graphs.manifest import PackageManifest
from qwen_mtp.graphs.weights import StoredTensor

_TABLE = "target.vocabulary.table."  # read by the row
_PREFILLED = ("mtp.fc.", "mtp.attention.qkv.")  # what a row of a prompt passes of the drafter


def plain_traffic(manifest: PackageManifest, context: int) -> Traffic:
    """What one plain token at a context reads, and of the state, writes.

    A tied head is stored once under two names where the format allows it, and counts once.
    """
    read = {
        tensor.offset: tensor.nbytes
        for tensor in manifest.weights
        if tensor.name.startswith("target.") and not tensor.name.startswith(_TABLE)
    }
    slots = manifest.geometry.max_num_seqs
    held = sum(s.nbytes for s in manifest.states if s.kind in ("conv", "ssm", "stash")) // slots
    return Traffic(weights=sum(read.values()), kv=kv_bytes(manifest, context), state=2 * held)


def kv_bytes(manifest: PackageManifest, context: int) -> int:
    """Keys and values of the target's layers over ``context`` positions."""
    pools = sum(state.nbytes for state in manifest.states if state.kind == "kv")
    geometry = manifest.geometry
    return pools * context // (geometry.num_blocks * geometry.block_size)


def mtp_share(manifest: PackageManifest) -> float:
    """Share of the multiply-adds of a prompt's rows that fill the drafter's cache.

    The head is left out: a chunk has one row of logits, whatever its length.
    """
    matrices = [t for t in manifest.weights if t.name.endswith(".weight") and len(t.shape) > 1]
    drafter = sum(_values(t) for t in matrices if t.name.startswith(_PREFILLED))
    target = sum(_values(t) for t in matrices if t.name.startswith("target.layers."))
    return drafter / (drafter + target)


def _values(tensor: StoredTensor) -> int:
    """Weights in a stored matrix; a byte without sign holds two."""
    return math.prod(tensor.shape) * (2 if tensor.dtype == "uint8" else 1)
