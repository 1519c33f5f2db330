"""A report as one HTML page that needs nothing else: no network, no script."""

from html import escape
from math import nan

from qwen_mtp.bench.costs import Decoding
from qwen_mtp.bench.plots import Labels, Series, columns, lines, stacked
from qwen_mtp.bench.report import BenchReport
from qwen_mtp.bench.style import STYLE
from qwen_mtp.bench.tables import environment, numbers
from qwen_mtp.bench.text import run_name, verdict


def as_html(report: BenchReport) -> str:
    """The page: what matters in large print, plots, all numbers, the environment."""
    title = f"{report.model.package}: measured"
    figures = [
        _acceptance(report),
        _phases(report),
        _forced(report),
        _rows(report),
        _contexts(report),
        _slots(report),
        _prefill(report),
        _memory(report),
    ]
    return "".join(
        [
            '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="color-scheme" content="light dark">',
            f"<title>{escape(title)}</title><style>{STYLE}</style></head><body><main>",
            _header(report),
            f'<section class="cards">{_cards(report)}</section>',
            f'<section class="figures">{"".join(figures)}</section>',
            f"<section><h2>All numbers</h2>{numbers(report)}</section>",
            f"<section><h2>Environment</h2>{environment(report)}</section>",
            "</main></body></html>\n",
        ]
    )


def _header(report: BenchReport) -> str:
    model, machine = report.model, report.machine
    line = (
        f"{model.format} · hidden {model.hidden_size} · {model.layers} layers · vocabulary "
        f"{model.vocab_size:,} · {machine.cpu} · {machine.threads} threads"
    )
    return f"<header><h1>{escape(model.package)}</h1><p>{escape(line)}</p></header>"


def _cards(report: BenchReport) -> str:
    fastest, plain = report.fastest(), report.text[0]
    longest = report.prefill.costs[-1]
    drafting = [run for run in report.text if run.lookahead]
    best = max(drafting, key=lambda run: run.speed.median, default=None)
    cards = [
        ("Plain decoding", f"{plain.speed.median:.1f}", "tokens/s",
         f"{report.passes.plain.median:.1f} ms a pass at context {report.settings.context}"),
        *([("With its own drafts", f"{best.speed.median:.1f}", "tokens/s",
            f"{run_name(best)}, {best.tokens_per_pass:.2f} tokens a pass")] if best else []),
        *([("Speed-up on this text", f"{report.speedup(best):.2f}", "x",
            "drafts pay" if fastest is best else "plain decoding is faster")] if best else []),
        ("Of the memory limit", f"{100 * report.share_of_limit:.0f}", "%",
         f"limit {report.limit_ms:.1f} ms at {report.bandwidth.speed.median:.1f} GB/s"),
        ("Prefill", f"{longest.tokens_per_s:.0f}", "tokens/s", f"{longest.tokens} tokens"),
        ("Resident", f"{report.memory.resident / 1e9:.2f}", "GB",
         f"{report.memory.resident_over_weights:.2f} x weights; loads in "
         f"{report.memory.warm_load_s:.1f} s"),
    ]  # fmt: skip
    mark = "good" if report.equal else "bad"
    sign = "PASS" if report.equal else "FAIL"
    text = verdict(report).partition(": ")[2]
    return "".join(_card(*card) for card in cards) + (
        f'<div class="card {mark}"><h2>Same text</h2><b>{sign}</b><p>{escape(text)}</p></div>'
    )


def _card(name: str, number: str, unit: str, note: str) -> str:
    return (
        f'<div class="card"><h2>{escape(name)}</h2><b>{escape(number)}<small>{escape(unit)}'
        f"</small></b><p>{escape(note)}</p></div>"
    )


def _acceptance(report: BenchReport) -> str:
    runs = [run for run in report.text if run.lookahead]
    if not runs:
        return ""
    most = max(len(run.acceptance) for run in runs)
    series = [Series(run_name(run), _padded(run.acceptance, most, 100.0)) for run in runs]
    labels = Labels(
        title="Drafts accepted, by position",
        x="position of the draft in its round",
        y="accepted, %",
        text="Share of the drafts at each position that the target kept; a draft counts only "
        "when all before it were kept.",
    )
    return columns(labels, [str(i + 1) for i in range(most)], series, _percent, 100.0)


def _padded(values: tuple[float, ...], count: int, factor: float) -> tuple[float, ...]:
    return tuple(factor * v for v in values) + (nan,) * (count - len(values))


def _phases(report: BenchReport) -> str:
    runs = report.text
    parts = (("draft", "draft_ms"), ("verify", "verify_ms"), ("host", "host_ms"))
    series = [
        Series(name, tuple(getattr(run, field) / run.passes for run in runs))
        for name, field in parts
    ]
    labels = Labels(
        title="Where the time of a round goes",
        x="milliseconds a round",
        y="",
        text="Drafting, the pass of the target, and everything outside the graphs.",
    )
    return stacked(labels, [run_name(run) for run in runs], series, _short)


def _forced(report: BenchReport) -> str:
    runs = [run for run in report.forced if run.lookahead]
    if not runs:
        return ""
    shares = sorted({run.forced for run in runs if run.forced is not None})
    names = list(dict.fromkeys(_kind(run) for run in runs))
    series = [Series(name, tuple(_at(report, name, a) for a in shares)) for name in names]
    labels = Labels(
        title="Speed-up against acceptance",
        x="probability that a draft is right",
        y="times plain decoding",
        text="Scripted drafts that cost what real ones cost; above the dashed line drafts pay.",
    )
    return lines(labels, shares, series, _factor, lambda a: f"{a:g}", 1.0)


def _kind(run: Decoding) -> str:
    return run_name(run).partition(" at ")[0]


def _at(report: BenchReport, name: str, share: float) -> float:
    runs = (run for run in report.forced if _kind(run) == name and run.forced == share)
    return next((report.speedup(run) for run in runs), nan)


def _rows(report: BenchReport) -> str:
    passes = report.passes
    names = ["plain", *(f"{c.rows} rows" for c in passes.verify)]
    values = [passes.plain.median, *(c.ms.median for c in passes.verify)]
    names += [c.name for c in passes.drafts]
    values += [c.ms.median for c in passes.drafts]
    names.append("limit")
    labels = Labels(
        title="What a pass costs",
        x="rows the target verifies; drafts of one round",
        y="milliseconds",
        text=f"Medians at context {report.settings.context}; the limit is the time that moving "
        "a plain token's bytes takes.",
    )
    return columns(labels, names, [Series("ms", (*values, report.limit_ms))], _short)


def _contexts(report: BenchReport) -> str:
    costs = report.contexts
    series = [
        Series("plain token", tuple(c.plain.median for c in costs)),
        Series(
            f"verify, {report.passes.verify[-1].rows} rows", tuple(c.verify.median for c in costs)
        ),
    ]
    if report.passes.drafts:
        ms = tuple(nan if c.draft is None else c.draft.median for c in costs)
        series.append(Series(report.passes.drafts[-1].name, ms))
    labels = Labels(
        title="Cost against context",
        x="positions before the pass",
        y="milliseconds",
        text="Medians; what grows is attention over the keys and values.",
    )
    return lines(labels, [float(c.context) for c in costs], series, _short, lambda n: f"{n:.0f}")


def _slots(report: BenchReport) -> str:
    if not report.slots:
        return ""
    counts = sorted({run.slots for run in report.slots})
    names = list(dict.fromkeys(run_name(run) for run in report.slots))
    series = [
        Series(name, tuple(run.speed.median for n in counts for run in report.slots
                           if run.slots == n and run_name(run) == name))
        for name in names
    ]  # fmt: skip
    labels = Labels(
        title="Speed against slots in use",
        x="sequences side by side",
        y="tokens/s, all together",
        text="Scripted drafts and plain decoding, the same text in every slot.",
    )
    return columns(labels, [str(n) for n in counts], series, _short)


def _prefill(report: BenchReport) -> str:
    costs = report.prefill.costs
    labels = Labels(
        title="Prefill",
        x="tokens of the prompt",
        y="tokens/s",
        text=f"Prompts run in chunks of {report.model.prefill_chunk} rows; rows of the last one "
        "that no token fills are padding.",
    )
    values = Series("tokens/s", tuple(c.tokens_per_s for c in costs))
    return columns(labels, [str(c.tokens) for c in costs], [values], lambda v: f"{v:.0f}")


def _memory(report: BenchReport) -> str:
    memory = report.memory
    rows = ("weights", "interpreter", "resident", "peak")
    anonymous = (memory.weights, memory.interpreter, memory.anonymous, memory.peak)
    files = (0, 0, memory.file_backed, 0)
    series = [
        Series("memory", tuple(n / 1e6 for n in anonymous)),
        Series("pages of files", tuple(n / 1e6 for n in files)),
    ]
    labels = Labels(
        title="Memory",
        x="MB",
        y="",
        text="Stored weights; this process before it loads, after every graph has run, and at "
        "most.",
    )
    return stacked(labels, rows, series, lambda v: f"{v:.0f}")


def _short(value: float) -> str:
    """Three digits or so."""
    return (
        f"{value:.0f}"
        if value >= 100 or value == 0
        else f"{value:.1f}"
        if value >= 10
        else f"{value:.2g}"
    )


def _percent(value: float) -> str:
    return f"{value:.0f}"


def _factor(value: float) -> str:
    return f"{value:.2f}"
