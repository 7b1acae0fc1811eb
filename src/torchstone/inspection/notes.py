"""What stands out in an inventory, in plain sentences."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from torchstone.records.inventory import Inventory, OpUse

__all__ = ["notes"]

_MUCH = 0.5
_SOME = 0.2
_OUTSIDE = 0.2
_BOUND = 0.4
_LEAST = 0.005
_QUICKER = 1.5
_FAR = 3.0


def notes(found: Inventory, module: nn.Module) -> Iterator[str]:
    """Sentences about an inventory, what matters most first.

    :param found: the inventory so far.
    :param module: the user's own module.
    """
    yield from _on_time(found)
    yield from _on_bounds(found)
    yield from _on_numbers(found)
    yield from _on_modes(module)
    yield from _on_traffic(found)


def _on_time(found: Inventory) -> Iterator[str]:
    if found.profile is not None and found.profile.outside >= _OUTSIDE:
        yield _outside(found.profile.outside, on_device=found.device != "cpu")
    top = found.ops[0] if found.ops else None
    if top is not None and (top.share or 0) >= _SOME:
        part = _percent(top.share or 0)
        yield f"{part} of the time in operations is in {top.op}{_of_peak(found, top)}"
    unknown = [o for o in found.ops if o.counted == "uncounted"]
    if unknown:
        share = sum(o.share or 0 for o in unknown)
        names = ", ".join(o.op for o in unknown[:5])
        yield f"the FLOPs of {names} are not counted ({_percent(share)} of the time)"
    if not found.example.steady:
        yield "eager's times were still falling when they were taken"


def _outside(share: float, *, on_device: bool) -> str:
    part = _percent(share)
    text = f"{part} of a call is outside any operation, in Python and dispatch"
    if on_device:
        text = f"the device idles for {part} of a call"
    if share < _BOUND:
        return text
    return f"{text}: the model is launch-bound, and fewer, larger operations help more than quicker ones"


def _of_peak(found: Inventory, op: OpUse) -> str:
    if op.counted != "formula" or not op.seconds or op.bound_s is None:
        return ""
    return f", at {_percent(op.bound_s / op.seconds)} of what this machine allows"


def _on_bounds(found: Inventory) -> Iterator[str]:
    if found.roofline is None:
        return
    ratio = found.roofline.example.eager_over_fused
    if ratio is not None and ratio >= _FAR:
        times = f"{ratio:.3g}" if ratio < 1000 else f"{ratio:,.0f}"
        yield f"eager takes {times} times as long as perfectly fused code could on this machine"
    peaks = found.roofline.peaks.flops_per_s
    products = sum(o.share or 0 for o in found.ops if o.counted == "formula")
    own = found.weights.by_dtype[0].dtype if found.weights.by_dtype else ""
    best = max(peaks, key=lambda dtype: peaks[dtype])
    if own in peaks and products >= _MUCH and peaks[best] >= _QUICKER * peaks[own]:
        yield (
            f"this machine multiplies {best} {peaks[best] / peaks[own]:.2g} times as fast as {own}, "
            f"in which the model is, and {_percent(products)} of the time in operations is in products"
        )


def _on_numbers(found: Inventory) -> Iterator[str]:
    for names in found.weights.tied[:5]:
        yield f"tied: {', '.join(names)} are one tensor, counted once"
    if found.weights.parameters == 0:
        yield "the model has no parameters"
    doubles = next((c for c in found.weights.by_dtype if c.dtype == "float64"), None)
    if doubles is not None:
        yield f"{doubles.tensors} of its tensors are float64, which no engine is quick in"


def _on_modes(module: nn.Module) -> Iterator[str]:
    """Layers that answer otherwise in training; a model may be served so on purpose."""
    dropping = [n for n, m in module.named_modules() if _drops(m)]
    if dropping:
        yield f"the model is in training mode: dropout is active in {_some(dropping)}"
    norms = [n for n, m in module.named_modules() if _updates(m)]
    if norms:
        yield f"the model is in training mode: calls change the statistics of {_some(norms)}"


def _drops(module: nn.Module) -> bool:
    if not module.training:
        return False
    if isinstance(module, nn.modules.dropout._DropoutNd):
        return module.p > 0
    dropout = getattr(module, "dropout", 0.0)  # attention and recurrent layers have a number
    return isinstance(dropout, float) and dropout > 0


def _updates(module: nn.Module) -> bool:
    is_norm = isinstance(module, nn.modules.batchnorm._NormBase)
    return is_norm and module.training and bool(module.track_running_stats)


def _on_traffic(found: Inventory) -> Iterator[str]:
    mix = found.traffic
    if not mix.recorded:
        yield "there is no recorded traffic: figures of the mix are those of the example"
        return
    if mix.padding_waste >= _SOME:
        yield (
            f"requests padded to the largest size would be {_percent(mix.padding_waste)} padding: "
            "code for dynamic shapes, or a few buckets, saves that"
        )
    if len(found.sizes) < mix.shapes:
        yield (
            f"{len(found.sizes)} of {mix.shapes} distinct requests were run, "
            "each for those of about its size"
        )
    failed = [s for s in found.sizes if s.text is not None]
    if failed:
        yield f"at {failed[0].sizes or failed[0].scalars} the model has no figures: {failed[0].text}"


def _some(names: list[str]) -> str:
    rest = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(name or "the model itself" for name in names[:3]) + rest


def _percent(share: float) -> str:
    return f"{share:.0%}" if share >= _LEAST or share == 0 else "under 1%"
