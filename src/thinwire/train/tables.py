"""What a run prints at its end."""

from collections.abc import Mapping, Sequence

__all__ = ["byte_table"]


Links = Mapping[str, Mapping[str, float]]


def byte_table(ledger: Links, steps: int, ranks: Sequence[Links] = ()) -> str:
    """Return the table of bytes per link, as printed at the end of a run.

    Args:
        ledger: rank 0's.
        steps: of the run.
        ranks: every rank's; a link that rank 0 doesn't use is shown as its first user books it.
    """
    head = f"{'link':<10} {'calls':>8} {'dense':>12} {'sent':>12} {'exempt':>12}"
    lines = [f"{head} {'saved':>7} {'ratio':>7}"]
    lines += [_row(link, totals) for link, totals in ledger.items()]
    seen = set(ledger)
    for rank, other in enumerate(ranks):
        lines += [f"{_row(n, t)}  (rank {rank})" for n, t in other.items() if n not in seen]
        seen |= set(other)
    if not seen:
        lines.append("nothing was sent: one rank")
    total = sum(t["wire_bytes"] for t in ledger.values())
    lines.append(f"sent per step by rank 0: {_size(total / max(1, steps))}")
    return "\n".join(lines)


def _row(link: str, t: Mapping[str, float]) -> str:
    saved = 1 - t["wire_bytes"] / t["dense_bytes"] if t["dense_bytes"] else 0.0
    return (
        f"{link:<10} {int(t['calls']):>8} {_size(t['dense_bytes']):>12} "
        f"{_size(t['wire_bytes']):>12} {_size(t['exempt_bytes']):>12} "
        f"{saved:>7.1%} {t['ratio']:>6.2f}x"
    )


def _size(nbytes: float) -> str:
    units = ["B", "KiB", "MiB", "GiB", "TiB"]
    while nbytes >= 1024 and len(units) > 1:
        nbytes /= 1024
        units.pop(0)
    return f"{nbytes:.0f} B" if units[0] == "B" else f"{nbytes:.2f} {units[0]}"
