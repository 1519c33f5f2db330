"""Exports small packages for tests, once per choice of checkpoint and geometry."""

import atexit
import zlib
from functools import cache
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp
from typing import Any, TypeAlias

import numpy as np
from msgspec.structs import replace

from qwen_mtp.export.package import file_entry, staged, write_package
from qwen_mtp.export.plan import plan_export
from qwen_mtp.graphs.manifest import load_manifest
from qwen_mtp.graphs.spec import Geometry
from qwen_mtp.progress import Silent
from qwen_mtp.runtime.package import Package
from tests.checkpoints import tiny_config, write_checkpoint

Ids: TypeAlias = tuple[int, ...]
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


@cache
def two_layers() -> Path:
    """One layer of each kind, 256 tokens."""
    return random_checkpoint(num_hidden_layers=2, full_attention_interval=2)


@cache
def random_part(format: str, count: int) -> tuple[Ids, Package]:
    """Some of the 256 tokens as the draft vocabulary, for a head that drafts anything."""
    ids = np.random.default_rng(3).choice(256, count, replace=False)
    chosen = tuple(np.sort(ids).tolist())
    return chosen, package(two_layers(), format=format, max_model_len=64, draft_ids=chosen)


def relist(path: Path, *names: str) -> None:
    """Let the manifest of a package agree with changed files."""
    manifest = load_manifest(path)
    kept = [file for file in manifest.files if file.path not in names]
    files = tuple(kept + [file_entry(path, name) for name in names])
    replace(manifest, files=files).save(path)


def package(checkpoint: Path, **geometry: Any) -> Package:
    """The package of a checkpoint under a geometry (defaults: one slot, K=3, fp32, chunk 16).

    ``draft_ids``, a tuple, is the draft vocabulary.
    """
    return _export(checkpoint, **dict(sorted((_DEFAULTS | geometry).items())))


@cache
def _export(checkpoint: Path, draft_ids: tuple[int, ...] = (), **choices: Any) -> Package:
    name = "-".join(f"{k}{v}" for k, v in sorted(choices.items())).replace(" ", "")
    name += f"-{zlib.crc32(repr(draft_ids).encode()):08x}" if draft_ids else ""
    path = scratch() / "packages" / f"{checkpoint.name}-{name}"
    geometry = Geometry(draft_vocab=len(draft_ids), **choices)
    plan = plan_export(checkpoint, geometry, draft_ids=draft_ids)
    with staged(path, overwrite=False) as staging:
        write_package(plan, staging, Silent())
    return Package.open(path)
