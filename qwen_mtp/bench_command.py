"""The command ``qwen-mtp bench``: measure a package here, and show it as text, JSON or a page."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import mkstemp
from typing import IO, Any

import click

from qwen_mtp.console import end_on_signals, errors_as_lines, print_json, reporter
from qwen_mtp.errors import RequestError, VerificationError
from qwen_mtp.options import (
    DIRECTORY,
    IdList,
    Number,
    json_option,
    native_option,
    quiet_option,
    threads_option,
)

_FILE = click.Path(path_type=Path, readable=False, dir_okay=True)


class NumberList(click.ParamType[tuple[Any, ...]]):
    """``0,1,3``: numbers of one type, at least one."""

    def __init__(self, each: Any, name: str) -> None:
        """Take numbers that the click type ``each`` takes; ``name`` stands in the help."""
        self._each, self.name = each, f"{name}[,{name}...]"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[Any, ...]:
        """Parse the list."""
        if isinstance(value, tuple):
            return value
        return tuple(
            self._each.convert(part.strip(), param, ctx) for part in str(value).split(",")
        )


@click.command("bench")
@click.argument("package", type=DIRECTORY)
@click.option("--prompt-file", type=_FILE, help="Continue this text  [default: one of its own]")
@click.option("--prompt-ids", type=IdList(), help="Continue these token ids.")
@click.option(
    "-k",
    "--num-speculative-tokens",
    "lookaheads",
    type=NumberList(click.IntRange(0, 15), "K"),
    help="Drafts a round, beside plain decoding  [default: those exported]",
)
@click.option(
    "--forced-acceptance",
    "acceptances",
    type=NumberList(Number(0, 1), "A"),
    default="0,0.6,0.8,1",
    show_default=True,
    help="Scripted drafts: each is right with this probability.",
)
@click.option(
    "--context",
    "contexts",
    type=NumberList(click.INT, "N"),
    help="Positions before a pass, the first for what is measured at one"
    "  [default: 256 and longer ones]",
)
@threads_option
@native_option
@click.option(
    "--tokens", type=click.IntRange(2), help="Tokens a run generates  [default: 48 or what fits]"
)
@click.option(
    "--repeat",
    type=click.IntRange(1, 1000),
    default=3,
    show_default=True,
    help="Runs of each kind; passes are timed ten times as often.",
)
@click.option("--html", type=_FILE, help="Also write a page with plots to this file.")
@json_option
@quiet_option
def bench_command(
    package: Path,
    prompt_file: Path | None,
    prompt_ids: Sequence[int] | None,
    html: Path | None,
    as_json: bool,
    quiet: bool,
    **choices: Any,
) -> None:
    """Measure PACKAGE on this machine: speed, acceptance, memory, and what limits it."""
    if prompt_file is not None and prompt_ids is not None:
        raise click.UsageError("--prompt-file and --prompt-ids exclude each other")
    end_on_signals()
    with errors_as_lines(), _whole_file(html, package) as page:
        from qwen_mtp.bench.measure import run_bench
        from qwen_mtp.bench.page import as_html
        from qwen_mtp.bench.plan import BenchOptions
        from qwen_mtp.bench.report import document
        from qwen_mtp.bench.text import as_text, verdict

        prompt = prompt_ids if prompt_file is None else _read(prompt_file)
        source = str(prompt_file or "the prompt")
        options = BenchOptions(prompt=prompt, source=source, **choices)
        report = run_bench(package, options, reporter(quiet))
        if page is not None:
            page.write(as_html(report))
        if as_json:
            print_json(document(report))
        else:
            click.echo(as_text(report))
        if not report.equal and not report.model.near_ties:
            raise VerificationError(
                f"{package}: {verdict(report).partition(': ')[2]}; run qwen-mtp verify on it"
            )


def _read(path: Path) -> str:
    """The text of a prompt.

    Raises:
        OSError: It cannot be read.
        RequestError: It is empty or not UTF-8.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(f"{path}: {error}; give a text file in UTF-8") from error
    if not text:
        raise RequestError(f"{path} is empty; give a file with at least a word")
    return text


@contextmanager
def _whole_file(path: Path | None, package: Path) -> Iterator[IO[str] | None]:
    """A file beside ``path`` that takes its place when all went well, and vanishes when not.

    Raises:
        OSError: No file can be written there; nothing else has happened yet.
        RequestError: The same, because it is a directory, a device or inside the package.
    """
    if path is None:
        yield None
        return
    if path.is_dir():
        raise RequestError(f"{path} is a directory; give the name of a file for --html")
    if path.exists() and not path.is_file():  # a device, which a page must not replace
        raise RequestError(f"{path} is no regular file; give the name of one for --html")
    if package.resolve() in path.resolve().parents:
        raise RequestError(f"{path} lies in the package, which is whole; write --html beside it")
    try:
        handle, name = mkstemp(dir=path.parent, prefix=f".{path.name}.", text=True)
    except OSError as error:
        raise OSError(error.errno, error.strerror, os.fspath(path)) from error
    with open(handle, "w", encoding="utf-8") as file:
        try:
            yield file
        except VerificationError:  # the page says so itself
            file.flush()
            _place(name, path)
            raise
        except BaseException:
            os.unlink(name)
            raise
        file.flush()
        _place(name, path)


def _place(name: str, path: Path) -> None:
    mask = os.umask(0)
    os.umask(mask)
    os.chmod(name, 0o666 & ~mask)  # temporary files are for their owner alone
    os.replace(name, path)
