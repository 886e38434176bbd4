"""A prediction as an SVG: the time of every algorithm over the size, both on logarithmic scales."""

from __future__ import annotations

import math
from xml.sax.saxutils import escape

from hpcrun.tuning.predict import Prediction

_WIDE, _HIGH, _LEFT, _TOP, _RIGHT, _BOTTOM = 860, 480, 80, 56, 200, 56
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f7f7f", "#000000")
_DASHES = ("", "6 3", "2 3", "8 3 2 3")


def plot_svg(prediction: Prediction) -> str:
    """Lines for the algorithms, thick where one wins; without times where only the order is known."""
    rows = prediction.rows
    sizes = [math.log2(row.size_bytes) for row in rows]
    logs = [math.log10(seconds * 1e6) for row in rows for _, seconds in row.times]
    low, high = math.floor(min(logs)), max(math.ceil(max(logs)), math.floor(min(logs)) + 1)
    span = max(sizes) - min(sizes) or 1.0

    def x(size: float) -> float:
        return _LEFT + (size - min(sizes)) / span * (_WIDE - _LEFT - _RIGHT)

    def y(seconds: float) -> float:
        share = (math.log10(seconds * 1e6) - low) / (high - low)
        return _HIGH - _BOTTOM - share * (_HIGH - _TOP - _BOTTOM)

    title = (
        f"{prediction.collective}, {prediction.library}, {prediction.nodes} nodes with"
        f" {prediction.per_node} ranks each"
    )
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDE}" height="{_HIGH}"'
        f' viewBox="0 0 {_WIDE} {_HIGH}" font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDE}" height="{_HIGH}" fill="white"/>',
        f'<text x="{_LEFT}" y="22" font-size="15">{escape(title)}</text>',
        f'<text x="{_LEFT}" y="40" fill="#555">{escape(prediction.basis[:130])}</text>',
    ]
    for power in range(low, high + 1):
        at = y(10.0**power / 1e6)
        parts.append(f'<line x1="{_LEFT}" y1="{at:.1f}" x2="{_WIDE - _RIGHT}" y2="{at:.1f}" stroke="#ddd"/>')
        if prediction.timed:
            parts.append(f'<text x="{_LEFT - 8}" y="{at + 4:.1f}" text-anchor="end">{_time(power)}</text>')
    step = max(1, len(rows) // 8)
    for row, size in list(zip(rows, sizes, strict=True))[::step]:
        parts.append(
            f'<text x="{x(size):.1f}" y="{_HIGH - _BOTTOM + 18}" text-anchor="middle">'
            f"{shown_size(row.size_bytes)}</text>"
        )
    names = sorted(
        {name for row in rows for name, _ in row.times}, key=lambda name: dict(rows[-1].times)[name]
    )
    for number, name in enumerate(names):
        style = f'stroke="{_COLOURS[number % len(_COLOURS)]}" stroke-dasharray="{_DASHES[number // len(_COLOURS) % 4]}"'
        points = [(x(size), y(dict(row.times)[name])) for row, size in zip(rows, sizes, strict=True)]
        line = " ".join(f"{a:.1f},{b:.1f}" for a, b in points)
        parts.append(f'<polyline points="{line}" fill="none" stroke-width="1.5" {style}/>')
        wins = [point for point, row in zip(points, rows, strict=True) if row.winner == name]
        parts += [
            f'<circle cx="{a:.1f}" cy="{b:.1f}" r="4" fill="{_COLOURS[number % len(_COLOURS)]}"/>'
            for a, b in wins
        ]
        at = _TOP + 18 * number
        parts.append(
            f'<line x1="{_WIDE - _RIGHT + 14}" y1="{at}" x2="{_WIDE - _RIGHT + 40}" y2="{at}" stroke-width="2" {style}/>'
            f'<text x="{_WIDE - _RIGHT + 46}" y="{at + 4}">{escape(name)}</text>'
        )
    parts.append(
        f'<text x="{_WIDE - _RIGHT + 14}" y="{_HIGH - 14}" fill="#555">dots: the fastest</text></svg>'
    )
    return "\n".join(parts) + "\n"


def _time(power: int) -> str:
    """A power of ten of microseconds."""
    for least, unit in ((6, "s"), (3, "ms")):
        if power >= least:
            return f"{10 ** (power - least)} {unit}"
    return f"{10.0**power:g} µs"


def shown_size(size_bytes: int) -> str:
    """`64K`, `1.5M`."""
    for power, unit in ((40, "T"), (30, "G"), (20, "M"), (10, "K")):
        if size_bytes >= 1 << power:
            return f"{size_bytes / (1 << power):.4g}{unit}"
    return str(size_bytes)
