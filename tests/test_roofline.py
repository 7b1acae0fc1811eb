"""The roofline: what bounds say of known peaks, and what is measured on this machine."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torchstone.bench import roofline
from torchstone.records import Bandwidth, Peaks

PEAKS = Peaks(
    device="cpu",
    threads=1,
    flops_per_s={"float32": 100.0, "bfloat16": 400.0},
    bandwidth=(
        Bandwidth(working_set_bytes=10, bytes_per_s=30.0),
        Bandwidth(working_set_bytes=100, bytes_per_s=50.0),
        Bandwidth(working_set_bytes=1000, bytes_per_s=5.0),
    ),
    beyond_cache=True,
)


@pytest.mark.parametrize(
    ("flops", "bytes_", "dtype", "expected"),
    [
        (200, 0, "float32", 2.0),
        (200, 0, "bfloat16", 0.5),
        (200, 0, "float64", 0.5),  # not measured: the best peak keeps the bound one
        (0, 100, "float32", 2.0),
        (0, 10, "float32", 0.2),  # as quick as the larger working set, which was quicker
        (0, 999, "float32", 999 / 50),  # between two: the quicker
        (0, 1000, "float32", 200.0),
        (0, 5000, "float32", 1000.0),  # beyond all that was measured: the last
        (300, 100, "float32", 3.0),
        (0, 0, "", 0.0),
    ],
)
def test_work_takes_the_longer_of_computing_and_moving(flops, bytes_, dtype, expected):
    assert roofline.least_s(PEAKS, flops, bytes_, dtype) == pytest.approx(expected)


@given(
    st.floats(0, 1e6),
    st.floats(0, 1e6),
    st.floats(0, 1e6),
    st.sampled_from(["float32", "bfloat16", "int8"]),
)
def test_more_work_never_takes_less(flops, bytes_, more, dtype):
    least = roofline.least_s(PEAKS, flops, bytes_, dtype)
    assert roofline.least_s(PEAKS, flops + more, bytes_, dtype) >= least
    assert roofline.least_s(PEAKS, flops, bytes_ + more, dtype) >= least


def test_peaks_of_this_machine():
    found = roofline.measure(torch.device("cpu"), ["float32", "float64", "int64", ""])
    assert found.device == "cpu"
    assert found.threads == torch.get_num_threads()
    assert (
        {"float32", "float64"} <= set(found.flops_per_s) <= {"float64", "float32", "bfloat16", "float16"}
    )
    assert all(rate > 0 for rate in found.flops_per_s.values())
    sizes = [point.working_set_bytes for point in found.bandwidth]
    assert sizes == sorted(set(sizes))
    assert len(sizes) >= 2
    assert all(point.bytes_per_s > 0 for point in found.bandwidth)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_peaks_of_a_device():
    device = torch.device("cuda")
    found = roofline.measure(device, [])
    assert found.device == torch.cuda.get_device_name(device)
    assert set(found.flops_per_s) == {"float32", "bfloat16", "float16"}
    assert found.flops_per_s["bfloat16"] > found.flops_per_s["float32"] > 0
