"""Brings up the genuine torchair of the torch_npu wheel, with or without CANN.

torchair is Python but for one native module, ``torchair.core._torchair``. Exporting a graph needs
three things of it: the prototype of an operator (``get_registered_ir_def``), whether an operator
takes given optional inputs (``check_cann_compat``), and ``export``, which parses a serialised
``ModelDef`` and writes it to a file. Where CANN is installed, the wheel's own module does that.
Elsewhere a stand-in answers from the prototypes in the wheel and hands the bytes over as they are;
everything else in it refuses to run. docs/ascend.md says what follows from that.

``torch.ops.npu`` does not exist without the wheel's native library either: the schemas are read
from that library's string table, shapes and dtypes come from the wheel's own meta functions.
"""

import ast
import importlib
import importlib.machinery
import os
import re
import signal
import sys
import threading
import types
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any, Literal

import torch

from qwen_mtp.errors import MissingExtraError
from qwen_mtp.ge.prototypes import Prototype, Prototypes, wheel_prototypes
from qwen_mtp.ge.wheel import Wheel, damaged, find_wheel, has_cann

Writer = Literal["cann", "stand-in"]
_CORE = "torchair.core._torchair"
# Imported by torchair at the first call: attention whose lengths are tensors, not numbers.
_TENSOR_LENGTHS = "torchair.ops._npu_fused_infer_attention_score_v2"
_SCHEMA = re.compile(rb"(?<=\x00)(_?[a-z]\w*(?:\.\w+)?\([ -~]*?\) ?-> ?[ -~]+?)\x00")
_DTYPES = (
    "BOOL UINT8 UINT16 UINT32 UINT64 INT8 INT16 INT32 INT64 BF16 FLOAT16 FLOAT32 FLOAT64 "
    "COMPLEX64 COMPLEX128"
)
_NARROW = {
    "int4": 285, "hifloat8": 290, "float8_e5m2": 291, "float8_e4m3fn": 292, "float8_e8m0fnu": 293,
    "float4_e2m1fn_x2": 296, "float4_e1m2fn_x2": 297, "float6_e3m2": 298, "float6_e2m3": 299,
}  # fmt: skip
_ATTRIBUTES = {
    "Int": "VT_INT", "Float": "VT_FLOAT", "Bool": "VT_BOOL", "String": "VT_STRING",
    "ListInt": "VT_LIST_INT",
}  # fmt: skip
# Converters ask for the chip to tell the 950 family, with other kernels, from all we target.
SOC = "Ascend910B1"
_kept: list[Any] = []  # a torch.library.Library unregisters its operators when it is dropped


@cache
def bring_up() -> tuple[Any, Writer]:
    """Import torchair.

    Returns:
        The module, and what stands behind it: ``cann`` or ``stand-in``.

    Raises:
        MissingExtraError: torch_npu or one of the packages it needs is missing, or torch is of
            another release.
    """
    wheel = find_wheel()
    _check_torch(wheel)
    writer = _native(wheel) or _stand_in(wheel)
    sys.path.insert(0, str(wheel.root / "dynamo"))
    try:
        with quiet(), _own_signals():
            torchair = importlib.import_module("torchair")
            importlib.import_module(_TENSOR_LENGTHS)
    except ModuleNotFoundError as missing:
        if (missing.name or "").startswith("torchair"):
            raise damaged(missing) from missing
        raise MissingExtraError(
            f"torch_npu needs {missing.name}: pip install 'qwen-mtp[npu]'"
        ) from missing
    except Exception as error:  # whatever a damaged file of Python raises
        raise damaged(error) from error
    finally:
        sys.path.remove(str(wheel.root / "dynamo"))
    _correct_delta_rule()
    return torchair, writer


def _check_torch(wheel: Wheel) -> None:
    release = ".".join(wheel.version.split(".")[:2])
    if not torch.__version__.startswith(f"{release}."):
        raise MissingExtraError(
            f"torch_npu {wheel.version} needs torch {release}, this is torch {torch.__version__}: "
            f"pip install torch=={wheel.version}"
        )


def _native(wheel: Wheel) -> Writer | None:
    """Import torch_npu itself where CANN's libraries are there to be loaded."""
    if not has_cann():
        return None
    sys.path.insert(0, str(wheel.root.parent))
    try:
        importlib.import_module("torch_npu")
    except (ImportError, OSError, RuntimeError):
        for name in [n for n in sys.modules if n == "torch_npu" or n.startswith("torch_npu.")]:
            del sys.modules[name]
        return None
    finally:
        sys.path.remove(str(wheel.root.parent))
    return "cann"


def _stand_in(wheel: Wheel) -> Writer:
    _module(_CORE, **_core(wheel_prototypes(wheel.torchair)))
    _module("torchair.core._npu_graph_executor")
    _torch_npu()
    _define_operators(wheel)
    # The converters ask every tensor whether it lives on an NPU; torch_npu adds the property.
    torch.Tensor.is_npu = property(lambda self: False)  # type: ignore[attr-defined]
    return "stand-in"


def _module(name: str, **members: Any) -> types.ModuleType:
    module = types.ModuleType(name)
    module.__dict__.update(members)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None)
    module.__path__ = []
    sys.modules[name] = module
    return module


def _core(prototypes: Prototypes) -> dict[str, Any]:
    """What ``torchair.core._torchair`` offers."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise RuntimeError("this process has no CANN: GE graphs are written here, never run")

    def quiet(*_: Any, **__: Any) -> None:
        return None

    names = (
        "InitializeGraphEngine FinalizeGraphEngine InitDeviceStdoutChannel SetDebugLogPath "
        "AclmdlSetDump AclopStartDumpArgs AclopStopDumpArgs"
    )
    base = type(
        "TorchNpuGraphBase",
        (),
        {
            "__init__": lambda self, name: setattr(self, "name", name),
            **dict.fromkeys(("load", "compile", "run", "auto_tune", "summary"), refuse),
        },
    )
    return {
        **dict.fromkeys(names.split(), quiet),
        "TorchNpuGraphBase": base,
        "TorchDataType": type("TorchDataType", (), {name: name for name in _DTYPES.split()}),
        "export": _write,
        "get_registered_ir_def": lambda name: _definition(prototypes(name)),
        "check_cann_compat": lambda name, inputs, attributes: _refusal(
            prototypes(name), name, inputs, attributes
        ),
        "GetSocName": lambda: SOC,
        "CheckAclnnAvaliable": lambda *_: True,
        "StupidRepeat": lambda word, times: word * times,
        "as_torch_tensors": refuse,
    }


def _write(model: bytes, options: dict[str, str]) -> None:
    path = os.path.join(options["export_path_dir"], options["export_name"])
    with open(path, "wb") as file:
        file.write(model)


def _definition(prototype: Prototype | None) -> tuple[str, list[Any], list[Any], list[Any]]:
    if prototype is None:
        return "FAILED", [], [], []
    attributes = [(a.name, _ATTRIBUTES.get(a.type, "VT_INT")) for a in prototype.attributes]
    inputs = [(port.name, port.arity) for port in prototype.inputs]
    outputs = [(port.name, port.arity) for port in prototype.outputs]
    return "SUCCESS", inputs, outputs, attributes


def _refusal(
    prototype: Prototype | None, name: str, inputs: list[str], attributes: list[str]
) -> str:
    """Why an operator does not take these optional inputs or attributes; "" where it does."""
    if prototype is None:
        return f"operator {name} is not among the prototypes of the wheel"
    known = {port.name for port in prototype.inputs} | {a.name for a in prototype.attributes}
    unknown = [name for name in (*inputs, *attributes) if name not in known]
    return f"operator {name} has no {', '.join(unknown)}" if unknown else ""


def _torch_npu() -> None:
    """The few names that converters and meta functions look up in torch_npu."""
    switch = types.SimpleNamespace(allow_hf32=False)
    npu = _module("torch_npu", **_NARROW)
    npu.npu = _module(  # type: ignore[attr-defined]
        "torch_npu.npu",
        _get_deterministic_level=lambda: 0,
        matmul=switch,
        conv=switch,
        current_device=lambda: 0,
        get_device_name=lambda *_: SOC,
        is_available=lambda: False,
    )
    codes = type("ErrCode", (), {"__getattr__": lambda self, name: 0})()
    say = {name: lambda *_: "" for name in ("ops_error", "pta_error", "graph_error")}
    npu.utils = _module("torch_npu.utils")  # type: ignore[attr-defined]
    _module("torch_npu.utils._error_code", ErrCode=codes, **say)
    _module(
        "torch_npu.npu.utils",
        get_cann_version=lambda *_, **__: "9.0.0",
        _is_gte_cann_version=lambda *_, **__: False,
    )
    _module("torch_npu.npu._backends", get_soc_version=lambda: 220)


def _define_operators(wheel: Wheel) -> None:
    library: Any = torch.library.Library("npu", "DEF")  # type: ignore[no-untyped-call]
    _kept.append(library)
    for schema in _schemas(wheel):
        with suppress(RuntimeError):  # a few use types that only the native library knows
            library.define(schema)
    path = wheel.root / "op_plugin" / "meta" / "_meta_registrations.py"
    names: dict[str, Any] = {"__name__": "torch_npu_meta"}
    for statement in ast.parse(path.read_text(encoding="utf-8")).body:
        with suppress(Exception):  # one function for each operator; some need more of torch_npu
            exec(compile(ast.Module([statement], []), str(path), "exec"), names)
    _kept.append(names)


def _correct_delta_rule() -> None:
    """The wheel's meta function says bfloat16 whatever comes in; a kernel for 310P is float16."""

    def meta(query: Any, key: Any, value: Any, state: Any, **_: Any) -> tuple[Any, Any]:
        return value.new_empty(value.shape), state.new_empty(state.shape)

    library: Any = torch.library.Library("npu", "IMPL", "Meta")  # type: ignore[no-untyped-call]
    _kept.append(library)
    with quiet():
        library.impl("npu_recurrent_gated_delta_rule_functional", meta, allow_override=True)


def _schemas(wheel: Wheel) -> Iterator[str]:
    found: dict[str, str] = {}
    for match in _SCHEMA.finditer((wheel.root / "lib" / "libtorch_npu.so").read_bytes()):
        schema = match[1].decode()
        found.setdefault(schema.split("(", 1)[0], schema)
    yield from found.values()


@contextmanager
def _own_signals() -> Iterator[None]:
    """Keep what the process does when it is told to stop: torchair takes that over on import."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    handlers = {number: signal.getsignal(number) for number in numbers}
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            for number, handler in handlers.items():
                signal.signal(number, handler)


@contextmanager
def quiet() -> Iterator[None]:
    """Silence torchair about the missing NPU, and dynamo about torch's own deprecations."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
