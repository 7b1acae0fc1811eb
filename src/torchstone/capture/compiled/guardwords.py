"""The words for each cause of a recompile: a sentence, a fix, and the fix as code where it is code."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from torchstone.records import Cause

__all__ = ["WORDS", "Words"]


class Words(NamedTuple):
    """Templates; the names in braces are filled by :mod:`torchstone.capture.compiled.guards`."""

    sentence: str
    """The cause in one plain sentence."""
    fix: str
    """What to do about it."""
    code: str | None = None
    """The fix as a line of code."""


_MARK = "torch._dynamo.mark_dynamic({owner}, {axis})"
_UNBACKED = "torch._dynamo.decorators.mark_unbacked({owner}, {axis}, min=1)"
_BUFFER = "self.register_buffer('NAME', torch.tensor(value)); self.NAME.fill_(new)"
_TENSOR = "{guarded} = torch.tensor({guarded})"

WORDS: Mapping[Cause, Words] = MappingProxyType(
    {
        "FIRST_SIZE": Words(
            "The first compile takes every size as fixed: {size} was {expected}, is {actual} now, and "
            "is left open from here on.",
            "Say before the first call that the axis varies.",
            _MARK,
        ),
        "ZERO_ONE": Words(
            "Sizes 0 and 1 always get a graph of their own: {size} is {actual}, and this version holds "
            "for {expected}.",
            "Say that the axis has any size from 1 on; size 1 then needs no graph of its own.",
            _UNBACKED,
        ),
        "SIZE_SPECIALIZED": Words(
            "The code asks whether {size} is exactly {expected}, which so has a graph of its own, and "
            "{actual} needs another.",
            "Replace the comparison by code that holds for all sizes, or pad to a size that is not it.",
        ),
        "SIZE_BRANCH": Words(
            "The code branches on {size}: this version holds for {expected}, and it is {actual}.",
            "Give each branch a model of its own, or write code that holds for all sizes.",
        ),
        "SIZES_RELATED": Words(
            "This version was compiled for sizes with {guarded}, which these do not fulfil.",
            "State the relation with torch._check, so that one graph may rely on it.",
        ),
        "RANK": Words(
            "{owner} had {expected} axes and has {actual} now.",
            "Give the model one number of axes: unsqueeze before the call.",
        ),
        "INTEGER_ARGUMENT": Words(
            "The integer argument {guarded} is part of the code: it was {expected}, is {actual} now.",
            "Make it a tensor and compute with it, rather than looping, indexing or slicing by it; if "
            "its values are few, raise torch._dynamo.config.recompile_limit above their number.",
            _TENSOR,
        ),
        "FLOAT_ARGUMENT": Words(
            "The float argument {guarded} is part of the code: it was {expected}, is {actual} now.",
            "Pass it as a tensor.",
            _TENSOR,
        ),
        "ARGUMENT_VALUE": Words(
            "The argument {guarded} is part of the code: it was {expected}.",
            "Compile one function for each value, or pass it as a tensor.",
        ),
        "BREAK_VALUE": Words(
            "A Python number that came out of a graph break (.item(), int(), a comparison) is part of "
            "the code compiled after it: {guarded} was {expected}{where}.",
            "Keep the number a tensor: without .item() there is no break, and nothing to bake in.",
        ),
        "DTYPE": Words(
            "{owner} was {expected} and is {actual} now.",
            "Convert before the call, so that the model sees one dtype.",
        ),
        "DEVICE": Words(
            "{owner} was on device {expected} and is on {actual} now.",
            "Move the input before the call.",
        ),
        "LAYOUT": Words(
            "{owner} lies in memory otherwise than when it was compiled ({expected}).",
            "Make the input contiguous before the call.",
            "{owner} = {owner}.contiguous()",
        ),
        "ALIASING": Words(
            "Two arguments that were one tensor are two now, or the other way round ({guarded}).",
            "Clone one of the two, so that they are never one tensor.",
        ),
        "REQUIRES_GRAD": Words(
            "{owner} requires a gradient in one call and not in another.",
            "Detach the input before the call.",
            "{owner} = {owner}.detach()",
        ),
        "GRAD_MODE": Words(
            "It was compiled with gradients on and is called with them off, or the other way round.",
            "Warm up and serve under the same mode.",
            "with torch.inference_mode(): ...",
        ),
        "GLOBAL_STATE": Words(
            "A global setting of torch changed between calls: {guarded}.",
            "Set it once, before the first call.",
        ),
        "GLOBAL_VALUE": Words(
            "The global {guarded} is part of the code: it was {expected}, and changed.",
            "Pass it as a tensor argument.",
        ),
        "CLOSURE_VALUE": Words(
            "{guarded}, of an enclosing function, is part of the code: it was {expected}, and changed.",
            "Pass it as a tensor argument.",
        ),
        "MODULE_ATTRIBUTE": Words(
            "The module's attribute {guarded} is part of the code: it was {expected}, and changed.",
            "Keep it in a buffer and change the buffer's contents, which no guard looks at.",
            _BUFFER,
        ),
        "CLASS_ATTRIBUTE": Words(
            "The class attribute {guarded} is part of the code: it was {expected}, and changed.",
            "Leave the class as it is: keep the value in a buffer, or pass it as a tensor.",
            _BUFFER,
        ),
        "OBJECT_TYPE": Words("{guarded} is of another type now.", "Pass arguments of one type."),
        "OBJECT_IDENTITY": Words(
            "{guarded} is another object now, and the code was compiled for the one before.",
            "Make the object once and keep it.",
        ),
        "BACKEND": Words(
            "It was compiled by another backend before.",
            "Make the backend once: each new function object compiles afresh.",
        ),
        "OTHER": Words(
            "The guard {guarded} does not hold any more.",
            "Keep what is guarded the same, or mark the function with torch.compiler.disable.",
        ),
    }
)
"""The words of every cause."""
