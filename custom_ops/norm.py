"""Root-mean-square norm over the last axis, in fp32; the stored weight already holds 1 + w."""

from typing import Any

import numpy as np
import numpy.typing as npt

from qwen_mtp.custom_ops.operator import Operator

Floats = npt.NDArray[np.float32]


def rms_norm(x: Floats, weight: Floats, eps: float) -> Floats:
    """Compute ``x / sqrt(mean(x^2) + eps) * weight``.

    Args:
        x: ``[..., D]`` float32.
        weight: ``[D]`` float32; for the norms of Qwen3.5 that scale by ``1 + w`` the sum is
            stored, the gated norm stores ``w`` itself.
        eps: Added to the mean of the squares.
    """
    mean = np.mean(np.square(x), axis=-1, keepdims=True)
    return np.asarray(x / np.sqrt(mean + np.float32(eps)) * weight, dtype=np.float32)


def _fake(x: Any, weight: Any, eps: float) -> Any:
    return x.new_empty(x.shape)


def _onnx(op: Any, x: Any, weight: Any, eps: float) -> Any:
    return op.RMSNormalization(x, weight, axis=-1, epsilon=eps)


def _decomposed(x: Any, weight: Any, eps: float) -> Any:
    f = x.float()
    scale = (f * f).mean(-1, keepdim=True).add(eps).rsqrt()
    return (f * scale * weight.float()).to(x.dtype)


def _fused(x: Any, weight: Any, eps: float) -> Any:
    import torch

    # The kernel is declared for equal types of x and gamma alone.
    return torch.ops.npu.npu_rms_norm(x, weight.to(x.dtype), eps)[0]


RMS_NORM = Operator(
    name="rms_norm",
    schema="(Tensor x, Tensor weight, float eps) -> Tensor",
    meaning=rms_norm,
    fake=_fake,
    onnx=_onnx,
    decomposed=_decomposed,
    fused=_fused,
    kernels=("RmsNorm",),
)
