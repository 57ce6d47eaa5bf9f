"""Turns the metrics of runs into charts: loss against steps and bytes, then every other number."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from thinwire.report.charts import NUM_COLOURS, Chart, Series, lines
from thinwire.report.load import KNOWN_KEYS, Run, finite

__all__ = ["extra_charts", "loss_charts"]

_TITLES = {"lr": "Learning rate", "step_s": "Time per step"}
_FORMATS = {"_bytes": "bytes", "_s": "seconds", "_tokens": "count"}


def loss_charts(runs: Sequence[Run]) -> list[Chart]:
    """Return the charts of loss against steps and against bytes sent (where any were)."""
    charts = [_loss_chart(runs, "steps", "count")]
    if any(line.get("wire") for run in runs for line in run.metrics):
        charts.append(_loss_chart(runs, "bytes sent by one rank", "bytes"))
    return charts


def extra_charts(runs: Sequence[Run]) -> list[Chart]:
    """Return a small chart per number that the metrics hold beyond loss and tokens."""
    keys = dict.fromkeys(
        k for run in runs for line in run.metrics for k in line if k not in KNOWN_KEYS
    )
    charts = [_extra_chart(runs, key, _title(key), _format(key)) for key in keys]
    charts.append(_extra_chart(runs, "wire", "Bytes sent per step", "bytes"))
    return [chart for chart in charts if chart.series]


def _loss_chart(runs: Sequence[Run], x_label: str, x_format: str) -> Chart:
    chart = Chart(
        title=f"Loss against {'steps' if x_format == 'count' else 'bytes sent'}",
        x_label=x_label,
        y_label="nats",
        x_format=x_format,
    )
    for i, run in enumerate(runs):
        x = [line["step"] for line in run.metrics]
        if x_format == "bytes":
            x = list(accumulate(sum(_numbers(line.get("wire")).values()) for line in run.metrics))
        name = "training" if len(runs) == 1 else run.name
        chart.series += lines(name, x, _floats([line.get("loss") for line in run.metrics]), i)
        val = [
            (at, line["val_loss"])
            for at, line in zip(x, run.metrics, strict=True)
            if "val_loss" in line
        ]
        if val:
            colour = 1 if len(runs) == 1 else i
            name = "validation" if len(runs) == 1 else f"{run.name}, validation"
            val_x, val_y = zip(*val, strict=True)
            chart.series.append(
                Series(name=name, x=val_x, y=_floats(val_y), colour=colour, style="dots")
            )
    if any(s.style == "faint" for s in chart.series):
        chart.note = "Bold: moving average over a fifteenth of the steps. Faint: as logged."
    return chart


def _extra_chart(runs: Sequence[Run], key: str, title: str, fmt: str) -> Chart:
    """Draw `key` of each run: a number gives a line, a mapping a line per entry."""
    chart = Chart(title=title, x_label="steps", y_format=fmt, small=True)
    total = drawn = 0
    for i, run in enumerate(runs):
        entries = dict.fromkeys(k for line in run.metrics for k in _numbers(line.get(key)))
        total += len(entries)
        for entry in entries:
            if drawn == NUM_COLOURS:
                break
            points = [(line["step"], _numbers(line.get(key)).get(entry)) for line in run.metrics]
            x, y = zip(*[p for p in points if p[1] is not None], strict=True)
            names = [run.name] * (len(runs) > 1) + [entry] * bool(entry)
            # Runs keep their colour over the page where they have one line each.
            colour = i if len(entries) == 1 else drawn
            chart.series += lines(", ".join(names) or key, x, y, colour)
            drawn += 1
    if total > drawn:
        chart.note = f"The first {drawn} of {total} lines."
    return chart


def _numbers(value: Any) -> dict[str, float]:
    """Return the finite numbers in a metrics value; a bare number stands under the empty name."""
    entries = value if isinstance(value, dict) else {"": value}
    return {k: v for k, v in entries.items() if finite(v)}


def _floats(values: Sequence[Any]) -> list[float | None]:
    return [v if finite(v) else None for v in values]


def _title(key: str) -> str:
    words = key.replace("_", " ").replace("/", ": ")
    return _TITLES.get(key, words[:1].upper() + words[1:])


def _format(key: str) -> str:
    return next((fmt for suffix, fmt in _FORMATS.items() if key.endswith(suffix)), "number")
