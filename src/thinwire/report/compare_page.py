"""The page of a comparison, made from the compare.json of `thinwire compare`."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from thinwire.errors import RunError
from thinwire.report import formats
from thinwire.report.charts import NUM_COLOURS, Chart, Series, draw
from thinwire.report.load import read_json_object
from thinwire.report.markup import Column, Html, document, el, join, save, table

__all__ = ["write_compare"]

FORMAT = "thinwire.compare/1"
_AXES = {
    "step": ("steps", "steps", "count"),
    "tokens": ("tokens", "tokens", "count"),
    "wire_bytes": ("bytes sent", "bytes sent by one rank", "bytes"),
}
_MEASURES = {"val_loss": "Validation loss", "train_loss": "Training loss"}
_VERDICT_CLASSES = {"equivalent": "good", "better": "good", "worse": "bad"}


def write_compare(compare_json: Path, out: Path | None = None) -> Path:
    """Write the page of a comparison and return its path.

    Args:
        compare_json: what `thinwire compare` wrote.
        out: the HTML file; by default compare.html beside the JSON.

    Raises:
        RunError: the JSON is missing, unreadable or of another format, or the page cannot be
            written.
    """
    data = read_json_object(compare_json)
    if data.get("format") != FORMAT:
        raise RunError(
            f"{compare_json} is not a comparison of format {FORMAT}: choose a compare.json"
        )
    try:
        page = _page(data)
    except (KeyError, TypeError, AttributeError) as error:
        raise RunError(
            f"{compare_json} lacks a part of {FORMAT} ({error!r}): make it again"
        ) from None
    return save(out or compare_json.with_name("compare.html"), page)


def _page(data: Mapping[str, Any]) -> Html:
    arms, settings = data["arms"], data["settings"]
    title = f"{arms[0]['name']} against {len(arms) - 1} other{'s' * (len(arms) > 2)}"
    if len(arms) == 2:
        title = f"{arms[1]['name']} against {arms[0]['name']}"
    if len(arms) == 1:
        title = arms[0]["name"]
    subtitle = (
        f"{len(settings['seeds'])} seeds, {settings['steps']:,} steps, {settings['nproc']} ranks, "
        f"data {settings['data']}, margin {100 * settings['margin']:g} %"
    )
    head = el(
        "header",
        {},
        el("div", {"class": "mark"}, "thinwire compare"),
        el("h1", {}, title),
        el("div", {"class": "quiet"}, subtitle),
    )
    return document(
        f"{title} · thinwire",
        head,
        _failures(data["failures"]),
        _losses(data),
        _verdicts(data),
        el("h2", {}, "Training loss"),
        el("div", {"class": "charts three"}, *(draw(_chart(arms, axis)) for axis in _axes(arms))),
        el("h2", {}, "Every run"),
        _runs(data),
        el("h2", {}, "Versions"),
        _versions(data["versions"]),
        el("footer", {}, _reading(data)),
    )


def _failures(failures: Sequence[Mapping[str, Any]]) -> Html:
    return join(
        el(
            "p",
            {"class": "note", "role": "note"},
            f"{f['arm']}, seed {f['seed']}, failed: {f['message']}",
        )
        for f in failures
    )


def _losses(data: Mapping[str, Any]) -> Html:
    columns = [
        Column("Arm", numeric=False),
        Column("Seeds"),
        Column(f"{_MEASURES[data['measure']]} ± s.e.", meaning="mean over seeds, nats"),
        Column("Difference", meaning=f"mean paired difference to {data['reference']}, nats"),
        Column("95 % interval", meaning="Student's t over the paired differences"),
        Column("Verdict", numeric=False),
        Column("Sent", meaning="bytes sent by one rank, mean over seeds"),
        Column("Ratio", meaning="dense over sent"),
        Column("Time per step", meaning="mean over seeds of the median step"),
    ]
    return table(columns, [_loss_row(arm, i) for i, arm in enumerate(data["arms"])])


def _loss_row(arm: Mapping[str, Any], colour: int) -> list[str]:
    difference = arm["difference"]
    interval, verdict = formats.NONE, Html("–")
    if difference:
        verdict = el(
            "span",
            {"class": _VERDICT_CLASSES.get(difference["verdict"], "")},
            difference["verdict"],
        )
        if difference["low"] is not None:
            interval = f"{_signed(difference['low'])} to {_signed(difference['high'])}"
    return [
        _key(arm["name"], colour),
        str(len(arm["seeds"])),
        _with_error(arm["loss"]),
        _signed(difference["mean"]) if difference else formats.NONE,
        interval,
        verdict,
        formats.nbytes(arm["bytes"]["wire"]),
        formats.ratio(arm["bytes"]["ratio"]),
        formats.seconds(arm["step_s_median"]),
    ]


def _unbroken(text: str) -> str:
    """Return text in which no line ends between a number and its per cent sign."""
    return text.replace(" %", "\u00a0%")


def _signed(value: float) -> str:
    return f"{value:+.4f}".replace("-", "−")


def _with_error(loss: Mapping[str, Any]) -> str:
    error = loss["std_err"]
    return f"{loss['mean']:.4f}" + ("" if error is None else f" ± {error:.4f}")


def _key(name: str, colour: int) -> Html:
    return join([el("i", {"class": f"key c{colour % NUM_COLOURS}"}), name])


def _verdicts(data: Mapping[str, Any]) -> Html:
    lines = [
        el("p", {"class": "wide"}, el("b", {}, arm["name"]), _unbroken(f" is {arm['words']}."))
        for arm in data["arms"]
        if arm["words"]
    ]
    if not lines and len(data["arms"]) > 0:
        lines = [
            el(
                "p",
                {"class": "quiet"},
                f"Nothing to compare: no run of {data['reference']} and another arm share a seed.",
            )
        ]
    return join(lines)


def _axes(arms: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the axes on which anything moves: a run on one rank sends no bytes."""
    return [axis for axis in _AXES if any(any(arm["curve"][axis]) for arm in arms)]


def _chart(arms: Sequence[Mapping[str, Any]], axis: str) -> Chart:
    what, x_label, x_format = _AXES[axis]
    chart = Chart(title=f"Loss against {what}", y_label="nats", x_label=x_label, x_format=x_format)
    for i, arm in enumerate(arms):
        curve = arm["curve"]
        several = len(arm["seeds"]) > 1
        chart.series.append(
            Series(
                name=arm["name"],
                x=curve[axis],
                y=curve["mean"],
                low=curve["low"] if several else (),
                high=curve["high"] if several else (),
                colour=i,
            )
        )
    window = max(arm["curve"]["window"] for arm in arms)
    averaged = f"; each point is a mean over {window} steps" if window > 1 else ""
    chart.note = f"Line: mean over seeds. Band: lowest to highest seed{averaged}."
    return chart


def _runs(data: Mapping[str, Any]) -> Html:
    seeds = data["settings"]["seeds"]
    columns = [Column("Arm", numeric=False), *(Column(f"Seed {seed}") for seed in seeds)]
    rows = []
    for i, arm in enumerate(data["arms"]):
        values = dict(zip(arm["seeds"], arm["loss"]["values"], strict=True))
        rows.append(
            [_key(arm["name"], i), *(formats.number(values.get(seed), 5) for seed in seeds)]
        )
    return table(columns, rows)


def _versions(versions: Sequence[Mapping[str, Any]]) -> Html:
    if not versions:
        return el("p", {"class": "quiet"}, "Not recorded.")
    names = list(dict.fromkeys(name for found in versions for name in found))
    rows = [[name, *(str(found.get(name, formats.NONE)) for found in versions)] for name in names]
    columns = [Column("", numeric=False)] * (1 + len(versions))
    parts = [table(columns, rows)]
    if len(versions) > 1:
        text = (
            "The runs were made with different versions; their losses may differ for that reason."
        )
        parts.insert(0, el("p", {"class": "note"}, text))
    return join(parts)


def _reading(data: Mapping[str, Any]) -> str:
    margin = f"{100 * data['margin']:g} %"
    return (
        "Runs are paired by seed: one seed, one data order, for all arms. "
        "Equivalent: two one-sided t-tests (each at 5 %) reject a true difference beyond "
        f"{margin} of the reference's mean loss. Worse, better: not shown equivalent, and the "
        "95 % interval excludes zero. Undecided: neither. "
        "Bytes are what one rank sends; dense is what the uncompressed collectives would have sent."
    )
