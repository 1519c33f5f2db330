"""Wrong GE graphs are refused: by the checks, or, where only values differ, by a run."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from qwen_mtp.errors import PackageError
from qwen_mtp.ge.check import check_graph
from qwen_mtp.ge.soc import find_soc
from tests.ge_graphs import SPEC, layer, needs_wheel, prototypes, weights
from tests.ge_mutants import static_mutants, value_mutants

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
