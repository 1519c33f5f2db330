"""Wrong GE graphs are refused: by the checks, or, where only values differ, by a run."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from qwen_mtp.errors import PackageError
from qwen_mtp.ge.check import check_graph
from qwen_mtp.ge.proto import load_air
from qwen_mtp.ge.soc import find_soc
from qwen_mtp.graphs.spec import GraphSpec, Lowering
from qwen_mtp.runtime.package import Package
from tests.air_packages import air_package
from tests.ge_graphs import SPEC, layer, needs_wheel, prototypes, weights
from tests.ge_mutants import static_mutants, value_mutants
from tests.packages import random_checkpoint

pytestmark = needs_wheel


def kinds(mutants: list[tuple[str, Any]]) -> set[str]:
    return {name.rpartition(" at ")[0] for name, _ in mutants}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    weights(tmp_path)
    return tmp_path


def refused(model: Any, folder: Path) -> list[str]:
    soc = find_soc("Ascend910B4")
    return [str(f) for f in check_graph(model, prototypes(), soc, SPEC, folder)]


def test_mutants_are_many_and_the_same_every_time() -> None:
    model = layer()
    first = [(name, made.SerializeToString(deterministic=True)) for name, made in all_of(model)]
    again = [(name, made.SerializeToString(deterministic=True)) for name, made in all_of(model)]
    assert first == again
    texts = {text for _, text in first}
    assert len(texts) == len(first)
    assert model.SerializeToString(deterministic=True) not in texts
    assert len(kinds(list(static_mutants(model)))) >= 60
    assert len(kinds(list(value_mutants(model)))) >= 8


def all_of(model: Any) -> list[tuple[str, Any]]:
    return [*static_mutants(model), *value_mutants(model)]


def test_the_checks_refuse_every_static_mutant(folder: Path) -> None:
    assert refused(layer(), folder) == []
    passed = [name for name, made in static_mutants(layer()) if not refused(made, folder)]
    assert passed == []


def test_value_mutants_are_well_formed(folder: Path) -> None:
    """So that a run which refuses them refuses what they compute."""
    found = {name: refused(made, folder) for name, made in value_mutants(layer())}
    assert {name: text for name, text in found.items() if text} == {}


def run(model: Any, folder: Path, seed: int) -> Mapping[str, Any]:
    """Outputs and the changed state; nothing where the run itself fails."""
    import torch

    from qwen_mtp.ge.interpreter import Interpreter, WeightFiles

    random = torch.Generator().manual_seed(seed)
    pool = torch.randn(6, 2, 3, generator=random)
    inputs = {
        "ids": torch.randint(16, (4,), generator=random, dtype=torch.int32),
        "start": torch.randint(3, (1,), generator=random, dtype=torch.int32),
        "pool": pool,
    }
    try:
        found = Interpreter(model, WeightFiles(folder), ["hidden", "tokens"]).run(inputs)
    except PackageError:
        return {}
    return {**found, "pool": pool}


def same(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    import torch

    return a.keys() == b.keys() and all(torch.allclose(a[k], b[k], rtol=1e-4) for k in a)


def test_a_run_tells_every_value_mutant_from_the_graph(folder: Path) -> None:
    seeds = range(8)
    right = [run(layer(), folder, seed) for seed in seeds]
    assert all(right)
    missed = [
        name
        for name, made in value_mutants(layer())
        if all(same(right[seed], run(made, folder, seed)) for seed in seeds)
    ]
    assert missed == []


def graphs_of(package: Package) -> Iterator[tuple[Any, Callable[[Any], list[str]]]]:
    """Each graph, and what is wrong with a model in its place."""
    manifest = package.manifest
    assert manifest.ascend is not None
    soc = find_soc(manifest.ascend.choice.soc_version)
    for spec in manifest.graphs:
        path = package.directory / manifest.model_path(spec.name)

        def check(model: Any, spec: GraphSpec = spec, folder: Path = path.parent) -> list[str]:
            return [str(f) for f in check_graph(model, prototypes(), soc, spec, folder)]

        yield load_air(path), check


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lowering", "soc", "format"),
    [
        ("portable", "Ascend910B4", "int8"),
        ("fused", "Ascend910B4", "int8"),
        ("portable", "Ascend310P3", "fp16"),
        ("fused", "Ascend310P3", "fp16"),
    ],
)
def test_exported_graphs_have_no_findings(lowering: Lowering, soc: str, format: str) -> None:
    package = air_package(random_checkpoint(), lowering, soc_version=soc, format=format)
    for model, check in graphs_of(package):
        assert check(model) == [], model.name


@pytest.mark.slow
def test_graphs_with_4_bit_weights_have_no_findings() -> None:
    for model, check in graphs_of(air_package(random_checkpoint(), "fused", format="int4")):
        assert check(model) == [], model.name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lowering", "name"), [("portable", "mtp_draft_k2"), ("fused", "target_verify_r3")]
)
def test_static_mutants_of_exported_graphs_are_refused(lowering: Lowering, name: str) -> None:
    graphs = graphs_of(air_package(random_checkpoint(), lowering))
    model, check = next((model, check) for model, check in graphs if model.name == name)
    assert [what for what, made in static_mutants(model) if not check(made)] == []
    assert {what: check(made) for what, made in value_mutants(model) if check(made)} == {}
