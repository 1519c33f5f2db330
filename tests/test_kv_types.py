"""Keys and values in float16: half the memory, and an error that is measured and told."""

from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from qwen_mtp.checks_bench import Bench
from qwen_mtp.checks_decoding import check_decoding
from qwen_mtp.checks_golden import check_golden
from qwen_mtp.checks_rows import check_rows
from qwen_mtp.errors import ExportError
from qwen_mtp.graphs.spec import state_specs
from qwen_mtp.pipeline import export_package, plan_package
from qwen_mtp.progress import Silent
from qwen_mtp.runtime.engine import Engine
from qwen_mtp.runtime.package import Package
from tests.commands import qwen_mtp_export, refused
from tests.native import library
from tests.packages import random_checkpoint, scratch


@cache
def exported() -> Package:
    return export_package(
        random_checkpoint(),
        scratch() / "kv-float16",
        format="fp32",
        kv_dtype="float16",
        max_num_seqs=2,
        max_model_len=256,
        block_size=16,
        prefill_chunk=16,
        verify=False,
    )


def bench(native: bool) -> Bench:
    if native:
        library()  # skips where there is no compiler
    return Bench(Engine(exported(), threads=2, keep_logits=True, native=native))


def test_pools_take_half_the_memory_and_nothing_else_changes_its_type() -> None:
    manifest = exported().manifest
    whole = state_specs(manifest.config, replace(manifest.geometry, kv_dtype="float32"))
    for a, b in zip(manifest.states, whole, strict=True):
        assert (a.name, a.shape, b.dtype) == (b.name, b.shape, "float32")
        assert a.dtype == ("float16" if a.kind in ("kv", "mtp_kv") else "float32")


@pytest.mark.parametrize("native", [False, True])
def test_greedy_output_keeps_its_bits_with_drafts_and_without(native: bool) -> None:
    own = bench(native)
    assert own.engine.state("mtp.key").dtype == np.float16
    outcomes = check_rows(own, Silent()), check_decoding(own, Silent())[0]
    assert [check.detail for check in outcomes if not check.passed] == []


@pytest.mark.parametrize("native", [False, True])
def test_the_error_of_float16_pools_is_measured_and_told(native: bool) -> None:
    check, moved = check_golden(bench(native), Silent())
    assert check.passed
    assert "kv error" in check.detail
    assert moved is not None
    assert 1e-4 < moved < 1e-2  # with float32 pools it is 3e-5


@pytest.mark.parametrize(
    "options", [("--target", "air"), ("--opset-domain", "standard", "--format", "fp32")]
)
def test_other_models_refuse_the_option(options: tuple[str, ...], tmp_path: Path) -> None:
    result = qwen_mtp_export(
        random_checkpoint(), tmp_path / "p", "--kv-dtype", "float16", *options
    )
    refused(result, 2, "--kv-dtype is for --target onnx")


def test_the_choice_is_checked_where_it_does_not_come_from_the_command() -> None:
    with pytest.raises(ExportError, match="keep keys and values in float32; leave it out"):
        plan_package(
            random_checkpoint(),
            format="fp32",
            lookaheads=(3,),
            max_model_len=64,
            max_num_seqs=1,
            block_size=16,
            prefill_chunk=16,
            kv_dtype="float16",
            opset_domain="standard",
        )
