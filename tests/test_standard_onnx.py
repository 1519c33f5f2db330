"""Packages in standard ONNX: what the models may hold, and that they compute what others do."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from functools import cache
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.numpy_helper
import onnx_ir as ir
import onnxruntime as ort
import pytest
from click.testing import Result

from qwen_mtp.errors import ExportError
from qwen_mtp.export.package import staged, write_package
from qwen_mtp.export.standard import standard_model
from qwen_mtp.pipeline import plan_package
from qwen_mtp.progress import Silent
from qwen_mtp.runtime.package import Package
from qwen_mtp.runtime.session import Session
from qwen_mtp.verify import verify_package
from tests.commands import checkpoint, qwen_mtp_export, refused
from tests.packages import TRAINED, random_checkpoint, scratch
from tests.packages import package as default_package
from tests.scripted import Scripted, Track, Want, advance, begin, nothing, own

# What every release of ATC's parser that was looked at registers for opset 13 and reads alike.
READ = {
    *("Abs", "Add", "And", "ArgMax", "Cast", "Concat", "Cos", "CumSum", "Div", "Equal", "Exp"),
    *("Expand", "Gather", "GatherElements", "Gemm", "Greater", "GreaterOrEqual", "Identity"),
    *("Less", "LessOrEqual", "Log", "MatMul", "MatMulInteger", "Max", "Min", "Mod", "Mul", "Neg"),
    *("Not", "Or", "Reciprocal", "ReduceSum", "Reshape", "Round", "ScatterElements"),
    *("ScatterND", "Sigmoid", "Sin", "Slice", "Softmax", "Split", "Sqrt", "Squeeze", "Sub"),
    *("TopK", "Transpose", "Unsqueeze", "Where"),
}
GEOMETRY: dict[str, Any] = {  # beside the number of slots, that of ``tests.commands``
    "lookaheads": (3,),
    "max_model_len": 64,
    "max_num_seqs": 2,
    "block_size": 16,
    "prefill_chunk": 8,
}


def slow(*values: str) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


def random_model() -> Path:
    """A layer of each kind."""
    return random_checkpoint(0, num_hidden_layers=2, full_attention_interval=2)


@cache
def by_command() -> tuple[Package, Result]:
    """What the command makes of the random model in fp32."""
    path = scratch() / "standard" / "by-command"
    options = ("--opset-domain", "standard", "--format", "fp32", "--max-num-seqs", "2")
    result = qwen_mtp_export(random_model(), path, *options, "--no-verify")
    return Package.open(path), result


@cache
def standard(name: str, format: str) -> Package:
    if (name, format) == ("random", "fp32"):
        return by_command()[0]
    path = scratch() / "standard" / f"{name}-{format}"
    model = TRAINED if name == "trained" else random_model()
    plan = plan_package(model, format=format, opset_domain="standard", **GEOMETRY)
    with staged(path, overwrite=False) as staging:
        write_package(plan, staging, Silent())
    return Package.open(path)


def default(name: str, format: str) -> Package:
    model = TRAINED if name == "trained" else random_model()
    return default_package(model, format="fp32" if format == "fp16" else format, **GEOMETRY)


def files(package: Package) -> Iterator[tuple[Any, Path]]:
    for graph in package.manifest.graphs:
        yield graph, package.directory / package.manifest.model_path(graph.name)


def sizes(value: Any) -> list[int]:
    """The dimensions of a value; -1 for one that is not a number."""
    dims = value.type.tensor_type.shape.dim
    return [d.dim_value if d.HasField("dim_value") else -1 for d in dims]


@pytest.mark.parametrize("format", ["fp32", slow("int8"), slow("fp16")])
def test_models_hold_static_operators_of_onnx_alone(format: str) -> None:
    package = standard("random", format)
    assert package.manifest.model_file == "{graph}.onnx"
    for spec, path in files(package):
        onnx.checker.check_model(path, full_check=True)
        model = onnx.load(path, load_external_data=False)
        check_nodes(model)
        inputs = {value.name: sizes(value) for value in model.graph.input}
        outputs = {value.name: sizes(value) for value in model.graph.output}
        assert inputs == {t.name: list(t.shape) for t in spec.inputs}
        assert outputs == {t.name: list(t.shape) for t in spec.all_outputs}
        inferred = onnx.shape_inference.infer_shapes(model, strict_mode=True).graph.value_info
        assert len(inferred) > len(model.graph.node) // 2
        assert all(size >= 0 for value in inferred for size in sizes(value))


def check_nodes(model: onnx.ModelProto) -> None:
    assert [(o.domain, o.version) for o in model.opset_import] == [("", 13)]
    assert not model.functions
    assert {node.domain for node in model.graph.node} == {""}
    assert {node.op_type for node in model.graph.node} <= READ
    assert not [a for node in model.graph.node for a in node.attribute if a.HasField("g")]


def test_matrices_of_8_bits_are_multiplied_in_integers() -> None:
    plan = plan_package(random_model(), format="int8", opset_domain="standard", **GEOMETRY)
    spec = next(spec for spec in plan.blueprint.specs if spec.kind == "mtp_draft")
    model = ir.to_proto(standard_model(plan.blueprint, spec))
    check_nodes(model)
    stored = {t.name for t in model.graph.initializer if t.data_type == onnx.TensorProto.INT8}
    read = [n for n in model.graph.node if stored & set(n.input)]
    kinds = [node.op_type for node in read]
    # The vocabulary is stored by rows: its product takes it transposed, the embedding gathers.
    assert set(kinds) == {"MatMulInteger", "Transpose", "Gather"}
    assert kinds.count("Transpose") == 1


LONG = GEOMETRY | {"prefill_chunk": 128, "max_model_len": 256, "lookaheads": ()}


def test_a_long_chunk_needs_no_other_operators() -> None:
    """Its delta rule works on blocks of rows, with products that a short one does without."""
    plan = plan_package(random_model(), format="fp32", opset_domain="standard", **LONG)
    check_nodes(ir.to_proto(standard_model(plan.blueprint, plan.blueprint.specs[0])))


@pytest.mark.slow
def test_a_long_chunk_gives_the_logits_of_the_default_package(tmp_path: Path) -> None:
    plan = plan_package(random_model(), format="fp32", opset_domain="standard", **LONG)
    write_package(plan, tmp_path, Silent())
    packages = Package.open(tmp_path), default_package(random_model(), format="fp32", **LONG)
    prompt = np.random.default_rng(1).integers(0, 256, 150).tolist()
    tracks = []
    for package in packages:
        session = Session(package, threads=1, keep_logits=True)
        tracks.append(begin(session, Track(prompt, nothing)))
        for _ in range(3):
            advance(session, tracks[-1:])
    assert tracks[0].tokens == tracks[1].tokens
    for mine, theirs in zip(tracks[0].logits, tracks[1].logits, strict=True):
        assert np.abs(mine - theirs).max() <= 1e-4


def test_all_models_read_one_weight_file() -> None:
    package = standard("random", "fp32")
    stored = {t.name: t for t in package.manifest.weights}
    for _, path in files(package):
        graph = onnx.load(path, load_external_data=False).graph
        outside = [t for t in graph.initializer if t.external_data]
        for tensor in outside:
            place = {e.key: e.value for e in tensor.external_data}
            assert place["location"] == package.manifest.weights_file
            assert int(place["offset"]) == stored[tensor.name].offset
        inside = [t for t in graph.initializer if not t.external_data]
        assert sum(onnx.numpy_helper.to_array(t).nbytes for t in inside) < 64 << 10
        assert outside


def test_a_pool_is_read_by_what_renews_it_and_nothing_else() -> None:
    """So its input and its output may be one buffer."""
    for spec, path in files(standard("random", "fp32")):
        graph = onnx.load(path, load_external_data=False).graph
        assert spec.in_place
        for name in spec.in_place:
            readers = [node for node in graph.node if name in node.input]
            assert [node.op_type for node in readers] == ["ScatterND"], name
            assert readers[0].input[0] == name
            assert readers[0].output[0] == f"{name}.out"


def test_they_run_in_a_plain_session_of_onnx_runtime() -> None:
    """Weights found by the models themselves, beside them."""
    package = standard("random", "fp32")
    spec, path = next(files(package))
    session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    feeds = {t.name: np.zeros(t.shape, t.dtype) for t in spec.inputs}
    results = session.run(None, feeds)
    found = [(v.name, r.shape) for v, r in zip(session.get_outputs(), results, strict=True)]
    assert found == [(t.name, t.shape) for t in spec.all_outputs]


QUANTISED = [slow("random", "int8"), slow("trained", "int8"), slow("random", "fp16")]


@pytest.mark.parametrize(("name", "format"), [("random", "fp32"), ("trained", "fp32"), *QUANTISED])
def test_forced_rounds_give_the_tokens_and_logits_of_the_default_package(
    name: str, format: str
) -> None:
    plain, ours = (
        Session(package, threads=1, num_speculative_tokens=3, keep_logits=True)
        for package in (default(name, format), standard(name, format))
    )
    vocabulary = plain.package.manifest.config.vocab_size
    draw = np.random.default_rng(0)
    prompts = [draw.integers(0, vocabulary, n).tolist() for n in (21, 7)]
    truths = [begin(plain, Track(prompt, nothing)) for prompt in prompts]
    for _ in range(30):
        advance(plain, truths)
    scripts = [cycle([Want(a, 3) for a in order]) for order in ((0, 1, 2, 3), (3, 2, 0, 1))]
    tracks = [
        begin(ours, Track(prompt, Scripted(truth.tokens, script, vocabulary)))
        for prompt, truth, script in zip(prompts, truths, scripts, strict=True)
    ]
    for _ in range(8):
        advance(ours, tracks)
    tolerance = {"fp32": 1e-4, "int8": 1e-4 if name == "random" else 0.5, "fp16": 0.3}[format]
    for truth, track in zip(truths, tracks, strict=True):
        assert set(track.accepted) == {0, 1, 2, 3}
        assert track.tokens == truth.tokens[: len(track.tokens)]
        gaps = [np.abs(a - b).max() for a, b in zip(track.logits, truth.logits, strict=False)]
        assert max(gaps) <= tolerance


def test_own_drafts_are_those_of_the_default_package() -> None:
    packages = default("trained", "fp32"), standard("trained", "fp32")
    sessions = [Session(package, threads=1) for package in packages]
    found = []
    for session in sessions:
        tracks = [begin(session, Track(list(ids), own)) for ids in (range(40, 61), range(7))]
        drafts = []
        for _ in range(6):
            results = session.step()
            drafts.append(session.engine.buffer("mtp_draft_k3", "draft_ids").tolist())
            drafts.append([results[t.slot].tokens for t in tracks])
        found.append(drafts)
    assert found[0] == found[1]


@pytest.mark.parametrize("format", ["fp32", slow("int8"), slow("fp16")])
def test_a_standard_package_passes_its_check(format: str) -> None:
    report = verify_package(standard("random", format).directory, threads=1)
    assert [check for check in report.checks if not check.passed] == []


def test_the_script_compiles_every_model_in_its_folder(tmp_path: Path) -> None:
    package = standard("random", "fp32")
    atc = tmp_path / "atc"
    atc.write_text(
        f'#!/bin/sh -e\nls "${{2#--model=}}" weights.bin >&2\necho "$@" >> {tmp_path}/log\n'
    )
    atc.chmod(0o755)
    folder = tmp_path / "package"
    folder.mkdir()
    for path in package.directory.iterdir():
        (folder / path.name).symlink_to(path)
    script = (package.directory / "atc-onnx.sh").read_text()
    (folder / "atc-onnx.sh").unlink()
    (folder / "atc-onnx.sh").write_text(script)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    environment["SOC_VERSION"] = "Ascend910B3"
    subprocess.run(["sh", str(folder / "atc-onnx.sh")], env=environment, check=True, cwd="/")
    lines = (tmp_path / "log").read_text().splitlines()
    assert len(lines) == len(package.manifest.graphs)
    note = (package.directory / "README.md").read_text()
    for line, graph in zip(lines, package.manifest.graphs, strict=True):
        assert f"--framework=5 --model={graph.name}.onnx --output=om/{graph.name} " in line
        assert "--soc_version=Ascend910B3" in line
        assert f"atc {line.replace('910B3', '910B4')}\n" in note


def test_the_script_says_where_atc_comes_from(tmp_path: Path) -> None:
    script = tmp_path / "atc-onnx.sh"
    script.write_text((standard("random", "fp32").directory / script.name).read_text())
    for name in ("dirname", "mkdir"):
        (tmp_path / name).symlink_to(str(shutil.which(name)))
    done = subprocess.run(
        ["/bin/sh", str(script)],
        env={"PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    line = "error: atc not found; source CANN's set_env.sh\n"
    assert (done.returncode, done.stdout, done.stderr) == (1, "", line)
    assert not (tmp_path / "om").exists()


BAD = {
    "GE models": (("--target", "air", "--opset-domain", "standard"), 2, ["--target onnx"]),
    "4 bits": (("--opset-domain", "standard", "--format", "int4"), 1, ["fp32, fp16 or int8"]),
    "bfloat16": (("--opset-domain", "standard", "--format", "bf16"), 1, ["fp32, fp16 or int8"]),
    "a dtype": (
        ("--opset-domain", "standard", "--format", "fp32", "--dtype", "float16"),
        1,
        ["dtype is float16", "float32"],
    ),
    "half elsewhere": (("--format", "fp16"), 1, ["fp32, int8 or int4"]),
    "another domain": (("--opset-domain", "onnx"), 2, ["opset-domain"]),
}


@pytest.mark.parametrize("name", BAD)
def test_contradicting_choices_are_refused_in_one_line(name: str, tmp_path: Path) -> None:
    options, code, fragments = BAD[name]
    refused(qwen_mtp_export(checkpoint(), tmp_path / "p", *options), code, *fragments)
    assert not (tmp_path / "p").exists()


def test_the_domain_is_checked_where_it_does_not_come_from_the_command() -> None:
    domain: Any = "onnx"
    with pytest.raises(ExportError, match="opset_domain is 'onnx': give microsoft or standard"):
        plan_package(random_model(), format="fp32", opset_domain=domain, **GEOMETRY)


def test_the_command_says_nothing_but_what_it_wrote() -> None:
    package, result = by_command()
    assert (result.exit_code, result.stderr) == (0, "")
    assert package.manifest.geometry.layout == "paged"
    names = {path.name for path in package.directory.iterdir()}
    graphs = {f"{graph.name}.onnx" for graph in package.manifest.graphs}
    assert names >= graphs | {"weights.bin", "atc-onnx.sh", "README.md"}
    assert "model.onnx" not in names
