"""The page of a simulation: time against ranks and against link speed, and where it goes."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from thinwire.report import formats
from thinwire.report.charts import Chart, Series, draw
from thinwire.report.markup import Column, Html, document, el, save, table

__all__ = ["write_simulation"]


def write_simulation(result: Mapping[str, Any], out: Path) -> Path:
    """Write the page of what `thinwire simulate` found and return its path.

    Args:
        result: `by_ranks` and `by_link` (one sweep per arm), `scaling`, `tokens` (None: no hours),
            `largest`, `notes` (lines to show).
        out: the HTML file.

    Raises:
        RunError: the page cannot be written.
    """
    return save(out, _page(result))


def _page(result: Mapping[str, Any]) -> Html:
    arms, links = result["by_ranks"], result["by_link"]
    ranks = f"{arms[0]['at'][0]:.0f} to {result['largest']} ranks"
    title = f"{' · '.join(arm['name'] for arm in arms)} on {ranks}"
    timed = result["tokens"] is not None
    whole = f", {formats.count(result['tokens'])} tokens in all" if timed else ""
    subtitle = f"{result['scaling']} scaling{whole}"
    head = el(
        "header",
        {},
        el("div", {"class": "mark"}, "thinwire simulate"),
        el("h1", {}, title),
        el("div", {"class": "quiet"}, subtitle),
        *(el("p", {}, note) for note in result["notes"]),
    )
    charts = [
        _chart(arms, "Time of a step", "ranks", "step_s", log=True),
        _chart(arms, "Scaling efficiency", "ranks", "efficiency"),
    ]
    if timed:
        charts.append(_chart(arms, "Hours of the run", "ranks", "hours", log=True))
    if links:
        speed = f"speed of the slowest link, {result['largest']} ranks"
        charts.append(_chart(links, "Time of a step", speed, "step_s", log=True, x="log_gbit"))
        charts.append(_chart(links, "Waiting for messages", speed, "waiting_s", x="log_gbit"))
    return document(
        f"{title} · thinwire",
        head,
        el("h2", {}, "Over ranks and link speeds"),
        el("div", {"class": "charts"}, *(draw(chart) for chart in charts)),
        el("h2", {}, "Every number of ranks"),
        _table(arms, "Ranks"),
        *([el("h2", {}, "Every link speed"), _table(links, "Gbit/s")] if links else []),
        el("footer", {}, _FOOTER),
    )


_FOOTER = (
    "Predicted, not measured. Efficiency is tokens per second and rank over those of the first "
    "number of ranks; speed-up is the dense run's step over an arm's at the same link speed. "
    "Waiting counts messages that the computation does not hide, and other pipeline stages. Both "
    "axes of times are logarithmic."
)


def _chart(
    arms: Sequence[Mapping[str, Any]],
    title: str,
    x_label: str,
    key: str,
    *,
    log: bool = False,
    x: str = "log_count",
) -> Chart:
    scale = 3600.0 if key == "hours" else 1.0
    series = [
        Series(
            name=arm["name"],
            x=[math.log10(at) for at in arm["at"]],
            y=[_logarithm(scale * y) if log else y for y in arm[key]],
            colour=index,
        )
        for index, arm in enumerate(arms)
    ]
    linear = "seconds" if key.endswith("_s") else "number"
    return Chart(
        title=title,
        x_label=x_label,
        x_format=x,
        y_format="log_seconds" if log else linear,
        series=series,
    )


def _logarithm(value: float) -> float | None:
    return math.log10(value) if value > 0 else None


def _table(arms: Sequence[Mapping[str, Any]], place: str) -> Html:
    over_links = "speedup" in arms[0]
    columns = [
        Column("Arm", numeric=False),
        Column(place),
        Column("Step"),
        Column("Compute", meaning="arithmetic of the slowest rank"),
        Column("Coding", meaning="encoding and decoding"),
        Column("Waiting", meaning="for messages and other stages"),
        Column("Tokens/s", meaning="of all ranks"),
        Column("Speed-up", meaning="over the dense run") if over_links else Column("Efficiency"),
        *([Column("Hours")] if arms[0]["hours"] else []),
        Column("Sent", meaning="bytes of a rank and step"),
    ]
    rows = [_row(arm, i) for arm in arms for i in range(len(arm["at"]))]
    return table(columns, rows)


def _row(arm: Mapping[str, Any], i: int) -> list[str]:
    return [
        arm["name"],
        f"{arm['at'][i]:,g}",
        *(formats.seconds(arm[key][i]) for key in ("step_s", "compute_s", "coding_s", "waiting_s")),
        formats.count(arm["tokens_per_s"][i]),
        f"{arm['speedup'][i]:.2f}x" if "speedup" in arm else f"{100 * arm['efficiency'][i]:.1f} %",
        *(formats.seconds(3600 * hours) for hours in arm["hours"][i : i + 1]),
        formats.nbytes(arm["sent_bytes"][i]),
    ]
