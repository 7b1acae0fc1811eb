"""Int8 by torchao: weights, and activations where the scheme says so."""

from __future__ import annotations

import copy
from typing import Any, Literal

from torch import nn

__all__ = ["quantize"]


def quantize(module: nn.Module, scheme: Literal["int8_dynamic", "int8_weight_only"] | str) -> nn.Module:
    """A copy of ``module`` whose linear layers hold int8 weights.

    :param scheme: ``int8_dynamic`` also quantizes activations, token by token, as they come.
    """
    from torchao.quantization import (
        Int8DynamicActivationInt8WeightConfig,
        Int8WeightOnlyConfig,
        quantize_,
    )

    copied = copy.deepcopy(module)
    configs: dict[str, Any] = {
        "int8_dynamic": Int8DynamicActivationInt8WeightConfig,
        "int8_weight_only": Int8WeightOnlyConfig,
    }
    quantize_(copied, configs[scheme]())
    return copied
