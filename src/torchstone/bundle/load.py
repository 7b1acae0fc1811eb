"""Load a bundle, and answer calls with it: right, or not at all.

A call inside the envelope goes to the code that was proven there. One outside it goes to the exported
program, whose guards say whether it holds. What neither can answer right raises
:class:`torchstone.errors.EnvelopeError`.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from torchstone import env
from torchstone import recipe as recipes
from torchstone.bundle import manifest as manifests
from torchstone.bundle.envelope import Outcome, compile_check
from torchstone.bundle.manifest import CODE, PROGRAM, Manifest
from torchstone.bundle.program import Program, import_types
from torchstone.bundle.write import compiles_program, runs_program
from torchstone.errors import EnvelopeError

if TYPE_CHECKING:
    from torch.utils._pytree import TreeSpec

__all__ = ["Loaded", "Stats", "load"]

T = TypeVar("T")
Flat = Callable[..., tuple[Any, ...]]
"""Positional inputs -> the leaves of the outputs."""


@dataclass
class Stats:
    """What became of the calls so far."""

    hits: int = 0
    """Answered by the proven code."""
    fallbacks: dict[str, int] = field(default_factory=dict)
    """Answered by the exported program, by reason: ``size``, ``layout``, ``value`` (of a scalar) outside
    the envelope; ``code unusable`` here, see :attr:`Loaded.reason`; ``code raised``."""
    refused: int = 0
    """Raised :class:`EnvelopeError`."""


def load(path: str | Path) -> Loaded:
    """Load a bundle.

    Every byte is checked first. Code that was built for other instruction sets or another version of
    its engine is not run: the exported program answers in its place, with a warning.

    :param path: the bundle's folder.
    :raises BundleError: naming the file that is changed, missing or extra, or the package that lacks.
    """
    directory = Path(path).resolve()
    manifest = manifests.read(directory)
    loaded = Loaded(directory, manifest)
    if loaded.reason is not None:
        warnings.warn(
            f"bundle {manifest.name!r} is served by its exported program: {loaded.reason}",
            RuntimeWarning,
            stacklevel=2,
        )
    return loaded


class Loaded:
    """A bundle that answers calls like the model: the same inputs, the same structure of outputs.

    Tensors come back without gradients. Threads may share it; their calls run one after the other.
    Made by :func:`load`.
    """

    manifest: Manifest
    """What the bundle says of itself."""
    reason: str | None
    """Why its code is not used, or what it raised last; None while all is well."""
    stats: Stats
    """What became of the calls so far."""

    def __init__(self, directory: Path, manifest: Manifest) -> None:
        self.manifest = manifest
        self.stats = Stats()
        self._directory = directory
        self._names = tuple(spec.name for spec in manifest.inputs)
        self._lock = threading.Lock()
        self._check = compile_check(manifest.envelope)
        self._tree = None if manifest.outputs is None else _tree(manifest)
        self._program: Program | None = None
        self._code: Flat | None = None
        self._ships_program = runs_program(recipes.parse(manifest.recipe))
        self.reason = None if self._ships_program else _unusable(manifest)
        if self.reason is None and not self._ships_program:
            self._code, self.reason = _attempt(_load_code, directory, manifest)
        if self._code is None or self._tree is None:  # needed from the first call on: fail now if at all
            self._fallback()

    @property
    def name(self) -> str:
        """The workload's name."""
        return self.manifest.name

    def __repr__(self) -> str:
        return f"<torchstone bundle {self.name!r}: {self.manifest.recipe}({', '.join(self._names)})>"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Answer one call.

        :param args: the model's inputs, as the bundle names them, by position or by name.
        :return: what the model returns.
        :raises EnvelopeError: if neither code nor exported program can answer the call right.
        """
        try:
            if kwargs or len(args) != len(self._names):
                args = _bind(self._names, args, kwargs)
            outcome = self._check(args)
            with self._lock, _plain_mode():
                leaves = self._answer(args, outcome)
        except EnvelopeError:
            with self._lock:
                self.stats.refused += 1
            raise
        return self._restore(leaves)

    def _answer(self, args: tuple[Any, ...], outcome: Outcome) -> tuple[Any, ...]:
        inside = outcome == "hit"
        if inside and self._code is not None:
            leaves, failure = _attempt(self._run_code, args)
            if leaves is not None:
                self.stats.hits += 1
                return leaves
            self.reason = failure
            if self.manifest.mutates:
                raise EnvelopeError(
                    f"the code raised; {', '.join(self.manifest.mutates)} may have changed: {failure}",
                    hint="call again with fresh inputs; if it keeps raising, build the bundle again",
                )
            why = "code raised"
        else:
            why = "code unusable" if inside else outcome
        leaves = self._fallback().answer(args, inside=inside)
        if inside and self._ships_program:
            self.stats.hits += 1
        else:
            self.stats.fallbacks[why] = self.stats.fallbacks.get(why, 0) + 1
        return leaves

    def _run_code(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        assert self._code is not None
        leaves = tuple(self._code(*args))
        if self._tree is not None and len(leaves) != self._tree.num_leaves:
            raise RuntimeError(f"the code gave {len(leaves)} outputs, not {self._tree.num_leaves}")
        return leaves

    def _fallback(self) -> Program:
        if self._program is None:
            self._program = Program(self._directory, self.manifest)
            if self._tree is None:
                self._tree = self._program.tree
        return self._program

    def _restore(self, leaves: tuple[Any, ...]) -> Any:
        from torch.utils import _pytree as pytree

        assert self._tree is not None
        return leaves[0] if self._tree.is_leaf() else pytree.tree_unflatten(list(leaves), self._tree)


def _load_code(directory: Path, manifest: Manifest) -> Flat:
    from torchstone import backends

    recipe = recipes.parse(manifest.recipe)
    if not compiles_program(recipe):
        return backends.load_artifact(recipe, directory / CODE, None)
    # the compiler may write to its folder, and a bundle never changes
    with tempfile.TemporaryDirectory(prefix="torchstone-") as scratch:
        if (directory / CODE).is_dir():
            shutil.copytree(directory / CODE, scratch, dirs_exist_ok=True)
        return backends.load_artifact(recipe, Path(scratch), directory / PROGRAM)


def _attempt(function: Callable[..., T], *args: Any) -> tuple[T | None, str | None]:
    """The result and None, or None and what was raised."""
    try:
        return function(*args), None
    except EnvelopeError:
        raise
    except Exception as error:  # noqa: BLE001 - any engine may raise anything, and the fallback answers
        return None, f"{type(error).__name__}: {str(error).strip() or 'no message'}"


def _unusable(manifest: Manifest) -> str | None:
    """Why the code cannot run on this machine, or None."""
    for package, built in manifest.engine.items():
        try:
            here = metadata.version(package)
        except metadata.PackageNotFoundError:
            return f"{package} is not installed (pip install '{package}=={built}')"
        if here != built:
            return f"it was built with {package} {built}, and here is {here}"
    machine = env.environment(None)
    if manifest.envelope.isa and manifest.environment.platform != machine.platform:
        return f"it was compiled for {manifest.environment.platform}, and here is {machine.platform}"
    lacking = sorted(set(manifest.envelope.isa) - set(machine.isa))
    if lacking:
        return f"it may use {', '.join(lacking)}, which this processor lacks"
    return None


def _bind(names: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Positional inputs from positional and named ones."""
    takes = f"the inputs are {', '.join(names)}"
    given = dict(zip(names, args, strict=False))
    if len(args) > len(names):
        raise EnvelopeError(f"{len(args)} inputs were given, {len(names)} are taken", hint=takes)
    for name, value in kwargs.items():
        if name in given or name not in names:
            problem = "was given twice" if name in given else "is not an input"
            raise EnvelopeError(f"{name!r} {problem}", hint=takes)
        given[name] = value
    missing = [name for name in names if name not in given]
    if missing:
        raise EnvelopeError(f"missing input: {', '.join(missing)}", hint=takes)
    return tuple(given[name] for name in names)


def _plain_mode() -> contextlib.AbstractContextManager[Any]:
    """No gradients and no autocast, as when the code was judged; free where that is so already."""
    import torch

    if torch.is_autocast_enabled("cpu"):
        stack = contextlib.ExitStack()
        stack.enter_context(torch.no_grad())
        stack.enter_context(torch.autocast("cpu", enabled=False))
        return stack
    return torch.no_grad() if torch.is_grad_enabled() else contextlib.nullcontext()


def _tree(manifest: Manifest) -> TreeSpec:
    from torch.utils import _pytree as pytree

    import_types(manifest)
    assert manifest.outputs is not None
    return pytree.treespec_loads(manifest.outputs)
