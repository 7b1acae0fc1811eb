"""From the records of a run to what people and machines read: terminal, HTML, JSON.

:func:`torchstone.report.collect.collect` makes the :class:`~torchstone.report.collect.Report`; each
view takes that record and nothing else::

    collect.py -> terminal.py   rich tables, 80 columns and up
               -> html/         one self-contained page
               -> schema.py     report.json and its JSON schema

Only ``format.py`` turns numbers into text, and only ``words.py`` turns verdicts into sentences.
``progress.py`` shows a run while it is going on.
"""

from __future__ import annotations
