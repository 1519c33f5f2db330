"""The package for Ascend that the tests of the commands share, written by the command."""

import shutil
import warnings
from pathlib import Path

from click.testing import Result

from tests.commands import exported

OPTIONS = ("-k", "1", "--target", "air", "--format", "fp32", "--no-verify", "-q")


def air_package_of_the_commands() -> tuple[Path, Result]:
    """One slot, K = 1, portable in float32; and what the command said."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch and torchair warn of their own code
        return exported(*OPTIONS, "--soc-version", "ascend910b4")


def air_copy(directory: Path) -> Path:
    """A copy, to be changed."""
    return Path(shutil.copytree(air_package_of_the_commands()[0], directory / "package"))
