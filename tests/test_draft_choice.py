"""Which tokens drafts are taken from, what is refused, and where it shows."""

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from qwen_mtp.config import ModelConfig
from qwen_mtp.draft_vocabulary import DEFAULT_ROWS, WHOLE_UP_TO, choose_draft_ids
from qwen_mtp.errors import CheckpointError, PackageError
from qwen_mtp.graphs.manifest import MANIFEST
from qwen_mtp.graphs.spec import AscendChoice
from qwen_mtp.pipeline import export_package
from qwen_mtp.runtime.package import Package
from tests.air_packages import SOC
from tests.checkpoints import write_json
from tests.commands import checkpoint, qwen_mtp, qwen_mtp_export, refused, rejected, with_value
from tests.packages import TRAINED, random_checkpoint, random_part, two_layers

CONFIG = ModelConfig.from_checkpoint(TRAINED)
V = CONFIG.vocab_size
SPECIAL = range(2034, 2048)  # the added tokens of the bundled tokenizer, eos among them
TEXT = "def def def def = = = import\n\n\nimport\n<|im_end|>" * 3


def chosen(rows: int | Path | None, text: Path | None = None, **sizes: Any) -> tuple[int, ...]:
    return choose_draft_ids(TRAINED, replace(CONFIG, **sizes), rows, text)


def test_a_number_takes_the_lowest_ids_and_all_special_ones() -> None:
    assert chosen(100) == (*range(100 - len(SPECIAL)), *SPECIAL)
    assert chosen(len(SPECIAL) + 1) == (0, *SPECIAL)
    assert chosen(V - 1) == (*range(V - 1 - len(SPECIAL)), *SPECIAL)


def test_the_ends_of_a_text_are_kept_without_a_tokenizer() -> None:
    model = random_checkpoint()
    config = replace(ModelConfig.from_checkpoint(model), eos_token_ids=(200, 70))
    assert choose_draft_ids(model, config, 10, None) == (*range(8), 70, 200)


def test_large_vocabularies_are_cut_and_small_ones_are_not_unless_told() -> None:
    assert chosen(None) == chosen(0) == chosen(V) == ()
    assert chosen(None, vocab_size=WHOLE_UP_TO) == ()
    large = chosen(None, vocab_size=WHOLE_UP_TO + 1)
    assert large == (*range(DEFAULT_ROWS),)
    assert chosen(0, vocab_size=WHOLE_UP_TO + 1) == ()


def test_a_text_is_counted_and_the_lowest_ids_fill_up(tmp_path: Path) -> None:
    (tmp_path / "text").write_text(TEXT)
    counts = Counter(Tokenizer.from_file(str(TRAINED / "tokenizer.json")).encode(TEXT).ids)
    ranked = sorted(counts.items() - {(2036, counts[2036])}, key=lambda item: (-item[1], item[0]))
    assert 4 < len(ranked) < 20
    assert len({count for _, count in ranked}) > 1, "all are as frequent"
    best = [token for token, _ in ranked[:3]]
    assert chosen(len(SPECIAL) + 3, tmp_path / "text") == (*sorted(best), *SPECIAL)
    every = {token for token, _ in ranked}
    lowest = [token for token in range(V) if token not in every][: 40 - len(every)]
    found = chosen(len(SPECIAL) + 40, tmp_path / "text")
    assert found == (*sorted({*every, *lowest}), *SPECIAL)


@pytest.mark.parametrize("name", ["ids", "ids.json"])
def test_a_file_of_ids_is_taken_as_it_is_and_special_ones_are_added(
    tmp_path: Path, name: str
) -> None:
    path = tmp_path / name
    path.write_text("[7, 3,\n2000]" if name.endswith("json") else "7 3\n\n2000\n")
    assert chosen(path) == (3, 7, 2000, *SPECIAL)
    path.write_text(
        json.dumps([*range(V)]) if name.endswith("json") else " ".join(map(str, range(V)))
    )
    assert chosen(path) == ()


FILES = {
    "": "holds no token ids",
    "1 two": "'two' is not a token id",
    "1 2.5": "'2.5' is not a token id",
    "5 6 5": "token id 5 is listed 2 times",
    "5 2048": "token id 2048 lies outside of 0..2047",
    "-1": "token id -1 lies outside of 0..2047",
    "\x80": "holds no token ids",
}


@pytest.mark.parametrize("content", FILES)
def test_an_odd_file_of_ids_is_one_line(tmp_path: Path, content: str) -> None:
    path = tmp_path / "ids.txt"
    path.write_bytes(content.encode("latin-1"))
    refused(
        rejected(checkpoint(), tmp_path, "--draft-vocab", str(path)), 1, str(path), FILES[content]
    )


JSON = {"{": "holds no token ids", "{}": "holds no token ids", "[true]": "True is not a token id"}


@pytest.mark.parametrize("content", JSON)
def test_an_odd_list_of_ids_is_one_line(tmp_path: Path, content: str) -> None:
    path = tmp_path / "ids.json"
    path.write_text(content)
    refused(rejected(checkpoint(), tmp_path, "--draft-vocab", str(path)), 1, JSON[content])


OPTIONS: dict[tuple[str, ...], tuple[int, str]] = {
    ("--draft-vocab", "14"): (1, "draft_vocab is 14: give a number from 15"),
    ("--draft-vocab", "2049"): (1, "to 2048, or 0"),
    ("--draft-vocab", "-1"): (1, "draft_vocab is -1"),
    ("--draft-vocab", "absent"): (1, "absent: No such file"),
    ("--draft-vocab", "."): (1, ".: Is a directory"),
    ("--draft-vocab", "99", "--draft-vocab-text", "absent"): (1, "absent: No such file"),
    ("--draft-vocab-text", "absent"): (1, "draft_vocab_text needs a number"),
    ("--draft-vocab", "ids", "--draft-vocab-text", "text"): (1, "leave out draft_vocab_text"),
    ("--draft-vocab", "99", "--no-mtp"): (2, "--draft-vocab and --no-mtp exclude"),
    ("--draft-vocab-text", "text", "--no-mtp"): (2, "--draft-vocab and --no-mtp exclude"),
}


@pytest.mark.parametrize("options", OPTIONS)
def test_an_odd_choice_is_one_line(tmp_path: Path, options: tuple[str, ...]) -> None:
    code, fragment = OPTIONS[options]
    refused(rejected(checkpoint(), tmp_path, *options), code, fragment)


@pytest.mark.parametrize("content", [b"", b"\xff\xfe"])
def test_an_odd_text_is_one_line(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "text").write_bytes(content)
    options = ("--draft-vocab", "99", "--draft-vocab-text", str(tmp_path / "text"))
    refused(rejected(checkpoint(), tmp_path, *options), 1, "text: ", "UTF-8")


def test_a_text_needs_the_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("a")
    options = ("--draft-vocab", "99", "--draft-vocab-text", str(tmp_path / "text"))
    result = qwen_mtp_export(random_checkpoint(), tmp_path / "package", *options)
    refused(result, 1, "tokenizer.json: no such file", "--draft-vocab")


def test_a_text_needs_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "tokenizers", None)
    (tmp_path / "text").write_text("a")
    options = ("--draft-vocab", "99", "--draft-vocab-text", str(tmp_path / "text"))
    refused(rejected(checkpoint(), tmp_path, *options), 1, "pip install 'qwen-mtp[text]'")


def test_odd_added_tokens_are_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text('{"added_tokens": [{"name": 1}]}')
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: added tokens have odd ids"):
        choose_draft_ids(tmp_path, CONFIG, 99, None)


def test_plans_and_packages_say_how_many() -> None:
    planned = qwen_mtp("export", checkpoint(), "nowhere", "--dry-run", "--draft-vocab", "300")
    assert "drafts    of 300 of 2048 tokens" in planned.output
    assert "mtp_draft_k3" in planned.output
    assert "out draft_logits.2       float32  1x300" in planned.output
    whole = qwen_mtp("export", checkpoint(), "nowhere", "--dry-run")
    assert "drafts    of" not in whole.output
    assert "float32  1x2048" in whole.output


CHANGES: dict[str, tuple[tuple[Any, ...], Any, str]] = {
    "no number": (("geometry", "draft_vocab"), 0, "mtp.draft.ids"),
    "negative": (("geometry", "draft_vocab"), -1, "geometry.draft_vocab is -1"),
    "too many": (("geometry", "draft_vocab"), 257, "geometry.draft_vocab is 257, must be 0..256"),
    "another": (("geometry", "draft_vocab"), 9, "but geometry.draft_vocab is 9"),
    "no drafts": (("geometry", "lookaheads"), [], "geometry.draft_vocab is 3, must be 0..0"),
}


@pytest.mark.parametrize("case", CHANGES)
def test_a_manifest_that_contradicts_its_draft_vocabulary_is_refused(
    tmp_path: Path, case: str
) -> None:
    damaged(tmp_path, lambda text: with_value(text, *CHANGES[case][:2]), CHANGES[case][2])


def test_a_package_without_the_ids_is_refused(tmp_path: Path) -> None:
    def renamed(text: str) -> Any:
        return json.loads(text.replace("mtp.draft.ids", "mtp.draft.other"))

    damaged(tmp_path, renamed, "weights: mtp.draft.ids is []")


def damaged(tmp_path: Path, change: Callable[[str], Any], message: str) -> None:
    whole = random_part("fp32", 3)[1].directory
    for path in whole.iterdir():
        (tmp_path / path.name).symlink_to(path)
    text = (tmp_path / MANIFEST).read_text()
    (tmp_path / MANIFEST).unlink()
    write_json(tmp_path / MANIFEST, change(text))
    with pytest.raises(PackageError, match=r"manifest\.json: ") as caught:
        Package.open(tmp_path)
    assert message in str(caught.value)


TARGETS: dict[str, dict[str, Any]] = {
    "standard": {"opset_domain": "standard"},
    "portable": {"ascend": AscendChoice(lowering="portable", soc_version=SOC)},
    "fused": {"ascend": AscendChoice(lowering="fused", soc_version=SOC)},
}


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_other_targets_pass_their_check_with_a_draft_vocabulary(
    tmp_path: Path, target: str
) -> None:
    found = export_package(
        two_layers(), tmp_path / "package", max_model_len=64, prefill_chunk=8, draft_vocab=99,
        threads=1, **TARGETS[target],
    )  # fmt: skip
    assert found.manifest.verification is not None
    assert found.draft_ids().tolist() == [*range(97), 250, 252]
