"""What the user brings: a model, example inputs, dims, traffic, labelled data and a policy.

Either a folder with a ``torchstone.toml`` beside a Python file (:func:`read`), or Python objects
(:func:`from_objects`, :class:`Workload`). Both end as the same frozen :class:`Workload`, which reaches a
worker through :func:`dump` and :func:`load`. Importing this package loads no torch.

>>> parse_dim("S", "16*k, 32..512")
Dim(name='S', low=32, high=512, multiple=16)
"""

from __future__ import annotations

from torchstone.workload.core import Workload
from torchstone.workload.dims import parse_dim
from torchstone.workload.objects import from_objects
from torchstone.workload.toml import read
from torchstone.workload.transfer import dump, load

__all__ = ["Workload", "dump", "from_objects", "load", "parse_dim", "read"]
