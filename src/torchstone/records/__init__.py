"""The records that flow from room to room, and that a run keeps as its evidence.

All are frozen :class:`msgspec.Struct` values: they compare by value, encode to JSON, decode strictly
(an unknown field is an error), and give the JSON schema of ``report.json``. Times are seconds, sizes
bytes, ratios plain numbers; formatting happens in ``report/`` only. A float that cannot be stated
(a relative error against a non-finite value) is ``None``, never NaN.
"""

from __future__ import annotations

from torchstone.records.base import Record
from torchstone.records.environment import Environment, RunHeader
from torchstone.records.evidence import (
    Absent,
    Build,
    Capture,
    Comparison,
    Decision,
    Entry,
    LoadResult,
    MetricResult,
    Reason,
    Relation,
    Samples,
    VerdictEntry,
)
from torchstone.records.verdict import (
    Case,
    CaseErrors,
    Crashed,
    Failure,
    NotTried,
    OutputErrors,
    ReferenceErrors,
    TimedOut,
    Unsupported,
    Unverifiable,
    Verdict,
    Verified,
    Wrong,
)
from torchstone.records.workload import (
    Arrival,
    Dim,
    InputSpec,
    ScalarSpec,
    TensorSpec,
    WorkloadSpec,
    factor_and_dim,
)

__all__ = [
    "Absent",
    "Arrival",
    "Build",
    "Capture",
    "Case",
    "CaseErrors",
    "Comparison",
    "Crashed",
    "Decision",
    "Dim",
    "Entry",
    "Environment",
    "Failure",
    "InputSpec",
    "LoadResult",
    "MetricResult",
    "NotTried",
    "OutputErrors",
    "Reason",
    "Record",
    "ReferenceErrors",
    "Relation",
    "RunHeader",
    "Samples",
    "ScalarSpec",
    "TensorSpec",
    "TimedOut",
    "Unsupported",
    "Unverifiable",
    "Verdict",
    "VerdictEntry",
    "Verified",
    "WorkloadSpec",
    "Wrong",
    "factor_and_dim",
]
