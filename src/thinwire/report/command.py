"""`thinwire report`."""

import sys
from collections.abc import Sequence
from pathlib import Path

from thinwire.report.page import ReportConfig, report
from thinwire.train.arguments import Arguments

__all__ = ["main"]


def main(args: Sequence[str]) -> int:
    """Write the page that the arguments ask for, print where it is, return the exit status."""
    parser = Arguments(
        prog="thinwire report",
        description="Make one HTML page of a run, of several side by side, or of a comparison.",
    )
    parser.add_argument(
        "runs", nargs="+", type=Path, metavar="DIR", help="--out folder of train or of compare"
    )
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="the page (default: report.html beside the runs)"
    )
    found = parser.parse_args(args)
    page = report(ReportConfig(runs=tuple(found.runs), out=found.out))
    sys.stdout.write(f"{page}\n")
    return 0
