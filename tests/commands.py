"""The commands inside this process, and the small model that they export and run in tests."""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import click
from click.testing import CliRunner, Result

from qwen_mtp.cli import export_command, main
from tests.checkpoints import Config, tiny_config, write_checkpoint
from tests.packages import TRAINED, scratch

GEOMETRY = ("--max-model-len", "64", "--block-size", "16", "--prefill-chunk", "8")


def small_config(**overrides: Any) -> Config:
    """One layer of each kind, and the vocabulary of the bundled tokenizer."""
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "vocab_size": 2048,
        "num_hidden_layers": 2,
        "full_attention_interval": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
        "max_position_embeddings": 128,
        "partial_rotary_factor": 0.5,
    }
    return tiny_config(**(sizes | overrides))


def small_checkpoint(directory: Path, **overrides: Any) -> Path:
    """Write one, tokenizer included."""
    write_checkpoint(directory, small_config(**overrides))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(TRAINED / name, directory / name)
    return directory


@cache
def checkpoint() -> Path:
    """The one that most tests share; nobody changes it."""
    return small_checkpoint(scratch() / "commands" / "checkpoint")


@cache
def exported(*options: str) -> tuple[Path, Result]:
    """A package that the command wrote with these options, and what it said."""
    name = "-".join(option.strip("-").replace(",", "+") for option in options)
    path = scratch() / "commands" / f"package-{name}"
    result = call(export_command, checkpoint(), path, *GEOMETRY, *options)
    assert result.exit_code == 0, result.stderr
    return path, result


def verified_package() -> Path:
    """One slot, K = 1, int8, verified."""
    return exported("-k", "1")[0]


def two_slots() -> Path:
    """Two slots, K = 1 and 3, int8."""
    return exported("-k", "3,1", "--max-num-seqs", "2", "--no-verify", "-q")[0]


def call(command: click.Command, *arguments: object) -> Result:
    """Run a command; an exception that would be a traceback is raised here."""
    result = CliRunner().invoke(command, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def qwen_mtp(*arguments: object) -> Result:
    """``qwen-mtp ...``."""
    return call(main, *arguments)


def qwen_mtp_export(*arguments: object) -> Result:
    """``qwen-mtp-export ... -q`` with the small geometry."""
    return call(export_command, *arguments, *GEOMETRY, "-q")


def refused(result: Result, code: int, *fragments: str) -> None:
    """Check for an exit code and one line that has a remedy and every fragment."""
    assert result.exit_code == code, (result.exit_code, result.stderr)
    lines = result.stderr.splitlines()
    assert [line for line in lines if line.startswith("Error: ")] == lines[-1:]
    assert code == 2 or len(lines) == 1, lines
    assert "Traceback" not in result.output
    missing = [fragment for fragment in fragments if fragment not in lines[-1]]
    assert not missing, (missing, lines[-1])


def contents(directory: Path) -> dict[str, bytes]:
    """Every file below a directory."""
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


@contextmanager
def untouched(directory: Path) -> Iterator[None]:
    """Check that names and contents below a directory stay as they are."""
    names, before = sorted(directory.rglob("*")), contents(directory)
    yield
    assert sorted(directory.rglob("*")) == names
    assert contents(directory) == before


def package_copy(directory: Path) -> Path:
    """A copy of the verified package, to be damaged."""
    return Path(shutil.copytree(verified_package(), directory / "package"))


def flip(path: Path, place: int) -> None:
    """Change one byte of a file."""
    data = bytearray(path.read_bytes())
    data[place] ^= 0x55
    path.write_bytes(data)


def rejected(directory: Path, out: Path, *options: str) -> Result:
    """An export that must leave no trace."""
    with untouched(out):
        return qwen_mtp_export(directory, out / "new" / "package", "--no-verify", *options)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every value in a JSON document; of a list, the first two."""
    if path:
        yield path
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from places(inner, (*path, name))
    elif isinstance(value, list):
        for i, inner in enumerate(value[:2]):
            yield from places(inner, (*path, i))


def with_value(document: str, path: tuple[Any, ...], value: Any) -> Any:
    """The document with one value replaced; with ``...``, removed."""
    whole = json.loads(document)
    holder = whole
    for step in path[:-1]:
        holder = holder[step]
    if value is ...:
        del holder[path[-1]]
    else:
        holder[path[-1]] = value
    return whole
