"""Progress on stderr: a line a phase, redrawn on a terminal, never past its end."""

import io
import sys

import pytest

from qwen_mtp.cli import export_command
from qwen_mtp.errors import ExportError
from qwen_mtp.progress import Lines, byte_text


class Terminal(io.StringIO):
    """Says that it is one."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("stream", [io.StringIO(), Terminal()], ids=["file", "terminal"])
def test_progress_is_a_line_a_phase_and_redrawn_on_a_terminal_only(stream: io.StringIO) -> None:
    progress = Lines(stream)
    progress.phase("weights", 4_000_000, "B")
    progress.advance(1_000_000)
    progress.advance(3_000_000)
    progress.phase("checksums")
    progress.done()
    progress.done()
    *lines, rest = stream.getvalue().split("\n")
    assert rest == ""
    assert [line.split("\x1b[K")[-1].split()[0] for line in lines] == ["weights", "checksums"]
    assert lines[0].endswith(" s  4.0 MB")
    assert ("\x1b[K" in stream.getvalue()) == stream.isatty()
    assert (" 25 %  1.0 MB" in stream.getvalue()) == stream.isatty()


def test_progress_never_passes_its_end() -> None:
    terminal = Terminal()
    progress = Lines(terminal)
    progress.phase("rounds", 2, "rounds")
    progress.advance(3)
    assert "100 %  3 rounds  0 s left" in terminal.getvalue()


def test_an_error_does_not_share_its_line_with_a_half_drawn_phase(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(*_: object, progress: Lines, **__: object) -> None:
        progress.phase("weights", 10, "B")
        progress.advance(5)
        raise ExportError("disk: full; free some space")

    terminal = Terminal()
    monkeypatch.setattr("qwen_mtp.pipeline.export_package", fails)
    monkeypatch.setattr(sys, "stderr", terminal)
    with pytest.raises(SystemExit) as end:
        export_command(["checkpoint", "package"])
    assert end.value.code == 1
    assert terminal.getvalue().endswith("\r\x1b[KError: disk: full; free some space\n")


def test_bytes_are_told_in_the_unit_that_fits() -> None:
    texts = [byte_text(n) for n in (300, 36_864, 5_300_000, 1_500_000_000)]
    assert texts == ["0.3 kB", "36.9 kB", "5.3 MB", "1.50 GB"]
