"""The small layers: norm, linear in every format, vocabulary, MLP.

Activations are ``[M, D]`` with M = B * R rows, so that a row is a row for every kernel.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import nn

from qwen_mtp.config import ModelConfig
from qwen_mtp.custom_ops.composites import composite
from qwen_mtp.custom_ops.linear import BLOCK
from qwen_mtp.custom_ops.linear_npu import PACKED
from qwen_mtp.custom_ops.norm import ADD_NORM
from qwen_mtp.custom_ops.torch_library import ops
from qwen_mtp.graphs.spec import FULL_FORMATS, Activation, DType, Geometry, WeightFormat
from qwen_mtp.graphs.weights import Recipe, Source, WeightGroup

Tensor = torch.Tensor
DTYPES: dict[DType, torch.dtype] = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """``x`` in another dtype; nothing is traced where it has that one already."""
    return x if x.dtype == dtype else x.to(dtype)


class Stored(nn.Module):
    """A layer that owns stored tensors and says which checkpoint tensors they come from."""

    group: WeightGroup

    def __init__(self, recipe: Recipe, format: WeightFormat, sources: Sequence[Source]) -> None:
        """Describe the tensors; :meth:`store` creates them."""
        super().__init__()
        self.group = WeightGroup(recipe, format, tuple(sources), ())

    def store(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        """Create one stored tensor."""
        data = torch.empty(shape, dtype=dtype)
        self.register_parameter(name, nn.Parameter(data, requires_grad=False))
        self.group = replace(self.group, params=(*self.group.params, name))


def weight_groups(module: nn.Module) -> Iterator[WeightGroup]:
    """Every group of a module tree, with the full names of its stored tensors."""
    for path, child in module.named_modules():
        if isinstance(child, Stored):
            names = tuple(f"{path}.{name}" for name in child.group.params)
            yield replace(child.group, params=names)


class Vector(Stored):
    """A small tensor that is never quantised."""

    weight: Tensor

    def __init__(
        self,
        key: str,
        shape: tuple[int, ...],
        recipe: Recipe = "plain",
        dtype: Activation = "float32",
    ) -> None:
        """Take ``key`` through ``recipe``."""
        super().__init__(recipe, "fp32", [Source(key, shape)])
        self.store("weight", shape, DTYPES[dtype])


class RMSNorm(Vector):
    """RMS norm whose checkpoint weight is an offset from one, as published."""

    def __init__(
        self, key: str, size: int, eps: float, dtype: Activation, recipe: Recipe = "one_plus"
    ) -> None:
        """Norm over the last ``size`` dimensions."""
        super().__init__(key, (size,), recipe, dtype)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """``[..., size]`` to the same shape."""
        return ops.rms_norm(x, self.weight, self.eps)  # type: ignore[no-any-return]

    def after(self, x: Tensor, added: Tensor | None) -> tuple[Tensor, Tensor]:
        """Let what a layer gave join the residual stream ``[M, size]``: the sum, and its norm."""
        if added is None:
            return x, self(x)
        return composite(ADD_NORM)(x, added, self.weight, self.eps)  # type: ignore[no-any-return]


class Linear(Stored):
    """``[M, in]`` to ``[M, out]``; several checkpoint matrices may be stacked into one."""

    recipe: Recipe = "matrix"

    def __init__(
        self,
        parts: Sequence[tuple[str, int]],
        in_features: int,
        format: WeightFormat,
        kept: int = 0,
    ) -> None:
        """Stack ``parts`` = (key, rows) along the outputs; ``kept`` of them are stored, 0: all."""
        super().__init__(self.recipe, format, [Source(k, (n, in_features)) for k, n in parts])
        out, blocks = kept or sum(n for _, n in parts), in_features // BLOCK
        if format in ("int8", "int8_npu"):
            by_rows = (out, in_features)
            self.store("weight", by_rows if format == "int8" else by_rows[::-1], torch.int8)
            self.store("scale", (out,), torch.float32)
        elif format == "int4_npu":
            self.store("weight", (in_features, out // PACKED), torch.int32)
            self.store("scale", (blocks, out), torch.float32)
        elif format == "int4":
            self.store("weight", (out, blocks, BLOCK // 2), torch.uint8)
            self.store("scale", (out, blocks), torch.float32)
        else:
            self.store("weight", (out, in_features), DTYPES[FULL_FORMATS[format]])

    def forward(self, x: Tensor) -> Tensor:
        """Multiply by the transposed weight."""
        forms = {
            "int8": ops.linear_int8_rows,
            "int8_npu": ops.linear_int8,
            "int4": ops.linear_int4,
            "int4_npu": ops.linear_int4,
        }
        form = forms.get(self.group.format, ops.linear)
        return form(x, *self.parameters())  # type: ignore[no-any-return]


class Table(Linear):
    """A linear layer whose rows can also be read, as an embedding."""

    recipe: Recipe = "table"

    def rows(self, ids: Tensor) -> Tensor:
        """``[M]`` int32 ids to ``[M, in]``."""
        forms = {"int8": ops.embedding_int8, "int4": ops.embedding_int4}
        form = forms.get(self.group.format, ops.embedding)
        return form(ids, *self.parameters())  # type: ignore[no-any-return]


class Rows(Linear):
    """Chosen rows of a matrix: their values and scales are those of the whole one."""

    recipe: Recipe = "rows"


class Vocabulary(nn.Module):
    """Embedding and output head; one stored tensor serves both when they are tied."""

    def __init__(self, config: ModelConfig, geometry: Geometry) -> None:
        """Store the head, and the embedding beside it when it is a tensor of its own."""
        super().__init__()
        format = geometry.table_format
        self.dtype = DTYPES[geometry.dtype]
        size, width = config.vocab_size, config.hidden_size
        self.tied = config.tie_word_embeddings
        self.head: Linear = (Table if self.tied else Linear)(
            [(head_key(config), size)], width, format
        )
        if not self.tied:
            self.table = Table([("embed_tokens.weight", size)], width, format)

    def embed(self, ids: Tensor) -> Tensor:
        """``[M]`` int32 to ``[M, H]``; an absent id (-1) reads row 0."""
        table = self.head if self.tied else self.table
        assert isinstance(table, Table)
        return cast(table.rows(ids), self.dtype)

    def logits(self, hidden: Tensor) -> Tensor:
        """``[M, H]`` to ``[M, V]`` float32."""
        return cast(self.head(hidden), torch.float32)


class DraftVocabulary(Stored):
    """The tokens that drafts are taken from, and their rows of the output head."""

    ids: Tensor

    def __init__(self, config: ModelConfig, geometry: Geometry) -> None:
        """Store ids, which ascend, and rows; which ones is decided where they are written."""
        super().__init__("ids", "fp32", [])
        size, width = geometry.draft_vocab, config.hidden_size
        self.store("ids", (size,), torch.int32)
        source = (head_key(config), config.vocab_size)
        self.head = Rows([source], width, geometry.table_format, size)

    def logits(self, hidden: Tensor) -> Tensor:
        """``[M, H]`` to ``[M, N]`` float32."""
        return cast(self.head(hidden), torch.float32)

    def pick(self, places: Tensor) -> Tensor:
        """``[M]`` places among the rows to token ids, int32."""
        return torch.index_select(self.ids, 0, places)


def head_key(config: ModelConfig) -> str:
    """The checkpoint tensor of the output head."""
    return "embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"


class MLP(nn.Module):
    """``down(silu(gate x) * up x)``."""

    def __init__(self, config: ModelConfig, prefix: str, format: WeightFormat) -> None:
        """Gate and up are one matrix."""
        super().__init__()
        width, inner = config.hidden_size, config.intermediate_size
        parts = [(f"{prefix}.gate_proj.weight", inner), (f"{prefix}.up_proj.weight", inner)]
        self.gate_up = Linear(parts, width, format)
        self.down = Linear([(f"{prefix}.down_proj.weight", width)], inner, format)

    def forward(self, x: Tensor) -> Tensor:
        """``[M, H]`` to ``[M, H]``."""
        return self.down(ops.swiglu(self.gate_up(x)))  # type: ignore[no-any-return]
