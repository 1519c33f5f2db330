"""An export for Ascend is a function of its input, and its graphs say what the manifest says."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from qwen_mtp.export.air import convert, decompose
from qwen_mtp.export.air_passes import Interface, finish
from qwen_mtp.export.plan import plan_export
from qwen_mtp.ge.proto import load_air
from qwen_mtp.graphs.spec import AscendChoice, GraphSpec, Lowering
from qwen_mtp.pipeline import export_package
from qwen_mtp.runtime.package import Package
from tests.air_packages import SOC, air_package
from tests.ge_graphs import needs_wheel
from tests.packages import random_checkpoint, scratch

pytestmark = needs_wheel
LOWERINGS: tuple[Lowering, ...] = ("portable", "fused")
AGAIN = """
import sys, warnings
warnings.simplefilter("ignore")
from qwen_mtp import export_package
from qwen_mtp.graphs.spec import AscendChoice
checkpoint, package, lowering, format, soc = sys.argv[1:]
choice = AscendChoice(lowering=lowering, soc_version=soc)
export_package(
    checkpoint, package, ascend=choice, format=format, lookaheads=(1,), max_num_seqs=2,
    max_model_len=96, prefill_chunk=16, verify=False,
)
"""


def small() -> Path:
    """One layer of each kind."""
    return random_checkpoint(5, num_hidden_layers=2, full_attention_interval=2)


def export(lowering: Lowering, name: str) -> Package:
    return export_package(
        small(),
        scratch() / "again" / f"{lowering}-{name}",
        ascend=_choice(lowering),
        format=_format(lowering),
        lookaheads=(1,),
        max_num_seqs=2,
        max_model_len=96,
        prefill_chunk=16,
        verify=False,
    )


def _choice(lowering: Lowering) -> AscendChoice:
    return AscendChoice(lowering=lowering, soc_version=SOC)


def _format(lowering: Lowering) -> Any:
    return "fp32" if lowering == "portable" else "bf16"


def contents(directory: Path) -> dict[str, bytes]:
    files = (path for path in directory.rglob("*") if path.is_file())
    return {path.relative_to(directory).as_posix(): path.read_bytes() for path in files}


def differing(one: Path, two: Path) -> list[str]:
    left, right = contents(one), contents(two)
    assert left.keys() == right.keys()
    return [name for name in left if left[name] != right[name]]


@pytest.mark.filterwarnings("ignore")  # torch and torchair warn of their own code
@pytest.mark.parametrize("lowering", LOWERINGS)
def test_a_graph_that_is_made_again_is_equal_byte_by_byte(lowering: Lowering) -> None:
    """Whatever torchair and dynamo have counted up since."""
    package = air_package(random_checkpoint(), lowering)
    plan = plan_export(random_checkpoint(), package.manifest.geometry, _choice(lowering))
    (spec,) = (s for s in plan.blueprint.specs if s.kind == "mtp_draft")
    converted = convert(decompose(plan.blueprint.trace(spec), _choice(lowering)))
    places = {tensor.name: tensor for tensor in plan.blueprint.stored}
    weights = [places[name] for name in converted.weights]
    model = finish(converted.model, Interface(spec, weights, converted.used, "weights"))
    path = package.directory / package.manifest.model_path(spec.name)
    assert model.SerializeToString(deterministic=True) == path.read_bytes()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch and torchair warn of their own code
@pytest.mark.parametrize("lowering", LOWERINGS)
def test_exports_in_one_process_and_in_another_are_equal_byte_by_byte(lowering: Lowering) -> None:
    """Every file, the manifest too."""
    first, second = export(lowering, "first"), export(lowering, "second")
    assert differing(first.directory, second.directory) == []
    third = scratch() / "again" / f"{lowering}-third"
    arguments = [small(), third, lowering, _format(lowering), SOC]
    command = [sys.executable, "-c", AGAIN, *map(str, arguments)]
    subprocess.run(command, check=True, capture_output=True)
    assert differing(first.directory, third) == []


def graphs(lowering: Lowering) -> list[tuple[GraphSpec, Any]]:
    package = air_package(random_checkpoint(), lowering)
    return [
        (spec, load_air(package.directory / package.manifest.model_path(spec.name)))
        for spec in package.manifest.graphs
    ]


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_inputs_states_and_outputs_carry_the_names_of_the_manifest(lowering: Lowering) -> None:
    for spec, model in graphs(lowering):
        ops = model.graph[0].op
        names = {kind: [op.name for op in ops if op.type == kind] for kind in ("Data", "RefData")}
        changed = set(spec.in_place)
        assert names["Data"] == [t.name for t in spec.inputs if t.name not in changed]
        assert names["RefData"] == [t.name for t in spec.inputs if t.name in changed]
        (out,) = (op for op in ops if op.type == "NetOutput")
        values = [edge for edge in out.input if not edge.endswith(":-1")]
        assert len(values) == len(spec.outputs)
        for place, (edge, tensor) in enumerate(zip(values, spec.outputs, strict=True)):
            producer = edge.rpartition(":")[0]
            assert producer == tensor.name
            assert tuple(out.input_desc[place].shape.dim) == tensor.shape
        assert len({op.name for op in ops}) == len(ops)


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_weights_are_the_files_of_the_manifest(lowering: Lowering) -> None:
    package = air_package(random_checkpoint(), lowering)
    stored = {w.name for w in package.manifest.weights}
    used = set()
    for _, model in graphs(lowering):
        for op in model.graph[0].op:
            if op.type == "FileConstant":
                path = op.attr["file_path"].s.decode()
                assert path == f"weights/{op.name}"
                assert (package.directory / "ascend" / path).is_file()
                used.add(op.name)
    assert used == stored


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_models_name_no_place_of_the_machine_that_wrote_them(lowering: Lowering) -> None:
    package = air_package(random_checkpoint(), lowering)
    places = {str(Path(p)).encode() for p in (scratch(), Path.home(), sys.prefix, Path.cwd())}
    places |= {b"site-packages", b"/tmp/", b".py", b"/root", b"/home"}
    names = [n for n in contents(package.directory) if n.endswith((".air", ".pbtxt", ".sh"))]
    assert len(names) == 2 * len(package.manifest.graphs) + 1
    for name in names:
        data = (package.directory / name).read_bytes()
        assert not [p for p in places if p in data and p != b"/"], name
