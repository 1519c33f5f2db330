"""The one torch definition: all stored tensors of a package, and a module per graph over them."""

import torch
from torch import nn

from qwen_mtp.config import ModelConfig
from qwen_mtp.graphs.attention import Span
from qwen_mtp.graphs.io import GraphIO
from qwen_mtp.graphs.mtp import MTPHead, mtp_draft
from qwen_mtp.graphs.spec import Geometry, GraphSpec
from qwen_mtp.graphs.target import Target, target_prefill, target_verify

Tensor = torch.Tensor


class Model(nn.Module):
    """Target and MTP head; the names of its parameters are the names of the stored tensors."""

    def __init__(self, config: ModelConfig, geometry: Geometry) -> None:
        """Build the modules; under a fake tensor mode no memory is taken."""
        super().__init__()
        self.config, self.geometry = config, geometry
        self.target = Target(config, geometry)
        self.mtp = MTPHead(config, geometry) if geometry.lookaheads else None


class Graph(nn.Module):
    """One graph as a module with flat inputs and outputs in the order of its signature."""

    def __init__(self, model: Model, spec: GraphSpec) -> None:
        """Share ``model``; nothing is copied."""
        super().__init__()
        self.model, self.spec = model, spec

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Run the graph on tensors that follow ``spec.inputs``."""
        io = GraphIO(self.spec, inputs)
        target, head = self.model.target, self.model.mtp
        if self.spec.kind == "target_verify":
            target_verify(target, io, self.model.geometry.max_rows)
        elif self.spec.kind == "mtp_draft":
            assert head is not None
            mtp_draft(head, target.vocabulary, io, self.spec.lookahead)
        else:
            self._prefill(io)
        return io.outputs()

    def _prefill(self, io: GraphIO) -> None:
        hidden = target_prefill(self.model.target, io)
        if self.model.mtp is not None:
            rows = self.spec.rows
            start, count, table = io["context_len"], io["num_draft_rows"], io["block_table"]
            span = Span.of(self.model.config, start, count, table, rows)
            vocabulary = self.model.target.vocabulary
            self.model.mtp.store(io, vocabulary, io["next_token_ids"], hidden, span)
