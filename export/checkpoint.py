"""The tensors of a Hugging Face checkpoint directory, read one at a time by canonical name."""

import hashlib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

from qwen_mtp.config import ModelConfig
from qwen_mtp.errors import CheckpointError
from qwen_mtp.export.shards import (
    REPAIR,
    StoredTensor,
    digest_shard,
    read_rows,
    stored_tensors,
)

_READABLE = ("BF16", "F16", "F32")
_HEAD = "lm_head.weight"
_EMBEDDING = "embed_tokens.weight"
_COMPARED_ROWS = 4096
_LISTED = 5


@dataclass(frozen=True, slots=True, eq=False)
class Checkpoint:
    """A checkpoint whose tensors are read on demand; no file stays open or mapped.

    Names are canonical, whatever prefix the files use: ``embed_tokens.weight``,
    ``layers.3.self_attn.q_proj.weight``, ``norm.weight``, ``lm_head.weight``, ``mtp.fc.weight``.

    Attributes:
        directory: The checkpoint directory.
        config: Its sizes.
        ignored: Keys of the vision tower, which is not exported; sorted.
    """

    directory: Path
    config: ModelConfig
    ignored: tuple[str, ...]
    _tensors: Mapping[str, StoredTensor]

    @classmethod
    def open(cls, directory: str | PathLike[str]) -> Self:
        """Read the configuration and the names, dtypes and shapes of all tensors.

        Raises:
            CheckpointError: If a file is missing, damaged or contradicts another one, or the
                model is one that cannot be exported.
            MissingExtraError: If torch or safetensors is not installed.
        """
        root = Path(directory)
        config = ModelConfig.from_checkpoint(root)
        tensors: dict[str, StoredTensor] = {}
        ignored: list[str] = []
        for tensor in stored_tensors(root):
            name = _canonical(tensor.key)
            if name is None:
                ignored.append(tensor.key)
                continue
            if name in tensors:
                raise _stored_twice(name, tensors[name], tensor)
            _refuse_converted(tensor, config)
            tensors[name] = tensor
        return cls(root, config, tuple(sorted(ignored)), tensors)

    @property
    def names(self) -> frozenset[str]:
        """The canonical names of all tensors that are not ignored."""
        return frozenset(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """The stored shape of a tensor.

        Raises:
            CheckpointError: If there is no such tensor.
        """
        return self._tensor(name).shape

    def dtype(self, name: str) -> str:
        """The stored dtype of a tensor as safetensors names it, e.g. ``"BF16"``.

        Raises:
            CheckpointError: If there is no such tensor.
        """
        return self._tensor(name).dtype

    def read(
        self, name: str, shape: tuple[int, ...], rows: slice | None = None
    ) -> NDArray[np.float32]:
        """Read a tensor, or some of its rows, as contiguous float32.

        Args:
            name: Canonical name.
            shape: What the whole tensor must be.
            rows: Consecutive rows of the first axis; ``None`` reads all.

        Raises:
            CheckpointError: If there is no such tensor, its shape is another one, it is not
                bf16, fp16 or fp32, or its file cannot be read.
        """
        return read_rows(self._required(name, shape), rows or slice(None))

    def require(self, name: str, shape: tuple[int, ...]) -> None:
        """Refuse, by its header alone, a tensor that :meth:`read` would refuse.

        Args:
            name: Canonical name.
            shape: What the whole tensor must be.

        Raises:
            CheckpointError: As :meth:`read`.
        """
        self._required(name, shape)

    def _required(self, name: str, shape: tuple[int, ...]) -> StoredTensor:
        tensor = self._tensor(name)
        if tensor.shape != tuple(shape):
            raise CheckpointError(
                f"{tensor.shard}: {tensor.key} has shape {list(tensor.shape)}, config.json asks "
                f"for {list(shape)}; take both from the same checkpoint"
            )
        if tensor.dtype not in _READABLE:
            raise CheckpointError(
                f"{tensor.shard}: {tensor.key} is {tensor.dtype}, must be "
                f"{' or '.join(_READABLE)}; take the unquantised bf16 checkpoint"
            )
        return tensor

    def fingerprint(self) -> str:
        """A sha256 (hex) over the configuration, all headers and a sample of every tensor.

        Cheap: of the weights only some bytes from the middle of every tensor are read, enough
        to tell a fine-tuned model from its base.

        Raises:
            CheckpointError: If a file can no longer be read.
        """
        config = self.directory / "config.json"
        try:
            digest = hashlib.sha256(config.read_bytes())
        except OSError as error:
            raise CheckpointError(f"{config}: {error.strerror}; {REPAIR}") from error
        for shard in sorted({tensor.shard for tensor in self._tensors.values()}):
            digest_shard(shard, digest.update)
        return digest.hexdigest()

    def check_coverage(
        self, used: Collection[str], *, allow_unused: Collection[str] = ()
    ) -> tuple[str, ...]:
        """Compare what an export uses with what the checkpoint holds.

        Args:
            used: Canonical names of every tensor that the export reads.
            allow_unused: Prefixes of names that may be left over, e.g. ``("mtp.",)``.

        Returns:
            The names left over, sorted. The head of a checkpoint with tied embeddings is one of
            them where it is stored all the same and equals the embedding.

        Raises:
            CheckpointError: If tensors are missing or unexpected ones are left over.
        """
        self._refuse_missing(set(used) - self.names)
        unused = self.names - set(used)
        unexpected = {name for name in unused if not name.startswith(tuple(allow_unused))}
        if _HEAD in unexpected and self.config.tie_word_embeddings:
            self._refuse_untied_head()
            unexpected.remove(_HEAD)
        self._refuse_unexpected(unexpected)
        return tuple(sorted(unused))

    def _tensor(self, name: str) -> StoredTensor:
        if name not in self._tensors:
            self._refuse_missing({name})
        return self._tensors[name]

    def _refuse_missing(self, missing: set[str]) -> None:
        head = {name for name in missing if name.startswith("mtp.")}
        if missing - head:
            remedy = f"{REPAIR}, or the one it was made from"
            if missing - head == {_HEAD}:
                remedy = (
                    "if the embedding is the head, set tie_word_embeddings to true in config.json"
                )
            raise CheckpointError(
                f"{self.directory}: no tensor {_listed(missing - head)}; {remedy}"
            )
        if head:
            raise CheckpointError(
                f"{self.directory}: no MTP tensor {_listed(head)}; export the target alone with "
                "--no-mtp, or take the original checkpoint (merging and tuning tools drop mtp.*)"
            )

    def _refuse_unexpected(self, unexpected: set[str]) -> None:
        if not unexpected:
            return
        remedy = "take a plain checkpoint, without adapters or other additions"
        if self.config.num_mtp_layers == 0 and all(n.startswith("mtp.") for n in unexpected):
            remedy = "set mtp_num_hidden_layers to 1 in config.json, or export with --no-mtp"
        raise CheckpointError(
            f"{self.directory}: the model has no place for {_listed(unexpected)}; {remedy}"
        )

    def _refuse_untied_head(self) -> None:
        """Compare head and embedding a few rows at a time."""
        head, embedding = self._tensor(_HEAD), self._tensor(_EMBEDDING)
        chunks = range(0, head.shape[0] if head.shape else 0, _COMPARED_ROWS)
        if head.shape != embedding.shape or not all(
            np.array_equal(
                self.read(_HEAD, head.shape, part), self.read(_EMBEDDING, head.shape, part)
            )
            for part in (slice(start, start + _COMPARED_ROWS) for start in chunks)
        ):
            raise CheckpointError(
                f"{head.shard}: {head.key} differs from {embedding.key} although "
                "tie_word_embeddings is true; set it to false in config.json"
            )


def _canonical(key: str) -> str | None:
    """The name without the prefix of the language model; None for the vision tower."""
    inner = key.removeprefix("model.")
    if inner.startswith("visual."):
        return None
    return inner.removeprefix("language_model.") if inner != key else key


def _stored_twice(name: str, first: StoredTensor, second: StoredTensor) -> CheckpointError:
    return CheckpointError(
        f"{second.shard}: {second.key} is {name} once more, after {first.key} in "
        f"{first.shard.name}; {REPAIR}"
    )


def _refuse_converted(tensor: StoredTensor, config: ModelConfig) -> None:
    """A convolution with its last axes swapped comes from a conversion that also alters norms."""
    if not tensor.key.endswith("linear_attn.conv1d.weight"):
        return
    if tensor.shape[1:] == (config.conv_kernel, 1):
        raise CheckpointError(
            f"{tensor.shard}: {tensor.key} has shape {list(tensor.shape)}, as converted for "
            "another engine (GGUF, MLX); take the original checkpoint"
        )


def _listed(names: Iterable[str]) -> str:
    shown = [name if name.isprintable() else repr(name) for name in sorted(names)]
    more = f" and {len(shown) - _LISTED} more" if len(shown) > _LISTED else ""
    return ", ".join(shown[:_LISTED]) + more
