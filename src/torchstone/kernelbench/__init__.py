"""``torchstone kernelbench``: the public KernelBench suite, proved and timed on this machine.

The suite (Ouyang et al., "KernelBench: Can LLMs Write Efficient GPU Kernels?", 2025) is read from a
checkout of the user's, and nothing of it is kept here. One file a step::

    suite     which problems there are, and which are asked for
    load      a problem's model and inputs, as the suite makes them
    columns   what everything is compared with; ours: what may be promoted
    judge     right or wrong: by the suite's protocol, and against float64
    jobs      what runs in workers
    process   workers that come back when something has killed them; the pause of those that compile
    study     one problem, from its file to its result
    results   what is known already; survives a kill
    summary   figures of a level, pure
    run       all of it, in order
"""

from __future__ import annotations

from torchstone.kernelbench.run import Request, execute, gather

__all__ = ["Request", "execute", "gather"]
