"""A module that takes by position what another takes by keyword."""

from __future__ import annotations

from inspect import Parameter, Signature
from types import MethodType
from typing import Any

from torch import nn

__all__ = ["KeywordModule", "unwrap"]


class KeywordModule(nn.Module):
    """Calls ``inner(**{name: value})`` with values given by position.

    Its ``forward`` has the signature ``(name, ...)``, so that capture sees one plain parameter an input
    and not ``*args``, whose dynamic shapes torch.export nests differently.

    :param inner: the user's module.
    :param names: the keywords, in the order of the positions.
    """

    def __init__(self, inner: nn.Module, names: tuple[str, ...]) -> None:
        super().__init__()
        self.inner = inner
        self.names = names

        def forward(self: KeywordModule, *values: Any) -> Any:
            return self.inner(**dict(zip(self.names, values, strict=True)))

        parameters = [Parameter(n, Parameter.POSITIONAL_OR_KEYWORD) for n in ("self", *names)]
        forward.__signature__ = Signature(parameters)  # type: ignore[attr-defined] # inspect's protocol
        # a bound method, not a closure over self: copy.deepcopy must rebind it to the copy
        self.forward = MethodType(forward, self)
        self.training = inner.training


def unwrap(module: nn.Module) -> nn.Module:
    """The user's own module."""
    return module.inner if isinstance(module, KeywordModule) else module
