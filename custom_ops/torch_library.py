"""Registers every operator with torch, so that modules can call ``torch.ops.qwen_mtp.*``.

The eager implementation is the NumPy meaning itself: what torch computes and what the oracle
says cannot drift apart.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from qwen_mtp.custom_ops import (
    attention,
    attention_mix,
    attention_project,
    causal_conv,
    delta_round,
    delta_rule,
    linear,
    norm,
    pool,
    rejection,
    rotary,
    rows,
    slots,
    swiglu,
)
from qwen_mtp.custom_ops.operator import NAMESPACE, Operator

OPERATORS: tuple[Operator, ...] = (
    norm.RMS_NORM,
    norm.ADD_NORM,
    rotary.ROTARY_TABLE,
    rotary.ROTARY_EMBEDDING,
    causal_conv.CAUSAL_CONV,
    causal_conv.CONV_WINDOW,
    delta_rule.DELTA_GATES,
    delta_rule.GATED_DELTA_RULE,
    delta_round.DELTA_ROUND,
    delta_round.DELTA_CHUNK,
    pool.SCATTER_ROWS,
    attention.KV_WRITE,
    attention.PAGED_ATTENTION,
    attention_mix.ATTENTION_MIX,
    attention_project.ATTENTION_PROJECT,
    linear.LINEAR,
    linear.LINEAR_INT8,
    linear.LINEAR_INT8_ROWS,
    linear.LINEAR_INT4,
    linear.EMBEDDING,
    linear.EMBEDDING_INT8,
    linear.EMBEDDING_INT4,
    rows.TAKE_ROW,
    rows.PAD_ROWS,
    swiglu.SWIGLU,
    slots.SLOT_CONV,
    slots.SLOT_DELTA_RULE,
    rejection.REJECTION_SAMPLE,
    rejection.REJECTION_SAMPLE_LAWS,
)

# Kept alive: dropping it unregisters all. torch leaves its methods untyped.
_library: Any = torch.library.Library(NAMESPACE, "DEF")  # type: ignore[no-untyped-call]


def _eager(meaning: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        arrays = [a.detach().numpy() if isinstance(a, torch.Tensor) else a for a in args]
        result = meaning(*arrays)
        if isinstance(result, tuple):
            return tuple(torch.from_numpy(np.ascontiguousarray(r)) for r in result)
        return torch.from_numpy(np.ascontiguousarray(result))

    return run


def _register(operator: Operator) -> None:
    _library.define(operator.name + operator.schema)
    eager = operator.composed or _eager(operator.meaning)
    _library.impl(operator.name, eager, "CPU")
    torch.library.register_fake(f"{NAMESPACE}::{operator.name}", operator.fake, lib=_library)


for _operator in OPERATORS:
    _register(_operator)

ops = torch.ops.qwen_mtp
