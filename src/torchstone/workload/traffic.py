"""Recorded traffic: one JSON object a line, ``{"B": 4, "S": 37, "at": 0.51}``."""

from __future__ import annotations

from pathlib import Path

import msgspec

from torchstone.errors import WorkloadError
from torchstone.records import Arrival, Dim
from torchstone.workload.dims import did_you_mean, size_problem

__all__ = ["parse"]

EXAMPLE = 'a line is one JSON object with a size for every dim: {"B": 4, "S": 37, "at": 0.51}'


def parse(path: Path, dims: tuple[Dim, ...]) -> tuple[Arrival, ...]:
    """Read a traffic file.

    :param path: the file; every line has a size for each dim, may have ``at`` (seconds since the
        recording's start), and values of inputs that are numbers, by name.
    :returns: one record a line, in the file's order.
    :raises WorkloadError: with the line at fault.
    """
    if not path.is_file():
        raise WorkloadError(f"traffic file {path} does not exist", hint="record one, or remove the key")
    arrivals: list[Arrival] = []
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        what = _line_problem(line, dims)
        if isinstance(what, str):
            raise WorkloadError(what, where=path, line=number, hint=EXAMPLE)
        if arrivals and (what.at_s is None) != (arrivals[0].at_s is None):
            problem = "some lines have 'at', others have none"
            raise WorkloadError(
                problem, where=path, line=number, hint="give every line its time, or none"
            )
        arrivals.append(what)
    if not arrivals:
        raise WorkloadError("the traffic file is empty", where=path, hint=EXAMPLE)
    return tuple(arrivals)


def _line_problem(line: bytes, dims: tuple[Dim, ...]) -> Arrival | str:
    try:
        values = msgspec.json.decode(line, type=dict[str, int | float | bool])
    except msgspec.DecodeError as error:  # ValidationError is one, too
        return f"no line of traffic: {error}"
    sizes: dict[str, int] = {}
    for dim in dims:
        size = values.pop(dim.name, None)
        if size is None:
            hint = f"; {did_you_mean(dim.name, values)}" if values else ""
            return f"the size of dim {dim.name!r} is missing{hint}"
        if type(size) is not int:
            return f"{dim.name} = {size!r} is no size"
        problem = size_problem(dim, size)
        if problem is not None:
            return problem
        sizes[dim.name] = size
    at = values.pop("at", None)
    if at is not None and (isinstance(at, bool) or at < 0):
        return f"at = {at!r} is no time: seconds since the start, 0 or more"
    scalars = {name: float(value) for name, value in values.items()}
    return Arrival(sizes=sizes, scalars=scalars, at_s=None if at is None else float(at))
