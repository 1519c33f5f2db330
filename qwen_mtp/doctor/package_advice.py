"""What to make of a package on this machine, from its own passes: pure functions."""

from collections.abc import Sequence

from qwen_mtp.doctor.advice import (
    Advice,
    Bandwidth,
    Recommendation,
    choose_format,
    choose_threads,
    drafts_line,
    export_command,
    gains_of,
    run_command,
    vocabulary_line,
)
from qwen_mtp.doctor.costs import ProductCost, draft_rows, measured
from qwen_mtp.doctor.environment import Environment
from qwen_mtp.doctor.package import PackageCost, PackageFacts, usable


def advise_package(
    environment: Environment,
    costs: Sequence[ProductCost],
    bandwidths: Sequence[Bandwidth],
    facts: PackageFacts,
    threads: int | None = None,
) -> Advice:
    """How to run the package, and what to export it again with."""
    count = choose_threads(environment, bandwidths, threads)
    ways = usable(facts.costs)
    if not ways:
        return _without_drafts(environment, facts, count)
    best, passes = ways[0], ways[0].passes
    assert passes is not None
    found, most = measured(passes), max(facts.lookaheads, default=0)
    gains = gains_of(found, most)
    drafts = drafts_line(gains)
    format_, rows = _format(environment, costs, facts), draft_rows(facts.shape, facts.format)
    vocabulary = vocabulary_line(facts.shape, facts.format, rows)
    lines = [format_, Recommendation("kernels", best.kernels, _why_kernels(facts.costs))]
    lines += [drafts, vocabulary, count] if most else [drafts, count]
    commands = [_run(best, environment, drafts, count, most)]
    dear = bool(most) and 3 * found.draft > 0.3 * found.plain and 0 < rows != facts.draft_rows
    if format_.choice != facts.format or dear:
        wanted = int(drafts.choice) or most
        commands.insert(0, export_command(format_.choice, wanted, rows))
        verdict = f"export it again: {format_.reason if not dear else vocabulary.reason}"
    else:
        top = max(gains, key=lambda gain: gain.speedup)
        verdict = (
            f"the package fits this machine: with K {drafts.choice}, {top.speedup:.2f} times "
            f"plain decoding at {top.acceptance:.0%} acceptance"
            if top.lookahead
            else "the package fits this machine; drafts do not pay in it"
        )
    return Advice(
        recommendations=tuple(lines), gains=gains, commands=tuple(commands), verdict=verdict
    )


def _format(
    environment: Environment, costs: Sequence[ProductCost], facts: PackageFacts
) -> Recommendation:
    best, why = choose_format(environment, costs, facts.shape)
    if best is None or facts.format == "fp32":
        return Recommendation("format", facts.format, "as exported")
    return Recommendation("format", best.format, why)


def _why_kernels(costs: Sequence[PackageCost]) -> str:
    parts = []
    for cost in costs:
        if cost.passes is None or not cost.exact:
            parts.append(f"{cost.kernels}: {cost.failure or cost.rows}")
        else:
            parts.append(f"{cost.kernels} {cost.passes.plain.median:.1f} ms a plain token")
    return ", ".join(parts)


def _run(
    best: PackageCost,
    environment: Environment,
    drafts: Recommendation,
    count: Recommendation,
    most: int,
) -> str:
    command = run_command(best.kernels, count.choice, environment)
    return command if int(drafts.choice) == most else f"{command} -k {drafts.choice}"


def _without_drafts(
    environment: Environment, facts: PackageFacts, count: Recommendation
) -> Advice:
    reason = _why_kernels(facts.costs)
    return Advice(
        recommendations=(Recommendation("drafts", "0", reason), count),
        gains=(),
        commands=(f"qwen-mtp run PACKAGE -k 0 --threads {count.choice} --prompt TEXT",),
        verdict="run it without drafts here: speculation may change the text",
    )
