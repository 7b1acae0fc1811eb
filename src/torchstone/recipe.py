"""Recipes: how to make a candidate, as a frozen value with a text form that round-trips.

A recipe is one engine step and at most one each of the rewrite, precision and graph steps::

    aotinductor(freezing, max_autotune) + precision(bf16)
    inductor + rewrite(pooling.norms) + cudagraph
    inductor(freezing) + quantize(pt2e_static)
    onnxruntime

The text form is canonical: ``parse(str(r)) == r`` and ``str(parse(t))`` is the shortest spelling of
``t`` (options at their defaults are left out; the engine comes first, then the rewrite). A boolean
option is written by its name alone; a positional argument fills a step's first field.
"""

from __future__ import annotations

import re
from enum import Enum
from typing import Any, Literal

import msgspec

from torchstone.errors import RecipeError

__all__ = [
    "ENGINES",
    "FAMILIES",
    "AOTInductor",
    "CudaGraph",
    "Custom",
    "Eager",
    "Engine",
    "Inductor",
    "Numerics",
    "OnnxRuntime",
    "OpenVINO",
    "Precision",
    "Quantize",
    "Recipe",
    "Rewrite",
    "baseline",
    "default_recipes",
    "fallback",
    "parse",
]


class Numerics(Enum):
    """What a recipe promises about its numbers; tuning never changes it."""

    EXACT = "exact"
    """Bit-equal to eager."""
    REASSOCIATES = "reassociates"
    """Error within the bound of the model's own dtype: only the order of operations differs."""
    LOSSY = "lossy"
    """Error within the policy's budget."""


class Eager(msgspec.Struct, frozen=True, tag="eager"):
    """PyTorch as the user runs it: the baseline."""

    program: bool = False
    """Run the exported program rather than the user's module: what a bundle falls back on."""


class Inductor(msgspec.Struct, frozen=True, tag="inductor"):
    """``torch.compile`` with the Inductor backend, compiled in the process that serves."""

    freezing: bool = False
    """Fold and prepack parameters as constants."""
    max_autotune: bool = False
    """Benchmark template kernels against the library's at compile time."""
    module: bool = False
    """Compile the user's module itself rather than the captured program: ``torch.compile(model)``."""
    nested: bool = False
    """With ``module``: a graph break in a called function cuts only there (nested graph breaks)."""
    gemm: Literal["", "aten", "triton", "cpp", "cutlass", "cutedsl", "nvgemm", "flydsl"] = ""
    """Whose kernels for matrix products are tried beside the library's; none are where it is empty."""


class AOTInductor(msgspec.Struct, frozen=True, tag="aotinductor"):
    """Inductor ahead of time: a ``.pt2`` package with a shared library."""

    freezing: bool = False
    """Fold and prepack parameters as constants (they then live inside the package)."""
    max_autotune: bool = False
    """Benchmark template kernels against the library's at compile time."""


class OnnxRuntime(msgspec.Struct, frozen=True, tag="onnxruntime"):
    """ONNX Runtime on the program exported by ``torch.onnx`` (dynamo exporter)."""


class OpenVINO(msgspec.Struct, frozen=True, tag="openvino"):
    """OpenVINO on the captured program, latency hint."""

    hint: Literal["f32", "bf16", "f16", "auto"] = "f32"
    """``INFERENCE_PRECISION_HINT``; ``auto`` lets the plugin choose, and counts as lossy."""


class Custom(msgspec.Struct, frozen=True, tag="custom"):
    """The user's own implementation: a function of the module that returns a callable."""

    target: str
    """Name of an entry of the workload's ``candidates``."""


class CudaGraph(msgspec.Struct, frozen=True, tag="cudagraph"):
    """The launches of a call recorded once and replayed as one, on a CUDA device."""

    mode: Literal["static"] = "static"
    """``static``: one graph for each signature of inputs."""


class Precision(msgspec.Struct, frozen=True, tag="precision"):
    """A floating-point format for weights and arithmetic."""

    format: Literal[
        "bf16",
        "bf16_autocast",
        "fp16",
        "bf16x3",
        "bf16x6",
        "fp16_products",
        "bf16_products",
        "mixed_products",
    ]
    """``bf16``, ``fp16``: weights and activations converted; ``bf16_autocast``: fp32 weights.
    ``bf16x3``, ``bf16x6``: float32 products computed as so many products of bfloat16 parts.
    ``fp16_products``, ``bf16_products``: operands of products rounded, sums and all else float32.
    ``mixed_products``: ``fp16_products`` for convolutions, which libraries compute in TF32, and
    ``bf16x3`` for all others."""

    @property
    def products(self) -> bool:
        """Whether only products are computed otherwise, in the captured program."""
        return self.format.endswith("_products") or self.format in ("bf16x3", "bf16x6")


class Quantize(msgspec.Struct, frozen=True, tag="quantize"):
    """An integer format for weights, and for activations where the scheme says so."""

    scheme: Literal["int8_dynamic", "int8_weight_only", "pt2e_static", "pt2e_dynamic"]
    """torchao scheme; ``pt2e_*`` is the X86 Inductor quantizer on the captured graph."""


class Rewrite(msgspec.Struct, frozen=True, tag="rewrite"):
    """The captured program rewritten by proven identities before the engine has it."""

    families: str = "all"
    """Families of rules, joined by a dot."""


Engine = Eager | Inductor | AOTInductor | OnnxRuntime | OpenVINO | Custom
Numeric = Precision | Quantize

ENGINES: tuple[type[Engine], ...] = (Eager, Inductor, AOTInductor, OnnxRuntime, OpenVINO, Custom)
"""Every engine step, in the order shown to users."""
NUMERICS: tuple[type[Numeric], ...] = (Precision, Quantize)
"""Every step that changes the number format."""

FAMILIES: tuple[str, ...] = (
    "pooling",
    "norms",
    "folding",
    "transposed",
    "structured",
    "attention",
    "simplify",
    "kernels",
)
"""Families of rewrite rules, see :mod:`torchstone.rewrite`."""

_STEPS = {str(s.__struct_config__.tag): s for s in (*ENGINES, Rewrite, *NUMERICS, CudaGraph)}
_STEP = re.compile(r"\s*([a-z_0-9]+)\s*(?:\(([^()]*)\))?\s*\Z")
_ARGUMENT = re.compile(r"\s*(?:([a-z_0-9]+)\s*=\s*)?([A-Za-z0-9_.:\-]+)\s*\Z")


class Recipe(msgspec.Struct, frozen=True):
    """How to make one candidate."""

    engine: Engine
    """What runs the program."""
    numeric: Numeric | None = None
    """How its number formats change, if they do."""
    rewrite: Rewrite | None = None
    """How the captured program is rewritten, if it is."""
    graph: CudaGraph | None = None
    """How its launches are recorded, if they are."""

    def __str__(self) -> str:
        steps = (self.engine, self.rewrite, self.numeric, self.graph)
        return " + ".join(_step_text(step) for step in steps if step is not None)

    @property
    def numerics(self) -> Numerics:
        """The numerics class that the recipe declares and is held to."""
        if self.numeric == Precision("bf16x6"):
            return Numerics.REASSOCIATES
        if self.numeric is not None:
            return Numerics.LOSSY
        if isinstance(self.engine, OpenVINO) and self.engine.hint != "f32":
            return Numerics.LOSSY
        if self == baseline():
            return Numerics.EXACT
        return Numerics.REASSOCIATES


def baseline() -> Recipe:
    """The recipe that every other is compared with, and that is always among the candidates."""
    return Recipe(Eager())


def fallback() -> Recipe:
    """What a bundle falls back on; always among the candidates, so that the fallback is a proven one."""
    return Recipe(Eager(program=True))


def default_recipes() -> tuple[Recipe, ...]:
    """The candidates of a run that names none, quick and promising ones first.

    The order matters when the policy's search time runs out before the list does.
    """
    return tuple(
        parse(text)
        for text in (
            "eager",
            "eager(program)",
            "openvino",
            "onnxruntime",
            "aotinductor",
            "aotinductor + rewrite",
            "aotinductor(freezing) + quantize(pt2e_static)",
            "inductor",
            "openvino(auto)",
            "inductor + quantize(pt2e_static)",
            "inductor(freezing, max_autotune)",
            "aotinductor(freezing) + precision(bf16)",
            "inductor + precision(bf16_autocast)",
            "inductor + quantize(int8_dynamic)",
        )
    )


def parse(text: str) -> Recipe:
    """Read a recipe's text form.

    :raises RecipeError: naming the step or option at fault and what was expected.
    """
    steps = [_parse_step(part, text) for part in text.split("+")]
    engines = [s for s in steps if isinstance(s, ENGINES)]
    numerics = [s for s in steps if isinstance(s, NUMERICS)]
    rewrites = [s for s in steps if isinstance(s, Rewrite)]
    graphs = [s for s in steps if isinstance(s, CudaGraph)]
    if len(engines) != 1 or max(len(numerics), len(rewrites), len(graphs)) > 1:
        counts = f"{len(engines)} engine, {len(rewrites)} rewrite, {len(numerics)} precision"
        raise RecipeError(
            f"recipe {text!r} has {counts} and {len(graphs)} graph steps",
            hint="a recipe is one engine, at most one each of rewrite and cudagraph, and one of "
            "precision(...) and quantize(...): 'aotinductor(freezing) + precision(bf16)'",
        )
    rewrite = _canonical(rewrites[0], text) if rewrites else None
    graph = graphs[0] if graphs else None
    recipe = Recipe(engines[0], numerics[0] if numerics else None, rewrite, graph)
    _refuse_nonsense(recipe, text)
    return recipe


def _canonical(step: Rewrite, text: str) -> Rewrite:
    """Its families in their one order; all of them are called so."""
    named = FAMILIES if step.families == "all" else tuple(step.families.split("."))
    unknown = [name for name in named if name not in FAMILIES]
    if unknown:
        raise RecipeError(
            f"recipe {text!r}: {unknown[0]!r} is no family of rewrites",
            hint=f"families are {', '.join(FAMILIES)}; join several by a dot",
        )
    kept = tuple(name for name in FAMILIES if name in named)
    return Rewrite("all" if kept == FAMILIES else ".".join(kept))


def _refuse_nonsense(recipe: Recipe, text: str) -> None:
    if recipe.graph is not None and isinstance(recipe.engine, OnnxRuntime | OpenVINO):
        raise RecipeError(
            f"recipe {text!r}: {_step_text(recipe.engine)} does not launch through torch",
            hint="cudagraph goes with eager, inductor, aotinductor and custom",
        )
    if recipe.rewrite is not None and not _takes_program(recipe.engine):
        raise RecipeError(
            f"recipe {text!r}: a rewrite needs the captured program, and {_step_text(recipe.engine)} "
            "runs the user's module",
            hint="rewrite goes with eager(program), inductor, aotinductor, openvino and onnxruntime",
        )
    products = isinstance(recipe.numeric, Precision) and recipe.numeric.products
    if products and not (isinstance(recipe.engine, Inductor) and not recipe.engine.module):
        raise RecipeError(
            f"recipe {text!r}: products in other formats are operators in the captured program",
            hint="write inductor + precision(bf16x3)",
        )
    if recipe.rewrite is not None and isinstance(recipe.numeric, Precision) and not products:
        raise RecipeError(
            f"recipe {text!r}: precision converts the user's module, a rewrite the captured program",
            hint="leave out one of them",
        )
    if isinstance(recipe.engine, Inductor) and recipe.engine.nested and not recipe.engine.module:
        raise RecipeError(
            f"recipe {text!r}: a captured program has no graph breaks to nest",
            hint="write inductor(module, nested)",
        )
    takes_numeric = isinstance(recipe.engine, Eager | Inductor | AOTInductor)
    if recipe.numeric is not None and not takes_numeric:
        raise RecipeError(
            f"recipe {text!r}: engine {_step_text(recipe.engine)} takes no precision step",
            hint="openvino has its own option, openvino(bf16); precision and quantize go with "
            "eager, inductor and aotinductor",
        )
    if recipe.numeric is not None and recipe.engine == Eager(program=True):
        raise RecipeError(
            f"recipe {text!r}: the exported program runs in its own precision",
            hint="leave out 'program' to convert the module",
        )
    if isinstance(recipe.numeric, Quantize) and recipe.numeric.scheme.startswith("pt2e"):
        if isinstance(recipe.engine, Eager):
            raise RecipeError(
                f"recipe {text!r}: pt2e quantization in eager is a simulation, not a speed-up",
                hint="use inductor or aotinductor",
            )
        if isinstance(recipe.engine, Inductor) and recipe.engine.module:
            raise RecipeError(
                f"recipe {text!r}: pt2e quantization needs the captured program",
                hint="leave out 'module'",
            )


def _takes_program(engine: Engine) -> bool:
    if isinstance(engine, Eager):
        return engine.program
    return not (isinstance(engine, Custom) or (isinstance(engine, Inductor) and engine.module))


def _step_text(step: Engine | Rewrite | Numeric | CudaGraph) -> str:
    name = str(step.__struct_config__.tag)
    arguments = []
    for position, field in enumerate(msgspec.structs.fields(step)):
        value = getattr(step, field.name)
        if value == field.default:
            continue
        if isinstance(value, bool):
            arguments.append(field.name)
        else:
            arguments.append(str(value) if position == 0 else f"{field.name}={value}")
    return f"{name}({', '.join(arguments)})" if arguments else name


def _parse_step(part: str, text: str) -> Engine | Rewrite | Numeric | CudaGraph:
    match = _STEP.match(part)
    if match is None or match[1] not in _STEPS:
        raise RecipeError(
            f"recipe {text!r}: {part.strip()!r} is not a step",
            hint=f"steps are {', '.join(_STEPS)}",
        )
    kind = _STEPS[match[1]]
    fields = msgspec.structs.fields(kind)
    values: dict[str, str | bool] = {}
    for position, argument in enumerate(a for a in (match[2] or "").split(",") if a.strip()):
        name, value = _parse_argument(argument, position, fields, text)
        if name in values:
            raise RecipeError(f"recipe {text!r}: option {name!r} is given twice")
        values[name] = value
    try:
        made: Any = msgspec.convert({"type": match[1], **values}, kind, strict=False)
    except msgspec.ValidationError as error:
        raise RecipeError(f"recipe {text!r}, step {match[1]}: {error}") from None
    step: Engine | Rewrite | Numeric | CudaGraph = made
    return step


def _parse_argument(
    argument: str, position: int, fields: tuple[msgspec.structs.FieldInfo, ...], text: str
) -> tuple[str, str | bool]:
    match = _ARGUMENT.match(argument)
    if match is None:
        raise RecipeError(f"recipe {text!r}: {argument.strip()!r} is not an option")
    name, value = match[1], match[2]
    known = {f.name: f for f in fields}
    if name is None and value in known and known[value].type is bool:
        return value, True
    if name is None and position == 0 and fields and fields[0].type is not bool:
        return fields[0].name, value
    if name in known:
        return name, value
    raise RecipeError(
        f"recipe {text!r}: unknown option {name or value!r}",
        hint=f"options are {', '.join(known)}" if known else "this step takes no options",
    )
