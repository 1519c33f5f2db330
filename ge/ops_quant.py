"""Meanings of the kernels for quantised matrix products of Ascend 910B and A3."""

import torch

from qwen_mtp.ge.node import ATTRIBUTE_TYPES, Function, Node, operator
from qwen_mtp.ge.ops_math import matmul

Tensor = torch.Tensor
INT8_CODE = 2
PACKED = 8  # int4 values in one int32


@operator("DynamicQuant")
def _dynamic_quant(node: Node) -> Function:
    node.absent("smooth_scales", "group_index")
    node.fixed(dst_type=INT8_CODE)
    return lambda x, *_: dynamic_quant(x)


def dynamic_quant(x: Tensor) -> tuple[Tensor, Tensor]:
    """Symmetric int8 per row: values and their float32 scale; a row of zeros has scale 0."""
    wide = x.float()
    scale = wide.abs().amax(-1) / 127.0
    values = torch.round(wide / torch.where(scale > 0, scale, 1.0).unsqueeze(-1))
    return values.clamp(-128, 127).to(torch.int8), scale


@operator("AscendQuantV2")
def _ascend_quant(node: Node) -> Function:
    node.fixed(sqrt_mode=False, round_mode="round", dst_type=INT8_CODE, axis=-1)

    def run(x: Tensor, scale: Tensor, offset: Tensor | None = None) -> Tensor:
        value = x.float() * scale.float()
        if offset is not None:
            value = value + offset.float()
        return torch.round(value).clamp(-128, 127).to(torch.int8)

    return run


@operator("AscendAntiQuantV2")
def _ascend_anti_quant(node: Node) -> Function:
    node.fixed(sqrt_mode=False)
    dtype = node.dtype("dst_type", 1)

    def run(x: Tensor, scale: Tensor, offset: Tensor | None = None) -> Tensor:
        value = x.float() if offset is None else x.float() + offset.float()
        return (value * scale.float()).to(dtype)

    return run


@operator("QuantBatchMatmulV3")
def _quant_matmul(node: Node) -> Function:
    dtype = ATTRIBUTE_TYPES[node.attr("dtype")]
    turn_x, turn_y = node.attr("transpose_x1", False), node.attr("transpose_x2", False)
    node.absent("offset")

    def run(
        x1: Tensor,
        x2: Tensor,
        scale: Tensor,
        bias: Tensor | None = None,
        pertoken_scale: Tensor | None = None,
    ) -> Tensor:
        if not x1.dtype == x2.dtype == torch.int8 or not scale.is_floating_point():
            raise TypeError("it takes int8 factors and a floating scale here")
        integer = bias is not None and not bias.is_floating_point()
        total = matmul(x1.mT if turn_x else x1, x2.mT if turn_y else x2, bias if integer else None)
        out = total.float() * scale.float()
        if pertoken_scale is not None:
            out = out * pertoken_scale.float().unsqueeze(-1)
        return (out if bias is None or integer else out + bias.float()).to(dtype)

    return node.named(run)


@operator("WeightQuantBatchMatmulV2")
def _weight_quant_matmul(node: Node) -> Function:
    node.absent("quant_scale", "quant_offset")
    node.irrelevant("inner_precise")
    node.fixed(dtype=-1)
    turn_x, turn_weight = node.attr("transpose_x", False), node.attr("transpose_weight", False)
    group = node.attr("antiquant_group_size", 0)

    def run(
        x: Tensor,
        weight: Tensor,
        antiquant_scale: Tensor,
        antiquant_offset: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> Tensor:
        x = x.mT if turn_x else x
        weight = _unpacked(weight.mT if turn_weight else weight, x.shape[-1]).float()
        scale, offset = (
            None
            if a is None
            else _grouped(a.mT if turn_weight and group else a, group, x.shape[-1])
            for a in (antiquant_scale, antiquant_offset)
        )
        assert scale is not None
        weight = (weight if offset is None else weight + offset) * scale
        return matmul(x, weight.to(x.dtype), bias)

    return node.named(run)


def _grouped(values: Tensor, group: int, depth: int) -> Tensor:
    """Scales ``[groups, N]`` spread over the depth, others as they are."""
    if not group:
        return values.float()
    return values.float().repeat_interleave(group, 0)[:depth]


def _unpacked(weight: Tensor, depth: int) -> Tensor:
    """``[K, N]`` int8 from int8 as it is, or int4 packed in int32 along N or along K.

    The lowest four bits hold the first value. Which axis is packed shows in the shape.
    """
    if weight.dtype is torch.int8:
        return weight
    if weight.dtype is not torch.int32:
        raise TypeError(f"weights are {weight.dtype}")
    along = 1 if weight.shape[0] == depth else 0
    shifts = torch.arange(0, 4 * PACKED, 4, dtype=torch.int32)
    nibbles = (weight.unsqueeze(-1) >> shifts) & 15
    signed = torch.where(nibbles > 7, nibbles - 16, nibbles).to(torch.int8)
    if along == 1:
        return signed.flatten(1)
    return signed.transpose(1, 2).flatten(0, 1)
