"""``export_package``: checkpoint to verified package in one call."""

import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

from qwen_mtp.config import ModelConfig
from qwen_mtp.draft_vocabulary import choose_draft_ids
from qwen_mtp.errors import ExportError, MissingExtraError, VerificationError
from qwen_mtp.ge.choice import activation_dtype, canonical, check_choice, has_fused_attention
from qwen_mtp.ge.wheel import find_wheel
from qwen_mtp.graphs.spec import (
    Activation,
    AscendChoice,
    Geometry,
    KvType,
    Layout,
    OpsetDomain,
    WeightFormat,
)
from qwen_mtp.progress import Progress, Silent
from qwen_mtp.runtime.package import Package
from qwen_mtp.verify import record_verification, verify_package

if TYPE_CHECKING:
    from qwen_mtp.export.plan import Plan

MAX_LOOKAHEAD = 15
_MOST = {"max_num_seqs": 256, "prefill_chunk": 4096}
DEFAULT_MODEL_LEN = 4096
BLOCK_SIZES = (8, 16, 32, 64, 128, 256)
BLOCK_SIZE = 64
# torch_npu's fused attention over pages of several rows takes blocks of 128 positions and more.
FUSED_BLOCK_SIZES = (128, 256)
# ONNX weight formats: unpacking 4 bits takes an operator that only ONNX Runtime has.
FORMATS = {"microsoft": ("fp32", "int8", "int4"), "standard": ("fp32", "fp16", "int8")}
_SILENT = Silent()


def export_package(
    checkpoint: str | PathLike[str],
    package: str | PathLike[str],
    *,
    format: WeightFormat = "int8",
    lookaheads: Collection[int] = (1, 3),
    max_model_len: int | None = None,
    max_num_seqs: int = 1,
    block_size: int | None = None,
    prefill_chunk: int = 128,
    mtp: bool = True,
    ascend: AscendChoice | None = None,
    dtype: Activation | None = None,
    kv_dtype: KvType | None = None,
    opset_domain: OpsetDomain = "microsoft",
    draft_vocab: int | str | PathLike[str] | None = None,
    draft_vocab_text: str | PathLike[str] | None = None,
    overwrite: bool = False,
    verify: bool = True,
    threads: int | None = None,
    progress: Progress = _SILENT,
) -> Package:
    """Export a checkpoint; the package appears only when it is complete and has passed.

    Args:
        checkpoint: Hugging Face directory with ``config.json`` and safetensors.
        package: Directory to make.
        format: Weight format: ``fp32``, ``int8`` (W8A8, per row and channel) or ``int4``; for
            Ascend also ``fp16`` and ``bf16``, for standard ONNX ``fp16`` but not ``int4``.
        lookaheads: Numbers of drafts a round, 1..15; each adds a draft graph and, beyond 1, a
            verify graph. With 1 among them, adaptive look-ahead has a cheap way to find out
            whether drafts pay.
        max_model_len: Positions of a sequence, prompt included; None takes 4096, or what the
            model was made for if that is less.
        max_num_seqs: Batch slots.
        block_size: Positions in a block of the paged pool; None takes 64, or 128 where fused
            attention wants that.
        prefill_chunk: Rows of the prefill graph.
        mtp: False exports the target alone, for plain decoding.
        ascend: Write GE models for an Ascend chip; None writes ONNX for ONNX Runtime.
        dtype: Activations and state of GE models; None takes what the weights are in, or for
            quantised ones the half precision of the chip.
        kv_dtype: Keys and values in ONNX for ONNX Runtime, None is ``float32``; ``float16`` takes
            half the memory and, in a long context, half the time to read them.
        opset_domain: Whose operators ONNX models use: ``microsoft`` has what ONNX Runtime runs
            fast; ``standard`` is ``ai.onnx`` alone, a static model for each graph, for ATC's
            ONNX parser and other readers.
        draft_vocab: Tokens that drafts are taken from, which changes no text: how many, special
            ones included; or a file of token ids, text or a ``.json`` list, to which special ones
            are added; 0 is the whole vocabulary. None takes 32,768 of a vocabulary larger than
            65,536.
        draft_vocab_text: A text whose most frequent tokens are taken; None takes the lowest ids.
        overwrite: Replace an existing package.
        verify: End with the parity check.
        threads: Threads of the parity check.
        progress: Gets a phase for each part.

    Raises:
        CheckpointError: The checkpoint cannot be exported.
        ExportError: The package cannot be written, or the choices do not fit.
        MissingExtraError: The extra ``export``, or for Ascend ``npu``, is not installed.
        VerificationError: The parity check failed; no package is left behind.
    """
    with _needs_export_extra():
        from qwen_mtp.export.package import staged, write_package
        from qwen_mtp.golden import write_golden
    plan = plan_package(
        checkpoint,
        format=format,
        lookaheads=tuple(lookaheads) if mtp else (),
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        block_size=block_size,
        prefill_chunk=prefill_chunk,
        ascend=ascend,
        dtype=dtype,
        kv_dtype=kv_dtype,
        opset_domain=opset_domain,
        draft_vocab=draft_vocab,
        draft_vocab_text=draft_vocab_text,
    )
    target = Path(os.path.abspath(package))  # making it may replace the working directory
    with staged(target, overwrite=overwrite) as staging:
        write_package(plan, staging, progress)
        write_golden(staging, progress)  # for checks on other machines, whatever is checked here
        if verify:
            _verify(staging, threads, progress)
        progress.done()
    return Package.open(target)


def plan_package(
    checkpoint: str | PathLike[str],
    *,
    format: WeightFormat,
    lookaheads: Collection[int],
    max_model_len: int | None,
    max_num_seqs: int,
    block_size: int | None,
    prefill_chunk: int,
    ascend: AscendChoice | None = None,
    dtype: Activation | None = None,
    kv_dtype: KvType | None = None,
    opset_domain: OpsetDomain = "microsoft",
    draft_vocab: int | str | PathLike[str] | None = None,
    draft_vocab_text: str | PathLike[str] | None = None,
) -> "Plan":
    """Work an export out without touching a weight; arguments as :func:`export_package`.

    Raises:
        CheckpointError: The checkpoint cannot be exported.
        ExportError: A choice is out of range.
        MissingExtraError: The extra ``export``, for Ascend ``npu``, or for a text ``text``, is not
            installed.
        PackageError: The tokenizer that a text needs cannot be used.
    """
    with _needs_export_extra():
        import qwen_mtp.export.package  # noqa: F401 - what writing needs is missed before any work
        from qwen_mtp.export.plan import plan_export
    config = ModelConfig.from_checkpoint(checkpoint)
    if max_model_len is None:
        max_model_len = min(DEFAULT_MODEL_LEN, config.max_position_embeddings)
    ascend = None if ascend is None else canonical(ascend)
    draft_ids = _draft_ids(Path(checkpoint), config, lookaheads, draft_vocab, draft_vocab_text)
    paged_attention = ascend is not None and has_fused_attention(ascend)
    geometry = Geometry(
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        block_size=block_size or (FUSED_BLOCK_SIZES[0] if paged_attention else BLOCK_SIZE),
        prefill_chunk=prefill_chunk,
        lookaheads=tuple(sorted(set(lookaheads))),
        format=format,
        layout=_layout(ascend, opset_domain),
        dtype=_dtype(ascend, format, dtype),
        draft_vocab=len(draft_ids),
        kv_dtype=kv_dtype or "float32",
    )
    if kv_dtype is not None and geometry.layout != "lazy":
        raise ExportError(
            f"kv_dtype is {kv_dtype}: these models keep keys and values in {geometry.dtype}; "
            "leave it out"
        )
    _check(geometry, FUSED_BLOCK_SIZES if paged_attention else BLOCK_SIZES)
    if ascend is None:
        _check_onnx(geometry, dtype, opset_domain)
    elif opset_domain != "microsoft":
        raise ExportError("opset_domain is for ONNX: leave it out for Ascend")
    else:
        find_wheel()  # before any work
        check_choice(ascend, geometry)
    return plan_export(Path(checkpoint), geometry, ascend, opset_domain, draft_ids)


def _draft_ids(
    checkpoint: Path,
    config: ModelConfig,
    lookaheads: Collection[int],
    rows: int | str | PathLike[str] | None,
    text: str | PathLike[str] | None,
) -> tuple[int, ...]:
    if lookaheads:
        return choose_draft_ids(checkpoint, config, rows, text)
    if rows is not None or text is not None:
        raise ExportError("draft_vocab, draft_vocab_text: leave them out where nothing is drafted")
    return ()


def _layout(ascend: AscendChoice | None, opset_domain: OpsetDomain) -> Layout:
    if ascend is None:
        return "paged" if opset_domain == "standard" else "lazy"
    return "slots" if ascend.lowering == "fused" else "paged"


def _dtype(
    ascend: AscendChoice | None, format: WeightFormat, dtype: Activation | None
) -> Activation:
    if ascend is not None:
        return activation_dtype(ascend, format, dtype)
    return "float16" if format == "fp16" else "float32"


def _check(geometry: Geometry, block_sizes: Collection[int]) -> None:
    for name, least in (("max_num_seqs", 1), ("prefill_chunk", 1), ("max_model_len", 2)):
        value, most = getattr(geometry, name), _MOST.get(name)
        if value < least:
            raise ExportError(f"{name} is {value}: give a number >= {least}")
        if most is not None and value > most:
            raise ExportError(f"{name} is {value}: give a number <= {most}")
    if geometry.block_size not in block_sizes:
        raise ExportError(f"block_size is {geometry.block_size}: give one of {tuple(block_sizes)}")
    for k in geometry.lookaheads:
        if not 1 <= k <= MAX_LOOKAHEAD:
            raise ExportError(f"num_speculative_tokens is {k}: give 1..{MAX_LOOKAHEAD}")


def _check_onnx(geometry: Geometry, dtype: Activation | None, opset_domain: OpsetDomain) -> None:
    formats = FORMATS.get(opset_domain)
    if formats is None:
        raise ExportError(f"opset_domain is {opset_domain!r}: give microsoft or standard")
    if geometry.format not in formats:
        wanted = f"{', '.join(formats[:-1])} or {formats[-1]}"
        where = " in standard ONNX" if opset_domain == "standard" else ""
        raise ExportError(f"format is {geometry.format!r}: give {wanted}{where}")
    if dtype not in (None, geometry.dtype):
        raise ExportError(
            f"dtype is {dtype}: ONNX models of this format compute in {geometry.dtype}; "
            "leave it out"
        )


def _verify(staging: Path, threads: int | None, progress: Progress) -> None:
    report = verify_package(staging, threads=threads, progress=progress)
    failed = [check for check in report.checks if not check.passed]
    if failed:
        raise VerificationError(
            f"the package failed its check and was not kept: {failed[0].name}: {failed[0].detail}"
        )
    record_verification(staging, report)


@contextmanager
def _needs_export_extra() -> Iterator[None]:
    try:
        yield
    except ModuleNotFoundError as missing:
        raise MissingExtraError(
            f"exporting needs {missing.name}: pip install 'qwen-mtp[export]'"
        ) from missing
