"""What a run prints at its end."""

from collections.abc import Mapping

__all__ = ["byte_table"]


def byte_table(ledger: Mapping[str, Mapping[str, float]], steps: int) -> str:
    """Return the table of bytes per link, as printed at the end of a run."""
    head = f"{'link':<10} {'calls':>8} {'dense':>12} {'sent':>12} {'exempt':>12}"
    lines = [f"{head} {'saved':>7} {'ratio':>7}"]
    for link, t in ledger.items():
        saved = 1 - t["wire_bytes"] / t["dense_bytes"] if t["dense_bytes"] else 0.0
        lines.append(
            f"{link:<10} {int(t['calls']):>8} {_size(t['dense_bytes']):>12} "
            f"{_size(t['wire_bytes']):>12} {_size(t['exempt_bytes']):>12} "
            f"{saved:>7.1%} {t['ratio']:>6.2f}x"
        )
    if not ledger:
        lines.append("nothing was sent: one rank")
    total = sum(t["wire_bytes"] for t in ledger.values())
    lines.append(f"sent per step by rank 0: {_size(total / max(1, steps))}")
    return "\n".join(lines)


def _size(nbytes: float) -> str:
    units = ["B", "KiB", "MiB", "GiB", "TiB"]
    while nbytes >= 1024 and len(units) > 1:
        nbytes /= 1024
        units.pop(0)
    return f"{nbytes:.0f} B" if units[0] == "B" else f"{nbytes:.2f} {units[0]}"
