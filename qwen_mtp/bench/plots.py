"""Plots as inline SVG: columns, stacked rows and lines, with axes, units and titles.

Colours and fonts come from the style sheet of the page (``s0`` .. ``s5`` are series), so that one
picture serves light and dark. Sizes are in the units of the view box.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 480, 280
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 14, 16, 46
Format = Callable[[float], str]


@dataclass(frozen=True, slots=True)
class Series:
    """One set of values.

    Attributes:
        name: What the legend calls it.
        values: One each category, or one each x; NaN leaves a gap.
    """

    name: str
    values: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Labels:
    """The words of a plot.

    Attributes:
        title: Heading, and what a screen reader announces first.
        x: What runs along the horizontal axis, with its unit.
        y: What runs up the vertical axis, with its unit.
        text: What is to be seen, in a sentence.
    """

    title: str
    x: str
    y: str
    text: str


def columns(
    labels: Labels,
    categories: Sequence[str],
    series: Sequence[Series],
    show: Format,
    top: float | None = None,
) -> str:
    """Groups of columns from zero, each with its value on top; ``top`` fixes the axis."""
    most = top or max((v for s in series for v in s.values if v == v), default=1.0) or 1.0
    scale = _Scale.upto(most * (1.0 if top else 1.08))
    step = (WIDTH - _LEFT - _RIGHT) / len(categories)
    width = min(46.0, step * 0.78 / len(series))
    parts = [scale.grid(), _axis_names(labels)]
    for i, name in enumerate(categories):
        middle = _LEFT + (i + 0.5) * step
        parts.append(_text(middle, HEIGHT - _BOTTOM + 16, name))
        for j, one in enumerate(series):
            if (value := one.values[i]) == value:
                left = middle + (j - len(series) / 2) * width
                parts.append(_rect(j, left + 1, scale.y(value), width - 2, scale.height(value)))
                parts.append(_text(left + width / 2, scale.y(value) - 4, show(value), "value"))
    return _figure(labels, "".join(parts), [s.name for s in series])


def stacked(labels: Labels, rows: Sequence[str], series: Sequence[Series], show: Format) -> str:
    """Horizontal bars made of parts, one below the other, with the sum at the end."""
    sums = [sum(s.values[i] for s in series) for i in range(len(rows))]
    ticks = nice_ticks(max(sums, default=1.0) * 1.02 or 1.0)
    left, right = 104.0, 62.0
    unit = (WIDTH - left - right) / ticks[-1]
    step = min(52.0, (HEIGHT - _TOP - _BOTTOM) / max(1, len(rows)))
    bottom = _TOP + step * len(rows)
    parts = []
    for tick in ticks:
        x = left + tick * unit
        parts.append(
            f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{bottom:.1f}"/>'
        )
        parts.append(_text(x, bottom + 16, f"{tick:g}"))
    for i, name in enumerate(rows):
        x, y = left, _TOP + i * step + step * 0.16
        parts.append(_text(left - 8, y + step * 0.42, name, "end"))
        for j, one in enumerate(series):
            parts.append(
                _rect(
                    j, x, y, one.values[i] * unit, step * 0.68, f"{one.name} {show(one.values[i])}"
                )
            )
            x += one.values[i] * unit
        parts.append(_text(x + 6, y + step * 0.42, show(sums[i]), "start"))
    parts.append(_text((left + WIDTH - right) / 2, bottom + 36, labels.x, "name"))
    return _figure(labels, "".join(parts), [s.name for s in series], bottom + 44)


def lines(
    labels: Labels,
    places: Sequence[float],
    series: Sequence[Series],
    show: Format,
    show_x: Format,
    baseline: float | None = None,
) -> str:
    """Lines through points over ``places``, spaced by value; a dashed one at ``baseline``."""
    most = max(v for s in series for v in s.values if v == v)
    scale = _Scale.upto(max(most, baseline or 0.0) * 1.08)
    low, high = min(places), max(places)
    inner = WIDTH - _LEFT - _RIGHT - 56  # the last values stand to the right
    xs = [_LEFT + 18 + inner * ((p - low) / (high - low) if high > low else 0.5) for p in places]
    parts = [scale.grid(), _axis_names(labels)]
    parts += [_text(x, HEIGHT - _BOTTOM + 16, show_x(p)) for x, p in _apart(xs, places)]
    if baseline is not None:
        parts.append(_across("base", scale.y(baseline)))
    ends = []
    for j, one in enumerate(series):
        points = [(x, scale.y(v), v) for x, v in zip(xs, one.values, strict=True) if v == v]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y, _ in points)
        parts.append(f'<polyline class="line s{j}" points="{path}"/>')
        for x, y, value in points:
            tip = f"<title>{escape(one.name)}: {escape(show(value))}</title>"
            parts.append(f'<circle class="s{j}" cx="{x:.1f}" cy="{y:.1f}" r="3.5">{tip}</circle>')
        x, y, value = points[-1]
        ends.append((y + 4, x + 7, show(value)))
    below = math.inf
    for y, x, label in sorted(ends, reverse=True):
        below = min(y, below - 13)  # values that are close stand one above the other
        parts.append(_text(x, below, label, "start"))
    return _figure(labels, "".join(parts), [s.name for s in series])


def nice_ticks(most: float, count: int = 5) -> list[float]:
    """Round numbers from zero to at least ``most`` in about ``count`` steps."""
    rough = most / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= rough * (1 - 1e-9))
    return [i * step for i in range(math.ceil(most / step - 1e-9) + 1)]


@dataclass(frozen=True, slots=True)
class _Scale:
    """A vertical axis from zero."""

    ticks: list[float]

    @classmethod
    def upto(cls, most: float) -> "_Scale":
        return cls(nice_ticks(most))

    def height(self, value: float) -> float:
        return value / self.ticks[-1] * (HEIGHT - _TOP - _BOTTOM)

    def y(self, value: float) -> float:
        return HEIGHT - _BOTTOM - self.height(value)

    def grid(self) -> str:
        parts = []
        for tick in self.ticks:
            y = self.y(tick)
            parts.append(_across("grid", y))
            parts.append(_text(_LEFT - 6, y + 4, f"{tick:g}", "end"))
        return "".join(parts)


def _apart(xs: Sequence[float], places: Sequence[float]) -> list[tuple[float, float]]:
    """The labels of a horizontal axis that do not run into each other; the last one stays."""
    kept: list[tuple[float, float]] = []
    for x, place in reversed(list(zip(xs, places, strict=True))):
        if not kept or kept[-1][0] - x >= 38:
            kept.append((x, place))
    return kept


def _across(kind: str, y: float) -> str:
    return f'<line class="{kind}" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'


def _axis_names(labels: Labels) -> str:
    middle = (_TOP + HEIGHT - _BOTTOM) / 2
    turned = f'transform="rotate(-90 11 {middle:.0f})"'
    return _text((_LEFT + WIDTH - _RIGHT) / 2, HEIGHT - 8, labels.x, "name") + (
        f'<text class="name" x="11" y="{middle:.0f}" {turned}>{escape(labels.y)}</text>'
    )


def _rect(series: int, x: float, y: float, width: float, height: float, tip: str = "") -> str:
    inner = f"<title>{escape(tip)}</title>" if tip else ""
    size = f'x="{x:.1f}" y="{y:.1f}" width="{max(0.0, width):.1f}" height="{height:.1f}"'
    return f'<rect class="s{series}" {size}>{inner}</rect>'


def _text(x: float, y: float, text: str, kind: str = "tick") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}">{escape(text)}</text>'


def _figure(labels: Labels, body: str, names: Sequence[str], height: float = HEIGHT) -> str:
    key = "".join(f'<li><i class="s{j}"></i>{escape(name)}</li>' for j, name in enumerate(names))
    legend = f"<ul>{key}</ul>" if len(names) > 1 else ""
    title, text = escape(labels.title), escape(labels.text)
    return (
        f"<figure><figcaption><h3>{title}</h3>{legend}</figcaption>"
        f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img">'
        f"<title>{title}</title><desc>{text}</desc>{body}</svg><p>{text}</p></figure>"
    )
