"""The light tracer: a function to one graph for all sizes, without running it, or a refusal by its line.

::

    function.py -> recorder.py   one run on fake tensors, by operation
                -> make_fx       another, at other sizes (compat/tracing.py)
                -> merge.py      both to one graph, numbers to expressions of sizes (sizes.py)
                -> purity.py     whether its operations only compute
                -> effects.py    what else the function did: reads, writes, output, randomness
    program.py                   what comes of it
"""

from __future__ import annotations

from torchstone.capture.tracer.function import Refusal, attempt, trace
from torchstone.capture.tracer.program import Program

__all__ = ["Program", "Refusal", "attempt", "trace"]
