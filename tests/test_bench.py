"""``qwen-mtp bench``: what its numbers must add up to, and what it refuses."""

import json
import os
import re
from dataclasses import replace
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qwen_mtp.bench.costs import Decoding, Samples
from qwen_mtp.bench.decoding import ForcedCourse, TextCourse, greedy, open_llm
from qwen_mtp.bench.measure import run_bench
from qwen_mtp.bench.page import as_html
from qwen_mtp.bench.passes import PassTimer
from qwen_mtp.bench.plan import BenchOptions
from qwen_mtp.bench.plots import nice_ticks
from qwen_mtp.bench.report import BenchReport, document
from qwen_mtp.bench.text import as_text, verdict
from qwen_mtp.bench.traffic import mtp_share, plain_traffic
from qwen_mtp.runtime.engine import Engine
from qwen_mtp.runtime.package import Package
from tests.commands import exported, qwen_mtp, refused, two_slots

TOKENS, CONTEXT = 12, 16


@pytest.fixture(autouse=True)
def _less_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading 64 MiB is enough where no speed is looked at."""
    monkeypatch.setattr("qwen_mtp.bench.machine.LARGEST", 1 << 26)


@cache
def report() -> BenchReport:
    """Two slots, K = 1 and 3; one run of each kind."""
    options = BenchOptions(
        acceptances=(0.0, 0.5, 1.0), contexts=(CONTEXT, 40), threads=1, tokens=TOKENS, repeat=1
    )
    return run_bench(two_slots(), options)


def runs() -> tuple[Decoding, ...]:
    return (*report().text, *report().forced, *report().slots)


def test_tokens_are_passes_times_tokens_a_pass_and_no_run_lacks_one() -> None:
    assert len(runs()) == (3 + 1) + (1 + 3 * 3) + 2 * 2
    for run in runs():
        assert run.tokens == (TOKENS - 1) * run.slots
        assert run.tokens == pytest.approx(run.passes * run.slots * run.tokens_per_pass)
        assert run.tokens == run.passes * run.slots + sum(run.accepted)
        spent = run.draft_ms + run.verify_ms + run.host_ms
        assert run.speed.median == pytest.approx(1e3 * run.tokens / spent)
        assert run.round_ms * run.passes == pytest.approx(spent)
    assert report().equal
    assert report().tokens_compared == sum(run.tokens for run in runs())


def test_scripted_drafts_are_accepted_as_often_as_the_script_says() -> None:
    plain, *forced = report().forced
    assert (plain.lookahead, plain.passes, plain.draft_ms) == (0, TOKENS - 1, 0.0)
    by_kind = {(run.lookahead, run.forced): run for run in forced if not run.adaptive}
    for k in (1, 3):
        never, always = by_kind[k, 0.0], by_kind[k, 1.0]
        assert not any(never.accepted)
        assert never.passes == plain.passes
        assert always.accepted == always.drafted
        assert always.passes == -(-(TOKENS - 1) // (k + 1))
        half = sum(by_kind[k, 0.5].accepted)
        assert 0 < half < sum(always.accepted)
        assert all(run.draft_ms > 0 for run in (never, always))  # the head ran all the same
        assert never.expected == 1
        assert always.expected == k + 1
        assert by_kind[k, 0.5].expected == 2 - 0.5**k
        lasting = report().expected_speedup(always)
        assert lasting == pytest.approx((k + 1) * plain.round_ms / always.round_ms)


def test_a_corrupted_reference_fails_the_comparison_at_its_place(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    engine = Engine(Package.open(two_slots()), threads=1)
    prompt = list(range(5, 21))
    with open_llm(engine, 0) as llm:
        true = llm.generate(prompt, greedy(TOKENS))[0].outputs[0].token_ids
    wrong = (*true[:7], (true[7] + 1) % 2048, *true[8:])
    courses = [
        TextCourse(engine, 3, prompt, wrong),
        ForcedCourse(engine, 3, 1.0, prompt, wrong, 2),
    ]
    for course in courses:
        course.run()
        assert course.result().difference == 7
    broken = replace(report(), text=(report().text[0], courses[0].result()))
    assert not broken.equal
    assert "FAIL: K=3 differs from plain decoding at token 7" in verdict(broken)
    monkeypatch.setattr("qwen_mtp.bench.measure.run_bench", lambda *_: broken)
    result = qwen_mtp("bench", two_slots(), "--html", tmp_path / "page.html")
    refused(result, 3, "K=3 differs from plain decoding at token 7", "qwen-mtp verify")
    assert ">FAIL<" in (tmp_path / "page.html").read_text(encoding="utf-8")


def test_the_limit_is_bytes_over_bandwidth() -> None:
    found, manifest = report(), Package.open(two_slots()).manifest
    traffic = plain_traffic(manifest, CONTEXT)
    assert found.traffic == traffic
    names = {t.offset: t for t in manifest.weights if t.name.startswith("target.")}
    table = [t for t in names.values() if t.name.startswith("target.vocabulary.table.")]
    assert traffic.weights == sum(t.nbytes for t in names.values()) - sum(t.nbytes for t in table)
    assert traffic.weights < found.model.weight_bytes
    config = manifest.config
    row = 2 * config.num_kv_heads * config.head_dim * 4
    assert traffic.kv == CONTEXT * row * config.num_full_layers
    assert found.limit_ms == pytest.approx(traffic.total / found.bandwidth.speed.median / 1e6)
    share = found.limit_ms / found.passes.plain.median
    assert found.share_of_limit == pytest.approx(share)
    assert 0 < mtp_share(manifest) < 1


def test_every_bucket_context_and_slot_is_measured() -> None:
    found = report()
    assert [cost.rows for cost in found.passes.verify] == [2, 4]
    assert [cost.lookahead for cost in found.passes.drafts] == [1, 3]
    assert [cost.context for cost in found.contexts] == [CONTEXT, 40]
    assert [(run.slots, run.lookahead) for run in found.slots] == [(1, 0), (1, 3), (2, 0), (2, 3)]
    for prompt in found.prefill.costs:
        rows = prompt.passes * found.model.prefill_chunk
        assert prompt.tokens + prompt.padding == rows
    memory = found.memory
    assert memory.resident == memory.file_backed + memory.anonymous <= memory.peak
    assert min(memory.first_load_s, memory.warm_load_s) > 0


def test_a_pass_is_timed_after_the_context_it_is_said_to_be() -> None:
    engine = Engine(Package.open(two_slots()), threads=1)
    timer = PassTimer(engine)
    timer.fill(40)
    size = engine.package.manifest.geometry.block_size
    for state in engine.package.manifest.states:
        if state.kind in ("kv", "mtp_kv"):
            pool = engine.state(state.name)
            assert np.all(pool[:, size : 4 * size] != 0)  # blocks 1, 2, 3 hold positions 0..47
            assert not np.any(pool[:, 4 * size :])
    timer.verify(4, 4, 40)
    assert engine.buffer("target_verify_r4", "context_len").tolist() == [40, 0]
    assert engine.buffer("target_verify_r4", "num_valid").tolist() == [4, 0]
    timer.plain(40)
    assert engine.buffer("target_verify_r2", "num_valid").tolist() == [1, 0]
    assert engine.buffer("target_verify_r2", "num_accepted").tolist() == [4, 0]
    timer.draft(3, 40)
    assert engine.buffer("mtp_draft_k3", "context_len").tolist() == [39, 0]


def test_samples_are_order_statistics() -> None:
    assert Samples.of([5.0]) == Samples(1, 5.0, 5.0, 5.0)
    assert Samples.of(list(map(float, range(10, 0, -1)))) == Samples(10, 1.0, 5.5, 9.0)
    assert nice_ticks(0.93) == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1.0])
    assert nice_ticks(2100.0)[-1] >= 2100


class Page(HTMLParser):
    """Checks that tags close, and gathers what a browser would fetch."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.fetched: list[str] = []
        self.tags: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.fetched += [name for name, _ in attrs if name in ("src", "href", "xlink:href")]
        if tag not in ("meta",):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_is_whole_and_needs_nothing_else() -> None:
    found = report()
    name = '<b>&"x'
    text = as_html(replace(found, model=replace(found.model, package=name)))
    page = Page(text)
    assert page.open == []
    assert page.fetched == []
    assert not {"script", "link", "img", "iframe"} & set(page.tags)
    assert not re.findall(r"https?:|@import|url\(", text)
    assert name not in text
    assert page.tags.count("figure") == 8
    assert text.count("<desc>") == page.tags.count("svg") == 8
    assert "nan" not in text
    assert all(f"{run.speed.median:.1f}" in text for run in runs())


def test_the_command_writes_json_and_a_page(tmp_path: Path) -> None:
    out, prompt = tmp_path / "page.html", tmp_path / "prompt.txt"
    prompt.write_text("def read(self):\n", encoding="utf-8")
    package, _ = exported("-k", "1")
    options = ("--tokens", 4, "--repeat", 1, "--forced-acceptance", 1, "--context", 8)
    result = qwen_mtp(
        "bench",
        package,
        *options,
        "--prompt-file",
        prompt,
        "--json",
        "--html",
        out,
        "--threads",
        1,
    )
    assert result.exit_code == 0, result.stderr
    found: dict[str, Any] = json.loads(result.stdout)
    assert found["settings"]["prompt"] == str(prompt)
    assert found["equal"] is True
    assert found["share_of_limit"] > 0
    assert found["forced"][1]["speedup"] > 0
    assert found["slots"] == []
    titles = [line.split("  ")[0] for line in result.stderr.splitlines()]
    assert titles[0] == "bench load"
    assert "bench text" in titles
    Page(out.read_text(encoding="utf-8"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["page.html", "prompt.txt"]


def test_the_text_says_what_was_found() -> None:
    text = as_text(report())
    for word in ("plain", "limit", "verify", "draft", "prefill", "context", "resident", "peak"):
        assert re.search(rf"^{word} ", text, re.MULTILINE), word
    assert "equal      PASS" in text
    assert set(document(report())) >= {"limit_ms", "share_of_limit", "text", "forced", "slots"}


@pytest.mark.parametrize(
    ("options", "fragments"),
    [
        (("--prompt-file", "{dir}/none.txt"), ("none.txt: No such file",)),
        (("--prompt-file", "{dir}/empty.txt"), ("empty.txt is empty", "give a file")),
        (("--prompt-file", "{dir}/latin.txt"), ("latin.txt", "UTF-8")),
        (("--prompt-file", "{dir}/long.txt"), ("long.txt", "max_model_len 64", "shorten it")),
        (("--prompt-ids", "5000"), ("prompt token 0 is 5000",)),
        (("-k", "3"), ("num_speculative_tokens holds 3, the package allows 0..1",)),
        (("--context", "16,63"), ("context holds 63", "1..62")),
        (("--tokens", "64"), ("--tokens",)),
        (("--html", "{dir}"), ("is a directory",)),
        (("--html", "{dir}/pipe"), ("is no regular file",)),
        (("--html", "{package}/page.html"), ("page.html lies in the package", "beside")),
        (("--html", "{dir}/none/page.html"), ("none/page.html: No such file",)),
        (("--html", "{dir}/page.html", "--tokens", "64"), ("--tokens",)),
    ],
)
def test_what_cannot_be_measured_is_one_line_and_leaves_nothing(
    options: tuple[str, ...], fragments: tuple[str, ...], tmp_path: Path
) -> None:
    (tmp_path / "empty.txt").write_bytes(b"")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    (tmp_path / "long.txt").write_text("word " * 100, encoding="utf-8")
    os.mkfifo(tmp_path / "pipe")
    before = sorted(tmp_path.iterdir())
    package, _ = exported("-k", "1")
    given = [option.format(dir=tmp_path, package=package) for option in options]
    refused(qwen_mtp("bench", package, *given), 1, *fragments)
    assert sorted(tmp_path.iterdir()) == before


def test_a_package_without_its_head_is_measured_plainly_and_has_no_drafts() -> None:
    package, _ = exported("--no-mtp", "--no-verify", "-q")
    refused(qwen_mtp("bench", package, "-k", "1"), 1, "has no MTP head", "--no-mtp")
    options = BenchOptions(tokens=4, repeat=1, threads=1, contexts=(8,))
    found = run_bench(package, options)
    assert [run.lookahead for run in (*found.text, *found.forced)] == [0, 0]
    assert found.passes.drafts == ()
    assert found.prefill.mtp_share == 0
    Page(as_html(found))
    assert "equal      PASS" in as_text(found)
