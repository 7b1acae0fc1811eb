"""Proving right: inputs that try to break a candidate, a float64 reference, and a verdict.

* :mod:`~torchstone.verify.inputs`: which inputs; pure, loads no torch
* :mod:`~torchstone.verify.jobs`: what runs in workers: reference, candidate, judge, predict, metric
* :mod:`~torchstone.verify.compare`: errors of one output
* :mod:`~torchstone.verify.budget`: errors to verdict; pure
* :mod:`~torchstone.verify.run`: drives the two workers
"""

from __future__ import annotations

__all__: list[str] = []
