"""Chooses the draft vocabulary: the tokens whose rows of the output head the drafter keeps.

Any choice is lossless. The target verifies over the whole vocabulary, so a token that is missing
here costs an accepted draft where it comes up, and nothing else (docs/adr/0012).
"""

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import chain
from os import PathLike
from pathlib import Path

from qwen_mtp.config import ModelConfig
from qwen_mtp.errors import CheckpointError, ExportError
from qwen_mtp.fields import Fields

# Byte-pair ids are in the order in which their merges were learned, frequent ones first: an eighth
# of 248,320 rows takes an eighth of the time and has nearly all that text is made of.
DEFAULT_ROWS = 32768
WHOLE_UP_TO = 65536  # smaller vocabularies would save less than half of a head
_TEXT_PIECE = 1 << 20  # characters that are tokenised at a time, whole lines
_TEXT = "give a text in UTF-8 such as the model will write"
_IDS = "give token ids, separated by spaces or lines, or a .json list"


def choose_draft_ids(
    checkpoint: str | PathLike[str],
    config: ModelConfig,
    rows: int | str | PathLike[str] | None,
    text: str | PathLike[str] | None,
) -> tuple[int, ...]:
    """The ids that drafts are taken from.

    Special tokens and the ends of a text are always among them.

    Args:
        checkpoint: Its directory, for the tokenizer.
        config: Sizes of the model.
        rows: How many, specials included; or a file that lists them; None takes
            ``DEFAULT_ROWS`` of a vocabulary larger than ``WHOLE_UP_TO``.
        text: A file whose most frequent tokens are taken first; None takes the lowest ids, which
            come first in the tokenizer's order.

    Returns:
        Ascending ids, or none where drafts are taken from the whole vocabulary.

    Raises:
        CheckpointError: A file of the tokenizer is missing or broken.
        ExportError: A number or file is odd.
        MissingExtraError: A text is given and the extra ``text`` is not installed.
        PackageError: The tokenizer cannot be used.
    """
    whole = config.vocab_size
    if rows == 0 or (rows is None and whole <= WHOLE_UP_TO):
        if text is not None:
            raise ExportError(
                f"draft_vocab is 0 for {whole} tokens: draft_vocab_text needs a number of them"
            )
        return ()
    if isinstance(rows, str | PathLike):
        if text is not None:
            raise ExportError("draft_vocab lists the ids: leave out draft_vocab_text, or give N")
        ids = {*_listed(Path(rows), whole), *_special_ids(checkpoint, config)}
        return _chosen(ids, whole)
    count = DEFAULT_ROWS if rows is None else rows
    special = _special_ids(checkpoint, config)
    if not len(special) < count <= whole:
        raise ExportError(
            f"draft_vocab is {count}: give a number from {len(special) + 1}, which keeps the "
            f"{len(special)} special tokens, to {whole}, or 0 for the whole vocabulary"
        )
    frequent = [] if text is None else _most_frequent(checkpoint, Path(text), whole)
    return _chosen(_first(count, chain(special, frequent, range(whole))), whole)


def _chosen(ids: set[int], whole: int) -> tuple[int, ...]:
    """All rows together are the target's head, which is there already."""
    return () if len(ids) == whole else tuple(sorted(ids))


def _first(count: int, ranked: Iterable[int]) -> set[int]:
    """The first ``count`` distinct ids."""
    kept: set[int] = set()
    for token in ranked:
        if len(kept) == count:
            break
        kept.add(token)
    return kept


def _special_ids(checkpoint: str | PathLike[str], config: ModelConfig) -> tuple[int, ...]:
    """Ends of a text and added tokens, as far as the vocabulary has them."""
    found = set(config.eos_token_ids)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if Path(checkpoint, name).exists():
            found.update(_added_ids(Fields.of_file(checkpoint, name)))
    return tuple(sorted(token for token in found if 0 <= token < config.vocab_size))


def _added_ids(fields: Fields) -> Iterator[int]:
    listed, by_id = fields.values.get("added_tokens"), fields.section("added_tokens_decoder")
    try:
        yield from (int(token["id"]) for token in listed or ())  # type: ignore[attr-defined]
        yield from map(int, by_id.values if by_id else ())
    except (TypeError, KeyError, ValueError) as error:
        raise CheckpointError(
            f"{fields.path}: added tokens have odd ids; take the file from the original checkpoint"
        ) from error


def _listed(path: Path, whole: int) -> list[int]:
    """The ids of a file, in its order."""
    try:
        data = path.read_text(encoding="utf-8")
        parts = json.loads(data) if path.suffix == ".json" else data.split()
    except OSError as error:
        raise ExportError(f"{path}: {error.strerror}; {_IDS}") from error
    except (ValueError, RecursionError) as error:
        raise ExportError(f"{path}: holds no token ids ({error}); {_IDS}") from error
    if not isinstance(parts, list) or not parts:
        raise ExportError(f"{path}: holds no token ids; {_IDS}")
    ids = [_id(path, part) for part in parts]
    for token, times in Counter(ids).items():
        if not 0 <= token < whole:
            raise ExportError(f"{path}: token id {token} lies outside of 0..{whole - 1}")
        if times > 1:
            raise ExportError(f"{path}: token id {token} is listed {times} times; list it once")
    return ids


def _id(path: Path, part: object) -> int:
    try:
        if isinstance(part, str) or type(part) is int:
            return int(part)
    except ValueError:
        pass
    raise ExportError(f"{path}: {part!r:.40} is not a token id; {_IDS}")


def _most_frequent(checkpoint: str | PathLike[str], path: Path, whole: int) -> list[int]:
    """Tokens of a text, the most frequent first; of equally frequent ones the lowest id."""
    from qwen_mtp.runtime.text import Text

    tokenizer = Path(checkpoint, "tokenizer.json")
    if not tokenizer.is_file():
        raise CheckpointError(
            f"{tokenizer}: no such file, and draft_vocab_text needs it; list the ids in a file "
            "with --draft-vocab, draft_vocab="
        )
    text, counts = Text(checkpoint), Counter[int]()
    try:
        with open(path, encoding="utf-8") as file:
            while lines := file.readlines(_TEXT_PIECE):
                counts.update(text.encode("".join(lines), add_special_tokens=False))
    except OSError as error:
        raise ExportError(f"{path}: {error.strerror}; {_TEXT}") from error
    except ValueError as error:
        raise ExportError(f"{path}: not UTF-8; {_TEXT}") from error
    known = [token for token in counts if 0 <= token < whole]
    if not known:
        raise ExportError(f"{path}: holds no text; {_TEXT}")
    return sorted(known, key=lambda token: (-counts[token], token))
