"""Doors into torch's tracing machinery: make_fx, the pre-dispatch level, fake tensors.

Pre-dispatch is where ``linear``, ``layer_norm`` and ``scaled_dot_product_attention`` are still one
operation each, which is what engines want to see, and below Python, so that no wrapper is missed.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch import fx
from torch._subclasses.fake_tensor import (
    FakeTensor,
    FakeTensorMode,
    in_kernel_invocation_manager,
)
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode, make_fx
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = [
    "FakeTensor",
    "PreDispatchMode",
    "ShapeCache",
    "draws_random_numbers",
    "fake_mode",
    "graph_of",
    "quiet",
    "sizes_through",
]

_DEVICE = torch.ops.prim.device.default


def fake_mode() -> FakeTensorMode:
    """Tensors without memory or values. Real tensors that a model holds by itself stay constants."""
    return FakeTensorMode(allow_non_fake_inputs=True, allow_fallback_kernels=False)


def graph_of(function: Callable[..., Any], fakes: list[torch.Tensor]) -> fx.GraphModule:
    """make_fx at the pre-dispatch level; ``fakes`` share one fake mode, sizes become numbers."""
    with torch.no_grad():
        return make_fx(function, tracing_mode="fake", pre_dispatch=True)(*fakes)


class PreDispatchMode(ProxyTorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's class
    """Sees each operation as :func:`graph_of` does, without make_fx's proxies and their cost.

    torch lets only its own kinds of mode in at this level, so this is one of them by name and shares
    nothing else with it.
    """

    def __init__(self) -> None:
        TorchDispatchMode.__init__(self, torch._C.DispatchKey.PreDispatch)  # type: ignore[no-untyped-call]
        self.pre_dispatch = True

    def __enter__(self) -> Any:
        from torch._dispatch.python import enable_python_dispatcher

        self._stack = contextlib.ExitStack()
        self._stack.enter_context(enable_python_dispatcher())
        self._stack.enter_context(_Passing())  # fused fast paths ask whether there is one, as in make_fx
        return TorchDispatchMode.__enter__(self)  # type: ignore[no-untyped-call]

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool | None:
        TorchDispatchMode.__exit__(self, exc_type, exc_value, traceback)  # type: ignore[no-untyped-call]
        return self._stack.__exit__(exc_type, exc_value, traceback)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Hand every operation but the question for a tensor's device to :meth:`operation`."""
        if func is _DEVICE:
            return func(*args, **(kwargs or {}))
        return self.operation(func, args, kwargs or {})

    def operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Called for each operation; gives its result."""
        raise NotImplementedError  # abstract: what is done with it is the subclass's business


class _Passing(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Let the fake tensors' own log be silent: what they raise is told by whoever asked."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


class ShapeCache:
    """What operations give on inputs of known metadata, so that the twelfth layer costs nothing new.

    Only for operations that write to nothing, whose results lie in memory of their own and do not
    depend on values. A composite operation is one entry: its decomposition is not run again. (Fake
    tensors have a cache of their own below, by primitive operation, which costs several times more.)
    """

    def __init__(self, mode: FakeTensorMode) -> None:
        self.mode = mode
        self._known: dict[Any, Any] = {}

    def __call__(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of an operation, as fake tensors."""
        if not isinstance(func, torch._ops.OpOverload) or func._schema.is_mutable:
            return func(*args, **kwargs)
        try:
            key = (func, _metadata(args), _metadata(tuple(kwargs.items())), torch.get_default_dtype())
            known = self._known.get(key)
        except TypeError:  # an argument without a hash
            return func(*args, **kwargs)
        if known is not None:
            return self._again(known)
        result = func(*args, **kwargs)
        if self._independent(result, args, kwargs):
            self._known[key] = _described(result)
        return result

    def _independent(self, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        leaves = pytree.tree_leaves(result)
        if not all(type(leaf) is FakeTensor and leaf.constant is None for leaf in leaves):
            return False
        given = {
            leaf.untyped_storage()._cdata
            for leaf in pytree.tree_leaves((args, kwargs))
            if isinstance(leaf, torch.Tensor)
        }
        own = [leaf.untyped_storage()._cdata for leaf in leaves]
        return len(set(own)) == len(own) and given.isdisjoint(own)

    def _again(self, known: Any) -> Any:
        if isinstance(known, _Described):
            with in_kernel_invocation_manager(self.mode):
                meta = torch.empty_strided(known.shape, known.stride, dtype=known.dtype, device="meta")
            return FakeTensor(self.mode, meta, known.device)
        return type(known)(self._again(part) for part in known)


class _Described(NamedTuple):
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


def _described(result: Any) -> Any:
    if isinstance(result, torch.Tensor):
        with torch._C.DisableTorchFunction():
            shape, stride = tuple(torch.Tensor.size(result)), result.stride()
            return _Described(shape, stride, result.dtype, _device(result))
    return type(result)(_described(part) for part in result)


def _device(tensor: torch.Tensor) -> torch.device:
    device: torch.device = tensor.fake_device if isinstance(tensor, FakeTensor) else tensor.device
    return device


def _metadata(value: Any) -> Any:
    """Hashable: all that the metadata of a result can depend on.

    :raises TypeError: where there is no saying.
    """
    if type(value) is FakeTensor:
        return _described(value)
    if isinstance(value, list | tuple):
        return tuple(_metadata(part) for part in value)
    if isinstance(value, torch.Tensor):
        raise TypeError("a real tensor or a subclass may matter by its values")
    return type(value), value  # 1, 1.0 and True are equal, and give other dtypes


def draws_random_numbers(func: Any) -> bool:
    """Whether an operation may use the random state."""
    return isinstance(func, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in func.tags


_through = threading.local()
_patch = threading.Lock()
_users = 0


@contextlib.contextmanager
def sizes_through(read: Callable[[torch.Tensor, int, int], int]) -> Iterator[None]:
    """Let ``read(tensor, axis, size)`` say what Python sees as a fake tensor's sizes, in this thread.

    What is read below Python (by kernels, by the argument parser) is not affected, nor are other
    threads. The class is as it was once nobody traces.
    """
    before = getattr(_through, "read", None)
    _count(1)
    _through.read = read
    try:
        yield
    finally:
        _through.read = before
        _count(-1)


def _count(change: int) -> None:
    global _users  # noqa: PLW0603  one class, one count
    with _patch:
        _users += change
        if _users and "shape" not in FakeTensor.__dict__:
            FakeTensor.shape = property(_shape)  # type: ignore[assignment]
            FakeTensor.size = _size  # type: ignore[assignment]
        elif not _users:
            del FakeTensor.shape, FakeTensor.size


def _shape(tensor: torch.Tensor) -> torch.Size:
    plain: torch.Size = torch.Tensor.shape.__get__(tensor)  # type: ignore[attr-defined]
    read = getattr(_through, "read", None)
    if read is None:
        return plain
    return torch.Size(read(tensor, axis, size) for axis, size in enumerate(plain))


def _size(tensor: torch.Tensor, dim: int | None = None) -> Any:
    if getattr(_through, "read", None) is None:
        return torch.Tensor.size(tensor) if dim is None else torch.Tensor.size(tensor, dim)
    return _shape(tensor) if dim is None else _shape(tensor)[dim]
