"""The page of an inspection: what a model is, where it breaks, which shapes hold.

``pieces.py`` holds what several sections share and ``draw.py`` the drawings of their own; ``top.py``,
``work.py``, ``machine.py``, ``compiler.py``, ``shapes.py`` and ``rest.py`` are the sections, from top to
bottom.
"""

from __future__ import annotations

from torchstone.report.html.inspection.page import render

__all__ = ["render"]
