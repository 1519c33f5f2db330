"""A package on disk: what is in it, that it stands alone, and how it takes its place."""

import hashlib
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from safetensors.torch import load_file

import qwen_mtp
from qwen_mtp.errors import ExportError, RequestError
from qwen_mtp.export.package import staged, write_package
from qwen_mtp.export.plan import plan_export
from qwen_mtp.graphs.manifest import MANIFEST
from qwen_mtp.graphs.weights import PAGE
from qwen_mtp.progress import Silent
from qwen_mtp.runtime.llm import LLM
from qwen_mtp.runtime.package import Package
from qwen_mtp.runtime.sampling import SamplingParams
from tests.commands import (
    checkpoint,
    contents,
    exported,
    flip,
    package_copy,
    two_slots,
    untouched,
    verified_package,
)


def answer(path: Path) -> tuple[int, ...]:
    with LLM(path, threads=1) as llm:
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        return llm.generate([5, 6, 7], params)[0].outputs[0].token_ids


# --- contents ---------------------------------------------------------------------------------


def test_the_manifest_lists_every_file_with_its_size_and_sum() -> None:
    package = Package.open(verified_package())
    listed = {f.path: (f.bytes, f.sha256) for f in package.manifest.files}
    found = contents(package.directory)
    assert found.pop(MANIFEST)
    assert listed == {
        name: (len(data), hashlib.sha256(data).hexdigest()) for name, data in found.items()
    }
    for name in ("config.json", "generation_config.json", "tokenizer.json"):
        assert found[name] == (checkpoint() / name).read_bytes()


def test_the_same_checkpoint_and_choices_give_the_same_bytes(tmp_path: Path) -> None:
    first = Package.open(verified_package())
    geometry = first.manifest.geometry
    write_package(plan_export(checkpoint(), geometry), tmp_path, Silent())
    for name in ("model.onnx", "weights.bin"):
        assert (tmp_path / name).read_bytes() == (first.directory / name).read_bytes()
    again = Package.open(tmp_path).manifest
    assert again.source == first.manifest.source
    assert again.weights == first.manifest.weights
    assert again.verification is None


def test_tensors_lie_on_pages_and_do_not_overlap() -> None:
    package = Package.open(verified_package())
    tensors = sorted(package.manifest.weights, key=lambda tensor: tensor.offset)
    assert all(tensor.offset % PAGE == 0 for tensor in tensors)
    ends = [tensor.offset + tensor.nbytes for tensor in tensors]
    assert all(end <= b.offset for end, b in zip(ends, tensors[1:], strict=False))
    size = (package.directory / "weights.bin").stat().st_size
    assert max(ends) <= size < max(ends) + PAGE


def stored(package: Package, name: str) -> Any:
    tensor = {t.name: t for t in package.manifest.weights}[name]
    data = np.fromfile(package.directory / "weights.bin", np.uint8)
    part = data[tensor.offset : tensor.offset + tensor.nbytes]
    return part.view(tensor.dtype).reshape(tensor.shape)


def test_fp32_weights_are_the_checkpoints_and_int8_ones_within_half_a_step() -> None:
    source = load_file(checkpoint() / "model.safetensors")
    down = source["model.language_model.layers.0.mlp.down_proj.weight"].float().numpy()
    whole = Package.open(exported("--no-mtp", "--no-verify", "-q", "--format", "fp32")[0])
    name = "target.layers.0.mlp.down"
    np.testing.assert_array_equal(stored(whole, f"{name}.weight").reshape(down.shape), down)
    package = Package.open(verified_package())
    values, scale = stored(package, f"{name}.weight"), stored(package, f"{name}.scale")
    assert values.dtype == np.int8
    gap = np.abs(values.astype(np.float64) * scale[:, None] - down)
    assert (gap <= scale[:, None] * 0.5001).all()
    assert gap.max() > 0


def test_a_package_names_its_graphs_and_their_places() -> None:
    package = Package.open(two_slots())
    names = [graph.name for graph in package.manifest.graphs]
    assert [package.selector(name) for name in names] == list(range(len(names)))
    assert package.graph("mtp_draft_k3").lookahead == package.max_lookahead == 3
    none = Package.open(exported("--no-mtp", "--no-verify", "-q", "--format", "fp32")[0])
    assert none.max_lookahead == 0


# --- standing alone ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["moved", "with space", "ünïcode-日本", "a'b\"c"])
def test_a_package_runs_wherever_it_is_put(tmp_path: Path, name: str) -> None:
    place = tmp_path / name
    shutil.copytree(verified_package(), place)
    assert answer(place) == answer(verified_package())


def test_a_relative_path_and_links_will_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for file in verified_package().iterdir():
        (tmp_path / file.name).symlink_to(file)
    monkeypatch.chdir(tmp_path)
    assert answer(Path(".")) == answer(verified_package())


def test_nothing_is_written_while_a_package_runs() -> None:
    with untouched(verified_package()):
        answer(verified_package())


def test_a_record_of_the_check_changes_nothing_else(tmp_path: Path) -> None:
    path = package_copy(tmp_path)
    manifest = Package.open(path).manifest
    msgspec.structs.replace(manifest, verification=None).save(path)
    assert Package.open(path).manifest == msgspec.structs.replace(manifest, verification=None)
    manifest.save(path)
    assert contents(path) == contents(verified_package())


# --- taking its place -------------------------------------------------------------------------


def fill(directory: Path) -> None:
    """Stand in for the writer."""
    (directory / MANIFEST).write_text("new")


def make(package: Path, *, overwrite: bool, meanwhile: Callable[[], object]) -> None:
    """Fill a package and let something happen before it takes its place."""
    with staged(package, overwrite=overwrite) as staging:
        fill(staging)
        meanwhile()


def test_a_package_appears_whole_at_the_end_of_the_block(tmp_path: Path) -> None:
    package = tmp_path / "deep" / "er" / "package"
    with staged(package, overwrite=False) as staging:
        fill(staging)
        assert staging.parent == package.parent
        assert not package.exists()
    assert [*package.parent.iterdir()] == [package]
    assert (package / MANIFEST).read_text() == "new"


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit, OSError])
def test_an_error_in_the_block_leaves_neither_sibling_nor_parents(
    tmp_path: Path, error: type[BaseException]
) -> None:
    expected = ExportError if error is OSError else error

    def fail() -> None:
        raise error("halfway")

    with pytest.raises(expected):
        make(tmp_path / "a" / "b", overwrite=False, meanwhile=fail)
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize("call", [1, 2])
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_an_interruption_of_the_exchange_leaves_one_whole_package(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    call: int,
    after: bool,
    error: type[BaseException],
) -> None:
    package = package_copy(tmp_path)
    before, rename, calls = contents(package), Path.rename, []

    def interrupted(self: Path, target: Path) -> Path:
        calls.append(self)
        if len(calls) != call:
            return rename(self, target)
        if after:
            rename(self, target)
        raise error("now")

    with pytest.raises((KeyboardInterrupt, ExportError)), monkeypatch.context() as patch:
        make(
            package,
            overwrite=True,
            meanwhile=lambda: patch.setattr(Path, "rename", interrupted),
        )
    assert [*tmp_path.iterdir()] == [package]
    new = call == 2 and after
    assert contents(package) == ({MANIFEST: b"new"} if new else before)


def test_a_package_that_came_meanwhile_is_not_replaced_unasked(tmp_path: Path) -> None:
    package = tmp_path / "package"
    with pytest.raises(ExportError, match="is not empty"):
        make(
            package,
            overwrite=False,
            meanwhile=lambda: shutil.copytree(verified_package(), package),
        )
    assert contents(package) == contents(verified_package())
    assert [*tmp_path.iterdir()] == [package]


def test_an_empty_directory_even_the_working_one_becomes_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "here"
    place.mkdir()
    monkeypatch.chdir(place)
    done = qwen_mtp.export_package(
        checkpoint(), ".", mtp=False, verify=False, max_model_len=64, prefill_chunk=8
    )
    assert done.directory == place
    assert [*tmp_path.iterdir()] == [place]
    assert len(answer(place)) == 8


# --- from Python ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("choices", "fragment"),
    [
        ({"lookaheads": (0,)}, "num_speculative_tokens is 0: give 1..15"),
        ({"lookaheads": (3, 16)}, "num_speculative_tokens is 16: give 1..15"),
        ({"format": "int2"}, "format is 'int2': give fp32, int8 or int4"),
        ({"block_size": 24}, "block_size is 24"),
        ({"max_num_seqs": 0}, "max_num_seqs is 0"),
        ({"prefill_chunk": 0}, "prefill_chunk is 0"),
        ({"max_model_len": 1}, "max_model_len is 1"),
        ({"max_model_len": 129}, "max_model_len is 129"),
    ],
)
def test_a_choice_out_of_range_is_refused_before_anything_is_made(
    tmp_path: Path, choices: dict[str, Any], fragment: str
) -> None:
    with pytest.raises(ExportError) as caught:
        qwen_mtp.export_package(checkpoint(), tmp_path / "package", **choices)
    assert fragment in str(caught.value)
    assert "\n" not in str(caught.value)
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize("options", [{"num_speculative_tokens": 2}, {"threads": 0}])
def test_a_number_out_of_range_is_refused_when_loading(options: dict[str, int]) -> None:
    with pytest.raises(RequestError, match="is"):
        LLM(verified_package(), **options)


def test_verify_finds_what_opening_does_not(tmp_path: Path) -> None:
    """Opening compares names and sizes only: it must stay cheap."""
    path = package_copy(tmp_path)
    flip(path / "weights.bin", 7)
    assert Package.open(path).manifest == Package.open(verified_package()).manifest
    report = qwen_mtp.verify_package(path)
    assert not report.passed
    assert "weights.bin" in report.checks[0].detail
