"""The tables of a run: bytes per link, exemptions, layer errors, memory, configuration."""

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from thinwire.report import formats
from thinwire.report.load import Run, finite
from thinwire.report.markup import Column, Html, details, el, join, table

__all__ = [
    "byte_table",
    "config_differences",
    "config_tree",
    "exemption_table",
    "layer_table",
    "name_table",
    "rank_table",
]

_MAX_LAYERS = 12
_TIMES = {"encode_s": "Encoding", "decode_s": "Decoding", "wait_s": "Waiting"}


def byte_table(ledger: Mapping[str, Mapping[str, float]]) -> Html:
    """Return calls, bytes and ratios of each link, with a total, and seconds where timed."""
    if not ledger:
        return el("p", {"class": "quiet"}, "Nothing was sent: one rank, or no ledger attached.")
    timed = [key for key in _TIMES if any(t.get(key) for t in ledger.values())]
    columns = [
        Column("Link", numeric=False),
        Column("Calls"),
        Column(
            "Dense", meaning="what the uncompressed collective of the same dtype would have sent"
        ),
        Column("Sent", meaning="payload, scales, indices, padding and exempt tensors"),
        Column("Of it exempt", meaning="sent uncompressed by a declared exemption"),
        Column("Ratio", meaning="dense over sent"),
        Column("Without exempt", meaning="dense over sent of the part that is not exempt"),
        *(Column(_TIMES[key]) for key in timed),
    ]
    keys = ("calls", "dense_bytes", "wire_bytes", "exempt_bytes", *timed)
    total = {key: sum(t.get(key, 0) for t in ledger.values()) for key in keys}
    lines = dict(ledger) | ({"all links": total} if len(ledger) > 1 else {})
    rows = [_byte_row(link, t, timed) for link, t in lines.items()]
    return table(columns, rows, total=len(ledger) > 1)


def rank_table(ledgers: Sequence[Mapping[str, Mapping[str, float]]]) -> Html:
    """Return what each rank sent per link, or a sentence where all ranks sent the same."""
    if len(ledgers) < 2:
        return Html("")
    links = list(dict.fromkeys(link for ledger in ledgers for link in ledger))
    sent = [[ledger.get(link, {}).get("wire_bytes", 0) for link in links] for ledger in ledgers]
    if all(row == sent[0] for row in sent):
        return el("p", {"class": "quiet"}, f"Each of the {len(ledgers)} ranks sent the same.")
    columns = [Column("Rank", numeric=False), *map(Column, links), Column("All links")]
    rows = [[str(rank), *map(_exact, row), _exact(sum(row))] for rank, row in enumerate(sent)]
    return details(f"Sent by each of the {len(ledgers)} ranks", table(columns, rows), is_open=True)


def _byte_row(link: str, totals: Mapping[str, float], timed: Sequence[str]) -> list[str]:
    dense, wire, exempt = (totals.get(f"{k}_bytes", 0) for k in ("dense", "wire", "exempt"))
    rest = wire - exempt
    return [
        link,
        f"{totals.get('calls', 0):,.0f}",
        _exact(dense),
        _exact(wire),
        _exact(exempt),
        formats.ratio(dense / wire if wire else None),
        formats.ratio((dense - exempt) / rest if rest else None),
        *(formats.seconds(totals.get(key) or None) for key in timed),
    ]


def _exact(value: float) -> Html:
    """Return bytes for reading, with the exact number as the tooltip."""
    return el("span", {"title": f"{value:,.0f} bytes"}, formats.nbytes(value))


def exemption_table(exemptions: Sequence[Mapping[str, Any]]) -> Html:
    """Return exemptions summed by link and reason, and each tensor in a collapsible list."""
    if not exemptions:
        return el("p", {"class": "quiet"}, "None: no tensor was exempt from compression.")
    groups: dict[tuple[str, str], list[float]] = defaultdict(list)
    for e in exemptions:
        groups[str(e.get("link", "")), str(e.get("reason", ""))].append(e["nbytes"])
    columns = [
        Column("Link", numeric=False),
        Column("Reason", numeric=False),
        Column("Tensors"),
        Column("Size", meaning="uncompressed size on one rank, once"),
    ]
    rows = [
        [link, reason, f"{len(sizes):,}", formats.nbytes(sum(sizes))]
        for (link, reason), sizes in sorted(groups.items())
    ]
    tensors = [
        [
            str(e.get("name", "")),
            str(e.get("link", "")),
            str(e.get("reason", "")),
            formats.nbytes(e["nbytes"]),
        ]
        for e in sorted(exemptions, key=lambda e: -e["nbytes"])
    ]
    each = table(
        [
            Column("Tensor", numeric=False),
            Column("Link", numeric=False),
            Column("Reason", numeric=False),
            Column("Size"),
        ],
        tensors,
    )
    return join([table(columns, rows), details(f"All {len(tensors)} tensors", each)])


def layer_table(errors: Mapping[str, float]) -> Html:
    """Return the parameters with the largest relative errors."""
    largest = sorted(errors.items(), key=lambda item: -item[1])[:_MAX_LAYERS]
    rows = [[name, formats.number(error, 3)] for name, error in largest]
    middle = formats.number(median(errors.values()), 3)
    text = f"Largest {len(rows)} of {len(errors)}; the median is {middle}."
    columns = [Column("Parameter", numeric=False), Column("Relative error")]
    return join([el("p", {"class": "quiet"}, text), table(columns, rows)])


def name_table(runs: Sequence[Run], part: str) -> Html:
    """Return a mapping of each run (`versions` or `memory`) with a column per run."""
    parts: list[Mapping[str, Any]] = [getattr(run, part) for run in runs]
    keys = dict.fromkeys(key for values in parts for key in values)
    names = [""] if len(runs) == 1 else [run.name for run in runs]
    columns = [Column("", numeric=False), *(Column(name, numeric=False) for name in names)]
    rows = [[key, *(_value(key, values.get(key)) for values in parts)] for key in keys]
    return table(columns, rows) if rows else el("p", {"class": "quiet"}, "Not recorded.")


def config_tree(config: Mapping[str, Any]) -> Html:
    """Return the configuration as a collapsible tree."""
    return el("div", {"class": "tree"}, *(_branch(key, value) for key, value in config.items()))


def config_differences(runs: Sequence[Run]) -> Html:
    """Return the settings in which the runs differ, a column per run."""
    flat = [_flatten(run.config) for run in runs]
    keys = dict.fromkeys(key for settings in flat for key in settings)
    rows = [
        [key, *(settings.get(key, formats.NONE) for settings in flat)]
        for key in keys
        if len({settings.get(key) for settings in flat}) > 1
    ]
    if not rows:
        return el("p", {"class": "quiet"}, "The configurations are equal.")
    columns = [Column("Setting", numeric=False), *(Column(run.name, numeric=False) for run in runs)]
    return table(columns, rows)


def _branch(key: str, value: Any) -> Html:
    if isinstance(value, dict) and value:
        return details(key, *(_branch(k, v) for k, v in value.items()), is_open=True)
    return el("div", {}, el("span", {}, f"{key}: "), _plain(value))


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    flat: dict[str, str] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            flat |= _flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = _plain(value)
    return flat


def _value(key: str, value: Any) -> str:
    if value is None:
        return formats.NONE
    if not finite(value):
        return _plain(value)
    return formats.nbytes(value) if key.endswith("_bytes") else formats.count(value)
