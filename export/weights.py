"""Writes the weight file, tensor by tensor: peak memory is about one tensor."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qwen_mtp.custom_ops.linear import BLOCK, quantize_int4, quantize_int8
from qwen_mtp.custom_ops.linear_npu import pack_int4_npu
from qwen_mtp.errors import CheckpointError
from qwen_mtp.export.checkpoint import Checkpoint
from qwen_mtp.graphs.weights import Source, StoredTensor, WeightGroup

Floats = NDArray[np.float32]
Progress = Callable[[int], None]
CHUNK_VALUES = 1 << 23  # float32 values in memory at a time, per copy


def check_sources(checkpoint: Checkpoint, groups: Sequence[WeightGroup]) -> None:
    """Refuse, by headers alone, sources that cannot become the stored tensors.

    Raises:
        CheckpointError: A source is missing, has the wrong shape or dtype, or a width that its
            format cannot hold.
    """
    for group in groups:
        for source in group.sources:
            checkpoint.require(source.key, source.shape)
            if group.format in ("int4", "int4_npu") and source.shape[-1] % BLOCK:
                raise CheckpointError(
                    f"{checkpoint.directory}: {source.key} has {source.shape[-1]} columns, int4 "
                    f"needs a multiple of {BLOCK}; use --format int8"
                )


def write_weights(
    place: Callable[[StoredTensor], Path],
    checkpoint: Checkpoint,
    groups: Sequence[WeightGroup],
    stored: Sequence[StoredTensor],
    progress: Progress,
) -> None:
    """Write every stored tensor at its offset in its file, raw and little-endian.

    Args:
        place: The file of a tensor; it is created.
        checkpoint: Where the sources are read.
        groups: Which sources make which stored tensors.
        stored: Their places.
        progress: Called with the bytes of each group once it is written.

    Raises:
        CheckpointError: A source is missing, has the wrong shape, holds a NaN or infinity, or a
            value that its format cannot hold.
        OSError: A file cannot be written; the caller names the remedy.
    """
    places = {tensor.name: tensor for tensor in stored}
    sizes: dict[Path, int] = {}
    for tensor in stored:
        path = place(tensor)
        sizes[path] = max(sizes.get(path, 0), tensor.offset + tensor.nbytes)
    for path, size in sizes.items():
        with open(path, "wb") as file:
            file.truncate(size)
    for group in groups:
        targets = [places[name] for name in group.params]
        for tensor, offset, data in _encode(checkpoint, group, targets):
            with open(place(tensor), "r+b") as file:
                _put(file.fileno(), data, tensor.offset + offset)
        progress(sum(t.nbytes for t in targets))


def load_weights(
    checkpoint: Checkpoint, groups: Sequence[WeightGroup], stored: Sequence[StoredTensor]
) -> Mapping[str, NDArray[Any]]:
    """All stored tensors in memory, by name; for small models in checks and tests.

    A bfloat16 tensor comes as its bits, uint16.
    """
    places = {tensor.name: tensor for tensor in stored}
    held = {name: bytearray(places[name].nbytes) for group in groups for name in group.params}
    for group in groups:
        for tensor, offset, data in _encode(checkpoint, group, [places[n] for n in group.params]):
            held[tensor.name][offset : offset + data.nbytes] = data.tobytes()
    return {
        name: np.frombuffer(data, dtype=_HOST.get(places[name].dtype, places[name].dtype)).reshape(
            places[name].shape
        )
        for name, data in held.items()
    }


def _int8_rows(data: Floats) -> tuple[NDArray[Any], ...]:
    values, scales = quantize_int8(data)
    return values.T, scales


def bfloat16_bits(data: Floats) -> NDArray[np.uint16]:
    """Round finite float32 to bfloat16, ties to even; NumPy has no such type."""
    bits = data.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def _narrow(data: Floats, dtype: str, name: str) -> NDArray[Any]:
    """``data`` in the type of a stored tensor that is not quantised."""
    if dtype == "bfloat16":
        return bfloat16_bits(np.ascontiguousarray(data))
    with np.errstate(over="ignore"):
        narrow = data.astype(dtype)
    if not np.isfinite(narrow).all():
        raise CheckpointError(
            f"{name} holds {np.abs(data).max():.3g}, more than {dtype} can; export as bf16 or fp32"
        )
    return narrow


_HOST = {"bfloat16": "uint16"}
_QUANTIZERS: Mapping[str, Callable[[Floats], tuple[NDArray[Any], ...]]] = {
    "int8": _int8_rows,
    "int4": quantize_int4,
}
Piece = tuple[StoredTensor, int, NDArray[Any]]


def _encode(
    checkpoint: Checkpoint, group: WeightGroup, targets: Sequence[StoredTensor]
) -> Iterator[Piece]:
    """Pieces (tensor, byte offset inside it, data) of a group, in row chunks."""
    if group.recipe in ("matrix", "table", "rows"):
        yield from _matrix(checkpoint, group, targets)
        return
    if group.recipe == "ids":
        yield targets[0], 0, np.array(group.rows, np.int32)
        return
    (source,) = group.sources
    data = _read(checkpoint, source, slice(None))
    if group.recipe == "one_plus":
        data = data + np.float32(1)
    elif group.recipe == "minus_exp":
        data = -np.exp(data)
    yield targets[0], 0, _narrow(data, targets[0].dtype, source.key)


def _matrix(
    checkpoint: Checkpoint, group: WeightGroup, targets: Sequence[StoredTensor]
) -> Iterator[Piece]:
    if group.format == "int8_npu":
        yield from _matrix_int8(checkpoint, group, targets)
        return
    if group.format == "int4_npu":
        yield from _matrix_int4_npu(checkpoint, group, targets)
        return
    quantise = _QUANTIZERS.get(group.format)
    row = 0
    for data in _chunks(checkpoint, group):
        if quantise is None:
            parts: tuple[NDArray[Any], ...]
            parts = (_narrow(data, targets[0].dtype, group.sources[0].key),)
        else:
            parts = quantise(data)
        for tensor, part in zip(targets, parts, strict=True):
            yield tensor, row * part[0].nbytes, part
        row += len(data)


def _matrix_int8(
    checkpoint: Checkpoint, group: WeightGroup, targets: Sequence[StoredTensor]
) -> Iterator[Piece]:
    """The kernel wants ``[K, N]``, the checkpoint has ``[N, K]``: one tensor is held whole."""
    values = np.empty(targets[0].shape, dtype=np.int8)
    scales = np.empty(targets[1].shape, dtype=np.float32)
    row = 0
    for data in _chunks(checkpoint, group):
        part = slice(row, row + len(data))
        values[:, part], scales[part] = quantize_int8(data)
        row += len(data)
    yield targets[0], 0, values
    yield targets[1], 0, scales


def _matrix_int4_npu(
    checkpoint: Checkpoint, group: WeightGroup, targets: Sequence[StoredTensor]
) -> Iterator[Piece]:
    """The kernel reads along the outputs: one tensor is held whole, in 4 bits."""
    halves = [quantize_int4(data) for data in _chunks(checkpoint, group)]
    packed, scale = (np.concatenate(part) for part in zip(*halves, strict=True))
    values, scales = pack_int4_npu(packed, scale)
    yield targets[0], 0, values
    yield targets[1], 0, np.asarray(scales, np.float32)


def _chunks(checkpoint: Checkpoint, group: WeightGroup) -> Iterator[Floats]:
    kept = np.array(group.rows, np.int64)
    for source in group.sources:
        rows, width = source.shape
        step = max(1, CHUNK_VALUES // width)
        for start in range(0, rows, step):
            if group.recipe != "rows":
                yield _read(checkpoint, source, slice(start, start + step))
                continue
            chosen = kept[(kept >= start) & (kept < start + step)]
            if len(chosen):
                part = slice(int(chosen[0]), int(chosen[-1]) + 1)
                yield _read(checkpoint, source, part)[chosen - chosen[0]]


def _read(checkpoint: Checkpoint, source: Source, rows: slice) -> Floats:
    data = checkpoint.read(source.key, source.shape, rows)
    if not np.isfinite(data).all():
        raise CheckpointError(
            f"{source.key} holds a NaN or an infinity; download the checkpoint again"
        )
    return data


def _put(file: int, data: NDArray[Any], offset: int) -> None:
    view = np.ascontiguousarray(data).reshape(-1).view(np.uint8).data
    while view:
        written = os.pwrite(file, view, offset)
        view, offset = view[written:], offset + written
