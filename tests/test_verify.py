"""``verify`` passes what the exporter makes and fails, by name, on every defect put into it."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from qwen_mtp import verify
from qwen_mtp.checks_decoding import accept_counts
from qwen_mtp.checks_golden import GOLDEN
from qwen_mtp.errors import MissingExtraError, PackageError
from qwen_mtp.golden import write_golden
from qwen_mtp.graphs.manifest import MANIFEST, load_manifest
from qwen_mtp.runtime.native import find_kernels
from qwen_mtp.runtime.session import Session
from qwen_mtp.verify import Report, record_verification, verify_package
from tests.packages import package, random_checkpoint, relist, scratch
from tests.verified import failed

RUN = ["files", "load", "rows", "golden", "decoding", "sampler"]


@cache
def complete(**geometry: Any) -> Path:
    """A package with golden values; never written to by a test."""
    source = package(random_checkpoint(0), **geometry).directory
    path = scratch() / "verify" / source.name
    if not path.exists():
        shutil.copytree(source, path)
        write_golden(path)
    return path


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A package that the test may damage."""
    path = tmp_path / "package"
    shutil.copytree(complete(format="int8", lookaheads=(2,), max_model_len=96), path)
    return path


def verified(path: Path, checkpoint: Path | None = None) -> Report:
    """One thread: tests share the machine with each other."""
    return verify_package(path, checkpoint=checkpoint, threads=1)


@pytest.mark.parametrize(
    ("format", "slots", "lookaheads"),
    [
        ("fp32", 1, (3,)),
        ("int8", 2, (1, 3)),
        ("int4", 1, (2,)),
        ("int8", 1, ()),
        pytest.param("fp32", 2, (1, 2, 3, 4, 5), marks=pytest.mark.slow),
        pytest.param("int8", 3, (8, 15), marks=pytest.mark.slow),
        pytest.param("int4", 4, (7,), marks=pytest.mark.slow),
    ],
)
def test_what_the_exporter_makes_passes_every_check(
    format: str, slots: int, lookaheads: tuple[int, ...]
) -> None:
    path = complete(format=format, max_num_seqs=slots, lookaheads=lookaheads)
    report = verified(path)
    assert failed(report) == {}
    assert report.passed
    assert [check.name for check in report.checks] == RUN
    assert report.max_logit_error is not None
    assert 0 < report.max_logit_error < 0.3
    forced = sum(len(accept_counts(k)) for k in lookaheads)
    assert report.patterns >= forced
    assert (report.patterns > forced) == (slots > 1 and forced > 0) or max(
        lookaheads, default=0
    ) > 3


def test_the_outcome_is_kept_in_the_manifest(own: Path) -> None:
    report = verified(own)
    record_verification(own, report)
    record = load_manifest(own).verification
    assert record == report.record()
    assert record is not None
    assert record.greedy_equal
    assert record.machine
    assert verified(own).passed


def test_an_fp32_package_gives_the_logits_of_transformers() -> None:
    path = complete(format="fp32", lookaheads=(3,))
    report = verified(path, checkpoint=random_checkpoint(0))
    assert failed(report) == {}
    assert [check.name for check in report.checks] == [*RUN, "source", "transformers"]


def test_another_checkpoint_fails_by_fingerprint_and_by_logits() -> None:
    path = complete(format="fp32", lookaheads=(3,))
    found = failed(verified(path, checkpoint=random_checkpoint(1)))
    assert found.keys() == {"source", "transformers"}
    assert "fingerprint" in found["source"]


def test_a_quantised_package_reports_its_distance_from_transformers(own: Path) -> None:
    report = verified(own, checkpoint=random_checkpoint(0))
    assert report.passed
    assert "for information" in report.checks[-1].detail


def test_a_missing_library_is_one_line_with_the_remedy(
    own: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(MissingExtraError, match="pip install") as caught:
        verified(own, checkpoint=random_checkpoint(0))
    assert "\n" not in str(caught.value)


def test_it_runs_where_only_the_runtime_is_installed(own: Path) -> None:
    script = (
        "import sys\n"
        "for name in ('torch', 'onnx', 'onnx_ir', 'onnxscript', 'transformers'):\n"
        "    sys.modules[name] = None\n"
        "from qwen_mtp.verify import verify_package\n"
        "report = verify_package(sys.argv[1], threads=1)\n"
        "print(*(check.name for check in report.checks if check.passed))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(own)], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == RUN


@pytest.mark.parametrize("name", ["weights.bin", "model.onnx", "model.native.onnx", GOLDEN])
def test_a_flipped_byte_is_found_in_any_file(own: Path, name: str) -> None:
    data = bytearray((own / name).read_bytes())
    data[len(data) // 2] ^= 1
    (own / name).write_bytes(data)
    report = verified(own)
    assert list(failed(report)) == ["files"]
    assert f"{name}: sha256 differs" in failed(report)["files"]
    assert [check.name for check in report.checks] == ["files"], "damaged files are not run"


def test_missing_and_truncated_files_fail_by_name(own: Path) -> None:
    (own / GOLDEN).unlink()
    os.truncate(own / "weights.bin", 4096)
    report = verified(own)
    assert [check.name for check in report.checks] == ["files"]
    assert f"{GOLDEN}: not there" in failed(report)["files"]
    assert "weights.bin: 4096 bytes" in failed(report)["files"]


def test_an_unreadable_manifest_is_an_error_and_no_finding(own: Path) -> None:
    (own / MANIFEST).write_text("{", encoding="utf-8")
    with pytest.raises(PackageError, match=r"manifest\.json"):
        verified(own)


def test_a_file_that_is_not_listed_fails_by_name_and_the_rest_still_runs(own: Path) -> None:
    (own / "notes.txt").write_text("mine", encoding="utf-8")
    report = verified(own)
    assert list(failed(report)) == ["files"]
    assert "notes.txt" in failed(report)["files"]
    assert [check.name for check in report.checks] == RUN


@pytest.mark.parametrize(("name", "native"), [("model.onnx", False), ("model.native.onnx", True)])
def test_a_model_that_does_not_load_is_a_failed_check(own: Path, name: str, native: bool) -> None:
    if native and find_kernels().library is None:
        pytest.skip("no native kernels")
    (own / name).write_bytes(b"not a model")
    relist(own, name)
    report = verify_package(own, threads=1, native=native)
    assert list(failed(report)) == ["load"]
    assert "\n" not in failed(report)["load"]
    assert name in failed(report)["load"]


@pytest.mark.parametrize(
    ("tensor", "where"),
    [("target.layers.1.input_norm.weight", "prefill: "), ("mtp.norm.weight", "mtp_draft_k2: ")],
)
def test_a_changed_weight_keeps_rows_exact_but_not_the_golden_values(
    own: Path, tensor: str, where: str
) -> None:
    (place,) = (t for t in load_manifest(own).weights if t.name == tensor)
    with open(own / "weights.bin", "r+b") as file:
        file.seek(place.offset)
        values = np.frombuffer(file.read(place.nbytes), np.float32)
        file.seek(place.offset)
        file.write((values * np.float32(1.5)).tobytes())
    relist(own, "weights.bin")
    found = failed(verified(own))
    assert found.keys() == {"golden"}
    assert found["golden"].startswith(where)
    assert "is off by" in found["golden"]


@pytest.mark.parametrize("wrong", [7.0, np.nan])
@pytest.mark.parametrize(
    "key", ["prefill/0/out/logits", "target_verify_r3/0/out/layers.2.ssm.out"]
)
def test_a_golden_value_that_the_graph_does_not_give_fails(
    own: Path, key: str, wrong: float
) -> None:
    def change(arrays: dict[str, np.ndarray[Any, Any]]) -> None:
        (name,) = (name for name in arrays if name.endswith(key))
        arrays[name] = arrays[name] * np.float32(wrong)

    found = edit_golden(own, change)
    assert found.keys() == {"golden"}
    assert found["golden"].startswith(key.split("/")[0])


def test_a_golden_token_that_the_graph_does_not_give_fails(own: Path) -> None:
    def change(arrays: dict[str, np.ndarray[Any, Any]]) -> None:
        (name,) = (name for name in arrays if name.endswith("target_verify_r3/0/out/tokens"))
        logits_of_least = 0 if arrays[name][0, 0] else 1
        arrays[name][0, 0] = logits_of_least

    found = edit_golden(own, change)
    assert "tokens[0, 0]" in found["golden"]


def test_golden_values_must_cover_every_graph(own: Path) -> None:
    def change(arrays: dict[str, np.ndarray[Any, Any]]) -> None:
        for name in [name for name in arrays if "mtp_draft" in name]:
            del arrays[name]

    assert "mtp_draft_k2" in edit_golden(own, change)["golden"]


def edit_golden(path: Path, change: Callable[[dict[str, Any]], None]) -> dict[str, str]:
    with np.load(path / GOLDEN) as file:
        arrays: dict[str, Any] = dict(file)
    change(arrays)
    np.savez_compressed(path / GOLDEN, **arrays)
    relist(path, GOLDEN)
    return failed(verified(path))


def test_golden_values_repeat_bit_for_bit(own: Path) -> None:
    before = sha256((own / GOLDEN).read_bytes()).hexdigest()
    assert write_golden(own)
    assert sha256((own / GOLDEN).read_bytes()).hexdigest() == before


def test_a_package_without_golden_values_says_so(own: Path) -> None:
    manifest = load_manifest(own)
    files = tuple(file for file in manifest.files if file.path != GOLDEN)
    msgspec.structs.replace(manifest, files=files).save(own)
    (own / GOLDEN).unlink()
    report = verified(own)
    assert report.passed
    assert report.record().max_logit_error is None
    assert report.checks[3].detail.startswith("skipped: ")
    record_verification(own, report)
    assert load_manifest(own).verification == report.record()


def test_a_loop_that_commits_too_little_fails(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commit = Session._commit

    def short(self: Session, *args: Any) -> Any:
        results = commit(self, *args)
        for sequence in self._slots.values():
            sequence.pending = min(sequence.pending, 1)
        return results

    monkeypatch.setattr(Session, "_commit", short)
    report = verified(own)
    found = failed(report)
    assert found.keys() == {"decoding"}
    assert "plain decoding" in found["decoding"]
    assert not report.record().greedy_equal


def test_a_check_that_stops_in_the_middle_is_a_failed_check(
    own: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("a kernel\ngave up")

    monkeypatch.setattr(verify, "check_rows", broken)
    report = verified(own)
    assert failed(report) == {"rows": "stopped by RuntimeError: a kernel gave up"}
    assert [check.name for check in report.checks] == RUN
