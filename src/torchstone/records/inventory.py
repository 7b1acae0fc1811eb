"""What a workload is before anything is optimized: sizes, work, time, coverage and cost.

Work is counted, not timed: FLOPs and bytes follow from shapes. ``Work`` of the traffic's mix is a mean a
request, weighted by how often each size was asked for, so its counts are not whole numbers.
"""

from __future__ import annotations

from typing import Literal

from torchstone.records.base import Record
from torchstone.records.evidence import Absent

__all__ = [
    "Bandwidth",
    "Bounds",
    "CallTimes",
    "Coverage",
    "DimMix",
    "DtypeCount",
    "Inventory",
    "LineUse",
    "MemoryUse",
    "ModuleUse",
    "OpCount",
    "OpUse",
    "Peaks",
    "Profile",
    "Roofline",
    "ScalarMix",
    "ShapeShare",
    "SizeBin",
    "SizeFigures",
    "TrafficMix",
    "Weights",
    "Work",
]


class DtypeCount(Record, frozen=True, kw_only=True):
    """Parameters and buffers of one dtype."""

    dtype: str
    """Torch dtype without its prefix."""
    tensors: int
    """How many tensors."""
    elements: int
    """Their elements."""
    bytes: int
    """Their bytes."""


class Weights(Record, frozen=True, kw_only=True):
    """Parameters and buffers; a tensor that has several names counts once."""

    parameters: int
    """Elements of all parameters."""
    parameter_bytes: int
    """Their bytes."""
    buffers: int
    """Elements of all buffers."""
    buffer_bytes: int
    """Their bytes."""
    by_dtype: tuple[DtypeCount, ...]
    """Both, by dtype, largest first."""
    tied: tuple[tuple[str, ...], ...] = ()
    """Names of each tensor that has more than one."""


class Work(Record, frozen=True, kw_only=True):
    """What a call, or a part of it, computes and moves."""

    calls: float
    """Calls of ATen operations, views included."""
    flops: float
    """Floating-point operations of products: matrix products, convolutions, attention, recurrent layers.
    A multiply and an add are two."""
    other_flops: float
    """Those of element-wise operations, reductions and normalisations, at one an element."""
    bytes: float
    """Bytes of the inputs and outputs of every operation, views apart: what would be moved if nothing
    stayed in a cache between operations, an upper bound."""


class OpUse(Record, frozen=True, kw_only=True):
    """One ATen operation, over all its calls in one call of the model."""

    op: str
    """``aten.addmm``."""
    counted: Literal["formula", "elements", "movement", "uncounted"]
    """How its FLOPs are known: a formula, one an element, none for it only moves, or not known."""
    work: Work
    """On the example inputs."""
    mix: Work | None = None
    """Mean a request of the traffic."""
    seconds: float | None = None
    """In one call on the example, profiled: on the device where there is one, else the host."""
    share: float | None = None
    """Of the time in all operations."""
    bound_s: float | None = None
    """The least that its calls could take on this machine, by measured peaks."""


class ModuleUse(Record, frozen=True, kw_only=True):
    """One submodule; ``total`` figures include what it calls, the others do not."""

    path: str
    """Its name in the model, ``encoder.layer.0``; empty for the model itself."""
    kind: str
    """Its class."""
    depth: int
    """Of the path; 0 for the model itself."""
    parameters: int
    """Elements of parameters that it has first: a tied one counts where it is named first."""
    parameter_bytes: int
    """Their bytes."""
    total_parameters: int
    """With those of its submodules."""
    total_parameter_bytes: int
    """Their bytes."""
    work: Work
    """Of operations called by itself, on the example inputs."""
    total: Work
    """Of all operations while it runs."""
    mix: Work | None = None
    """``total``, mean a request of the traffic."""
    seconds: float | None = None
    """In operations called by itself, in one call on the example, profiled."""
    total_seconds: float | None = None
    """In all operations while it runs."""


class LineUse(Record, frozen=True, kw_only=True):
    """One line of the model's source, torch's own files left out."""

    file: str
    """Its file."""
    line: int
    """Its line, 1-based."""
    text: str
    """What it says."""
    calls: int
    """Operations that it calls in one call of the model."""
    seconds: float
    """In those, in one call on the example, profiled."""
    share: float
    """Of the time in all operations."""


class Profile(Record, frozen=True, kw_only=True):
    """Where the time of a call on the example goes, by torch.profiler."""

    calls: int
    """Calls profiled."""
    seconds: float
    """Median of a profiled call; the profiler's own work makes it longer than one that is not."""
    operations_s: float
    """Of which in operations: on the device where there is one, else on the host."""
    outside: float
    """The rest, as a share of the call: Python, and dispatch from it; on a device, the time it idles."""
    lines: tuple[LineUse, ...]
    """The lines that take most, most first."""


class Coverage(Record, frozen=True, kw_only=True):
    """Which of the model's operations an engine has an implementation for."""

    engine: str
    """The engine step's name."""
    source: Literal["program", "calls"]
    """What was counted: the exported program, in the form that the engine is given; or the operations of
    a call, where export refused the model."""
    operations: int
    """Operations counted."""
    translated: int | None = None
    """Those that the engine has an implementation of its own for; None where it cannot be said."""
    fallbacks: tuple[OpCount, ...] = ()
    """Those that it hands back to ATen's kernels, which it cannot fuse."""
    missing: tuple[OpCount, ...] = ()
    """Those that it cannot run."""
    absent: Absent | None = None
    """Why the engine is not installed; nothing else is known then."""
    text: str | None = None
    """What else stands in its way, or why nothing can be said."""


class OpCount(Record, frozen=True, kw_only=True):
    """How often an operation occurs."""

    op: str
    """``aten.topk.default``."""
    count: int
    """Occurrences."""


class SizeBin(Record, frozen=True, kw_only=True):
    """A bar of a histogram."""

    low: int
    """Smallest size, inclusive."""
    high: int
    """Largest size, inclusive."""
    requests: int
    """Requests within."""


class DimMix(Record, frozen=True, kw_only=True):
    """The sizes that the traffic asks for in one named dim."""

    name: str
    """The dim."""
    quantiles: dict[str, int]
    """``p50 p90 p99 max`` -> size, by nearest rank."""
    mean: float
    """Mean size."""
    distinct: int
    """Number of different sizes."""
    histogram: tuple[SizeBin, ...]
    """In order of size."""
    padding_waste: float
    """Share of the dim's elements that would be padding if all requests were padded to the largest."""


class ScalarMix(Record, frozen=True, kw_only=True):
    """The values that the traffic passes for one Python number."""

    name: str
    """The argument."""
    distinct: int
    """Number of different values."""
    frequent: tuple[tuple[float, int], ...]
    """The most frequent values, each with its number of requests."""


class ShapeShare(Record, frozen=True, kw_only=True):
    """One combination of sizes and scalars."""

    sizes: dict[str, int]
    """Size of every named dim."""
    scalars: dict[str, float]
    """Value of scalar inputs."""
    requests: int
    """Requests of it."""
    share: float
    """Of all requests."""


class TrafficMix(Record, frozen=True, kw_only=True):
    """What the recorded requests ask for."""

    requests: int
    """How many there are; 1, the example, where none were recorded."""
    recorded: bool
    """Whether the workload has traffic."""
    shapes: int
    """Distinct combinations of sizes and scalars."""
    frequent: tuple[ShapeShare, ...]
    """The most frequent ones."""
    dims: tuple[DimMix, ...]
    """Each named dim."""
    scalars: tuple[ScalarMix, ...]
    """Each scalar input."""
    padding_waste: float
    """Share of all input elements that would be padding if every dim were padded to its largest."""
    rate: float | None = None
    """Mean requests a second, where arrival times were recorded."""
    peak_rate: float | None = None
    """Requests in the busiest second."""


class CallTimes(Record, frozen=True, kw_only=True):
    """Latency of repeated calls on the same inputs, one at a time."""

    calls: int
    """Calls measured, after warm-up."""
    warmup_calls: int
    """Calls before those."""
    median_s: float
    """Median."""
    p90_s: float
    """90th percentile, by nearest rank."""
    steady: bool
    """Whether times had stopped falling when measuring began."""


class SizeFigures(Record, frozen=True, kw_only=True):
    """One size of the traffic that was run, and the requests that it stands for."""

    sizes: dict[str, int]
    """Size of every named dim."""
    scalars: dict[str, float]
    """Value of scalar inputs."""
    requests: int
    """Requests of this size, and of near ones where there are too many sizes to run all."""
    times: CallTimes | None = None
    """Eager's latency; None where the model fails at this size."""
    work: Work | None = None
    """Of one call."""
    least_bytes: int | None = None
    """Inputs, outputs and what is used of parameters and buffers, each once: what even a perfect fusion
    has to move."""
    live_bytes: int | None = None
    """Most bytes of intermediate tensors alive at once."""
    operations_s: float | None = None
    """Roofline time, operation by operation."""
    fused_s: float | None = None
    """Roofline time with perfect fusion."""
    text: str | None = None
    """Why figures are missing."""


class MemoryUse(Record, frozen=True, kw_only=True):
    """Memory of a call on the example."""

    resident_bytes: int
    """Of the process, after the first call and before the next."""
    peak_bytes: int
    """Most that it was resident during a later call."""
    live_bytes: int | None = None
    """Most bytes of intermediate tensors alive at once."""
    device_peak_bytes: int | None = None
    """Most that torch had allocated on the device during a call, weights included."""


class Bandwidth(Record, frozen=True, kw_only=True):
    """How quickly memory is read and written together, by size of what is touched."""

    working_set_bytes: int
    """Bytes of the three arrays of the measurement."""
    bytes_per_s: float
    """Measured."""


class Peaks(Record, frozen=True, kw_only=True):
    """What this machine does at best, measured in the process that runs the model."""

    device: str
    """``cpu`` or the accelerator's name."""
    threads: int
    """Intra-op threads that it was measured with."""
    flops_per_s: dict[str, float]
    """Dtype -> best of a large matrix product."""
    bandwidth: tuple[Bandwidth, ...]
    """Smallest working set first."""
    beyond_cache: bool
    """Whether the largest working set exceeds the last-level cache that the system reports."""


class Bounds(Record, frozen=True, kw_only=True):
    """How far eager is from what the machine allows."""

    eager_s: float
    """Eager's time: the median on the example, or the mean of medians over the mix."""
    operations_s: float
    """Roofline, operation by operation: the sum of max(FLOPs over peak, bytes over bandwidth), and never
    less than ``fused_s``."""
    fused_s: float
    """Roofline with perfect fusion: max(all FLOPs over peak, used weights, inputs and outputs once over
    bandwidth)."""
    eager_over_operations: float | None
    """Ratio; above 1 is time that quicker kernels or fewer calls could save. None where nothing is
    computed or moved."""
    eager_over_fused: float | None
    """Ratio; above 1 is time that fusion could save as well."""


class Roofline(Record, frozen=True, kw_only=True):
    """The roofline of Williams, Waterman and Patterson (CACM 52, 2009), with this machine's peaks."""

    peaks: Peaks
    """Measured."""
    example: Bounds
    """Of a call on the example."""
    mix: Bounds | None = None
    """Mean a request of the traffic."""


class Inventory(Record, frozen=True, kw_only=True, tag="inventory"):
    """Everything that ``torchstone inspect`` says of a model as it is."""

    device: str
    """Where the model ran: ``cpu``, ``cuda:0``."""
    threads: int
    """Intra-op threads."""
    weights: Weights
    """Parameters and buffers."""
    modules: tuple[ModuleUse, ...]
    """Every submodule, in the model's order, itself first."""
    ops: tuple[OpUse, ...]
    """Every operation called on the example, the slowest first."""
    coverage: tuple[Coverage, ...]
    """Each engine."""
    traffic: TrafficMix
    """What is asked for."""
    first_call_s: float
    """The first call on the example in a fresh process."""
    example: CallTimes
    """Eager's latency on the example inputs."""
    least_bytes: int | None
    """Inputs, outputs and what a call on the example uses of parameters and buffers, each once: a lower
    bound of what is moved, where ``modules[0].total.bytes`` is an upper one."""
    sizes: tuple[SizeFigures, ...]
    """Sizes of the traffic that were run, the smallest first."""
    mean_s: float | None
    """Eager's mean seconds a request over the traffic's mix; None where a size of it fails."""
    memory: MemoryUse
    """Of a call."""
    profile: Profile | None
    """Where the time goes; None where the model cannot be profiled, and a note says why."""
    roofline: Roofline | None
    """What the machine allows; None where operations could not be traced, and a note says why."""
    requests_per_s: float | None
    """What one process serves of the mix when it is never idle."""
    dollars_per_million: float | None
    """Cost of a million requests at that rate; None without ``policy.dollars_per_hour``."""
    notes: tuple[str, ...]
    """What stands out, in plain sentences."""
