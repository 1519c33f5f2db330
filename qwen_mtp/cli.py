"""The commands: ``qwen-mtp-export`` and ``qwen-mtp`` with inspect, verify, run and bench.

Results go to stdout, progress to stderr. Exit codes: 0 done, 1 an error with one line that says
what to do, 2 wrong usage, 3 a check of the package failed.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from qwen_mtp.bench_command import bench_command
from qwen_mtp.compile_command import compile_command
from qwen_mtp.console import end_on_signals, errors_as_lines, print_json, reporter
from qwen_mtp.doctor_command import doctor_command
from qwen_mtp.errors import MissingExtraError, PackageError, VerificationError
from qwen_mtp.graphs.spec import AscendChoice
from qwen_mtp.options import (
    DEFAULT_LOOKAHEADS,
    DEFAULT_SOC,
    DIRECTORY,
    IdList,
    device_option,
    export_options,
    interpret_option,
    json_option,
    native_option,
    quiet_option,
    sampling_options,
    threads_option,
)


@click.command("export")
@click.argument("checkpoint", type=DIRECTORY)
@click.argument("package", type=DIRECTORY)
@export_options
@json_option
@quiet_option
@click.version_option(package_name="qwen-mtp")
def export_command(
    checkpoint: Path,
    package: Path,
    target: str,
    opset_domain: Any,
    format_: Any,
    lookaheads: tuple[tuple[int, ...], ...],
    max_model_len: int | None,
    max_num_seqs: int,
    block_size: str | None,
    prefill_chunk: int,
    kv_dtype: Any,
    lowering: Any,
    soc_version: str | None,
    dtype: Any,
    custom_ops: tuple[str, ...],
    draft_vocab: int | Path | None,
    draft_vocab_text: Path | None,
    no_mtp: bool,
    dry_run: bool,
    overwrite: bool,
    no_verify: bool,
    as_json: bool,
    quiet: bool,
) -> None:
    """Export CHECKPOINT, a Hugging Face directory, to the package PACKAGE."""
    if no_mtp and lookaheads:
        raise click.UsageError("-k and --no-mtp exclude each other: drafts need the MTP head")
    if no_mtp and (draft_vocab is not None or draft_vocab_text is not None):
        raise click.UsageError("--draft-vocab and --no-mtp exclude each other: nothing is drafted")
    if target == "air" and opset_domain is not None:
        raise click.UsageError("--opset-domain is for --target onnx")
    if kv_dtype is not None and (target == "air" or opset_domain == "standard"):
        raise click.UsageError("--kv-dtype is for --target onnx with --opset-domain microsoft")
    drafts = [k for group in lookaheads for k in group] or [*DEFAULT_LOOKAHEADS]
    choices: dict[str, Any] = {
        "format": format_,
        "lookaheads": () if no_mtp else drafts,
        "max_model_len": max_model_len,
        "max_num_seqs": max_num_seqs,
        "block_size": None if block_size is None else int(block_size),
        "prefill_chunk": prefill_chunk,
        "ascend": _ascend(target, lowering, soc_version, custom_ops),
        "dtype": dtype,
        "kv_dtype": kv_dtype,
        "opset_domain": opset_domain or "microsoft",
        "draft_vocab": draft_vocab,
        "draft_vocab_text": draft_vocab_text,
    }
    with errors_as_lines():
        from qwen_mtp.describe import describe_package, describe_plan
        from qwen_mtp.pipeline import export_package, plan_package

        if dry_run:
            plan = plan_package(checkpoint, **choices)
            from qwen_mtp.export.package import check_target  # planning has found the extra

            check_target(Path(os.path.abspath(package)), overwrite)
            _show(describe_plan(plan, package), as_json, tables=True)
            return
        end_on_signals()
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


def _ascend(
    target: str, lowering: Any, soc_version: str | None, custom_ops: tuple[str, ...]
) -> AscendChoice | None:
    if target == "air":
        ops = tuple(sorted(set(custom_ops)))
        soc = DEFAULT_SOC if soc_version is None else soc_version
        return AscendChoice(lowering=lowering or "portable", soc_version=soc, custom_ops=ops)
    for option, value in (("--lowering", lowering), ("--soc-version", soc_version)):
        if value is not None:
            raise click.UsageError(f"{option} is for --target air")
    if custom_ops:
        raise click.UsageError("--custom-op is for --target air")
    return None


def _show(description: Any, as_json: bool, tables: bool = False) -> None:
    if as_json:
        print_json(description)
    else:
        click.echo(description.as_text(tables))


@click.group()
@click.version_option(package_name="qwen-mtp")
def main() -> None:
    """Qwen3.5/3.6/3.8 with multi-token prediction, compiled and run offline."""


main.add_command(export_command)
main.add_command(compile_command)
main.add_command(doctor_command)
main.add_command(bench_command)


@main.command()
@click.argument("path", type=DIRECTORY)
@click.option("--graphs", is_flag=True, help="Also every input and output of the graphs.")
@json_option
def inspect(path: Path, graphs: bool, as_json: bool) -> None:
    """Show what PATH, a package or a checkpoint, holds; checkpoints need the export extra."""
    with errors_as_lines():
        from qwen_mtp.describe import Description, describe_path

        found = describe_path(path)
        if graphs and not isinstance(found, Description):
            raise click.UsageError(f"--graphs is for packages; {path} is a checkpoint")
        _show(found, as_json, tables=graphs)


@main.command()
@click.argument("package", type=DIRECTORY)
@click.option(
    "--checkpoint",
    type=DIRECTORY,
    help="Also compare with the source checkpoint; needs torch and transformers.",
)
@threads_option
@native_option
@json_option
@quiet_option
def verify(
    package: Path,
    checkpoint: Path | None,
    threads: int | None,
    native: bool | None,
    as_json: bool,
    quiet: bool,
) -> None:
    """Check that PACKAGE computes on this machine what it should."""
    with errors_as_lines():
        from qwen_mtp.verify import verify_package

        report = verify_package(
            package,
            checkpoint=checkpoint,
            threads=threads,
            native=native,
            progress=reporter(quiet),
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


@main.command()
@click.argument("package", type=DIRECTORY)
@click.option("--prompt", help="The prompt as text.")
@click.option("--prompt-ids", type=IdList(), help="The prompt as token ids.")
@sampling_options
@threads_option
@native_option
@device_option
@interpret_option
@json_option
@quiet_option
def run(
    package: Path,
    prompt: str | None,
    prompt_ids: list[int] | None,
    num_speculative_tokens: int | None,
    adaptive: bool,
    threads: int | None,
    native: bool | None,
    device: int | None,
    interpret: bool,
    as_json: bool,
    quiet: bool,
    **sampling: Any,
) -> None:
    """Generate from PACKAGE; the text goes to stdout as it is verified."""
    if (prompt is None) == (prompt_ids is None):
        raise click.UsageError("give --prompt or --prompt-ids, one of the two")
    for option, value in (("--device", device), ("--threads", threads), ("--native", native)):
        if interpret and value is not None:
            raise click.UsageError(f"{option} and --interpret exclude each other")
    given: Any = prompt if prompt is not None else prompt_ids
    with errors_as_lines():
        from qwen_mtp.runtime.engines import prepare_kernels
        from qwen_mtp.runtime.llm import LLM
        from qwen_mtp.runtime.package import Package
        from qwen_mtp.runtime.sampling import SamplingParams

        params = SamplingParams(**sampling)
        engine = _interpreter(package) if interpret else None
        if engine is None:
            prepare_kernels(Package.open(package), native, reporter(quiet))
        with LLM(
            package,
            threads=threads,
            num_speculative_tokens=num_speculative_tokens,
            adaptive=adaptive,
            device=device,
            native=native,
            engine=engine,
        ) as llm:
            _generate(llm, given, params, as_json, quiet)


def _interpreter(package: Path) -> Any:
    from qwen_mtp.runtime.package import Package

    opened = Package.open(package)
    try:
        from qwen_mtp.interpreted import InterpretedEngine
    except ModuleNotFoundError as missing:
        raise MissingExtraError(
            f"--interpret needs {missing.name}: pip install 'qwen-mtp[npu]'"
        ) from missing
    return InterpretedEngine(opened)


def _generate(llm: Any, prompt: Any, params: Any, as_json: bool, quiet: bool) -> None:
    if as_json:
        output = llm.generate([prompt], params)[0]
        print_json(output_json(output) | {"kernels": llm.kernels})
        return
    plain = not isinstance(prompt, str) and not _has_text(llm)
    counts, drafted, reason = [], [], None
    for delta in llm.stream([prompt], params):
        counts.append(len(delta.token_ids))
        drafted.append(delta.drafted)
        reason = delta.finish_reason
        text = " ".join(map(str, delta.token_ids)) + " " if plain else delta.text
        click.echo(text, nl=False)
    click.echo()
    if not quiet:
        click.echo(f"{reason}: {counts_line(counts, drafted)}", err=True)


def counts_line(counts: Sequence[int], drafted: Sequence[int]) -> str:
    """What a stream did.

    Args:
        counts: Tokens of each piece: the prompt's one token, then those of each target pass.
        drafted: Drafts of each piece: none, then those of each target pass.
    """
    passes = counts[1:]
    line = f"{sum(counts)} token{'' if sum(counts) == 1 else 's'}"
    if passes:
        plain = drafted[1:].count(0)
        without = f", {plain} without drafts" if plain else ""
        line += f", {sum(passes) / len(passes):.2f} a target pass ({len(passes)} passes{without})"
    most = max(passes, default=0)
    kept = [sum(count > place for count in passes) for place in range(1, most)]
    return line + (f"; drafts kept by position: {', '.join(map(str, kept))}" if kept else "")


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
