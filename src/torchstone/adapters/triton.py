"""``torchstone.autotune``: in place of ``triton.autotune``, with each config proved before it is timed.

Trials run on copies, never on the caller's tensors. A config must compute what the reference does, or
what the first config does where there is none: on the caller's values, and on these in other places,
with NaN where only the kernel writes. A winner that was kept counts once it is proved again.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import inspect
import json
import statistics
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import torch

from torchstone import settings, tuning
from torchstone.errors import EnvironmentLacksError, InputError
from torchstone.measure import device
from torchstone.measure.here import HereMeasurer, Trial
from torchstone.records.tuning import Config, Measurement, MeasurePolicy, TuningKey
from torchstone.tuner.cache import Cache
from torchstone.tuner.driver import Budget, search
from torchstone.tuner.search import searcher_of
from torchstone.tuner.search.base import AnySearcher, History, Problem
from torchstone.tuner.space import Choice, Space, key_of
from torchstone.tuner.tunable import Tunable
from torchstone.verify import tensors

try:
    _triton: Any = importlib.import_module("triton")
    _Autotuner: Any = importlib.import_module("triton.runtime.autotuner").Autotuner
    _TritonError: Any = importlib.import_module("triton.errors").TritonError
except ImportError as error:
    raise EnvironmentLacksError("Triton is not installed", hint="pip install triton") from error

__all__ = ["Autotuned", "Options", "autotune"]

_LAUNCH = ("num_warps", "num_stages", "num_ctas", "maxnreg")
_FEW = 32  # so many configs are all tried
_FINALISTS = 3
_LANES = 8  # the searcher is asked for so many at a time
_IGNORED = (
    "configs are timed between flushes of the last-level cache, each raced against the best so far"
)


@dataclass(frozen=True, kw_only=True)
class Options:
    """What :func:`autotune` takes beyond Triton's."""

    space: Space | None = None
    """In place of a list. ``num_warps``, ``num_stages``, ``num_ctas`` and ``maxnreg`` are Triton's."""
    reference: Callable[..., Any] | None = None
    """The kernel in plain PyTorch; run in float64 too. Gets the kernel's arguments that it has
    parameters for, by name; gives the outputs, in the order of :attr:`outputs`, or writes to them."""
    outputs: Sequence[str] = ()
    """Arguments that the kernel writes; found by running it where not given."""
    budget: float | Budget = 120.0
    """Seconds of a search, or a :class:`~torchstone.tuner.driver.Budget`."""
    verify: bool = True
    """Whether configs are proved. Without, any that runs may win."""
    cache: bool = True
    """Whether measurements are kept, in :attr:`home`."""
    home: Path | str | None = None
    """From ``TORCHSTONE_HOME`` where not given."""
    searcher: str | AnySearcher | None = None
    """All configs of a short list are tried; ``guided`` searches more."""
    example: Callable[..., Mapping[str, Any]] | None = None
    """``example(seed, **sizes)``: arguments of a launch by name, and its ``grid``: no caller needed."""
    sizes: Mapping[str, int] = field(default_factory=dict)
    """The sizes to tune an example for."""
    odd: tuple[Mapping[str, int], ...] = ()
    """Other sizes at which an example's winner must be right."""
    isolate: bool = False
    """Search in processes of its own, on the example: what crashes or hangs does no harm here."""


def autotune(  # noqa: PLR0913  as in Triton
    configs: Sequence[Any] | None = None,
    key: Sequence[str] = (),
    prune_configs_by: Mapping[str, Any] | None = None,
    reset_to_zero: Sequence[str] | None = None,
    restore_value: Sequence[str] | None = None,
    pre_hook: Callable[..., Any] | None = None,
    post_hook: Callable[..., Any] | None = None,
    warmup: int | None = None,
    rep: int | None = None,
    use_cuda_graph: bool = False,
    do_bench: Callable[..., Any] | None = None,
    cache_results: bool = True,
    **options: Any,
) -> Callable[[Any], Autotuned]:
    """Decorates a ``triton.jit`` function as ``triton.autotune`` does; its arguments mean the same.

    Two differ. ``reset_to_zero`` holds for every launch: Triton zeroes on the call that tunes, and not
    from then on. ``warmup``, ``rep``, ``use_cuda_graph`` and ``do_bench`` are not used.

    :param options: fields of :class:`Options`.
    :raises InputError: where there are neither configs nor a space, or both.
    """
    told = {"warmup": warmup, "rep": rep, "use_cuda_graph": use_cuda_graph, "do_bench": do_bench}
    if ignored := [name for name, value in told.items() if value]:
        warnings.warn(f"autotune: {', '.join(ignored)} not used: {_IGNORED}", stacklevel=2)
    ours = replace(Options(cache=cache_results), **options)
    if bool(configs) == (ours.space is not None) or (ours.space is not None and prune_configs_by):
        hint = "in place of prune_configs_by a space has constraints: Space(..., valid=[...])"
        raise InputError("autotune needs a list of configs, or a space", hint=hint)
    theirs: dict[str, Any] = {"reset_to_zero": reset_to_zero, "restore_value": restore_value}
    theirs |= {"pre_hook": pre_hook, "post_hook": post_hook, "prune_configs_by": prune_configs_by}
    return lambda fn: Autotuned(fn, configs, tuple(key), ours, theirs)


class Autotuned(_Autotuner):  # type: ignore[misc] # Triton has no types
    """A kernel that chooses its config by its arguments' key; it has what Triton's ``Autotuner`` has."""

    def __init__(
        self, fn: Any, configs: Any, key: tuple[str, ...], options: Options, theirs: dict[str, Any]
    ) -> None:
        self._made = fn, configs, key, options, theirs
        self.options = options
        configs = configs if options.space is None else [_as_triton(options.space.default())]
        super().__init__(fn, fn.arg_names, configs, list(key), **theirs)
        self._lock = threading.RLock()
        self._name = self.base_fn.__name__
        unknown = {*key, *options.outputs, *self.reset_to_zero, *self.restore_value} - {*fn.arg_names}
        if unknown:
            raise InputError(f"{self._name} has no argument {', '.join(sorted(unknown))}")

    def __reduce__(self) -> tuple[Any, ...]:
        return Autotuned, self._made

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Launch with the config of the arguments' key; tunes where that is new."""
        values = {**dict(zip(self.arg_names, args, strict=False)), **kwargs}
        key = self._key(values)
        config = self.cache.get(key)
        if config is None:
            config = self._chosen(key, values, args, kwargs)
        self.best_config = config
        chosen = config.all_kwargs()
        if config.pre_hook is not None:
            config.pre_hook({**values, **chosen})
        self._zero(values)
        return self.fn.run(*args, **kwargs, **chosen)

    def tunable(self) -> Tunable:
        """The kernel on its example, for ``torchstone tune`` and :func:`torchstone.tune`.

        :raises InputError: where it has no example, or a reference and no names of outputs.
        """
        example, reference = self.options.example, None
        if example is None or (self.options.reference is not None and not self.options.outputs):
            hint = "autotune(..., example=lambda seed, **sizes: {...}, reference=..., outputs=[...])"
            raise InputError(f"{self._name} has no {'outputs' if example else 'example'}", hint=hint)
        space, as_triton = self._space(self.configs)
        grids: dict[str, Any] = {}

        # wraps: each says which of the user's modules it belongs to
        @functools.wraps(self.base_fn)
        def build(config: Config) -> Callable[..., Any]:
            launch = self._launcher(as_triton(config), {})

            def call(sizes: str, *given: Any) -> tuple[()]:
                if sizes not in grids:  # inputs are kept in files, where a function cannot be
                    grids[sizes] = example(0, **json.loads(sizes))["grid"]
                return launch(grids[sizes], *given)

            return call

        @functools.wraps(example)
        def inputs(seed: int, **sizes: int) -> tuple[Any, ...]:
            values = {**example(seed, **sizes), "grid": json.dumps(sizes)}
            self._zero(values)
            return self._flat(values)

        if self.options.reference is not None:
            reference = functools.wraps(self.options.reference)(self._reference(self.options.outputs))
        made = Tunable(name=self._name, build=build, space=space, inputs=inputs, reference=reference)
        return replace(made, sizes=dict(self.options.sizes), odd=self.options.odd)

    def _key(self, values: Mapping[str, Any]) -> tuple[Any, ...]:
        """Values of the key's arguments; of each tensor its dtype, alignment, and layout."""
        parts: list[Any] = [values.get(name) for name in self.keys]
        for value in values.values():
            if isinstance(value, torch.Tensor):
                strides = value.stride()
                unit = strides.index(1) if 1 in strides else -1
                parts += value.dtype, value.data_ptr() % 16 == 0, len(strides), unit, 0 in strides
        return tuple(parts)

    def _chosen(
        self, key: tuple[Any, ...], values: dict[str, Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """The config of a key that is not known yet."""
        if kwargs.get("warmup") or (len(self.configs) == 1 and self.options.space is None):
            return self.configs[0]
        given = [v for v in values.values() if isinstance(v, torch.Tensor)]
        if not all(v.numel() for v in given):
            return self.configs[0]  # nothing can be learned from it
        if any(v.is_cuda for v in given) and torch.cuda.is_current_stream_capturing():
            what = f"{self._name} meets a new key while a CUDA graph is captured"
            raise InputError(what, hint="call it once with such arguments before the capture")
        with self._lock:
            if key not in self.cache:
                self.nargs: Any = dict(zip(self.arg_names, args, strict=False))  # as pruning expects
                try:
                    config = self._tuned(values, kwargs)
                except torch.OutOfMemoryError:
                    self._warn("there is no memory for the copies that tuning runs on")
                    config = self.configs[0]
                finally:
                    self.nargs = None
                if self.user_defined_pre_hook:
                    self.pre_hook({**values, **config.all_kwargs()}, reset_only=True)
                self.cache[key] = config
            return self.cache[key]

    def _tuned(self, values: dict[str, Any], kwargs: dict[str, Any]) -> Any:
        """The quickest config that is proved on copies of these arguments."""
        space, as_triton = self._space(self.prune_configs(kwargs))
        names = {*self.arg_names, "grid", "warmup"}
        fixed = {n: v for n, v in values.items() if n not in names or _describes(v)}
        inputs = self._flat(values)
        if self.reset_to_zero:
            inputs = tensors.copies(inputs)
            self._zero(dict(zip(("grid", *self.arg_names), inputs, strict=True)))
        trial = Trial(
            build=lambda config: self._launcher(as_triton(config), fixed),
            space=space,
            inputs=inputs,
            names=("grid", *self.arg_names),
            kept=frozenset({*self.reset_to_zero, *self.restore_value}),
            outputs=self.options.outputs,
            reference=None if self.options.reference is None else self._reference,
            refuses=(_TritonError,),
            verify=self.options.verify,
        )
        here = HereMeasurer(trial)
        if not here.written:
            self._warn("it changes no tensor, so nothing can be proved; name its outputs=[...]")
            return as_triton(space.default())
        with contextlib.closing(_Kept(self, space, values)) as kept:
            return as_triton(self._answer(here, kept, space, values))

    def _answer(self, here: HereMeasurer, kept: _Kept, space: Space, values: dict[str, Any]) -> Config:
        """The kept answer where it holds; else the best found, each proved and timed once more."""
        if (answer := kept.answer) is not None:
            again = here.one(answer)
            if again.time is not None:
                return answer
            kept.add(again)
        left = self._isolated(values) if self.options.isolate else self._searched(here, kept, space)
        while left:
            few, left = left[:_FINALISTS], left[_FINALISTS:]
            found = [here.one(config) for config in few]  # times of another session do not count
            kept.add(*(m for m in found if m.time is None))
            best = min((m for m in found if m.time), key=lambda m: m.time or 0.0, default=None)
            if best is not None:
                kept.add(msgspec.structs.replace(best, proposer=kept.mark))
                return best.config
        if self.options.reference is not None:
            what = f"no config of {self._name} computes what the reference does: {here.why}"
            raise InputError(what, hint="autotune(..., verify=False) takes any that runs")
        self._warn(f"no config is proved ({here.why})")
        return here.default

    def _searched(self, here: HereMeasurer, kept: _Kept, space: Space) -> list[Config]:
        """Configs that are right, the quickest first."""
        options, few = self.options, space.all is not None and len(space.all) <= _FEW
        wanted = options.searcher or ("exhaustive" if few else "guided")
        found = search(
            Problem(space, kept.features, None, kept.histories, _LANES),
            searcher_of(wanted) if isinstance(wanted, str) else wanted,
            here,
            options.budget if isinstance(options.budget, Budget) else Budget(seconds=options.budget),
            known=kept.rows(),
            watch=lambda measurement, *_: kept.add(measurement),
        )
        right = sorted((m for m in found.measurements if m.time), key=lambda m: m.time or 0.0)
        as_triton = self._space(self.configs)[1]
        self.bench_time = found.seconds
        self.configs_timings = {as_triton(m.config): _quantiles(m.seconds) for m in right}
        return [m.config for m in right]

    def _isolated(self, values: dict[str, Any]) -> list[Config]:
        """The same by processes of their own, on the example at these sizes."""
        takes = inspect.signature(self.options.example).parameters if self.options.example else {}
        sizes = {n: v for n in self.keys if isinstance(v := values.get(n), int) and n in takes}
        found = tuning.tune(
            replace(self.tunable(), sizes={**self.options.sizes, **sizes}),
            budget=self.options.budget,
            searcher=self.options.searcher or "guided",
            home=self.options.home,
        )
        return [found.config]

    def _space(self, configs: Sequence[Any]) -> tuple[Space, Callable[[Config], Any]]:
        if self.options.space is not None:
            return self.options.space, _as_triton
        listed = _Listed(configs)
        return listed, listed.config

    def _flat(self, values: Mapping[str, Any]) -> tuple[Any, ...]:
        """The grid, then each argument of the kernel; an ellipsis where it is not given."""
        for name in self.arg_names:
            if isinstance(values.get(name), tuple | list):
                what = f"{self._name}: argument {name} is a {type(values[name]).__name__}"
                raise InputError(f"{what}: what it holds cannot be copied", hint="use triton.autotune")
        bare = {n: v.base if _describes(v) else v for n, v in values.items()}
        return values["grid"], *(bare.get(name, ...) for name in self.arg_names)

    def _launcher(self, config: Any, fixed: Mapping[str, Any]) -> Callable[..., tuple[()]]:
        """A launch with the hooks of Triton's trials; takes what :meth:`_flat` gives.

        :param fixed: what else the launch is given, and descriptors, into which their tensors are put.
        """
        post_hook = self.post_hook if self.user_defined_post_hook else lambda *_, **__: None

        def call(grid: Any, *given: Any) -> tuple[()]:
            named = {n: v for n, v in zip(self.arg_names, given, strict=True) if v is not ...}
            named |= {n: replace(fixed[n], base=v) for n, v in named.items() if n in fixed}
            full = {"grid": grid, **fixed, **named, **config.all_kwargs(), "warmup": False}
            if config.pre_hook is not None:
                config.pre_hook(full)
            if self.user_defined_pre_hook:
                self.pre_hook(full)
            try:
                self.fn.run(**full)
            except Exception as error:  # the hook is told of whatever the launch raised, and it goes on
                post_hook(full, exception=error)
                raise
            post_hook(full, exception=None)
            return ()

        return call

    def _reference(self, outputs: Sequence[str]) -> Callable[..., tuple[()]]:
        """The user's reference as a function that writes where the kernel does."""
        reference: Any = self.options.reference
        takes = inspect.signature(reference).parameters

        def call(_: Any, *given: Any) -> tuple[()]:
            named = {n: v for n, v in zip(self.arg_names, given, strict=True) if v is not ...}
            result = reference(**{n: v for n, v in named.items() if n in takes})
            if result is None:
                return ()
            results = [result] if isinstance(result, torch.Tensor) else list(result)
            if len(results) != len(outputs):
                what = (
                    f"the reference gives {len(results)} outputs; the kernel writes {', '.join(outputs)}"
                )
                raise InputError(what, hint="name them, in the order of the reference: outputs=[...]")
            for name, value in zip(outputs, results, strict=True):
                named[name].copy_(value)
            return ()

        return call

    def _zero(self, values: Mapping[str, Any]) -> None:
        for name in self.reset_to_zero:
            if isinstance(value := values.get(name), torch.Tensor):
                value.zero_()

    def _warn(self, what: str) -> None:
        warnings.warn(f"{self._name} is not tuned: {what}; its first config is used", stacklevel=2)


class _Kept:
    """The cache's rows of a call; nothing where the kernel keeps none."""

    def __init__(self, kernel: Autotuned, space: Space, values: dict[str, Any]) -> None:
        self._space, self._key = space, _tuning_key(kernel, space, values)
        home = Path(kernel.options.home or settings.load().home)
        self._cache = Cache(home / "tuning") if kernel.options.cache else None
        self.features = {**device.facts(), **_floats(self._key)}
        near = () if self._cache is None else self._cache.histories(self._key)
        self.histories = tuple(History(self._valid(rows), _floats(key)) for key, rows in near)
        self.mark = "answer of " + _digest(*map(key_of, space.all or ()))
        """The proposer of what a search of these very configs has come to."""

    def close(self) -> None:
        """Let go of the cache."""
        if self._cache is not None:
            self._cache.close()

    @property
    def answer(self) -> Config | None:
        """What an earlier search has come to."""
        found = [m for m in self.rows() if m.proposer == self.mark and m.time]
        return min(found, key=lambda m: m.time or 0.0).config if found else None

    def rows(self) -> tuple[Measurement, ...]:
        """What is known."""
        return () if self._cache is None else self._valid(self._cache.rows(self._key))

    def add(self, *measurements: Measurement) -> None:
        """Keep these."""
        if self._cache is not None:
            for measurement in measurements:
                self._cache.append(self._key, measurement)

    def _valid(self, rows: tuple[Measurement, ...]) -> tuple[Measurement, ...]:
        return tuple(m for m in rows if self._space.why_not(m.config) is None)


class _Listed(Space):
    """The configs of a list, by what they say."""

    def __init__(self, configs: Sequence[Any]) -> None:
        plain = (bool, int, float, str)
        said: list[Config] = [
            {n: v if isinstance(v, plain) else str(v) for n, v in c.all_kwargs().items()}
            for c in configs
        ]
        names = dict.fromkeys(n for row in said for n in row)
        self._rows: list[Config] = [{n: row.get(n, "") for n in names} for row in said]
        if len({*map(key_of, self._rows)}) < len(configs):  # some differ in their hooks
            self._rows = [{**row, "at": i} for i, row in enumerate(self._rows)]
        self._configs = {key_of(row): c for row, c in zip(self._rows, configs, strict=True)}
        knobs = {n: dict.fromkeys(row[n] for row in self._rows) for n in self._rows[0]}
        ordered = {n: sorted(v) if _numbers(v) else v for n, v in knobs.items()}
        super().__init__(
            {n: Choice(tuple(v), self._rows[0][n]) for n, v in ordered.items()},
            valid=(lambda config: key_of(config) in self._configs,),
        )

    @property
    def product(self) -> int:
        """Their number."""
        return len(self._rows)

    def _enumerate(self) -> Iterator[Config]:
        yield from self._rows

    def config(self, config: Config) -> Any:
        """As Triton's."""
        return self._configs.get(key_of(config))


def _tuning_key(kernel: Autotuned, space: Space, values: dict[str, Any]) -> TuningKey:
    name, versions = device.here()
    function = kernel.fn
    while not (inspect.isfunction(function) or isinstance(getattr(function, "cache_key", None), str)):
        function = function.fn
    keys = {n: values.get(n) for n in kernel.keys}
    sizes = {n: v for n, v in keys.items() if isinstance(v, int)}
    other = [f"{n}={v}" for n, v in keys.items() if n not in sizes]
    return TuningKey(
        kernel=kernel._name,
        space=_digest(*(f"{n} {k.values}" for n, k in space.knobs.items())),
        source=tuning.source_of(function),
        sizes=sizes,
        signature=(*other, *map(str, kernel._key(values)[len(kernel.keys) :])),
        device=name,
        versions=versions,
        policy=_digest("in process", str(MeasurePolicy()), str(kernel.options.verify)),
    )


def _as_triton(config: Config) -> Any:
    own = {n: v for n, v in config.items() if n in _LAUNCH}
    return _triton.Config({n: v for n, v in config.items() if n not in _LAUNCH}, **own)


def _numbers(values: Any) -> bool:
    return all(isinstance(v, int | float) for v in values)


def _describes(value: Any) -> bool:
    """Whether it is a descriptor of a tensor."""
    return hasattr(value, "block_shape") and isinstance(value.base, torch.Tensor)


def _floats(key: TuningKey) -> dict[str, float]:
    return {n: float(s) for n, s in key.sizes.items()}


def _quantiles(seconds: Sequence[float]) -> list[float]:
    """Milliseconds as in Triton's ``configs_timings``: the median, and a fifth from either end."""
    fifths = statistics.quantiles(seconds, n=5, method="inclusive")
    return [1e3 * s for s in (statistics.median(seconds), fifths[0], fifths[3])]


def _digest(*parts: str) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
