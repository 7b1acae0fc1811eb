"""Records every ATen operation of a run: :class:`Trace` from a module and its inputs.

A dispatch mode below autograd sees the operations that really run, whatever Python led to them. Values
are known by the memory that they lie in, so what only renames a tensor (``detach``, a view of the same
layout) is no operation. Kept values are copied when an operation is about to write to their memory;
whoever reads that memory afterwards reads a new value (:data:`~torchstone.verify.differ.trace.ALIAS`).
"""

from __future__ import annotations

import linecache
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from torchstone.compat import differ as doors
from torchstone.records import Origin
from torchstone.verify.differ.trace import ALIAS, BUDGET_BYTES, Op, Ref, Trace, Value, sample
from torchstone.verify.drive import float64_call, names_of, widened, widened_inputs
from torchstone.verify.tensors import copies

__all__ = ["record", "record_float64"]

_TORCH = str(Path(torch.__file__).parent)
_OURS = str(Path(__file__).parents[2])
_FRAME = re.compile(r'File "([^"]+)", line (\d+), in [^\n]*(?:\n(?! *File ")\s*([^\n]*))?')
Key = tuple[Any, ...]
Layout = list[Any]
"""Offset, shape and strides of a value in its memory, in elements."""


def record(
    module: Callable[..., Any], inputs: Sequence[Any], label: str, *, budget_bytes: int = BUDGET_BYTES
) -> Trace:
    """Run a module once, without gradients and from a fixed seed, and record what it does.

    Whatever the module raises goes through.

    :param module: a module, or any callable; of a graph module, sources are those of its nodes.
    :param inputs: positional; they are copied.
    :param budget_bytes: how many bytes of results to keep whole, see ``BUDGET_BYTES``.
    """
    return _recorded(module, copies(tuple(inputs)), _Recorder(label, budget_bytes), lambda run: run)


def record_float64(
    module: nn.Module, inputs: Sequence[Any], label: str = "float64", *, budget_bytes: int = BUDGET_BYTES
) -> Trace:
    """Record a copy of the module with parameters, inputs and new tensors in float64.

    :raises RuntimeError: where an operation has no float64 kernel.
    """
    given = copies(widened_inputs(tuple(inputs)))
    trace = _recorded(widened(module), given, _Recorder(label, budget_bytes), float64_call)
    trace.widened = True
    return trace


def _recorded(
    module: Callable[..., Any],
    inputs: tuple[Any, ...],
    recorder: _Recorder,
    wrap: Callable[[Any], Callable[..., Any]],
) -> Trace:
    with torch.no_grad(), torch.random.fork_rng(devices=[]), ExitStack() as stack:
        torch.manual_seed(0)
        run = module
        if isinstance(module, nn.Module):
            recorder.take_state(module)
            run = _sourced(module, recorder, stack)
        recorder.take_inputs(inputs)
        call = wrap(run)
        with recorder:
            result = call(*inputs)
        recorder.finish(result)
    return recorder.trace


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call] # torch's __init_subclass__
    """Fills :attr:`trace` with the operations that run while it is entered."""

    def __init__(self, label: str, budget_bytes: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # torch's class
        self.trace = Trace(label)
        self.node: torch.fx.Node | None = None
        self.modules: list[str] = []
        self._budget = budget_bytes
        self._known: dict[Key, int] = {}
        self._written: dict[int, list[int]] = {}  # storage -> values written to it, latest last
        self._seen: dict[int, int] = {}  # value -> how many writes its storage had seen when it was made
        self._held: dict[int, list[int]] = {}  # storage -> values kept whole that lie there
        self._keys: dict[int, list[Key]] = {}  # storage -> keys of the values that lie there
        self._layouts: dict[int, Layout] = {}
        self._state: dict[int, torch.Tensor] = {}  # inputs, parameters and buffers, by value
        self._alive: list[Any] = []  # odd tensors known by identity must not be freed

    def take_state(self, module: nn.Module) -> None:
        """Name parameters and buffers."""
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            self.trace.parameters[name] = self._given(tensor, name)

    def take_inputs(self, inputs: Sequence[Any]) -> None:
        """Name the inputs."""
        for position, value in enumerate(inputs):
            if isinstance(value, torch.Tensor):
                self.trace.inputs.append(self._given(value, f"input[{position}]"))

    def finish(self, result: Any) -> None:
        """Name the results: what is returned, then inputs and buffers that were written to."""
        flat = tree_flatten(result)[0]
        for name, leaf in zip(names_of(result), flat, strict=True):
            value = self._value(leaf) if isinstance(leaf, torch.Tensor) else None
            self.trace.outputs.append((name, value))
        for number, tensor in self._state.items():
            last, first = self._value(tensor), self.trace.values[number]
            if last != number:
                self._keep_before_write(tensor)
                self.trace.outputs.append((f"{first.name} afterwards", last))
                assert first.tensor is not None  # leaves are kept whole
                tensor.copy_(first.tensor)  # the module is the caller's: as it was

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        changed = doors.written(func, args, kwargs)
        read_args, read_kwargs = self._read(args), self._read(kwargs)
        for tensor in changed:
            self._keep_before_write(tensor)
        result = func(*args, **kwargs)
        flat = tree_flatten(result)[0]
        self._forget(flat, (args, kwargs))
        if not changed and all(self._is_renamed(leaf) for leaf in flat) and flat:
            return result
        outs = self._wrote(changed) if changed else {}
        numbers = [self._made(leaf, outs) for leaf in flat]
        numbers += [outs[_key(tensor)] for tensor in changed]
        op = Op(doors.name_of(func), read_args, read_kwargs, tuple(numbers), self._origin())
        self.trace.ops.append(op)
        return result

    # --- values -----------------------------------------------------------------------------------

    def _read(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return Ref(self._value(value))
        if isinstance(value, dict):
            return {key: self._read(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(self._read(item) for item in value)
        return value if isinstance(value, _LITERALS) else repr(value)

    def _value(self, tensor: torch.Tensor) -> int:
        """The number of a tensor's present value."""
        key = _key(tensor)
        number = self._known.get(key)
        if number is None:
            return self._leaf(tensor, "constant")
        storage = _storage(tensor)
        writes = self._written.get(storage, [])
        since = writes[self._seen[number] :]
        kept = self.trace.values[number].tensor
        if not since or (kept is not None and torch.equal(kept, tensor)):  # written beside it
            self._seen[number] = len(writes)
            return number
        new = self._new(tensor)
        operands = (number, *dict.fromkeys(since))
        args = tuple(Ref(n) for n in operands)
        # a view in another dtype cannot be said in elements
        plain = len({self.trace.values[n].dtype for n in operands}) == 1
        how = {"layouts": [self._layouts[n] for n in operands]} if plain else {}
        self.trace.ops.append(Op(ALIAS, args, how, (new,), self._origin()))
        return new

    def _forget(self, results: list[Any], operands: Any) -> None:
        """Memory that is new may have been that of a value of which only a sample was kept."""
        old = {_storage(t) for t in tree_flatten(operands)[0] if isinstance(t, torch.Tensor)}
        for leaf in results:
            if isinstance(leaf, torch.Tensor) and _storage(leaf) not in old:
                storage = _storage(leaf)
                for key in self._keys.pop(storage, ()):
                    self._known.pop(key, None)
                self._written.pop(storage, None)

    def _given(self, tensor: torch.Tensor, name: str) -> int:
        number = self._leaf(tensor, name)
        self._state[number] = tensor
        return number

    def _leaf(self, tensor: torch.Tensor, name: str) -> int:
        number = self._new(tensor, whole=True)
        self.trace.values[number].name = name
        return number

    def _new(self, tensor: torch.Tensor, *, whole: bool = False) -> int:
        number = len(self.trace.values)
        value = Value(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
        self.trace.values.append(value)
        storage = _storage(tensor)
        self._known[_key(tensor)] = number
        self._keys.setdefault(storage, []).append(_key(tensor))
        self._seen[number] = len(self._written.get(storage, ()))
        if tensor.layout is not torch.strided or type(tensor) not in (
            torch.Tensor,
            nn.Parameter,
            nn.Buffer,
        ):
            self._alive.append(tensor)  # sparse, quantized, a subclass: followed, but not compared
            return number
        self._layouts[number] = [tensor.storage_offset(), list(tensor.shape), list(tensor.stride())]
        size = tensor.numel() * tensor.element_size()
        if whole or size <= self._budget:
            self._budget -= 0 if whole else size
            value.tensor = tensor.detach()
            self._held.setdefault(storage, []).append(number)
        else:
            value.sample = sample(tensor)
        return number

    def _made(self, leaf: Any, written: dict[Key, int]) -> int | None:
        if not isinstance(leaf, torch.Tensor):
            return None
        known = written.get(_key(leaf))
        return self._new(leaf) if known is None else known

    def _is_renamed(self, leaf: Any) -> bool:
        """Whether a result is a value that is known already: the same memory in the same layout."""
        if not isinstance(leaf, torch.Tensor):
            return False
        number = self._known.get(_key(leaf))
        return number is not None and self._seen[number] == len(self._written.get(_storage(leaf), ()))

    def _keep_before_write(self, tensor: torch.Tensor) -> None:
        for number in self._held.pop(_storage(tensor), ()):
            kept = self.trace.values[number].tensor
            self.trace.values[number].tensor = None if kept is None else kept.clone()

    def _wrote(self, changed: list[torch.Tensor]) -> dict[Key, int]:
        """New values of the tensors that an operation wrote to."""
        made: dict[Key, int] = {}
        for tensor in changed:
            if _key(tensor) in made:
                continue
            writes = self._written.setdefault(_storage(tensor), [])
            writes.append(len(self.trace.values))
            made[_key(tensor)] = self._new(tensor)
        return made

    # --- origins -----------------------------------------------------------------------------------

    def _origin(self) -> Origin:
        if self.node is not None:
            return origin_of(self.node)
        module = self.modules[-1] if self.modules else ""
        frame = sys._getframe(2)
        while frame is not None:
            file = frame.f_code.co_filename
            if not file.startswith((_TORCH, _OURS, "<")):
                text = linecache.getline(file, frame.f_lineno).strip()
                return Origin(file=file, line=frame.f_lineno, text=text, module=module)
            if frame.f_back is None:
                break
            frame = frame.f_back
        return Origin(module=module)


_LITERALS = (
    bool,
    int,
    float,
    complex,
    str,
    type(None),
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
)


def origin_of(node: torch.fx.Node) -> Origin:
    """The user's line and submodule that a graph's node came from, as far as its metadata says."""
    stack = node.meta.get("nn_module_stack") or {}
    path = doors.own_module(list(stack.values())[-1][0]) if stack else ""
    frames = _FRAME.findall(node.meta.get("stack_trace") or "")
    for file, line, text in reversed(frames):
        if not file.startswith((_TORCH, _OURS, "<")):
            source = text.strip() or linecache.getline(file, int(line)).strip()
            return Origin(file=file, line=int(line), text=source, module=path)
    return Origin(module=path)


def _key(tensor: torch.Tensor) -> Key:
    """What tells a value from others: where it lies, and how."""
    if tensor.layout is not torch.strided or type(tensor) not in (torch.Tensor, nn.Parameter, nn.Buffer):
        return ("object", id(tensor))
    if tensor.numel() == 0:
        return ("empty", tensor.dtype, tuple(tensor.shape))
    flags = (tensor.is_conj(), tensor.is_neg())
    return (
        _storage(tensor),
        tensor.storage_offset(),
        tuple(tensor.shape),
        tensor.stride(),
        tensor.dtype,
        flags,
    )


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else id(tensor)


class _Sourced(torch.fx.Interpreter):
    """Runs a graph module node by node, telling the recorder which."""

    def __init__(self, module: torch.fx.GraphModule, recorder: _Recorder) -> None:
        super().__init__(module)
        self._recorder = recorder

    def run_node(self, n: torch.fx.Node) -> Any:
        """As the base class."""
        self._recorder.node = n
        return super().run_node(n)


def _sourced(module: nn.Module, recorder: _Recorder, stack: ExitStack) -> Callable[..., Any]:
    """What to call, so that the recorder knows where each operation comes from."""
    if isinstance(module, torch.fx.GraphModule):
        return _Sourced(module, recorder).run
    for name, part in module.named_modules():
        stack.enter_context(_hooked(part, name, recorder.modules))
    return module


@contextmanager
def _hooked(module: nn.Module, name: str, path: list[str]) -> Iterator[None]:
    def enter(*_: Any) -> None:
        path.append(name)

    def leave(*_: Any) -> None:
        path.pop()

    handles = (
        module.register_forward_pre_hook(enter),
        module.register_forward_hook(leave, always_call=True),
    )
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
