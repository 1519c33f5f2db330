"""Text in and out of token ids: the tokenizer, the incremental detokenizer, the chat template.

Everything else in the runtime works on token ids alone; only this file needs the ``text`` extra.
"""

import codecs
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, cast

from qwen_mtp.errors import MissingExtraError, PackageError, RequestError

if TYPE_CHECKING:
    from jinja2 import Template
    from tokenizers import Tokenizer

_INSTALL = "text needs the package {!r}: pip install 'qwen-mtp[text]'"
# How byte-level BPE files write bytes: printable ones as themselves, the others from U+0100 on.
_PRINTABLE = (*range(33, 127), *range(161, 173), *range(174, 256))
_HIDDEN = tuple(byte for byte in range(256) if byte not in _PRINTABLE)
_BYTES = {chr(b): b for b in _PRINTABLE} | {chr(256 + i): b for i, b in enumerate(_HIDDEN)}
_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token")


class Detokenizer:
    """Turns tokens into text one at a time, never giving out part of a character.

    The texts given out, joined, are exactly the text of all tokens decoded at once: invalid bytes
    become U+FFFD as they do there.
    """

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        """Start at the beginning of a text; ``token_bytes`` gives the UTF-8 bytes of one token."""
        self._bytes = token_bytes
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        """Take one token; return the characters it completes."""
        return self._utf8.decode(self._bytes(token))

    def flush(self) -> str:
        """Return what an unfinished character at the end decodes to; start over."""
        rest = self._utf8.decode(b"", final=True)
        self._utf8.reset()
        return rest


class Text:
    """The tokenizer and the chat template of one package or checkpoint directory."""

    def __init__(self, directory: str | PathLike[str]) -> None:
        """Read ``tokenizer.json``; the chat template is read when first used.

        Raises:
            MissingExtraError: If the ``tokenizers`` library is not installed.
            PackageError: If the file is missing, broken or not a byte-level BPE.
        """
        self._directory = Path(directory)
        self._tokenizer = _load_tokenizer(self._directory / "tokenizer.json")
        added = self._tokenizer.get_added_tokens_decoder()
        self._hidden = {token.content for token in added.values() if token.special}
        self._templates: dict[str, Template] | None = None
        self._special_texts: dict[str, str] = {}

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text.

        Args:
            text: Any text; special tokens written out in it become those tokens.
            add_special_tokens: Whether the tokenizer may add its own ends (Qwen's adds none).

        Raises:
            RequestError: If it is not a text, or not one that UTF-8 can hold.
        """
        try:
            return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        except (TypeError, UnicodeError) as error:
            raise RequestError(f"the prompt is not a valid text: {_one_line(error)}") from error

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """Return the text of token ids; ids outside the vocabulary have none.

        Raises:
            RequestError: If an id is negative.
        """
        try:
            return self._tokenizer.decode(list(ids), skip_special_tokens=skip_special)
        except (OverflowError, TypeError) as error:
            raise RequestError(f"token ids must be integers >= 0: {_one_line(error)}") from error

    def detokenizer(self, *, skip_special: bool = True) -> Detokenizer:
        """Return a new incremental ``decode``."""
        return Detokenizer(lambda token: self._token_bytes(token, skip_special))

    def _token_bytes(self, token: int, skip_special: bool) -> bytes:
        piece = self._tokenizer.id_to_token(token)
        if piece is None or (skip_special and piece in self._hidden):
            return b""
        try:
            return bytes(map(_BYTES.__getitem__, piece))
        except KeyError:  # an added token is plain text, not an image of bytes
            return piece.encode()

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, object]],
        add_generation_prompt: bool = True,
        *,
        template: str | None = None,
        **variables: object,
    ) -> str:
        """Return the prompt that a conversation is, as the model was trained on it.

        Args:
            messages: Messages with ``role`` and ``content``, JSON values only.
            add_generation_prompt: Whether to open the assistant's next message.
            template: Name of one of several templates; None takes ``default``, or ``tool_use``
                where there is one and tools are given.
            variables: What else the template reads, such as ``tools`` or ``enable_thinking``.

        Raises:
            MissingExtraError: If ``jinja2`` is not installed.
            PackageError: If the template's file is broken.
            RequestError: If there is no such template, or it refuses the messages.
        """
        chosen = self._choose(template, variables.get("tools") is not None)
        values = {
            **self._special_texts,
            "tools": None,
            "documents": None,
            **variables,
            "messages": [_without_none(message) for message in messages],
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            # Templates are foreign code: they see fresh JSON values, never the caller's objects.
            return chosen.render(json.loads(json.dumps(values, default=dict)))
        except Exception as error:  # a template can raise anything
            raise RequestError(f"the chat template failed: {_one_line(error)}") from error

    def _choose(self, name: str | None, with_tools: bool) -> "Template":
        if self._templates is None:
            self._templates, self._special_texts = _load_templates(self._directory)
        if name is None:
            name = "tool_use" if with_tools and "tool_use" in self._templates else "default"
        if name not in self._templates:
            names = ", ".join(self._templates) or "none"
            raise RequestError(
                f"{self._directory} has no chat template {name!r} (it has: {names}); "
                "give a ready prompt instead"
            )
        return self._templates[name]


def _load_tokenizer(path: Path) -> "Tokenizer":
    try:
        from tokenizers import Tokenizer, decoders
    except ImportError as missing:
        raise MissingExtraError(_INSTALL.format("tokenizers")) from missing
    if not path.is_file():
        raise PackageError(f"{path} is missing; copy it from the checkpoint, or use token ids")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        raise PackageError(f"{path} is not a tokenizer: {_one_line(error)}") from error
    if not isinstance(tokenizer.decoder, decoders.ByteLevel):
        raise PackageError(f"{path} is not a byte-level BPE; only Qwen's tokenizers are supported")
    # Both are training settings that some files carry along.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _load_templates(directory: Path) -> tuple[dict[str, "Template"], dict[str, str]]:
    """Return the compiled templates by name and the special tokens' texts."""
    path, own = directory / "tokenizer_config.json", directory / "chat_template.jinja"
    config = _read_config(path)
    sources = _sources(config.get("chat_template"), path)
    if own.is_file():
        path, sources = own, {"default": _read(own)}
    texts = {name: config.get(name) for name in _SPECIAL}
    plain = {k: t.get("content") if isinstance(t, dict) else t for k, t in texts.items()}
    compiled = {name: _compile(source, path) for name, source in sources.items()}
    return compiled, {k: t for k, t in plain.items() if isinstance(t, str)}


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except ValueError as error:
        raise PackageError(f"{path} is not UTF-8: {_one_line(error)}") from error


def _read_config(path: Path) -> dict[str, object]:
    if not path.is_file():
        return {}
    try:
        found = json.loads(_read(path))
    except json.JSONDecodeError as error:
        raise PackageError(f"{path} is not JSON: {_one_line(error)}") from error
    if not isinstance(found, dict):
        raise PackageError(f"{path} is not a JSON object")
    return found


def _sources(found: object, path: Path) -> dict[str, str]:
    """Read both forms of ``chat_template``: one text, or a list of named ones."""
    if found is None or isinstance(found, str):
        return {} if found is None else {"default": found}
    try:
        return {str(t["name"]): str(t["template"]) for t in cast("list[dict[str, str]]", found)}
    except (TypeError, LookupError) as error:
        raise PackageError(
            f"{path}: chat_template is neither a text nor a list of names and templates"
        ) from error


def _compile(source: str, path: Path) -> "Template":
    """Compile a template under the rules that published templates are written for."""
    try:
        from jinja2 import TemplateError, nodes
        from jinja2.ext import Extension
        from jinja2.parser import Parser
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError as missing:
        raise MissingExtraError(_INSTALL.format("jinja2")) from missing

    class Generation(Extension):
        """Renders ``{% generation %}`` blocks, which mark text for training, as they are."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Parser) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=line)

    def raise_exception(message: str) -> NoReturn:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    try:
        return environment.from_string(source)
    except TemplateError as error:
        raise PackageError(f"{path}: the chat template is broken: {_one_line(error)}") from error


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML, which no model was trained on.
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _without_none(message: Mapping[str, object]) -> dict[str, object]:
    """Drop what clients send as null; templates would print it."""
    if not isinstance(message, Mapping):
        raise RequestError(f"a chat message is {message!r}: give a mapping with role and content")
    return {key: value for key, value in message.items() if value is not None}


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
