"""The MTP head and the graph ``mtp_draft`` (docs/loop.md).

``mtp_draft_kK`` (B slots, P rows of catch-up, K drafts)::

    in   tokens [B,P] i32       what the last round emitted: row i pairs tokens[i] with hidden[i]
         num_rows [B] i32       rows of it that were committed, 0 = idle slot
         context_len [B] i32    position of row 0 (the last round's context_len)
         block_table [B,W] i32
         hidden [B,P,H] f32     target rows after the final norm
         mtp.key, mtp.value
    out  draft_ids [B,K] i32
         draft_logits.j [B,V] f32, j = 0..K-1
         mtp.key, mtp.value

With a draft vocabulary of N tokens the logits are ``[B, N]``, in the ascending order of its ids;
its law is 0 elsewhere, and the embedding stays whole. The target verifies over V all the same.

The head has one attention layer, so the keys and values of a row depend on its token and its
hidden row alone: catch-up stores all rows and attends from the last committed one only, and a
prefill stores rows without attending at all. The rows of chained drafts are provisional: later
drafts of the round see them, the pool never does.
"""

import torch
from torch import nn

from qwen_mtp.config import ModelConfig
from qwen_mtp.custom_ops.torch_library import ops
from qwen_mtp.graphs.attention import Attention, Span
from qwen_mtp.graphs.io import GraphIO
from qwen_mtp.graphs.layers import MLP, DraftVocabulary, Linear, RMSNorm, Vocabulary, cast
from qwen_mtp.graphs.spec import Geometry

Tensor = torch.Tensor
Rows = tuple[Tensor, Tensor]


class MTPHead(nn.Module):
    """Embedding and hidden row to the drafter's hidden row.

    The embedding is the target's, and so is the output head unless drafts have a vocabulary of
    their own.
    """

    def __init__(self, config: ModelConfig, geometry: Geometry) -> None:
        """Build the one layer; ``fc`` stays whole as in the published quantised checkpoints."""
        super().__init__()
        width, eps, layer = config.hidden_size, config.rms_norm_eps, "mtp.layers.0"
        dtype = geometry.vector_dtype
        self.config = config
        self.embedding_norm = RMSNorm("mtp.pre_fc_norm_embedding.weight", width, eps, dtype)
        self.hidden_norm = RMSNorm("mtp.pre_fc_norm_hidden.weight", width, eps, dtype)
        self.fc = Linear([("mtp.fc.weight", width)], 2 * width, geometry.full_format)
        self.input_norm = RMSNorm(f"{layer}.input_layernorm.weight", width, eps, dtype)
        self.post_norm = RMSNorm(f"{layer}.post_attention_layernorm.weight", width, eps, dtype)
        self.attention = Attention(config, geometry, f"{layer}.self_attn", "mtp")
        self.mlp = MLP(config, f"{layer}.mlp", geometry.matrix_format)
        self.norm = RMSNorm("mtp.norm.weight", width, eps, dtype)
        self.draft = DraftVocabulary(config, geometry) if geometry.draft_vocab else None

    def merge(self, vocabulary: Vocabulary, ids: Tensor, hidden: Tensor) -> Tensor:
        """Embedding first, then hidden: ids ``[M]`` and ``[M, H]`` to ``[M, H]``."""
        embedded = self.embedding_norm(vocabulary.embed(ids))
        hidden = self.hidden_norm(cast(hidden, vocabulary.dtype))
        return self.fc(torch.cat([embedded, hidden], dim=-1))  # type: ignore[no-any-return]

    def store(
        self, io: GraphIO, vocabulary: Vocabulary, ids: Tensor, hidden: Tensor, span: Span
    ) -> None:
        """Write the cache rows of a prefill chunk without attending."""
        merged = self.merge(vocabulary, ids.reshape(-1), hidden)
        rows = self.attention.project(self.input_norm(merged), span.cos, span.sin)
        self.attention.write(io, rows, span.start, span.count, span.table)

    def catch_up(self, io: GraphIO, merged: Tensor, span: Span) -> Tensor:
        """Store ``[B * P, H]`` merged rows and run the last real one: ``[B, H]`` normed."""
        slots, rows, _ = span.cos.shape
        last = span.count - 1
        projected = self.attention.project(self.input_norm(merged), span.cos, span.sin)
        self.attention.write(io, projected, span.start, span.count, span.table)
        query = ops.take_row(projected.query.reshape(slots, rows, -1), last)
        query = query.view(slots, 1, *projected.query.shape[2:])
        gate = ops.take_row(projected.gate, last)
        x = ops.take_row(merged.view(slots, rows, -1), last)
        mixed = self.attention.attend(io, query, gate, *_newest(span), span.table)
        return self._leave(x, mixed)

    def chain(
        self, io: GraphIO, merged: Tensor, span: Span, place: Span, earlier: list[Rows]
    ) -> tuple[Tensor, Rows]:
        """One more draft: its row and the ``earlier`` ones are seen but never stored.

        Args:
            io: The inputs.
            merged: ``[B, H]``.
            span: The catch-up rows.
            place: The position of this row.
            earlier: Keys and values ``[B, 1, Nkv, D]`` of the drafts before it.

        Returns:
            ``[B, H]`` after ``mtp.norm``, and the keys and values of this row.
        """
        row = self.attention.project(self.input_norm(merged), place.cos, place.sin)
        rows = [*earlier, (row.key, row.value)]
        extra = (torch.cat([k for k, _ in rows], dim=1), torch.cat([v for _, v in rows], dim=1))
        mixed = self.attention.attend(io, row.query, row.gate, *_newest(span), span.table, extra)
        return self._leave(merged, mixed), rows[-1]

    def propose(self, vocabulary: Vocabulary, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """``[B, H]`` to logits ``[B, N]`` and draft ids ``[B]``; of equal ones the lowest id."""
        if self.draft is None:
            logits = vocabulary.logits(hidden)
            return logits, torch.argmax(logits, dim=-1).to(torch.int32)
        logits = self.draft.logits(hidden)
        return logits, self.draft.pick(torch.argmax(logits, dim=-1))

    def _leave(self, x: Tensor, mixed: Tensor) -> Tensor:
        x, entry = self.post_norm.after(x, mixed)
        return self.norm.after(x, self.mlp(entry))[1]


def _newest(span: Span) -> tuple[Tensor, Tensor]:
    """Position and count (0 or 1) of the last real row of each slot."""
    return span.start + torch.clamp(span.count - 1, min=0), torch.clamp(span.count, max=1)


def mtp_draft(head: MTPHead, vocabulary: Vocabulary, io: GraphIO, lookahead: int) -> None:
    """Fill the outputs of a draft graph."""
    tokens, count, start = io["tokens"], io["num_rows"], io["context_len"]
    span = Span.of(head.config, start, count, io["block_table"], tokens.shape[1])
    merged = head.merge(vocabulary, tokens.reshape(-1), io["hidden"].reshape(tokens.numel(), -1))
    hidden = head.catch_up(io, merged, span)
    drafts: list[Tensor] = []
    rows: list[Rows] = []
    for j in range(lookahead):
        if j:
            merged = head.merge(vocabulary, drafts[-1], hidden)
            place = Span.of(head.config, start + count + (j - 1), count, span.table, 1)
            hidden, row = head.chain(io, merged, span, place, rows)
            rows.append(row)
        io[f"draft_logits.{j}"], draft = head.propose(vocabulary, hidden)
        drafts.append(draft)
    io["draft_ids"] = torch.stack(drafts, dim=1)
