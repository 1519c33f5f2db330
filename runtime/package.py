"""A package directory, checked against its manifest."""

from dataclasses import dataclass
from os import PathLike
from pathlib import Path, PurePosixPath
from typing import Self

from qwen_mtp.errors import PackageError
from qwen_mtp.graphs.manifest import REMEDY, PackageManifest, load_manifest
from qwen_mtp.graphs.signature import graph_specs
from qwen_mtp.graphs.spec import GraphSpec, state_specs


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
        for file in manifest.files:
            _check_file(root, file.path, file.bytes)
        for named in (manifest.model_file, manifest.weights_file):
            if named not in {file.path for file in manifest.files}:
                raise PackageError(f"{root}/manifest.json: files does not list {named}; {REMEDY}")
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
