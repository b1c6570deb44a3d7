"""The page of ``gecko report``: the paper's figures and tables of runs and evaluations, with its published numbers."""

from gecko.experiments.report.page import write_page

__all__ = ["write_page"]
