"""``qwen-mtp doctor``: what it measures is what packages compute, and advice follows from it."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from qwen_mtp.bench.costs import DraftCost, Passes, RowsCost, Samples
from qwen_mtp.cli import main
from qwen_mtp.custom_ops.linear import linear, linear_int4, linear_int8_rows
from qwen_mtp.doctor import measure
from qwen_mtp.doctor.advice import Advice, Bandwidth, advise, choose_format, choose_threads
from qwen_mtp.doctor.costs import (
    Costs,
    ModelShape,
    ProductCost,
    along,
    draft_rows,
    estimated,
    expected_tokens,
)
from qwen_mtp.doctor.environment import Environment, instruction_sets, look_around
from qwen_mtp.doctor.onnx_bytes import Node, Value, model_bytes
from qwen_mtp.doctor.package import PackageCost, PackageFacts
from qwen_mtp.doctor.package_advice import advise_package
from qwen_mtp.doctor.products import HIDDEN, WIDE, Probe, ProbeShape, some_weights
from qwen_mtp.runtime.native import find_kernels
from tests.commands import qwen_mtp, refused, verified_package

SHAPE = ModelShape.of_size(0.75e9)
MACHINE = Environment(
    cpu="a processor",
    architecture="x86_64",
    instructions=("AVX2", "AVX-512 VNNI"),
    cores=8,
    cpu_limit=None,
    memory_bytes=16 << 30,
    free_bytes=8 << 30,
    memory_limit=None,
    versions=(("python", "3"),),
    compiler="c++",
    kernels="kernels.so",
    no_kernels="",
    cache="cache",
    load=None,
)
BANDWIDTHS = (Bandwidth(threads=1, speed=10), Bandwidth(threads=8, speed=40))


def product(format: str, kernels: str, *ms: float, **facts: Any) -> ProductCost:
    """Products that take so long with 1, 2, 4 and 8 rows."""
    rows = zip((1, 2, 4, 8), ms, strict=True)
    costs = tuple(RowsCost(rows=r, ms=Samples.of([t])) for r, t in rows)
    return ProductCost(format=format, kernels=kernels, weights=10**9, rows=costs, **facts)


INT8 = product("int8", "native", 40, 40, 42, 50)
INT8_ORT = product("int8", "onnxruntime", 46, 47, 49, 60)
INT4 = product("int4", "native", 35, 40, 60, 100)
FP32 = product("fp32", "onnxruntime", 160, 160, 165, 170)
ALL = (INT8, INT8_ORT, INT4, FP32)


def advice(costs: tuple[ProductCost, ...] = ALL, **machine: Any) -> Advice:
    return advise(replace(MACHINE, **machine), costs, BANDWIDTHS, SHAPE)


def chosen(found: Advice) -> dict[str, str]:
    return {line.what: line.choice for line in found.recommendations}


def accepted(command: str) -> None:
    """Check that our own parser takes a command."""
    program, *words = command.split()
    if program == "qwen-mtp-export":
        words = ["export", *words]
    group = main.commands[words[0]]
    known = {name for param in group.params for name in (*param.opts, *param.secondary_opts)}
    assert [word for word in words if word.startswith("-") and word not in known] == []


def test_models_are_what_onnx_reads() -> None:
    node = Node("Kind", ("x", "w"), "y", "com.microsoft", {"K": 300, "transB": 1})
    values = Value("x", "float32", ("M", 1024)), Value("y", "int64", ())
    stored = Value("one", "float32", (), np.float32(1).tobytes())
    given = Value("w", "uint8", (3, 1 << 20, 16))
    data = model_bytes([node], values[:1], values[1:], [stored, given])
    model = onnx.load_model_from_string(data)
    assert model.SerializeToString() != b""
    (made,) = model.graph.node
    assert (made.op_type, made.domain, [*made.input], [*made.output]) == (
        "Kind", "com.microsoft", ["x", "w"], ["y"],
    )  # fmt: skip
    assert {a.name: onnx.helper.get_attribute_value(a) for a in made.attribute} == node.attributes
    dims = model.graph.input[0].type.tensor_type.shape.dim
    assert (dims[0].dim_param, dims[1].dim_value) == ("M", 1024)
    one, w = model.graph.initializer
    assert onnx.numpy_helper.to_array(one) == 1
    assert (w.data_type, [*w.dims], w.data_location) == (onnx.TensorProto.UINT8, [*given.shape], 1)


@pytest.mark.parametrize("format", ["int8", "int4", "fp32"])
@pytest.mark.parametrize("native", [False, True])
def test_a_probe_computes_what_the_operators_mean(format: str, native: bool) -> None:
    library = find_kernels().library if native else None
    if native and (library is None or format == "fp32"):
        pytest.skip("no native kernels")
    shape = ProbeShape(format, 1, 96)
    assert shape.weights == 2 * HIDDEN * WIDE + HIDDEN * 96
    probe = Probe(shape, some_weights(shape.nbytes), 1, library)
    x = np.random.default_rng(0).standard_normal((3, HIDDEN), np.float32)
    expected = x
    for i in range(3):
        weights = [probe._weights[name] for name in (f"w{i}", f"s{i}") if name in probe._weights]
        meaning: Any = {"int8": linear_int8_rows, "int4": linear_int4, "fp32": linear}[format]
        expected = meaning(expected, *weights)
    found = probe.run(x)
    assert np.abs(found - expected).max() < 1e-2 * np.abs(expected).max()
    assert probe.difference((2, 4)) == ""


def test_a_row_that_its_neighbours_move_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = ProbeShape("fp32", 1, 32)
    probe = Probe(shape, some_weights(shape.nbytes), 1, None)
    run = probe.run
    monkeypatch.setattr(Probe, "run", lambda _, x: run(x) + np.float32(len(x) == 4))
    assert probe.difference((2, 4, 8)) == "row 0 of 4 has other bits than alone"


@pytest.mark.parametrize("format", ["int8", "int4", "fp32"])
def test_probes_keep_to_the_memory_they_are_given(format: str) -> None:
    for count in (1 << 26, 1 << 28):
        assert ProbeShape.within(format, count).nbytes <= count
    least = ProbeShape.within(format, 1)
    assert least.layers == 1


def test_a_machine_that_hides_everything_is_described(tmp_path: Path) -> None:
    found = look_around(tmp_path)
    assert (found.instructions, found.memory_bytes, found.free_bytes) == ((), 0, 0)
    assert (found.cpu_limit, found.memory_limit) == (None, None)
    assert found.threads >= 1
    assert not found.integer_products


@pytest.mark.parametrize(
    "files",
    [
        {"cpu.max": "150000 100000\n", "memory.max": "1000000", "memory.current": "300000"},
        {
            "cpu/cpu.cfs_quota_us": "150000",
            "cpu/cpu.cfs_period_us": "100000",
            "memory/memory.limit_in_bytes": "1000000",
            "memory/memory.usage_in_bytes": "300000",
        },
    ],
    ids=["version 2", "version 1"],
)
def test_limits_of_control_groups_count(tmp_path: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = tmp_path / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 9000000 kB\nMemAvailable: 8000000 kB\n")
    (tmp_path / "proc/cpuinfo").write_text("model name: x\nFeatures\t: fp asimd asimddp i8mm\n")
    found = look_around(tmp_path)
    assert (found.cpu_limit, found.memory_limit, found.free_bytes) == (1.5, 10**6, 700_000)
    assert replace(found, cores=8).threads == 1
    assert instruction_sets(tmp_path) == ("NEON", "dotprod", "i8mm")
    assert found.integer_products
    (tmp_path / "sys/fs/cgroup/cpu.max").write_text("max 100000\n")
    assert look_around(tmp_path).cpu_limit in (None, 1.5)


def test_lookahead_follows_costs() -> None:
    assert expected_tokens(3, 0.5) == 1.875
    free = Costs(plain=1, verify=((2, 1), (8, 1)), draft=0)
    assert free.best_lookahead(1.0, 7) == 7
    assert free.speedup(3, 1.0) == 4
    dear = Costs(plain=1, verify=((2, 1), (8, 4)), draft=1)
    assert dear.best_lookahead(0.8, 7) == 0
    usual = Costs(plain=1, verify=((2, 1), (4, 1.05), (8, 1.4)), draft=0.1)
    best = [usual.best_lookahead(a, 7) for a in (0.3, 0.6, 0.9)]
    assert best == sorted(best)
    assert 0 < best[0] < best[2]
    assert [along([(2, 1.0), (4, 2.0)], x) for x in (2, 3, 4, 6)] == [1, 1.5, 2, 3]
    assert along([(4, 2.0)], 9) == 2


def test_three_drafts_read_less_than_a_third_of_a_token() -> None:
    for format in ("int8", "int4", "fp32"):
        rows = draft_rows(SHAPE, format)
        assert 3 * SHAPE.draft_weights(format, rows) <= 0.3 * SHAPE.weights
        assert 3 * SHAPE.draft_weights(format, 2 * rows) > 0.3 * SHAPE.weights
    assert draft_rows(SHAPE, "int8") == 32768
    assert draft_rows(replace(SHAPE, vocabulary=2048), "int8") == 0
    assert draft_rows(replace(SHAPE, weights=1e12), "int8") == 0
    assert estimated(INT8, SHAPE, 0).draft > 3 * estimated(INT8, SHAPE, 32768).draft


def test_a_fast_machine_is_told_to_draft_in_int8() -> None:
    found = advice()
    assert chosen(found) == {
        "format": "int8",
        "kernels": "native",
        "drafts": "3",
        "draft vocabulary": "32768",
        "threads": "8",
    }
    assert [gain.acceptance for gain in found.gains] == [0.8, 0.7, 0.6]
    assert all(gain.speedup > 1.3 for gain in found.gains)
    assert "--format int8" in found.commands[0]
    assert "--draft-vocab 32768" in found.commands[0]
    for command in found.commands:
        accepted(command)
    assert "--no-native" not in found.commands[1]


def test_slower_native_kernels_are_left_out() -> None:
    slow = product("int8", "native", 60, 60, 70, 90)
    found = advice((slow, INT8_ORT))
    assert chosen(found)["kernels"] == "onnxruntime"
    assert "--no-native" in found.commands[1]
    accepted(found.commands[1])


def test_int4_is_for_little_memory_or_a_clear_gain() -> None:
    assert choose_format(MACHINE, ALL, SHAPE)[0] is INT8
    quick = product("int4", "native", 20, 20, 22, 30)
    assert choose_format(MACHINE, (INT8, quick), SHAPE)[0] is quick
    best, why = choose_format(replace(MACHINE, free_bytes=900_000_000), ALL, SHAPE)
    assert best is INT4
    assert "0.9 GB are free" in why
    nothing = choose_format(replace(MACHINE, free_bytes=1000), ALL, SHAPE)
    assert nothing[0] is INT4
    assert "fits" in nothing[1]


def test_int8_that_may_saturate_is_not_chosen() -> None:
    old = replace(MACHINE, instructions=("AVX2",))
    int4 = product("int4", "onnxruntime", 35, 40, 60, 100)
    best, why = choose_format(old, (INT8_ORT, int4), SHAPE)
    assert best is int4
    assert "saturate" in why
    assert choose_format(old, (INT8, INT8_ORT, int4), SHAPE)[0] is INT8
    arm = replace(old, architecture="aarch64", instructions=("NEON",))
    assert choose_format(arm, (INT8_ORT, int4), SHAPE)[0] is INT8_ORT


def test_formats_whose_rows_move_are_not_drafted_in() -> None:
    broken = replace(INT8, difference="row 1 of 4 has other bits than alone")
    best, why = choose_format(MACHINE, (broken, INT4), SHAPE)
    assert best is INT4
    assert "row 1 of 4" in why
    found = advice((broken,))
    assert chosen(found)["drafts"] == "0"
    assert found.gains == ()
    for command in found.commands:
        accepted(command)
    failed = ProductCost(format="int8", kernels="native", failure="refused")
    assert "refused" in advice((failed,)).recommendations[0].reason
    assert advice(()).commands


def test_drafts_that_never_pay_are_left_out() -> None:
    steep = product("int8", "native", 40, 80, 160, 320)
    found = advise(MACHINE, (steep,), BANDWIDTHS, replace(SHAPE, drafter=4e9))
    assert chosen(found)["drafts"] == "0"
    assert "--no-mtp" in found.commands[0]
    for command in found.commands:
        accepted(command)


def test_threads_follow_limits_and_memory() -> None:
    assert choose_threads(MACHINE, BANDWIDTHS, 3).choice == "3"
    assert choose_threads(MACHINE, (), None).choice == "8"
    worse = (Bandwidth(threads=1, speed=40), Bandwidth(threads=8, speed=20))
    assert choose_threads(MACHINE, worse, None).choice == "1"
    limited = replace(MACHINE, cpu_limit=2.0)
    assert limited.threads == 2
    assert "2 of 8 cores" in choose_threads(limited, BANDWIDTHS, None).reason


def package_cost(kernels: str, plain: float, verify: float, draft: float) -> PackageCost:
    passes = Passes(
        plain=Samples.of([plain]),
        verify=(
            RowsCost(rows=2, ms=Samples.of([plain])),
            RowsCost(rows=4, ms=Samples.of([verify])),
        ),
        drafts=(DraftCost(lookahead=3, ms=Samples.of([draft])),),
    )
    return PackageCost(kernels=kernels, passes=passes, rows="same bits", exact=True)


def facts(*costs: PackageCost, format: str = "int8") -> PackageFacts:
    return PackageFacts(
        name="package",
        format=format,
        lookaheads=(3,),
        draft_rows=0,
        context=256,
        shape=SHAPE,
        costs=costs,
    )


def test_a_package_is_judged_by_its_own_passes() -> None:
    good = facts(package_cost("native", 40, 42, 9), package_cost("onnxruntime", 46, 48, 10))
    found = advise_package(MACHINE, ALL, BANDWIDTHS, good)
    assert chosen(found)["kernels"] == "native"
    assert chosen(found)["drafts"] == "3"
    assert len(found.commands) == 1
    assert "fits this machine" in found.verdict
    dear = advise_package(MACHINE, ALL, BANDWIDTHS, facts(package_cost("native", 40, 42, 75)))
    assert "--draft-vocab 32768" in dear.commands[0]
    assert "export it again" in dear.verdict
    other = facts(package_cost("native", 40, 60, 9), format="int4")
    assert "--format int8" in advise_package(MACHINE, ALL, BANDWIDTHS, other).commands[0]
    moved = replace(package_cost("native", 40, 42, 9), exact=False, rows="row 1 differs")
    unsafe = advise_package(MACHINE, ALL, BANDWIDTHS, facts(moved))
    assert chosen(unsafe)["drafts"] == "0"
    assert "row 1 differs" in unsafe.recommendations[0].reason
    accepted(unsafe.commands[0])


def test_doctor_looks_at_the_machine_and_a_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "ROUNDS", 1)
    monkeypatch.setattr(measure, "ROWS", (1, 2, 4))
    monkeypatch.setattr(measure, "LARGEST", measure.LEAST)
    result = qwen_mtp("doctor", verified_package(), "--threads", 1, "--json", "-q")
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)
    native = bool(found["environment"]["kernels"])
    costs = {cost["kernels"]: cost for cost in found["package"]["costs"]}
    assert list(costs) == ["native", "onnxruntime"]
    if not native:
        assert found["environment"]["no_kernels"] in costs.pop("native")["failure"]
    assert all(cost["exact"] and not cost["failure"] for cost in costs.values())
    assert len(found["products"]) == (5 if native else 3)
    assert all(cost["usable"] for cost in found["products"])
    text = qwen_mtp("doctor", "--threads", 1, "--weights-gb", 27, "-q")
    assert text.exit_code == 0, text.stderr
    assert text.stdout.splitlines()[-1].startswith("verdict   ")
    assert "27e9 weights" in text.stdout
    assert text.stderr == ""


def test_doctor_refuses_what_it_cannot_look_at(tmp_path: Path) -> None:
    refused(qwen_mtp("doctor", tmp_path, "-q"), 1, "manifest.json")
    refused(qwen_mtp("doctor", tmp_path, "--weights-gb", 1), 2, "--weights-gb")
    refused(qwen_mtp("doctor", "--weights-gb", "nan"), 2, "'nan' is")
    refused(
        qwen_mtp("bench", tmp_path, "--forced-acceptance", "1,nan"), 2, "'nan' is not a number"
    )
