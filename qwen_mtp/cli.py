"""The commands: ``qwen-mtp-export`` and ``qwen-mtp`` with inspect, verify and run.

Results go to stdout, progress to stderr. Exit codes: 0 done, 1 an error with one line that says
what to do, 2 wrong usage, 3 a check of the package failed.
"""

import errno
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import click
import msgspec

from qwen_mtp.errors import MissingExtraError, PackageError, QwenMtpError, VerificationError
from qwen_mtp.progress import Lines, Progress, Silent

EXIT_ERROR, EXIT_VERIFICATION = 1, 3
DIRECTORY = click.Path(path_type=Path, readable=False)  # what cannot be read exits with 1
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
quiet_option = click.option("-q", "--quiet", is_flag=True, help="No progress.")
threads_option = click.option(
    "--threads", type=click.IntRange(1, 1024), help="Threads in an operator."
)


class LookaheadList(click.ParamType[tuple[int, ...]]):
    """``3`` or ``3,1``: numbers of drafts, each 1..15."""

    name = "K[,K...]"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, ...]:
        """Parse the list."""
        if isinstance(value, tuple):
            return value
        parse: Any = click.IntRange(1, 15)
        return tuple(parse.convert(part.strip(), param, ctx) for part in str(value).split(","))


class IdList(click.ParamType[list[int]]):
    """``1,2,3``: token ids."""

    name = "ID[,ID...]"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> list[int]:
        """Parse the list; an empty one is left to the package to refuse."""
        if isinstance(value, list):
            return value
        parts = [part.strip() for part in str(value).split(",") if part.strip()]
        parse: Any = click.INT
        return [parse.convert(part, param, ctx) for part in parts]


@contextmanager
def errors_as_lines() -> Iterator[None]:
    """Turn errors that have a remedy into one line and an exit code; others stay tracebacks."""
    try:
        yield
    except VerificationError as error:
        _fail(str(error), EXIT_VERIFICATION, error)
    except QwenMtpError as error:
        _fail(str(error), EXIT_ERROR, error)
    except OSError as error:
        if error.errno == errno.EPIPE:  # click ends quietly when the reader is gone
            raise
        where = f"{os.fsdecode(error.filename)}: " if error.filename else ""
        line = f"{where}{error.strerror or error}; check the path and its permissions"
        _fail(line, EXIT_ERROR, error)
    except MemoryError as error:
        line = "out of memory; export with a smaller --max-model-len, --max-num-seqs or --format"
        _fail(line, EXIT_ERROR, error)


def _fail(line: str, code: int, error: BaseException) -> NoReturn:
    if os.environ.get("QWEN_MTP_DEBUG"):
        raise error
    redraw = "\r\x1b[K" if sys.stderr.isatty() else ""  # a phase may be half drawn
    click.echo(f"{redraw}Error: {' '.join(line.split())}", err=True)
    sys.exit(code)


def print_json(value: Any) -> None:
    """Write one JSON document to stdout."""
    click.echo(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())


def reporter(quiet: bool) -> Progress:
    """Progress on stderr, or none."""
    return Silent() if quiet else Lines()


@click.command("export")
@click.argument("checkpoint", type=DIRECTORY)
@click.argument("package", type=DIRECTORY)
@click.option("--target", type=click.Choice(["onnx"]), default="onnx", show_default=True)
@click.option(
    "--format", "format_", type=click.Choice(["fp32", "int8", "int4"]), default="int8",
    show_default=True, help="Weight format.",
)  # fmt: skip
@click.option(
    "-k", "--num-speculative-tokens", "lookaheads", type=LookaheadList(), default="3",
    show_default=True, help="Drafts a round; several numbers give several buckets.",
)  # fmt: skip
@click.option(
    "--max-model-len", type=click.IntRange(2),
    help="Positions of a sequence, prompt included  [default: 4096 or the model's limit]",
)  # fmt: skip
@click.option("--max-num-seqs", type=click.IntRange(1, 256), default=1, show_default=True)
@click.option(
    "--block-size", type=click.Choice(["8", "16", "32", "64", "128", "256"]), default="64",
    show_default=True,
)  # fmt: skip
@click.option("--prefill-chunk", type=click.IntRange(1, 4096), default=128, show_default=True)
@click.option("--no-mtp", is_flag=True, help="Export the target alone, for plain decoding.")
@click.option("--dry-run", is_flag=True, help="Print the plan and write nothing.")
@click.option("--overwrite", is_flag=True, help="Replace an existing package.")
@click.option("--no-verify", is_flag=True, help="Skip the parity check at the end.")
@json_option
@quiet_option
@click.version_option(package_name="qwen-mtp")
def export_command(
    checkpoint: Path,
    package: Path,
    target: str,
    format_: Any,
    lookaheads: tuple[int, ...],
    max_model_len: int | None,
    max_num_seqs: int,
    block_size: str,
    prefill_chunk: int,
    no_mtp: bool,
    dry_run: bool,
    overwrite: bool,
    no_verify: bool,
    as_json: bool,
    quiet: bool,
) -> None:
    """Export CHECKPOINT, a Hugging Face directory, to the package PACKAGE."""
    choices: dict[str, Any] = {
        "format": format_,
        "lookaheads": () if no_mtp else lookaheads,
        "max_model_len": max_model_len,
        "max_num_seqs": max_num_seqs,
        "block_size": int(block_size),
        "prefill_chunk": prefill_chunk,
    }
    with errors_as_lines():
        from qwen_mtp.describe import describe_package, describe_plan
        from qwen_mtp.pipeline import export_package, plan_package

        if dry_run:
            _show(describe_plan(plan_package(checkpoint, **choices)), as_json)
            return
        done = export_package(
            checkpoint,
            package,
            **choices,
            mtp=not no_mtp,
            overwrite=overwrite,
            verify=not no_verify,
            progress=reporter(quiet),
        )
        _show(describe_package(done), as_json)


def _show(description: Any, as_json: bool) -> None:
    if as_json:
        print_json(description)
    else:
        click.echo(description.as_text())


@click.group()
@click.version_option(package_name="qwen-mtp")
def main() -> None:
    """Qwen3.5/3.6/3.8 with multi-token prediction, compiled and run offline."""


main.add_command(export_command)


@main.command()
@click.argument("path", type=DIRECTORY)
@json_option
def inspect(path: Path, as_json: bool) -> None:
    """Show what a package, or a checkpoint, holds."""
    with errors_as_lines():
        from qwen_mtp.describe import describe_path

        _show(describe_path(path), as_json)


@main.command()
@click.argument("package", type=DIRECTORY)
@click.option("--checkpoint", type=DIRECTORY, help="Also compare with the source checkpoint.")
@threads_option
@json_option
@quiet_option
def verify(
    package: Path, checkpoint: Path | None, threads: int | None, as_json: bool, quiet: bool
) -> None:
    """Check that PACKAGE computes on this machine what it should."""
    with errors_as_lines():
        from qwen_mtp.verify import verify_package

        report = verify_package(
            package, checkpoint=checkpoint, threads=threads, progress=reporter(quiet)
        )
        if as_json:
            print_json(
                {"passed": report.passed, "machine": report.machine, "checks": report.checks}
            )
        else:
            for check in report.checks:
                mark = "ok  " if check.passed else "FAIL"
                click.echo(f"{mark} {check.name:<13} {check.detail}")
        if not report.passed:
            failed = next(check for check in report.checks if not check.passed)
            raise VerificationError(f"{package}: {failed.name}: {failed.detail}")


def sampling_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The sampling parameters as options; what is not given is the package's default."""
    for option in (
        click.option("--seed", type=int, help="Repeat a sampled text."),
        click.option("--top-p", type=float),
        click.option("--top-k", type=int),
        click.option("--temperature", type=float, help="0 is greedy."),
        click.option("--max-tokens", type=int, default=128, show_default=True),
        click.option("--stop", multiple=True, help="End before this text; may be repeated."),
        click.option("--ignore-eos", is_flag=True),
    ):
        command = option(command)
    return command


@main.command()
@click.argument("package", type=DIRECTORY)
@click.option("--prompt", help="The prompt as text.")
@click.option("--prompt-ids", type=IdList(), help="The prompt as token ids.")
@sampling_options
@click.option("--num-speculative-tokens", "-k", type=click.IntRange(0, 15))
@threads_option
@json_option
def run(
    package: Path,
    prompt: str | None,
    prompt_ids: list[int] | None,
    num_speculative_tokens: int | None,
    threads: int | None,
    as_json: bool,
    **sampling: Any,
) -> None:
    """Generate from PACKAGE; the text goes to stdout as it is verified."""
    if (prompt is None) == (prompt_ids is None):
        raise click.UsageError("give --prompt or --prompt-ids, one of the two")
    given: Any = prompt if prompt is not None else prompt_ids
    with errors_as_lines():
        from qwen_mtp.runtime.llm import LLM
        from qwen_mtp.runtime.sampling import SamplingParams

        params = SamplingParams(**sampling)
        with LLM(package, threads=threads, num_speculative_tokens=num_speculative_tokens) as llm:
            _generate(llm, given, params, as_json)


def _generate(llm: Any, prompt: Any, params: Any, as_json: bool) -> None:
    if as_json:
        output = llm.generate([prompt], params)[0]
        print_json(output_json(output))
        return
    plain = not isinstance(prompt, str) and not _has_text(llm)
    for delta in llm.stream([prompt], params):
        text = " ".join(map(str, delta.token_ids)) + " " if plain else delta.text
        click.echo(text, nl=False)
    click.echo()


def _has_text(llm: Any) -> bool:
    """Whether answers come with their text: else their ids are all there is to show."""
    try:
        return llm.text is not None
    except (MissingExtraError, PackageError):
        return False


def output_json(output: Any) -> dict[str, Any]:
    """The JSON of ``run``."""
    answer = output.outputs[0]
    return {
        "prompt_token_ids": output.prompt_token_ids,
        "token_ids": answer.token_ids,
        "text": answer.text,
        "finish_reason": answer.finish_reason,
        "stop_reason": answer.stop_reason,
        "seed": output.seed,
        "stats": output.stats.as_json(),
    }
