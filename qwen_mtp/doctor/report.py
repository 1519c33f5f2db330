"""What ``doctor`` found, as text and as JSON."""

from collections.abc import Iterator
from dataclasses import dataclass

from qwen_mtp.doctor.advice import Advice, Bandwidth
from qwen_mtp.doctor.costs import ModelShape, ProductCost
from qwen_mtp.doctor.environment import Environment
from qwen_mtp.doctor.package import PackageCost, PackageFacts
from qwen_mtp.progress import byte_text


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorReport:
    """Everything, in the order in which it is shown.

    Attributes:
        environment: What the machine has.
        threads: Threads that were measured with.
        bandwidths: Reading memory.
        products: Products of a few rows, by format and kernels.
        shape: The model that the advice is for.
        package: What was measured of a package; None without one.
        advice: What to choose.
    """

    environment: Environment
    threads: int
    bandwidths: tuple[Bandwidth, ...]
    products: tuple[ProductCost, ...]
    shape: ModelShape
    package: PackageFacts | None
    advice: Advice

    def as_text(self) -> str:
        """Sections for a person; the last line is the verdict."""
        lines = [*_environment(self.environment), *self._memory(), ""]
        lines += self._products()
        if self.package is not None:
            lines += ["", *_package(self.package)]
        lines += ["", *self._advice()]
        rough = " (rough: the machine was busy)" if self.environment.busy else ""
        return "\n".join([*lines, "", f"verdict   {self.advice.verdict}{rough}"])

    def _memory(self) -> Iterator[str]:
        reads = ", ".join(
            f"{found.speed:.1f} GB/s with {_count(found.threads, 'thread')}"
            for found in self.bandwidths
        )
        yield f"reads     {reads}"

    def _products(self) -> Iterator[str]:
        yield f"products  ms for 1e9 weights on {_count(self.threads, 'thread')}, by rows"
        head = f"  {'format':<8}{'kernels':<13}{'1':>8}{'2':>8}{'4':>8}{'8':>8}"
        yield f"{head}{'4 / 1':>8}{'GB/s':>8}  a row keeps its bits"
        for cost in self.products:
            start = f"  {cost.format:<8}{cost.kernels:<13}"
            if cost.failure:
                yield f"{start}{cost.failure}"
                continue
            scale = 1e9 / cost.weights
            times = "".join(f"{row.ms.median * scale:8.1f}" for row in cost.rows)
            kept = cost.difference or "yes"
            yield f"{start}{times}{cost.ms(4) / cost.ms(1):8.2f}{cost.speed:8.1f}  {kept}"

    def _advice(self) -> Iterator[str]:
        kind = "the package" if self.package else f"a model of {self.shape.weights / 1e9:.2g}e9"
        yield f"advice    for {kind}{'' if self.package else ' weights, estimated from products'}"
        for line in self.advice.recommendations:
            yield f"  {line.what:<18}{line.choice:<13}{line.reason}"
        for command in self.advice.commands:
            yield f"  $ {command}"


def _environment(found: Environment) -> Iterator[str]:
    yield f"cpu       {found.cpu} ({found.architecture}), {_count(found.cores, 'usable core')}"
    yield f"sets      {', '.join(found.instructions) or 'not told'}"
    limits = []
    if found.cpu_limit is not None:
        limits.append(f"{found.cpu_limit:g} cores' time")
    if found.memory_limit is not None:
        limits.append(byte_text(found.memory_limit))
    yield f"limits    {', '.join(limits) or 'none'}"
    total = byte_text(found.memory_bytes) if found.memory_bytes else "not told"
    free = f", {byte_text(found.free_bytes)} free" if found.free_bytes else ""
    yield f"memory    {total}{free}"
    if found.busy:
        yield f"warning   {found.load:.1f} processes run here: what is measured is rough"
    yield f"versions  {', '.join(' '.join(pair) for pair in found.versions)}"
    yield f"compiler  {found.compiler or 'none'}"
    yield f"native    {found.kernels or found.no_kernels}"


def _package(facts: PackageFacts) -> Iterator[str]:
    drafted = f", drafts from {facts.draft_rows} tokens" if facts.draft_rows else ""
    yield f"package   {facts.name}: {facts.format}{drafted}; ms at context {facts.context}"
    for cost in facts.costs:
        yield from _package_cost(cost)


def _package_cost(cost: PackageCost) -> Iterator[str]:
    if cost.passes is None:
        yield f"  {cost.kernels:<13}{cost.failure}"
        return
    found, plain = cost.passes, cost.passes.plain.median
    parts = [f"load {cost.load_s:.1f} s", f"plain {plain:.2f}"]
    parts += [
        f"{row.rows} rows {row.ms.median:.2f} ({row.ms.median / plain:.2f} x)"
        for row in found.verify
    ]
    parts += [
        f"{_count(draft.lookahead, 'draft')} {draft.ms.median:.2f} "
        f"({draft.ms.median / plain:.2f} x)"
        for draft in found.drafts
    ]
    yield f"  {cost.kernels:<13}{', '.join(parts)}"
    yield f"  {'':<13}rows: {cost.rows}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
