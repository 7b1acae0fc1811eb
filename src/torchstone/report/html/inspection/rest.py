"""Weights, where it was inspected, and how long each part took."""

from __future__ import annotations

from torchstone.records import Inspection
from torchstone.report import format as fmt
from torchstone.report import inspect_words as words
from torchstone.report import words as run_words
from torchstone.report.html.markup import Cell, Html, details, element, facts, join, section, table

__all__ = ["environment", "parts", "weights"]

_TIED = 8


def weights(found: Inspection) -> Html:
    """Parameters and buffers by dtype, and the tied ones."""
    if found.inventory is None:
        return Html("")
    held = found.inventory.weights
    rows = [
        (one.dtype, fmt.count(one.tensors), fmt.si(one.elements), fmt.size(one.bytes))
        for one in held.by_dtype
    ]
    pairs: dict[str, Cell] = {
        "Parameters": f"{fmt.si(held.parameters)} ({fmt.size(held.parameter_bytes)})",
        "Buffers": f"{fmt.si(held.buffers)} ({fmt.size(held.buffer_bytes)})",
    }
    columns = ["Dtype", "Tensors", "Elements", "Bytes"]
    return section(
        "weights",
        "Weights",
        facts(pairs),
        table("Parameters and buffers by dtype", columns, rows, class_="figures") if rows else "",
        _tied(held.tied),
    )


def _tied(tied: tuple[tuple[str, ...], ...]) -> Html:
    if not tied:
        return Html("")
    items = [element("li", element("code", ", ".join(names))) for names in tied]
    title = element("h3", f"Tied, counted once ({len(tied)})")
    rest = [details("The others", element("ul", *items[_TIED:]))] if items[_TIED:] else []
    return join([title, element("ul", *items[:_TIED]), *rest])


def environment(found: Inspection) -> Html:
    """Machine and workload."""
    where, spec = found.environment, found.workload
    machine: dict[str, Cell] = {
        "Processor": where.cpu or fmt.DASH,
        "Instruction sets": ", ".join(where.isa) or fmt.DASH,
        "Cores, threads": f"{where.cores}, {where.threads}",
        "Memory": fmt.size(where.memory_bytes),
        "Devices": ", ".join(where.devices) or "none",
        "Platform": f"{where.platform}, Python {where.python}",
        "Packages": ", ".join(f"{name} {version}" for name, version in sorted(where.packages.items()))
        or fmt.DASH,
    }
    asked: dict[str, Cell] = {
        "From": found.origin or "Python",
        "Inputs": join((run_words.input_of(i) for i in spec.inputs), "; ") or fmt.DASH,
        "Dims": ", ".join(map(run_words.dim_of, spec.dims)) or "all fixed",
        "Example": words.sizes(spec.example_sizes),
        "Digest": element("code", spec.digest),
    }
    return section(
        "environment",
        "Where, and of what",
        element("h3", "Machine"),
        facts(machine),
        element("h3", "Workload"),
        facts(asked),
    )


def parts(found: Inspection) -> Html:
    """How long each part took, and how it went."""
    if not found.parts:
        return Html("")
    rows = [
        (words.PARTS[p.name], fmt.seconds(p.seconds), "found" if p.failed is None else "not found out")
        for p in found.parts
    ]
    columns = ["Part", "Took", "Outcome"]
    made = table("Each in a process of its own, its start included", columns, rows, class_="figures")
    return section("parts", "How long it took", made)
