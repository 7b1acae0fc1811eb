"""What this machine does at best, measured, and the least time that work could take on it.

The roofline of Williams, Waterman and Patterson ("Roofline: an insightful visual performance model for
multicore architectures", CACM 52, 2009): work takes at least its FLOPs over the peak rate, and at least
its bytes over the bandwidth. The peak is the best of a large matrix product; the bandwidth is STREAM's
triad (McCalpin, 1995), ``a = b + s*c``, at several sizes, since what fits a cache does not wait for
memory: work is granted the best bandwidth seen at about its size or above, so the bound stays one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec
import psutil
import torch

from torchstone import env
from torchstone.records.inventory import Bandwidth, Peaks
from torchstone.store import write_durably

__all__ = ["keep", "kept", "least_s", "measure"]

_WORKING_SETS = (2**18, 2**20, 2**22, 2**25)
_LARGEST = (2**27, 2**29)  # smallest and largest last working set; on a device, the largest
_SHARE_OF_FREE = 4
_GEMM_SIDES = (512, 1024, 2048, 4096, 8192)
_GEMM_S = 0.004  # a product that takes so long is large enough
_EACH_S = 0.1
_FEWEST = 3
_FLOATS = ("float64", "float32", "bfloat16", "float16")
_QUICK = {
    "bfloat16": ("amx_bf16", "avx512_bf16", "bf16"),
    "float16": ("amx_fp16", "avx512_fp16", "asimdhp"),
}


def measure(device: torch.device, dtypes: Iterable[str]) -> Peaks:
    """Measure peaks, in about a second, with the threads that torch now uses.

    :param dtypes: those that the model computes in, without torch's prefix. ``float32`` is always
        measured, and the short formats that this processor has instructions for.
    """
    cuda = device.type == "cuda"
    wanted = {"float32", *dtypes, *(("bfloat16", "float16") if cuda else _instructions())}
    rates = {name: _product_rate(device, name) for name in _FLOATS if name in wanted}
    sizes, beyond = _working_sets(device)
    with torch.no_grad():
        curve = tuple(
            Bandwidth(working_set_bytes=size, bytes_per_s=_triad_rate(device, size)) for size in sizes
        )
    return Peaks(
        device=torch.cuda.get_device_name(device) if cuda else "cpu",
        threads=torch.get_num_threads(),
        flops_per_s=rates,
        bandwidth=curve,
        beyond_cache=beyond,
    )


def keep(peaks: Peaks, folder: Path) -> None:
    """Write peaks down for :func:`kept`; only a device's, since a processor's change with its load."""
    if peaks.device != "cpu":
        folder.mkdir(parents=True, exist_ok=True)
        write_durably(_place(peaks.device, folder), msgspec.json.encode(peaks))


def kept(device: torch.device, folder: Path) -> Peaks | None:
    """A device's peaks as they were written down; None where they were not, or cannot be read."""
    if device.type != "cuda":
        return None
    try:
        return msgspec.json.decode(
            _place(torch.cuda.get_device_name(device), folder).read_bytes(), type=Peaks
        )
    except (FileNotFoundError, msgspec.DecodeError):
        return None


def _place(name: str, folder: Path) -> Path:
    plain = "".join(c if c.isalnum() else "-" for c in f"{name} {torch.__version__}")
    return folder / f"peaks-{plain}.json"


def least_s(peaks: Peaks, flops: float, bytes_: float, dtype: str) -> float:
    """The least seconds that work could take.

    :param dtype: that it computes in; the best peak of all stands in for one that was not measured.
    """
    peak = peaks.flops_per_s.get(dtype) or max(peaks.flops_per_s.values())
    return max(flops / peak, bytes_ / _rate(peaks, bytes_))


def _rate(peaks: Peaks, bytes_: float) -> float:
    """The best bandwidth from the largest working set that is no larger than these bytes on."""
    smaller = sum(b.working_set_bytes <= bytes_ for b in peaks.bandwidth)
    return max(b.bytes_per_s for b in peaks.bandwidth[max(0, smaller - 1) :])


def _instructions() -> list[str]:
    has = set(env.instruction_sets())
    return [dtype for dtype, sets in _QUICK.items() if has.intersection(sets)]


def _product_rate(device: torch.device, name: str) -> float:
    """FLOP/s of the best matrix product, of a side at which one takes long enough."""
    dtype: torch.dtype = getattr(torch, name)
    best = 0.0
    with torch.no_grad():
        for side in _GEMM_SIDES:
            a, b = (torch.ones(side, side, dtype=dtype, device=device) for _ in range(2))
            out = torch.empty(side, side, dtype=dtype, device=device)
            seconds = _quickest(lambda a=a, b=b, out=out: torch.mm(a, b, out=out), device)  # type: ignore[misc]
            best = max(best, 2 * side**3 / seconds)
            if seconds >= _GEMM_S:
                break
    return best


def _triad_rate(device: torch.device, working_set: int) -> float:
    """Bytes a second of ``a = b + 2*c``: two arrays read, one written."""
    count = working_set // 12
    a, b, c = (torch.ones(count, device=device) for _ in range(3))
    return 12 * count / _quickest(lambda: torch.add(b, c, alpha=2.0, out=a), device)


def _quickest(run: Callable[[], object], device: torch.device) -> float:
    """Seconds of the quickest of several runs, after one that is not counted."""
    run()
    _finish(device)
    best, started, runs = float("inf"), time.perf_counter(), 0
    while runs < _FEWEST or time.perf_counter() - started < _EACH_S:
        before = time.perf_counter()
        run()
        _finish(device)
        best = min(best, time.perf_counter() - before)
        runs += 1
        if best > _EACH_S:  # a dtype that this processor emulates
            break
    return best


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _working_sets(device: torch.device) -> tuple[tuple[int, ...], bool]:
    """Sizes to measure at, and whether the last exceeds the last-level cache."""
    if device.type == "cuda":
        cache = torch.cuda.get_device_properties(device).L2_cache_size
        return (*_WORKING_SETS, 2 * _LARGEST[1]), 2 * _LARGEST[1] > cache
    cache = _last_level_cache()
    room = psutil.virtual_memory().available // _SHARE_OF_FREE
    largest = min(max(_LARGEST[0], 2 * cache), _LARGEST[1], room)
    return (*(size for size in _WORKING_SETS if size < largest), largest), largest > cache > 0


def _last_level_cache() -> int:
    """Bytes of the last-level cache, as the system reports it; 0 where it does not."""
    found = 0
    for file in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = file.read_text(encoding="ascii").strip()
        if text.endswith("K") and text[:-1].isdigit():
            found = max(found, int(text[:-1]) * 1024)
    return found
