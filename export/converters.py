"""torchair converters that our graphs need and the wheel does not have, all in one place."""

from importlib import import_module
from typing import Any

import torch

from qwen_mtp.custom_ops.operator import NAMESPACE
from qwen_mtp.custom_ops.torch_library import OPERATORS

_done: list[bool] = []
aten = torch.ops.aten


def register(torchair: Any) -> None:
    """Register them once in this process."""
    if _done:
        return
    _done.append(True)
    for operator in OPERATORS:
        if operator.ge is not None:
            target = getattr(getattr(torch.ops, NAMESPACE), operator.name).default
            torchair.register_fx_node_ge_converter(target)(operator.ge)
    for target, converter in _MISSING.items():
        torchair.register_fx_node_ge_converter(target)(converter)


def _apis() -> Any:
    return import_module("torchair._ge_concrete_graph.ge_apis")


def _int_mm(x: Any, y: Any, meta_outputs: Any = None) -> Any:
    """int8 by int8 to int32: the cube unit's own product."""
    return _apis().MatMulV2(x, y, None, None)


def _sort_stable(
    x: Any, *, stable: bool, dim: int = -1, descending: bool = False, meta_outputs: Any = None
) -> Any:
    """The wheel refuses the overload, but the operator has the attribute."""
    ge = _apis()
    values, indices = ge.Sort(x, axis=dim, descending=descending, stable=stable)
    return values, ge.Cast(indices, dst_type=import_module("torchair.ge").DataType.DT_INT64)


_MISSING = {aten._int_mm.default: _int_mm, aten.sort.stable: _sort_stable}
