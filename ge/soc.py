"""Ascend processors that a package can be exported for, and what each of them lacks.

Sources, all public:

* names: ``torch_npu/distributed/distributed_c10d.py`` of the wheel orders Ascend910B1..B4_1 and
  Ascend910_9362..9392; the catlass configuration of the wheel counts ``Ascend910_93*`` as one
  family; CANN's ATC guide gives Ascend310P1 and Ascend310P3.
* operators: the tables of supported products ("Atlas A2" is 910B, "Atlas A3" is 910_93, "Atlas
  inference series" is 310P) in the doc strings of the wheel's ``_op_plugin_docs.py`` and in the
  README of each operator in CANN's ops-nn and ops-transformer repositories.
* dtypes: ATB's notes say that the Atlas inference series does not support bfloat16.
* float32: the documents of aclnnMatmul and its kin say that the Atlas inference series cannot keep
  float32 in a product, only turn it into float16.
* rows: a verify pass hands RecurrentGatedDeltaRule one sequence of K + 1 rows; vllm-ascend's build
  takes 16 on A2 and A3 and 8 on 310P. CANN's own kernel may take fewer: the doc string of the
  wheel says 8. Where that is so, K must be at most 7; no such release could be tried.
* int4: npu_weight_quant_batchmatmul takes int4 weights in groups on A2 and A3, on 310P int8 per
  channel alone.
* 310P: npu_quant_matmul takes no scale per row there, npu_dynamic_quant and npu_swiglu do not list
  it, npu_rotary_mul wants heads of 128. What it lacks is written in standard operators instead.
  Its recurrent kernel is vllm-ascend's, an operator package.

FusedCausalConv1d is documented for Ascend 950 only and for kernels of width 3, so no processor
here has it by itself. MtpRejectionSample is this project's own.
"""

from dataclasses import dataclass
from typing import Literal

from qwen_mtp.errors import ExportError
from qwen_mtp.graphs.spec import Lowering, WeightFormat

Family = Literal["910B", "910_93", "310P"]

# Not part of CANN for any of these; a package of operators beside it may bring them.
_NOWHERE = frozenset({"FusedCausalConv1d", "InplaceFusedCausalConv1d", "MtpRejectionSample"})
_NOT_310P = _NOWHERE | {
    "FusedInferAttentionScore",
    "ScatterPaKvCache",
    "RecurrentGatedDeltaRule",
    "RotaryMul",
    "RotaryPositionEmbedding",
    "ApplyRotaryPosEmb",
    "SwiGlu",
    "DynamicQuant",
    "QuantBatchMatmulV3",
    "WeightQuantBatchMatmulV2",
}
_COMMON = frozenset(
    {"DT_FLOAT", "DT_FLOAT16", "DT_BOOL", "DT_INT8", "DT_UINT8", "DT_INT16"}
    | {"DT_INT32", "DT_INT64", "DT_UINT64"}
)
# What kernels take for their first input where the prototypes say more or nothing.
_BIG_KERNELS: dict[str, frozenset[str]] = {
    "ScatterPaKvCache": frozenset({"DT_FLOAT16", "DT_BF16", "DT_INT8"}),
    "RecurrentGatedDeltaRule": frozenset({"DT_BF16"}),
}
_SMALL_KERNELS: dict[str, frozenset[str]] = {
    "RecurrentGatedDeltaRule": frozenset({"DT_FLOAT16"}),  # vllm-ascend's package for 310P
}
_BIG: tuple[WeightFormat, ...] = ("fp32", "fp16", "bf16", "int8", "int4")
_SMALL: tuple[WeightFormat, ...] = ("fp16", "int8")


@dataclass(frozen=True, slots=True)
class Soc:
    """One processor, by the name that ``atc --soc_version`` takes.

    Attributes:
        name: ``--soc_version``.
        family: The generation; every member runs the same operators.
        aicore: The name that operator packages build for.
        dtypes: Dtypes of its tensors.
        lacks: Operator types of ours that it has no kernel for.
        max_fused_rows: Rows K + 1 of a verify pass that its recurrent kernel takes.
        weight_formats: Formats it has matrix products for.
        memory_gb: Device memory of the smallest card with it, in GB; a hint, not a limit.
    """

    name: str
    family: Family
    aicore: str
    dtypes: frozenset[str]
    lacks: frozenset[str]
    max_fused_rows: int
    weight_formats: tuple[WeightFormat, ...]
    memory_gb: int


def _a2(name: str, memory_gb: int) -> Soc:
    dtypes = _COMMON | {"DT_BF16", "DT_INT4"}
    return Soc(name, "910B", "ascend910b", dtypes, _NOWHERE, 16, _BIG, memory_gb)


def _a3(name: str) -> Soc:
    dtypes = _COMMON | {"DT_BF16", "DT_INT4"}
    return Soc(name, "910_93", "ascend910_93", dtypes, _NOWHERE, 16, _BIG, 64)


def _310p(name: str) -> Soc:
    return Soc(name, "310P", "ascend310p", _COMMON, _NOT_310P, 8, _SMALL, 24)


SOCS: tuple[Soc, ...] = (
    _a2("Ascend910B1", 64),
    _a2("Ascend910B2", 64),
    _a2("Ascend910B2C", 64),
    _a2("Ascend910B3", 64),
    _a2("Ascend910B4", 32),
    _a2("Ascend910B4-1", 64),
    *(_a3(f"Ascend910_{n}") for n in (9362, 9372, 9381, 9382, 9391, 9392)),
    _310p("Ascend310P1"),
    _310p("Ascend310P3"),
)


def kernel_dtypes(soc: Soc, op_type: str) -> frozenset[str] | None:
    """Dtypes that the kernel takes for its first input; None where the prototype says it all."""
    return (_SMALL_KERNELS if soc.family == "310P" else _BIG_KERNELS).get(op_type)


def find_soc(name: str) -> Soc:
    """Look a processor up by its name, whatever the case.

    Raises:
        ExportError: The name is none of those known.
    """
    for soc in SOCS:
        if soc.name.lower() == name.strip().lower():
            return soc
    known = ", ".join(soc.name for soc in SOCS)
    raise ExportError(f"soc_version {name}: unknown processor; known are {known}")


def check_rows(soc: Soc, lowering: Lowering, rows: int) -> None:
    """Check the widest verify pass; graphs without the recurrent kernel have no limit.

    Args:
        soc: The processor.
        lowering: What the graphs are made of.
        rows: K + 1.

    Raises:
        ExportError: The kernel for this processor takes fewer rows.
    """
    limit = soc.max_fused_rows
    if lowering == "fused" and rows > limit:
        raise ExportError(
            f"{soc.name}: {rows - 1} drafts make passes of {rows} rows, RecurrentGatedDeltaRule "
            f"can take {limit}; export with at most {limit - 1} drafts or the portable lowering"
        )


def check_format(soc: Soc, weights: WeightFormat, activation: str) -> None:
    """Check what the graphs compute with.

    Args:
        soc: The processor.
        weights: Format of the weights.
        activation: ``float32``, ``float16`` or ``bfloat16``.

    Raises:
        ExportError: The processor has no products for the format, or not the dtype.
    """
    if weights not in soc.weight_formats:
        known = ", ".join(soc.weight_formats)
        raise ExportError(f"{soc.name}: no matrix product takes {weights} weights; use {known}")
    if activation == "bfloat16" and "DT_BF16" not in soc.dtypes:
        raise ExportError(f"{soc.name}: it does not compute in bfloat16; use float16")
    if activation == "float32" and soc.family == "310P":
        raise ExportError(f"{soc.name}: its products of float32 are computed in float16; use that")
