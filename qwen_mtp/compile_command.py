"""The command ``qwen-mtp compile``: the native kernels for this CPU, before they are needed."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from qwen_mtp.checks_report import one_line
from qwen_mtp.console import end_on_signals, errors_as_lines, print_json, reporter
from qwen_mtp.errors import RequestError
from qwen_mtp.options import DIRECTORY, json_option, quiet_option
from qwen_mtp.progress import Progress

if TYPE_CHECKING:
    from qwen_mtp.runtime.package import Package


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """What ``compile`` did.

    Attributes:
        library: The compiled kernels.
        compiler: The command that compiled them; empty where they were there already.
        seconds: How long that took.
        instructions: What of this CPU they may use, the names that matter.
        package: The package that ran a prompt and a round on them; empty without one.
    """

    library: str
    compiler: str
    seconds: float
    instructions: tuple[str, ...]
    package: str = ""

    def as_text(self) -> str:
        """A few lines for a person."""
        how = f"compiled in {self.seconds:.1f} s by {self.compiler}" if self.compiler else "there"
        lines = [f"kernels   {self.library}", f"state     {how}, and loaded"]
        lines.append(f"cpu       {', '.join(self.instructions) or 'no vector instructions known'}")
        if self.package:
            lines.append(f"package   {self.package}: loaded, ran a prompt and a round")
        return "\n".join(lines)


@click.command("compile")
@click.argument("package", type=DIRECTORY, required=False)
@click.option("--force", is_flag=True, help="Compile again, whatever is there.")
@json_option
@quiet_option
def compile_command(package: Path | None, force: bool, as_json: bool, quiet: bool) -> None:
    """Compile the native kernels for this CPU now; with PACKAGE, also run it on them once.

    They are kept in QWEN_MTP_CACHE, else in the user's cache directory, so an image or a machine
    without a compiler can be given them. They serve the CPU they were compiled on and its like.
    """
    end_on_signals()
    with errors_as_lines():
        done = _compile(package, force, reporter(quiet))
        if as_json:
            print_json(done)
        else:
            click.echo(done.as_text())


def _compile(package: Path | None, force: bool, progress: Progress) -> Compiled:
    """Compile, load, and run a pass.

    Raises:
        PackageError: The package cannot be opened, or its native model not loaded or run.
        RequestError: There can be no kernels here, they compute wrongly, or the package has no
            model for them.
    """
    from qwen_mtp.doctor.environment import instruction_sets
    from qwen_mtp.runtime.native import find_compiler, find_kernels
    from qwen_mtp.runtime.package import Package

    opened = None if package is None else Package.open(package)
    if opened is not None and opened.manifest.native_file is None:
        raise RequestError(f"{package}: has no model for native kernels; export it again")
    progress.phase("compiling the native kernels for this CPU")
    found = find_kernels(force=force)
    progress.done()
    if found.library is None:
        raise RequestError(f"native kernels: {found.reason}")
    _prove(found.library)
    if opened is not None:
        _run_once(opened, progress)
    return Compiled(
        library=str(found.library),
        compiler=" ".join(find_compiler()) if found.seconds else "",
        seconds=found.seconds,
        instructions=instruction_sets(),
        package="" if package is None else str(package),
    )


def _prove(library: Path) -> None:
    """Multiply on the kernels: an instruction this CPU lacks ends the process here and now.

    Raises:
        RequestError: They cannot be run, or a row does not keep its bits.
    """
    from qwen_mtp.doctor.products import Probe, ProbeShape, some_weights

    shape = ProbeShape("int8", 1, 64)
    try:
        wrong = Probe(shape, some_weights(shape.nbytes), 1, library).difference((2,))
    except Exception as error:  # the runtime's own exceptions share no base class
        wrong = one_line(error)
    if wrong:
        raise RequestError(f"native kernels: {wrong}; set QWEN_MTP_NATIVE=0 and report it")


def _run_once(package: "Package", progress: Progress) -> None:
    from qwen_mtp.runtime.sampling import SamplingParams
    from qwen_mtp.runtime.session import Session

    progress.phase("running the package on them")
    with Session(package, native=True) as session:
        session.prefill([0], SamplingParams(temperature=0).resolve())
        session.step()
    progress.done()
