"""The target model and the graphs ``prefill`` and ``target_verify``.

``prefill`` (one sequence, C rows)::

    in   token_ids [1,C] i32        the chunk; padding is -1
         next_token_ids [1,C] i32   the ids one place on, for the MTP cache (with MTP)
         num_valid [1] i32          real rows of the chunk
         num_draft_rows [1] i32     rows whose next id is known (with MTP)
         context_len [1] i32        positions already computed
         block_table [1,W] i32
         pick_uniforms [1,1] f32, temperature [1] f32, top_k [1] i32, top_p [1] f32,
         banned_rows [1] i32, stop_ids [1,S] i32
         pools, conv, ssm           (the slot's own rows of conv and ssm)
    out  tokens [1,1] i32           sampled after the last real row; only the final chunk's counts
         hidden [1,H] f32           of the last real row, after the final norm
         logits [1,1,V] f32         of the last real row
         pools, conv, ssm

``target_verify_rR`` (B slots, R rows)::

    in   token_ids [B,R] i32        last committed token, then drafts (-1: none)
         num_valid [B] i32          rows to run, 0 = idle slot, else drafts + 1
         context_len [B] i32        position of row 0
         num_accepted [B] i32       rows of the slot's previous round to commit, 0 after prefill
         block_table [B,W] i32
         accept_uniforms [B,R-1] f32, pick_uniforms [B,R] f32, temperature [B] f32,
         top_k [B] i32, top_p [B] f32, banned_rows [B] i32, stop_ids [B,S] i32
         pools, conv, ssm, stash
    out  tokens [B,P] i32           accepted drafts and one token of the target, then -1
         num_accepted_drafts [B] i32
         hidden [B,P,H] f32         of each row, after the final norm: what the drafter eats
         logits [B,R,V] f32
         pools, conv, ssm           committed: they do not contain this round's rows yet
         stash                      this round's rows
"""

import torch
from torch import nn

from qwen_mtp.config import ModelConfig
from qwen_mtp.custom_ops.torch_library import ops
from qwen_mtp.graphs.attention import Attention, Span
from qwen_mtp.graphs.deltanet import DeltaNet
from qwen_mtp.graphs.io import GraphIO
from qwen_mtp.graphs.layers import MLP, RMSNorm, Vocabulary, cast
from qwen_mtp.graphs.spec import Geometry

Tensor = torch.Tensor


class Layer(nn.Module):
    """Mixer and MLP, each after a norm and added to the residual stream."""

    def __init__(self, config: ModelConfig, geometry: Geometry, index: int) -> None:
        """Build target layer ``index``."""
        super().__init__()
        prefix, eps, width = f"layers.{index}", config.rms_norm_eps, config.hidden_size
        dtype = geometry.vector_dtype
        self.full = config.layer_kinds[index] == "full_attention"
        self.input_norm = RMSNorm(f"{prefix}.input_layernorm.weight", width, eps, dtype)
        self.post_norm = RMSNorm(f"{prefix}.post_attention_layernorm.weight", width, eps, dtype)
        self.mixer: Attention | DeltaNet
        if self.full:
            self.mixer = Attention(config, geometry, f"{prefix}.self_attn", prefix)
        else:
            self.mixer = DeltaNet(config, geometry, f"{prefix}.linear_attn", prefix)
        self.mlp = MLP(config, f"{prefix}.mlp", geometry.matrix_format)

    def forward(
        self, io: GraphIO, x: Tensor, added: Tensor | None, span: Span
    ) -> tuple[Tensor, Tensor]:
        """Residual stream and what the layer before adds to it, both ``[B * R, H]``, to the same.

        ``num_accepted`` among the inputs says it is a verify.
        """
        x, entry = self.input_norm.after(x, added)
        if isinstance(self.mixer, Attention):
            mixed = self.mixer(io, entry, span)
        elif "num_accepted" in io:
            mixed = self.mixer.verify(io, entry, io["num_accepted"])
        else:
            mixed = self.mixer.prefill(io, entry, span.count)
        x, entry = self.post_norm.after(x, mixed)
        return x, self.mlp(entry)


class Target(nn.Module):
    """Embedding, layers and final norm."""

    def __init__(self, config: ModelConfig, geometry: Geometry) -> None:
        """Build every target layer."""
        super().__init__()
        self.config = config
        self.vocabulary = Vocabulary(config, geometry)
        self.layers = nn.ModuleList(
            Layer(config, geometry, i) for i in range(len(config.layer_kinds))
        )
        self.norm = RMSNorm(
            "norm.weight", config.hidden_size, config.rms_norm_eps, geometry.vector_dtype
        )

    def forward(self, io: GraphIO) -> Tensor:
        """Hidden rows after the final norm, ``[B * R, H]`` in the dtype of the activations."""
        ids = io["token_ids"]
        span = Span.of(
            self.config, io["context_len"], io["num_valid"], io["block_table"], ids.shape[1]
        )
        x, added = self.vocabulary.embed(ids.reshape(-1)), None
        for layer in self.layers:
            x, added = layer(io, x, added, span)
        return self.norm.after(x, added)[1]


def sample(
    io: GraphIO, logits: Tensor, drafts: Tensor, num_drafts: Tensor, uniforms: Tensor
) -> tuple[Tensor, Tensor]:
    """Run the rejection sampler on ``[B, R, V]`` logits with the parameters among the inputs."""
    return ops.rejection_sample(  # type: ignore[no-any-return]
        logits,
        drafts,
        num_drafts,
        uniforms,
        io["pick_uniforms"],
        io["temperature"],
        io["top_k"],
        io["top_p"],
        io["banned_rows"],
        io["stop_ids"],
    )


def target_verify(target: Target, io: GraphIO, width: int) -> None:
    """Fill the outputs of a verify graph; ``width`` is P."""
    ids, valid = io["token_ids"], io["num_valid"]
    slots, rows = ids.shape
    hidden = target(io)
    logits = target.vocabulary.logits(hidden).view(slots, rows, -1)
    tokens, accepted = sample(io, logits, ids[:, 1:], valid - 1, io["accept_uniforms"])
    io["tokens"] = ops.pad_rows(tokens, width, -1)
    io["num_accepted_drafts"] = accepted
    io["hidden"] = ops.pad_rows(cast(hidden, torch.float32).view(slots, rows, -1), width, 0)
    io["logits"] = logits


def target_prefill(target: Target, io: GraphIO) -> Tensor:
    """Fill the target's outputs of the prefill graph; answers with all hidden rows ``[C, H]``."""
    hidden: Tensor = target(io)
    last = ops.take_row(hidden.unsqueeze(0), io["num_valid"] - 1)
    logits = target.vocabulary.logits(last).unsqueeze(1)
    none = torch.full((1, 0), -1, dtype=torch.int32)
    zero = torch.full((1,), 0, dtype=torch.int32)
    io["tokens"], _ = sample(io, logits, none, zero, torch.full((1, 0), 0.0))
    io["hidden"] = cast(last, torch.float32)
    io["logits"] = logits
    return hidden
