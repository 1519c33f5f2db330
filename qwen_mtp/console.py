"""What the commands share: errors as one line, JSON on stdout, progress on stderr, exit codes.

Exit codes: 0 done, 1 an error with one line that says what to do, 2 wrong usage, 3 a check of the
package failed.
"""

import errno
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import click
import msgspec

from qwen_mtp.errors import QwenMtpError, VerificationError
from qwen_mtp.progress import Lines, Progress, Silent

EXIT_ERROR, EXIT_VERIFICATION = 1, 3


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


def end_on_signals() -> None:
    """Leave by an exception when told to stop, so that nothing half-written stays behind."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda caught, _: sys.exit(128 + caught))
