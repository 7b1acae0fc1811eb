"""Watching a call's ATen operations: what each costs, and which module and source line called it."""

from __future__ import annotations

import linecache
import sys
import sysconfig
import weakref
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules import module as hooks
from torch.utils._python_dispatch import TorchDispatchMode

from torchstone.ops import flops
from torchstone.ops.calls import storage_of, tensors
from torchstone.ops.moved import Flow, flow
from torchstone.workload.keyword import unwrap

__all__ = ["Cost", "Located", "ModuleStack", "Place", "Trace", "marked", "source_text", "trace"]

_TORCH = str(Path(torch.__file__).parent)
_OURS = str(Path(__file__).parents[1])
_STDLIB = sysconfig.get_paths()["stdlib"]


class Place(NamedTuple):
    """Where an operation was called."""

    op: str
    """``aten.addmm``."""
    target: Any
    """``torch.ops.aten.addmm.default`` itself."""
    stack: tuple[str, ...]
    """Paths of the modules that were running, outermost first."""
    file: str
    """Source file of the innermost frame that is not torch's."""
    line: int
    """Its line."""


class Cost(NamedTuple):
    """What one call of an operation costs."""

    flops: int
    """Of products."""
    other: int
    """One an element."""
    bytes: int
    """Read and written."""
    dtype: str
    """In which it computes, without torch's prefix; empty where it has no tensors."""
    how: flops.How
    """How its FLOPs are known."""


class Trace(NamedTuple):
    """All operations of one call of a model."""

    calls: Counter[tuple[Place, Cost]]
    """How often each was called so."""
    live_bytes: int
    """Most bytes of intermediate tensors alive at once, outputs included."""
    least_bytes: int
    """Inputs, outputs and what is read of parameters and buffers, each once."""


def trace(module: nn.Module, args: tuple[Any, ...]) -> Trace:
    """Run a module once and count.

    The module runs for real: what it computes decides where it goes. Operations that run inside another
    (a fused layer, a compiled region) are that other's.

    :param module: takes ``args`` by position.
    """
    with ModuleStack(module) as stack, _Counting(stack, module, args) as counting, torch.no_grad():
        result = module(*args)
    boundary = sum(t.numel() * t.element_size() for t in tensors([*args, result]))
    return Trace(counting.calls, counting.most, boundary + counting.weight_bytes)


class ModuleStack:
    """Keeps track of which of a model's modules are running, while it is entered.

    torch.utils.module_tracker names them by class; here they have their paths in the model.
    """

    def __init__(self, module: nn.Module) -> None:
        self._paths = {id(m): path for path, m in unwrap(module).named_modules()}
        self._running: list[str] = []
        self._handles: tuple[Any, ...] = ()

    @property
    def running(self) -> tuple[str, ...]:
        """Paths, outermost first."""
        return tuple(self._running)

    def __enter__(self) -> ModuleStack:
        before = hooks.register_module_forward_pre_hook(self._enter)
        after = hooks.register_module_forward_hook(self._leave, always_call=True)
        self._handles = (before, after)
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._running.clear()

    def _enter(self, module: nn.Module, _args: Any) -> None:
        path = self._paths.get(id(module))
        if path is not None:
            self._running.append(path)

    def _leave(self, module: nn.Module, _args: Any, _result: Any) -> None:
        if id(module) in self._paths and self._running:
            self._running.pop()


class Located(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has no annotations there
    """A dispatch mode that knows where each operation is called from."""

    supports_higher_order_operators = True

    def __init__(self, stack: ModuleStack) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._stack = stack

    def place(self, op: Any) -> Place:
        """Where ``op`` is being called from; only to be asked within ``__torch_dispatch__``."""
        packet = str(op.overloadpacket) if isinstance(op, torch._ops.OpOverload) else str(op)
        file, line = _caller()
        return Place(packet, op, self._stack.running, file, line)


class _Counting(Located):  # type: ignore[no-untyped-call]
    def __init__(self, stack: ModuleStack, module: nn.Module, args: tuple[Any, ...]) -> None:
        super().__init__(stack)
        self.calls: Counter[tuple[Place, Cost]] = Counter()
        self.most = 0
        self._alive: dict[int, int] = {}
        self._total = 0
        weights = [*module.parameters(), *module.buffers()]
        self._weights = {storage_of(t): t.untyped_storage().nbytes() for t in weights if storage_of(t)}
        self._read: Counter[int] = Counter()
        self._given = {storage_of(t) for t in tensors(args)}.union(self._weights)

    @property
    def weight_bytes(self) -> int:
        """Bytes of parameters and buffers that were read: of a table, the rows that were asked for."""
        return sum(min(read, self._weights[key]) for key, read in self._read.items())

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        counted = flops.count(func, args, kwargs, result)
        moved = flow(func, args, kwargs, result)
        given = [*tensors(args), *tensors(kwargs.values())]
        results = tensors(result)
        dtype = _dtype([*given, *results])
        cost = Cost(counted.products, counted.other, moved.bytes, dtype, counted.how)
        self.calls[self.place(func), cost] += 1
        self._note_weights(moved)
        self._keep({storage_of(t) for t in given}, results)
        return result

    def _note_weights(self, moved: Flow) -> None:
        for tensor, read in moved.reads:
            key = storage_of(tensor)
            if key in self._weights:
                self._read[key] += read

    def _keep(self, held: set[int], results: list[torch.Tensor]) -> None:
        """Count a result's memory as alive until torch frees it."""
        for tensor in results:
            key = storage_of(tensor)
            if key == 0 or key in held or key in self._alive or key in self._given:
                continue
            storage = tensor.untyped_storage()
            self._alive[key] = storage.nbytes()
            self._total += storage.nbytes()
            weakref.finalize(storage, self._free, key).atexit = False
        self.most = max(self.most, self._total)

    def _free(self, key: int) -> None:
        self._total -= self._alive.pop(key, 0)


def _dtype(given: list[torch.Tensor]) -> str:
    """That of the first floating tensor, else of the first tensor."""
    floats = (t for t in given if t.is_floating_point())
    first = next(floats, given[0] if given else None)
    return "" if first is None else str(first.dtype).removeprefix("torch.")


def _caller() -> tuple[str, int]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not _is_model_code(frame.f_code.co_filename):
        frame = frame.f_back
    return ("", 0) if frame is None else (frame.f_code.co_filename, frame.f_lineno)


@lru_cache(maxsize=4096)
def _is_model_code(file: str) -> bool:
    if file.startswith((_TORCH, _OURS, "<")):
        return False
    return not file.startswith(_STDLIB) or "-packages" in file


def source_text(file: str, line: int) -> str:
    """What a line of source says."""
    return linecache.getline(file, line).strip()


@contextmanager
def marked(stack: ModuleStack, mark: Callable[[Place], Any]) -> Generator[None, None, None]:
    """Have each operation run within ``mark(place)``, a context manager."""
    with stack, _Marking(stack, mark):
        yield


class _Marking(Located):  # type: ignore[no-untyped-call]
    def __init__(self, stack: ModuleStack, mark: Callable[[Place], Any]) -> None:
        super().__init__(stack)
        self._mark = mark

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with self._mark(self.place(func)):
            return func(*args, **(kwargs or {}))
