"""The workload: what the user brings, as one frozen value."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from torchstone.errors import WorkloadError
from torchstone.policy import Policy
from torchstone.recipe import Custom, Recipe
from torchstone.records import Arrival, Dim, WorkloadSpec
from torchstone.workload import values
from torchstone.workload.dims import Problem, Shape, did_you_mean, dims_problem, size_problem
from torchstone.workload.place import blame, line_in
from torchstone.workload.usercode import call

if TYPE_CHECKING:
    import torch
    from torch import nn

__all__ = ["Workload"]


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A model with all that is needed to optimize it and to prove the result.

    What does not fit together is refused at construction where nothing has to run for it, and by
    :meth:`spec` otherwise, always as a :class:`~torchstone.errors.WorkloadError`.
    """

    name: str
    """Its name."""
    model: Callable[[], nn.Module]
    """Makes the model, in the mode (train or eval) that it is served in."""
    inputs: Callable[[], Any]
    """Makes example inputs: a tuple, a dict of keyword inputs, or one tensor."""
    dims: tuple[Dim, ...] = ()
    """Named dims; everything else has the example's size."""
    shapes: Mapping[str, Shape] = field(default_factory=dict)
    """Argument to shape, with names of dims: ``{"x": ("B", 3)}``."""
    ranges: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """Argument to smallest and largest value that the model must take."""
    traffic: tuple[Arrival, ...] = ()
    """Recorded requests."""
    holdout: Callable[[], Iterable[tuple[Any, Any]]] | None = None
    """Labelled data: pairs of inputs (as ``inputs`` makes them) and target."""
    metric: Callable[[Sequence[Any], Sequence[Any]], float] | None = None
    """``metric(outputs, targets)``, higher is better. An output is the model's tensor, or, where the
    model returns several, the flat tuple of them."""
    generate: Callable[[dict[str, int], torch.Generator], Any] | None = None
    """Makes valid inputs of given sizes, for models that random values are not valid for."""
    candidates: Mapping[str, Callable[[nn.Module], Callable[..., Any]]] = field(default_factory=dict)
    """The user's own implementations: name to function of the module."""
    perturb: Callable[[nn.Module], None] | None = None
    """Changes module state, as happens between calls in the user's service."""
    recipes: tuple[Recipe, ...] = ()
    """Candidates to try; empty for the default ones."""
    policy: Policy = field(default_factory=Policy)
    """Constraints and objective."""
    origin: str | None = None
    """The ``torchstone.toml`` that it was read from; None for Python objects."""

    def __post_init__(self) -> None:
        problem = _static_problem(self)
        if problem is not None:
            self._refuse(problem)

    def module(self) -> nn.Module:
        """Make the model, taking its inputs by position.

        The user's own module; for keyword inputs wrapped in a
        :class:`~torchstone.workload.keyword.KeywordModule`. Its mode is left as the factory set it.

        :raises WorkloadError: where the factory raises, or returns no ``nn.Module``, or one that does
            not take the keyword inputs.
        """
        from torch import nn

        from torchstone.workload.keyword import KeywordModule

        label = _label(self.model)
        with _seeded():
            module: object = call(self.model, what=label, where=self._file)
        with blame(self.model):
            if not isinstance(module, nn.Module):
                what = f"{label} gave {values.kind_of(module)}, not a torch.nn.Module"
                raise WorkloadError(what, hint="return the module itself: an instance, not its class")
        if self._keywords is None:
            self.__dict__.setdefault("names", self._names_of(module))  # saves making it again for them
            return module
        with blame(self.inputs):
            values.check_keywords(module, self._keywords)
        return KeywordModule(module, self._keywords)

    def example(self) -> tuple[Any, ...]:
        """Make the example inputs, checked, by position.

        :raises WorkloadError: where the function raises, or an input is neither tensor nor number.
        """
        import torch

        made = self.arguments(self._raw_inputs(), self.inputs)
        # Copies: a model may write to its inputs, and the function may give the same tensors each time.
        return tuple(x.detach().clone() if isinstance(x, torch.Tensor) else x for x in made)

    def arguments(self, raw: Any, source: Callable[..., Any]) -> tuple[Any, ...]:
        """Inputs in any form that users may give them (see ``inputs``), checked, by position.

        :param source: the user's function that they came from, for messages.
        :raises WorkloadError: where they are of another form than the example inputs, or one is neither
            tensor nor number.
        """
        with blame(source):
            names, given = values.unpack(raw, _label(source))
            if names is not None:
                given = values.in_order(raw, self._keywords, _label(source))
            return values.checked(given, lambda position: self.names[position], _label(source))

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Names of the inputs by position: the dict's keys, else forward's parameters."""
        return self._keywords or self._names_of(self.module())

    def spec(self) -> WorkloadSpec:
        """Describe the workload; the first call runs ``inputs`` and, for the inputs' names, ``model``.

        :raises WorkloadError: where example, shapes, dims, ranges and traffic do not fit together.
        """
        return self._spec

    def remember(self, spec: WorkloadSpec) -> None:
        """Take a description that another process made of this same workload."""
        self.__dict__["_spec"] = spec
        self.__dict__["names"] = tuple(given.name for given in spec.inputs)

    @cached_property
    def _spec(self) -> WorkloadSpec:
        from torchstone.workload.digest import digest

        inputs = dict(zip(self.names, self.example(), strict=True))
        problem = values.named_problem(inputs, self.shapes, self.ranges)
        sizes = problem or values.example_sizes(inputs, self.shapes, self.dims)
        if isinstance(sizes, Problem):
            self._refuse(sizes)
        traffic = self.traffic or (Arrival(sizes=sizes),)
        self._refuse_scalars(inputs)
        return WorkloadSpec(
            name=self.name,
            inputs=values.describe(inputs, self.shapes, self.ranges, traffic),
            dims=self.dims,
            example_sizes=sizes,
            traffic=traffic,
            metric=None if self.metric is None else _name(self.metric),
            candidates=tuple(self.candidates),
            perturbs=self.perturb is not None,
            digest=digest(self),
        )

    def labelled(self) -> Iterator[tuple[tuple[Any, ...], Any]]:
        """The labelled data: positional inputs and target; nothing where there is no holdout.

        :raises WorkloadError: where the function raises or yields no such pairs.
        """
        if self.holdout is None:
            return
        source = f"holdout {_label(self.holdout)}"
        pairs = iter(call(self.holdout, what=source, where=self._file))
        end = object()
        while (pair := call(lambda: next(pairs, end), what=source, where=self._file)) is not end:
            with blame(self.holdout):
                if not (isinstance(pair, tuple) and len(pair) == 2):
                    what = f"{source} yielded {values.kind_of(pair)}, not a pair (inputs, target)"
                    raise WorkloadError(what, hint="yield (x,), target")
            yield self.arguments(pair[0], self.holdout), pair[1]

    def score(self, outputs: Sequence[tuple[Any, ...]], targets: Sequence[Any]) -> float:
        """The metric of flat outputs (one tuple for each labelled example).

        :raises WorkloadError: where there is no metric, it raises, or it gives no number.
        """
        if self.metric is None:
            raise WorkloadError(f"workload {self.name!r} has no metric", hint="give metric and holdout")
        metric = self.metric
        results = [output[0] if len(output) == 1 else output for output in outputs]
        what = f"metric {_label(metric)}"
        return call(lambda: float(metric(results, targets)), what=what, where=self._file)

    def generated(self, sizes: dict[str, int], generator: torch.Generator) -> tuple[Any, ...] | None:
        """Valid inputs of these sizes, by position; None where the user gave no ``generate``.

        :raises WorkloadError: where the function raises or gives no inputs.
        """
        if self.generate is None:
            return None
        function, source = self.generate, f"generate {_label(self.generate)}"
        raw = call(lambda: function(dict(sizes), generator), what=source, where=self._file)
        return self.arguments(raw, function)

    def disturb(self, module: nn.Module) -> None:
        """Run ``perturb``, if given, on the user's own module inside ``module``."""
        from torchstone.workload.keyword import unwrap

        if self.perturb is not None:
            function = self.perturb
            call(lambda: function(unwrap(module)), what=f"perturb {_label(function)}", where=self._file)

    def implementation(self, name: str, module: nn.Module) -> Callable[..., Any]:
        """The user's own implementation ``name`` of ``module``, taking its inputs by position.

        What the implementation raises is not translated: it is a candidate, whose failure is a value.
        """
        from torchstone.workload.keyword import KeywordModule, unwrap

        function = self.candidates[name](unwrap(module))
        if not isinstance(module, KeywordModule):
            return function
        names = module.names
        return lambda *given: function(**dict(zip(names, given, strict=True)))

    @cached_property
    def _keywords(self) -> tuple[str, ...] | None:
        with blame(self.inputs):
            return values.unpack(self._raw_inputs(), _label(self.inputs))[0]

    def _names_of(self, module: nn.Module) -> tuple[str, ...]:
        with blame(self.inputs):
            _, given = values.unpack(self._raw_inputs(), _label(self.inputs))
            return values.names_of(module, len(given))

    @property
    def _file(self) -> Path | None:
        return None if self.origin is None else Path(self.origin)

    def _raw_inputs(self) -> Any:
        with _seeded():
            return call(self.inputs, what=_label(self.inputs), where=self._file)

    def _refuse(self, problem: Problem) -> NoReturn:
        line = None if self._file is None else line_in(self._file, problem.keys)
        raise WorkloadError(problem.what, where=self.origin, line=line, hint=problem.hint)

    def _refuse_scalars(self, inputs: Mapping[str, Any]) -> None:
        import torch

        scalars = [n for n, value in inputs.items() if not isinstance(value, torch.Tensor)]
        for line, arrival in enumerate(self.traffic, start=1):
            for name in arrival.scalars:
                if name not in scalars:
                    what = (
                        f"traffic, line {line}: {name!r} is neither a dim nor a number among the inputs"
                    )
                    known = [*arrival.sizes, *scalars]
                    self._refuse(Problem(("workload", "traffic"), what, did_you_mean(name, known)))


@contextmanager
def _seeded() -> Iterator[None]:
    """Draw alike in every process: random weights that are judged are the ones that are built."""
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


def _static_problem(workload: Workload) -> Problem | None:
    if (workload.holdout is None) != (workload.metric is None):
        given, lacking = ("metric", "holdout") if workload.holdout is None else ("holdout", "metric")
        what = f"{given} is given without {lacking}"
        return Problem(("workload", given), what, f"labelled data needs both: add {lacking}")
    for recipe in workload.recipes:
        if isinstance(recipe.engine, Custom) and recipe.engine.target not in workload.candidates:
            what = f"recipe {str(recipe)!r} names no candidate"
            hint = did_you_mean(recipe.engine.target, workload.candidates)
            return Problem(("workload", "recipes"), what, hint)
    for name in workload.candidates:
        if not name.isidentifier():
            what = f"candidate name {name!r} is no Python identifier"
            return Problem(("candidates", name), what, "it is written custom(NAME) in a recipe")
    problem = dims_problem(workload.dims, workload.shapes, workload.ranges)
    return problem or _traffic_problem(workload)


def _traffic_problem(workload: Workload) -> Problem | None:
    names = {dim.name for dim in workload.dims}
    for line, arrival in enumerate(workload.traffic, start=1):
        if set(arrival.sizes) != names:
            what = (
                f"traffic, line {line}: sizes of {sorted(arrival.sizes)}, the dims are {sorted(names)}"
            )
            return Problem(("workload", "traffic"), what, "give a size for every dim, and no other")
        for dim in workload.dims:
            problem = size_problem(dim, arrival.sizes[dim.name])
            if problem is not None:
                what = f"traffic, line {line}: {problem}"
                return Problem(("workload", "traffic"), what, f"widen the range of {dim.name}")
    return None


def _name(function: Any) -> str:
    return str(getattr(function, "__name__", type(function).__name__))


def _label(function: Any) -> str:
    label: str | None = getattr(function, "label", None)  # objects.Given has one
    return label or f"{_name(function)}()"
