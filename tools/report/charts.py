"""Charts against tokens as SVG inside a page.

Not matplotlib's: its SVG has fixed colours, where these follow the page's, light or dark, and takes ten times the bytes
for a line, where a page of a long run with many blocks shall stay below 2 MB. A chart has no state and no script; what
its lines are called is in `<title>` elements, which browsers show under the pointer, and in the page's legend.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tools.report.reading import Binned
from tools.templates import render

WIDTH, HEIGHT = 480, 270
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 8, 12, 36
_PLOT_WIDTH, _PLOT_HEIGHT = WIDTH - _LEFT - _RIGHT, HEIGHT - _TOP - _BOTTOM
_NUM_TICKS = 5
# Most marks in one place that are written out.
_MOST_WORDS = 5


@dataclass(frozen=True)
class ChartLine:
    """A line of a chart.

    Attributes:
        label: name under the pointer.
        colour: CSS.
        points: points of the line; at least one.
        dash: 0: solid; 1 and 2: other patterns.
        band: fill between the least and the most of each range.
        dots: a dot at each point, and no line.
    """

    label: str
    colour: str
    points: Binned
    dash: int = 0
    band: bool = False
    dots: bool = False


@dataclass(frozen=True)
class Mark:
    """Something that happened.

    Attributes:
        kind: "start": a line across the chart; "stage": one with its label; "skip": a triangle above; "save": a tick below.
        tokens: tokens seen when it happened.
        label: name under the pointer.
        colour: CSS.
    """

    kind: str
    tokens: float
    label: str
    colour: str


@dataclass(frozen=True)
class ChartAxis:
    """Range and scale of a chart's axis.

    Attributes:
        low, high: ends, `low` below `high`.
        logarithmic: both are above 0, and steps are factors.
    """

    low: float
    high: float
    logarithmic: bool = False

    def place(self, values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Places of values, from 0 at the low end to 1 at the high one."""
        if self.logarithmic:
            # Values that are not above 0 lie below any axis.
            return np.log(np.maximum(values, self.low * 1e-3) / self.low) / math.log(self.high / self.low)
        return (values - self.low) / (self.high - self.low)

    def ticks(self) -> list[float]:
        """Round values within the axis."""
        if self.logarithmic:
            return _logarithmic_ticks(self.low, self.high)
        step = _round_step((self.high - self.low) / _NUM_TICKS)
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return [number * step for number in range(first, last + 1)]


def chart(
    title: str,
    unit: str,
    lines: Sequence[ChartLine],
    marks: Iterable[Mark] = (),
    *,
    logarithmic: bool = False,
    from_zero: bool = False,
    start: float = 0.0,
) -> str:
    """A figure with its title; the empty text without lines.

    Args:
        title: title of the figure.
        unit: unit of the values; may be empty.
        lines: drawn in their order.
        marks: drawn below them.
        logarithmic: steps of the value axis are factors, if all values are above 0.
        from_zero: the value axis starts at 0.
        start: share of the tokens at which the chart begins.
    """
    if not lines:
        return ""
    across = _token_axis(lines, start)
    up = _value_axis(lines, across, logarithmic=logarithmic, from_zero=from_zero)
    return render(
        "chart.html",
        head=f"{title} ({unit})" if unit else title,
        width=WIDTH,
        height=HEIGHT,
        left=_LEFT,
        right=WIDTH - _RIGHT,
        top=_TOP,
        bottom=HEIGHT - _BOTTOM,
        rows=[(_TOP + _PLOT_HEIGHT * (1 - place), in_short(tick)) for tick, place in _placed(up)],
        columns=list(_columns(across)),
        marks=list(_drawn_marks(marks, across)),
        lines=[(line, _drawn(line, across, up)) for line in lines],
    )


def colour_of(number: int) -> tuple[str, int]:
    """The colour and the dash of a run: seven colours that colour-blind readers can tell apart, then dashed, dotted."""
    return f"var(--run-{number % NUM_COLOURS})", number // NUM_COLOURS % _NUM_DASHES


NUM_COLOURS = 7
_NUM_DASHES = 3


def shade_of(number: int, count: int) -> str:
    """The colour of a block: from blue to red with the depth."""
    return f"hsl({240 - round(240 * number / max(1, count - 1))} 70% var(--block-light))"


@dataclass(frozen=True)
class Key:
    """An entry of a legend: as the line of that label, colour and dash."""

    label: str
    colour: str
    dash: int = 0


def in_short(value: float) -> str:
    """A tick's label: "250M", "0.02", "1e-05"."""
    for suffix, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= size:
            return f"{value / size:.4g}{suffix}"
    return "0" if abs(value) < 1e-300 else f"{value:.3g}"


def _token_axis(lines: Sequence[ChartLine], start: float) -> ChartAxis:
    last = max(float(line.points.tokens.max()) for line in lines)
    # Room for half a dot behind the last.
    return ChartAxis(start * last, (1 + 0.02 * (1 - start)) * last or 1.0)


def _value_axis(lines: Sequence[ChartLine], across: ChartAxis, *, logarithmic: bool, from_zero: bool) -> ChartAxis:
    shown = np.concatenate([_shown_values(line, across) for line in lines])
    low, high = float(shown.min()), float(shown.max())
    if logarithmic and low > 0:
        return ChartAxis(low / 1.1, high * 1.1, logarithmic=True)
    if from_zero:
        low = min(0.0, low)
    margin = (high - low) * 0.05 or abs(high) * 0.1 or 1.0
    return ChartAxis(low if from_zero and low == 0 else low - margin, high + margin)


def _shown_values(line: ChartLine, across: ChartAxis) -> np.ndarray[Any, Any]:
    points = line.points
    shown = points.tokens >= across.low
    edges = (points.low, points.high) if line.band else (points.mean,)
    return np.concatenate([edge[shown] for edge in edges])


def _columns(across: ChartAxis) -> Iterator[tuple[float, str, str]]:
    """Place, label and anchor of each tick of tokens."""
    placed = list(_placed(across))
    for number, (tick, place) in enumerate(placed):
        # The last label would reach over the edge if it stood below its tick.
        at_edge = number == len(placed) - 1 and place > 0.95
        yield _LEFT + _PLOT_WIDTH * place, in_short(tick), "end" if at_edge else "middle"


def _placed(axis: ChartAxis) -> Iterable[tuple[float, float]]:
    ticks = axis.ticks()
    return zip(ticks, axis.place(np.array(ticks)).tolist(), strict=True)


@dataclass(frozen=True)
class _DrawnMark:
    """Marks of one kind in one place, with the words of all."""

    kind: str
    colour: str
    x: float
    path: str
    words: str


def _drawn_marks(marks: Iterable[Mark], across: ChartAxis) -> Iterator[_DrawnMark]:
    bottom = HEIGHT - _BOTTOM
    together: dict[tuple[str, int, str], list[Mark]] = {}
    for mark in marks:
        place = float(across.place(np.array(mark.tokens)))
        # One that lies past all lines, or before the start, would stand outside of the chart.
        if 0 <= place <= 1:
            together.setdefault((mark.kind, round(place * _PLOT_WIDTH), mark.colour), []).append(mark)
    for (kind, _, colour), held in together.items():
        x = _LEFT + _PLOT_WIDTH * float(across.place(np.array(held[0].tokens)))
        path = {
            "start": f"M{x:.1f} {_TOP}V{bottom}",
            "stage": f"M{x:.1f} {_TOP}V{bottom}",
            "skip": f"M{x:.1f} {_TOP + 7}l-4 -7h8z",
            "save": f"M{x:.1f} {bottom}v-7",
        }[kind]
        words = "; ".join(mark.label for mark in held[:_MOST_WORDS])
        if len(held) > _MOST_WORDS:
            words += f"; and {len(held) - _MOST_WORDS} more"
        yield _DrawnMark(kind, colour, x, path, words)


@dataclass(frozen=True)
class _Drawn:
    """A line's path, and that of the band around it, if there is one; or its dots."""

    kind: str
    path: str
    band: str = ""


def _drawn(line: ChartLine, across: ChartAxis, up: ChartAxis) -> _Drawn:
    points = line.points
    x = _PLOT_WIDTH * across.place(points.tokens)
    heights = _heights(points.mean, up)
    if line.dots or len(x) == 1:
        return _Drawn("dots", "".join(f"M{left:.1f} {top:.1f}h0" for left, top in zip(x, heights, strict=True)))
    band = ""
    if line.band and (points.high > points.low).any():
        there, back = _path(x, _heights(points.high, up)), _path(x[::-1], _heights(points.low, up)[::-1])
        band = f"M{there}L{back}z"
    return _Drawn("line", f"M{_path(x, heights)}", band)


def _heights(values: np.ndarray[Any, Any], up: ChartAxis) -> np.ndarray[Any, Any]:
    """Heights within the plot, or at most as far outside of it as it is high."""
    return _PLOT_HEIGHT * (1 - np.clip(up.place(values), -1, 2))


def _path(x: np.ndarray[Any, Any], y: np.ndarray[Any, Any]) -> str:
    return " ".join(f"{left:.1f} {top:.1f}" for left, top in zip(x.tolist(), y.tolist(), strict=True))


def _round_step(rough: float) -> float:
    """The first of 1, 2, 5, 10 times a power of ten that is not far below."""
    power = 10.0 ** math.floor(math.log10(rough))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= 0.7 * rough)


def _logarithmic_ticks(low: float, high: float) -> list[float]:
    """Powers of ten, or these and their halves and fifths, or round steps where the axis is short."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for factors in ((1,), (1, 3), (1, 2, 5)):
        ticks = [factor * 10.0**power for power in powers for factor in factors if low <= factor * 10.0**power <= high]
        if len(ticks) >= 3:
            stride = math.ceil(len(ticks) / (2 * _NUM_TICKS))
            return ticks[::stride]
    return [tick for tick in ChartAxis(low, high).ticks() if tick > 0]
