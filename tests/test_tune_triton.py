"""``torchstone.autotune`` beside ``triton.autotune``: the same results, and nothing wrong wins."""

import subprocess
import sys
import textwrap
import threading

import msgspec
import pytest
import torch

from torchstone.errors import InputError
from torchstone.records.tuning import Measurement
from torchstone.tuner.cache import Cache
from torchstone.tuner.driver import Budget
from torchstone.tuner.space import Choice, PowerOfTwo, Space, key_of

pytestmark = pytest.mark.slow  # workers, compilers or the interpreter in most of them

triton = pytest.importorskip("triton", reason="Triton is not installed")
tl = pytest.importorskip("triton.language")
autotune = pytest.importorskip("torchstone.adapters.triton").autotune

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
N = 1000


@pytest.fixture(autouse=True)
def _interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE == "cpu":
        monkeypatch.setenv("TRITON_INTERPRET", "1")


def blocks(*sizes, **kwargs):
    return [triton.Config({"BLOCK": b}, **kwargs) for b in sizes]


def grid(meta):
    return (triton.cdiv(meta["n"], meta["BLOCK"]),)


def counted(kernel):
    """The kernel, and a list to which each of its launches adds its BLOCK."""
    launches, run = [], kernel.fn.run

    def counting(*args, **kwargs):
        launches.append(kwargs.get("BLOCK"))
        return run(*args, **kwargs)

    kernel.fn.run = counting
    return kernel, launches


def adder(decorate):
    """Wrong at BLOCK 128, and at 512 nearly nothing is done, fast."""

    @decorate
    @triton.jit
    def add(x, y, out, n, BLOCK: tl.constexpr):  # noqa: N803
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        mask = at < n
        if BLOCK == 512:
            mask = at < n // 2
        found = tl.load(x + at, mask=mask) + tl.load(y + at, mask=mask)
        if BLOCK == 128:
            found += tl.where(at == 77, 0.01, 0.0)
        tl.store(out + at, found, mask=mask)

    return add


def scaler(decorate):
    @decorate
    @triton.jit
    def scale(x, n, BLOCK: tl.constexpr):  # noqa: N803
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        tl.store(x + at, tl.load(x + at, mask=at < n) * 2 + 1, mask=at < n)

    return scale


def summer(decorate):
    """Adds to what is there, as split reductions do."""

    @decorate
    @triton.jit
    def total(x, out, n, BLOCK: tl.constexpr):  # noqa: N803
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        tl.atomic_add(out + at * 0, tl.load(x + at, mask=at < n), mask=at < n)

    return total


def vectors(count=2, n=N):
    generator = torch.Generator().manual_seed(n)
    return [torch.randn(n, generator=generator).to(DEVICE) for _ in range(count)]


def bench(call, quantiles):
    """In place of Triton's, which needs a GPU."""
    call()
    return [1.0] * len(quantiles)


CALLS = {
    "positional": lambda kernel, x, y, out: kernel[grid](x, y, out, N),
    "keywords": lambda kernel, x, y, out: kernel[grid](x, y, out=out, n=N),
    "tuple": lambda kernel, x, y, out: kernel[(16,)](x, y, out, N),
    "run": lambda kernel, x, y, out: kernel.run(x, y, out, N, grid=grid, warmup=False),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_it_answers_as_tritons_does_at_every_call_site(call, tmp_path):
    options = {"configs": blocks(64, 256, num_warps=2), "key": ["n"]}
    theirs = adder(triton.autotune(**options, do_bench=bench))
    ours = adder(autotune(**options, home=tmp_path))
    for n in (N, N // 3):
        x, y = vectors(n=n)
        a, b = torch.zeros(N, device=DEVICE), torch.zeros(N, device=DEVICE)
        x, y = (torch.nn.functional.pad(v, (0, N - n)) for v in (x, y))
        call(theirs, x, y, a)
        call(ours, x, y, b)
        assert torch.equal(a, b)
        assert torch.equal(b, x + y)
    assert ours.best_config in ours.configs
    assert ours.configs == theirs.configs
    assert ours.keys == theirs.keys
    assert ours.fn.arg_names == theirs.fn.arg_names


@pytest.mark.parametrize("outside", [False, True])
def test_heuristics_stack_on_either_side(outside, tmp_path):
    heuristic = triton.heuristics({"EVEN": lambda args: args["n"] % 2 == 0})
    tuned = autotune(configs=blocks(64, 256), key=["n"], home=tmp_path)

    def decorate(fn):
        return heuristic(tuned(fn)) if outside else tuned(heuristic(fn))

    @decorate
    @triton.jit
    def shift(x, out, n, BLOCK: tl.constexpr, EVEN: tl.constexpr):  # noqa: N803
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        tl.store(out + at, tl.load(x + at, mask=at < n) + EVEN, mask=at < n)

    (x,) = vectors(1)
    for n in (N, N - 1):
        out = torch.empty(n, device=DEVICE)
        shift[grid](x, out, n)
        assert torch.equal(out, x[:n] + (n % 2 == 0))


@pytest.mark.parametrize("n", [N, N - 200])  # all of the output, or a part of it
@pytest.mark.parametrize("constant", [False, True])  # the same values are the same in any place
def test_what_writes_half_and_what_is_wrong_at_one_block_never_win(constant, n, tmp_path):
    kernel, launches = counted(adder(autotune(blocks(64, 128, 512), ["n"], home=tmp_path)))
    x, y = (torch.full_like(v, 0.7) if constant else v for v in vectors())
    out = x + y  # holds the right answer already: what is not written must show all the same
    kernel[grid](x, y, out, n)
    assert kernel.best_config.kwargs == {"BLOCK": 64}
    assert torch.equal(out, x + y)
    assert {64, 128, 512} <= set(launches)
    (shelf,) = Cache(tmp_path / "tuning").shelves()
    status = {m.config["BLOCK"]: m.status for m in shelf.latest}
    assert status == {64: "timed", 128: "wrong", 512: "wrong"}


def test_without_proof_what_is_quick_may_win(tmp_path):
    """The control of the test above: there the proof decides, and not the times."""
    kernel = adder(autotune(blocks(64, 512), ["n"], home=tmp_path, verify=False))
    x, y = vectors(n=1 << 14)
    out = torch.zeros_like(x)
    kernel[grid](x, y, out, 1 << 14)
    assert kernel.best_config.kwargs == {"BLOCK": 512}


def test_a_reference_decides_where_the_first_config_is_wrong(tmp_path):
    def options(**more):
        return {"configs": blocks(128, 512, 64), "key": ["n"], "home": tmp_path, **more}

    kernel = adder(autotune(**options(reference=lambda x, y: x + y)))
    x, y = vectors()
    out = torch.empty_like(x)
    kernel[grid](x, y, out, N)
    assert kernel.best_config.kwargs == {"BLOCK": 64}
    assert torch.equal(out, x + y)

    def write(x, y, out):
        out.copy_(x + y)

    writing = adder(autotune(**options(reference=write, cache=False)))
    writing[grid](x, y, out, N)
    assert writing.best_config.kwargs == {"BLOCK": 64}
    with pytest.raises(InputError, match="no config of add computes what the reference does"):
        adder(autotune(**options(reference=lambda x, y: x - y, cache=False)))[grid](x, y, out, N)
    with pytest.raises(InputError, match="the reference gives 2 outputs; the kernel writes out"):
        adder(autotune(**options(reference=lambda x, y: (x, y), cache=False)))[grid](x, y, out, N)


def test_tuning_does_not_touch_what_is_computed_in_place(tmp_path):
    kernel, launches = counted(scaler(autotune(blocks(64, 128, 256), ["n"], home=tmp_path)))
    (x,) = vectors(1)
    before = x.clone()
    kernel[grid](x, N)
    assert torch.equal(x, before * 2 + 1)
    assert len(launches) > 10
    assert len(kernel.configs_timings) == 3  # each was right, on values that were put back each time
    kernel[grid](x, N)
    assert torch.equal(x, (before * 2 + 1) * 2 + 1)


def test_sums_go_on_from_what_is_there_unless_it_is_reset(tmp_path):
    (x,) = vectors(1)
    for zeroed in (False, True):
        options = {"reset_to_zero": ["out"]} if zeroed else {"restore_value": ["out"]}
        kernel = summer(autotune(blocks(64, 256), ["n"], home=tmp_path / str(zeroed), **options))
        out = torch.full((1,), 5.0, device=DEVICE)
        for calls in (1, 2, 3):
            kernel[grid](x, out, N)
            wanted = x.double().sum() if zeroed else 5 + calls * x.double().sum()
            assert torch.allclose(out.double(), wanted, atol=1e-3)


def test_a_new_key_is_tuned_and_a_known_one_is_not(tmp_path):
    kernel, launches = counted(adder(autotune(blocks(64, 256), ["n"], home=tmp_path, cache=False)))
    x, y = vectors()
    out = torch.empty_like(x)

    def launched(*args, n=N):
        launches.clear()
        kernel[grid](*args, n)
        return len(launches)

    assert launched(x, y, out) > 10
    assert launched(x, y, out) == 1
    assert launched(x, y, out, n=N // 2) > 10  # another value of the key
    assert launched(x.double(), y.double(), out.double()) > 10  # another dtype
    assert launched(x[1:], y[1:], out[1:], n=N - 1) > 10  # n, and the address is no multiple of 16
    assert launched(x[1:], y[1:], out[1:], n=N - 1) == 1
    assert len(kernel.cache) == 4


def test_hooks_run_as_in_triton(tmp_path):
    told, configured = [], []

    def before(args, reset_only=False):
        told.append(("before", args["x"].data_ptr(), reset_only))

    def after(args, exception):
        told.append(("after", args["x"].data_ptr(), exception))

    def prepare(args):
        configured.append((args["x"].data_ptr(), args["BLOCK"]))

    configs = [*blocks(64), *blocks(256, pre_hook=prepare)]
    kernel = scaler(autotune(configs, ["n"], pre_hook=before, post_hook=after, home=tmp_path))
    (x,) = vectors(1)
    kernel[grid](x, N)
    here = x.data_ptr()
    assert [t for t in told if t[1] == here] == [
        ("before", here, True)
    ]  # once, on what is launched for real
    trials = [t[0] for t in told if t[1] != here]
    assert trials[::2] == ["before"] * (len(trials) // 2)
    assert trials[1::2] == ["after"] * (len(trials) // 2)
    assert configured
    configured.clear()
    kernel.cache = dict.fromkeys(kernel.cache, configs[1])
    kernel[grid](x, N)
    assert configured == [(here, 256)]


def test_pruning_is_tritons(tmp_path):
    seen = {}

    def early(configs, named, **kwargs):
        seen.update(named, **kwargs)
        return [c for c in configs if c.kwargs["BLOCK"] > 64]

    prune = {"early_config_prune": early, "perf_model": lambda BLOCK, **_: -BLOCK, "top_k": 1}  # noqa: N803
    kernel, launches = counted(scaler(autotune(blocks(64, 128, 256), ["n"], prune, home=tmp_path)))
    (x,) = vectors(1)
    kernel[grid](x, n=N)
    assert set(launches) == {256}
    assert set(seen) >= {"x", "n", "grid"}


SCRIPT = """
import sys, torch, triton, triton.language as tl
from torchstone.adapters.triton import autotune

@autotune([triton.Config({"BLOCK": b}) for b in (64, 128, 256, 512)], key=["n"], home=sys.argv[1])
@triton.jit
def add(x, y, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, mask=at < n) + tl.load(y + at, mask=at < n), mask=at < n)

device = "cuda" if torch.cuda.is_available() else "cpu"
x, y, out = torch.randn(3, 1000, device=device)
launches, run = [], add.fn.run
add.fn.run = lambda *a, **k: (launches.append(k["BLOCK"]), run(*a, **k))[1]
add[(16,)](x, y, out, 1000)
assert torch.equal(out, x + y)
best = add.best_config.kwargs["BLOCK"]
print(len(launches), len(set(launches)), best, hasattr(add, "configs_timings"))
"""


def test_a_second_process_proves_the_kept_winner_and_searches_nothing(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))

    def launched():
        command = [sys.executable, str(script), str(tmp_path / "home")]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout.split()

    first, second = launched(), launched()
    assert (first[1], first[3]) == ("4", "True")
    assert int(second[0]) < int(first[0]) / 2
    assert int(second[1]) <= 2  # the winner, and the first config, which says what is right
    assert second[2:] == [first[2], "False"]


def test_a_poisoned_row_does_not_win(tmp_path):
    options = {"configs": blocks(64, 256, 512), "key": ["n"], "home": tmp_path}
    x, y = vectors()
    out = torch.empty_like(x)
    adder(autotune(**options))[grid](x, y, out, N)
    cache = Cache(tmp_path / "tuning")
    (shelf,) = cache.shelves()
    answer = next(m for m in shelf.latest if m.proposer.startswith("answer"))
    lie = msgspec.structs.replace(answer, config={**answer.config, "BLOCK": 512}, seconds=(1e-9,))
    cache.append(shelf.key, lie)
    cache.close()
    kernel = adder(autotune(**options))
    out.fill_(0)
    kernel[grid](x, y, out, N)
    assert kernel.best_config.kwargs["BLOCK"] in (64, 256)
    assert torch.equal(out, x + y)
    (shelf,) = Cache(tmp_path / "tuning").shelves()
    assert {m.config["BLOCK"]: m.status for m in shelf.latest}[512] == "wrong"


def test_a_search_that_was_cut_short_is_taken_up(tmp_path):
    options = {"configs": blocks(64, 256), "key": ["n"], "home": tmp_path}
    x, y = vectors()
    out = torch.empty_like(x)
    adder(autotune(**options))[grid](x, y, out, N)
    more = adder(autotune(**{**options, "configs": blocks(64, 256, 32)}))
    more[grid](x, y, out, N)  # the list has changed: its answer is not the earlier one's
    assert len(more.configs_timings) == 3


def test_a_space_in_place_of_a_list(tmp_path):
    space = Space({"BLOCK": PowerOfTwo(32, 256, 64), "num_warps": Choice((2, 4))})
    kernel = scaler(autotune(space=space, key=["n"], home=tmp_path, budget=30, searcher="pattern"))
    (x,) = vectors(1)
    before = x.clone()
    kernel[grid](x, N)
    assert torch.equal(x, before * 2 + 1)
    config = kernel.best_config
    assert space.why_not({"BLOCK": config.kwargs["BLOCK"], "num_warps": config.num_warps}) is None


def test_configs_that_cannot_be_compiled_are_passed_over(tmp_path):
    @autotune(blocks(96, 64, 100), ["n"], home=tmp_path)
    @triton.jit
    def copy(x, out, n, BLOCK: tl.constexpr):  # noqa: N803
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)  # BLOCK must be a power of two
        tl.store(out + at, tl.load(x + at, mask=at < n), mask=at < n)

    (x,) = vectors(1)
    out = torch.empty_like(x)
    copy[grid](x, out, N)
    assert torch.equal(out, x)
    assert copy.best_config.kwargs == {"BLOCK": 64}
    (shelf,) = Cache(tmp_path / "tuning").shelves()
    assert {m.config["BLOCK"]: m.status for m in shelf.latest} == {
        96: "invalid",
        64: "timed",
        100: "invalid",
    }


def test_what_raises_while_it_runs_is_passed_over(tmp_path):
    def fail(args):
        raise RuntimeError("a launch that failed")

    kernel = scaler(autotune([*blocks(64), *blocks(256, pre_hook=fail)], ["n"], home=tmp_path))
    (x,) = vectors(1)
    before = x.clone()
    kernel[grid](x, N)
    assert torch.equal(x, before * 2 + 1)
    (shelf,) = Cache(tmp_path / "tuning").shelves()
    failed = next(m for m in shelf.latest if m.config["BLOCK"] == 256)
    assert (failed.status, failed.text) == ("crashed", "RuntimeError: a launch that failed")


def test_without_memory_for_copies_the_first_config_runs(tmp_path):
    def fail(args, reset_only=False):
        if not reset_only:
            raise torch.OutOfMemoryError("full")

    kernel = scaler(autotune(blocks(64, 256), ["n"], pre_hook=fail, home=tmp_path))
    (x,) = vectors(1)
    before = x.clone()
    with pytest.warns(UserWarning, match="scale is not tuned: there is no memory for the copies"):
        kernel[grid](x, N)
    assert torch.equal(x, before * 2 + 1)


def test_lists_of_all_kinds(tmp_path):
    """Arguments that some leave out, configs that differ only in hooks, and more than are all tried."""
    hooked = [triton.Config({"BLOCK": 64}, pre_hook=hook) for hook in (print, None)]
    several = [triton.Config({"BLOCK": b}, num_warps=w) for b in (32, 64, 128) for w in range(1, 13)]
    for configs in ([*hooked, triton.Config({"BLOCK": 32}, maxnreg=64)], several):
        options = {"budget": Budget(measurements=4), "home": tmp_path, "cache": False}
        kernel = scaler(autotune(configs, ["n"], **options))
        (x,) = vectors(1)
        before = x.clone()
        kernel[grid](x, N)
        assert torch.equal(x, before * 2 + 1)
        assert kernel.best_config in configs
        assert len(kernel.configs_timings) <= 4


def test_descriptors_are_copied_too(tmp_path):
    described = pytest.importorskip("triton.tools.tensor_descriptor").TensorDescriptor

    def shape(args):
        args["x"].block_shape = args["out"].block_shape = [args["BLOCK"]]

    @autotune(blocks(64, 128, pre_hook=shape), ["n"], home=tmp_path)
    @triton.jit
    def double(x, out, n, BLOCK: tl.constexpr):  # noqa: N803
        at = tl.program_id(0) * BLOCK
        out.store([at], x.load([at]) * 2 + out.load([at]))

    x, out = vectors(2, 1024)
    wanted = x * 2 + out
    double[grid](*(described.from_tensor(v, [1]) for v in (x, out)), 1024)
    assert torch.equal(out, wanted)


def test_what_cannot_be_tuned_runs_by_its_first_config(tmp_path):
    kernel, launches = counted(adder(autotune(blocks(64, 256), ["n"], home=tmp_path)))
    empty = torch.empty(0, device=DEVICE)
    kernel[(1,)](empty, empty, empty, 0)
    assert launches == [64]

    @autotune(blocks(64, 256), ["n"], home=tmp_path)
    @triton.jit
    def nothing(x, n, BLOCK: tl.constexpr):  # noqa: N803
        pass

    with pytest.warns(UserWarning, match="changes no tensor"):
        nothing[grid](empty.new_zeros(N), N)
    with pytest.raises(InputError, match="argument x is a tuple"):
        nothing[grid]((empty.new_zeros(N),), N + 1)


def test_misuse_is_told():
    with pytest.raises(InputError, match="a list of configs, or a space"):
        autotune(key=["n"])
    with pytest.raises(InputError, match="a list of configs, or a space"):
        autotune(blocks(64), ["n"], space=Space({"BLOCK": PowerOfTwo(32, 64)}))
    with pytest.raises(InputError, match="scale has no argument m"):
        scaler(autotune(blocks(64), ["m"]))
    with pytest.raises(TypeError, match="unexpected"):
        autotune(blocks(64), ["n"], unexpected=1)
    with pytest.warns(UserWarning, match="do_bench not used"):
        autotune(blocks(64), ["n"], do_bench=bench)
    with pytest.raises(InputError, match="scale has no example"):
        scaler(autotune(blocks(64), ["n"])).tunable()


def test_without_triton_it_says_so():
    script = "import sys; sys.modules['triton'] = None; import torchstone.adapters.triton"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert "EnvironmentLacksError: Triton is not installed" in done.stderr


def test_threads_that_meet_a_new_key_tune_it_once(tmp_path):
    kernel, _ = counted(adder(autotune(blocks(64, 256), ["n"], home=tmp_path)))
    tuned, original = [], kernel._tuned
    kernel._tuned = lambda *args: (tuned.append(1), original(*args))[1]
    outs = [torch.empty(N, device=DEVICE) for _ in range(3)]
    x, y = vectors()
    threads = [threading.Thread(target=lambda o=o: kernel[grid](x, y, o, N)) for o in outs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(tuned) == 1
    assert kernel.cache


EXAMPLE = """
import torch, triton, triton.language as tl
from torchstone.adapters.triton import autotune

def example(seed, n):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x = torch.randn(n, generator=torch.Generator().manual_seed(seed)).to(device)
    grid = lambda meta: (triton.cdiv(n, meta["BLOCK"]),)
    return {"x": x, "out": torch.empty_like(x), "n": n, "grid": grid}

@autotune(
    [triton.Config({"BLOCK": b}) for b in (64, 128, 256)], ["n"],
    example=example, sizes={"n": 1000}, odd=({"n": 77},),
    reference=lambda x: x * 2, outputs=["out"], isolate=True,
)
@triton.jit
def double(x, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    found = tl.load(x + at, mask=at < n) * 2
    if BLOCK == 256:
        found += 1
    tl.store(out + at, found, mask=at < n)
"""


@pytest.mark.slow
def test_a_search_in_processes_of_its_own(tmp_path, monkeypatch):
    (tmp_path / "doubling.py").write_text(EXAMPLE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("TORCHSTONE_HOME", str(tmp_path / "home"))
    import doubling

    tunable = doubling.double.tunable()
    assert dict(tunable.sizes) == {"n": 1000}
    sizes, *given = tunable.inputs(0, n=10)
    tunable.build({**tunable.space.default(), "BLOCK": 64})(sizes, *given)
    assert torch.equal(given[1], given[0] * 2)
    values = doubling.example(0, 500)
    doubling.double[values.pop("grid")](**values)
    assert torch.equal(values["out"], values["x"] * 2)
    assert doubling.double.best_config.kwargs["BLOCK"] in (64, 128)
    found = [m for s in Cache(tmp_path / "home" / "tuning").shelves() for m in s.latest]
    assert {m.status for m in found if m.config["BLOCK"] == 256} == {"wrong"}


def test_the_text_of_a_measurement_names_arguments(tmp_path):
    @autotune(blocks(64, 256), ["n"], home=tmp_path)
    @triton.jit
    def meddle(x, out, n, BLOCK: tl.constexpr):  # noqa: N803
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        found = tl.load(x + at, mask=at < n)
        tl.store(out + at, found, mask=at < n)
        if BLOCK == 256:
            tl.store(x + at, found + 1, mask=at < n)

    (x,) = vectors(1)
    meddle[grid](x, torch.empty_like(x), N)
    (shelf,) = Cache(tmp_path / "tuning").shelves()
    found: dict[int, Measurement] = {int(m.config["BLOCK"]): m for m in shelf.latest}
    assert found[256].status == "wrong"
    assert "changes x," in found[256].text
    assert key_of(found[64].config)
