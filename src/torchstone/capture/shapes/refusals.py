"""torch's errors about shapes in plain words: which line, which dim, which bound, what to write.

An error of the tracer speaks of ``u0`` and ``L['x'].size()[0]``, ends in "This is a bug", or names no
line at all. Three things are put together here: its text, the stack and shape environment that it went
through, and, where the trace was watched (:func:`torchstone.compat.shapes.watch`), the guards recorded
on the way. The rules go by the text of the message, since torch raises most of these as
``RuntimeError``. Each is tested on errors that real models provoke (``tests/test_refusals.py``).
"""

from __future__ import annotations

import re

from torchstone.capture.shapes.refusalfacts import Facts, Make, listed
from torchstone.compat import shapes
from torchstone.compat.sizenames import Names, Place
from torchstone.records import (
    Axis,
    Refusal,
    RefusalCode,
    TensorSpec,
    WorkloadSpec,
    factor_and_dim,
)

__all__ = ["explain"]

_COMPARED = re.compile(r"^(?P<name>[A-Za-z_]\w*) (?P<sign>==|!=|<=|>=|<|>) (?P<number>\d+)$")


def explain(
    error: BaseException, spec: WorkloadSpec | None = None, seen: shapes.Watch | None = None
) -> Refusal:
    """Say what an error of export, Dynamo, Inductor's guards or an exported program means.

    :param error: as it was caught: its traceback and causes are read.
    :param spec: names inputs and dims.
    :param seen: guards recorded while tracing; finds the line where the error has none.
    :returns: always something: what no rule knows has the code ``RAISES`` or ``UNSUPPORTED``.
    """
    facts = Facts(error, Names(spec), seen or shapes.Watch())
    for link in shapes.cause_chain(error):
        if shapes.checked_by_user(link):
            return _check_failed(facts, link)
        text = f"{type(link).__name__}: {link}"
        for pattern, make in _RULES:
            match = re.search(pattern, text, re.MULTILINE)
            if match is not None:
                return make(facts, match)
    return _unknown(facts)


# --- conditions on what the trace does not know ---------------------------------------------------


def _could_not_guard(facts: Facts, match: re.Match[str]) -> Refusal:
    condition, axes = facts.plain(match["expression"])
    if axes:
        asking = "Inductor" if "Caused by: (_inductor/" in match.string else "the code"
        return _size_branch(facts, asking, condition, axes)
    if match["sized"] != "none" or not re.match(r"(Eq|Ne)\(\w+, 1\)$", match["expression"]):
        condition = re.sub(r"\bu\d+\b", "n", condition)
        text = f"the code asks whether {condition}, where only the values of a tensor tell the size n"
        fix = (
            "State what always holds with torch._check(...) right after the size arises, or keep it "
            "fixed: pad, and mask what is not there."
        )
        more = {"expression": condition, "code_to_write": f"torch._check({condition})"}
        return facts.refusal("OUTPUT_SIZE_BRANCH", text, fix, **more)
    return _value_branch(facts, match)


def _size_branch(facts: Facts, asking: str, condition: str, axes: tuple[Axis, ...]) -> Refusal:
    bound, options = _bound(condition, facts.names)
    text = (
        f"{asking} asks whether {condition}, and {listed(axes, facts.names)} is compiled as unknown "
        "(unbacked): one graph cannot go both ways"
    )
    fix = (
        "Rewrite the line without the question, or compile that dim backed (mark_dynamic), which guards."
    )
    if bound:
        fix = f"State {bound}, so that the answer is known; sizes outside get a graph of their own."
    axis = f"{axes[0].input}, {axes[0].axis}"
    code = f"torch._dynamo.mark_dynamic({axis})"
    if bound:
        code = f"torch._dynamo.decorators.mark_unbacked({axis}, {options})"
    return facts.refusal(
        "SIZE_BRANCH", text, fix, expression=condition, axes=axes, bound=bound, code_to_write=code
    )


def _bound(condition: str, names: Names) -> tuple[str | None, str]:
    """What to state so that a comparison with a number is decided, and as options of mark_unbacked."""
    match = _COMPARED.match(condition)
    if match is None:
        empty = re.match(r"([A-Za-z_]\w*(?:\*[A-Za-z_]\w*)+) (?:==|!=) 0$", condition)
        factors = empty[1].split("*") if empty else []
        return (" and ".join(f"{name} >= 1" for name in factors) or None), "min=1"
    name, sign, number = match["name"], match["sign"], int(match["number"])
    dim = names.dim(name)
    if sign in ("==", "!="):
        low = number + 1
        above = dim is None or dim.high >= low
        return (f"{name} >= {low}", f"min={low}") if number <= 1 and above else (None, "")
    edge = number if sign in (">", "<=") else number - 1  # the largest size on the lower side
    if dim is not None and dim.low > edge:
        return f"{name} >= {edge + 1}", f"min={edge + 1}"
    return f"{name} <= {edge}", f"max={edge}"


def _value_branch(facts: Facts, _: re.Match[str]) -> Refusal:
    text = "the code branches on a value in a tensor, which is not known before it runs"
    fix = (
        "Compute both sides and choose with torch.where, or give torch.cond both branches as functions."
    )
    code = "y = torch.where(condition, when_true, when_false)"
    return facts.refusal("VALUE_BRANCH", text, fix, code_to_write=code)


def _could_not_specialize(facts: Facts, match: re.Match[str]) -> Refusal:
    expression, axes = facts.plain(match["expression"])
    if axes:
        text = (
            f"the code needs {listed(axes, facts.names)} as a Python integer (range(), a list of that "
            "length, int()), but it is compiled as unknown (unbacked)"
        )
        fix = "Replace the loop by one tensor operation over that axis, or compile that dim backed."
        code = f"torch._dynamo.mark_dynamic({axes[0].input}, {axes[0].axis})"
        more = {"expression": expression, "axes": axes, "code_to_write": code}
        return facts.refusal("SIZE_AS_INTEGER", text, fix, **more)
    text = "the code uses a value in a tensor as a Python integer (range(), an index, a shape)"
    fix = (
        "Keep it a tensor: compare with torch.arange(limit) and mask. Where it has to be a number, take "
        "it as an argument of the model."
    )
    code = "keep = torch.arange(limit) < n"
    return facts.refusal("VALUE_AS_INTEGER", text, fix, expression=expression, code_to_write=code)


# --- ranges ---------------------------------------------------------------------------------------


def _constraints(facts: Facts, match: re.Match[str]) -> Refusal:
    """Export and ``mark_dynamic`` list every violation; the one that says most comes first."""
    text = match.string
    for pattern, make in _VIOLATIONS:
        found = re.search(pattern, text)
        if found is not None:
            return make(facts, found)
    return _unknown(facts)


def _not_all_values(facts: Facts, match: re.Match[str]) -> Refusal:
    guards = [m["guard"].rstrip(".") for m in re.finditer(_NOT_ALL, match.string)]
    said = [facts.plain(guard) for guard in guards]
    axes = said[0][1]
    condition = min((text for text, _ in said), key=len)
    fixes = re.findall(r"^  (\w+ = .+)$", match.string, re.MULTILINE)
    text = (
        f"the code only holds where {condition}, which not every declared size of "
        f"{listed(axes, facts.names)} fulfils"
    )
    fix = "Declare the range that holds, or change the line so that it holds for all."
    where = facts.where or facts.line_of(axes)
    more = {"expression": condition, "axes": axes, "where": where, "bound": condition}
    return facts.refusal("RANGE_NARROWED", text, fix, code_to_write="\n".join(fixes), **more)


def _specialized(facts: Facts, match: re.Match[str]) -> Refusal:
    name, size = match["name"], int(match["size"])
    stated = re.search(rf"\b{re.escape(name)} = (L\[.+?\.size\(\)\[\d+\])", match.string)
    axes = _axes_called(facts, stated[1] if stated else name)
    who = listed(axes, facts.names) or name
    fixed = facts.line_of(axes) if axes else None
    if size in (0, 1):
        text = f"{who} is {size} in the example, and torch takes a size of 0 or 1 for a constant"
        fix = f"Trace with an example in which {who} is 2 or more; verify {size} on its own."
        return facts.refusal("SIZE_FIXED", text, fix, axes=axes, expression=f"{who} == {size}")
    text = f"the code fixes {who} to {size}, the example's size"
    fix = (
        "Find what makes an int of the size: a layer or table of that width, range(size), int(size), "
        "item(), an equality with a fixed size. Or declare the dim as fixed."
    )
    more = {"axes": axes, "expression": f"{who} == {size}", "where": facts.where or fixed}
    return facts.refusal("SIZE_FIXED", text, fix, code_to_write=f"{name} = {size}", **more)


def _axes_called(facts: Facts, name: str) -> tuple[Axis, ...]:
    """Axes by torch's name of a size, or by the name of a dim."""
    axis = facts.names.axis(name)
    if axis is not None:
        return (axis,)
    inputs = () if facts.names.spec is None else facts.names.spec.inputs
    return tuple(
        Axis(input=given.name, axis=i, dim=size)
        for given in inputs
        if isinstance(given, TensorSpec)
        for i, size in enumerate(given.shape)
        if isinstance(size, str) and factor_and_dim(size)[1] == name.lstrip("_")
    )


def _tied(facts: Facts, match: re.Match[str]) -> Refusal:
    _, axes = facts.plain(f"{match['left']} == {match['right']}")
    a, b = (facts.names.called(axis) for axis in axes[:2]) if len(axes) > 1 else (match["a"], match["b"])
    text = f"the code needs {listed(axes, facts.names)} to be equal; they are declared apart"
    fix = f"Declare one dim for both, or make one of them 1 wide on purpose if {a} may differ from {b}."
    where = facts.where or facts.line_of(axes)
    more = {"expression": f"{a} == {b}", "axes": axes, "bound": f"{a} == {b}", "where": where}
    return facts.refusal("SIZES_TIED", text, fix, code_to_write=f"{b} = {a}", **more)


def _conflict(facts: Facts, match: re.Match[str]) -> Refusal:
    """Export compares ``Dim.AUTO`` and ``Dim.DYNAMIC`` with what it traced, naming paths."""
    parts = re.findall(r"\w+", match["path"])
    numbers, names = [int(p) for p in parts if p.isdigit()], [p for p in parts if not p.isdigit()]
    place = Place(names[0] if names else "", numbers[-1] if numbers else None, int(match["axis"]))
    axes = (facts.names.at(place),)
    who = listed(axes, facts.names)
    text = f"the range declared for {who} contradicts what the trace found: {match['said']}"
    fix = (
        "Trace at sizes of 2 or more, declare the range that holds, or change the line that narrows it."
    )
    return facts.refusal("RANGES_CONFLICT", text, fix, axes=axes, where=facts.line_of(axes))


# --- checks that a compiled function or a program makes as it is called ---------------------------


def _same_frame(facts: Facts, match: re.Match[str]) -> Refusal:
    """Not torch's bug: a call outside what unbacked sizes were declared or assumed to be."""
    reason, _, places = match["reason"].partition("  #")
    reason = reason.strip()
    ranged = re.match(r"(?P<low>-?\w+) <= (?P<size>\S+) <= (?P<high>\w+)$", reason)
    if ranged:
        name, axes = facts.plain(ranged["size"])
        foreign = [
            p for p in re.findall(r"\(([\w/]+\.py):\d+ in", places) if "variables/builder" not in p
        ]
        if foreign:
            return _narrowed_itself(facts, ranged, foreign[0])
        text = f"the call is outside the bounds stated for {name}: {ranged['low']}..{ranged['high']}"
        fix = f"Widen the bounds, or send such sizes to a graph of their own. {_NOT_A_BUG}"
        more = {"axes": axes, "bound": f"{name} in {ranged['low']}..{ranged['high']}", "where": None}
        return facts.refusal("SIZE_OUT_OF_BOUNDS", text, fix, expression=facts.plain(reason)[0], **more)
    fixed = re.search(
        r"tensor '(?P<name>.+?)' size mismatch at index (?P<axis>\d+)\. "
        r"expected (?P<size>\d+), actual (?P<found>\d+)",
        reason,
    )
    if fixed:
        return _silently_fixed(facts, fixed)
    condition, axes = facts.plain(reason)
    if "==" in condition and len(axes) > 1:
        return _assumed_equal(facts, condition, axes)
    text = f"the call does not fulfil what the graph was compiled for: {condition}"
    fix = f"State the condition as a bound, or compile the dim backed. {_NOT_A_BUG}"
    more = {"axes": axes, "expression": condition, "bound": condition}
    return facts.refusal("SIZE_OUT_OF_BOUNDS", text, fix, where=facts.line_of(axes), **more)


def _narrowed_itself(facts: Facts, ranged: re.Match[str], by: str) -> Refusal:
    """Of an unbacked size torch never learns that it is below 2: a decision for 1 shows as "up to 2"."""
    name, axes = facts.plain(ranged["size"])
    text = (
        f"while compiling, torch ({by}) took {name} in {ranged['low']}..{ranged['high']} for granted, "
        "though more was stated"
    )
    bound, options = (f"{name} >= 2", "min=2") if ranged["high"] == "2" else (None, "")
    fix = f"State {bound}, with a graph of its own for 1." if bound else "Compile that dim backed."
    fix += (
        " Do not run it again as it is: from a warm cache the same graph comes unchecked, and is wrong."
    )
    code = f"mark_unbacked({axes[0].input}, {axes[0].axis}, {options})" if bound and axes else ""
    more = {"axes": axes, "expression": facts.plain(ranged[0])[0], "bound": bound, "code_to_write": code}
    return facts.refusal("RANGE_NARROWED", text, fix, where=None, **more)


_CHECKED = "Declare the range in which it holds."
_NOT_A_BUG = "torch calls this a bug of its own; it is not."


def _silently_fixed(facts: Facts, match: re.Match[str]) -> Refusal:
    source = f"{_as_source(match['name'])}.size()[{match['axis']}]"
    axis = facts.names.axis(source) or Axis(input=match["name"], axis=int(match["axis"]))
    name, where = facts.names.called(axis), facts.line_of((axis,))
    text = (
        f"{listed((axis,), facts.names)} was marked unbacked, but the code fixes it to {match['size']} "
        f"without a word; {match['found']} cannot be answered"
    )
    fix = f"Declare {name} as fixed, or change what it is joined with so that it may vary. {_NOT_A_BUG}"
    code = f"mark_unbacked({axis.input}, {axis.axis}, strict=True)  # raises where the size is fixed"
    more = {"axes": (axis,), "expression": f"{name} == {match['size']}", "where": where}
    return facts.refusal("SIZE_FIXED", text, fix, code_to_write=code, **more)


def _as_source(name: str) -> str:
    """``args[0]`` of a guard's message as torch names it elsewhere."""
    root, bracket, rest = name.partition("[")
    return name if name.startswith("L[") else f"L['{root}']{bracket}{rest}"


def _assumed_equal(facts: Facts, condition: str, axes: tuple[Axis, ...]) -> Refusal:
    where = facts.line_of(axes)
    text = (
        f"{listed(axes, facts.names)} are unknown (unbacked) to the compiler, which took {condition} "
        "for granted; this call has others, and a size of 1 is not broadcast"
    )
    fix = (
        "If they are always equal, give them one shape_id; if one may be 1, leave that axis unmarked in "
        f"such calls, or expand it before; else they break a check of the code. {_NOT_A_BUG}"
    )
    marks = (f"mark_unbacked({a.input}, {a.axis}, shape_id={(axes[0].dim or 'n')!r})" for a in axes)
    more = {"axes": axes, "expression": condition, "bound": condition, "where": where}
    return facts.refusal("SIZES_ASSUMED_EQUAL", text, fix, code_to_write="\n".join(marks), **more)


def _condition(code: RefusalCode, said: str, fix: str) -> Make:
    """What says that one condition does not hold."""

    def make(facts: Facts, match: re.Match[str]) -> Refusal:
        condition, axes = facts.plain(match["expression"].strip())
        where = facts.traced or facts.line_of(axes) or facts.where
        more = {"expression": condition, "axes": axes, "bound": condition, "where": where}
        return facts.refusal(code, f"{said} {condition}", fix, **more)

    return make


def _program_input(facts: Facts, match: re.Match[str]) -> Refusal:
    text = f"the program does not take this input: {' '.join(match[0].split())}"
    fix = "Give what it was exported for, or export anew with that dim dynamic."
    return facts.refusal("PROGRAM_REFUSES", text, fix, where=None)


def _check_failed(facts: Facts, error: BaseException) -> Refusal:
    said = " ".join(str(error).split()).partition("(Could this error message")[0].strip()
    text = f"a check of the code fails for these sizes: {facts.plain(said)[0] or 'an assert'}"
    return facts.refusal("CHECK_FAILED", text, _CHECKED)


# --- what cannot be traced ------------------------------------------------------------------------


def _shapes(facts: Facts, match: re.Match[str]) -> Refusal:
    said, axes = facts.plain(" ".join(match[0].split()))
    text = f"the shapes do not go together: {said}"
    fix = "Correct the shapes on this line; it fails in eager, too, for such sizes."
    return facts.refusal("SHAPES_DISAGREE", text, fix, axes=axes)


def _no_fake_kernel(facts: Facts, match: re.Match[str]) -> Refusal:
    name = match["name"] if "::" in match["name"] else match["name"].replace(".", "::", 1)
    text = f"operation {name} does not say which shape its result has (it has no fake kernel)"
    fix = "Register one: a function that makes an empty tensor of the right shape and dtype."
    code = f'@torch.library.register_fake("{name}")\ndef _(x):\n    return torch.empty_like(x)'
    return facts.refusal("NO_FAKE_KERNEL", text, fix, code_to_write=code)


def _dynamic_output(facts: Facts, match: re.Match[str]) -> Refusal:
    text = f"the size of what {match['name']} gives depends on values"
    fix = (
        "Use a form of fixed size: torch.where, torch.nonzero_static, or a mask; or trace it by Dynamo."
    )
    code = "torch._dynamo.config.capture_dynamic_output_shape_ops = True"
    return facts.refusal("OUTPUT_SIZE_UNKNOWN", text, fix, code_to_write=code)


def _item(facts: Facts, match: re.Match[str]) -> Refusal:
    text = (
        f"the code takes a value out of a tensor while it is traced ({match['name']}: item(), int(), if)"
    )
    fix = "Keep it a tensor, or have Dynamo take such values as unknown numbers."
    code = "torch._dynamo.config.capture_scalar_outputs = True"
    return facts.refusal("VALUE_AS_INTEGER", text, fix, code_to_write=code)


def _leaves_torch(facts: Facts, match: re.Match[str]) -> Refusal:
    text = f"the code leaves torch: {' '.join(match[0].split())}"
    fix = "Do it with torch operations, or outside of the model."
    return facts.refusal("LEAVES_TORCH", text, fix)


def _recompile_limit(facts: Facts, _: re.Match[str]) -> Refusal:
    text = "it was compiled more often than torch allows for one function"
    fix = "Mark the dims that vary; see what varies with TORCH_LOGS=recompiles."
    return facts.refusal("RECOMPILE_LIMIT", text, fix)


def _unknown(facts: Facts) -> Refusal:
    unsupported = next(
        (e for e in shapes.cause_chain(facts.error) if type(e).__name__ in ("Unsupported", "UserError")),
        None,
    )
    if unsupported is None:
        return facts.refusal("RAISES", f"the code raises as it is traced: {facts.raw}", "")
    hints = re.findall(r"^\s*Hint: (.+)$", str(unsupported), re.MULTILINE)
    text = f"Dynamo cannot trace this: {facts.raw.partition(': ')[2]}"
    return facts.refusal("UNSUPPORTED", text, hints[0].strip() if hints else "")


# --- the rules, most telling first ----------------------------------------------------------------

_UNKNOWN = r" data-dependent expression (?P<expression>.+?) \(unhinted: .+?\)\."
_NOT_ALL = r"Not all values of .+ satisfy the generated guard (?P<guard>.+)"
_VIOLATIONS: tuple[tuple[str, Make], ...] = (
    (r"values of (?P<a>\S+) = (?P<left>\S+) and (?P<b>\S+) = (?P<right>\S+) must always be", _tied),
    (
        r"You marked (?P<name>.+?) as dynamic but your code specialized it to be a constant "
        r"\((?P<size>\d+)\)",
        _specialized,
    ),
    (_NOT_ALL, _not_all_values),
)
_DISAGREE = (
    r"The size of tensor a .+ must match the size of tensor b .+",
    r"Attempting to broadcast a dimension of length .+",
    r"[^:\n]+ must have same reduction dim, but got [^']+",
    r"mat1 and mat2 shapes cannot be multiplied .+",
    r"shape '.+' is invalid for input of size .+",
    r"Sizes of tensors must match except in dimension .+",
    r"The expanded size of the tensor .+ must match the existing size .+",
    r"Given .+, expected input.+",
    r"stack expects each tensor to be equal size.+",
    r"split_with_sizes expects .+",
    r"[^:\n]+ does not broadcast with previously seen size .+",
    r"[^:\n]+ don't multiply up to the size of dim .+",
    r"\w+ should contain \d+ elements not \d+",
    r"\S+ must be equal to input_size.+",
    r"[^:\n]*out of range .+(?:size|range of).+",
    r"Expected [^']+[ ,]but got.+",
)
_RULES: tuple[tuple[str, Make], ...] = (
    (r"Could not guard on" + _UNKNOWN + r"\s+\(Size-like symbols: (?P<sized>.+?)\)", _could_not_guard),
    (r"Could not extract specialized integer from" + _UNKNOWN, _could_not_specialize),
    (r"Constraints violated", _constraints),
    (
        r"(?P<said>inferred a static shape of \d+|0/1 specialized due to hint of \d|"
        r"inferred min/max range of \[.+?\]).+?inputs(?P<path>.*?)\.shape\[(?P<axis>\d+)\]",
        _conflict,
    ),
    (r"Guard failed on the same frame.*?Guard fail reason: \d+/\d+: (?P<reason>.+)", _same_frame),
    (
        r"Guard failed: (?P<expression>.+)",
        _condition("PROGRAM_REFUSES", "the program only holds where", "Send such sizes elsewhere."),
    ),
    (
        r"Runtime assertion failed for expression (?P<expression>.+) on node",
        _condition("CHECK_FAILED", "the code checks or relies on", _CHECKED),
    ),
    (r"Expected input (?:at )?\S+.* to be .+", _program_input),
    (
        r"Assertion failed on symbolic shapes[\s\S]+?debug context: (?P<expression>.+)",
        _condition("CHECK_FAILED", "an assert of the code needs", _CHECKED),
    ),
    (r"Data-dependent branching", _value_branch),
    (r"no fake impl registered for (?:<CustomOpDef\()?(?P<name>[\w:]+)", _no_fake_kernel),
    (r"^UnsupportedOperatorException: (?P<name>[\w.]+?)(?:\.default)?$", _no_fake_kernel),
    (r"unsupported operator: (?P<name>[\w.]+?)(?:\.default)?$", _no_fake_kernel),
    (r"^DynamicOutputShapeException: (?P<name>.+)", _dynamic_output),
    (r"^DataDependentOutputException: (?P<name>.+)", _item),
    (r"\.numpy\(\) is not supported|[Cc]an't call numpy\(\)|Trying to convert .+ numpy", _leaves_torch),
    (r"recompile limit exceeded|recompile_limit", _recompile_limit),
    ("|".join(_DISAGREE), _shapes),
)
"""What a message looks like, with the error's type before it, and what to make of it."""
