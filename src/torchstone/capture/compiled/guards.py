"""What a failed guard of Dynamo means: its text to a cause, a sentence and a fix. Pure; loads no torch.

The texts are those of ``torch._dynamo.guards`` (2.13). A size or value is told from another by what the
calls so far have shown: a static size that was compiled first is the ordinary price of starting static,
one that was compiled after the size had been seen to change is a branch of the user's on that very size.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from torchstone.capture.compiled.guardwords import WORDS
from torchstone.records import Cause, GuardFailure, InputSpec, ScalarSpec, TensorSpec, factor_and_dim

__all__ = ["Context", "explain", "principal"]

Axis = tuple[str, int]


class Context(NamedTuple):
    """What is known when a guard fails."""

    inputs: Mapping[str, InputSpec]
    """The model's inputs, by name."""
    now: Mapping[str, tuple[int, ...] | int | float | bool]
    """In this call: shapes of tensors and values of numbers."""
    seen: Mapping[Axis | str, Sequence[float]]
    """In earlier calls: sizes by input and axis, values by input; in order, each once."""
    parameters: tuple[str, ...] = ()
    """Parameters of the function that failed; the first may be the module."""
    free: tuple[str, ...] = ()
    """Its free variables."""
    function: str = "forward"
    """Its name."""
    file: str = ""
    """Its file, whole: guards shorten theirs."""
    resolve: Callable[[str], object] = lambda _: None
    """The object behind the name of a global or free variable."""


class _Parts(NamedTuple):
    version: int
    guard: str
    places: tuple[tuple[str, str, int], ...]
    """``(source line, file, line)`` of each comment."""
    framework: tuple[bool, ...]
    """For each, whether the guard is the framework's own 0/1 specialization."""


class _Found(NamedTuple):
    cause: Cause
    guarded: str
    expected: str = ""
    actual: str = ""
    argument: str | None = None
    axis: int | None = None
    novel: bool = True
    """Whether what failed has a value that no earlier call had."""


_PREFIX = re.compile(r"^\[?\d+/(\d+)\]?(?:_\d+)?: ")
_PLACE = re.compile(r"# (?P<source>(?:(?! # ).)+?)\s+# (?P<file>[^\s#]+):(?P<line>\d+) in [\w<>]+")
_STACK = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in .*\n\s+(?P<source>.+)')
_TENSOR = re.compile(
    r"tensor '(?P<name>.+?)' (?P<what>[\w ]+?) mismatch(?: at index (?P<axis>\d+))?\.(?P<rest>.*)"
)
_EXPECTED = re.compile(r"expected (?P<expected>.+?)(?:, actual (?P<actual>.+))?$")
_SIZE = re.compile(r"(?P<name>[A-Za-z_][\w.\[\]'\"]*)\.size\(\)\[(?P<axis>\d+)\]")
_RANGE = re.compile(
    r"^(?:(?P<low>\d+) <= )?(?P<name>[\w.]+(?:\.size\(\)\[\d+\])?)(?: <= (?P<high>\d+))?$"
)
_EQUALS = re.compile(r"^(?P<name>.+?) == (?P<value>.+)$")
_INPUT = re.compile(r"^[A-Za-z_]\w*$")

_TENSOR_CAUSES: dict[str, Cause] = {
    "dtype": "DTYPE",
    "device index": "DEVICE",
    "device": "DEVICE",
    "stride": "LAYOUT",
    "requires_grad": "REQUIRES_GRAD",
    "rank": "RANK",
    "dispatch key set": "OBJECT_TYPE",
    "type": "OBJECT_TYPE",
}
_LEAST_TELLING: tuple[Cause, ...] = (
    "ZERO_ONE",
    "SIZE_BRANCH",
    "SIZES_RELATED",
    "LAYOUT",
    "SIZE_SPECIALIZED",
    "FIRST_SIZE",
    "BACKEND",
)
"""Of versions that failed for different reasons, these say the least, the last one least of all."""


def explain(reason: str, context: Context) -> GuardFailure:
    """Understand one failed guard.

    :param reason: Dynamo's text: ``0/1: tensor 'x' size mismatch at index 1. expected 4, actual 8``.
    """
    parts = _parts(reason, context)
    return _record(reason, parts, _find(parts, context), context)


def principal(reasons: Sequence[str], context: Context) -> tuple[GuardFailure, tuple[str, ...]]:
    """Of the compiled versions that all failed, the reason that says most, and the others' guards.

    A version fails on the first guard that does not hold. One that was made for another value of
    something says nothing, if there is a version for this call's value as well.

    :param reasons: one a version, newest first, at least one.
    """
    read = [(_parts(reason, context), reason) for reason in reasons]
    found = [_find(parts, context) for parts, _ in read]
    best = min(range(len(found)), key=lambda i: (not found[i].novel, _rank(found[i].cause), i))
    others = tuple(parts.guard for i, (parts, _) in enumerate(read) if i != best)
    return _record(read[best][1], read[best][0], found[best], context), others


def _rank(cause: Cause) -> int:
    return _LEAST_TELLING.index(cause) + 1 if cause in _LEAST_TELLING else 0


def _parts(reason: str, context: Context) -> _Parts:
    version = _PREFIX.match(reason)
    body = _PREFIX.sub("", reason, count=1)
    body, _, stack = body.partition("\nUser stack trace:\n")
    guard = _by_name(re.split(r"\s+# ", body, maxsplit=1)[0].strip(), context)
    places = [(m["source"].strip(), m["file"], int(m["line"])) for m in _PLACE.finditer(body)]
    starts = [m.start() for m in _PLACE.finditer(body)] + [len(body)]
    own = ["0/1 specialization" in body[a:b] for a, b in itertools.pairwise(starts)]
    frames = [m for m in _STACK.finditer(stack) if "torch/_dynamo/" not in m["file"]]
    if frames:  # whole paths, unlike those of the comments
        last = frames[-1]
        places.insert(0, (last["source"].strip(), last["file"], int(last["line"])))
        own.insert(0, False)
    return _Parts(int(version[1]) if version else 0, guard, tuple(places), tuple(own))


def _by_name(guard: str, context: Context) -> str:
    """The guard with the model's inputs by name, where a decorator of ``forward`` takes them all."""
    names = tuple(context.inputs)
    # *args alone begin with the module, except those of Dynamo's own way into a decorated method
    first = 0 if context.parameters or "/_dynamo/" in context.file else 1

    def positional(match: re.Match[str]) -> str:
        position = int(match[1]) - first
        return names[position] if 0 <= position < len(names) else match[0]

    def keyword(match: re.Match[str]) -> str:
        return match[1] if match[1] in names else match[0]

    return re.sub(r"\bargs\[(\d+)\]", positional, re.sub(r"\bkwargs\['(\w+)'\]", keyword, guard))


def _find(parts: _Parts, context: Context) -> _Found:
    guard = parts.guard
    if (tensor := _TENSOR.match(guard)) is not None:
        return _of_tensor(tensor, parts, context)
    if guard.startswith("GLOBAL_STATE changed"):
        what = guard.partition(":")[2].strip()
        return _Found("GRAD_MODE" if "grad_mode" in what else "GLOBAL_STATE", what)
    if guard.startswith("BACKEND_MATCH"):
        return _Found("BACKEND", "backend", novel=False)
    if "Duplicate tensor" in guard or "aliasing" in guard.lower():
        return _Found("ALIASING", guard)
    if _SIZE.search(guard) or ".stride()[" in guard:
        return _of_size(guard, context)
    if guard.startswith(("___check_type_id(", "___check_obj_id(")):
        name = guard.partition("(")[2].partition(",")[0].strip()
        place = _place_of(name, context)
        cause: Cause = "OBJECT_TYPE" if "type_id" in guard else "OBJECT_IDENTITY"
        return _Found(place if place == "MODULE_ATTRIBUTE" else cause, name)
    return _of_value(guard, context)


def _of_tensor(match: re.Match[str], parts: _Parts, context: Context) -> _Found:
    name, what = match["name"], match["what"].strip()
    axis = None if match["axis"] is None else int(match["axis"])
    values = _EXPECTED.search(match["rest"].strip())
    expected = values["expected"] if values else ""
    actual = (values["actual"] or "") if values else ""
    argument = name if name in context.inputs else None
    if argument is None and not _INPUT.match(name) and what != "size":
        place = _place_of(name, context)
        if place in ("MODULE_ATTRIBUTE", "CLASS_ATTRIBUTE", "GLOBAL_VALUE", "CLOSURE_VALUE"):
            return _Found(place, name, f"{what} {expected}", actual)
    if what != "size" or axis is None or not (expected.isdigit() and actual.isdigit()):
        return _Found(_TENSOR_CAUSES.get(what, "OTHER"), name, expected, actual, argument, axis)
    guarded = f"{name}.size()[{axis}]"
    seen = [int(n) for n in context.seen.get((name, axis), ())]
    novel = not seen or int(actual) not in seen
    if actual in ("0", "1"):
        return _Found("ZERO_ONE", guarded, expected, actual, argument, axis, novel)
    if expected in ("0", "1"):  # a graph of that size's own, and no news where there are others
        novel = novel and max(seen, default=0) < 2
        return _Found("ZERO_ONE", guarded, expected, actual, argument, axis, novel)
    first = int(expected) == seen[0] if seen else parts.version == 0
    cause: Cause = "FIRST_SIZE" if first else "SIZE_SPECIALIZED"
    return _Found(cause, guarded, expected, actual, argument, axis, novel)


def _of_size(guard: str, context: Context) -> _Found:
    sizes = list(_SIZE.finditer(guard))
    if ".stride()[" in guard or not sizes:
        name = (sizes[0]["name"] if sizes else guard.partition(".stride")[0]).strip()
        return _Found("LAYOUT", name, guard, argument=name if name in context.inputs else None)
    name, axis = sizes[0]["name"], int(sizes[0]["axis"])
    argument = name if name in context.inputs else None
    shape = context.now.get(name)
    actual = shape[axis] if isinstance(shape, tuple) and axis < len(shape) else None
    shown = "" if actual is None else str(actual)
    novel = actual not in [int(n) for n in context.seen.get((name, axis), ())]
    if len({(m["name"], m["axis"]) for m in sizes}) > 1:
        return _Found("SIZES_RELATED", guard, guard, shown, argument, axis, novel)
    bounds = _RANGE.match(guard)
    if bounds is not None and bounds["low"] == "2" and (actual is None or actual < 2):
        return _Found("ZERO_ONE", sizes[0][0], guard, shown, argument, axis, novel)
    equals = _EQUALS.match(guard)
    if equals is not None and equals["value"].isdigit() and equals["name"] == sizes[0][0]:
        cause: Cause = "ZERO_ONE" if equals["value"] in "01" else "SIZE_SPECIALIZED"
        return _Found(cause, sizes[0][0], equals["value"], shown, argument, axis, novel)
    return _Found("SIZE_BRANCH", sizes[0][0], guard, shown, argument, axis, novel)


def _of_value(guard: str, context: Context) -> _Found:
    for name, spec in context.inputs.items():
        if isinstance(spec, ScalarSpec) and re.search(
            rf"(?<![\w.'\"\[]){re.escape(name)}(?![\w'\"])", guard
        ):
            kinds: dict[str, Cause] = {"int": "INTEGER_ARGUMENT", "float": "FLOAT_ARGUMENT"}
            value = context.now.get(name)
            novel = value not in context.seen.get(name, ())
            expected = m["value"] if (m := _EQUALS.match(guard)) and m["name"] == name else guard
            cause = kinds.get(spec.kind, "ARGUMENT_VALUE")
            return _Found(cause, name, expected, str(value), name, novel=novel)
    if "___stack" in guard:
        match = _EQUALS.match(guard)
        return _Found("BREAK_VALUE", match["name"] if match else guard, match["value"] if match else "")
    equals = _EQUALS.match(guard)
    guarded, expected = (equals["name"], equals["value"]) if equals else (guard, "")
    return _Found(_place_of(guarded, context), guarded, expected)


def _place_of(expression: str, context: Context) -> Cause:
    """What kind of thing the value of an expression belongs to."""
    if "type(" in expression:
        return "CLASS_ATTRIBUTE"
    if (of_global := re.search(r"G\['(\w+)'\]", expression)) is not None:
        held = isinstance(context.resolve(of_global[1]), type) and of_global[0] != expression
        return "CLASS_ATTRIBUTE" if held else "GLOBAL_VALUE"
    names = re.findall(r"(?<![\w.'\"])[A-Za-z_]\w*(?!\w*['\"(])", re.sub(r"^not ", "", expression))
    root = next((n for n in names if n not in ("not", "len", "dict", "hasattr")), "")
    if root in context.free:
        return "CLASS_ATTRIBUTE" if isinstance(context.resolve(root), type) else "CLOSURE_VALUE"
    if root in context.inputs or root == "":
        return "ARGUMENT_VALUE" if root else "OTHER"
    # a helper's first parameter is no module unless it is called so
    if root in ("self", "fn", "mod") or (context.inputs and context.parameters[:1] == (root,)):
        return "MODULE_ATTRIBUTE"
    return "ARGUMENT_VALUE" if root in context.parameters else "OTHER"


def _record(reason: str, parts: _Parts, found: _Found, context: Context) -> GuardFailure:
    source, file, line = _place(parts, found, context)
    words = _words(found, context) | {"where": f", used in {source!r}" if source else ""}
    sentence, fix, code = WORDS[found.cause]
    named = found.argument is not None
    return GuardFailure(
        text=reason,
        cause=found.cause,
        guarded=found.guarded,
        sentence=sentence.format_map(words),
        fix=fix.format_map(words),
        code=code.format_map(words) if code is not None and (named or "{axis}" not in code) else None,
        argument=found.argument,
        axis=found.axis,
        dim=words["dim"] or None,
        file=file,
        line=line,
        source=source,
    )


def _place(parts: _Parts, found: _Found, context: Context) -> tuple[str | None, str | None, int | None]:
    """Of the lines that the guard names, the user's own reason for it."""
    own = [p for p, framework in zip(parts.places, parts.framework, strict=True) if not framework]
    chosen = own if own and found.cause != "ZERO_ONE" else list(parts.places)
    if not chosen:
        return None, None, None
    source, file, line = chosen[0]
    whole = context.file if context.file.endswith(file) else file
    return source, whole, line


def _words(found: _Found, context: Context) -> dict[str, str]:
    spec = context.inputs.get(found.argument or "")
    label = ""
    if isinstance(spec, TensorSpec) and found.axis is not None and found.axis < len(spec.shape):
        size = spec.shape[found.axis]
        label = factor_and_dim(size)[1] if isinstance(size, str) else ""
    owner = found.argument or re.sub(r"\.size\(\)\[\d+\]$", "", found.guarded)
    axis = "" if found.axis is None else str(found.axis)
    inside = "" if found.argument or not context.parameters else f" of {context.function}()"
    return {
        "guarded": found.guarded,
        "owner": owner,
        "axis": axis,
        "dim": label,
        "size": f"size {label} (axis {axis} of {owner})" if label else f"axis {axis} of {owner}{inside}",
        "expected": found.expected,
        "actual": found.actual or "another",
    }
