"""Operations as kernels of ours, where Triton runs: one pass over memory where a compiler takes several.

Whether a kernel pays is not decided here: a compiler may fuse an operation with its neighbours, which it
cannot once that is an operator of ours. A recipe with these rules is one candidate, one without another.
What a kernel refuses is left to the compiler. Elsewhere than where Triton runs the rules do not fire.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from torchstone.kernels import base, registry
from torchstone.rewrite.families.arguments import each, known, made, number
from torchstone.rewrite.families.longhand import SQUARES, mean_of, over_root
from torchstone.rewrite.pattern import Op, V, op
from torchstone.rewrite.rule import Rule

__all__ = ["RULES"]

aten = torch.ops.aten
_Arguments = Callable[[SimpleNamespace], tuple[Any, ...] | None]
_X = V("x")
_KERNELS = {kernel.name: kernel for kernel in registry.KERNELS}
_ACTIVATIONS = {"": None, "relu": aten.relu.default, "silu": aten.silu.default}


def _launches(device: torch.device) -> bool:
    return base.launches(device.type)


def _ours(name: str, kernel: str, pattern: Op, arguments: _Arguments, **domain: Any) -> Rule:
    """A rule that calls a kernel with what ``arguments`` makes of the pattern's variables.

    :param arguments: may give None, where the kernel has no word for them.
    """
    found = _KERNELS[kernel]

    def replacement(call: SimpleNamespace) -> Any:
        given = arguments(call)
        if given is None or not isinstance(given[0], torch.Tensor) or given[0].dim() == 0:
            return NotImplemented
        narrow = given[0].dtype is not torch.float64  # which the proof computes in, and no kernel does
        if narrow and found.refuses(*given) is not None:
            return NotImplemented
        return found.op(*given)

    replacement.__doc__ = f"{name} = torchstone::{kernel}."
    shapes, constants = domain.pop("shapes"), domain.pop("constants", {})
    more = {"family": "kernels", "always": True, "runs": _launches}
    return made(name, pattern, shapes=shapes, constants=constants, **more)(replacement)


def _softmax(call: SimpleNamespace) -> tuple[Any, ...]:
    return call.x, call.dim, call.softmax is aten.log_softmax.int


def _last_dims(call: SimpleNamespace, bias: Any) -> tuple[Any, ...] | None:
    shape = call.shape
    if not known(shape) or list(call.x.shape[-len(shape) :]) != list(shape):
        return None
    dims = list(range(call.x.dim() - len(shape), call.x.dim()))
    return call.x, dims, call.weight, bias, call.eps


def _layer_norm(call: SimpleNamespace) -> tuple[Any, ...] | None:
    return _last_dims(call, call.bias)


def _rms_norm(call: SimpleNamespace) -> tuple[Any, ...] | None:
    return None if call.eps is None else _last_dims(call, None)


def _rms_along(call: SimpleNamespace) -> tuple[Any, ...] | None:
    dims = call.dims if isinstance(call.dims, list | tuple) else [call.dims]
    if not known(dims) or len(dims) != 1 or not number(call.eps) or call.eps < 0:
        return None
    return call.x, [dims[0] % call.x.dim()], None, None, float(call.eps)


def _group_norm(activation: str) -> _Arguments:
    def arguments(call: SimpleNamespace) -> tuple[Any, ...]:
        return call.x, call.groups, call.weight, call.bias, call.eps, activation or "none"

    return arguments


def _instance_norm(call: SimpleNamespace) -> tuple[Any, ...] | None:
    if not known([call.x.shape[1]]) or call.x.dim() < 3:
        return None
    return call.x, call.x.shape[1], call.weight, call.bias, call.eps, "none"


def _reduction(kind: str) -> _Arguments:
    def arguments(call: SimpleNamespace) -> tuple[Any, ...] | None:
        dims = call.dims if isinstance(call.dims, list | tuple) else [call.dims]
        return (call.x, kind, list(dims), call.keepdim) if known(dims) and dims else None

    return arguments


def _scan(kind: str, *, reverse: bool = False) -> _Arguments:
    def arguments(call: SimpleNamespace) -> tuple[Any, ...] | None:
        if reverse and {d % call.x.dim() for d in (*call.a, *call.b)} != {call.dim % call.x.dim()}:
            return None
        return call.x, None, kind, call.dim, reverse, False

    return arguments


def _cross_entropy(call: SimpleNamespace) -> tuple[Any, ...] | None:
    if call.targets.dtype != torch.int64 or call.targets.dim() != call.x.dim() - 1:
        return None
    return call.x, call.targets, ("none", "mean", "sum")[call.reduction], call.ignored


def _max_pool(many: int) -> _Arguments:
    def arguments(call: SimpleNamespace) -> tuple[Any, ...] | None:
        if call.x.dim() != many + 2:
            return None
        kernel = each(call.kernel, many)
        stride = each(call.stride, many) if call.stride else kernel
        padding, dilation = each(call.padding, many), each(call.dilation, many)
        if None in (kernel, stride, padding, dilation):
            return None
        return call.x, "max", kernel, stride, padding, dilation, call.ceil, True

    return arguments


def _avg_pool(many: int) -> _Arguments:
    def arguments(call: SimpleNamespace) -> tuple[Any, ...] | None:
        if call.x.dim() != many + 2:
            return None
        kernel = each(call.kernel, many)
        stride = each(call.stride, many) if call.stride else kernel
        padding = each(call.padding, many)
        if None in (kernel, stride, padding):
            return None
        return call.x, "avg", kernel, stride, padding, [1] * many, call.ceil, call.include

    return arguments


def _depthwise(many: int) -> _Arguments:
    def arguments(call: SimpleNamespace) -> tuple[Any, ...] | None:
        if call.x.dim() != many + 2 or not known([call.x.shape[1]]) or call.groups != call.x.shape[1]:
            return None
        if isinstance(call.padding, str):
            return None
        steps = [each(v, many) for v in (call.stride, call.padding, call.dilation)]
        return None if None in steps else (call.x, call.weight, call.bias, *steps, "none")

    return arguments


def _pools() -> list[Rule]:
    found = []
    common = {"kernel": ([2], [3]), "stride": ([], [2], [1]), "padding": ([0], [1])}
    for many in (1, 2, 3):
        sizes = " ".join(["a", "b", "4", "5", "6"][: 2 + many])
        names = ("kernel", "stride", "padding")
        target: Any = getattr(aten, f"max_pool{many}d").default
        found.append(
            _ours(
                f"max_pool{many}d",
                "pool",
                op(target, _X, *map(V, (*names, "dilation", "ceil"))),
                _max_pool(many),
                shapes={"x": sizes},
                constants={**common, "dilation": ([1], [2]), "ceil": (False, True)},
            )
        )
        target = getattr(aten, f"avg_pool{many}d").default
        found.append(
            _ours(
                f"avg_pool{many}d",
                "pool",
                op(target, _X, *map(V, (*names, "ceil", "include"))),
                _avg_pool(many),
                shapes={"x": sizes},
                constants={**common, "ceil": (False, True), "include": (False, True)},
            )
        )
    return found


def _depthwise_convs() -> list[Rule]:
    targets: Any = (aten.conv1d.default, aten.conv2d.default)
    found = []
    for many, target in enumerate(targets, 1):
        shapes = {"x": "a 3 6 5"[: 5 + 2 * (many - 1)], "weight": "3 1 2 2"[: 3 + 2 * many]}
        found.append(
            _ours(
                f"depthwise_conv{many}d",
                "depthwise_conv",
                op(target, _X, *map(V, ("weight", "bias", "stride", "padding", "dilation", "groups"))),
                _depthwise(many),
                shapes={**shapes, "bias": "3?"},
                constants={
                    "stride": ([1], [2]),
                    "padding": ([0], [1]),
                    "dilation": ([1], [2]),
                    "groups": (3, 1),
                },
            )
        )
    return found


def _norms_along() -> list[Rule]:
    """X / sqrt(mean(x²) + eps) along any one dim, in each way to write it."""
    return [
        _ours(
            f"rms_norm_along_{kind}_{how}",
            "rms_norm",
            pattern,
            _rms_along,
            shapes={"x": "b k 5"},
            constants={"dims": ([1], [-1]), "eps": (1e-5, 0.1)},
        )
        for kind, square in zip(("pow", "mul", "square"), SQUARES, strict=True)
        for how, pattern in over_root(_X, mean_of(square)).items()
    ]


def _norms() -> list[Rule]:
    weights = {"weight": "3?", "bias": "3?"}
    found = [
        _ours(
            "layer_norm",
            "layer_norm",
            op(aten.layer_norm.default, _X, *map(V, ("shape", "weight", "bias", "eps", "cudnn"))),
            _layer_norm,
            shapes={"x": "*b k 3", **weights},
            constants={"shape": ([3],), "eps": (1e-5, 1e-3), "cudnn": (True,)},
        ),
        _ours(
            "rms_norm",
            "rms_norm",
            op(aten.rms_norm.default, _X, *map(V, ("shape", "weight", "eps"))),
            _rms_norm,
            shapes={"x": "*b k 3", "weight": "3?"},
            constants={"shape": ([3],), "eps": (1e-5, 1e-3, None)},
        ),
        _ours(
            "instance_norm",
            "group_norm",
            op(
                aten.instance_norm.default,
                _X,
                V("weight"),
                V("bias"),
                None,
                None,
                True,
                *map(V, ("momentum", "eps", "cudnn")),
            ),
            _instance_norm,
            shapes={"x": "a 3 4 5", **weights},
            constants={"momentum": (0.1,), "eps": (1e-5,), "cudnn": (True,)},
        ),
    ]
    for name, activation in _ACTIVATIONS.items():
        norm = op(aten.group_norm.default, _X, *map(V, ("groups", "weight", "bias", "eps", "cudnn")))
        found.append(
            _ours(
                f"group_norm_{name}" if name else "group_norm",
                "group_norm",
                norm if activation is None else op(activation, norm),
                _group_norm(name),
                shapes={"x": "a 6 4 5", "weight": "6?", "bias": "6?"},
                constants={"groups": (1, 2, 3), "eps": (1e-5,), "cudnn": (True,)},
            )
        )
    return found


def _reductions() -> list[Rule]:
    targets: dict[str, Any] = {
        "sum": aten.sum.dim_IntList,
        "mean": aten.mean.dim,
        "amax": aten.amax.default,
        "amin": aten.amin.default,
    }
    listed = {"dims": ([0], [1], [-1], [0, 1], [1, 2]), "keepdim": (False, True)}
    found = [
        _ours(
            f"reduce_{kind}",
            "reduce",
            op(target, _X, V("dims"), V("keepdim")),
            _reduction(kind),
            shapes={"x": "a b k"},
            constants=listed,
        )
        for kind, target in targets.items()
    ]
    found.append(
        _ours(
            "reduce_prod",
            "reduce",
            op(aten.prod.dim_int, _X, V("dims"), V("keepdim")),
            _reduction("prod"),
            shapes={"x": "a b k"},
            constants={"dims": (0, 1, -1), "keepdim": (False, True)},
        )
    )
    return found


def _scans() -> list[Rule]:
    found = []
    for kind, target in {"sum": aten.cumsum.default, "prod": aten.cumprod.default}.items():
        plain = op(target, _X, V("dim"))
        found.append(
            _ours(
                f"scan_{kind}",
                "scan",
                plain,
                _scan(kind),
                shapes={"x": "a b k"},
                constants={"dim": (0, 1, -1)},
            )
        )
        turned = op(aten.flip.default, op(target, op(aten.flip.default, _X, V("a")), V("dim")), V("b"))
        found.append(
            _ours(
                f"reverse_scan_{kind}",
                "scan",
                turned,
                _scan(kind, reverse=True),
                shapes={"x": "m n k"},
                constants={"dim": (0, 1, -1), "a": ([0], [1], [2]), "b": ([0], [1], [-1])},
            )
        )
    return found


RULES: tuple[Rule, ...] = (
    _ours(
        "softmax",
        "softmax",
        op((aten.softmax.int, aten.log_softmax.int), _X, V("dim"), bind="softmax"),
        _softmax,
        shapes={"x": "a b k"},
        constants={"dim": (0, 1, -1), "softmax": (aten.softmax.int, aten.log_softmax.int)},
    ),
    *_norms(),
    *_norms_along(),
    _ours(
        "cross_entropy",
        "cross_entropy",
        op(aten.cross_entropy_loss.default, _X, V("targets"), None, V("reduction"), V("ignored")),
        _cross_entropy,
        shapes={"x": "4 3"},
        constants={
            "targets": (torch.tensor([0, 2, 1, 1]), torch.tensor([1, -100, 0, 2])),
            "reduction": (0, 1, 2),
            "ignored": (-100, 1),
        },
    ),
    *reversed(_scans()),
    *_reductions(),
    *_pools(),
    *_depthwise_convs(),
)
"""Every kernel, by the operations that it stands for."""
