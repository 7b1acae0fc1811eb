"""Plausible inspections for the tests of their page: made by hand, without running anything.

The figures are in the order of magnitude of a small sentence encoder on two cores.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from report_samples import environment
from torchstone.records import (
    Absent,
    Arrival,
    Attempt,
    Axis,
    Bandwidth,
    Bounds,
    Break,
    BreakStudy,
    CallTimes,
    Capture,
    Capturing,
    Clause,
    Coverage,
    Dim,
    DimContract,
    DimMix,
    DtypeCount,
    GuardFailure,
    Inspection,
    Inventory,
    LadderStudy,
    Limit,
    LineUse,
    MemoryUse,
    ModuleUse,
    OpCount,
    OpUse,
    Part,
    PartName,
    Peaks,
    Probe,
    Profile,
    Recompile,
    RecompileStudy,
    Refusal,
    Roofline,
    ScalarMix,
    ScalarSpec,
    ShapeContract,
    ShapeShare,
    SizeBin,
    SizeFigures,
    SourceLine,
    Stale,
    Storm,
    TensorSpec,
    TrafficMix,
    Trial,
    Tried,
    Weights,
    Work,
    WorkloadSpec,
)

FILE = "/home/ada/encoder/model.py"
PARTS: tuple[PartName, ...] = ("capture", "inventory", "breaks", "recompiles", "contract", "ladder")


def where(line: int, text: str) -> SourceLine:
    return SourceLine(file=FILE, line=line, text=text, function="forward")


def spec() -> WorkloadSpec:
    return WorkloadSpec(
        name="encoder",
        inputs=(
            TensorSpec(name="ids", dtype="int64", shape=("B", "S"), low=0, high=30521),
            ScalarSpec(name="n", kind="int", low=1, high=9),
        ),
        dims=(Dim(name="B", low=1, high=64), Dim(name="S", low=8, high=256, multiple=8)),
        example_sizes={"B": 8, "S": 128},
        traffic=tuple(
            Arrival(sizes={"B": 1 + i % 4, "S": 8 * (1 + i % 12)}, scalars={"n": i % 9}, at_s=0.05 * i)
            for i in range(64)
        ),
        metric=None,
        digest="5e" * 32,
    )


def capture() -> Capture:
    return Capture(
        mode="export",
        program="ab" * 32,
        seconds=3.21,
        nodes=214,
        trace_refused=f"{FILE}:41: the size S is used as a Python integer: x.view(B, int(S) // 8, 8)",
        narrowed=("B: 1..64 -> 2..64",),
        parameters=22_713_216,
    )


# --- the inventory --------------------------------------------------------------------------------

# op -> (how it is counted, calls, FLOPs, others, bytes, seconds, bound)
OPS: dict[str, tuple[Any, float, float, float, float, float | None, float | None]] = {
    "aten.addmm": ("formula", 36, 2.17e10, 0, 1.63e8, 0.0302, 0.0184),
    "aten.bmm": ("formula", 12, 8.1e8, 0, 7.1e7, 0.0021, 0.0011),
    "aten.native_layer_norm": ("elements", 13, 0, 3.1e7, 6.4e7, 0.0013, 0.0006),
    "aten.gelu": ("elements", 6, 0, 1.3e7, 1.1e8, 0.0011, 0.0009),
    "aten._softmax": ("elements", 6, 0, 9.4e6, 7.5e7, 0.0009, 0.0006),
    "aten.embedding": ("movement", 3, 0, 0, 1.2e7, 0.0004, 0.0001),
    "aten.add": ("elements", 14, 0, 5.4e6, 6.6e7, 0.0003, 0.0005),
    "mine.rotate": ("uncounted", 6, 0, 0, 3.3e7, 0.0002, 0.0002),
    "aten.clone": ("movement", 12, 0, 0, 5.1e7, 0.0001, 0.0001),
    "aten.view": ("movement", 96, 0, 0, 0, 0.0, 0.0),
}


def work(flops: float = 0.0, other: float = 0.0, moved: float = 0.0, calls: float = 1.0) -> Work:
    return Work(calls=calls, flops=flops, other_flops=other, bytes=moved)


def ops() -> tuple[OpUse, ...]:
    whole = sum(o[5] or 0.0 for o in OPS.values())
    return tuple(
        OpUse(
            op=op,
            counted=how,
            work=work(flops, other, moved, calls),
            mix=work(flops / 4, other / 4, moved / 4, calls),
            seconds=seconds,
            share=None if seconds is None else seconds / whole,
            bound_s=bound,
        )
        for op, (how, calls, flops, other, moved, seconds, bound) in OPS.items()
    )


def module(path: str, kind: str, parameters: int, flops: float, seconds: float) -> ModuleUse:
    own = kind in ("Linear", "LayerNorm", "Embedding")
    return ModuleUse(
        path=path,
        kind=kind,
        depth=path.count(".") + 1 if path else 0,
        parameters=parameters if own else 0,
        parameter_bytes=4 * parameters if own else 0,
        total_parameters=parameters,
        total_parameter_bytes=4 * parameters,
        work=work(flops if own else 0),
        total=work(flops, moved=flops / 32),
        mix=work(flops / 4, moved=flops / 128),
        seconds=seconds if own else 0.0,
        total_seconds=seconds,
    )


def modules() -> Iterator[ModuleUse]:
    yield module("", "Encoder", 22_713_216, 2.25e10, 0.0366)
    yield module("embeddings", "Embeddings", 11_919_360, 3e6, 0.0008)
    yield module("embeddings.word", "Embedding", 11_720_448, 0, 0.0004)
    yield module("embeddings.norm", "LayerNorm", 768, 3e6, 0.0003)
    yield module("layers", "ModuleList", 10_646_784, 0, 0.0)
    for i in range(6):
        layer = f"layers.{i}"
        yield module(layer, "Layer", 1_774_464, 3.75e9, 0.0058)
        yield module(f"{layer}.attention", "Attention", 591_360, 1.35e9, 0.0021)
        for name in ("query", "key", "value"):
            yield module(f"{layer}.attention.{name}", "Linear", 147_840, 3e8, 0.0005)
        yield module(f"{layer}.up", "Linear", 591_360, 1.2e9, 0.0018)
        yield module(f"{layer}.down", "Linear", 590_208, 1.2e9, 0.0017)


def weights() -> Weights:
    return Weights(
        parameters=22_713_216,
        parameter_bytes=90_852_864,
        buffers=512,
        buffer_bytes=4096,
        by_dtype=(
            DtypeCount(dtype="float32", tensors=103, elements=22_713_216, bytes=90_852_864),
            DtypeCount(dtype="int64", tensors=1, elements=512, bytes=4096),
        ),
        tied=(("embeddings.word.weight", "head.weight"),),
    )


def coverage() -> tuple[Coverage, ...]:
    return (
        Coverage(
            engine="inductor",
            source="program",
            operations=214,
            translated=212,
            fallbacks=(OpCount(op="aten.topk.default", count=2),),
        ),
        Coverage(
            engine="onnxruntime",
            source="program",
            operations=214,
            translated=208,
            missing=(OpCount(op="mine.rotate.default", count=6),),
            text="it takes no Python numbers as inputs",
        ),
        Coverage(engine="openvino", source="calls", operations=214, text="it cannot be said"),
        Coverage(
            engine="tensorrt",
            source="calls",
            operations=0,
            absent=Absent(engine="tensorrt", why="no CUDA device", hint="pip install tensorrt"),
        ),
    )


def traffic() -> TrafficMix:
    return TrafficMix(
        requests=64,
        recorded=True,
        shapes=12,
        frequent=(ShapeShare(sizes={"B": 1, "S": 8}, scalars={"n": 0.0}, requests=6, share=6 / 64),),
        dims=(
            DimMix(
                name="B",
                quantiles={"p50": 2, "p90": 4, "p99": 4, "max": 4},
                mean=2.5,
                distinct=4,
                histogram=tuple(SizeBin(low=n, high=n, requests=16) for n in range(1, 5)),
                padding_waste=0.375,
            ),
            DimMix(
                name="S",
                quantiles={"p50": 48, "p90": 88, "p99": 96, "max": 96},
                mean=50.5,
                distinct=12,
                histogram=tuple(
                    SizeBin(low=8 * n, high=8 * n + 7, requests=12 - n) for n in range(1, 13)
                ),
                padding_waste=0.47,
            ),
        ),
        scalars=(ScalarMix(name="n", distinct=9, frequent=((0.0, 8), (1.0, 7))),),
        padding_waste=0.62,
        rate=20.0,
        peak_rate=21.0,
    )


def size(b: int, s: int, requests: int, median_s: float) -> SizeFigures:
    return SizeFigures(
        sizes={"B": b, "S": s},
        scalars={"n": 1.0},
        requests=requests,
        times=CallTimes(calls=40, warmup_calls=5, median_s=median_s, p90_s=1.08 * median_s, steady=True),
        work=work(2.1e7 * b * s, 0, 1e8),
        least_bytes=91_000_000,
        live_bytes=12_000_000,
        operations_s=0.55 * median_s,
        fused_s=0.4 * median_s,
    )


def peaks() -> Peaks:
    return Peaks(
        device="cpu",
        threads=2,
        flops_per_s={"float32": 1.22e12, "bfloat16": 2.9e12},
        bandwidth=tuple(
            Bandwidth(working_set_bytes=n, bytes_per_s=rate)
            for n, rate in ((2**18, 2.1e11), (2**20, 1.6e11), (2**22, 9e10), (2**27, 2.2e10))
        ),
        beyond_cache=True,
    )


def bounds(eager_s: float) -> Bounds:
    return Bounds(
        eager_s=eager_s,
        operations_s=eager_s / 1.63,
        fused_s=eager_s / 2.1,
        eager_over_operations=1.63,
        eager_over_fused=2.1,
    )


def profile() -> Profile:
    lines = (
        (57, "h = self.up(x)", 6, 0.011),
        (58, "return self.down(gelu(h))", 12, 0.0108),
        (33, "q, k, v = self.query(x), self.key(x), self.value(x)", 18, 0.0093),
    )
    return Profile(
        calls=24,
        seconds=0.0391,
        operations_s=0.0366,
        outside=0.064,
        lines=tuple(
            LineUse(file=FILE, line=n, text=text, calls=calls, seconds=s, share=s / 0.0366)
            for n, text, calls, s in lines
        ),
    )


def inventory() -> Inventory:
    return Inventory(
        device="cpu",
        threads=2,
        weights=weights(),
        modules=tuple(modules()),
        ops=ops(),
        coverage=coverage(),
        traffic=traffic(),
        first_call_s=0.214,
        example=CallTimes(calls=200, warmup_calls=12, median_s=0.0368, p90_s=0.0384, steady=True),
        least_bytes=93_000_000,
        sizes=(size(1, 8, 22, 0.0041), size(2, 48, 30, 0.0093), size(4, 96, 12, 0.0241)),
        mean_s=0.0112,
        memory=MemoryUse(resident_bytes=410_000_000, peak_bytes=463_000_000, live_bytes=12_600_000),
        profile=profile(),
        roofline=Roofline(peaks=peaks(), example=bounds(0.0368), mix=bounds(0.0112)),
        requests_per_s=89.3,
        dollars_per_million=0.41,
        notes=(
            "82% of the time in operations is in aten.addmm, at 61% of what this machine allows",
            "tied: embeddings.word.weight, head.weight are one tensor, counted once",
        ),
    )


# --- breaks and recompiles ------------------------------------------------------------------------


def capturing(graphs: int, breaks: int, steady_s: float) -> Capturing:
    return Capturing(
        graphs=graphs,
        operations=214,
        entered=graphs,
        breaks=breaks,
        eager_functions=(f"{FILE}:88 in pooled",) if breaks > 1 else (),
        capture_s=0.61 * graphs,
        compile_s=2.4 * graphs,
        steady_s=steady_s,
        outside_s=0.0004 * graphs,
    )


def breaks() -> BreakStudy:
    limit = Limit(
        kind="LOOP",
        file=FILE,
        line=70,
        text="for block in self.blocks:",
        edit="Write the calls out (a, b = self.blocks; x = b(a(x))).",
    )
    return BreakStudy(
        backend="inductor",
        breaks=(
            Break(
                file=FILE,
                line=72,
                text="print('rows', x.shape[0])",
                function="forward",
                kind="PRINT",
                reason="print() writes to the terminal, which a graph cannot do.",
                raw="Failed to trace builtin operator: builtin print",
                edit="Remove it.",
                depth=2,
                path=(f"{FILE}:40 in forward", f"{FILE}:66 in block", f"{FILE}:71 in told"),
                times=3,
                nested_times=1,
                outside_s=0.0011,
                nested_outside_s=0.0003,
                limits=(limit,),
            ),
            Break(
                file=FILE,
                line=91,
                text="total = mask.sum().item()",
                function="pooled",
                kind="ITEM",
                reason="A tensor's value is needed as a Python number.",
                raw="Unsupported Tensor.item() call with capture_scalar_outputs=False",
                edit="Keep it a tensor.",
                depth=1,
                path=(f"{FILE}:40 in forward", f"{FILE}:88 in pooled"),
                times=2,
            ),
        ),
        plain=capturing(6, 5, 0.0341),
        nested=capturing(3, 2, 0.0319),
        eager_s=0.0368,
        relative=0.0,
        recipe="inductor(module, nested)",
        why="Nested graph breaks are 1.07 times as fast, and the outputs are equal.",
    )


def failure(cause: Any, guarded: str, line: int | None = None) -> GuardFailure:
    return GuardFailure(
        text=f"0/1: {guarded} == 3  # return x[: {guarded}]",
        cause=cause,
        guarded=guarded,
        sentence=f"The integer argument {guarded} is part of the code: it was 3, is 4 now.",
        fix="Make it a tensor and compute with it.",
        code=f"{guarded} = torch.tensor({guarded})",
        argument="n",
        file=FILE if line else None,
        line=line,
        source="return x[:, :n]" if line else None,
    )


def recompiles() -> RecompileStudy:
    by_integer = failure("INTEGER_ARGUMENT", "n", 44)
    by_size = msgspec.structs.replace(
        failure("ZERO_ONE", "ids.size()[0]"),
        sentence="Sizes 0 and 1 always get a graph of their own: size B (axis 0 of ids) is 1.",
        fix="Say that the axis has any size from 1 on; size 1 then needs no graph of its own.",
        code="torch._dynamo.decorators.mark_unbacked(ids, 0, min=1)",
        argument="ids",
    )
    at = ((2, by_integer), (3, by_integer), (5, by_size), (9, by_integer), (17, by_integer))
    return RecompileStudy(
        calls=64,
        graphs=6,
        compiles=6,
        recompiles=tuple(
            Recompile(
                call=call,
                function=f"{FILE}:40 in forward",
                failure=one,
                others=("0/0: n == 2",),
                at_limit=call == 17,
            )
            for call, one in at
        ),
        storms=tuple(
            Storm(
                cause=one.cause,
                guarded=one.guarded,
                count=sum(o is one for _, o in at),
                calls=tuple(call for call, o in at if o is one),
                sentence=one.sentence,
                fix=one.fix,
                code=one.code,
            )
            for one in (by_integer, by_size)
        ),
        limit=8,
        limited=(f"{FILE}:40 in forward",),
        eager_calls=(17, 18, 40, 63),
        allowed=2,
        exceeds=True,
        tried=(
            Tried(name="mark_dynamic", code="torch._dynamo.mark_dynamic(ids, 0)", graphs=4, agrees=True),
            Tried(name="dynamic=True", code="torch.compile(m, dynamic=True)", graphs=5),
            Tried(
                name="mark_unbacked(min=1)",
                code="torch._dynamo.decorators.mark_unbacked(ids, 0, min=1)",
                graphs=None,
                failed=f"Could not guard on data-dependent expression ({FILE}:44)",
            ),
        ),
    )


def stale() -> Stale:
    return Stale(
        call=7,
        relative=0.0039,
        cause="FLOAT_ARGUMENT",
        what=("scale",),
        sentence="The float argument scale was made symbolic when it changed, and baked in.",
        fix="Pass it as a tensor.",
        code="torch._dynamo.config.specialize_float = True",
        evidence=("inductor: call 7 differs from eager", "specialize_float=True: right"),
    )


# --- shapes ---------------------------------------------------------------------------------------


def refusal() -> Refusal:
    return Refusal(
        code="SIZE_BRANCH",
        text="The code branches on S > 128, so that one graph cannot hold for all sizes.",
        where=where(41, "if x.shape[1] > 128:"),
        axes=(Axis(input="ids", axis=1, dim="S"),),
        expression="S > 128",
        bound="S <= 128",
        fix="Write code that holds for all sizes, or state the bound.",
        code_to_write="torch._check(ids.shape[1] <= 128)",
        raw="ConstraintViolationError: Constraints violated (S)",
    )


def contract() -> ShapeContract:
    one = Clause(
        text="B != 1",
        dims=("B",),
        where=where(41, "x = x.squeeze(0)"),
        proof="both",
        model=False,
        silent=True,
        fix="Rewrite model.py:41 so that it holds for all sizes.",
    )
    eight = Clause(
        text="S % 8 == 0",
        dims=("S",),
        where=where(47, "x.view(B, S // 8, 8)"),
        proof="guard",
        model=True,
        fix="The model itself needs it: declare the range of S so.",
    )
    tie = Clause(
        text="B <= S", dims=("B", "S"), where=None, proof="sweep", model=False, needless=True, fix=""
    )
    return ShapeContract(
        subject="automatic",
        dims=(
            DimContract(
                dim="B",
                declared="1..64",
                low=2,
                high=64,
                text="B in 2..64, B != 1 needed by model.py:41 x = x.squeeze(0)",
                clauses=(one,),
            ),
            DimContract(
                dim="S",
                declared="8*k, 8..256",
                low=8,
                high=256,
                text="S in 8..256, S % 8 == 0",
                clauses=(eight,),
            ),
        ),
        ties=(tie,),
        narrowed=("B: 1..64 -> 2..64, B != 1", "B <= S"),
        refusals={"declared": refusal()},
        probes=(
            Probe(sizes={"B": 8, "S": 128}, outcome="AGREES", relative=3e-7),
            Probe(sizes={"B": 1, "S": 128}, outcome="REFUSES", unguarded="WRONG", refusal=refusal()),
            Probe(sizes={"B": 64, "S": 9}, outcome="EAGER_RAISES", refusal=refusal()),
        ),
        seconds=21.4,
        not_tried=("sizes {'B': 63, 'S': 256}",),
    )


def ladder() -> LadderStudy:
    trials = (
        Trial(sizes={"B": 8, "S": 128}, relative=3e-7, graphs=1, seconds=14.2),
        Trial(sizes={"B": 1, "S": 8}, relative=2e-7, graphs=1, seconds=9.1),
    )
    return LadderStudy(
        backend="inductor",
        chosen={"B": "unbacked-2", "S": "backed"},
        why="All unbacked fell: the code branches on S > 128 (model.py:41).",
        code="from torch._dynamo.decorators import mark_unbacked\n\ncompiled = torch.compile(model)",
        attempts=(
            Attempt(rungs={"B": "unbacked", "S": "unbacked"}, failed=refusal()),
            Attempt(
                rungs={"B": "unbacked-2", "S": "backed"},
                trials=trials,
                graphs=2,
                compile_s=23.3,
                median_s={"B=8 S=128": 0.0312, "B=1 S=8": 0.0032},
                against_backed=1.02,
            ),
            Attempt(
                rungs={"B": "backed", "S": "backed"}, trials=trials, graphs=3, compile_s=31.0, wrong=None
            ),
            Attempt(
                rungs={"B": "automatic", "S": "automatic"}, trials=trials[:1], wrong={"B": 1, "S": 8}
            ),
            Attempt(rungs={"B": "backed", "S": "unbacked"}, unavailable="torch is older than 2.13"),
        ),
        graphs_without=4,
        seconds=96.0,
        not_tried=("sizes {'B': 64}",),
    )


# --- inspections ----------------------------------------------------------------------------------


def full() -> Inspection:
    """Every part found something."""
    return Inspection(
        format=1,
        workload=spec(),
        origin="examples/encoder",
        environment=environment(),
        started_at="2026-11-30T14:01:22+00:00",
        parts=tuple(Part(name=name, seconds=3.5 + i) for i, name in enumerate(PARTS)),
        capture=capture(),
        inventory=inventory(),
        breaks=breaks(),
        recompiles=recompiles(),
        stale=stale(),
        contract=contract(),
        ladder=ladder(),
    )


def minimal() -> Inspection:
    """Nothing was asked for."""
    return Inspection(
        format=1,
        workload=msgspec.structs.replace(spec(), inputs=(), dims=(), traffic=(), example_sizes={}),
        origin=None,
        environment=environment(),
        started_at="2026-11-30T14:01:22+00:00",
        parts=(),
    )


def failed() -> Inspection:
    """Every part failed."""
    return msgspec.structs.replace(
        minimal(),
        workload=spec(),
        parts=tuple(
            Part(name=name, seconds=2.0, failed=f"killed by signal 11 in {name}", log=f"log of {name}\n")
            for name in PARTS
        ),
    )


def uncapturable() -> Inspection:
    """No graph, no compiler, no program, no profile, no traffic."""
    none = Work(calls=0, flops=0, other_flops=0, bytes=0)
    bare = msgspec.structs.replace(
        inventory(),
        weights=Weights(parameters=0, parameter_bytes=0, buffers=0, buffer_bytes=0, by_dtype=()),
        modules=(msgspec.structs.replace(next(modules()), total=none, total_seconds=None),),
        ops=(),
        least_bytes=None,
        coverage=(),
        traffic=TrafficMix(
            requests=1, recorded=False, shapes=1, frequent=(), dims=(), scalars=(), padding_waste=0.0
        ),
        sizes=(SizeFigures(sizes={}, scalars={}, requests=1, text="the model raises here"),),
        mean_s=None,
        profile=None,
        roofline=None,
        requests_per_s=None,
        dollars_per_million=None,
        notes=("the model cannot be profiled: it spawns threads",),
    )
    refused = "Dynamo compiles nothing of this model: all of it runs eagerly."
    return msgspec.structs.replace(
        full(),
        capture=Capture(
            mode="dynamo",
            program=None,
            seconds=1.2,
            graphs=0,
            refused="it calls a C++ extension",
            trace_refused=f"{FILE}:12: it writes a global",
        ),
        inventory=bare,
        breaks=BreakStudy(backend="inductor", recipe="eager", why="Nothing to choose.", refused=refused),
        recompiles=RecompileStudy(calls=1, graphs=0, compiles=0, limit=8, refused=refused),
        stale=None,
        contract=ShapeContract(
            subject="none",
            dims=(),
            narrowed=("no program: it branches",),
            refusals={"declared": refusal()},
        ),
        ladder=LadderStudy(
            backend="inductor",
            chosen={},
            why="Nothing compiles.",
            code="",
            attempts=(),
            graphs_without=None,
            seconds=2.0,
        ),
    )


def clean() -> Inspection:
    """One graph, every size holds, nothing breaks, nothing recompiles."""
    fine = contract()
    return msgspec.structs.replace(
        full(),
        capture=Capture(mode="export", program="ab" * 32, seconds=1.1, nodes=214, traced=True),
        breaks=BreakStudy(
            backend="inductor",
            plain=capturing(1, 0, 0.031),
            eager_s=0.0368,
            recipe="inductor(module)",
            why="There is no break.",
        ),
        recompiles=RecompileStudy(calls=64, graphs=1, compiles=1, limit=8),
        stale=None,
        contract=ShapeContract(
            subject="program",
            dims=tuple(msgspec.structs.replace(d, clauses=()) for d in fine.dims),
            probes=fine.probes[:1],
        ),
    )


EVIL = "<script>alert(1)</script> & \"[bold red]x[/]\" \x1b[31m\u202e 'None'"


def hostile() -> Inspection:
    """Every text that comes from outside is one that wants to be markup."""
    found: Inspection = _poisoned(full())
    return found


def _poisoned(value: Any) -> Any:
    """The value with EVIL for each text in it; fields of few known words keep theirs."""
    if isinstance(value, msgspec.Struct):
        kinds = {f.name: str(f.type) for f in msgspec.structs.fields(type(value))}
        return msgspec.structs.replace(
            value,
            **{
                name: _poisoned(getattr(value, name))
                for name, kind in kinds.items()
                if name != "started_at" and "Literal" not in kind
            },
        )
    if isinstance(value, tuple):
        return tuple(map(_poisoned, value))
    if isinstance(value, dict):
        return {key: _poisoned(one) for key, one in value.items()}
    return EVIL if isinstance(value, str) else value


def holes(found: Any) -> Iterator[tuple[str, Any]]:
    """The same with one thing missing at a time: each field that may be None, each that may be empty.

    Of several things of one kind the first is gone through.
    """
    for field in msgspec.structs.fields(type(found)):
        value = getattr(found, field.name)
        if value is None:
            continue
        if isinstance(field.type, types.UnionType) and type(None) in field.type.__args__:
            yield field.name, msgspec.structs.replace(found, **{field.name: None})
        empty = (
            type(value)()
            if isinstance(value, str | tuple | dict) and "Literal" not in str(field.type)
            else None
        )
        if empty is not None and empty != value:
            yield f"{field.name} empty", msgspec.structs.replace(found, **{field.name: empty})
        for path, changed in _inside(value):
            yield f"{field.name}.{path}", msgspec.structs.replace(found, **{field.name: changed})


def _inside(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, msgspec.Struct):
        yield from holes(value)
    elif isinstance(value, tuple) and value and isinstance(value[0], msgspec.Struct):
        for path, changed in holes(value[0]):
            yield path, (changed, *value[1:])
    elif isinstance(value, dict) and value:
        key = next(iter(value))
        for path, changed in _inside(value[key]):
            yield path, {**value, key: changed}


SAMPLES: dict[str, Callable[[], Inspection]] = {
    f.__name__: f for f in (full, minimal, failed, uncapturable, clean, hostile)
}
