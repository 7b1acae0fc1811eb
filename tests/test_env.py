"""The environment, and what forbids a comparison."""

from __future__ import annotations

import subprocess
import sys

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchstone import env
from torchstone.records import Environment


def test_it_describes_this_machine() -> None:
    here = env.environment(2)
    assert here.threads == 2
    assert here.cores >= 1
    assert here.memory_bytes > 2**28
    assert here.cpu
    assert here.isa == tuple(sorted(here.isa))
    assert set(here.isa) <= set(env.ISA)
    assert here.packages["torch"].startswith("2.")
    assert "triton-not-a-package" not in here.packages


def test_threads_default_to_the_usable_cores() -> None:
    here = env.environment()
    assert here.threads == here.cores


def test_it_loads_no_torch() -> None:
    code = "import sys; from torchstone import env; env.environment(); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_an_environment_does_not_differ_from_itself_read_again() -> None:
    first = env.environment(2)
    again = msgspec.json.decode(msgspec.json.encode(env.environment(2)), type=Environment)
    assert env.differs(first, again) == ()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"threads": 3}, "threads: 2 against 3"),
        ({"cpu": "Other"}, "against Other"),
        ({"isa": ()}, "against none"),
        ({"devices": ("H200",)}, "devices: none against H200"),
        ({"packages": {"torch": "2.0"}}, "torch: "),
        ({"packages": {}}, "torch: "),
    ],
)
def test_a_difference_is_named(change: dict[str, object], said: str) -> None:
    here = msgspec.structs.replace(env.environment(2), isa=("avx2",))
    (first, *_) = [d for d in env.differs(here, msgspec.structs.replace(here, **change)) if said in d]
    assert said in first


def test_memory_alone_forbids_nothing() -> None:
    here = env.environment(2)
    assert env.differs(here, msgspec.structs.replace(here, memory_bytes=1)) == ()


@given(
    st.dictionaries(st.sampled_from(env.PACKAGES), st.sampled_from(["1.0", "2.0"])),
    st.dictionaries(st.sampled_from(env.PACKAGES), st.sampled_from(["1.0", "2.0"])),
)
def test_every_package_that_differs_is_said_once_whichever_comes_first(
    left: dict[str, str], right: dict[str, str]
) -> None:
    here = env.environment(1)
    a = msgspec.structs.replace(here, packages=left)
    b = msgspec.structs.replace(here, packages=right)
    expected = [n for n in sorted({*left, *right}) if left.get(n) != right.get(n)]
    assert [d.partition(":")[0] for d in env.differs(a, b)] == expected
    assert len(env.differs(b, a)) == len(expected)


def test_a_package_that_is_missing_or_old_is_told_with_its_command() -> None:
    absent = env.missing_package("onnxruntime", "surely_no_such_package", "onnx", (1, 0))
    assert absent is not None
    assert "not installed" in absent.why
    assert absent.hint == "pip install 'torchstone[onnx]'"
    old = env.missing_package("eager", "torch", "quant", (99,))
    assert old is not None
    assert "older than 99" in old.why
    assert env.missing_package("eager", "torch", "quant", (2, 11)) is None
