"""From results to the paper's tables and figures, the paper's numbers and measured ones side by side."""

from patchcure.report.figures import plot, plot_all
from patchcure.report.measured import Measured, read
from patchcure.report.paper import PAPER
from patchcure.report.sheet import Sheet, write
from patchcure.report.tables import MEASURED, table

__all__ = ["MEASURED", "PAPER", "Measured", "Sheet", "plot", "plot_all", "read", "table", "write"]
