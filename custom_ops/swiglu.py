"""The gate of the MLP: SiLU of the first half times the second half."""

from typing import Any

import numpy as np
import numpy.typing as npt

from qwen_mtp.custom_ops.operator import NAMESPACE, Operator, const

Floats = npt.NDArray[np.float32]


def swiglu(gate_up: Floats) -> Floats:
    """Compute ``silu(gate) * up``.

    Args:
        gate_up: ``[M, 2 * I]`` float32, the gate first.

    Returns:
        ``[M, I]`` float32.
    """
    gate, up = np.split(gate_up, 2, axis=1)
    return np.asarray(gate / (1 + np.exp(-gate)) * up, dtype=np.float32)


def _fake(gate_up: Any) -> Any:
    return gate_up.new_empty((gate_up.shape[0], gate_up.shape[1] // 2))


def _onnx(op: Any, gate_up: Any) -> Any:
    sizes = np.full(2, int(gate_up.shape[1]) // 2, np.int64)
    gate, up = op.Split(gate_up, const(op, sizes), axis=1, _outputs=2)
    return op.Mul(op.Mul(gate, op.Sigmoid(gate)), up)


def _native(op: Any, gate_up: Any) -> Any:
    rows, width = (int(n) for n in gate_up.shape)
    return op.SwiGLU(gate_up, M=rows, I=width // 2, _domain=NAMESPACE)


def _decomposed(gate_up: Any) -> Any:
    from torch.nn.functional import silu

    half = gate_up.shape[1] // 2
    gate, up = gate_up.split([half, half], 1)
    return silu(gate) * up


def _fused(gate_up: Any) -> Any:
    import torch

    return torch.ops.npu.npu_swiglu(gate_up, -1)


SWIGLU = Operator(
    name="swiglu",
    schema="(Tensor gate_up) -> Tensor",
    meaning=swiglu,
    fake=_fake,
    onnx=_onnx,
    native=_native,
    decomposed=_decomposed,
    fused=_fused,
    kernels=("SwiGlu",),
)
