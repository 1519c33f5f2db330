"""A report for a terminal."""

from collections.abc import Sequence

from qwen_mtp.bench.costs import Decoding, Samples
from qwen_mtp.bench.report import BenchReport
from qwen_mtp.progress import byte_text


def as_text(report: BenchReport) -> str:
    """Several tables for a person, most telling first."""
    return "\n".join(
        [
            *_head(report),
            "",
            *_plain(report),
            *_passes(report),
            *_prompts(report),
            "",
            *_decoding(report),
            *_contexts(report),
            *_memory(report),
            verdict(report),
        ]
    )


def run_name(run: Decoding) -> str:
    """What a run is called: ``plain``, ``K=3``, ``K=3 at 0.8``, ``K<=3, adaptive``."""
    if not run.lookahead:
        return "plain"
    name = f"K<={run.lookahead} adaptive" if run.adaptive else f"K={run.lookahead}"
    return name if run.forced is None else f"{name} at {run.forced:g}"


def verdict(report: BenchReport) -> str:
    """Whether the texts agreed, and how much was compared."""
    if report.equal:
        return f"equal      PASS: {report.tokens_compared} tokens are those of plain decoding"
    runs = (*report.text, *report.forced, *report.slots)
    wrong = next(run for run in runs if not run.equal)
    line = f"equal      FAIL: {run_name(wrong)} differs from plain decoding"
    why = "; the bits of a row depend on its pass here" if report.model.near_ties else ""
    return f"{line} at token {wrong.difference}{why}"


def _head(report: BenchReport) -> list[str]:
    model, machine, settings = report.model, report.machine, report.settings
    drafts = ", ".join(map(str, model.lookaheads)) or "none"
    versions = ", ".join(f"{name} {number}" for name, number in machine.versions)
    slots = "1 slot" if model.max_num_seqs == 1 else f"{model.max_num_seqs} slots"
    return [
        f"package    {model.package}: {model.format}, hidden {model.hidden_size}, {model.layers} "
        f"layers, vocabulary {model.vocab_size}; K {drafts}, {slots} x {model.max_model_len}",
        f"machine    {machine.cpu}, {machine.threads} threads on {machine.cores} cores, "
        f"{' '.join(machine.instructions) or 'no known instruction sets'}",
        f"versions   {versions}; kernels: {machine.kernels}",
        f"runs       {settings.tokens} tokens after {settings.prompt_tokens} of "
        f"{settings.prompt}; {settings.repeat} of each kind, {settings.rounds} rounds of passes",
    ]


def _plain(report: BenchReport) -> list[str]:
    traffic, speed = report.traffic, report.bandwidth.speed
    parts = (("weights", traffic.weights), ("kv", traffic.kv), ("state", traffic.state))
    moved = ", ".join(f"{name} {byte_text(count)}" for name, count in parts)
    return [
        f"plain      {_ms(report.passes.plain)} at context {report.settings.context}",
        f"limit      {report.limit_ms:.2f} ms: {byte_text(traffic.total)} a token ({moved}) at "
        f"{speed.median:.1f} GB/s (best {report.bandwidth.best:.1f})",
        f"share      {report.share_of_limit:.0%} of the memory limit; "
        f"{report.plain_over_weights:.2f} x reading the weights",
    ]


def _passes(report: BenchReport) -> list[str]:
    plain = report.passes.plain.median
    lines = [
        f"verify     {_ms(cost.ms)}, {cost.rows} rows = {cost.ms.median / plain:.2f} x plain"
        for cost in report.passes.verify
    ]
    return lines + [
        f"draft      {_ms(cost.ms)}, {cost.name} = {cost.ms.median / plain:.2f} x "
        f"plain, {cost.one_ms:.2f} ms each"
        for cost in report.passes.drafts
    ]


def _prompts(report: BenchReport) -> list[str]:
    lines = [
        f"prefill    {_ms(cost.ms)}, {cost.tokens} tokens = {cost.tokens_per_s:.0f} tokens/s, "
        f"{cost.padding} of {cost.tokens + cost.padding} rows padding"
        for cost in report.prefill.costs
    ]
    share = report.prefill.mtp_share
    return (
        [*lines, f"  of it    {share:.1%} of the multiply-adds are for the drafter"]
        if share
        else lines
    )


def _decoding(report: BenchReport) -> list[str]:
    titles = ("", "tokens/pass", "tokens/s", "speed-up", "round ms", "draft", "verify", "host", "")
    rows: list[Sequence[str]] = []
    for group in (report.text, report.forced, report.slots):
        if len(group) > 1:
            name = "scripted drafts" if group is report.forced else "own drafts"
            rows.append(
                (name if group is not report.slots else "slots", *titles[1:-1], "accepted")
            )
            rows += [_run_row(report, run) for run in group]
            rows.append(("",) * 9)
    if not rows:
        return []
    widths = [max(len(row[i]) for row in rows) for i in range(9)]
    return [
        "  ".join(
            cell.ljust(width) if i in (0, 8) else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _run_row(report: BenchReport, run: Decoding) -> tuple[str, ...]:
    name = run_name(run)
    count = run.passes
    return (
        f"{run.slots} x {name}" if run in report.slots else name,
        f"{run.tokens_per_pass:.2f}",
        f"{run.speed.median:.1f}",
        f"{report.speedup(run):.2f}",
        f"{run.round_ms:.2f}",
        f"{run.draft_ms / count:.2f}",
        f"{run.verify_ms / count:.2f}",
        f"{run.host_share:.1%}",
        " ".join(f"{share:.0%}" for share in run.acceptance),
    )


def _contexts(report: BenchReport) -> list[str]:
    lines = []
    for cost in report.contexts:
        draft = "" if cost.draft is None else f", drafts {cost.draft.median:.2f}"
        lines.append(
            f"context    {cost.context}: plain {cost.plain.median:.2f} ms, verify "
            f"{cost.verify.median:.2f}{draft}; kv {byte_text(cost.kv_bytes)}"
        )
    return lines


def _memory(report: BenchReport) -> list[str]:
    memory = report.memory
    return [
        f"load       {memory.first_load_s:.2f} s, warm {memory.warm_load_s:.2f} s",
        f"resident   {byte_text(memory.resident)} = {memory.resident_over_weights:.2f} x weights: "
        f"{byte_text(memory.anonymous)} anonymous, {byte_text(memory.file_backed)} of files; "
        f"{byte_text(memory.interpreter)} before loading",
        f"peak       {byte_text(memory.peak)}",
    ]


def _ms(samples: Samples) -> str:
    return (
        f"{samples.median:.2f} ms (least {samples.minimum:.2f}, 9 of 10 within {samples.p90:.2f}, "
        f"n {samples.count})"
    )
