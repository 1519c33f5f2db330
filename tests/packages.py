"""Exports small packages for tests, once per choice of checkpoint and geometry."""

import atexit
from functools import cache
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp
from typing import Any

from qwen_mtp.export.package import staged, write_package
from qwen_mtp.export.plan import plan_export
from qwen_mtp.graphs.spec import Geometry
from qwen_mtp.progress import Silent
from qwen_mtp.runtime.package import Package
from tests.checkpoints import tiny_config, write_checkpoint

TRAINED = Path(__file__).parent.parent / "artifacts" / "tiny-qwen3_5"
_DEFAULTS: dict[str, Any] = {
    "max_num_seqs": 1,
    "max_model_len": 256,
    "block_size": 16,
    "prefill_chunk": 16,
    "lookaheads": (3,),
    "format": "fp32",
}


@cache
def scratch() -> Path:
    """A directory for the whole test run, removed at its end."""
    path = Path(mkdtemp(prefix="qwen-mtp-tests-"))
    atexit.register(rmtree, path, ignore_errors=True)
    return path


@cache
def random_checkpoint(seed: int = 0, **overrides: Any) -> Path:
    """A random checkpoint in the real layout; ``overrides`` go into its text config."""
    name = "-".join([f"seed{seed}", *(f"{k}{v}" for k, v in sorted(overrides.items()))])
    path = scratch() / "checkpoints" / name
    write_checkpoint(path, tiny_config(**overrides), seed=seed)
    return path


def package(checkpoint: Path, **geometry: Any) -> Package:
    """The package of a checkpoint under a geometry (defaults: one slot, K=3, fp32, chunk 16)."""
    return _export(checkpoint, **dict(sorted((_DEFAULTS | geometry).items())))


@cache
def _export(checkpoint: Path, **choices: Any) -> Package:
    name = "-".join(f"{k}{v}" for k, v in sorted(choices.items())).replace(" ", "")
    path = scratch() / "packages" / f"{checkpoint.name}-{name}"
    plan = plan_export(checkpoint, Geometry(**choices))
    with staged(path, overwrite=False) as staging:
        write_package(plan, staging, Silent())
    return Package.open(path)
