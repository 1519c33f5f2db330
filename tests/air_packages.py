"""Exports small packages for Ascend for tests, once per choice of checkpoint and options."""

import warnings
from functools import cache
from pathlib import Path
from typing import Any

from qwen_mtp.graphs.spec import AscendChoice, Lowering
from qwen_mtp.pipeline import export_package
from qwen_mtp.runtime.package import Package
from tests.packages import scratch

SOC = "Ascend910B4"
_DEFAULTS: dict[str, Any] = {
    "format": "fp32",
    "max_num_seqs": 2,
    "max_model_len": 96,
    "prefill_chunk": 16,
    "lookaheads": (2,),
    "soc_version": SOC,
    "custom_ops": (),
}


def air_package(checkpoint: Path, lowering: Lowering = "portable", **options: Any) -> Package:
    """The package of a checkpoint, with golden values and unverified; not to be written to.

    Args:
        checkpoint: The source.
        lowering: Operators to use.
        options: ``soc_version``, ``custom_ops``, and what ``export_package`` takes; defaults: two
            slots, K=2, chunks of 16, 96 positions, fp32 for portable.
    """
    defaults = _DEFAULTS | ({"block_size": 16} if lowering == "portable" else {"format": "bf16"})
    return _export(checkpoint, lowering, **dict(sorted((defaults | options).items())))


@cache
def _export(
    checkpoint: Path,
    lowering: Lowering,
    *,
    soc_version: str,
    custom_ops: tuple[str, ...],
    **options: Any,
) -> Package:
    choices = {"soc": soc_version, "ops": custom_ops, **options}
    name = "-".join(f"{k}{v}" for k, v in choices.items()).replace(" ", "")
    choice = AscendChoice(lowering=lowering, soc_version=soc_version, custom_ops=custom_ops)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch and torchair warn of their own code
        return export_package(
            checkpoint,
            scratch() / "ascend" / f"{checkpoint.name}-{lowering}-{name}",
            ascend=choice,
            verify=False,
            **options,
        )
