"""How the stored tensors of a model are made from checkpoint tensors. Torch-free."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from qwen_mtp.graphs.spec import ITEM_BYTES, WeightFormat

Recipe = Literal["plain", "one_plus", "minus_exp", "matrix", "table", "rows", "ids"]
DRAFT_IDS = "mtp.draft.ids"  # the stored tensor of the draft vocabulary


@dataclass(frozen=True, slots=True)
class Source:
    """One checkpoint tensor under its canonical name, with the shape it must have."""

    key: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class WeightGroup:
    """Stored tensors that come from the same checkpoint tensors.

    Attributes:
        recipe: ``plain`` copies; ``one_plus`` stores ``1 + w`` (the RMS norms); ``minus_exp``
            stores ``-exp(w)`` (A_log); ``matrix`` stacks the sources along their rows and
            stores them in ``format``; ``table`` is a matrix that is also read row by row;
            ``rows`` are chosen rows of a matrix, laid out as a table; ``ids`` are their numbers.
        format: Storage of a matrix or table; everything else is fp32.
        sources: In stacking order.
        params: Names of the stored tensors: one, or values and scales.
        rows: For ``rows`` and ``ids``: which rows, ascending.
    """

    recipe: Recipe
    format: WeightFormat
    sources: tuple[Source, ...]
    params: tuple[str, ...]
    rows: tuple[int, ...] = ()


StoredDType = Literal["float32", "float16", "bfloat16", "int8", "uint8", "int32"]
PAGE = 4096


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor in the weight file.

    Attributes:
        name: Name of the initializer, and of the torch parameter.
        dtype: Element type.
        shape: Its shape.
        offset: Byte offset in the file, a multiple of the page size; two tensors at one offset
            are one tensor under two shapes.
    """

    name: str
    dtype: StoredDType
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


def file_bytes(stored: Iterable[StoredTensor]) -> int:
    """Bytes of weights on disk, without padding; two names for one place count once.

    Tensors in files of their own all have the offset 0, but then no two share a place.
    """
    tensors = list(stored)
    if not any(tensor.offset for tensor in tensors):
        return sum(tensor.nbytes for tensor in tensors)
    return sum({tensor.offset: tensor.nbytes for tensor in tensors}.values())
