"""The torch definition of a package under fake tensors: what every back end starts from."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from qwen_mtp.config import ModelConfig
from qwen_mtp.custom_ops import composites
from qwen_mtp.custom_ops.linear import FLAT
from qwen_mtp.export.lowering import trace
from qwen_mtp.graphs.layers import weight_groups
from qwen_mtp.graphs.model import Graph, Model
from qwen_mtp.graphs.signature import graph_specs
from qwen_mtp.graphs.spec import Geometry, GraphSpec
from qwen_mtp.graphs.weights import PAGE, StoredTensor, WeightGroup


class Blueprint:
    """Modules without weights, the signatures of their graphs and the places of the weights.

    Attributes:
        geometry: The static choices.
        specs: Every graph.
        groups: Which checkpoint tensors make which stored ones.
        stored: The stored tensors. For ONNX they follow each other in one file; a GE model
            reads each from a file of its own.
    """

    def __init__(
        self,
        config: ModelConfig,
        geometry: Geometry,
        *,
        own_files: bool = False,
        draft_ids: Sequence[int] = (),
    ) -> None:
        """Build the fake modules and lay the weights out.

        Args:
            config: Sizes of the model.
            geometry: The static choices.
            own_files: Every stored tensor has a file of its own.
            draft_ids: The draft vocabulary, ascending, where the geometry has one.
        """
        assert len(draft_ids) == geometry.draft_vocab, "the ids are counted by the geometry"
        self._mode = FakeTensorMode()
        with self._mode:
            self._model = Model(config, geometry)
        self.geometry = geometry
        self.specs: tuple[GraphSpec, ...] = graph_specs(config, geometry)
        self.groups: tuple[WeightGroup, ...] = tuple(
            replace(group, rows=tuple(draft_ids)) if group.recipe in ("rows", "ids") else group
            for group in weight_groups(self._model)
        )
        layout = _own_files if own_files else _one_file
        self.stored: tuple[StoredTensor, ...] = layout(self._model)

    def trace(self, spec: GraphSpec, *, whole: bool = False) -> torch.export.ExportedProgram:
        """Trace one graph; ``whole`` keeps composite operators as one node each."""
        with self._mode, composites.whole() if whole else nullcontext():
            return trace(Graph(self._model, spec))


def _tensor(name: str, param: torch.Tensor, offset: int) -> StoredTensor:
    dtype = str(param.dtype).removeprefix("torch.")
    return StoredTensor(name, dtype, tuple(param.shape), offset)  # type: ignore[arg-type]


def _own_files(model: Model) -> tuple[StoredTensor, ...]:
    return tuple(_tensor(name, param, 0) for name, param in model.named_parameters())


def _one_file(model: Model) -> tuple[StoredTensor, ...]:
    stored, offset = [], 0
    for name, param in model.named_parameters():
        tensor = _tensor(name, param, offset)
        stored.append(tensor)
        offset += -(-tensor.nbytes // PAGE) * PAGE
    places = {tensor.name: tensor for tensor in stored}
    for group in weight_groups(model):
        if group.recipe == "table" and group.format == "int4":
            packed = places[group.params[0]]
            flat = (packed.shape[0], packed.nbytes // packed.shape[0])
            name = f"{packed.name}.{FLAT}"
            stored.append(StoredTensor(name, packed.dtype, flat, packed.offset))
    return tuple(stored)
