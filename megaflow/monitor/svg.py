"""Charts as inline SVG, for a page that needs nothing but itself: curves over steps, and stacked bars. Hovering a step tells its values."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

COLORS = ("#2f6fb7", "#c8553d", "#3a8f5c", "#8a5fb0", "#b8892b", "#4aa3a8", "#a34a72", "#7a7a7a", "#94b447", "#5b6bd6", "#d98cb3")
PIXELS_A_POINT = 3  # a curve of more points is averaged in bins of neighbouring steps: noise would fill the chart
LEFT, RIGHT, TOP, BOTTOM = 52.0, 10.0, 26.0, 22.0
ROW = 13.0  # height of a line of names
ROUND = (1, 2, 5, 10)
LETTER = 5.6  # width of one, 10 px; the title's are a fifth wider


@dataclass(frozen=True)
class Series:
    """One curve: points are (step, value) in ascending steps, without gaps filled."""

    label: str
    points: list[tuple[float, float]]
    color: str
    dashed: bool = False
    dots: bool = False


def line_chart(title: str, series: Sequence[Series], width: int = 420, height: int = 190) -> str:
    """Curves over a common axis of steps; empty text when no series has a point."""
    shown = [Series(s.label, thinned(s.points, width // PIXELS_A_POINT), s.color, s.dashed, s.dots) for s in series if s.points]
    if not shown:
        return ""
    names, extra = _legend(title, shown, width)
    frame = _Frame(width, height + extra, [x for s in shown for x, _ in s.points], [y for s in shown for _, y in s.points], TOP + extra)
    body = "".join(_curve(frame, s) for s in shown)
    return _chart(title, frame, body, names, _tips(frame, shown))


def stacked_bars(title: str, steps: Sequence[int], layers: dict[str, Sequence[float]], width: int = 860, height: int = 230) -> str:
    """For each step a bar of the layers' values on each other; as many layers as there are colors."""
    assert len(layers) <= len(COLORS), list(layers)
    if not steps or not layers:
        return ""
    steps, layers = _binned(steps, layers)
    totals = [sum(values[i] for values in layers.values()) for i in range(len(steps))]
    curves = [Series(n, list(zip(steps, values, strict=True)), color) for (n, values), color in zip(layers.items(), COLORS, strict=False)]
    names, extra = _legend(title, curves, width)
    frame = _Frame(width, height + extra, [steps[0] - 0.5, steps[-1] + 0.5], [0.0, *totals], TOP + extra)
    bar = max(0.5, (frame.x(steps[-1] + 0.5) - frame.x(steps[0] - 0.5)) / len(steps) - 0.6)
    body, base = [], [0.0] * len(steps)
    for color, values in zip(COLORS, layers.values(), strict=False):
        for i, value in enumerate(values):
            left, top, foot = frame.x(steps[i]) - bar / 2, frame.y(base[i] + value), frame.y(base[i])
            body.append(f'<rect x="{left:.1f}" y="{top:.1f}" width="{bar:.1f}" height="{foot - top:.1f}" fill="{color}"/>')
            base[i] += value
    return _chart(title, frame, "".join(body), names, _tips(frame, curves))


def thinned(points: list[tuple[float, float]], most: int) -> list[tuple[float, float]]:
    """At most `most` points: means of neighbours."""
    size = -(-len(points) // most)
    if size <= 1:
        return points
    bins = [points[i : i + size] for i in range(0, len(points), size)]
    return [(sum(x for x, _ in each) / len(each), sum(y for _, y in each) / len(each)) for each in bins]


def ticks(low: float, high: float, wanted: int = 4) -> list[float]:
    """Round numbers (1, 2 or 5 times a power of ten apart) within [low, high]."""
    span = high - low
    if not span > 0:
        return [low]
    raw = span / wanted
    power = 10.0 ** math.floor(math.log10(raw))
    larger = next(i for i, m in enumerate(ROUND) if m * power >= raw * 0.999)
    found = _multiples(ROUND[larger] * power, low, high)
    return found if len(found) > 1 or larger == 0 else _multiples(ROUND[larger - 1] * power, low, high)


def _multiples(distance: float, low: float, high: float) -> list[float]:
    first = math.ceil(low / distance - 1e-9)
    return [k * distance for k in range(first, math.floor(high / distance + 1e-9) + 1)]


def number(value: float) -> str:
    """Short, for axes and tips: 12.3k, 1,234, 0.05, 3e-07."""
    if value == 0:
        return "0"
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            return f"{value / (1e3 if letter == 'k' else size):.3g}{letter}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


class _Frame:
    """From data to the picture's coordinates."""

    def __init__(self, width: int, height: float, xs: Iterable[float], ys: Iterable[float], top: float):
        xs, ys = list(xs), list(ys)
        self.width, self.height, self.top = width, height, top
        self.x0, self.x1 = min(xs), max(xs)
        self.y0, self.y1 = min(ys), max(ys)
        pad = (self.y1 - self.y0) * 0.06 or abs(self.y1) * 0.1 or 1.0
        self.y0, self.y1 = (self.y0 if self.y0 == 0 else self.y0 - pad), self.y1 + pad
        if self.x0 == self.x1:
            self.x0, self.x1 = self.x0 - 1, self.x1 + 1

    def x(self, value: float) -> float:
        return LEFT + (value - self.x0) / (self.x1 - self.x0) * (self.width - LEFT - RIGHT)

    def y(self, value: float) -> float:
        return self.height - BOTTOM - (value - self.y0) / (self.y1 - self.y0) * (self.height - self.top - BOTTOM)


def _curve(frame: _Frame, s: Series) -> str:
    path = " ".join(f"{frame.x(x):.1f},{frame.y(y):.1f}" for x, y in s.points)
    dash = ' stroke-dasharray="4 3"' if s.dashed else ""
    line = f'<polyline points="{path}" fill="none" stroke="{s.color}" stroke-width="1.6" stroke-linejoin="round"{dash}/>'
    if s.dots or len(s.points) == 1:
        line += "".join(f'<circle cx="{frame.x(x):.1f}" cy="{frame.y(y):.1f}" r="2.6" fill="{s.color}"/>' for x, y in s.points)
    return line


def _legend(title: str, series: Sequence[Series], width: int) -> tuple[str, float]:
    """(names, unless there is only one; the height of the lines that they need below the title's). They end on the right."""
    if len(series) < 2:
        return "", 0.0
    rows: list[list[Series]] = [[]]
    room = width - RIGHT - 1.2 * LETTER * (len(title) + 2)  # beside the title
    for s in series:
        needed = LETTER * (len(s.label) + 2) + 9
        if needed > room:
            rows, room = [*rows, []], width - RIGHT - LEFT
        rows[-1].append(s)
        room -= needed
    return "".join(_names(row, width, TOP - 10 + i * ROW) for i, row in enumerate(rows)), (len(rows) - 1) * ROW


def _names(series: Sequence[Series], width: int, y: float) -> str:
    names = "".join(f'<tspan fill="{s.color}" dx="9">{"╌" if s.dashed else "■"} {escape(s.label)}</tspan>' for s in series)
    return f'<text x="{width - RIGHT}" y="{y}" text-anchor="end" class="small">{names}</text>' if series else ""


def _tips(frame: _Frame, series: Sequence[Series]) -> str:
    """An invisible column for each step whose tooltip has all values there."""
    values: dict[float, list[str]] = {}
    for s in series:
        for x, y in s.points:
            values.setdefault(x, []).append(f"{s.label} {number(y)}")
    xs = sorted(values)
    edges = [frame.x((a + b) / 2) for a, b in itertools.pairwise(xs)]
    starts, ends = [LEFT, *edges], [*edges, frame.width - RIGHT]
    height = frame.height - frame.top - BOTTOM
    return "".join(
        f'<rect class="tip" x="{start:.1f}" y="{frame.top}" width="{max(end - start, 0.1):.1f}" height="{height}">'
        f"<title>step {number(x)}\n{escape(chr(10).join(values[x]))}</title></rect>"
        for x, start, end in zip(xs, starts, ends, strict=True)
    )


def _chart(title: str, frame: _Frame, body: str, legend: str, tips: str) -> str:
    axes = []
    for y in ticks(frame.y0, frame.y1):
        axes.append(f'<line x1="{LEFT}" x2="{frame.width - RIGHT}" y1="{frame.y(y):.1f}" y2="{frame.y(y):.1f}" class="grid"/>')
        axes.append(f'<text x="{LEFT - 5}" y="{frame.y(y) + 3:.1f}" text-anchor="end" class="small">{number(y)}</text>')
    for x in ticks(frame.x0, frame.x1, 6):
        anchor = "end" if frame.x(x) > frame.width - 2 * RIGHT else "middle"  # the last one would be cut off
        axes.append(f'<text x="{frame.x(x):.1f}" y="{frame.height - 6}" text-anchor="{anchor}" class="small">{number(x)}</text>')
    head = f'<text x="4" y="{TOP - 10}" class="title">{escape(title)}</text>'
    size = f'viewBox="0 0 {frame.width} {frame.height}" width="{frame.width}" height="{frame.height}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">{head}{legend}{"".join(axes)}{body}{tips}</svg>'


def _binned(steps: Sequence[int], layers: dict[str, Sequence[float]], most: int = 200) -> tuple[list[float], dict[str, list[float]]]:
    thin = {name: thinned(list(zip(map(float, steps), values, strict=True)), most) for name, values in layers.items()}
    first = next(iter(thin.values()))
    return [x for x, _ in first], {name: [y for _, y in points] for name, points in thin.items()}
