"""The command ``qwen-mtp doctor``: what this machine can do, and what to choose for it."""

from pathlib import Path

import click

from qwen_mtp.console import end_on_signals, errors_as_lines, print_json, reporter
from qwen_mtp.options import DIRECTORY, Number, json_option, quiet_option, threads_option


@click.command("doctor")
@click.argument("package", type=DIRECTORY, required=False)
@click.option(
    "--weights-gb",
    type=Number(0.001, 10000),
    help="Without PACKAGE: the size of the model in int8, in GB  [default: 0.75]",
)
@threads_option
@json_option
@quiet_option
def doctor_command(
    package: Path | None, weights_gb: float | None, threads: int | None, as_json: bool, quiet: bool
) -> None:
    """Measure this machine, and PACKAGE on it, and recommend what to choose.

    Format, drafts a round, draft vocabulary, threads and kernels are recommended, each with its
    reason, and the commands that use them. Without PACKAGE its costs are estimated.
    """
    if package is not None and weights_gb is not None:
        raise click.UsageError("--weights-gb is for a run without PACKAGE, which has its own size")
    end_on_signals()
    with errors_as_lines():
        from qwen_mtp.bench.report import as_plain
        from qwen_mtp.doctor.measure import examine

        progress = reporter(quiet)
        report = examine(package, weights_gb=weights_gb, threads=threads, progress=progress)
        if as_json:
            print_json(as_plain(report))
        else:
            click.echo(report.as_text())
