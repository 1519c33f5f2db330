"""Export the bundled checkpoint, generate with speculation on and off, compare, and measure.

    make demo

The checkpoint is a small model trained on Python sources: its text is only roughly Python, but
its MTP head was trained with it, so the acceptance rates are those of a head that has learnt.
"""

import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from qwen_mtp import (
    LLM,
    QwenMtpError,
    RequestOutput,
    SamplingParams,
    Stats,
    export_package,
)

ROOT = Path(__file__).resolve().parents[1]
CHECKPOINT = ROOT / "artifacts" / "tiny-qwen3_5"
PACKAGE = ROOT / "demo-out"
REPORT = ROOT / "demo-out.html"  # a package holds nothing that its manifest does not list
LOOKAHEAD = 3
PROMPTS = (
    "def read(self, size=-1):\n",
    "class Server(BaseServer):\n    def __init__(self",
    "import os\nimport sys\n\ndef main():\n",
)
BAR = 30


def export() -> None:
    """Write the package; the export ends by checking what it wrote."""
    print(f"exporting {CHECKPOINT.name} to {PACKAGE.name}/ and checking it ...", flush=True)
    start = time.perf_counter()
    export_package(CHECKPOINT, PACKAGE, lookaheads=(LOOKAHEAD,), max_model_len=512, overwrite=True)
    size = sum(file.stat().st_size for file in PACKAGE.iterdir())
    seconds = time.perf_counter() - start
    print(f"{size / 1e6:.1f} MB, exported and verified in {seconds:.1f} s\n")


def generate(num_speculative_tokens: int) -> tuple[list[RequestOutput], float]:
    """Continue every prompt greedily, and the seconds that took; 0 drafts is plain decoding."""
    params = SamplingParams(temperature=0, max_tokens=64)
    fixed = {"num_speculative_tokens": num_speculative_tokens, "adaptive": False}
    with LLM(PACKAGE, **fixed) as llm:
        start = time.perf_counter()
        outputs = llm.generate(list(PROMPTS), params)
        return outputs, time.perf_counter() - start


def show_text(output: RequestOutput) -> None:
    """Print a prompt, and below it what the model went on with."""
    print("prompt")
    for line in (output.prompt or "").splitlines():
        print(f"    {line}")
    print("continuation")
    for line in output.outputs[0].text.splitlines():
        print(f"  > {line}")
    print()


def show_acceptance(stats: Sequence[Stats]) -> None:
    """Print, for each draft position, how many of the proposed drafts the target kept."""
    drafted = [sum(counts) for counts in zip(*(s.drafted for s in stats), strict=True)]
    accepted = [sum(counts) for counts in zip(*(s.accepted for s in stats), strict=True)]
    print("drafts accepted, by position")
    for position, (kept, tried) in enumerate(zip(accepted, drafted, strict=True), 1):
        share = kept / tried if tried else 0.0
        bar = "#" * round(share * BAR)
        print(f"    {position}  {bar:<{BAR}}  {share:4.0%}  ({kept} of {tried})")


def tokens_per_pass(stats: Sequence[Stats]) -> float:
    """Tokens gained per pass of the target, over all requests."""
    return sum(s.committed for s in stats) / max(1, sum(s.target_passes for s in stats))


def measure() -> bool:
    """Measure the package, and ask what would serve this machine best; whether texts were equal.

    A process of its own is measured, because this one still holds what the export needed.
    """
    options = ["--tokens", "32", "--repeat", "1", "--html", REPORT.name, "-q"]
    return command("bench", *options) and command("doctor", "-q")


def command(name: str, *options: str) -> bool:
    """Run a command of ``qwen-mtp`` on the package; whether it was content."""
    print(f"\n$ qwen-mtp {' '.join([name, PACKAGE.name, *options])}\n", flush=True)
    python = [sys.executable, "-c", "from qwen_mtp.cli import main; main()", name, PACKAGE.name]
    return subprocess.run([*python, *options], cwd=PACKAGE.parent, check=False).returncode == 0


def main() -> int:
    """Run the demonstration; 1 when speculation changed an output."""
    export()
    (speculative, seconds), (plain, plain_seconds) = generate(LOOKAHEAD), generate(0)
    for output in speculative:
        show_text(output)
    fast, slow = [o.stats for o in speculative], [o.stats for o in plain]
    show_acceptance(fast)
    passes = [sum(s.target_passes for s in stats) for stats in (fast, slow)]
    print(
        f"\ntokens per target pass: {tokens_per_pass(fast):.2f} with {LOOKAHEAD} drafts, ", end=""
    )
    print(f"{tokens_per_pass(slow):.2f} without ({passes[0]} passes instead of {passes[1]})")
    pairs = zip(speculative, plain, strict=True)
    equal = all(a.outputs[0].token_ids == b.outputs[0].token_ids for a, b in pairs)
    print(f"seconds: {seconds:.2f} with drafts, {plain_seconds:.2f} without")
    tokens = sum(len(output.outputs[0].token_ids) for output in plain)
    verdict = "equal" if equal else "DIFFERENT"
    print(f"outputs with and without speculation: {verdict} ({tokens} tokens compared)")
    return 0 if measure() and equal else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except QwenMtpError as error:
        sys.exit(f"error: {error}")
