"""What to choose on this machine, and why: pure functions of what was measured."""

from collections.abc import Sequence
from dataclasses import dataclass

from qwen_mtp.doctor.costs import Costs, ModelShape, ProductCost, draft_rows, estimated
from qwen_mtp.doctor.environment import Environment
from qwen_mtp.doctor.products import BITS

ACCEPTANCES = (0.8, 0.7, 0.6)
TYPICAL, MOST_DRAFTS = 0.7, 7
FORMATS = ("int8", "int4", "fp32")
_STATE_BYTES = 300e6  # interpreter, state, graphs
_RESIDENT = {"int8": 1.3, "int4": 1.6, "fp32": 1.3}  # over the file, where weights are packed
_WORTH = 1.25  # what another format must gain to be worth its accuracy
_TIE = 1.05
_FEWER = 1.15  # what fewer threads must gain: more of them also compute more


@dataclass(frozen=True, slots=True)
class Recommendation:
    """One choice.

    Attributes:
        what: format, kernels, drafts, draft vocabulary or threads.
        choice: What to choose.
        reason: Why, one line.
    """

    what: str
    choice: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Bandwidth:
    """Reading memory: GB a second with so many threads."""

    threads: int
    speed: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """The best look-ahead at an acceptance, and its speed-up over plain decoding."""

    acceptance: float
    lookahead: int
    speedup: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """Everything that is recommended.

    Attributes:
        recommendations: The choices.
        gains: What drafts bring at several acceptances.
        commands: The commands to use.
        verdict: All in one line.
    """

    recommendations: tuple[Recommendation, ...]
    gains: tuple[Gain, ...]
    commands: tuple[str, ...]
    verdict: str


def gains_of(costs: Costs, most: int = MOST_DRAFTS) -> tuple[Gain, ...]:
    """The best look-ahead, at most ``most``, at each acceptance."""
    best = [(a, costs.best_lookahead(a, most)) for a in ACCEPTANCES]
    return tuple(Gain(acceptance=a, lookahead=k, speedup=costs.speedup(k, a)) for a, k in best)


def choose_kernels(costs: Sequence[ProductCost], format: str) -> ProductCost | None:
    """Of the usable kernels of a format the faster; native ones where it is a tie."""
    usable = [cost for cost in costs if cost.format == format and cost.usable]
    native = next((cost for cost in usable if cost.kernels == "native"), None)
    other = next((cost for cost in usable if cost.kernels != "native"), None)
    if native is None or other is None:
        return native or other
    return native if _round(native) <= _TIE * _round(other) else other


def choose_format(
    environment: Environment, costs: Sequence[ProductCost], shape: ModelShape
) -> tuple[ProductCost | None, str]:
    """The format, with the kernels to use, and why.

    int8, unless it does not fit, its rows do not keep their bits or int4 is faster by a
    quarter. None where no format keeps the bits of a row.
    """
    best = [cost for f in FORMATS if (cost := choose_kernels(costs, f)) is not None]
    fit = [cost for cost in best if needs_bytes(cost, shape) <= (environment.free_bytes or 1e18)]
    sound = [cost for cost in fit if not _saturates(environment, cost)]
    if not sound:
        smallest = min(best, key=lambda cost: needs_bytes(cost, shape), default=None)
        return smallest, "" if smallest is None else "no format that is sound here fits"
    first, *others = sound
    if first.format != "int8":
        return first, _why_not_int8(environment, costs, shape)
    faster = [cost for cost in others if cost.format == "int4"]
    if faster and _speed(first, shape) * _WORTH < _speed(faster[0], shape):
        gain = _speed(faster[0], shape) / _speed(first, shape)
        return faster[0], f"{gain:.2f} times as fast as int8 here, drafts included"
    sets = ", ".join(environment.instructions[-2:]) or "this CPU"
    return first, f"4 rows cost {first.ms(4) / first.ms(1):.2f} of one row on {sets}"


def needs_bytes(cost: ProductCost, shape: ModelShape) -> float:
    """Memory a running package takes."""
    packed = 1.05 if cost.kernels == "native" else _RESIDENT[cost.format]
    bits = 5 if cost.format == "int4" else BITS[cost.format]  # a scale of 4 bytes for 32 weights
    return (shape.weights + shape.drafter) * bits / 8 * packed + _STATE_BYTES


def choose_threads(
    environment: Environment, bandwidths: Sequence[Bandwidth], asked: int | None
) -> Recommendation:
    """As many as can run at once, or fewer where those read memory faster."""
    if asked is not None:
        return Recommendation("threads", str(asked), "as asked for")
    if not bandwidths:
        return Recommendation("threads", str(environment.threads), "the cores that can be used")
    most = max(found.speed for found in bandwidths)
    best = max((b for b in bandwidths if b.speed * _FEWER >= most), key=lambda b: b.threads)
    reads = ", ".join(f"{b.speed:.1f} GB/s with {b.threads}" for b in bandwidths)
    limit = environment.cpu_limit
    limited = limit is not None and limit < environment.cores
    why = f"; the control group allows {limit:g} of {environment.cores} cores" if limited else ""
    return Recommendation("threads", str(best.threads), f"memory reads {reads}{why}")


def kernels_line(environment: Environment, costs: Sequence[ProductCost], best: ProductCost) -> str:
    """Why these kernels."""
    if environment.no_kernels:
        return environment.no_kernels
    both = {cost.kernels: cost for cost in costs if cost.format == best.format and cost.usable}
    if len(both) < 2:
        other = next((c for c in costs if c.format == best.format and not c.usable), None)
        return "the only ones" if other is None else other.difference or other.failure
    native, other = both["native"], both["onnxruntime"]
    ratios = [f"{native.ms(r) / other.ms(r):.2f} for {r}" for r in (2, 4)]
    also = "; they pack nothing" if best is native else ""
    return f"native over ONNX Runtime's time is {' and '.join(ratios)} rows{also}"


def vocabulary_line(shape: ModelShape, format: str, rows: int) -> Recommendation:
    """The rows of the drafter's output head."""
    whole = 3 * shape.draft_weights(format, shape.vocabulary) / shape.weights
    if rows == 0:
        small = "too few to cut; " if whole > 0.3 else ""
        reason = (
            f"{small}three drafts with all {shape.vocabulary} rows read {whole:.2f} of a token"
        )
        return Recommendation("draft vocabulary", "all (0)", reason)
    cut = 3 * shape.draft_weights(format, rows) / shape.weights
    reason = f"three drafts then read {cut:.2f} of a token's bytes instead of {whole:.2f}"
    return Recommendation("draft vocabulary", str(rows), reason)


def drafts_line(gains: Sequence[Gain]) -> Recommendation:
    """How many drafts."""
    typical = next(gain for gain in gains if gain.acceptance == TYPICAL)
    shown = [f"{g.speedup:.2f} x at {g.acceptance:.0%} (K {g.lookahead})" for g in gains]
    if all(gain.lookahead == 0 for gain in gains):
        return Recommendation("drafts", "0", "none pays, even where four of five are accepted")
    choice = typical.lookahead or next(g.lookahead for g in gains if g.lookahead)
    return Recommendation("drafts", str(choice), f"over plain decoding {', '.join(shown)}")


def advise(
    environment: Environment,
    costs: Sequence[ProductCost],
    bandwidths: Sequence[Bandwidth],
    shape: ModelShape,
    threads: int | None = None,
) -> Advice:
    """What to export and how to run it, from products alone."""
    count = choose_threads(environment, bandwidths, threads)
    best, why = choose_format(environment, costs, shape)
    if best is None:
        broken = next((c.difference or c.failure for c in costs), "nothing was measured")
        return Advice(
            recommendations=(
                Recommendation("drafts", "0", f"no kernels keep the bits of a row ({broken})"),
                count,
            ),
            gains=(),
            commands=(f"qwen-mtp run PACKAGE -k 0 --threads {count.choice}",),
            verdict="decode without drafts here: speculation would change the text",
        )
    rows = draft_rows(shape, best.format)
    gains = gains_of(estimated(best, shape, rows))
    drafts = drafts_line(gains)
    lines = (
        Recommendation("format", best.format, why),
        Recommendation("kernels", best.kernels, kernels_line(environment, costs, best)),
        drafts,
        vocabulary_line(shape, best.format, rows),
        count,
    )
    commands = (
        export_command(best.format, int(drafts.choice), rows),
        run_command(best.kernels, count.choice, environment),
    )
    return Advice(
        recommendations=lines,
        gains=gains,
        commands=commands,
        verdict=_verdict(best, drafts, gains),
    )


def export_command(format: str, lookahead: int, rows: int) -> str:
    """The command that exports with these choices."""
    if lookahead == 0:
        return f"qwen-mtp-export CHECKPOINT PACKAGE --format {format} --no-mtp"
    ks = f"1,{lookahead}" if lookahead > 1 else "1"
    return f"qwen-mtp-export CHECKPOINT PACKAGE --format {format} -k {ks} --draft-vocab {rows}"


def run_command(kernels: str, threads: str, environment: Environment) -> str:
    """The command that runs a package with these choices."""
    without = "" if kernels == "native" or environment.no_kernels else " --no-native"
    return f"qwen-mtp run PACKAGE --threads {threads}{without} --prompt TEXT"


def _verdict(best: ProductCost, drafts: Recommendation, gains: Sequence[Gain]) -> str:
    if drafts.choice == "0":
        return f"{best.format} on {best.kernels} kernels, without drafts: they do not pay here"
    typical = next(gain for gain in gains if gain.acceptance == TYPICAL)
    speed = f"about {typical.speedup:.1f} times plain decoding where 70 % of drafts are accepted"
    return f"{best.format} on {best.kernels} kernels with K {drafts.choice}: {speed}"


def _why_not_int8(
    environment: Environment, costs: Sequence[ProductCost], shape: ModelShape
) -> str:
    int8 = choose_kernels(costs, "int8")
    if int8 is None:
        broken = next((c.difference or c.failure for c in costs if c.format == "int8"), "")
        return f"int8 cannot be used here: {broken or 'not measured'}"
    if needs_bytes(int8, shape) > (environment.free_bytes or 1e18):
        needed = needs_bytes(int8, shape) / 1e9
        return f"int8 takes {needed:.1f} GB, {environment.free_bytes / 1e9:.1f} GB are free"
    return "ONNX Runtime's int8 kernels sum in 16 bits on this CPU, which may saturate"


def _saturates(environment: Environment, cost: ProductCost) -> bool:
    """Whether int8 goes through 16-bit sums (docs/adr/0007)."""
    intel = environment.architecture in ("x86_64", "AMD64", "i686")
    ours = cost.kernels == "native" or cost.format != "int8"
    return intel and not ours and not environment.integer_products


def _round(cost: ProductCost) -> float:
    return cost.ms(2) + cost.ms(4)


def _speed(cost: ProductCost, shape: ModelShape) -> float:
    """Tokens a millisecond with the best look-ahead at the typical acceptance."""
    found = estimated(cost, shape, draft_rows(shape, cost.format))
    k = found.best_lookahead(TYPICAL, MOST_DRAFTS)
    return found.speedup(k, TYPICAL) / found.plain
