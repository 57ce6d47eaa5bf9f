"""The outer rounds of a run whose replicas train apart: who was in the mean, and who was not."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from thinwire.report import formats
from thinwire.report.markup import Column, Html, el, join, table

__all__ = ["round_table"]


def round_table(metrics: Sequence[Mapping[str, Any]]) -> Html:
    """Return a line per replica: rounds in the mean, rounds left out and why, tokens.

    Args:
        metrics: lines of metrics.jsonl; those of steps that ended a round have "outer".
    """
    rounds = [line["outer"] for line in metrics if isinstance(line.get("outer"), dict)]
    committed = [r for r in rounds if r.get("committed")]
    aborted = Counter(str(r.get("why")) for r in rounds if not r.get("committed"))
    inside, tokens = Counter[str](), Counter[str]()
    reasons: dict[str, Counter[str]] = defaultdict(Counter)
    for found in committed:
        inside.update(str(r) for r in found.get("accepted", ()))
        tokens.update({str(r): n for r, n in found.get("tokens", {}).items()})
        for replica, why in found.get("left_out", {}).items():
            reasons[str(replica)][why] += 1
    columns = [
        Column("Replica"),
        Column("Rounds in the mean", meaning=f"of {len(committed)} committed"),
        Column("Left out"),
        Column("Tokens"),
        Column("Why left out", numeric=False),
    ]
    rows = [
        [
            replica,
            f"{inside[replica]:,}",
            f"{reasons[replica].total():,}",
            formats.count(tokens[replica]),
            "; ".join(f"{why} ({times}x)" for why, times in reasons[replica].most_common()) or "–",
        ]
        for replica in sorted({*inside, *reasons}, key=int)
    ]
    text = f"{len(committed)} rounds committed"
    if aborted:
        text += ", " + "; ".join(f"{n} aborted: {why}" for why, n in aborted.most_common())
    return join([el("p", {"class": "quiet"}, f"{text}."), table(columns, rows)])
