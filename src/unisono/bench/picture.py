"""A picture of what was measured: a bar a system, with the spread of its rounds, as SVG."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from unisono.bench.rounds import Row

_LEFT, _BAR, _LINE, _WIDTH = 190, 14, 20, 520
_OURS, _OTHERS, _PLAIN = "#2b6cb0", "#a0aec0", "#4a5568"


def draw(rows: Sequence[Row], title: str) -> str:
    """Returns the picture.

    Bars begin at 0 and are to scale inside of one workload; those of more than 4 times plain are cut off.

    Args:
        rows: In the order of the bars.
        title: Machine and versions.
    """
    parts, y = [], 50
    for workload in dict.fromkeys(row.workload for row in rows):
        some = [row for row in rows if row.workload == workload]
        top = min(4.0, max(row.spread[1] for row in some)) * 1.05
        parts.append(f'<text x="10" y="{y}" font-weight="bold">{escape(workload)}</text>')
        y += 8
        for row in some:
            y += _LINE
            parts += _bar(row, y, _WIDTH / top)
        one = _LEFT + _WIDTH / top
        parts.append(
            f'<line x1="{one:.1f}" x2="{one:.1f}" y1="{y - _LINE * len(some) + 4}" y2="{y + 4}" '
            'stroke="#c53030" stroke-dasharray="3 3"/>'
        )
        y += 2 * _LINE
    nproc = rows[0].nproc if rows else 0
    head = f"Seconds a step as a ratio to the same step without communication, {nproc} processes"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{_LEFT + _WIDTH + 150}" height="{y}" '
            'font-family="sans-serif" font-size="12">',
            '<rect width="100%" height="100%" fill="white"/>',
            f'<text x="10" y="18" font-size="14">{escape(head)}</text>',
            f'<text x="10" y="34" fill="#718096">{escape(title)}</text>',
            *parts,
            "</svg>",
        ]
    )


def _bar(row: Row, y: int, scale: float) -> list[str]:
    color = _OURS if row.system.startswith("unisono") else _PLAIN if row.system == "plain" else _OTHERS
    length, low, high = (min(value * scale, _WIDTH) for value in (row.ratio_to_plain, *row.spread))
    cut = " ..." if row.ratio_to_plain * scale > _WIDTH else ""
    middle, milliseconds = y - _BAR / 2 + 3, 1e3 * row.step_s
    time = f"{milliseconds:,.0f}" if milliseconds >= 100 else f"{milliseconds:.3g}"
    return [
        f'<text x="{_LEFT - 8}" y="{y}" text-anchor="end">{escape(row.system)}</text>',
        f'<rect x="{_LEFT}" y="{y - _BAR + 3}" width="{length:.1f}" height="{_BAR}" fill="{color}"/>',
        f'<line x1="{_LEFT + low:.1f}" x2="{_LEFT + high:.1f}" y1="{middle}" y2="{middle}" stroke="black"/>',
        f'<text x="{_LEFT + max(length, high) + 6:.1f}" y="{y}">{row.ratio_to_plain:.2f}{cut}  ({time} ms)</text>',
    ]
