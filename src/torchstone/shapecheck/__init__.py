"""Shapes before running: Pyrefly's reading of the code and symbolic execution, merged.

Neither runs the model on data. Pyrefly (:mod:`~torchstone.shapecheck.pyrefly`) reads types; symbolic
execution (:mod:`~torchstone.shapecheck.symbolic`) runs the model on fake tensors in a worker. Importing
this package loads no torch.
"""

from __future__ import annotations

from torchstone.shapecheck.check import check

__all__ = ["check"]
