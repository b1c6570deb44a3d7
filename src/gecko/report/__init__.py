"""One page from runs and evaluations: the paper's figures and tables, with the published numbers beside them."""

from gecko.report.page import write_page

__all__ = ["write_page"]
