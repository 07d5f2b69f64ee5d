"""A line chart as SVG text, without a plotting library."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import TypeAlias

Point: TypeAlias = tuple[float, float]

# Okabe and Ito's colours, which colour-blind readers can tell apart.
_COLOURS = ("#000000", "#e69f00", "#56b4e9", "#009e73", "#d55e00", "#0072b2", "#cc79a7", "#8a7a00")
_DASHES = ("", "6 3", "2 2")
_WIDTH, _HEIGHT = 860.0, 460.0
_LEFT, _TOP, _RIGHT, _BOTTOM = 64.0, 16.0, 680.0, 412.0
_LEGEND_STEP = 20.0


@dataclass(frozen=True)
class Series:
    """One line with its name, and dots on top of it."""

    name: str
    line: tuple[Point, ...]
    dots: tuple[Point, ...] = ()


@dataclass(frozen=True)
class _Axes:
    """The ranges that are shown; x starts at 0."""

    x_end: float
    y_low: float
    y_high: float

    def place(self, point: Point) -> str:
        """Where a point is drawn, as `x,y` in pixels."""
        x = _LEFT + point[0] / self.x_end * (_RIGHT - _LEFT)
        y = _BOTTOM - (point[1] - self.y_low) / (self.y_high - self.y_low) * (_BOTTOM - _TOP)
        return f"{x:.1f},{y:.1f}"


def line_chart(
    series: Sequence[Series], *, x_label: str, y_label: str, x_unit: float = 1.0, y_top: float | None = None
) -> str:
    """SVG text of the lines with axes, ticks and a legend.

    Args:
        series: the lines; not all of them may be empty, unless there are none.
        x_label: of the horizontal axis, which starts at 0.
        y_label: of the vertical axis.
        x_unit: what one unit of the horizontal axis's ticks stands for.
        y_top: the highest y that is shown, the rest being cut off; None: all of it.
    """
    points = [point for one in series for point in (*one.line, *one.dots)] or [(1.0, 0.0), (1.0, 1.0)]
    low, high = min(y for _, y in points), max(y for _, y in points) if y_top is None else y_top
    margin = (high - low) * 0.04 or 0.5
    # The last dots stand whole inside the frame.
    axes = _Axes(max(x for x, _ in points) * 1.01, low - margin, high + margin)
    body = [
        *_grid(axes, x_unit),
        f'<text x="{(_LEFT + _RIGHT) / 2}" y="{_HEIGHT - 12}" text-anchor="middle">{escape(x_label)}</text>',
        f'<text transform="translate(16 {(_TOP + _BOTTOM) / 2}) rotate(-90)" text-anchor="middle">{escape(y_label)}</text>',
        *(text for number, one in enumerate(series) for text in _drawn(one, number, axes)),
    ]
    return "\n".join(
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH:g} {_HEIGHT:g}" font-family="sans-serif" font-size="12">',
            f'<clipPath id="frame"><rect x="{_LEFT}" y="{_TOP}" width="{_RIGHT - _LEFT}" height="{_BOTTOM - _TOP}"/></clipPath>',
            f'<rect width="{_WIDTH:g}" height="{_HEIGHT:g}" fill="#ffffff"/>',
            *body,
            "</svg>\n",
        )
    )


def _grid(axes: _Axes, x_unit: float) -> Iterator[str]:
    for tick in ticks(0.0, axes.x_end / x_unit):
        x, _, _ = axes.place((tick * x_unit, axes.y_low)).partition(",")
        yield f'<path d="M{x} {_TOP}V{_BOTTOM}" stroke="#dddddd"/><text x="{x}" y="{_BOTTOM + 18}" text-anchor="middle">{tick:g}</text>'
    for tick in ticks(axes.y_low, axes.y_high):
        y = float(axes.place((0.0, tick)).partition(",")[2])
        yield f'<path d="M{_LEFT} {y}H{_RIGHT}" stroke="#dddddd"/><text x="{_LEFT - 8}" y="{y + 4}" text-anchor="end">{tick:g}</text>'


def _drawn(one: Series, number: int, axes: _Axes) -> Iterator[str]:
    """A line, its dots and its entry in the legend."""
    colour = _COLOURS[number % len(_COLOURS)]
    stroke = f'stroke="{colour}" stroke-width="1.6" fill="none" stroke-dasharray="{_DASHES[number // len(_COLOURS) % len(_DASHES)]}"'
    path = " ".join(axes.place(point) for point in one.line)
    yield f'<polyline clip-path="url(#frame)" points="{path}" {stroke}/>'
    for point in one.dots:
        x, _, y = axes.place(point).partition(",")
        yield f'<circle clip-path="url(#frame)" cx="{x}" cy="{y}" r="3.5" fill="{colour}"/>'
    y_legend = _TOP + 12 + number * _LEGEND_STEP
    yield f'<path d="M{_RIGHT + 16} {y_legend}h24" {stroke}/><text x="{_RIGHT + 48}" y="{y_legend + 4}">{escape(one.name)}</text>'


def ticks(low: float, high: float, most: int = 8) -> list[float]:
    """Round numbers in a range, `most` + 1 of them at most: multiples of 1, 2 or 5 times a power of ten."""
    assert low < high
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
    first = math.ceil(low / step - 1e-9)
    # Rounding takes away the dust of adding floats: 0.30000000000000004.
    return [round(number * step, 12) for number in range(first, math.floor(high / step + 1e-9) + 1)]
