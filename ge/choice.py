"""Whether a chip can do what an export asks for; refused before anything is traced."""

from dataclasses import replace

from qwen_mtp.errors import ExportError
from qwen_mtp.ge.soc import Soc, check_format, check_rows, find_soc
from qwen_mtp.graphs.spec import FULL_FORMATS, Activation, AscendChoice, Geometry, WeightFormat

# Operators that this project, or another, builds as a package beside CANN.
PACKAGED = ("FusedCausalConv1d", "MtpRejectionSample", "RecurrentGatedDeltaRule")
RECURRENT = "RecurrentGatedDeltaRule"
_FUSED_ONLY = ("FusedCausalConv1d", RECURRENT)  # they keep state in the layout of fused graphs


def canonical(choice: AscendChoice) -> AscendChoice:
    """The choice with the chip as ATC spells it and its operators ascending, each once.

    Raises:
        ExportError: The chip or the lowering is unknown.
    """
    if choice.lowering not in ("portable", "fused"):
        raise ExportError(f"lowering is {choice.lowering!r}: give portable or fused")
    ops = tuple(sorted(set(choice.custom_ops)))
    return replace(choice, soc_version=find_soc(choice.soc_version).name, custom_ops=ops)


def lacking(choice: AscendChoice) -> frozenset[str]:
    """Operators that the chip has neither by itself nor by the packages of the choice.

    Raises:
        ExportError: The chip is unknown.
    """
    return find_soc(choice.soc_version).lacks - set(choice.custom_ops)


def has_fused_attention(choice: AscendChoice) -> bool:
    """Whether the graphs attend with the chip's kernel, which wants large blocks."""
    return choice.lowering == "fused" and "FusedInferAttentionScore" not in lacking(choice)


def activation_dtype(
    choice: AscendChoice, format: WeightFormat, dtype: Activation | None
) -> Activation:
    """The type of activations and state.

    Args:
        choice: The chip and the lowering.
        format: Weight format.
        dtype: What was asked for, or None.

    Returns:
        That of unquantised weights; for quantised ones what was asked for, or bfloat16 where
        fused kernels want it, or float16.

    Raises:
        ExportError: The two contradict each other.
    """
    if dtype not in (None, *FULL_FORMATS.values()):
        raise ExportError(f"dtype is {dtype!r}: give one of {', '.join(FULL_FORMATS.values())}")
    own = FULL_FORMATS.get(format)
    if own is None:
        half: Activation = "float16" if _is_small(choice) else "bfloat16"
        return dtype or (half if choice.lowering == "fused" else "float16")
    if dtype not in (None, own):
        raise ExportError(f"dtype is {dtype}: {format} weights mean {own}; leave one of them out")
    return own


def check_choice(choice: AscendChoice, geometry: Geometry) -> None:
    """Refuse what the chip, or the lowering, cannot do.

    Raises:
        ExportError: By the name of the choice, with the remedy.
    """
    soc = find_soc(choice.soc_version)
    for name in choice.custom_ops:
        _check_custom_op(name, choice)
    check_format(soc, geometry.format, geometry.dtype)
    if geometry.format == "int4" and choice.lowering != "fused":
        raise ExportError(
            "format int4: standard operators have no such product; use fused or int8"
        )
    if choice.lowering == "fused" and RECURRENT not in lacking(choice):
        _check_recurrent(soc, geometry)


def _check_custom_op(name: str, choice: AscendChoice) -> None:
    if name not in PACKAGED:
        raise ExportError(f"custom operator {name}: unknown; known are {', '.join(PACKAGED)}")
    if name in _FUSED_ONLY and choice.lowering != "fused":
        raise ExportError(
            f"custom operator {name}: portable graphs do not use it; choose the fused lowering"
        )


def _check_recurrent(soc: Soc, geometry: Geometry) -> None:
    """What the kernel that advances the recurrent state takes."""
    wanted: Activation = "float16" if soc.family == "310P" else "bfloat16"
    if geometry.dtype != wanted:
        raise ExportError(
            f"{soc.name}: fused kernels keep their state in {wanted}, not {geometry.dtype}; "
            "choose that or the portable lowering"
        )
    check_rows(soc, "fused", geometry.max_rows)


def _is_small(choice: AscendChoice) -> bool:
    return find_soc(choice.soc_version).family == "310P"
