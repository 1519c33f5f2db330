"""``manifest.json``: what a package holds, checked by name when it is read. Torch-free."""

from os import PathLike
from pathlib import Path
from typing import Literal

import msgspec

from qwen_mtp.config import GenerationDefaults, ModelConfig
from qwen_mtp.errors import PackageError
from qwen_mtp.graphs.spec import AscendChoice, Geometry, GraphSpec, StateSpec
from qwen_mtp.graphs.weights import StoredTensor

FORMAT_VERSION = 2
MANIFEST = "manifest.json"
SELECTOR = "graph"  # input of the model that holds the index of the graph to run
REMEDY = "export the checkpoint again"


class FileEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One file of the package; ``sha256`` is checked by ``verify``, ``bytes`` on every load."""

    path: str
    bytes: int
    sha256: str


class Source(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where the weights came from: a fingerprint, and the tensors that were left out."""

    fingerprint: str
    ignored: tuple[str, ...]
    unused: tuple[str, ...]


class Verification(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the parity check after the export found.

    Attributes:
        greedy_equal: Speculation on and off gave the same bits over all forced patterns.
        patterns: Forced accept patterns that were compared.
        max_logit_error: Largest difference between a graph and the meaning of its operators;
            None for a model too large to be evaluated in NumPy.
        machine: The processor it ran on; row invariance is a property of the machine.
        near_ties: Where it is rounding that decides between two tokens, places in which on and
            off took one each; only graphs whose rows depend on their pass have any.
    """

    greedy_equal: bool
    patterns: int
    max_logit_error: float | None
    machine: str
    near_ties: int = 0


class AscendTarget(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the GE models of a package were made.

    Attributes:
        choice: What they were made for.
        writer: What wrote the files: ``cann``, the native core of torchair, or its ``stand-in``.
    """

    choice: AscendChoice
    writer: Literal["cann", "stand-in"]


class PackageManifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The one file the runtime reads first.

    Attributes:
        format_version: Version of this schema.
        backend: What runs the graphs: ``onnxruntime``, or ``ascend`` once ATC has compiled them.
        model_file: The model with one branch per graph, or with ``{graph}`` in it a model for
            each.
        native_file: A twin of the model for machines where the native kernels can be compiled;
            None where there is none.
        weights_file: The weight file all graphs share, or with ``{tensor}`` in it a file for
            each stored tensor.
        config: Sizes of the model.
        generation: How the publisher wants it sampled.
        geometry: The static choices of the export.
        graphs: Every graph with its inputs and outputs; the position is its selector.
        states: Every state tensor.
        weights: Every tensor of the weight file.
        files: Every file but the manifest.
        source: The checkpoint.
        tools: Versions that wrote the package.
        verification: The result of the parity check, or None where it was skipped.
        ascend: How GE models were made; None for other back ends.
    """

    format_version: int
    backend: str
    model_file: str
    weights_file: str
    config: ModelConfig
    generation: GenerationDefaults
    geometry: Geometry
    graphs: tuple[GraphSpec, ...]
    states: tuple[StateSpec, ...]
    weights: tuple[StoredTensor, ...]
    files: tuple[FileEntry, ...]
    source: Source
    tools: dict[str, str]
    verification: Verification | None = None
    ascend: AscendTarget | None = None
    native_file: str | None = None

    def model_path(self, graph: str) -> str:
        """Where the model of a graph lies in the package."""
        return self.model_file.replace("{graph}", graph)

    def weight_path(self, tensor: str) -> str:
        """Where a stored tensor lies in the package."""
        return self.weights_file.replace("{tensor}", tensor)

    def save(self, directory: str | PathLike[str]) -> None:
        """Write ``manifest.json``."""
        data = msgspec.json.format(msgspec.json.encode(self), indent=2)
        Path(directory, MANIFEST).write_bytes(data + b"\n")


class _Version(msgspec.Struct):
    format_version: int


def load_manifest(directory: str | PathLike[str]) -> PackageManifest:
    """Read and check ``manifest.json``.

    Raises:
        PackageError: If there is none, it cannot be parsed, it was written by another version,
            or a field is missing, unknown or odd.
    """
    path = Path(directory, MANIFEST)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise PackageError(
            f"{path}: {error.strerror}; give the directory that qwen-mtp-export wrote"
        ) from error
    try:
        found = msgspec.json.decode(data, type=_Version).format_version
        if found != FORMAT_VERSION:
            raise PackageError(
                f"{path}: format_version is {found}, this version reads {FORMAT_VERSION}; {REMEDY}"
            )
        manifest = msgspec.json.decode(data, type=PackageManifest)
        extra = _unknown(msgspec.json.decode(data), msgspec.to_builtins(manifest), "$")
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise PackageError(f"{path}: {error}; {REMEDY}") from error
    if extra is not None:
        raise PackageError(f"{path}: unknown field {extra}; {REMEDY}")
    return manifest


def _unknown(found: object, known: object, place: str) -> str | None:
    """Path of the first field that the schema does not have, at any depth."""
    if isinstance(found, dict) and isinstance(known, dict):
        for name, value in found.items():
            if name not in known:
                return f"{place}.{name}"
            if (extra := _unknown(value, known[name], f"{place}.{name}")) is not None:
                return extra
    elif isinstance(found, list) and isinstance(known, list | tuple):
        for i, (value, twin) in enumerate(zip(found, known, strict=True)):
            if (extra := _unknown(value, twin, f"{place}[{i}]")) is not None:
                return extra
    return None
