"""The page of one run, or of several side by side."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from thinwire.errors import RunError
from thinwire.report import formats
from thinwire.report.charts import NUM_COLOURS, draw
from thinwire.report.compare_page import write_compare
from thinwire.report.curves import extra_charts, loss_charts
from thinwire.report.load import Run, load_run
from thinwire.report.markup import Column, Html, details, document, el, join, save, table
from thinwire.report.rounds import round_table
from thinwire.report.tables import (
    byte_table,
    config_differences,
    config_tree,
    exemption_table,
    layer_table,
    name_table,
    rank_table,
)

__all__ = ["ReportConfig", "report", "write"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportConfig:
    """Make one HTML page for a run, for several side by side, or for a comparison.

    Attributes:
        runs: the --out directories of `thinwire train`, or one of `thinwire compare`.
        out: the page to write; by default report.html in the run's directory, or in the directory
            that holds the first run when there are several.
    """

    runs: tuple[Path, ...]
    out: Path | None = None


def report(config: ReportConfig) -> Path:
    """Write the page that `config` asks for and return its path.

    Raises:
        RunError: no run given, or one that cannot be read, or a page that cannot be written.
    """
    out = config.out
    if out is None and config.runs:
        first = config.runs[0]
        out = (first if len(config.runs) == 1 else first.resolve().parent) / "report.html"
    return write(list(config.runs), out or Path("report.html"))


def write(run_dirs: list[Path], out: Path) -> Path:
    """Write one self-contained page about the runs and return its path.

    Args:
        run_dirs: directories that `thinwire train` wrote; a single one of `thinwire compare`
            (with compare.json) gives the page of the comparison.
        out: the HTML file, replaced if it exists; missing directories are made.

    Raises:
        RunError: no run given, or one that cannot be read, or a page that cannot be written.

    Example:
        >>> write([Path("runs/dense-fsdp"), Path("runs/static-6bit")], Path("report.html"))
    """
    if not run_dirs:
        raise RunError("no run given: name the --out directory of one or more runs")
    if len(run_dirs) == 1 and (run_dirs[0] / "compare.json").is_file():
        return write_compare(run_dirs[0] / "compare.json", out)
    runs = [load_run(path) for path in run_dirs]
    _name_apart(runs, run_dirs)
    return save(out, _page(runs))


def _name_apart(runs: Sequence[Run], run_dirs: Sequence[Path]) -> None:
    """Give runs whose directories share a name the parent's name too, then a number."""
    shared = _shared_names(runs)
    for run, path in zip(runs, run_dirs, strict=True):
        if run.name in shared:
            run.name = f"{path.resolve().parent.name}/{run.name}"
    shared = _shared_names(runs)
    for i, run in enumerate(runs, start=1):
        if run.name in shared:
            run.name = f"{run.name} ({i})"


def _shared_names(runs: Sequence[Run]) -> set[str]:
    return {name for name, times in Counter(run.name for run in runs).items() if times > 1}


def _page(runs: Sequence[Run]) -> Html:
    single = len(runs) == 1
    title = runs[0].recipe if single else ", ".join(dict.fromkeys(run.recipe for run in runs))
    subtitle = _setting(runs[0]) if single else f"{len(runs)} runs side by side"
    head = el(
        "header",
        {},
        el("div", {"class": "mark"}, "thinwire report"),
        el("h1", {}, title),
        el("div", {"class": "quiet"}, subtitle),
    )
    evaluated = any("eval_wire" in line for run in runs for line in run.metrics)
    footer = (
        "Bytes are what one rank (rank 0) sends. Dense: what the uncompressed collectives of the "
        "same declared dtypes would have sent, under the bandwidth-optimal algorithm. "
        "kB, MB, GB are powers of 1000."
        + " The totals include what evaluation sent; the curves do not."
        * evaluated
    )
    return document(
        f"{title} · thinwire",
        head,
        _cards(runs[0]) if single else _overview(runs),
        _notes(runs),
        _curves(runs),
        _section("What crossed each link", runs, _bytes),
        _rounds(runs),
        _section("Exemptions", runs, lambda run: exemption_table(run.exemptions)),
        _layers(runs),
        el("h2", {}, "Memory"),
        name_table(runs, "memory"),
        el("h2", {}, "Configuration"),
        *([] if single else [config_differences(runs)]),
        *(details(f"All settings of {run.name}", config_tree(run.config)) for run in runs),
        el("h2", {}, "Versions"),
        name_table(runs, "versions"),
        el("footer", {}, footer),
    )


def _setting(run: Run) -> str:
    """Return on what the run ran: its folder, ranks, axes of the mesh, device and text."""
    setting = run.setting
    parts = [run.name]
    if ranks := setting.get("num_ranks"):
        axes = [f"{k} {v}" for k, v in (setting.get("mesh") or {}).items() if v != 1]
        plural = "s" * (ranks != 1)
        parts.append(f"{ranks} rank{plural}{' (' * bool(axes)}{', '.join(axes)}{')' * bool(axes)}")
    if device := setting.get("device"):
        parts.append(str(device))
    data = setting.get("data")
    if isinstance(data, dict) and "source" in data:
        parts.append(f"data {data['source']}")
    return " · ".join(parts)


def _bytes(run: Run) -> Html:
    return join([byte_table(run.ledger), rank_table(run.ledger_ranks)])


def _cards(run: Run) -> Html:
    result = run.result
    sent, dense = run.total("wire_bytes"), run.total("dense_bytes")
    bits = result.get("val_bits_per_byte")
    cards = [
        (
            "Validation loss",
            formats.number(result.get("val_loss")),
            f"{formats.number(bits)} bits per byte" if bits else "nats",
        ),
        ("Training loss", formats.number(result.get("train_loss")), "nats"),
        ("Sent by one rank", formats.nbytes(sent), f"dense: {formats.nbytes(dense)}"),
        (
            "Dense over sent",
            formats.ratio(run.ratio),
            f"{formats.nbytes(dense - sent)} saved" if dense > sent else "nothing saved",
        ),
        (
            "Wall time",
            formats.seconds(result.get("wall_s")),
            f"{formats.seconds(result.get('step_s_median'))} per step",
        ),
        (
            "Tokens",
            formats.count(result.get("tokens")),
            f"{formats.count(result.get('steps'))} steps",
        ),
    ]
    return el(
        "div",
        {"class": "cards"},
        *(
            el(
                "div",
                {"class": "card"},
                el("span", {}, label),
                el("b", {}, value),
                el("span", {}, below),
            )
            for label, value, below in cards
        ),
    )


def _overview(runs: Sequence[Run]) -> Html:
    columns = [
        Column("Run", numeric=False),
        Column("Recipe", numeric=False),
        Column("Validation loss", meaning="nats"),
        Column("Bits per byte"),
        Column("Training loss", meaning="nats"),
        Column("Sent", meaning="bytes sent by one rank"),
        Column("Dense over sent"),
        Column("Time per step", meaning="median"),
        Column("Wall time"),
        Column("Steps"),
    ]
    rows = []
    for i, run in enumerate(runs):
        key = el("i", {"class": f"key c{i % NUM_COLOURS}"})
        result = run.result
        rows.append(
            [
                join([key, run.name]),
                run.recipe,
                formats.number(result.get("val_loss")),
                formats.number(result.get("val_bits_per_byte")),
                formats.number(result.get("train_loss")),
                formats.nbytes(run.total("wire_bytes")),
                formats.ratio(run.ratio),
                formats.seconds(result.get("step_s_median")),
                formats.seconds(result.get("wall_s")),
                formats.count(result.get("steps")),
            ]
        )
    return table(columns, rows)


def _notes(runs: Sequence[Run]) -> Html:
    prefix = "{0}: " if len(runs) > 1 else ""
    texts = [prefix.format(run.name) + note for run in runs for note in run.notes]
    return join(el("p", {"class": "note", "role": "note"}, text) for text in texts)


def _curves(runs: Sequence[Run]) -> Html:
    with_steps = [run for run in runs if run.metrics]
    if not with_steps:
        return Html("")
    small = [draw(chart) for chart in extra_charts(runs)]
    return join(
        [
            el("h2", {}, "Loss"),
            el("div", {"class": "charts"}, *(draw(chart) for chart in loss_charts(runs))),
            el("h2", {}, "Course of the run") if small else Html(""),
            el("div", {"class": "charts many"}, *small),
        ]
    )


def _section(title: str, runs: Sequence[Run], body: Callable[[Run], Html]) -> Html:
    parts = [el("h2", {}, title)]
    for run in runs:
        parts += [el("h3", {}, run.name)] * (len(runs) > 1) + [body(run)]
    return join(parts)


def _rounds(runs: Sequence[Run]) -> Html:
    apart = [run for run in runs if any(isinstance(m.get("outer"), dict) for m in run.metrics)]
    if not apart:
        return Html("")
    return _section("Outer rounds", apart, lambda run: round_table(run.metrics))


def _layers(runs: Sequence[Run]) -> Html:
    measured = [run for run in runs if run.layer_errors]
    if not measured:
        return Html("")
    return _section("Error per layer", measured, lambda run: layer_table(run.layer_errors))
