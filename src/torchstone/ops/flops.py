"""Floating-point operations of one call of an ATen operation, from its shapes.

Products (matrix products, convolutions, attention, recurrent layers) are counted by formula, a multiply
and an add as two: torch's own registry (:mod:`torch.utils.flop_counter`) first, then the operations that
it lacks and that eager calls on a CPU. What touches each element once counts as one an element, whatever
it computes there: an exponential costs more than an add, but both wait for memory. What only moves
elements counts as none. Everything else is *uncounted*, and said so.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch.utils.flop_counter import flop_registry

from torchstone.ops.calls import base_name, is_view, tensors

__all__ = ["Flops", "How", "count"]

How = Literal["formula", "elements", "movement", "uncounted"]


class Flops(NamedTuple):
    """What one call computes."""

    products: int
    """By formula."""
    other: int
    """One an element."""
    how: How
    """How it was counted."""


_NOTHING = Flops(0, 0, "movement")
_UNKNOWN = Flops(0, 0, "uncounted")

_SWEEPS = frozenset(
    """
    sum nansum mean prod var std var_mean std_mean amax amin aminmax max min argmax argmin any all
    norm linalg_vector_norm logsumexp cumsum cumprod cummax cummin logcumsumexp count_nonzero
    _softmax _log_softmax _safe_softmax _masked_softmax glu
    native_layer_norm native_group_norm native_batch_norm _native_batch_norm_legit
    _native_batch_norm_legit_no_training _batch_norm_with_update _batch_norm_no_update cudnn_batch_norm
    miopen_batch_norm _fused_rms_norm renorm
    avg_pool1d avg_pool2d avg_pool3d _adaptive_avg_pool2d _adaptive_avg_pool3d adaptive_max_pool2d
    adaptive_max_pool3d max_pool2d_with_indices max_pool3d_with_indices mkldnn_max_pool2d
    mkldnn_adaptive_avg_pool2d upsample_linear1d upsample_bilinear2d upsample_trilinear3d
    upsample_bicubic2d _upsample_bilinear2d_aa _upsample_bicubic2d_aa grid_sampler_2d grid_sampler_3d
    _embedding_bag _embedding_bag_forward_only segment_reduce scatter_add scatter_reduce index_add
    index_reduce _thnn_fused_lstm_cell _thnn_fused_gru_cell native_dropout _fused_dropout
    _transform_bias_rescale_qkv nll_loss_forward nll_loss2d_forward mse_loss huber_loss smooth_l1_loss
    softmax log_softmax layer_norm group_norm batch_norm instance_norm rms_norm
    binary_cross_entropy addr _prelu_kernel prelu logit isin bincount histc hardswish hardsigmoid
    floor_divide _weight_norm_interface _weight_norm
    """.split()  # noqa: SIM905  a name a line would be a hundred lines
)
"""Operations that pass over their largest input or output once: one FLOP an element."""

_MOVES = frozenset(
    """
    clone copy _to_copy contiguous cat stack index _unsafe_index index_select gather embedding take
    masked_select masked_scatter slice_scatter select_scatter diagonal_scatter as_strided_scatter
    index_put _index_put_impl _unsafe_index_put scatter index_copy index_fill repeat repeat_interleave
    roll flip rot90 constant_pad_nd reflection_pad1d reflection_pad2d reflection_pad3d replication_pad1d
    replication_pad2d replication_pad3d im2col col2im pixel_shuffle pixel_unshuffle channel_shuffle
    native_channel_shuffle fill zero zeros ones full zeros_like ones_like full_like new_zeros new_ones
    new_full empty empty_like new_empty empty_strided new_empty_strided arange linspace eye scalar_tensor
    lift_fresh lift_fresh_copy _local_scalar_dense item equal is_same_size tril triu tril_indices
    triu_indices nonzero nonzero_static resize set resize_as_ one_hot upsample_nearest1d
    upsample_nearest2d upsample_nearest3d _upsample_nearest_exact1d _upsample_nearest_exact2d
    _pack_padded_sequence _pad_packed_sequence split_with_sizes_copy split_copy unbind_copy _pin_memory
    _nested_view_from_buffer _nested_tensor_from_mask to_padded_tensor _to_dense _to_cpu
    _nested_tensor_from_tensor_list _assert_async _assert_tensor_metadata unfold_copy expand_copy
    diag_embed _sparse_coo_tensor_with_dims_and_tensors complex where masked_fill
    """.split()  # noqa: SIM905  a name a line would be a hundred lines
)
"""Operations that only move, make or choose elements."""


def count(op: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> Flops:
    """FLOPs of one call.

    :param op: the ``OpOverload`` (or higher-order operator) that was called.
    :param args: its positional arguments; tensors of any dtype and device, only shapes are read.
    :param kwargs: its keyword arguments.
    :param out: what it returned.
    """
    formula = _formula(op)
    if formula is not None:
        found = formula(*args, **kwargs, out_val=out)
        return _UNKNOWN if found is None else Flops(int(found), 0, "formula")
    if not isinstance(op, torch._ops.OpOverload):
        return _UNKNOWN
    name = base_name(op)
    if name in _MOVES:
        return _NOTHING
    given = [*tensors(args), *tensors(kwargs.values())]
    if is_view(op, given, tensors(out)):
        return _NOTHING
    if torch.Tag.pointwise in op.tags or name in _SWEEPS or name.startswith("_foreach_"):
        touched = [*given, *tensors(out)]
        return Flops(0, _elements(touched, summed=name.startswith("_foreach_")), "elements")
    return _UNKNOWN


def _elements(touched: list[torch.Tensor], *, summed: bool) -> int:
    """Elements of the largest tensor; of all for lists of tensors; none where all are integers."""
    if not any(t.is_floating_point() or t.is_complex() for t in touched):
        return 0
    sizes = [t.numel() for t in touched]
    # a list operation's outputs, or the inputs that it changes, are as many as its first list
    return sum(sizes) // 2 if summed else max(sizes)


def _formula(op: Any) -> Callable[..., float | None] | None:
    packet = op.overloadpacket if isinstance(op, torch._ops.OpOverload) else op
    mine = _FORMULAS.get(str(packet))
    if mine is not None:
        return mine
    registered: Callable[..., float] | None = flop_registry.get(packet)
    return registered


def _linear(x: Any, weight: Any, *_: Any, **__: Any) -> int:
    """``x @ weight.T`` for a weight of shape (out, in)."""
    return 2 * int(x.numel()) * int(weight.shape[0])


def _product(a: Any, b: Any, *_: Any, **__: Any) -> int:
    """A matrix (.., K) or vector by a matrix (K, N) or vector (K,)."""
    return 2 * int(a.numel()) * (int(b.shape[-1]) if b.dim() > 1 else 1)


def _broadcast_product(a: Any, _b: Any, *_: Any, out_val: Any, **__: Any) -> int:
    """Each output is a sum over the inner size, whatever is broadcast."""
    return 2 * int(out_val.numel()) * int(a.shape[-1])


def _convolution(x: Any, weight: Any, *_: Any, out_val: Any, **__: Any) -> int:
    """Each output meets a kernel of weights of shape (out, in / groups, ...)."""
    return 2 * int(out_val.numel()) * (int(weight.numel()) // int(weight.shape[0]))


def _transposed_convolution(x: Any, weight: Any, *_: Any, **__: Any) -> int:
    """Each input meets a kernel of weights of shape (in, out / groups, ...)."""
    return 2 * int(x.numel()) * (int(weight.numel()) // int(weight.shape[0]))


def _added_product(_base: Any, a: Any, b: Any, *_: Any, **__: Any) -> int:
    return _product(a, b)


def _attention(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    """(B, H, T, D) by (B, H or fewer, S, D) and (B, H or fewer, S, E); masked parts count as well."""
    *heads, t, d = query.shape
    rows = t
    for size in heads:
        rows *= size
    return int(2 * rows * key.shape[-2] * (d + value.shape[-1]))


def _grouped_product(a: Any, b: Any, *_: Any, **__: Any) -> int | None:
    """Rows (M, K), in groups, each by its group's matrix of (G, K, N); other forms are not known."""
    return _product(a, b) if a.dim() == 2 and b.dim() == 3 else None


def _fourier(x: Any, dims: Sequence[int], *_: Any, **__: Any) -> float:
    """FFTW's convention for a complex transform of N points, 5 N log2 N; half for a real one."""
    points = math.prod(int(x.shape[dim]) for dim in dims)
    return (5 if x.is_complex() else 2.5) * int(x.numel()) * math.log2(max(points, 1))


def _recurrent(x: Any, *rest: Any, **_: Any) -> float | None:
    """Each step of each sequence meets both matrices of weights once: of input and of hidden state."""
    given = rest[0] if isinstance(rest[0], list | tuple) else rest[:2]  # cuDNN's list, or mkldnn's first
    matrices = sum(int(w.numel()) for w in given if w.dim() == 2)
    return 2 * int(x.numel()) // int(x.shape[-1]) * matrices


def _encoder_layer(x: Any, width: int, _heads: int, *rest: Any, **_: Any) -> int | None:
    """nn.TransformerEncoderLayer's fused inference path: (B, T, D)."""
    if x.is_nested:  # ragged lengths, and the padded shape is not known
        return None
    return _heads_and_weights(x, width, rest)


def _multi_head(
    query: Any, _k: Any, _v: Any, width: int, _heads: int, *rest: Any, **_: Any
) -> int | None:
    """nn.MultiheadAttention's fused inference path, self-attention: (B, T, D)."""
    return None if query.is_nested else _heads_and_weights(query, width, rest)


def _heads_and_weights(x: Any, width: int, rest: tuple[Any, ...]) -> int:
    """Every token meets every matrix of weights once, and each other token of its sequence twice."""
    tokens = int(x.numel()) // width
    weights = [t for t in rest if isinstance(t, torch.Tensor) and t.dim() == 2 and t.is_floating_point()]
    return 2 * tokens * sum(int(w.numel()) for w in weights) + 4 * tokens * int(x.shape[1]) * width


_FORMULAS: dict[str, Callable[..., float | None]] = {
    "aten.mv": _product,
    "aten.dot": _product,
    "aten.vdot": _product,
    "aten.addmv": _added_product,
    "aten._addmm_activation": _added_product,
    "aten._int_mm": _product,
    "aten._grouped_mm": _grouped_product,
    "aten._fft_c2c": _fourier,
    "aten._fft_r2c": _fourier,
    "aten._fft_c2r": _fourier,
    "aten.linear": _linear,
    "aten.matmul": _broadcast_product,
    **{f"aten.conv{n}d": _convolution for n in (1, 2, 3)},
    **{f"aten.conv_transpose{n}d": _transposed_convolution for n in (1, 2, 3)},
    "aten.mkldnn_linear": _linear,
    "aten.scaled_dot_product_attention": _attention,
    "aten._scaled_dot_product_flash_attention_for_cpu": _attention,
    "aten._scaled_dot_product_flash_attention": _attention,
    "aten._scaled_dot_product_efficient_attention": _attention,
    "aten._scaled_dot_product_cudnn_attention": _attention,
    "aten._scaled_dot_product_fused_attention_overrideable": _attention,
    "aten._scaled_dot_product_attention_math_for_mps": _attention,
    "aten.mkldnn_rnn_layer": _recurrent,
    "aten._cudnn_rnn": _recurrent,
    "aten._transformer_encoder_layer_fwd": _encoder_layer,
    "aten._native_multi_head_attention": _multi_head,
}
"""What torch's registry lacks, or (attention with fewer key heads than query heads) refuses."""
