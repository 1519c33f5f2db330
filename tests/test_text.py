"""Text against the tokenizers library and transformers, which we did not write."""

import functools
import json
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from qwen_mtp.errors import MissingExtraError, PackageError, RequestError
from qwen_mtp.runtime.text import Detokenizer, Text

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
PLAIN_ADDED = ["<think>", "</think>", "a b 日"]
TRICKY = [
    "plain ascii, with  two spaces\n\tand a tab",
    "emoji 👩‍👩‍👧‍👦🇯🇵🫠 and skin 👍🏽",
    "漢字かな交じり文。한국어 คำไทย",
    "<|im_start|>user\n<think>x</think>a b 日é<|im_end|>",
    "replacement � itself, \x00 zero, ﷽, 🄰🀄",
]
TEMPLATE = """{%- set ns = namespace(count=0) %}
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- for tool in tools %}
        {{- tool | tojson }}{{ "\\n" }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{% for message in messages %}
    {%- if message.role not in ['system', 'user', 'assistant'] %}
        {{- raise_exception('Unexpected role ' ~ message.role ~ '.\\nGive another') }}
    {%- endif %}
    {%- if message.content is not string %}{% continue %}{% endif %}
    {%- set ns.count = ns.count + 1 %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {% generation %}
    {{- message.content | trim }}
    {%- endgeneration %}
    {%- if message.tool_calls is defined %} {{ message.tool_calls | tojson(indent=2) }}{% endif %}
    {{- eos_token + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}
{%- endif %}
"""
MESSAGES = [
    {"role": "system", "content": " Be <brief> & 'kind' — 日本 \n"},
    {"role": "user", "content": "Hi 👋", "tool_calls": None},
    {"role": "assistant", "content": None},
    {"role": "assistant", "content": "ok", "tool_calls": [{"name": "f", "arguments": {"x": 1.5}}]},
]
TOOLS = [{"type": "function", "function": {"name": "f", "description": "<b>é</b>"}}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("checkpoint")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(TRICKY * 2, trainer)
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.add_tokens(PLAIN_ADDED)
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=64)
    tokenizer.save(str(made / "tokenizer.json"))
    eos = {"content": "<|im_end|>", "special": True, "__type": "AddedToken"}
    config = {"eos_token": eos, "bos_token": None, "chat_template": TEMPLATE}
    (made / "tokenizer_config.json").write_text(json.dumps(config))
    return made


@pytest.fixture(scope="module")
def text(folder: Path) -> Text:
    return Text(folder)


@pytest.fixture(scope="module")
def oracle(folder: Path) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"),
        eos_token="<|im_end|>",
        chat_template=TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def stream(detokenizer: Detokenizer, ids: list[int]) -> list[str]:
    return [*(detokenizer.push(i) for i in ids), detokenizer.flush()]


@functools.cache
def byte_ids(folder: Path) -> list[int]:
    """The token of each byte; ``bytes_to_unicode`` is the rule byte-level files follow."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return [tokenizer.token_to_id(bytes_to_unicode()[byte]) for byte in range(256)]


@pytest.mark.parametrize("sentence", TRICKY)
def test_encode_and_decode_equal_transformers_and_ignore_truncation_and_padding(
    text: Text, oracle: PreTrainedTokenizerFast, sentence: str
) -> None:
    ids = text.encode(sentence)
    assert len(ids) > 4
    assert ids == oracle(sentence, truncation=False, padding=False)["input_ids"]
    assert text.decode(ids, skip_special=False) == sentence
    for skip in (True, False):
        assert text.decode(ids, skip_special=skip) == oracle.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("sentence", TRICKY)
def test_streamed_text_is_the_decoded_text_and_never_shows_half_a_character(
    text: Text, sentence: str
) -> None:
    ids = text.encode(sentence)
    deltas = stream(text.detokenizer(skip_special=False), ids)
    assert "".join(deltas) == sentence
    assert sum(d.count("\ufffd") for d in deltas) == sentence.count("\ufffd")
    assert "".join(stream(text.detokenizer(), ids)) == text.decode(ids)


def test_a_character_split_over_tokens_comes_out_with_its_last_token(
    text: Text, folder: Path
) -> None:
    ids = [byte_ids(folder)[byte] for byte in "é😀".encode()]
    assert stream(text.detokenizer(), ids) == ["", "é", "", "", "", "😀", ""]


@settings(max_examples=300, deadline=None)
@given(ids=st.lists(st.integers(0, 320), max_size=24), skip=st.booleans())
def test_any_tokens_streamed_equal_the_same_tokens_decoded_at_once(
    text: Text, ids: list[int], skip: bool
) -> None:
    decoded = text.decode(ids, skip_special=skip)
    assert "".join(stream(text.detokenizer(skip_special=skip), ids)) == decoded


@settings(max_examples=300, deadline=None)
@given(data=st.binary(max_size=24))
def test_any_bytes_even_invalid_ones_stream_as_they_decode(
    text: Text, folder: Path, data: bytes
) -> None:
    ids = [byte_ids(folder)[byte] for byte in data]
    assert "".join(stream(text.detokenizer(), ids)) == text.decode(ids)


@pytest.mark.parametrize("extra", [{}, {"tools": TOOLS}, {"enable_thinking": False}])
@pytest.mark.parametrize("opened", [True, False])
def test_chat_template_equals_transformers(
    text: Text, oracle: PreTrainedTokenizerFast, extra: dict[str, object], opened: bool
) -> None:
    expected = oracle.apply_chat_template(
        MESSAGES, tokenize=False, add_generation_prompt=opened, **extra
    )
    assert "<brief> & 'kind' — 日本<|im_end|>" in expected
    assert text.apply_chat_template(MESSAGES, opened, **extra) == expected


def test_chat_template_file_wins_and_named_templates_are_found(
    folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    named = [
        {"name": n, "template": n + " {{ messages|length }}"} for n in ("default", "tool_use")
    ]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    text = Text(tmp_path)
    assert text.apply_chat_template(MESSAGES) == "default 4"
    assert text.apply_chat_template(MESSAGES, tools=TOOLS) == "tool_use 4"
    assert text.apply_chat_template(MESSAGES, template="tool_use") == "tool_use 4"
    with pytest.raises(RequestError, match=r"template 'rag' \(it has: default, tool_use"):
        text.apply_chat_template(MESSAGES, template="rag")
    (tmp_path / "chat_template.jinja").write_text("file")
    assert Text(tmp_path).apply_chat_template(MESSAGES) == "file"


@pytest.mark.parametrize(
    ("messages", "line"),
    [
        ([{"role": "tool", "content": ""}], "Unexpected role tool. Give another"),
        ([{"role": "user", "content": object()}], "object"),
        (["hello"], "a chat message is 'hello'"),
    ],
)
def test_refused_messages_are_one_line_request_errors(
    text: Text, messages: list[dict[str, object]], line: str
) -> None:
    with pytest.raises(RequestError, match=line) as caught:
        text.apply_chat_template(messages)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "source", ["{{ messages.__class__.__mro__ }}", "{{ messages.append(1) }}", "{{ 1 / 0 }}"]
)
def test_a_template_cannot_reach_python_nor_change_messages(
    folder: Path, tmp_path: Path, source: str
) -> None:
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    (tmp_path / "chat_template.jinja").write_text(source)
    with pytest.raises(RequestError, match="the chat template failed"):
        Text(tmp_path).apply_chat_template(MESSAGES)


@pytest.mark.parametrize(
    ("name", "content", "line"),
    [
        ("tokenizer.json", None, "tokenizer.json is missing; copy it"),
        ("tokenizer.json", b"{", "tokenizer.json is not a tokenizer"),
        ("tokenizer.json", b"word", "is not a byte-level BPE"),
        ("tokenizer_config.json", b"{", "tokenizer_config.json is not JSON"),
        ("tokenizer_config.json", b"[]", "tokenizer_config.json is not a JSON object"),
        ("tokenizer_config.json", b'{"chat_template": [1]}', "neither a text nor a list"),
        ("chat_template.jinja", b"\xff", "chat_template.jinja is not UTF-8"),
        ("chat_template.jinja", b"{% if %}", "chat_template.jinja: the chat template is broken"),
    ],
)
def test_missing_and_broken_files_are_named_in_one_line(
    folder: Path, tmp_path: Path, name: str, content: bytes | None, line: str
) -> None:
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    if content == b"word":
        content = Tokenizer(models.WordLevel({"a": 0}, "a")).to_str().encode()
    (tmp_path / name).unlink(missing_ok=True)
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(PackageError, match=line) as caught:
        Text(tmp_path).apply_chat_template(MESSAGES)
    assert "\n" not in str(caught.value)


def test_a_directory_without_a_template_says_so(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    with pytest.raises(RequestError, match=r"template 'default' \(it has: none"):
        Text(tmp_path).apply_chat_template(MESSAGES)


@pytest.mark.parametrize("missing", ["tokenizers", "jinja2"])
def test_a_missing_library_names_the_extra(
    folder: Path, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(MissingExtraError, match=rf"{missing}.*pip install 'qwen-mtp\[text\]'"):
        Text(folder).apply_chat_template(MESSAGES)


def test_prompts_and_ids_that_are_none_are_refused(text: Text) -> None:
    for prompt in (3, "\ud800"):
        with pytest.raises(RequestError, match="not a valid text"):
            text.encode(prompt)  # type: ignore[arg-type]
    for ids in ([-1], ["a"]):
        with pytest.raises(RequestError, match="token ids must be integers"):
            text.decode(ids)  # type: ignore[arg-type]
    assert text.decode([10**6]) == "".join(stream(text.detokenizer(), [10**6])) == ""
