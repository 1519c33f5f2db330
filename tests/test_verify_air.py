"""``verify`` passes packages for Ascend as they are exported and names what is wrong."""

import json
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from qwen_mtp import checks_ge_bench
from qwen_mtp.checks_decoding import Script
from qwen_mtp.checks_ge import OPERATOR_RULES
from qwen_mtp.checks_ge_bench import GeBench, torch_threads
from qwen_mtp.checks_golden import ASCEND_GOLDEN, check_golden
from qwen_mtp.checks_sampler import check_sampler
from qwen_mtp.checks_tolerant import Tolerant, check_tolerant
from qwen_mtp.cli import main
from qwen_mtp.errors import MissingExtraError, PackageError
from qwen_mtp.export.package import file_entry
from qwen_mtp.ge.check import check_graph
from qwen_mtp.ge.interpreter import Interpreter
from qwen_mtp.ge.proto import load_air
from qwen_mtp.ge.soc import find_soc
from qwen_mtp.golden import write_golden
from qwen_mtp.graphs.manifest import load_manifest
from qwen_mtp.progress import Silent
from qwen_mtp.runtime.package import Package
from qwen_mtp.runtime.session import Session
from qwen_mtp.verify import Report, verify_package
from tests.air_commands import air_copy, air_package_of_the_commands
from tests.air_packages import air_package
from tests.commands import call
from tests.ge_graphs import needs_wheel, prototypes
from tests.ge_mutants import static_mutants, value_mutants
from tests.packages import random_checkpoint

pytestmark = needs_wheel

RUN = ["files", "structure", "prototypes", "load", "golden", "decoding", "sampler"]
VERIFY = "target_verify_r2"
FLOAT, FLOAT16 = 1, 2  # dtypes of a descriptor


def fused() -> Path:
    """Two slots, K = 1, bfloat16."""
    small = random_checkpoint(num_hidden_layers=2, full_attention_interval=2)
    return air_package(small, "fused", lookaheads=(1,)).directory


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A portable float32 package that the test may damage."""
    return air_copy(tmp_path)


def failed(report: Report) -> dict[str, str]:
    return {check.name: check.detail for check in report.checks if not check.passed}


def relist(path: Path, *names: str) -> None:
    """Let the manifest agree with changed files."""
    manifest = load_manifest(path)
    kept = [file for file in manifest.files if file.path not in names]
    files = tuple(kept + [file_entry(path, name) for name in names])
    msgspec.structs.replace(manifest, files=files).save(path)


def edit_air(path: Path, change: Callable[[Any], None], graph: str = VERIFY) -> dict[str, str]:
    """Change a model and what the manifest says of its file; what fails then."""
    name = f"ascend/{graph}.air"
    model = load_air(path / name)
    change(model)
    (path / name).write_bytes(model.SerializeToString(deterministic=True))
    relist(path, name)
    return failed(verify_package(path))


def first(model: Any, op_type: str) -> Any:
    return next(op for op in model.graph[0].op if op.type == op_type)


def test_a_portable_package_passes_and_says_how_closely() -> None:
    report = verify_package(air_package_of_the_commands()[0])
    assert failed(report) == {}
    assert [check.name for check in report.checks] == RUN
    assert report.max_logit_error is not None
    assert report.max_logit_error < 1e-4
    assert report.patterns >= 5
    assert report.near_ties == 0
    assert report.record().greedy_equal


def test_a_fused_package_passes_within_its_rounding() -> None:
    report = verify_package(fused())
    assert failed(report) == {}
    assert [check.name for check in report.checks] == RUN
    assert report.max_logit_error is not None
    assert 1e-6 < report.max_logit_error < 0.1
    assert report.patterns >= 5
    assert report.record().greedy_equal == (report.near_ties == 0)


def test_the_command_prints_the_checks_as_json() -> None:
    result = call(main, "verify", "--json", air_package_of_the_commands()[0])
    assert result.exit_code == 0, result.stderr
    assert [check["name"] for check in json.loads(result.stdout)["checks"]] == RUN


def test_golden_values_lie_beside_the_models_and_repeat_bit_for_bit(own: Path) -> None:
    before = (own / ASCEND_GOLDEN).read_bytes()
    assert ASCEND_GOLDEN in {file.path for file in load_manifest(own).files}
    assert write_golden(own)
    assert (own / ASCEND_GOLDEN).read_bytes() == before


@pytest.mark.parametrize("name", [f"{VERIFY}.air", "weights/mtp.norm.weight", "golden.npz"])
def test_a_flipped_byte_is_found_in_any_file(own: Path, name: str) -> None:
    path = own / "ascend" / name
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    report = verify_package(own)
    assert list(failed(report)) == ["files"]
    assert f"ascend/{name}: sha256 differs" in failed(report)["files"]
    assert [check.name for check in report.checks] == ["files"], "damaged files are not run"


def test_a_missing_file_fails_by_name(own: Path) -> None:
    (own / "ascend" / f"{VERIFY}.air").unlink()
    assert f"ascend/{VERIFY}.air: not there" in failed(verify_package(own))["files"]


def test_what_atc_leaves_beside_the_models_is_nobody_s_fault(own: Path) -> None:
    (own / "ascend" / "om").mkdir()
    (own / "ascend" / "om" / f"{VERIFY}.om").write_bytes(b"compiled")
    (own / "notes.txt").write_text("mine", encoding="utf-8")
    found = failed(verify_package(own))
    assert found == {"files": "notes.txt: the manifest does not list it; remove it"}


def test_a_file_that_is_no_model_is_a_finding_of_structure(own: Path) -> None:
    name = f"ascend/{VERIFY}.air"
    (own / name).write_bytes(b"not a model")
    relist(own, name)
    found = failed(verify_package(own))
    assert found.keys() == {"structure"}
    assert VERIFY in found["structure"]
    assert "\n" not in found["structure"]


def test_another_epsilon_computes_something_else(own: Path) -> None:
    def change(model: Any) -> None:
        mean = first(model, "ReduceMean").name
        add = next(op for op in model.graph[0].op if f"{mean}:0" in op.input and op.type == "Add")
        const = producer(model, next(ref for ref in add.input if ref != f"{mean}:0"))
        const.attr["value"].t.data = np.float32(0.5).tobytes()

    found = edit_air(own, change)
    assert "golden" in found
    assert found["golden"].startswith(f"{VERIFY}: ")


def producer(model: Any, ref: str) -> Any:
    return next(op for op in model.graph[0].op if op.name == ref.rpartition(":")[0])


def test_swapped_edges_of_a_difference_compute_something_else(own: Path) -> None:
    def change(model: Any) -> None:
        op = next(op for op in reversed(model.graph[0].op) if op.type == "Sub")
        op.input[0], op.input[1] = op.input[1], op.input[0]

    assert {"golden", "decoding", "sampler"} & edit_air(own, change).keys()


def test_swapped_edges_of_different_kinds_break_a_prototype(own: Path) -> None:
    def change(model: Any) -> None:
        op = first(model, "GatherV2")
        op.input[0], op.input[1] = op.input[1], op.input[0]

    found = edit_air(own, change)
    assert VERIFY in found["prototypes"]
    assert "GatherV2" in found["prototypes"]


def test_another_dtype_of_an_input_breaks_the_interface(own: Path) -> None:
    def change(model: Any) -> None:
        op = next(op for op in model.graph[0].op if op.name == "temperature")
        for desc in (*op.input_desc, *op.output_desc):
            desc.dtype = FLOAT16

    found = edit_air(own, change)
    assert "temperature" in found["structure"]
    assert "interface" in found["structure"]


def test_an_undeclared_dtype_breaks_a_prototype(own: Path) -> None:
    def change(model: Any) -> None:
        op = first(model, "Rsqrt")
        op.output_desc[0].dtype = FLOAT16

    found = edit_air(own, change)
    assert list(found) == ["prototypes"]
    assert f"{VERIFY}: declared: Rsqrt" in found["prototypes"]


def test_a_renamed_output_breaks_the_interface(own: Path) -> None:
    def change(model: Any) -> None:
        text = model.graph[0].op[-1].input[0]
        producer(model, text).name = "other"
        for op in model.graph[0].op:
            for i, ref in enumerate(op.input):
                op.input[i] = ref.replace(text, "other:0") if ref == text else ref

    found = edit_air(own, change)
    assert list(found) == ["structure"]
    assert "output tokens comes from other:0" in found["structure"]


def test_other_weights_are_not_those_of_the_golden_values(own: Path) -> None:
    name = "ascend/weights/target.layers.1.input_norm.weight"
    values = np.fromfile(own / name, np.float32)
    (values * np.float32(1.5)).tofile(own / name)
    relist(own, name)
    found = failed(verify_package(own))
    assert found.keys() == {"golden"}
    assert "is off by" in found["golden"]


def test_a_loop_that_commits_too_little_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    commit = Session._commit

    def short(self: Session, *args: Any) -> Any:
        results = commit(self, *args)
        for sequence in self._slots.values():
            sequence.pending = min(sequence.pending, 1)
        return results

    monkeypatch.setattr(Session, "_commit", short)
    for path in (air_package_of_the_commands()[0], fused()):
        outcome = check_tolerant(GeBench(Package.open(path)), Silent())
        assert not outcome.check.passed
        assert "plain decoding" in outcome.check.detail


def test_of_a_large_model_few_accept_counts_are_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qwen_mtp.checks_tolerant.LARGE", 0)
    package = Package.open(fused())
    outcome = check_tolerant(GeBench(package), Silent())
    assert outcome.check.passed
    assert outcome.check.detail.endswith("few accept counts were forced: the model is large")
    assert outcome.patterns == 4 * package.manifest.geometry.max_num_seqs


def test_a_near_tie_ends_a_run_and_the_rest_is_forced_behind_another_prompt() -> None:
    """A run whose second token differs, in logits that can hardly tell."""
    bench = GeBench(Package.open(fused()))
    decoding, asked = Tolerant(bench, 12, 1e9), list[tuple[int, ...]]()
    play = decoding.play

    def tied(lookahead: int, scripts: Any) -> Any:
        asked.append(scripts[0].accepts)
        if len(asked) == 1:
            line = decoding.oracle(scripts[0].prompt)
            line.tokens[1] = (line.tokens[1] + 1) % bench.config.vocab_size
        return play(lookahead, scripts)

    decoding.play = tied  # type: ignore[method-assign]
    assert decoding.forced(1, [Script(decoding.prompts[0], (0, 1, 1, 0))]) is None
    assert decoding.ties >= 1
    assert len(asked) >= 2
    assert len(asked[-1]) <= len(asked[0])


def test_without_the_wheel_it_is_one_line(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise MissingExtraError("Ascend graphs need torch_npu; pip install 'qwen-mtp[npu]'")

    monkeypatch.setattr("qwen_mtp.ge.wheel.messages", missing)
    with pytest.raises(MissingExtraError, match="npu") as caught:
        verify_package(own)
    assert "\n" not in str(caught.value)


def test_without_torch_it_is_one_line(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, checks_ge_bench.__name__)
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(MissingExtraError, match="pip install") as caught:
        verify_package(own)
    assert "\n" not in str(caught.value)


class Judge:
    """Says which check refuses a model in the place of a verify graph.

    The graph of the package is run as well, so that a run is compared with the golden values.
    """

    def __init__(self, path: Path, graph: str) -> None:
        self.package, self.graph = Package.open(path), graph
        self.path = path / self.package.manifest.model_path(graph)
        self.spec = self.package.graph(graph)
        assert self.package.manifest.ascend is not None
        self.soc = find_soc(self.package.manifest.ascend.choice.soc_version)
        self.bench = GeBench(self.package)

    def caught(self, model: Any) -> str | None:
        found = check_graph(model, prototypes(), self.soc, self.spec, self.path.parent)
        rules = {finding.rule for finding in found}
        if rules - OPERATOR_RULES:
            return "structure"
        if rules:
            return "prototypes"
        return self.by_a_run(model)

    def by_a_run(self, model: Any) -> str | None:
        engine, names = self.bench._interpreted, [t.name for t in self.spec.outputs]
        try:
            engine._graphs[self.graph] = Interpreter(model, engine._weights, names)
            if not check_golden(self.bench, Silent())[0].passed:
                return "golden"
            if not check_sampler(self.bench, Silent()).passed:
                return "sampler"
        except PackageError:
            return "load"
        finally:
            engine._graphs.pop(self.graph, None)
        return None


def chosen(model: Any, most: int) -> Iterator[tuple[str, Any]]:
    """Of each kind of mutant the first ``most``."""
    taken: Counter[str] = Counter()
    for name, made in (*static_mutants(model), *value_mutants(model)):
        kind = name.rpartition(" at ")[0]
        taken[kind] += 1
        if taken[kind] <= most:
            yield name, made


# Bounds that no value sits on, and masks that also keep rows nobody reads.
HARMLESS = {
    "and becomes or",
    "less becomes less or equal",
    "less or equal becomes less",
    "an epsilon or a factor is another",
}


def judged(judge: Judge, mutants: Iterable[tuple[str, Any]]) -> tuple[Counter[str], set[str]]:
    """How many each check refuses, and kinds of those that none does."""
    counts, left = Counter[str](), set()
    assert judge.caught(load_air(judge.path)) is None
    for name, made in mutants:
        by = judge.caught(made)
        counts[by or "nobody"] += 1
        if by is None:
            left.add(name.rpartition(" at ")[0])
    return counts, left


def test_mutants_of_an_exported_graph_are_caught() -> None:
    judge = Judge(air_package_of_the_commands()[0], VERIFY)
    mutants = list(chosen(load_air(judge.path), 1))[::2]
    with torch_threads(judge.package, 1):
        counts, left = judged(judge, mutants)
    assert counts.total() >= 30
    assert min(counts[name] for name in ("structure", "prototypes", "golden")) >= 5
    assert left <= HARMLESS
    assert counts["nobody"] <= 2


@pytest.mark.slow
def test_few_mutants_of_a_fused_graph_hide_behind_the_rounding_of_bfloat16() -> None:
    judge = Judge(fused(), VERIFY)
    with torch_threads(judge.package, 1):
        counts, _ = judged(judge, chosen(load_air(judge.path), 3))
    assert counts.total() >= 100
    assert counts["nobody"] <= counts.total() // 8
    assert counts["golden"] > counts["nobody"]
