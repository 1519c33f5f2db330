"""The tables of the page: every number with its samples, and the environment."""

from collections.abc import Iterable, Sequence
from html import escape

from qwen_mtp.bench.costs import Decoding, Samples
from qwen_mtp.bench.report import BenchReport
from qwen_mtp.bench.text import run_name
from qwen_mtp.progress import byte_text


def numbers(report: BenchReport) -> str:
    """Passes and prompts by their samples; runs by what they did."""
    head = ("milliseconds", "median", "least", "9 of 10 within", "samples", "x plain")
    return _table(head, _passes(report)) + "<p></p>" + _runs(report)


def environment(report: BenchReport) -> str:
    """Machine, model, settings, memory and bytes, as names and values."""
    machine, model, settings = report.machine, report.model, report.settings
    traffic, bandwidth, memory = report.traffic, report.bandwidth, report.memory
    rows = [
        ("processor", machine.cpu),
        ("instruction sets", ", ".join(machine.instructions) or "none of those looked for"),
        ("threads", f"{machine.threads} on {machine.cores} usable cores"),
        ("kernels", machine.kernels),
        ("memory", byte_text(machine.memory_bytes)),
        ("versions", ", ".join(f"{name} {number}" for name, number in machine.versions)),
        ("package", f"{model.package}, {byte_text(model.package_bytes)}"),
        ("exported for", f"K {', '.join(map(str, model.lookaheads)) or 'none'}; "
         f"{model.max_num_seqs} x {model.max_model_len} positions, chunks of "
         f"{model.prefill_chunk}, layout {model.layout}"),
        ("prompt", f"{settings.prompt}, {settings.prompt_tokens} tokens"),
        ("runs", f"{settings.repeat} of each kind in turn, {settings.tokens} tokens; "
         f"{settings.rounds} rounds of single passes"),
        ("reading memory", f"{bandwidth.speed.median:.1f} GB/s (best {bandwidth.best:.1f}, least "
         f"{bandwidth.speed.minimum:.1f}, {bandwidth.speed.count} reads of "
         f"{byte_text(bandwidth.buffer_bytes)})"),
        ("bytes a plain token moves", f"{byte_text(traffic.total)}: weights "
         f"{byte_text(traffic.weights)}, keys and values {byte_text(traffic.kv)}, state "
         f"{byte_text(traffic.state)}"),
        ("plain pass over reading its weights", f"{report.plain_over_weights:.2f}"),
        ("loading", f"{memory.first_load_s:.2f} s, again {memory.warm_load_s:.2f} s"),
        ("resident", f"{byte_text(memory.resident)}, of it {byte_text(memory.file_backed)} pages "
         f"of files; {byte_text(memory.interpreter)} before loading"),
        ("peak", byte_text(memory.peak)),
        ("prompt rows for the drafter", f"{report.prefill.mtp_share:.1%} of the multiply-adds"),
    ]  # fmt: skip
    cells = "".join(
        f'<tr><td>{escape(name)}</td><td class="text">{escape(value)}</td></tr>'
        for name, value in rows
    )
    return f'<div class="wide"><table><tbody>{cells}</tbody></table></div>'


def _passes(report: BenchReport) -> Iterable[Sequence[str]]:
    passes = report.passes
    yield (f"single passes at context {report.settings.context}",)
    yield _samples(report, "plain token", passes.plain)
    for cost in passes.verify:
        yield _samples(report, f"verify {cost.rows} rows", cost.ms)
    for draft in passes.drafts:
        yield _samples(report, draft.name, draft.ms)
    yield ("by context",)
    for place in report.contexts:
        yield _samples(report, f"plain token at {place.context}", place.plain)
        yield _samples(report, f"verify at {place.context}", place.verify)
        if place.draft is not None:
            yield _samples(report, f"drafts at {place.context}", place.draft)
    yield ("prefill",)
    for prompt in report.prefill.costs:
        name = f"{prompt.tokens} tokens, {prompt.padding} rows of padding"
        yield _samples(report, name, prompt.ms)


def _samples(report: BenchReport, name: str, ms: Samples) -> tuple[str, ...]:
    values = (ms.median, ms.minimum, ms.p90)
    ratio = ms.median / report.passes.plain.median
    return (name, *(f"{value:.2f}" for value in values), str(ms.count), f"{ratio:.2f}")


def _runs(report: BenchReport) -> str:
    head = ("run", "tokens/s", "slowest", "speed-up", "long run", "tokens/pass", "round ms",
            "draft ms", "verify ms", "host", "accepted", "same text")  # fmt: skip
    rows: list[Sequence[str]] = []
    groups = (
        ("the package's own drafts", report.text),
        ("scripted drafts", report.forced),
        ("slots in use", report.slots),
    )
    for name, runs in groups:
        if runs:
            rows.append((name,))
            rows += [_run(report, run) for run in runs]
    return _table(head, rows)


def _run(report: BenchReport, run: Decoding) -> tuple[str, ...]:
    name = run_name(run) if run.slots == 1 else f"{run.slots} slots, {run_name(run)}"
    lasting = report.expected_speedup(run)
    return (
        name,
        f"{run.speed.median:.1f}",
        f"{run.speed.minimum:.1f}",
        f"{report.speedup(run):.2f}",
        "" if lasting is None else f"{lasting:.2f}",
        f"{run.tokens_per_pass:.2f}",
        f"{run.round_ms:.2f}",
        f"{run.draft_ms / run.passes:.2f}",
        f"{run.verify_ms / run.passes:.2f}",
        f"{run.host_share:.1%}",
        " ".join(f"{share:.0%}" for share in run.acceptance),
        "yes" if run.equal else f"NO, from token {run.difference}",
    )


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Rows of one cell are headings."""
    titles = "".join(f"<th>{escape(name)}</th>" for name in head)
    body = []
    for row in rows:
        if len(row) == 1:
            body.append(f'<tr><th colspan="{len(head)}">{escape(row[0])}</th></tr>')
        else:
            body.append("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>")
    return (
        f'<div class="wide"><table><thead><tr>{titles}</tr></thead><tbody>{"".join(body)}'
        "</tbody></table></div>"
    )
