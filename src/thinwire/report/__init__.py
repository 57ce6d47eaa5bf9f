"""Self-contained HTML pages about training runs and comparisons."""

from thinwire.report.command import main
from thinwire.report.compare_page import write_compare
from thinwire.report.page import ReportConfig, report, write
from thinwire.report.simulate_page import write_simulation

__all__ = ["ReportConfig", "main", "report", "write", "write_compare", "write_simulation"]
