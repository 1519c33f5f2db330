"""JSON files read field by field: what is odd is refused by name, in one line."""

import json
import math
import reprlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Self, TypeGuard, TypeVar

from qwen_mtp.errors import CheckpointError

Choice = TypeVar("Choice", str, int, bool)

REMEDY = "take the value of the original checkpoint"
LARGEST = 1 << 24  # of any size in a configuration; products of two still fit 64 bits


@dataclass(frozen=True, slots=True)
class Fields:
    """One JSON object of a file: fields are taken by name and refused by name.

    A field that is ``null`` counts as absent.

    Attributes:
        path: The file, for messages.
        values: The object as decoded.
        prefix: Where in the file the object is, e.g. ``"text_config."``.
    """

    path: Path
    values: Mapping[str, object]
    prefix: str = ""

    @classmethod
    def of_file(cls, directory: str | PathLike[str], name: str) -> Self:
        """Decode a file that holds one JSON object.

        Raises:
            CheckpointError: If there is no such directory or file, or it holds something else.
        """
        path = Path(directory, name)
        if not path.parent.is_dir():
            raise CheckpointError(
                f"{path.parent}: no such directory; pass the folder of a Hugging Face checkpoint"
            )
        remedy = "take the file from the original checkpoint"
        try:
            values = json.loads(path.read_bytes())
        except FileNotFoundError:
            raise CheckpointError(f"{path}: no such file; {remedy}") from None
        except OSError as error:
            raise CheckpointError(f"{path}: {error.strerror}; make the file readable") from error
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{path}: not JSON ({error}); {remedy}") from error
        if not isinstance(values, dict):
            found = reprlib.repr(values)
            raise CheckpointError(f"{path}: holds {found}, not a JSON object; {remedy}")
        return cls(path, values)

    def refusal(
        self, name: str, wanted: str, remedy: str = REMEDY, *, found: str | None = None
    ) -> CheckpointError:
        """The error to raise for a field that is not what it must be.

        Args:
            name: The field.
            wanted: What it must be.
            remedy: What the user can do about it.
            found: What to say of it instead of its value.
        """
        value = self.values.get(name)
        found = found or ("absent" if value is None else reprlib.repr(value))
        return CheckpointError(
            f"{self.path}: {self.prefix}{name} is {found}, must be {wanted}; {remedy}"
        )

    def section(self, name: str) -> "Fields | None":
        """The object in a field, None where the field is absent.

        Raises:
            CheckpointError: If the field is no JSON object.
        """
        value = self.values.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.refusal(name, "a JSON object")
        return Fields(self.path, value, f"{self.prefix}{name}.")

    def integer(
        self, name: str, default: int | None = None, *, least: int = 1, most: int = LARGEST
    ) -> int:
        """An integer from ``least`` to ``most``; required where there is no default.

        Raises:
            CheckpointError: If the field is odd or missing.
        """
        value = self.values.get(name)
        if value is None and default is not None:
            return default
        if not _is_integer(value) or value < least:
            raise self.refusal(name, f"an integer, at least {least}")
        if value > most:
            raise self.refusal(name, f"an integer, at most {most}")
        return value

    def number(self, name: str, default: float, *, zero: bool = False) -> float:
        """A finite number above zero, or zero where that is allowed.

        Raises:
            CheckpointError: If the field is odd.
        """
        value = self.values.get(name)
        if value is None:
            return default
        try:
            number = float(value) if isinstance(value, float) or _is_integer(value) else math.nan
        except OverflowError:
            number = math.inf
        if not math.isfinite(number) or number < 0 or (number == 0 and not zero):
            raise self.refusal(name, f"a number {'not below' if zero else 'above'} 0")
        return number

    def flag(self, name: str, default: bool) -> bool:
        """A boolean.

        Raises:
            CheckpointError: If the field is odd.
        """
        value = self.values.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.refusal(name, "true or false")
        return value

    def choice(self, name: str, default: Choice, allowed: Collection[Choice]) -> Choice:
        """One of ``allowed``, the type included: 1 is not ``true``.

        Raises:
            CheckpointError: If the field is none of them.
        """
        value = self.values.get(name)
        if value is None:
            return default
        for one in allowed:
            if type(value) is type(one) and value == one:
                return one
        names = " or ".join(json.dumps(one) for one in allowed)
        raise self.refusal(name, names, "a model with another value cannot be exported")

    def token_ids(self, name: str, vocab_size: int) -> tuple[int, ...]:
        """A token id or a list of them; empty where the field is absent.

        Raises:
            CheckpointError: If the field is odd or an id is outside the vocabulary.
        """
        value = self.values.get(name)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(_is_integer(one) and 0 <= one < vocab_size for one in ids):
            raise self.refusal(name, f"one or more token ids below {vocab_size}")
        return tuple(ids)


def _is_integer(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)
