"""Finds torch_npu, whose wheel holds torchair, the graph messages and the operator prototypes.

The wheel needs CANN to be imported, and once it stands in site-packages a plain ``import torch``
tries exactly that. So it may also lie beside the environment, in ``<prefix>/npu``, where torch
does not see it; only its Python files and string tables are read.
"""

import importlib.util
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes.util import find_library
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from qwen_mtp.errors import MissingExtraError

VERSION = "2.13.0"
PLACE = "QWEN_MTP_TORCH_NPU"  # environment variable: the directory that holds torch_npu
_REMEDY = (
    f"pip install 'qwen-mtp[npu]', or beside the environment: python -m pip install --no-deps "
    f"--target {sys.prefix}/npu torch_npu=={VERSION}"
)


@dataclass(frozen=True, slots=True)
class Wheel:
    """The unpacked or installed wheel.

    Attributes:
        root: The directory ``torch_npu``.
        version: Its version.
    """

    root: Path
    version: str

    @property
    def torchair(self) -> Path:
        """The directory of the torchair package."""
        return self.root / "dynamo" / "torchair"


@cache
def has_cann() -> bool:
    """Whether the libraries that torch_npu is linked to can be found."""
    folders = os.environ.get("LD_LIBRARY_PATH", "").split(":")
    found = any(Path(folder, "libascendcl.so").exists() for folder in folders if folder)
    return found or find_library("ascendcl") is not None


@contextmanager
def hidden_torch_npu() -> Iterator[None]:
    """Hide a torch_npu that cannot be imported from libraries that import it once they see it.

    Also a stand-in for it, that converting graphs has left in this process.
    """
    if has_cann():
        yield
        return
    known = sys.modules.get("torch_npu")
    sys.modules["torch_npu"] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules["torch_npu"]
        if known is not None:
            sys.modules["torch_npu"] = known


@cache
def find_wheel() -> Wheel:
    """Locate torch_npu without importing it.

    Raises:
        MissingExtraError: It is nowhere, or is not the version that was tested.
    """
    for root in _places():
        if (root / "dynamo" / "torchair" / "__init__.py").is_file():
            return _checked(root)
    if given := os.environ.get(PLACE):
        raise MissingExtraError(
            f"{PLACE} is {given}, which holds no torch_npu: name the directory that does, "
            "or unset it"
        )
    raise MissingExtraError(f"Ascend graphs need torch_npu {VERSION}: {_REMEDY}")


@cache
def messages() -> Any:
    """The protobuf classes of GE graphs (``ModelDef``, ``DataType``, ...).

    Raises:
        MissingExtraError: torch_npu or protobuf is missing.
    """
    folder = find_wheel().torchair / "_ge_concrete_graph"
    try:
        return _load("qwen_mtp.ge._ge_ir", folder / "ge_ir_by_protoc_3_19_pb2.py")
    except ModuleNotFoundError as missing:
        raise MissingExtraError(
            f"reading Ascend graphs needs {missing.name}: pip install 'qwen-mtp[npu]'"
        ) from missing
    except Exception as error:  # whatever a damaged file of Python raises
        raise damaged(error) from error


def damaged(error: Exception) -> MissingExtraError:
    """What a wheel that cannot be loaded is answered with."""
    reason = " ".join(str(error).split()) or type(error).__name__
    return MissingExtraError(
        f"{find_wheel().root}: torch_npu cannot be loaded ({reason}); install it again"
    )


def _places() -> list[Path]:
    given = os.environ.get(PLACE)
    if given:
        return [Path(given), Path(given) / "torch_npu"]
    return [Path(folder) / "torch_npu" for folder in (f"{sys.prefix}/npu", *sys.path) if folder]


def _checked(root: Path) -> Wheel:
    try:
        text = (root / "version.py").read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        text = ""
    found = re.search(r"__version__\s*=\s*['\"]([^'\"]+)", text)
    version = found[1] if found else "unknown"
    if version != VERSION:
        raise MissingExtraError(f"{root}: torch_npu is {version}, {VERSION} is needed: {_REMEDY}")
    return Wheel(root, version)


def _load(name: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.ModelDef is not None
    return module
