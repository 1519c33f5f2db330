"""Packages made here and now, with whatever is patched, and what ``verify`` finds in them."""

from pathlib import Path

from qwen_mtp.export.package import write_package
from qwen_mtp.export.plan import plan_export
from qwen_mtp.golden import write_golden
from qwen_mtp.graphs.spec import Geometry
from qwen_mtp.progress import Silent
from qwen_mtp.verify import Report
from tests.packages import random_checkpoint

SMALL = Geometry(
    max_num_seqs=1,
    max_model_len=96,
    block_size=16,
    prefill_chunk=16,
    lookaheads=(2,),
    format="int8",
)


def export(path: Path, geometry: Geometry = SMALL) -> Path:
    """A package made here and now, with whatever is patched."""
    path.mkdir()
    write_package(plan_export(random_checkpoint(0), geometry), path, Silent())
    write_golden(path)
    return path


def failed(report: Report) -> dict[str, str]:
    return {check.name: check.detail for check in report.checks if not check.passed}
