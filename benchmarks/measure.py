"""Measure one package: load time, memory, and the cost of each pass, interleaved in one run.

    python benchmarks/measure.py PACKAGE [--threads 2] [--context 256] [--rounds 40]

Drafts of a random checkpoint are never accepted, so every round commits one token. Plain decoding
is a round of the two-row bucket without drafts; speculation is a draft pass and a verify pass of
the largest bucket. Prints one JSON object.
"""

import argparse
import json
import resource
import statistics
import sys
import time
from pathlib import Path

import numpy as np
import onnxruntime

from qwen_mtp import Package, SamplingParams, Session
from qwen_mtp.graphs.weights import file_bytes
from qwen_mtp.runtime.engine import Engine


def resident() -> int:
    """Resident bytes of this process, file-backed pages included."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def main() -> None:
    """Load, prefill, and alternate speculative and plain rounds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("package")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=40)
    asked = parser.parse_args()
    package = Package.open(asked.package)
    base, start = resident(), time.perf_counter()
    engine = Engine(package, threads=asked.threads)
    loaded = time.perf_counter() - start
    lookahead = package.max_lookahead
    session = Session(package, engine=engine)
    sampling = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True).resolve()
    ids = np.random.default_rng(0).integers(0, package.manifest.config.vocab_size, asked.context)
    start = time.perf_counter()
    slot, _ = session.prefill(ids.tolist(), sampling)
    prefill = time.perf_counter() - start
    draft, verify, plain, host = [], [], [], []
    for _ in range(asked.rounds):
        session.step()
        draft.append(session.times.draft)
        verify.append(session.times.verify)
        host.append(session.times.host)
        session.step({slot: []})  # no drafts: the round of the two-row bucket
        plain.append(session.times.verify)
    median = statistics.median
    weights = file_bytes(package.manifest.weights)
    spent = median(draft) + median(verify) + median(host)
    result = {
        "package": Path(asked.package).name,
        "format": package.manifest.geometry.format,
        "threads": asked.threads,
        "onnxruntime": onnxruntime.__version__,
        "numpy": np.__version__,
        "context": asked.context,
        "rounds": asked.rounds,
        "package_bytes": sum(file.bytes for file in package.manifest.files),
        "weight_bytes": weights,
        "load_s": round(loaded, 2),
        "interpreter_bytes": base,
        "resident_bytes": resident(),
        "resident_over_weights": round(resident() / weights, 3),
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "prefill_tokens_per_s": round(asked.context / prefill, 1),
        "plain_token_ms": round(median(plain), 2),
        f"verify_{lookahead + 1}_rows_ms": round(median(verify), 2),
        "verify_over_plain": round(median(verify) / median(plain), 3),
        f"draft_{lookahead}_ms": round(median(draft), 2),
        "one_draft_ms": round(median(draft) / max(lookahead, 1), 2),
        "host_ms": round(median(host), 3),
        "host_share": round(median(host) / spent, 5),
    }
    json.dump(result, sys.stdout, indent=2)
    print()


if __name__ == "__main__":
    main()
