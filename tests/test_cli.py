"""The commands as a user meets them: results, progress, JSON, exit codes, interruption."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import click
import pytest

from qwen_mtp.cli import counts_line, export_command, main
from qwen_mtp.runtime.llm import LLM
from qwen_mtp.runtime.package import Package
from qwen_mtp.runtime.sampling import SamplingParams
from tests.commands import (
    GEOMETRY,
    call,
    checkpoint,
    contents,
    exported,
    flip,
    package_copy,
    qwen_mtp,
    qwen_mtp_export,
    refused,
    two_slots,
    untouched,
    verified_package,
)

GRAPHS = ("prefill", "target_verify_r2", "mtp_draft_k1")


def spawn(code: str, *arguments: object, **options: Any) -> subprocess.Popen[str]:
    """A command in a process of its own: ``code`` imports and calls it."""
    # A parent in the background hands on that SIGINT is ignored; a terminal does not.
    heard = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    command = [sys.executable, "-c", f"{heard}; from qwen_mtp.cli import *; {code}"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([*command, *map(str, arguments)], text=True, **(pipes | options))


def parsed(text: str) -> Any:
    return json.loads(text)


# --- export ---------------------------------------------------------------------------------


def test_an_export_ends_verified_with_progress_on_stderr_and_the_result_on_stdout() -> None:
    path, result = exported("-k", "1")
    titles = [line.split("  ")[0] for line in result.stderr.splitlines()]
    for graph in GRAPHS:
        assert f"graph {graph}" in titles
        assert graph in result.stdout
    assert {"model.onnx", "weights", "checksums", "golden values", "verify decoding"} < {*titles}
    assert result.stdout.startswith(f"package  {path}\n")
    assert "verified  speculation on and off equal over" in result.stdout
    record = Package.open(path).manifest.verification
    assert record is not None
    assert record.greedy_equal
    assert record.patterns > 0
    assert (path.stat().st_mode & 0o777) == 0o755


def test_a_quiet_export_says_nothing_on_stderr_and_keeps_several_buckets() -> None:
    path = two_slots()
    _, result = exported("-k", "3,1", "--max-num-seqs", "2", "--no-verify", "-q")
    assert result.stderr == ""
    manifest = Package.open(path).manifest
    assert manifest.geometry.lookaheads == (1, 3)
    assert manifest.geometry.max_num_seqs == 2
    assert [graph.name for graph in manifest.graphs if graph.kind == "mtp_draft"] == [
        "mtp_draft_k1",
        "mtp_draft_k3",
    ]
    assert manifest.verification is None
    assert "verified  no; run qwen-mtp verify" in result.stdout


def test_without_mtp_the_target_alone_is_exported_and_runs() -> None:
    path, result = exported("--no-mtp", "--no-verify", "-q", "--format", "fp32", "--json")
    shown = parsed(result.stdout)
    assert shown["what"] == "package"
    assert [graph["kind"] for graph in shown["graphs"]] == ["prefill", "target_verify"]
    assert "mtp.fc.weight" in shown["tensors_unused"]
    assert "mtp_kv" not in shown["state_bytes"]
    done = qwen_mtp("run", path, "--prompt-ids", "5,6,7", "--max-tokens", "5", "--json")
    assert parsed(done.stdout)["stats"]["drafted"] == []
    drafts = qwen_mtp("run", path, "--prompt-ids", "5,6,7", "-k", "3")
    refused(drafts, 1, "the package has no MTP head; export it without --no-mtp")


def test_a_dry_run_lists_everything_and_writes_nothing(tmp_path: Path) -> None:
    with untouched(tmp_path):
        text = qwen_mtp_export(checkpoint(), tmp_path / "package", "--dry-run", "-k", "3")
        found = qwen_mtp_export(
            checkpoint(), tmp_path / "package", "--dry-run", "--json", "--no-mtp"
        )
    for fragment in (
        "plan  ", f"target    {tmp_path}/package\n", "1 slot x 64",
        "target_verify_r2", "target_verify_r4", "mtp_draft_k3", "token_ids", "1x4x32",
        "block_table", "1x5", " kB in int8 on disk", "of memory at the peak", "ssm ", "mtp_kv ",
        "used, 0 unused",
    ):  # fmt: skip
        assert fragment in text.stdout, fragment
    assert text.stderr == found.stderr == ""
    plan = parsed(found.stdout)
    assert [graph["name"] for graph in plan["graphs"]] == ["prefill", "target_verify_r2"]
    assert all(name.startswith("mtp.") for name in plan["tensors_unused"])
    assert plan["tensors_used"] + len(plan["tensors_unused"]) == 43
    assert min(plan["weight_bytes"], plan["peak_bytes"], *plan["state_bytes"].values()) > 0
    assert plan["geometry"]["lookaheads"] == []


def test_a_plan_promises_the_bytes_that_the_package_holds() -> None:
    planned = qwen_mtp_export(checkpoint(), "unused", "--dry-run", "--json", "-k", "1")
    plan, package = parsed(planned.stdout), Package.open(verified_package())
    assert plan["weight_bytes"] == sum(t.nbytes for t in package.manifest.weights)
    assert len(plan["graphs"]) == len(package.manifest.graphs)
    assert plan["state_bytes"]["ssm"] == sum(
        state.nbytes for state in package.manifest.states if state.kind == "ssm"
    )


@pytest.mark.parametrize("options", [["-k", "3", "-k", "1"], ["-k", "3,1"], ["-k", "1,3,1"]])
def test_a_repeated_k_adds_a_bucket(options: list[str]) -> None:
    planned = qwen_mtp_export(checkpoint(), "unused", "--dry-run", "--json", *options)
    assert parsed(planned.stdout)["geometry"]["lookaheads"] == [1, 3]


def test_a_dry_run_refuses_what_the_export_would_refuse(tmp_path: Path) -> None:
    path = package_copy(tmp_path)
    with untouched(tmp_path):
        refused(qwen_mtp_export(checkpoint(), path, "--dry-run"), 1, "is not empty", "--overwrite")
        below = path / "model.onnx" / "package"
        refused(qwen_mtp_export(checkpoint(), below, "--dry-run"), 1, "model.onnx: is a file")
        assert qwen_mtp_export(checkpoint(), path, "--dry-run", "--overwrite").exit_code == 0


def test_the_other_command_exports_too(tmp_path: Path) -> None:
    result = qwen_mtp("export", checkpoint(), tmp_path / "x", "--dry-run", "-k", "1", *GEOMETRY)
    assert result.exit_code == 0
    assert (
        result.stdout
        == qwen_mtp_export(checkpoint(), tmp_path / "x", "--dry-run", "-k", "1").stdout
    )


def test_overwriting_replaces_a_package_also_behind_a_link(tmp_path: Path) -> None:
    path, link = package_copy(tmp_path), tmp_path / "link"
    link.symlink_to(path.name)
    (path / "stray").touch()
    choices = ("--no-mtp", "--no-verify", "--format", "fp32", "--overwrite")
    result = qwen_mtp_export(checkpoint(), link, *choices)
    assert result.exit_code == 0, result.stderr
    assert sorted(tmp_path.iterdir()) == [link, path]
    assert link.is_symlink()
    assert not (path / "stray").exists()
    assert Package.open(path).manifest.geometry.format == "fp32"


def test_help_names_every_option_of_every_command() -> None:
    commands = {(): main, **{(name,): one for name, one in main.commands.items()}}
    names = {name for path in commands for name in path}
    assert names == {"export", "inspect", "verify", "run", "bench", "compile", "doctor"}
    everything = [export_command, *main.commands.values()]
    options = [o for one in everything for o in one.params if isinstance(o, click.Option)]
    assert [option.name for option in options if not option.help] == []
    for path, command in commands.items():
        result = qwen_mtp(*path, "--help")
        assert (result.exit_code, result.stderr) == (0, "")
        assert command.help is not None
        for parameter in command.params:
            for option in parameter.opts if isinstance(parameter, click.Option) else ():
                assert option in result.stdout
    assert qwen_mtp("--version").stdout == call(export_command, "--version").stdout.replace(
        "export", "main"
    )


@pytest.mark.parametrize(
    ("arguments", "fragments"),
    [
        (["export", "c", "p", "-k", "0"], ["-k", "0 is not in the range 1<=x<=15"]),
        (["export", "c", "p", "-k", "16"], ["-k", "16 is not in the range"]),
        (["export", "c", "p", "-k", "3,x"], ["-k", "'x' is not a valid integer"]),
        (["export", "c", "p", "-k", ""], ["-k", "'' is not a valid integer"]),
        (["export", "c", "p", "-k", "1", "--no-mtp"], ["-k and --no-mtp exclude each other"]),
        (["export", "c", "p", "--format", "int2"], ["--format", "'int2'", "'int8'"]),
        (["export", "c", "p", "--block-size", "24"], ["--block-size", "'24'"]),
        (["export", "c", "p", "--max-num-seqs", "0"], ["--max-num-seqs"]),
        (["export", "c", "p", "--prefill-chunk", "0"], ["--prefill-chunk"]),
        (["export", "c", "p", "--max-model-len", "1"], ["--max-model-len"]),
        (["export", "c", "p", "--target", "npu"], ["--target", "'npu'", "onnx"]),
        (["export", "c", "p", "--max-model-length", "9"], ["No such option", "--max-model-len"]),
        (["export", "c"], ["Missing argument", "PACKAGE"]),
        (["run", "p"], ["--prompt", "--prompt-ids", "one of the two"]),
        (["run", "p", "--prompt", "a", "--prompt-ids", "1"], ["one of the two"]),
        (["run", "p", "--prompt-ids", "1,b"], ["--prompt-ids", "'b' is not a valid integer"]),
        (["run", "p", "--prompt-ids", "1", "-k", "16"], ["-k", "16 is not in the range"]),
        (["run", "p", "--prompt-ids", "1", "--threads", "0"], ["--threads"]),
        (["run", "p", "--prompt-ids", "1", "--threads", "100000"], ["--threads"]),
        (["run", "p", "--prompt-ids", "1", "--temperature", "warm"], ["--temperature"]),
        (["run", "p", "--prompt-ids", "1", "--beam", "4"], ["No such option", "--beam"]),
        (["inspect"], ["Missing argument", "PATH"]),
        (["verify", "p", "q"], ["unexpected extra argument"]),
        (["serve"], ["No such command", "'serve'"]),
    ],
)
def test_wrong_usage_exits_with_2_and_names_the_option(
    arguments: list[str], fragments: list[str]
) -> None:
    refused(qwen_mtp(*arguments), 2, *fragments)


# --- inspect and verify ---------------------------------------------------------------------


def test_inspect_shows_a_package_and_a_checkpoint_as_text_and_as_json() -> None:
    path = verified_package()
    text = qwen_mtp("inspect", path)
    assert text.stdout == exported("-k", "1")[1].stdout
    shown = parsed(qwen_mtp("inspect", path, "--json").stdout)
    assert [graph["name"] for graph in shown["graphs"]] == list(GRAPHS)
    assert shown["verification"]["greedy_equal"] is True
    tables = qwen_mtp("inspect", path, "--graphs").stdout
    assert "block_table" in tables
    assert "block_table" not in text.stdout
    assert "in the stash" in next(line for line in text.stdout.splitlines() if "verify_r" in line)
    assert [line for line in tables.splitlines() if line in text.stdout.splitlines()] == (
        text.stdout.splitlines()
    )
    refused(qwen_mtp("inspect", checkpoint(), "--graphs"), 2, "--graphs is for packages")
    refused(qwen_mtp("inspect", checkpoint().parent), 1, "neither a package", "nor a checkpoint")
    source = qwen_mtp("inspect", checkpoint())
    assert "tensors   43 (41 BF16, 2 F32), 15 MTP tensors" in source.stdout
    raw = parsed(qwen_mtp("inspect", checkpoint(), "--json").stdout)
    assert (raw["tensors"], raw["mtp_tensors"]) == (43, 15)
    assert sum(raw["dtypes"].values()) == 43
    assert text.stderr == source.stderr == ""


def test_a_name_that_is_no_text_can_be_inspected(tmp_path: Path) -> None:
    path = tmp_path / os.fsdecode(b"odd\xff")
    shutil.copytree(verified_package(), path)
    shown = parsed(qwen_mtp("inspect", path, "--json").stdout)
    assert shown["path"] == f"{tmp_path}/odd\ufffd"
    refused(qwen_mtp("inspect", path / "nothing"), 1, "no such directory")


def test_verify_passes_a_whole_package_and_fails_a_damaged_one(tmp_path: Path) -> None:
    whole = qwen_mtp("verify", verified_package(), "-q", "--threads", "1")
    assert whole.exit_code == 0
    assert [line[:4] for line in whole.stdout.splitlines()] == ["ok  "] * 6
    assert whole.stderr == ""
    path = package_copy(tmp_path)
    flip(path / "weights.bin", 5000)
    before = contents(path)
    damaged = qwen_mtp("verify", path, "-q")
    refused(damaged, 3, "weights.bin", "sha256 differs from the manifest", "export the checkpoint")
    assert damaged.stdout.startswith("FAIL files")
    as_json = qwen_mtp("verify", path, "-q", "--json")
    report = parsed(as_json.stdout)
    assert as_json.exit_code == 3
    assert report["passed"] is False
    assert [check["passed"] for check in report["checks"]] == [False]
    assert contents(path) == before


# --- run ------------------------------------------------------------------------------------


def test_run_prints_the_text_of_a_text_and_of_ids_alike() -> None:
    options = (
        "--max-tokens",
        "12",
        "--ignore-eos",
        "--temperature",
        "0",
        "--threads",
        "1",
        "--no-adaptive",
    )
    with LLM(verified_package(), threads=1, adaptive=False) as llm:
        params = SamplingParams(max_tokens=12, ignore_eos=True, temperature=0)
        output = llm.generate("Once upon a time", params)[0]
    text = qwen_mtp("run", verified_package(), "--prompt", "Once upon a time", *options)
    ids = ",".join(map(str, output.prompt_token_ids))
    same = qwen_mtp("run", verified_package(), "--prompt-ids", ids, *options)
    assert text.stdout == same.stdout == output.outputs[0].text + "\n"
    assert text.stderr == same.stderr
    passes, per_pass = output.stats.target_passes, output.stats.tokens_per_pass
    (line,) = text.stderr.splitlines()
    assert line.startswith(f"length: 12 tokens, {per_pass:.2f} a target pass ({passes} passes")
    quiet = qwen_mtp("run", verified_package(), "--prompt", "Once upon a time", *options, "-q")
    assert (quiet.stdout, quiet.stderr) == (text.stdout, "")


def test_a_stream_is_summed_up_in_a_line() -> None:
    assert counts_line([1], [0]) == "1 token"
    assert counts_line([1, 1, 1], [0, 1, 3]) == "3 tokens, 1.00 a target pass (2 passes)"
    assert counts_line([1, 4, 2, 1], [0, 3, 3, 0]) == (
        "8 tokens, 2.33 a target pass (3 passes, 1 without drafts); "
        "drafts kept by position: 2, 1, 1"
    )


def test_run_prints_ids_where_the_package_has_no_tokenizer() -> None:
    path = Path(str(verified_package()))
    with LLM(path, threads=1) as llm:
        expected = llm.generate([5, 6, 7], SamplingParams(max_tokens=6))[0].outputs[0].token_ids
    code = "import sys; sys.modules['tokenizers'] = None; main()"
    with spawn(code, "run", path, "--prompt-ids", "5,6,7", "--max-tokens", "6", "-q") as process:
        out, err = process.communicate()
    assert (out.split(), err) == ([str(token) for token in expected], "")


def test_the_json_of_run_has_exactly_its_keys() -> None:
    options = ("--max-tokens", "9", "--seed", "4", "--temperature", "0.8", "--top-k", "40")
    sampled = ("--top-p", "0.9", "--stop", "never said", "-k", "1", "--json")
    result = qwen_mtp("run", verified_package(), "--prompt", "Once", *options, *sampled)
    shown = parsed(result.stdout)
    assert list(shown) == [
        "prompt_token_ids", "token_ids", "text", "finish_reason", "stop_reason", "seed", "stats",
        "kernels",
    ]  # fmt: skip
    assert list(shown["stats"]) == [
        "target_passes", "tokens_per_pass", "drafted", "accepted", "rounds_by_drafts",
        "accepted_histogram", "ms",
    ]  # fmt: skip
    assert list(shown["stats"]["ms"]) == ["prefill", "draft", "verify", "host"]
    assert (shown["finish_reason"], shown["seed"], len(shown["token_ids"])) == ("length", 4, 9)
    again = qwen_mtp("run", verified_package(), "--prompt", "Once", *options, *sampled)
    assert parsed(again.stdout)["token_ids"] == shown["token_ids"]


def test_run_prints_no_part_of_a_stop_text() -> None:
    fixed = ("--prompt-ids", "5,6,7", "--max-tokens", "24", "--ignore-eos", "--temperature", "0")
    whole = qwen_mtp("run", verified_package(), *fixed).stdout[:-1]
    stop = next(whole[i : i + 3] for i in range(4, 40) if "�" not in whole[i : i + 3])
    cut = qwen_mtp("run", verified_package(), *fixed, "--stop", stop).stdout[:-1]
    assert cut == whole[: whole.index(stop)]


# --- pipes and interruption -----------------------------------------------------------------


@pytest.mark.parametrize("command", ["inspect", "run"])
def test_a_reader_that_leaves_early_sees_no_traceback(command: str) -> None:
    options = ["--prompt-ids", "1,2", "--ignore-eos", "-q"] if command == "run" else []
    reader, writer = os.pipe()
    os.close(reader)
    with spawn("main()", command, verified_package(), *options, stdout=writer) as process:
        os.close(writer)
        _, err = process.communicate()
    assert err == ""
    assert process.returncode in (1, 141)


@pytest.mark.parametrize(
    ("phase", "told", "code", "line"),
    [
        ("graph prefill", signal.SIGINT, 1, "Aborted!"),
        ("golden values", signal.SIGINT, 1, "Aborted!"),
        ("golden values", signal.SIGTERM, 143, ""),
    ],
)
def test_an_interrupted_export_leaves_nothing_and_the_old_package(
    tmp_path: Path, phase: str, told: signal.Signals, code: int, line: str
) -> None:
    """The phase waits for the signal, so that it always comes in the middle."""
    package = package_copy(tmp_path)
    script = (
        "import time; from qwen_mtp.progress import Lines;"
        f"wait = lambda self, title, *_: title == {phase!r} and "
        "(print('here', flush=True), time.sleep(60)); Lines.phase = wait; export_command()"
    )
    options = ("--overwrite", "-k", "1", *GEOMETRY)
    with untouched(tmp_path), spawn(script, checkpoint(), package, *options) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "here\n"
        assert len(list(tmp_path.iterdir())) == 2, "nothing is staged yet"
        time.sleep(0.1)
        process.send_signal(told)
        out, err = process.communicate(timeout=60)
    assert process.returncode == code
    assert out == ""
    assert err.strip() == line
