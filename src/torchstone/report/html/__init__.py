"""The report as one self-contained HTML page: no scripts, nothing fetched.

``markup.py`` escapes and makes tables; ``scale.py`` and ``plots.py`` draw; ``verdict.py``,
``measured.py`` and ``evidence.py`` hold the page's sections, from top to bottom; ``style.css`` is
inlined.
"""

from __future__ import annotations

from torchstone.report.html.page import render

__all__ = ["render"]
