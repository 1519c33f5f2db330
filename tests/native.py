"""One native kernel in a session of its own."""

import subprocess
from collections.abc import Callable, Mapping
from fcntl import LOCK_EX, flock
from functools import cache
from hashlib import sha256
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest

from qwen_mtp.custom_ops.operator import NAMESPACE
from qwen_mtp.runtime.native import cache_directory, find_compiler, find_kernels, sources
from qwen_mtp.runtime.native_build import FLAGS
from qwen_mtp.runtime.native_cache import Cache

Array = np.ndarray
Run = Callable[..., list[Array]]


@cache
def library(machine: str = "native") -> Path:
    """The kernels for a ``-march``; skips the test where there is no compiler.

    Those for another machine than this one are kept beside the product's, whole and by what they
    are made of, so that all processes of all runs compile them once: -O1 keeps every rounding.
    """
    found = find_kernels()
    if found.library is None:
        pytest.skip(found.reason)
    if machine == "native":
        return found.library
    kept = Cache(cache_directory() / "tests")
    flags = (*FLAGS, f"-march={machine}", "-O1", "-shared")
    made_of = [" ".join(flags).encode(), *(path.read_bytes() for path in sources())]
    digest = sha256(b"\0".join(made_of)).hexdigest()[:16]
    return kept.library(digest) or _compiled(kept, digest, flags)


def _compiled(kept: Cache, digest: str, flags: tuple[str, ...]) -> Path:
    units = [path for path in sources() if path.suffix == ".cc"]
    kept.directory.mkdir(parents=True, exist_ok=True)
    with open(kept.directory / "lock", "w") as lock, kept.workplace() as place:
        flock(lock, LOCK_EX)
        if (there := kept.library(digest)) is not None:
            return there
        command = [*find_compiler(), *flags, "-o", str(place.library), *map(str, units)]
        subprocess.run(command, check=True, capture_output=True)
        path, failed = kept.keep(place.library, digest)
    assert not failed, failed
    return path


def native_session(
    kind: str,
    inputs: Mapping[str, Array | None],
    outputs: Mapping[str, Array],
    *,
    threads: int = 2,
    machine: str = "native",
    symbolic: Mapping[str, tuple[int | str, ...]] | None = None,
    **attributes: int | float,
) -> ort.InferenceSession:
    """A session with one node.

    Args:
        kind: The name of the kernel.
        inputs: Their names and examples in order; None for one that is absent.
        outputs: Their names and examples (only types and shapes count).
        threads: Threads of the session.
        machine: What the library is compiled for, as ``-march``.
        symbolic: Shapes of inputs that are not static.
        **attributes: Of the node.
    """
    shapes = {name: x.shape for name, x in inputs.items() if x is not None} | dict(symbolic or {})
    given = {
        name: None if x is None else _value(name, x, shapes[name]) for name, x in inputs.items()
    }
    made = [_value(name, x, x.shape) for name, x in outputs.items()]
    node = ir.Node(
        NAMESPACE,
        kind,
        list(given.values()),
        ir.convenience.convert_attributes(attributes),
        outputs=made,
    )
    present = [value for value in given.values() if value is not None]
    graph = ir.Graph(
        present, made, nodes=[node], opset_imports={"": 24, NAMESPACE: 1}, name="main"
    )
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.register_custom_ops_library(str(library(machine)))
    model = ir.to_proto(ir.Model(graph, ir_version=11)).SerializeToString()
    return ort.InferenceSession(model, options, ["CPUExecutionProvider"])


def _value(name: str, example: Array, shape: tuple[int | str, ...]) -> ir.Value:
    kind = ir.TensorType(ir.DataType.from_numpy(example.dtype))
    return ir.Value(name=name, type=kind, shape=ir.Shape(shape))
