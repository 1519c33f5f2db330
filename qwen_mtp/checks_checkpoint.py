"""A package against the checkpoint it came from, and against transformers' own model of it.

The one part of ``verify`` that needs torch; it is imported when a checkpoint is given.
"""

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from qwen_mtp.checks_bench import Bench, Lane
from qwen_mtp.checks_report import Check
from qwen_mtp.errors import MissingExtraError
from qwen_mtp.export.checkpoint import Checkpoint
from qwen_mtp.ge.wheel import hidden_torch_npu
from qwen_mtp.progress import Progress
from qwen_mtp.runtime.engine import Array
from qwen_mtp.runtime.package import Package

FP32_ERROR = 1e-4  # of a logit, relative to the largest: sums in another order
SLACK = 1 << 30  # bytes beside the weights: the interpreter, activations
PROMPT = 12


@dataclass(frozen=True, slots=True)
class Source:
    """An open checkpoint, with the library that its logits come from loaded."""

    checkpoint: Checkpoint
    transformers: Any

    @classmethod
    def open(cls, directory: Path) -> "Source":
        """Read the headers.

        Raises:
            CheckpointError: The checkpoint is unreadable.
            MissingExtraError: transformers is not installed.
        """
        try:
            with hidden_torch_npu():
                import transformers

                transformers.utils.import_utils.is_torch_npu_available()  # remembers the answer
        except ImportError as missing:
            raise MissingExtraError(
                "comparing with a checkpoint needs transformers: "
                "pip install 'qwen-mtp[export,test]'"
            ) from missing
        return cls(Checkpoint.open(directory), transformers)

    def check_fingerprint(self, package: Package, progress: Progress) -> Check:
        """The package was made from these tensors."""
        progress.phase("verify source")
        found, wanted = self.checkpoint.fingerprint(), package.manifest.source.fingerprint
        if found == wanted:
            return Check("source", True, f"fingerprint {wanted[:16]}")
        detail = f"{self.checkpoint.directory}: fingerprint {found[:16]}, the package says "
        return Check("source", False, f"{detail}{wanted[:16]}; give the checkpoint it came from")

    def check_logits(self, bench: Bench, progress: Progress) -> Check:
        """A prefill row and the rows of a verify pass; binding for fp32, a report otherwise."""
        progress.phase("verify transformers")
        need, free = self._bytes() + SLACK, _available()
        if need > free:
            sizes = f"{need / 1e9:.1f} GB of memory, {free / 1e9:.1f} GB are free"
            return Check("transformers", True, f"skipped: the fp32 model needs {sizes}")
        rows = bench.geometry.row_buckets[-1]
        count = max(1, min(PROMPT, bench.geometry.max_model_len - rows))
        ids = bench.some_ids(70, count + rows)
        found, wanted = _logits(bench, ids, count, rows), self._reference(ids)[count - 1 :]
        return _judge(bench, found, wanted)

    def _bytes(self) -> int:
        names = (name for name in self.checkpoint.names if not name.startswith("mtp."))
        return 4 * sum(math.prod(self.checkpoint.shape(name)) for name in names)

    def _reference(self, ids: tuple[int, ...]) -> Array:
        model = self._model()
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits
        result: Array = logits[0].float().numpy()
        return result

    def _model(self) -> Any:
        """The fp32 model; weights come in one tensor at a time."""
        path = self.checkpoint.directory / "config.json"
        raw = json.loads(path.read_text(encoding="utf-8"))
        tied = self.checkpoint.config.tie_word_embeddings
        text = raw.get("text_config", raw) | {"tie_word_embeddings": tied}
        config = self.transformers.Qwen3_5TextConfig(**text)
        config._attn_implementation = "eager"
        self.transformers.logging.set_verbosity_error()  # its advice is about speed
        model = self.transformers.Qwen3_5ForCausalLM(config).float().eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                key, shape = name.removeprefix("model."), tuple(parameter.shape)
                data = self.checkpoint.read(key, shape, slice(None))
                parameter.copy_(torch.from_numpy(np.array(data)))
        return model


def _logits(bench: Bench, ids: tuple[int, ...], count: int, rows: int) -> Array:
    """Logits after ``count`` ids (prefill) and after each of the following (verify)."""
    bench.prefill(0, ids[:count])
    first = bench.engine.buffer("prefill", "logits")[0].copy()
    graph = bench.graph(rows)
    idle = [Lane()] * (bench.slots - 1)
    bench.feed(graph, [Lane(ids[count:], count), *idle])
    bench.run(graph, count + rows)
    return np.concatenate([first, bench.engine.buffer(graph, "logits")[0]])


def _judge(bench: Bench, found: Array, wanted: Array) -> Check:
    gap = np.abs(found - wanted)
    same = int((found.argmax(-1) == wanted.argmax(-1)).sum())
    numbers = (
        f"logits of {len(gap)} rows: largest difference {gap.max():.1e}, mean {gap.mean():.1e}, "
        f"largest logit {np.abs(wanted).max():.1f}, same likeliest token in {same}"
    )
    allowed = FP32_ERROR * max(1.0, float(np.abs(wanted).max()))
    if bench.geometry.format != "fp32":
        finite = bool(np.isfinite(gap).all())
        return Check(
            "transformers", finite, f"{numbers} ({bench.geometry.format}: for information)"
        )
    return Check("transformers", bool(gap.max() <= allowed), f"{numbers}, allowed {allowed:.1e}")


def _available() -> int:
    """Bytes of memory that can be taken without swapping."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
        kilobytes = {k: v for k, _, v in (line.partition(":") for line in lines)}
        return int(kilobytes["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
