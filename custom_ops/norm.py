"""Root-mean-square norm over the last axis, in fp32; the stored weight already holds 1 + w.

``add_norm`` is the step between two layers: what the last one gave joins the residual stream,
and the next one reads the norm of that.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from qwen_mtp.custom_ops.operator import NAMESPACE, Operator

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


def _native(op: Any, x: Any, weight: Any, eps: float) -> Any:
    *outer, width = (int(d) for d in x.shape)
    rows = int(np.prod(outer, dtype=np.int64))
    normed = op.RMSNorm(x, weight, M=rows, D=width, epsilon=eps, _domain=NAMESPACE)
    return normed if len(outer) == 1 else op.Reshape(normed, [*outer, width])


def _add_composed(x: Any, added: Any, weight: Any, eps: float) -> tuple[Any, Any]:
    """The sum ``[M, D]`` of x and added, and its norm."""
    import torch

    total = x + added
    return total, getattr(torch.ops, NAMESPACE).rms_norm(total, weight, eps)


def _add_fake(x: Any, added: Any, weight: Any, eps: float) -> tuple[Any, Any]:
    return x.new_empty(x.shape), x.new_empty(x.shape)


def _add_native(op: Any, x: Any, added: Any, weight: Any, eps: float) -> tuple[Any, Any]:
    rows, width = (int(d) for d in x.shape)
    sizes = {"M": rows, "D": width, "epsilon": eps}
    total, normed = op.AddNorm(x, added, weight, **sizes, _domain=NAMESPACE, _outputs=2)
    return total, normed


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
    native=_native,
    decomposed=_decomposed,
    fused=_fused,
    kernels=("RmsNorm",),
)
ADD_NORM = Operator(
    name="add_norm",
    schema="(Tensor x, Tensor added, Tensor weight, float eps) -> (Tensor, Tensor)",
    meaning=_add_composed,
    composed=_add_composed,
    fake=_add_fake,
    native=_add_native,
)
