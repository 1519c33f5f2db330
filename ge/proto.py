"""Reads and writes GE models: the message ``ge.proto.ModelDef``, which is what an ``.air`` is."""

from pathlib import Path
from typing import Any

import numpy as np

from qwen_mtp.errors import PackageError
from qwen_mtp.ge.wheel import messages

# GE counts dtypes in two ways: tensor descriptors use the message's own enum, attributes that
# name a dtype (Cast.dst_type, FileConstant.dtype, ...) the one of the C++ API (graph/types.h).
ATTRIBUTE_CODES = {
    "DT_FLOAT": 0,
    "DT_FLOAT16": 1,
    "DT_INT8": 2,
    "DT_INT32": 3,
    "DT_UINT8": 4,
    "DT_INT16": 6,
    "DT_INT64": 9,
    "DT_DOUBLE": 11,
    "DT_BOOL": 12,
    "DT_BF16": 27,
    "DT_INT4": 29,
}
# By the names of the manifest; int4 is packed eight to an int32 where it is stored.
TENSOR_TYPES = {
    "float32": "DT_FLOAT",
    "float16": "DT_FLOAT16",
    "bfloat16": "DT_BF16",
    "int32": "DT_INT32",
    "int64": "DT_INT64",
    "int8": "DT_INT8",
    "uint8": "DT_UINT8",
    "bool": "DT_BOOL",
}


def load_air(path: Path) -> Any:
    """Parse an ``.air`` file.

    Raises:
        PackageError: It cannot be read or is not a model with one graph.
        MissingExtraError: torch_npu or protobuf is missing.
    """
    model = messages().ModelDef()
    try:
        model.ParseFromString(path.read_bytes())
    except OSError as error:
        raise PackageError(f"{path}: {error.strerror}; export the checkpoint again") from error
    except Exception as error:  # protobuf's DecodeError has moved between its releases
        raise PackageError(f"{path}: not a GE model; export the checkpoint again") from error
    if len(model.graph) != 1 or not model.graph[0].op:
        raise PackageError(f"{path}: holds no single graph; export the checkpoint again")
    return model


def dtype_name(code: int) -> str:
    """``DT_FLOAT`` and so on for a dtype of a tensor descriptor."""
    return str(messages().DataType.Name(code))


def attribute_dtype(code: int) -> str:
    """``DT_FLOAT`` and so on for a dtype in an attribute; "" if it is none we use."""
    return {number: name for name, number in ATTRIBUTE_CODES.items()}.get(code, "")


def const_value(tensor: Any) -> np.ndarray[Any, Any] | None:
    """The value of a ``Const`` as an array; bfloat16 comes as float32, None where it is empty."""
    name, shape = dtype_name(tensor.desc.dtype), tuple(tensor.desc.shape.dim)
    if name == "DT_BF16":
        bits = np.frombuffer(tensor.data, np.uint16).astype(np.uint32) << 16
        return bits.view(np.float32).reshape(shape)
    kinds = {ge: host for host, ge in TENSOR_TYPES.items()}
    if not tensor.data and 0 not in shape:
        return None
    return np.frombuffer(tensor.data, kinds[name]).reshape(shape)
