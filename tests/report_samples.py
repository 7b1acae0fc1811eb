"""Realistic records for the tests of the report: whole runs, made without running anything."""

from __future__ import annotations

import random
from collections.abc import Sequence

import msgspec

from torchstone.policy import Policy
from torchstone.records import (
    Arrival,
    Build,
    Capture,
    Case,
    CaseErrors,
    Comparison,
    Crashed,
    Decision,
    Dim,
    Entry,
    Environment,
    LoadResult,
    MetricResult,
    NotTried,
    OutputErrors,
    Reason,
    ReferenceErrors,
    Relation,
    RunHeader,
    Samples,
    TensorSpec,
    TimedOut,
    Unsupported,
    Unverifiable,
    VerdictEntry,
    Verified,
    WorkloadSpec,
    Wrong,
)

Run = tuple[RunHeader, list[Entry]]

EAGER_S = 0.166
RATES = (1.8, 3.6, 5.4)

# recipe -> (seconds a call, relation, error, bound, build s, first call s, peak MiB)
RIGHT: dict[str, tuple[float, Relation, float, float, float, float, float]] = {
    "eager": (0.166, "SAME", 1.0e-6, 1.1e-5, 1.3, 0.21, 612),
    "openvino": (0.1025, "FASTER", 9.8e-7, 1.1e-5, 14.2, 0.33, 804),
    "aotinductor(freezing) + quantize(pt2e_static)": (0.0481, "FASTER", 8.1e-3, 1e-2, 71.0, 0.12, 1240),
    "aotinductor": (0.1391, "FASTER", 1.1e-6, 1.1e-5, 48.3, 0.17, 931),
    "onnxruntime": (0.1655, "SAME", 1.3e-6, 1.1e-5, 9.7, 0.2, 702),
    "inductor": (0.158, "UNCLEAR", 1.1e-6, 1.1e-5, 3.1, 41.8, 990),
    "inductor + precision(bf16_autocast)": (0.392, "SLOWER", 6.2e-3, 1e-2, 3.3, 55.1, 1020),
}


def environment() -> Environment:
    return Environment(
        python="3.11.9",
        platform="linux-x86_64",
        cpu="AMD EPYC 7763 64-Core Processor",
        isa=("avx", "avx2", "fma"),
        cores=2,
        threads=2,
        memory_bytes=16 * 2**30,
        packages={
            "torch": "2.13.0+cpu",
            "openvino": "2026.1.0",
            "onnxruntime": "1.24.1",
            "numpy": "2.3.1",
        },
    )


def header(recipes: Sequence[str], origin: str | None = "examples/minilm") -> RunHeader:
    workload = WorkloadSpec(
        name="minilm",
        inputs=(
            TensorSpec(name="input_ids", dtype="int64", shape=("B", "S"), low=0, high=30521),
            TensorSpec(name="attention_mask", dtype="int64", shape=("B", "S"), low=0, high=1),
        ),
        dims=(Dim(name="B", low=1, high=64), Dim(name="S", low=8, high=256, multiple=8)),
        example_sizes={"B": 16, "S": 64},
        traffic=tuple(Arrival(sizes={"B": b, "S": s}) for b, s in ((16, 64), (1, 24), (8, 128))),
        metric="spearman",
        digest="5f" * 32,
    )
    return RunHeader(
        format=1,
        workload=workload,
        policy=msgspec.json.decode(msgspec.json.encode(Policy(p99_s=0.6, dollars_per_hour=0.34))),
        recipes=tuple(recipes),
        environment=environment(),
        seed=0,
        origin=origin,
        started_at="2026-11-30T14:01:22Z",
    )


def capture() -> Capture:
    return Capture(
        mode="export", program="ab" * 32, seconds=6.4, nodes=214, parameters=22_713_216,
        narrowed=("B: 1..64 -> 2..64",),
    )  # fmt: skip


def cases() -> tuple[Case, ...]:
    return (
        Case(name="example", kind="example", sizes={"B": 16, "S": 64}, values="example"),
        Case(name="traffic-1", kind="traffic", sizes={"B": 1, "S": 24}),
        Case(name="ends-low", kind="dims", sizes={"B": 1, "S": 8}),
        Case(name="ends-high", kind="dims", sizes={"B": 64, "S": 256}),
        Case(name="odd", kind="dims", sizes={"B": 7, "S": 104}),
        Case(name="values-tiny", kind="values", sizes={"B": 16, "S": 64}, values="tiny"),
        Case(name="values-zeros", kind="values", sizes={"B": 16, "S": 64}, values="zeros"),
        Case(name="strided", kind="layout", sizes={"B": 16, "S": 64}, layout="strided"),
        Case(name="hold", kind="protocol", sizes={"B": 16, "S": 64}, protocol="hold"),
    )


def errors(relative: float | None, seed: int) -> tuple[OutputErrors, ...]:
    draw = random.Random(seed)
    if relative is None:
        return (OutputErrors(output="[0]", relative=None, worst=None, non_finite=17, elements=6144),)
    scaled = relative * draw.uniform(0.6, 1.0)
    return (
        OutputErrors(
            output="[0]", relative=scaled, worst=scaled * 7.3, worst_index=(3, 117), sqnr_db=61.2,
            elements=6144,
        ),
    )  # fmt: skip


def case_errors(
    relative: float | None, problem: tuple[str, str] | None = None
) -> tuple[CaseErrors, ...]:
    return tuple(
        CaseErrors(
            case=case.name,
            errors=errors(relative, seed),
            problem=problem[1] if problem and problem[0] == case.name else None,
        )
        for seed, case in enumerate(cases())
    )


def references() -> list[Entry]:
    made: list[Entry] = [
        ReferenceErrors(case=case, errors=errors(1.0e-6, seed)) for seed, case in enumerate(cases())
    ]
    empty = Case(name="empty", kind="dims", sizes={"B": 0, "S": 64})
    made.append(
        ReferenceErrors(case=empty, errors=(), problem="the model raises: cannot reshape tensor")
    )
    return made


def samples(recipe: str, label: str, call_s: float, seed: int) -> Samples:
    draw = random.Random(seed)
    rounds = tuple(
        tuple(call_s * part * draw.lognormvariate(0, 0.03) * (1.4 if draw.random() < 0.02 else 1)
              for part in (1.0, 0.22, 1.1))
        for _ in range(20)
    )  # fmt: skip
    return Samples(
        session="s1",
        recipe=recipe,
        label=label,
        rounds=rounds,
        order=tuple(draw.randrange(8) for _ in range(20)),
        sizes=({"B": 16, "S": 64}, {"B": 1, "S": 24}, {"B": 8, "S": 128}),
        warmup=(call_s * 2.1, call_s * 1.2, call_s),
        steady=True,
    )


def comparison(recipe: str, call_s: float, relation: Relation, against: str = "eager") -> Comparison:
    ratio = EAGER_S / call_s
    spread = 0.09 if relation == "UNCLEAR" else 0.022
    return Comparison(
        session="s1", recipe=recipe, against=against, ratio=ratio, low=ratio * (1 - spread),
        high=ratio * (1 + spread), confidence=0.95, noise=0.009, relation=relation,
        candidate_s=call_s, against_s=EAGER_S,
    )  # fmt: skip


def load(recipe: str, call_s: float, rate: float, slow: float) -> LoadResult:
    many = rate > 2
    quantiles: dict[str, float | None] = {
        "p50": call_s * slow,
        "p90": call_s * slow * 1.7,
        "p95": call_s * slow * 2.1,
        "p99": call_s * slow * 3.0,
        "p999": call_s * slow * 3.8 if many else None,
    }
    return LoadResult(
        recipe=recipe, rate=rate, requests=int(rate * 60), errors=0, achieved=rate * 0.997,
        quantiles_s=quantiles, slo_s=0.6, goodput=rate * 0.98,
        latencies_s=tuple(call_s * slow * (1 + 0.01 * i) for i in range(40)),
        cost_per_million=0.34 / 3600 * call_s * 1e6,
        break_even_calls=None if recipe == "eager" else 1240,
    )  # fmt: skip


def right(recipe: str, seed: int) -> list[Entry]:
    call_s, relation, error, bound, build_s, first_s, peak = RIGHT[recipe]
    made: list[Entry] = [
        Build(
            recipe=recipe, seconds=build_s, first_call_s=first_s, peak_memory_bytes=int(peak * 2**20),
            artifact=None, recompiles=3 if recipe.startswith("inductor") else None,
        ),
        VerdictEntry(
            recipe=recipe,
            verdict=Verified(
                cases=9, worst_case="ends-high", relative=error, eager_relative=1.0e-6, bound=bound,
                notes=("closer to float64 than eager",) if error < 1e-6 else (),
            ),
            cases=case_errors(error),
        ),
        MetricResult(
            recipe=recipe, name="spearman", value=0.7312 - 90 * error * 0.01, baseline=0.7312,
            drop=90 * error * 0.01, drop_low=80 * error * 0.01, drop_high=105 * error * 0.01,
            examples=353,
        ),
        samples(recipe, "baseline" if recipe == "eager" else "candidate", call_s, seed),
    ]  # fmt: skip
    if recipe != "eager":
        made.append(comparison(recipe, call_s, relation))
    return made


LOG = "\n".join(
    [
        "Traceback (most recent call last):",
        '  File "torch/_inductor/compile_fx.py", line 771, in compile_fx_inner',
        "    return wrap_compiler_debug(_compile_fx_inner)(gm, example_inputs)",
        "torch._inductor.exc.InductorError: LoweringException: AssertionError: unsupported layout",
        '  target: aten.view.default, args[0]: TensorBox(StorageBox(InputBuffer(name="arg0_1")))',
    ]
)


def wrong(recipe: str, text: str, relative: float | None, bound: float, **facts: str) -> VerdictEntry:
    verdict = Wrong(
        reason=facts.get("reason", "ERROR_ABOVE_BOUND"),  # type: ignore[arg-type] # checked on decoding
        text=text,
        case=facts.get("case", "ends-high"),
        failed=("ends-high", "odd"),
        relative=relative,
        bound=bound,
    )
    problem = (verdict.case, facts["problem"]) if "problem" in facts else None
    return VerdictEntry(recipe=recipe, verdict=verdict, cases=case_errors(relative, problem))


def failures() -> list[VerdictEntry]:
    return [
        wrong(
            "inductor + quantize(int8_dynamic)",
            "output [0] is off by 7.1e-02 of its norm; the budget allows 1.0e-02",
            7.1e-2,
            1e-2,
        ),
        wrong(
            "aotinductor(freezing) + precision(bf16)",
            "17 of 6144 elements of output [0] are not finite where the reference is",
            None,
            1e-2,
            reason="NON_FINITE",
            case="values-tiny",
        ),
        wrong(
            "custom(fused_pool)",
            "the first result changed when the callable ran again",
            1.2e-6,
            1.1e-5,
            reason="RESULT_OVERWRITTEN",
            case="hold",
            problem="first result differs after the second call: 6144 elements",
        ),
        VerdictEntry(
            recipe="openvino(auto)",
            verdict=Unverifiable(text="eager is itself 2.1e-01 from float64 there", case="values-large"),
        ),
        VerdictEntry(
            recipe="inductor(freezing, max_autotune)",
            verdict=Crashed(
                stage="build", kind="exception", text="InductorError: unsupported layout", log=LOG
            ),
        ),
        VerdictEntry(
            recipe="inductor + quantize(pt2e_static)",
            verdict=TimedOut(stage="build", limit_s=600, log="autotuning mm_64x384: 41 of 96 choices"),
        ),
        VerdictEntry(
            recipe="custom(tensorrt)",
            verdict=Unsupported(text="tensorrt is not installed", hint="pip install tensorrt"),
        ),
        VerdictEntry(
            recipe="inductor(module)",
            verdict=NotTried(text="the 1,800 s of search_s were spent before its turn"),
        ),
    ]


def full(origin: str | None = "examples/minilm") -> Run:
    """A promotion, with every kind of verdict among the rest."""
    failed = failures()
    entries: list[Entry] = [capture(), *references()]
    for seed, recipe in enumerate(RIGHT):
        entries += right(recipe, seed)
    entries.append(samples("eager", "baseline-again", EAGER_S * 1.002, 99))
    entries.append(comparison("openvino", 0.1025, "FASTER", against="onnxruntime"))
    entries += failed
    for recipe in ("eager", "openvino", "aotinductor(freezing) + quantize(pt2e_static)", "aotinductor"):
        for rate, slow in zip(RATES, (1.02, 1.2, 1.9), strict=True):
            entries.append(load(recipe, RIGHT[recipe][0], rate, slow))
    entries.append(
        Decision(
            kind="PROMOTE",
            recipe="openvino",
            reasons=(
                Reason(code="FASTEST", text="the fastest within every constraint", recipe="openvino"),
                Reason(
                    code="METRIC_ABOVE",
                    text="spearman may fall by 0.0085; p99 cannot be stated from 108 requests",
                    recipe="aotinductor(freezing) + quantize(pt2e_static)",
                ),
            ),
        )
    )
    return header([*RIGHT, *(entry.recipe for entry in failed)], origin), entries


def kept() -> Run:
    """Nothing is faster: the baseline stays."""
    entries: list[Entry] = [capture(), *references()]
    for seed, recipe in enumerate(("eager", "onnxruntime")):
        entries += right(recipe, seed)
    reason = Reason(code="NOT_FASTER", text="onnxruntime is the same speed as eager within the noise")
    entries.append(Decision(kind="KEEP_BASELINE", recipe="eager", reasons=(reason,)))
    return header(["eager", "onnxruntime"]), entries


def held() -> Run:
    """The evidence does not suffice."""
    entries: list[Entry] = [capture(), *references()]
    for seed, recipe in enumerate(("eager", "inductor")):
        entries += right(recipe, seed)
    reason = Reason(
        code="UNCLEAR", text="inductor may be faster or slower: [0.96, 1.15]", recipe="inductor"
    )
    entries.append(Decision(kind="HOLD", recipe="eager", reasons=(reason,)))
    return header(["eager", "inductor"]), entries


def partial() -> Run:
    """Interrupted while the third candidate was being built."""
    entries: list[Entry] = [capture(), *references()]
    for recipe in ("eager", "openvino"):
        entries += [e for e in right(recipe, 0) if isinstance(e, Build | VerdictEntry)]
    return header(list(RIGHT)), entries


def started() -> Run:
    """Interrupted before anything was recorded."""
    return header(list(RIGHT)), []


def single() -> Run:
    """Only the baseline was asked for."""
    entries = [capture(), *references(), *right("eager", 1)]
    reason = Reason(code="ONLY_BASELINE", text="no other candidate was asked for")
    entries.append(Decision(kind="KEEP_BASELINE", recipe="eager", reasons=(reason,)))
    return header(["eager"]), entries


HOSTILE = (
    "<script>alert('x')</script>&\"><img src=x onerror=alert(1)> "
    "[bold red]x[/] \x1b[31mred\x1b[0m \u202e"
)
LONG = "custom(" + "a_very_long_name_of_a_candidate." * 8 + ")"


def hostile() -> Run:
    """Everything that comes from the user or an engine tries to break the page and the terminal."""
    crashed = "custom(" + HOSTILE + ")"
    base, _ = header(["eager", LONG, crashed, "custom(größer → 更快 🚀)"], "-rf '; <b>&"), None
    hostile_workload = msgspec.structs.replace(base.workload, name=HOSTILE, metric=HOSTILE)
    hostile_environment = msgspec.structs.replace(
        base.environment, cpu=HOSTILE, packages={HOSTILE: HOSTILE}
    )
    log = "\n".join(f"\x1b[3{i % 8}mline {i}\x1b[0m {HOSTILE} {'wide' * 60}" for i in range(400))
    entries: list[Entry] = [
        Capture(mode="dynamo", program=None, seconds=1.0, breaks=(HOSTILE,), refused=HOSTILE, graphs=3),
        *references(),
        *right("eager", 0),
        VerdictEntry(
            recipe=LONG,
            verdict=Wrong(
                reason="RAISES", text=HOSTILE, case=HOSTILE, failed=(HOSTILE,), relative=0.0, bound=1e-5
            ),
            cases=(CaseErrors(case=HOSTILE, errors=(), problem=HOSTILE),),
        ),
        VerdictEntry(
            recipe=crashed, verdict=Crashed(stage=HOSTILE, kind="signal", text=HOSTILE, log=log)
        ),
        VerdictEntry(recipe="custom(größer → 更快 🚀)", verdict=Unsupported(text=HOSTILE, hint=HOSTILE)),
        Decision(kind="HOLD", recipe=HOSTILE, reasons=(Reason(code="X", text=HOSTILE, recipe=HOSTILE),)),
    ]
    return msgspec.structs.replace(
        base, workload=hostile_workload, environment=hostile_environment
    ), entries


RUNS = {
    "full": full,
    "kept": kept,
    "held": held,
    "partial": partial,
    "started": started,
    "single": single,
    "hostile": hostile,
}
"""Every kind of run, by name."""
