"""Every kernel."""

from __future__ import annotations

from torchstone.kernels import (
    batch_norm,
    cross_entropy,
    implicit_gemm,
    norm,
    reduce,
    scan,
    softmax,
    split_conv,
    split_gemm,
    window,
)
from torchstone.kernels.base import Kernel

__all__ = ["KERNELS"]

KERNELS: tuple[Kernel, ...] = (
    softmax.KERNEL,
    *norm.KERNELS,
    batch_norm.KERNEL,
    *reduce.KERNELS,
    cross_entropy.KERNEL,
    scan.KERNEL,
    *window.KERNELS,
    split_gemm.LINEAR,
    split_gemm.MATMUL,
    split_conv.POINTWISE,
    implicit_gemm.KERNEL,
)
"""In the order shown to users."""
