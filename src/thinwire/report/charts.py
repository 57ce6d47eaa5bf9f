"""Line charts as inline SVG that stretches to any width, with ticks and labels as HTML text.

The drawing lives in a 1000 x 1000 box that is stretched to the figure; strokes keep their width
(`vector-effect`), and text stays outside of the SVG so that it is as readable on a phone as on a
desk. Points also travel as JSON for the read-out under the pointer (page.js).
"""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from thinwire.report import formats
from thinwire.report.markup import Html, el

__all__ = ["Chart", "Series", "bin_means", "draw", "is_noisy", "lines", "smoothed"]

NUM_COLOURS = 8
MAX_POINTS = 400
# Below this many values a line is drawn as it is.
SMOOTH_FROM = 40
_SIDE = 1000
_FORMATS: dict[str, Callable[[float], str]] = {
    "bytes": formats.nbytes,
    "count": formats.count,
    "number": formats.number,
    "seconds": formats.seconds,
    # Logarithmic axes: values are decimal logarithms, labels what they stand for.
    "log_count": lambda v: formats.count(10**v),
    "log_seconds": lambda v: formats.seconds(10**v),
    "log_gbit": lambda v: f"{10**v:.3g} Gbit/s",
}


@dataclass(kw_only=True, slots=True)
class Series:
    """One line of a chart.

    Attributes:
        name: its name in the legend.
        x: positions, ascending.
        y: values; None or a non-finite value leaves a gap.
        low: lower edge of a band around the line, or empty.
        high: upper edge of the band.
        colour: index of the colour; lines of one run share it over the page.
        style: "line", "faint" (raw values behind a smoothed line) or "dots".
    """

    name: str
    x: Sequence[float]
    y: Sequence[float | None]
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    colour: int = 0
    style: str = "line"


@dataclass(kw_only=True, slots=True)
class Chart:
    """A chart: title, axes and lines; formats are keys of `_FORMATS`."""

    title: str
    x_label: str
    y_label: str = ""
    x_format: str = "count"
    y_format: str = "number"
    series: list[Series] = field(default_factory=list)
    small: bool = False
    note: str = ""


@dataclass(frozen=True, slots=True)
class _Axis:
    low: float
    high: float
    ticks: tuple[float, ...]

    def place(self, value: float) -> float:
        """Return the position of a value as a fraction of the axis."""
        return (value - self.low) / (self.high - self.low)


def draw(chart: Chart) -> Html:
    """Return the chart as a figure, or a sentence where it holds no finite value."""
    points = [(x, y) for s in chart.series for x, y in zip(s.x, s.y, strict=True) if _finite(y)]
    if not points:
        return el("p", {"class": "quiet"}, f"{chart.title}: no finite values.")
    edges = [v for s in chart.series for v in (*s.low, *s.high) if _finite(v)]
    x_axis = _axis([x for x, _ in points], num_ticks=4 if chart.small else 5, tight=True)
    y_axis = _axis(
        [y for _, y in points if y is not None] + edges, num_ticks=3 + 2 * (not chart.small)
    )
    plot = el(
        "div",
        {"class": "plot"},
        _svg(chart, x_axis, y_axis),
        el("div", {"class": "cursor", "hidden": ""}),
        el("div", {"class": "tip", "hidden": ""}),
    )
    caption = [el("b", {}, chart.title)]
    if chart.y_label:
        caption.append(el("span", {"class": "quiet"}, chart.y_label))
    frame = el(
        "div",
        {"class": "frame"},
        _ticks(y_axis, chart.y_format, "bottom"),
        plot,
        _ticks(x_axis, chart.x_format, "left"),
        el("div", {"class": "xlabel"}, chart.x_label),
    )
    css = {"class": "chart small" if chart.small else "chart"}
    note = [el("p", {"class": "quiet"}, chart.note)] if chart.note else []
    head = el("figcaption", {}, *caption)
    return el("figure", css, head, frame, _legend(chart), *note, _data(chart, x_axis))


def bin_means(values: Sequence[float | None], limit: int = MAX_POINTS) -> list[float | None]:
    """Return at most `limit` means over equal windows of neighbouring values (gaps left out)."""
    width = -(-len(values) // limit)
    if width <= 1:
        return list(values)
    return [_mean(values[i : i + width]) for i in range(0, len(values), width)]


def smoothed(values: Sequence[float | None]) -> list[float | None]:
    """Return the centred moving average over a fifteenth of the values."""
    half = max(len(values) // 30, 1)
    # At the start, where losses fall fast, the window shrinks on both sides to stay centred; at
    # the end it is cut on the right only, so that the curve doesn't end on a single noisy value.
    reach = [min(half, i) for i in range(len(values))]
    return [_mean(values[i - r : i + r + 1]) for i, r in enumerate(reach)]


def lines(
    name: str, x: Sequence[float], y: Sequence[float | None], colour: int
) -> Iterator[Series]:
    """Give the thinned line of some values; noisy ones as a moving average over faint values."""
    thin_x = [v or 0.0 for v in bin_means(x)]
    if is_noisy(y):
        yield Series(name=name, x=thin_x, y=bin_means(y), colour=colour, style="faint")
        y = smoothed(y)
    yield Series(name=name, x=thin_x, y=bin_means(y), colour=colour)


def is_noisy(values: Sequence[float | None]) -> bool:
    """Return whether there are many values and they turn at more than a third of the steps."""
    known = [v for v in values if v is not None and math.isfinite(v)]
    if len(known) < SMOOTH_FROM:
        return False
    steps = [b - a for a, b in pairwise(known)]
    return sum(a * b < 0 for a, b in pairwise(steps)) > len(known) / 3


def _finite(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


def _mean(values: Sequence[float | None]) -> float | None:
    known = [v for v in values if v is not None and math.isfinite(v)]
    return math.fsum(known) / len(known) if known else None


def _axis(values: Sequence[float], num_ticks: int, *, tight: bool = False) -> _Axis:
    low, high = min(values), max(values)
    if low == high:
        pad = abs(low) * 0.1 or 1.0
        low, high = (low, high + pad) if tight else (low - pad, high + pad)
    # Values that start near zero are read against zero.
    if low > 0 and low < 0.25 * high:
        low = 0.0
    step = _nice_step((high - low) / num_ticks)
    if not tight:
        low, high = math.floor(low / step + 1e-9) * step, math.ceil(high / step - 1e-9) * step
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    # Adding 0.0 turns -0.0 into 0.0.
    return _Axis(low, high, tuple(round(i * step, 12) + 0.0 for i in range(first, last + 1)))


def _nice_step(rough: float) -> float:
    power = 10.0 ** math.floor(math.log10(rough))
    return next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= rough * 0.999)


def _svg(chart: Chart, x_axis: _Axis, y_axis: _Axis) -> Html:
    grid = [
        el("path", {"class": "grid", "d": f"M0 {_coord(1 - y_axis.place(t))}H{_SIDE}"})
        for t in y_axis.ticks
    ]
    groups = [
        el(
            "g",
            {"class": f"c{s.colour % NUM_COLOURS} {s.style}", "data-name": s.name},
            *_shapes(s, x_axis, y_axis),
        )
        for s in chart.series
    ]
    names = ", ".join(dict.fromkeys(s.name for s in chart.series))
    attrs = {
        "viewBox": f"0 0 {_SIDE} {_SIDE}",
        "preserveAspectRatio": "none",
        "role": "img",
        "aria-label": f"{chart.title} against {chart.x_label}: {names}",
    }
    return el("svg", attrs, *grid, *groups)


def _shapes(s: Series, x_axis: _Axis, y_axis: _Axis) -> list[Html]:
    def at(x: float, y: float) -> str:
        return f"{_coord(x_axis.place(x))} {_coord(1 - y_axis.place(y))}"

    shapes = []
    if s.low:
        edge = [at(x, y) for x, y in zip(s.x, s.high, strict=True)]
        edge += [at(x, y) for x, y in zip(reversed(s.x), reversed(s.low), strict=True)]
        shapes.append(el("path", {"class": "band", "d": f"M{'L'.join(edge)}Z"}))
    commands, pen = [], "M"
    for x, y in zip(s.x, s.y, strict=True):
        if y is None or not math.isfinite(y):
            pen = "M"
            continue
        # A zero-length stroke with a round cap is a dot that the stretching leaves round.
        commands.append(f"M{at(x, y)}h0" if s.style == "dots" else f"{pen}{at(x, y)}")
        pen = "L"
    if len(commands) == 1 and s.style == "line":
        commands.append("h0")
    shapes.append(el("path", {"d": "".join(commands)}))
    return shapes


def _coord(fraction: float) -> str:
    return f"{_SIDE * fraction:.1f}".removesuffix(".0")


def _ticks(axis: _Axis, fmt: str, edge: str) -> Html:
    labels = [
        el("span", {"style": f"{edge}:{100 * axis.place(t):.2f}%"}, _tick_text(axis, t, fmt))
        for t in axis.ticks
    ]
    return el("div", {"class": "yticks" if edge == "bottom" else "xticks"}, *labels)


def _tick_text(axis: _Axis, tick: float, fmt: str) -> str:
    if tick == 0 and not fmt.startswith("log_"):
        return "0"
    if fmt != "number":
        text = _FORMATS[fmt](tick)
        head, _, unit = text.partition(" ")
        head = head.rstrip("0").rstrip(".") if "." in head else head
        return f"{head} {unit}".rstrip()
    if max(abs(t) for t in axis.ticks) >= 1e5 or max(abs(t) for t in axis.ticks) < 1e-3:
        return f"{tick:.3g}".replace("e-0", "e-").replace("e+0", "e")
    step = axis.ticks[1] - axis.ticks[0] if len(axis.ticks) > 1 else abs(tick)
    decimals = next((d for d in range(7) if abs(round(step, d) - step) < step * 1e-6), 7)
    return f"{tick:,.{decimals}f}"


def _legend(chart: Chart) -> Html:
    named = {s.name: s for s in chart.series}
    if len(named) < 2:
        return Html("")
    keys = [
        el(
            "button",
            {"class": f"c{s.colour % NUM_COLOURS}", "type": "button", "aria-pressed": "true"},
            el("i", {"class": "dot"} if s.style == "dots" else {}),
            name,
        )
        for name, s in named.items()
    ]
    return el("div", {"class": "legend"}, *keys)


def _data(chart: Chart, x_axis: _Axis) -> Html:
    lines = [
        {
            "name": s.name,
            "colour": s.colour % NUM_COLOURS,
            "x": [float(f"{x:.7g}") for x in s.x],
            "y": [float(f"{y:.5g}") if y is not None and math.isfinite(y) else None for y in s.y],
        }
        for s in chart.series
        if s.style != "faint"
    ]
    data = {
        "label": chart.x_label,
        "from": x_axis.low,
        "to": x_axis.high,
        "x": chart.x_format,
        "y": chart.y_format,
        "lines": lines,
    }
    # "<" could end the script element.
    text = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    return el("script", {"type": "application/json"}, Html(text))
