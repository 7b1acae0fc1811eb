"""The exported program as a bundle runs it: under its guards, and with the loader's errors."""

from __future__ import annotations

import functools
import importlib
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchstone.bundle import manifest as manifests
from torchstone.bundle import weights
from torchstone.bundle.envelope import Envelope
from torchstone.bundle.manifest import PROGRAM, WEIGHTS, Manifest, output_types
from torchstone.errors import BundleError, EnvelopeError
from torchstone.records import TensorSpec

if TYPE_CHECKING:
    from torch.export import ExportedProgram
    from torch.utils._pytree import TreeSpec

__all__ = ["Program", "import_types"]


class Program:
    """The exported program, run under its own guards."""

    def __init__(self, directory: Path, manifest: Manifest) -> None:
        names = [n for n in manifest.files if n == PROGRAM or n.endswith(".safetensors")]
        manifests.check_files(directory, manifest, names)  # it may be long since the bundle was opened
        import_types(manifest)
        program = weights.attach(directory / PROGRAM, directory / WEIGHTS if WEIGHTS in names else None)
        self._module = _run(program, check_guards=True)
        # torch leaves the guards out when any frame of the call stack lies in a path that it knows
        self._guarded = hasattr(self._module, "_guards_fn")
        # derived sizes (5*b) are guarded to be 2 or more, whether that matters or not (pytorch#181097)
        self._unguarded = functools.cache(lambda: _run(program, check_guards=False))
        self._envelope = manifest.envelope
        self._mutates = bool(manifest.mutates)
        tree = program.call_spec.out_spec
        assert tree is not None  # export always writes it
        self.tree: TreeSpec = tree

    def answer(self, args: tuple[Any, ...], *, inside: bool) -> tuple[Any, ...]:
        """The leaves of the outputs.

        :param inside: whether the call is proven, so that guards against small sizes do not matter.
        :raises EnvelopeError: if the program does not hold for these inputs.
        """
        if not inside and not self._guarded:
            raise EnvelopeError("this call is outside what was proven, and torch dropped the guards")
        from torch.utils import _pytree as pytree

        attempts = [(self._module, args)]
        if inside and _has_small_size(self._envelope, args):
            attempts.append((self._unguarded(), args))
        if not self._mutates and not all(_is_dense(a) for a in args):
            # the trace may hold a view() that takes contiguous inputs only
            attempts += [(module, _dense(args)) for module, _ in attempts]
        failures = []
        for module, given in attempts:
            try:
                return tuple(pytree.tree_leaves(module(*given)))
            except (AssertionError, IndexError, RuntimeError, ValueError) as error:
                failures.append(error)
        place = "inside what was proven, but" if inside else "outside what was proven, and"
        raise EnvelopeError(
            f"{place} the exported program does not hold here: {failures[-1]}",
            hint="change the input as the message says, or declare the wider range and build again",
        ) from failures[-1]


def _run(program: ExportedProgram, *, check_guards: bool) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own deprecations
        return program.module(check_guards=check_guards)


def _has_small_size(envelope: Envelope, args: tuple[Any, ...]) -> bool:
    """Whether a dim has the size 0 or 1, in multiples."""
    multiples = {dim.name: dim.multiple for dim in envelope.dims}
    return any(
        size // multiples[name] < 2
        for spec, value in zip(envelope.inputs, args, strict=True)
        if isinstance(spec, TensorSpec)
        for name, size in zip(spec.shape, value.shape, strict=True)
        if isinstance(name, str) and name in multiples
    )


def _dense(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The inputs with every tensor contiguous, conjugation and negation carried out."""
    import torch

    return tuple(
        a.detach().resolve_conj().resolve_neg().contiguous() if isinstance(a, torch.Tensor) else a
        for a in args
    )


def _is_dense(value: Any) -> bool:
    import torch

    return not isinstance(value, torch.Tensor) or value.is_contiguous()


@functools.cache
def _import_module(name: str) -> None:
    importlib.import_module(name)


def import_types(manifest: Manifest) -> None:
    """Import the modules that register the containers of the outputs.

    :raises BundleError: naming the package to install.
    """
    for name in output_types(manifest.outputs):
        try:
            _import_module(name.rpartition(".")[0])
        except ImportError as error:
            raise BundleError(
                f"the model returns a {name}, which cannot be imported here: {error}",
                hint=f"pip install {' '.join(manifest.requires)}",
            ) from None
