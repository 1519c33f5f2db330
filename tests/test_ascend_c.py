"""The Ascend C operator: one prototype everywhere, and the kernel on a CPU against the meaning."""

import ctypes
import itertools
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from qwen_mtp.custom_ops.rejection import REJECTION_SAMPLE, REJECTION_SAMPLE_LAWS
from qwen_mtp.custom_ops.rejection_ge import ALL_INPUTS, OP_TYPE, OUTPUTS
from qwen_mtp.ge import sampler
from tests.rejection_graphs import INTEGERS, SHAPES, uniform_batch
from tests.rejection_law import SCENARIOS, law_error
from tests.rejection_slots import Form, differing, exact_cases, run, slot_case, step

SOURCES = Path(__file__).parents[1] / "custom_ops" / "ascend_c"
STAND_IN = Path(__file__).parent / "ascend_c"
KERNEL = SOURCES / "op_kernel" / "mtp_rejection_sample.cpp"
HOST = SOURCES / "op_host" / "mtp_rejection_sample.cpp"
PORT = re.compile(
    r'this->(Input|Output)\("(\w+)"\)\s*\.ParamType\((\w+)\)\s*\.DataType\(\{ge::DT_(\w+)\}\)'
)
ARCHITECTURES = {"910B and A3": 220, "310P": 200}


def _ports() -> list[tuple[str, str, str, str]]:
    """Inputs and outputs of the prototype as the torch operators have them."""
    kinds = {name: "INT32" if name in INTEGERS else "FLOAT" for name in ALL_INPUTS}
    inputs = [
        ("Input", name, "OPTIONAL" if name == "draft_probs" else "REQUIRED", kind)
        for name, kind in kinds.items()
    ]
    return inputs + [("Output", name, "REQUIRED", "INT32") for name in OUTPUTS]


def test_the_prototype_has_the_inputs_of_the_torch_operators() -> None:
    for operator, names in (
        (REJECTION_SAMPLE, ALL_INPUTS[:-1]),
        (REJECTION_SAMPLE_LAWS, ALL_INPUTS),
    ):
        assert tuple(re.findall(r"Tensor (\w+)", operator.schema)) == names
        assert operator.schema.endswith("-> (Tensor, Tensor)")
    assert tuple(SHAPES) == ALL_INPUTS


def test_the_operator_definition_is_the_prototype() -> None:
    source = HOST.read_text(encoding="utf-8")
    assert PORT.findall(source) == _ports()
    assert f"OP_ADD({OP_TYPE});" in source
    assert re.findall(r'AddConfig\("(\w+)"\)', source) == [
        "ascend910b",
        "ascend910_93",
        "ascend310p",
    ]


def test_the_checker_of_graphs_knows_the_prototype() -> None:
    port = r"\.(OPTIONAL_)?(INPUT|OUTPUT)\((\w+), TensorType\(\{DT_(\w+)\}\)\)"
    found = [
        (side.capitalize(), name, "OPTIONAL" if optional else "REQUIRED", kind)
        for optional, side, name, kind in re.findall(port, sampler.PROTOTYPE)
    ]
    assert (sampler.OP_TYPE, found) == (OP_TYPE, _ports())


def test_the_input_of_msopgen_is_the_prototype() -> None:
    (document,) = json.loads((SOURCES / "mtp_rejection_sample.json").read_text(encoding="utf-8"))
    types = {"float": "FLOAT", "int32": "INT32"}
    found = [
        (kind, port["name"], port["param_type"].upper(), types[port["type"][0]])
        for kind, key in (("Input", "input_desc"), ("Output", "output_desc"))
        for port in document[key]
    ]
    assert (document["op"], found) == (OP_TYPE, _ports())


def test_the_kernel_takes_the_prototype_in_its_order_and_host_and_kernel_know_one_tiling() -> None:
    source = KERNEL.read_text(encoding="utf-8")
    arguments = re.findall(r"GM_ADDR (\w+)", source[source.index('extern "C"') :])
    ports = [name for _, name, _, _ in _ports()]
    assert arguments[: len(ports) + 2] == [*ports, "workspace", "tiling"]
    tiling = (SOURCES / "op_host" / "mtp_rejection_sample_tiling.h").read_text(encoding="utf-8")
    fields = re.findall(r"TILING_DATA_FIELD_DEF\(uint32_t, (\w+)\)", tiling)
    assert re.findall(r"tiling\.set_(\w+)\(", HOST.read_text(encoding="utf-8")) == fields
    text = source + (KERNEL.parent / "mtp_rejection_sample_passes.h").read_text(encoding="utf-8")
    assert set(re.findall(r"tiling\.(\w+)", text)) == set(fields)


def _compiled(kernel: Path, architecture: int, library: Path) -> Form:
    command = ["g++", "-std=c++17", "-O2", "-Wall", "-Wextra", "-Werror", "-Wno-unused-parameter"]
    command += ["-fno-strict-aliasing", "-shared", "-fPIC", f"-DSTAND_IN_ARCH={architecture}"]
    command += [f'-DSTAND_IN_KERNEL="{kernel}"', f"-I{STAND_IN}", f"-I{SOURCES / 'op_host'}"]
    done = subprocess.run(
        [*command, str(STAND_IN / "driver.cpp"), "-o", str(library)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    entry = ctypes.CDLL(str(library)).run
    cores = 3 if architecture >= 220 else 1

    def form(**inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        slots, rows, size = inputs["logits"].shape
        tokens = torch.full((slots, rows), -7, dtype=torch.int32)
        accepted = torch.full((slots,), -7, dtype=torch.int32)
        given = [inputs.get(name) for name in ALL_INPUTS]
        held = [x if x is None else x.contiguous() for x in (*given, tokens, accepted)]
        addresses = [None if x is None else x.data_ptr() for x in held]
        sizes = (slots, rows, size, inputs["stop_ids"].shape[1], "draft_probs" in inputs)
        entry((ctypes.c_void_p * len(held))(*addresses), (ctypes.c_uint32 * 5)(*sizes), cores)
        return tokens, accepted

    return form


@pytest.fixture(scope="module", params=ARCHITECTURES.values(), ids=ARCHITECTURES.keys())
def kernel(request: Any, tmp_path_factory: Any) -> Form:
    if shutil.which("g++") is None:
        pytest.skip("no C++ compiler")
    return _compiled(KERNEL, request.param, tmp_path_factory.mktemp("kernel") / "kernel.so")


@pytest.mark.parametrize("laws", [False, True])
def test_the_kernel_says_what_the_meaning_says_slot_for_slot(kernel: Form, laws: bool) -> None:
    rng, slots, found = np.random.default_rng([3, laws]), 0, []
    for v in (8, 16, 64, 72, 200, 1000, 4096, 4104, 9000):
        for _ in range(6):
            found += differing(kernel, slot_case(rng, 8, v, laws))
            slots += 8
    assert all(explained for _, explained in found), found
    assert len(found) < 0.01 * slots


def test_the_kernel_hits_exact_boundaries(kernel: Form) -> None:
    assert not [d for feeds in exact_cases(8) for d in differing(kernel, feeds)]


def test_the_law_of_the_kernel_is_the_targets_law(kernel: Form) -> None:
    """Vocabularies are widened to whole blocks by tokens that cannot be drawn."""

    def widened(**inputs: torch.Tensor) -> Any:
        pad = torch.nn.functional.pad
        extra = -inputs["logits"].shape[2] % 8
        inputs["logits"] = pad(inputs["logits"], (0, extra), value=float("-inf"))
        if "draft_probs" in inputs:
            inputs["draft_probs"] = pad(inputs["draft_probs"], (0, extra))
        return kernel(**inputs)

    assert max(law_error(step(widened), s) for s in SCENARIOS) <= 1e-6


def test_the_kernel_reads_a_vocabulary_of_full_size(kernel: Form) -> None:
    rng = np.random.default_rng(1)
    for ask in [(0.0, 0, 1.0), (1.0, 0, 1.0), (1.0, 50, 0.9)]:
        feeds = uniform_batch(rng.standard_normal((1, 2, 248_320)) * 3, rng, *ask)
        assert all(explained for _, explained in differing(kernel, feeds))


MUTANTS = {
    "accepts at equality": ("uniform * law < Weight", "uniform * law <= Weight"),
    "the draft stays in its residual": ("row.removed = hasLaws ? -1 : draft", "row.removed = -1"),
    "the residual is the target": ("hasLaws ? mass : 0.0f", "0.0f"),
    "bans one row more": ("(index) < bannedRowsGm", "(index) <= bannedRowsGm"),
    "top-k keeps one more": ("static_cast<float>(k)", "static_cast<float>(k + 1)"),
    "sorted slots in id order": ("topK > 0 || topP < 1.0f)", "false)"),
    "a row without a law draws": ("if (!Top(row))", "if (!Top(row) && index > 90)"),
}


@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
@pytest.mark.parametrize("name", MUTANTS)
def test_a_kernel_with_one_thing_wrong_is_found_out(name: str, tmp_path: Path) -> None:
    source = KERNEL.read_text(encoding="utf-8")
    assert source.count(MUTANTS[name][0]) == 1
    for header in KERNEL.parent.glob("*.h"):
        shutil.copy(header, tmp_path)
    (tmp_path / KERNEL.name).write_text(source.replace(*MUTANTS[name]), encoding="utf-8")
    mutant = _compiled(tmp_path / KERNEL.name, 220, tmp_path / "mutant.so")
    rng = np.random.default_rng(2)
    cases = itertools.chain(
        exact_cases(8), (slot_case(rng, 8, 64, laws) for laws in (False, True) * 8)
    )
    assert any(not explained for feeds in cases for _, explained in differing(mutant, feeds))


def test_a_slot_does_not_see_its_neighbours(kernel: Form) -> None:
    rng = np.random.default_rng(6)
    feeds = slot_case(rng, 6, 200, True)
    together = run(kernel, feeds)
    for b in range(6):
        alone = run(kernel, {n: a[b : b + 1].copy() for n, a in feeds.items()})
        np.testing.assert_array_equal(together[0][b], alone[0][0])
        assert together[1][b] == alone[1][0]
