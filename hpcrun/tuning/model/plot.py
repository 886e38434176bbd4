"""A prediction as an SVG: the time of every algorithm over the size, both on logarithmic scales."""

from __future__ import annotations

import math
from collections.abc import Iterator
from xml.sax.saxutils import escape

from hpcrun.tuning.model.predict import Prediction
from hpcrun.units import format_bytes

_WIDE, _HIGH, _LEFT, _TOP, _RIGHT, _BOTTOM = 860, 480, 80, 56, 200, 56
_KEY = _WIDE - _RIGHT + 14
"""The left edge of the key."""
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f7f7f", "#000000")
_DASHES = ("", "6 3", "2 3", "8 3 2 3")


class _PlotFrame:
    """Where a size and a time stand in the picture."""

    def __init__(self, prediction: Prediction) -> None:
        logs = [math.log10(seconds * 1e6) for row in prediction.rows for _, seconds in row.times]
        sizes = [math.log2(row.size_bytes) for row in prediction.rows]
        self.low = math.floor(min(logs))
        self.high = max(math.ceil(max(logs)), self.low + 1)
        self._first, self._span = min(sizes), max(sizes) - min(sizes) or 1.0

    def x(self, size_bytes: int) -> float:
        """From the left."""
        return _LEFT + (math.log2(size_bytes) - self._first) / self._span * (_WIDE - _LEFT - _RIGHT)

    def y(self, time_us: float) -> float:
        """From the top."""
        share = (math.log10(time_us) - self.low) / (self.high - self.low)
        return _HIGH - _BOTTOM - share * (_HIGH - _TOP - _BOTTOM)


def plot_prediction_svg(prediction: Prediction) -> str:
    """Lines for the algorithms, with a dot where one wins; no times where only the order is known."""
    frame = _PlotFrame(prediction)
    where = f"{prediction.nodes} nodes with {prediction.per_node} ranks each"
    title = f"{prediction.collective}, {prediction.library}, {where}"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDE}" height="{_HIGH}"'
            f' viewBox="0 0 {_WIDE} {_HIGH}" font-family="sans-serif" font-size="12">',
            f'<rect width="{_WIDE}" height="{_HIGH}" fill="white"/>',
            f'<text x="{_LEFT}" y="22" font-size="15">{escape(title)}</text>',
            f'<text x="{_LEFT}" y="40" fill="#555">{escape(prediction.basis[:130])}</text>',
            *_draw_axes(prediction, frame),
            *_draw_lines(prediction, frame),
            f'<text x="{_KEY}" y="{_HIGH - 14}" fill="#555">dots: the fastest</text>',
            "</svg>\n",
        ]
    )


def _draw_axes(prediction: Prediction, frame: _PlotFrame) -> Iterator[str]:
    for power in range(frame.low, frame.high + 1):
        at = frame.y(10.0**power)
        yield f'<line x1="{_LEFT}" y1="{at:.1f}" x2="{_WIDE - _RIGHT}" y2="{at:.1f}" stroke="#ddd"/>'
        if prediction.timed:
            yield f'<text x="{_LEFT - 8}" y="{at + 4:.1f}" text-anchor="end">{_time(power)}</text>'
    rows = prediction.rows
    for row in rows[:: max(1, len(rows) // 8)]:
        at, below = frame.x(row.size_bytes), _HIGH - _BOTTOM + 18
        size = format_bytes(row.size_bytes)
        yield f'<text x="{at:.1f}" y="{below}" text-anchor="middle">{size}</text>'


def _draw_lines(prediction: Prediction, frame: _PlotFrame) -> Iterator[str]:
    """The algorithms in the order that they have at the largest size."""
    for number, (name, _) in enumerate(prediction.rows[-1].times):
        colour, dash = _COLOURS[number % len(_COLOURS)], _DASHES[number // len(_COLOURS) % len(_DASHES)]
        style = f'stroke="{colour}" stroke-dasharray="{dash}"'
        points = [
            (frame.x(row.size_bytes), frame.y(dict(row.times)[name] * 1e6), row.winner == name)
            for row in prediction.rows
        ]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y, _ in points)
        yield f'<polyline points="{line}" fill="none" stroke-width="1.5" {style}/>'
        yield from (
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}"/>' for x, y, won in points if won
        )
        at = _TOP + 18 * number
        yield f'<line x1="{_KEY}" y1="{at}" x2="{_KEY + 26}" y2="{at}" stroke-width="2" {style}/>'
        yield f'<text x="{_KEY + 32}" y="{at + 4}">{escape(name)}</text>'


def _time(power: int) -> str:
    """A power of ten of microseconds."""
    for least, unit in ((6, "s"), (3, "ms")):
        if power >= least:
            return f"{10 ** (power - least)} {unit}"
    return f"{10.0**power:g} µs"
