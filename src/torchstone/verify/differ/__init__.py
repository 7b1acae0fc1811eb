"""The first operation that diverges: two traces compared, or an engine bisected.

* :mod:`~torchstone.verify.differ.record`: a run to a :class:`~torchstone.verify.differ.trace.Trace`
* :mod:`~torchstone.verify.differ.store`: traces to and from files
* :mod:`~torchstone.verify.differ.align`: which operation of one stands for which of the other; NumPy
* :mod:`~torchstone.verify.differ.replay`: operations again, in float64 and in their own format
* :mod:`~torchstone.verify.differ.measure`: one value against what it should be
* :mod:`~torchstone.verify.differ.search`: the first that its inputs do not explain
* :mod:`~torchstone.verify.differ.explain`: what is different there
* :mod:`~torchstone.verify.differ.parts`, :mod:`~torchstone.verify.differ.bisect`: engines
* :mod:`~torchstone.verify.differ.region`, :mod:`~torchstone.verify.differ.repro`: a file that shows it
* :mod:`~torchstone.verify.differ.between`, :mod:`~torchstone.verify.differ.fused`: the records
"""

from __future__ import annotations

__all__: list[str] = []
