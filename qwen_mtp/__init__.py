"""Qwen3.5/3.6/3.8 with native multi-token prediction, compiled to graphs.

Importing this package loads neither torch nor onnxruntime; each name is loaded when first used.

An installed torch_npu makes ``import torch`` load it, which fails on a machine without CANN. There
this package tells torch not to, so it must be imported before torch.
"""

import os
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from qwen_mtp.config import ModelConfig
    from qwen_mtp.errors import (
        CheckpointError,
        ExportError,
        MissingExtraError,
        PackageError,
        QwenMtpError,
        RequestError,
        VerificationError,
    )
    from qwen_mtp.graphs.spec import AscendChoice
    from qwen_mtp.interpreted import InterpretedEngine
    from qwen_mtp.pipeline import export_package
    from qwen_mtp.runtime.llm import LLM
    from qwen_mtp.runtime.outputs import CompletionOutput, Delta, RequestOutput, Stats
    from qwen_mtp.runtime.package import Package
    from qwen_mtp.runtime.sampling import SamplingParams
    from qwen_mtp.runtime.session import Session
    from qwen_mtp.verify import verify_package

_HOMES = {
    "qwen_mtp.config": ("ModelConfig",),
    "qwen_mtp.errors": (
        "CheckpointError",
        "ExportError",
        "MissingExtraError",
        "PackageError",
        "QwenMtpError",
        "RequestError",
        "VerificationError",
    ),
    "qwen_mtp.graphs.spec": ("AscendChoice",),
    "qwen_mtp.interpreted": ("InterpretedEngine",),
    "qwen_mtp.pipeline": ("export_package",),
    "qwen_mtp.runtime.llm": ("LLM",),
    "qwen_mtp.runtime.outputs": ("CompletionOutput", "Delta", "RequestOutput", "Stats"),
    "qwen_mtp.runtime.package": ("Package",),
    "qwen_mtp.runtime.sampling": ("SamplingParams",),
    "qwen_mtp.runtime.session": ("Session",),
    "qwen_mtp.verify": ("verify_package",),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "LLM",
    "AscendChoice",
    "CheckpointError",
    "CompletionOutput",
    "Delta",
    "ExportError",
    "InterpretedEngine",
    "MissingExtraError",
    "ModelConfig",
    "Package",
    "PackageError",
    "QwenMtpError",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
    "Session",
    "Stats",
    "VerificationError",
    "export_package",
    "verify_package",
]


if find_spec("torch_npu") is not None:
    from qwen_mtp.ge.wheel import has_cann

    if not has_cann():
        os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")


def __getattr__(name: str) -> object:
    """Load a public name from its module."""
    if name == "__version__":
        return version("qwen-mtp")
    if name not in _HOME_OF:
        raise AttributeError(f"module 'qwen_mtp' has no attribute {name!r}")
    return getattr(import_module(_HOME_OF[name]), name)
