"""A package directory, checked against its manifest."""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from os import PathLike
from pathlib import Path, PurePosixPath
from typing import Self

import numpy as np
import numpy.typing as npt

from qwen_mtp.errors import ExportError, PackageError, RequestError
from qwen_mtp.fields import LARGEST
from qwen_mtp.ge.soc import find_soc
from qwen_mtp.graphs.manifest import REMEDY, PackageManifest, load_manifest
from qwen_mtp.graphs.signature import graph_specs
from qwen_mtp.graphs.spec import GraphSpec, state_specs
from qwen_mtp.graphs.weights import DRAFT_IDS, PAGE
from qwen_mtp.runtime.sampling import SamplingParams

BACKENDS = ("onnxruntime", "ascend")
_MAY_BE_ZERO = ("num_mtp_layers", "draft_vocab")


@dataclass(frozen=True, slots=True)
class Package:
    """One exported model.

    Attributes:
        directory: Where it lies.
        manifest: What it says of itself.
    """

    directory: Path
    manifest: PackageManifest

    @classmethod
    def open(cls, directory: str | PathLike[str]) -> Self:
        """Read the manifest and compare it with the files (names and sizes, not contents).

        Raises:
            PackageError: If the manifest is unreadable or contradicts itself or a file.
        """
        root = Path(directory)
        manifest = load_manifest(root)
        _check_numbers(root, manifest)
        _check_target(root, manifest)
        for file in manifest.files:
            _check_file(root, file.path, file.bytes)
        listed = {file.path for file in manifest.files}
        for named in _needed(manifest):
            if named not in listed:
                raise PackageError(f"{root}/manifest.json: files does not list {named}; {REMEDY}")
        _check_weights(root, manifest)
        _check_draft_ids(root, manifest)
        _check_signatures(root, manifest)
        return cls(root, manifest)

    @property
    def max_lookahead(self) -> int:
        """Largest number of drafts a round; 0 for a package without MTP."""
        return max(self.manifest.geometry.lookaheads, default=0)

    def selector(self, name: str) -> int:
        """Index of a graph, the value of the model's ``graph`` input."""
        return [graph.name for graph in self.manifest.graphs].index(name)

    def graph(self, name: str) -> GraphSpec:
        """The signature of a graph."""
        return self.manifest.graphs[self.selector(name)]

    def draft_ids(self) -> npt.NDArray[np.int32]:
        """The draft vocabulary: ``[N]`` token ids, ascending; where there is none, all ids.

        Raises:
            OSError: The weights cannot be read.
        """
        count = self.manifest.geometry.draft_vocab
        if not count:
            return np.arange(self.manifest.config.vocab_size, dtype=np.int32)
        tensor = next(t for t in self.manifest.weights if t.name == DRAFT_IDS)
        path = self.directory / self.manifest.weight_path(DRAFT_IDS)
        return np.fromfile(path, np.int32, count, offset=tensor.offset)


def _check_numbers(root: Path, manifest: PackageManifest) -> None:
    """Refuse values that no export writes before anything is computed from them."""
    if manifest.backend not in BACKENDS:
        raise _odd(root, "backend", manifest.backend, f"must be one of {', '.join(BACKENDS)}")
    for place, part in (("config", manifest.config), ("geometry", manifest.geometry)):
        for field in fields(part):
            value = getattr(part, field.name)
            least = 0 if field.name in _MAY_BE_ZERO else 1
            if type(value) is int and not least <= value <= LARGEST:
                raise _odd(root, f"{place}.{field.name}", value, f"must be {least}..{LARGEST}")
    lookaheads, ids = manifest.geometry.lookaheads, manifest.config.eos_token_ids
    if list(lookaheads) != sorted(set(lookaheads)) or not set(lookaheads) <= set(range(1, 16)):
        raise _odd(root, "geometry.lookaheads", lookaheads, "must ascend within 1..15")
    if not all(0 <= token < manifest.config.vocab_size for token in ids):
        raise _odd(root, "config.eos_token_ids", ids, "must lie in the vocabulary")
    given = manifest.generation
    try:
        SamplingParams(temperature=given.temperature, top_k=given.top_k, top_p=given.top_p)
    except RequestError as error:
        raise PackageError(f"{root}/manifest.json: generation: {error}; {REMEDY}") from error


def _check_target(root: Path, manifest: PackageManifest) -> None:
    """What the graphs are made for must be known, and state kept as its graphs keep it."""
    target, layout = manifest.ascend, manifest.geometry.layout
    if (target is None) == (manifest.backend == "ascend"):
        found = None if target is None else target.choice.soc_version
        raise _odd(root, "ascend", found, f"but backend is {manifest.backend!r}")
    if (target is None) == ("{tensor}" in manifest.weights_file):
        wanted = f"which is not how packages for {manifest.backend} keep them"
        raise _odd(root, "weights_file", manifest.weights_file, wanted)
    if target is None:
        return
    try:
        find_soc(target.choice.soc_version)
    except ExportError as error:
        raise PackageError(f"{root}/manifest.json: ascend.choice: {error}; {REMEDY}") from error
    if layout != ("slots" if target.choice.lowering == "fused" else "paged"):
        lowering = target.choice.lowering
        raise _odd(root, "ascend.choice.lowering", lowering, f"but layout is {layout!r}")


def _needed(manifest: PackageManifest) -> Iterator[str]:
    """Paths of models and weights, each once."""
    yield from dict.fromkeys(manifest.model_path(graph.name) for graph in manifest.graphs)
    if manifest.native_file is not None:
        yield manifest.native_file
    yield from dict.fromkeys(manifest.weight_path(tensor.name) for tensor in manifest.weights)


def _check_weights(root: Path, manifest: PackageManifest) -> None:
    """Tensors must follow each other page by page and fill their file; others are second names."""
    sizes = {file.path: file.bytes for file in manifest.files}
    placed: dict[str, dict[int, int]] = {}
    ends: dict[str, int] = {}
    for tensor in manifest.weights:
        path = manifest.weight_path(tensor.name)
        here, end = placed.setdefault(path, {}), ends.get(path, 0)
        follows = tensor.offset == -(-end // PAGE) * PAGE and min(tensor.shape, default=1) > 0
        if not follows and here.get(tensor.offset) != tensor.nbytes:
            place = (tensor.shape, tensor.offset)
            raise _odd(root, f"weights: {tensor.name}", place, "which leaves a gap or overlaps")
        here[tensor.offset] = tensor.nbytes
        ends[path] = max(here) + here[max(here)]
    if not placed:
        raise _odd(root, "weights", (), "must not be empty")
    for path, end in ends.items():
        if end != sizes[path]:
            raise _odd(root, "weights", f"{end} bytes", f"{path} has {sizes[path]}")


def _check_draft_ids(root: Path, manifest: PackageManifest) -> None:
    """A draft vocabulary is a part of the vocabulary, drafts are taken, and its ids are stored."""
    geometry, vocabulary = manifest.geometry, manifest.config.vocab_size
    count = geometry.draft_vocab
    if count > vocabulary or (count and not geometry.lookaheads):
        wanted = f"must be 0..{vocabulary if geometry.lookaheads else 0}"
        raise _odd(root, "geometry.draft_vocab", count, wanted)
    kinds = [(t.dtype, t.shape) for t in manifest.weights if t.name == DRAFT_IDS]
    if kinds != ([("int32", (count,))] if count else []):
        raise _odd(root, f"weights: {DRAFT_IDS}", kinds, f"but geometry.draft_vocab is {count}")


def _odd(root: Path, name: str, found: object, wanted: str) -> PackageError:
    return PackageError(f"{root}/manifest.json: {name} is {found!r}, {wanted}; {REMEDY}")


def _check_file(root: Path, name: str, size: int) -> None:
    inner = PurePosixPath(name)
    if inner.is_absolute() or ".." in inner.parts:
        raise PackageError(f"{root}/manifest.json: file {name} lies outside the package; {REMEDY}")
    path = root / name
    if not path.is_file():
        raise PackageError(f"{path}: the manifest lists it but it is not there; {REMEDY}")
    if path.stat().st_size != size:
        found = path.stat().st_size
        raise PackageError(f"{path}: {found} bytes, the manifest says {size}; {REMEDY}")


def _check_signatures(root: Path, manifest: PackageManifest) -> None:
    """The tables must be the ones this version derives from sizes and geometry."""
    config, geometry = manifest.config, manifest.geometry
    if manifest.states != state_specs(config, geometry):
        raise PackageError(f"{root}/manifest.json: states contradict the geometry; {REMEDY}")
    for found, own in zip(manifest.graphs, graph_specs(config, geometry), strict=False):
        if found != own:
            raise PackageError(
                f"{root}/manifest.json: graph {found.name} contradicts the geometry; {REMEDY}"
            )
    if len(manifest.graphs) != len(graph_specs(config, geometry)):
        raise PackageError(f"{root}/manifest.json: graphs are missing or too many; {REMEDY}")
