"""GE models of a package without running them: what the graphs say, against what GE declares.

Every finding is one line: graph, rule, operator, what is wrong.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qwen_mtp.checks_report import Check, one_line
from qwen_mtp.errors import ExportError, PackageError
from qwen_mtp.ge.check import check_graph
from qwen_mtp.ge.choice import check_choice
from qwen_mtp.ge.overlay import corrected
from qwen_mtp.ge.proto import load_air
from qwen_mtp.ge.prototypes import Prototypes, wheel_prototypes
from qwen_mtp.ge.soc import find_soc
from qwen_mtp.ge.view import Finding
from qwen_mtp.ge.wheel import find_wheel
from qwen_mtp.progress import Progress
from qwen_mtp.runtime.package import Package

# Rules about operators one by one; the others are about how they hang together.
OPERATOR_RULES = frozenset(
    {"prototype", "port", "attribute", "dtype", "declared", "inference", "soc"}
)
SHOWN = 3


@dataclass(frozen=True, slots=True)
class Found:
    """What is wrong with one graph.

    Attributes:
        graph: Its name.
        finding: A finding of :func:`~qwen_mtp.ge.check.check_graph`.
    """

    graph: str
    finding: Finding

    def __str__(self) -> str:
        """One line."""
        return f"{self.graph}: {self.finding}"


@dataclass(frozen=True, slots=True)
class Static:
    """The two checks that need no run.

    Attributes:
        structure: Files parse, edges lead somewhere, the interface is that of the manifest.
        prototypes: Operators, dtypes and shapes are those that GE declares and the chip has.
    """

    structure: Check
    prototypes: Check


def check_static(package: Package, progress: Progress) -> Static:
    """Check every graph.

    Raises:
        MissingExtraError: torch_npu or protobuf is missing.
    """
    graphs = package.manifest.graphs
    progress.phase("verify graphs", len(graphs), "graphs")
    found: list[Found] = []
    prototypes, operators = corrected(wheel_prototypes(find_wheel().torchair)), 0
    for graph in graphs:
        path = package.directory / package.manifest.model_path(graph.name)
        count, more = _one(package, graph.name, path, prototypes)
        operators, found = operators + count, found + more
        progress.advance(1)
    found += _against_manifest(package)
    about_operators = [f for f in found if f.finding.rule in OPERATOR_RULES]
    others = [f for f in found if f.finding.rule not in OPERATOR_RULES]
    assert package.manifest.ascend is not None
    soc = package.manifest.ascend.choice.soc_version
    whole = f"{len(graphs)} graphs, {operators} operators: edges, states and interface hold"
    fit = f"{operators} operators fit the prototypes of torch_npu {find_wheel().version} and {soc}"
    return Static(
        _judge("structure", others, whole),
        _judge("prototypes", about_operators, fit),
    )


def _one(
    package: Package, graph: str, path: Path, prototypes: Prototypes
) -> tuple[int, list[Found]]:
    """How many operators a graph has, and what is wrong with it."""
    assert package.manifest.ascend is not None
    choice = package.manifest.ascend.choice
    try:
        model = load_air(path)
    except PackageError as error:
        return 0, [Found(graph, Finding("", "file", one_line(error)))]
    found = check_graph(
        model,
        prototypes,
        find_soc(choice.soc_version),
        package.graph(graph),
        path.parent,
        choice.custom_ops,
    )
    findings = [Found(graph, finding) for finding in found]
    return len(model.graph[0].op), findings + _weights(package, graph, model)


def _against_manifest(package: Package) -> list[Found]:
    """What the manifest says of the chip must be possible."""
    manifest = package.manifest
    assert manifest.ascend is not None
    try:
        check_choice(manifest.ascend.choice, manifest.geometry)
    except ExportError as error:
        return [Found("manifest", Finding("ascend.choice", "soc", one_line(error)))]
    return []


def _weights(package: Package, graph: str, model: Any) -> list[Found]:
    """Every weight of a graph must be listed: the sum of a file that is not is never looked at."""
    listed = {tensor.name for tensor in package.manifest.weights}
    files = (op.name for op in model.graph[0].op if op.type == "FileConstant")
    lost = [name for name in files if name not in listed]
    return [Found(graph, Finding(name, "weights", "not in the manifest")) for name in lost]


def _judge(name: str, found: Sequence[Found], detail: str) -> Check:
    if not found:
        return Check(name, True, detail)
    lines = "; ".join(map(str, found[:SHOWN]))
    more = f"; and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
    return Check(name, False, lines + more)
