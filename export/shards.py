"""The safetensors files of a checkpoint: which count, what they hold, and reading from them."""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qwen_mtp.errors import CheckpointError, MissingExtraError
from qwen_mtp.fields import Fields

REPAIR = "download the checkpoint again"
_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_SAMPLE = 256  # bytes of every tensor that enter a digest


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where a tensor lies and what it is.

    Attributes:
        shard: The file.
        key: The name in that file.
        dtype: As safetensors names it, e.g. ``"BF16"``.
        shape: Of the whole tensor.
    """

    shard: Path
    key: str
    dtype: str
    shape: tuple[int, ...]


def stored_tensors(directory: Path) -> Iterator[StoredTensor]:
    """Go through everything that the checkpoint's files hold, file by file.

    An index, where there is one, says which files count; else it is ``model.safetensors`` or
    the only ``*.safetensors``.

    Raises:
        CheckpointError: If a file is missing or damaged, or the index contradicts one.
        MissingExtraError: If torch or safetensors is not installed.
    """
    if not (directory / _INDEX).exists():
        yield from _held(_only_shard(directory))
        return
    places = _weight_map(directory)
    for shard in sorted(set(places.values())):
        promised = {key for key, place in places.items() if place == shard}
        for tensor in _held(directory / shard):
            promised.discard(tensor.key)
            yield tensor
        if promised:
            raise CheckpointError(
                f"{directory / shard}: does not hold {min(promised)}, which {_INDEX} says is "
                f"there; {REPAIR}"
            )


def read_rows(tensor: StoredTensor, rows: slice) -> NDArray[np.float32]:
    """Read consecutive rows of a float tensor's first axis (or a scalar) as float32.

    The file is mapped only while this runs.

    Raises:
        CheckpointError: If the file is gone or damaged.
        MissingExtraError: If torch or safetensors is not installed.
    """
    with _opened(tensor.shard) as file:
        import torch

        stored = file.get_slice(tensor.key)[rows] if tensor.shape else file.get_tensor(tensor.key)
        out: NDArray[np.float32] = np.empty(tuple(stored.shape), np.float32)
        torch.from_numpy(out).copy_(stored)
        return out


def digest_shard(shard: Path, update: Callable[[bytes], None]) -> None:
    """Feed a hash with a file's size and header and with a few bytes of every tensor.

    Raises:
        CheckpointError: If the file is gone or damaged.
        MissingExtraError: If torch or safetensors is not installed.
    """
    with _opened(shard), shard.open("rb") as file:
        length = file.read(8)
        header = file.read(int.from_bytes(length, "little"))
        update(repr((shard.name, shard.stat().st_size)).encode() + header)
        data = file.tell()
        for key, entry in json.loads(header).items():
            if key != "__metadata__":
                begin, end = entry["data_offsets"]
                file.seek(data + (begin + end) // 2)
                update(file.read(min(_SAMPLE, end - (begin + end) // 2)))


def _only_shard(directory: Path) -> Path:
    found = sorted(directory.glob("*.safetensors"))
    if directory / _SINGLE in found:
        return directory / _SINGLE
    if not found:
        raise CheckpointError(
            f"{directory}: no *.safetensors file; take the checkpoint in safetensors format"
        )
    if len(found) > 1:
        raise CheckpointError(
            f"{directory}: {len(found)} *.safetensors files but no {_INDEX} to say which count; "
            f"{REPAIR}"
        )
    return found[0]


def _weight_map(directory: Path) -> Mapping[str, str]:
    index = Fields.of_file(directory, _INDEX)
    entries = index.section("weight_map")
    if entries is None or not entries.values:
        raise index.refusal("weight_map", "an object of tensor names and files", REPAIR)
    places: dict[str, str] = {}
    for key, shard in entries.values.items():
        if not isinstance(shard, str) or not _is_shard_name(shard):
            raise entries.refusal(key, "the name of a *.safetensors beside the index", REPAIR)
        places[key] = shard
    return places


def _is_shard_name(name: str) -> bool:
    return Path(name).name == name and name.endswith(".safetensors") and name.isprintable()


def _held(shard: Path) -> Iterator[StoredTensor]:
    with _opened(shard) as file:
        tensors = [(key, file.get_slice(key)) for key in file.keys()]  # noqa: SIM118
        held = [StoredTensor(shard, k, t.get_dtype(), tuple(t.get_shape())) for k, t in tensors]
    yield from held


@contextmanager
def _opened(shard: Path) -> Iterator[Any]:
    """Map a file for as long as the block runs; safetensors checks its header and size."""
    try:
        import torch  # noqa: F401  # safetensors takes it up by itself
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise MissingExtraError(
            f"reading a checkpoint needs {error.name}: pip install 'qwen-mtp[export]'"
        ) from error
    try:
        with safe_open(shard, framework="pt") as file:
            yield file
    except FileNotFoundError:
        raise CheckpointError(f"{shard}: no such file; {REPAIR}") from None
    except (OSError, SafetensorError) as error:
        reason = " ".join(str(error).split())
        raise CheckpointError(f"{shard}: {reason}; {_repair(shard)}") from error


def _repair(shard: Path) -> str:
    try:
        with shard.open("rb") as file:
            pointer = file.read(32).startswith(b"version https://git-lfs")
    except OSError:
        return REPAIR
    return "this is a Git LFS pointer, run git lfs pull" if pointer else REPAIR
