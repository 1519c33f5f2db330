"""Transformers' target, and an MTP head put together from transformers' decoder layer and norm.

Neither shares code with the graphs. Row p of the head takes the embedding of token p + 1 and the
target's hidden row of p after the final norm, and a draft is fed back with the head's own row.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from transformers import DynamicCache

from tests.checkpoints import transformers_model

Tensor = torch.Tensor


@dataclass(frozen=True, slots=True)
class Drafts:
    """What the head says about one committed sequence of N + 1 tokens.

    Attributes:
        logits: ``[K, V]``, row j with j drafts before it.
        keys: ``[Nkv, N, D]`` of the committed rows.
        values: ``[Nkv, N, D]``.
    """

    logits: Tensor
    keys: Tensor
    values: Tensor


class Double(TorchFunctionMode):
    """Turns the casts to fp32 that transformers' code is full of into casts to double."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        func = torch.Tensor.double if func is torch.Tensor.float else func
        named = {k: self._wider(v) for k, v in (kwargs or {}).items()}
        return func(*map(self._wider, args), **named)

    def _wider(self, value: Any) -> Any:
        return torch.float64 if value is torch.float32 else value


class Reference:
    """The model of a checkpoint in transformers' own modules, whole sequences at once.

    In double precision: transformers' chunked recurrence in fp32 is itself up to 1.4e-4 away
    from the exact logits of the random checkpoints, more than what is being looked for.
    """

    def __init__(self, checkpoint: Path, threads: int = 1) -> None:
        torch.set_num_threads(threads)  # on small matrices two threads wait for each other
        self.model = transformers_model(checkpoint).double()
        self.config = self.model.config
        self._mtp = _mtp_tensors(checkpoint)
        self._layer = self._build_layer() if self._mtp else None

    def hidden(self, ids: Sequence[int]) -> Tensor:
        """Rows after the final norm, ``[T, H]``."""
        with torch.inference_mode(), Double():
            return self.model.model(torch.tensor([list(ids)]), use_cache=False)[0][0]

    def head(self, hidden: Tensor) -> Tensor:
        """``[..., H]`` to logits."""
        return functional.linear(hidden, self.model.lm_head.weight)

    def logits(self, ids: Sequence[int]) -> Tensor:
        """Logits of every position, ``[T, V]``."""
        return self.head(self.hidden(ids))

    def continuation(self, prompt: Sequence[int], count: int) -> list[int]:
        """Greedy tokens after the prompt, with transformers' own cache."""
        cache, ids = DynamicCache(config=self.config), list(prompt)
        with torch.inference_mode(), Double():
            for _ in range(count):
                fresh = torch.tensor([ids[cache.get_seq_length() :]])
                hidden = self.model.model(fresh, cache=cache, use_cache=True)[0][0, -1]
                ids.append(int(self.head(hidden).argmax()))
        return ids[len(prompt) :]

    def drafts(self, ids: Sequence[int], proposed: Sequence[int]) -> Drafts:
        """Run the head over all rows of a committed sequence, then over its own drafts.

        Args:
            ids: Committed tokens x_0..x_N; x_N has not been through the target yet.
            proposed: The drafts fed back, K - 1 of them at least used.
        """
        rows = self.hidden(ids[:-1])
        following = list(ids[1:])
        logits = []
        with torch.inference_mode(), Double():
            for depth in range(len(proposed)):
                out, keys, values = self._run_head(following, rows)
                logits.append(self.head(out[-1]))
                following.append(proposed[depth])
                rows = torch.cat([rows, out[-1:]])
        count = len(ids) - 1
        return Drafts(torch.stack(logits), keys[:, :count], values[:, :count])

    def _run_head(self, following: Sequence[int], hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Row p takes token p + 1 and the hidden row of p; full causal attention over all rows."""
        embedded = self.model.model.embed_tokens(torch.tensor(following))
        parts = (
            self._norm("pre_fc_norm_embedding", embedded),
            self._norm("pre_fc_norm_hidden", hidden),
        )
        merged = functional.linear(torch.cat(parts, dim=-1), self._mtp["fc.weight"])[None]
        count, cache = len(following), DynamicCache()
        mask = torch.full((count, count), -torch.inf, dtype=merged.dtype).triu(1)[None, None]
        tables = self.model.model.rotary_emb(merged, torch.arange(count)[None, None])
        out = self._layer(merged, position_embeddings=tables, attention_mask=mask, cache=cache)
        kept = cache.layers[0]
        return self._norm("norm", out[0]), kept.keys[0], kept.values[0]

    def _norm(self, name: str, x: Tensor) -> Tensor:
        from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5RMSNorm

        norm = Qwen3_5RMSNorm(x.shape[-1], eps=self.config.rms_norm_eps)
        norm.weight.data = self._mtp[f"{name}.weight"]
        return norm(x)  # type: ignore[no-any-return]

    def _build_layer(self) -> Any:
        from copy import deepcopy

        from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5DecoderLayer

        config = deepcopy(self.config)
        config.layer_types, config.num_hidden_layers = ["full_attention"], 1
        layer = Qwen3_5DecoderLayer(config, 0).double().eval().requires_grad_(False)
        prefix = "layers.0."
        own = {k.removeprefix(prefix): v for k, v in self._mtp.items() if k.startswith(prefix)}
        layer.load_state_dict(own, strict=True)
        return layer


def _mtp_tensors(checkpoint: Path) -> dict[str, Tensor]:
    tensors = {}
    for shard in checkpoint.glob("*.safetensors"):
        tensors |= load_file(shard)
    return {k.removeprefix("mtp."): v.double() for k, v in tensors.items() if k.startswith("mtp.")}
