"""What ``torch.compile`` makes of a model: where its graph breaks, and what makes it compile again."""

from __future__ import annotations

from typing import Literal

from torchstone.records.base import Record

__all__ = [
    "Break",
    "BreakStudy",
    "Capturing",
    "Cause",
    "GuardFailure",
    "Limit",
    "Recompile",
    "RecompileStudy",
    "Stale",
    "StaleCause",
    "Storm",
    "Tried",
]

LimitKind = Literal["TRY", "GENERATOR", "COMPREHENSION", "LOOP"]


class Limit(Record, frozen=True, kw_only=True):
    """A construct around a break from which Dynamo cannot resume: its whole function runs eagerly."""

    kind: LimitKind
    """What it is; nested graph breaks have no effect inside any of them."""
    file: str
    """File of the construct."""
    line: int
    """Its line, 1-based."""
    text: str
    """Its source line."""
    edit: str
    """The edit that lifts it, seen to work."""


class Break(Record, frozen=True, kw_only=True):
    """One place in the user's code that no graph can cross."""

    file: str
    """The innermost file on the stack that is neither torch's nor the standard library's."""
    line: int
    """Its line, 1-based."""
    text: str
    """The source line."""
    function: str
    """The function that it is in."""
    kind: str
    """Which of the kinds that :mod:`torchstone.capture.compiled.breaktext` knows, or ``OTHER``."""
    reason: str
    """Why the graph ends here, in one plain sentence."""
    raw: str
    """Dynamo's own words: the kind of break, and what it met."""
    edit: str
    """The edit that removes it."""
    depth: int
    """The user's functions on the way from the module's ``forward`` (0) to the break."""
    path: tuple[str, ...]
    """Those functions, outermost first, as ``file:line in function``."""
    times: int
    """Graph breaks that it makes in the model as it is: one for each function on the way to it."""
    nested_times: int | None = None
    """The same with nested graph breaks; None where that was not tried."""
    outside_s: float | None = None
    """Median seconds a call between leaving a graph that this break ended and entering the next, or
    returning: guards, resumed functions, the statement itself, and what runs eagerly there. None where
    no graph was ended by it (it is in a function that runs eagerly as a whole)."""
    nested_outside_s: float | None = None
    """The same with nested graph breaks."""
    limits: tuple[Limit, ...] = ()
    """Constructs around it for which nested graph breaks have no effect."""


class Capturing(Record, frozen=True, kw_only=True):
    """One way to compile the model, on the example's inputs."""

    graphs: int
    """Graphs."""
    operations: int
    """Operations in all of them."""
    entered: int
    """Graphs entered in one call: one that several modules share counts as often as it runs."""
    breaks: int
    """Graph breaks, counted as Dynamo does: one place counts once for each function that it cuts."""
    eager_functions: tuple[str, ...] = ()
    """Functions that Dynamo gave up and that run eagerly, as ``file:line in function``."""
    capture_s: float
    """Seconds of the first call, cold, without what the backend took: Dynamo's own."""
    compile_s: float
    """Seconds that the backend took in the first call, with an empty cache."""
    steady_s: float
    """Median seconds a call, once compiled, interleaved with eager and the other way."""
    outside_s: float
    """Median seconds a call outside of all compiled graphs."""


class BreakStudy(Record, frozen=True, kw_only=True, tag="breaks"):
    """Every graph break of a model, what it costs, and whether nested graph breaks help."""

    backend: str
    """The backend of ``torch.compile`` that timed it."""
    breaks: tuple[Break, ...] = ()
    """Each place, in the order that Dynamo met them."""
    plain: Capturing | None = None
    """Compiled as it is; None where Dynamo cannot run the model."""
    nested: Capturing | None = None
    """Compiled with nested graph breaks; None where there is no break, or torch has no such option."""
    eager_s: float | None = None
    """Median seconds a call of the model in eager, of the same session; None where nothing was timed."""
    relative: float | None = None
    """Largest relative error (Frobenius) of an output, nested against as it is; 0: equal to the bit."""
    recipe: str
    """The better way, as a recipe: ``inductor(module)`` or ``inductor(module, nested)``."""
    why: str
    """Why that one, in one sentence."""
    refused: str | None = None
    """Why Dynamo cannot run this model at all, in plain words, where it cannot."""


Cause = Literal[
    "FIRST_SIZE",
    "ZERO_ONE",
    "SIZE_SPECIALIZED",
    "SIZE_BRANCH",
    "SIZES_RELATED",
    "RANK",
    "INTEGER_ARGUMENT",
    "FLOAT_ARGUMENT",
    "ARGUMENT_VALUE",
    "BREAK_VALUE",
    "DTYPE",
    "DEVICE",
    "LAYOUT",
    "ALIASING",
    "REQUIRES_GRAD",
    "GRAD_MODE",
    "GLOBAL_STATE",
    "GLOBAL_VALUE",
    "CLOSURE_VALUE",
    "MODULE_ATTRIBUTE",
    "CLASS_ATTRIBUTE",
    "OBJECT_TYPE",
    "OBJECT_IDENTITY",
    "BACKEND",
    "OTHER",
]
"""Why a guard failed; :data:`torchstone.capture.compiled.guardwords.WORDS` says each in plain words."""


class GuardFailure(Record, frozen=True, kw_only=True):
    """A guard that did not hold, understood."""

    text: str
    """Dynamo's whole text."""
    cause: Cause
    """The true cause."""
    guarded: str
    """What was guarded: ``x.size()[1]``, ``n``, ``G['Config'].scale``."""
    sentence: str
    """The cause in one plain sentence, with names and values."""
    fix: str
    """What to do about it, in one sentence."""
    code: str | None = None
    """The fix as a line of code, where it is one."""
    argument: str | None = None
    """The model's input, if it is one."""
    axis: int | None = None
    """Its axis, if the guard is on a size or stride."""
    dim: str | None = None
    """The workload's dim along that axis."""
    file: str | None = None
    """The user's file where the value is used, where the guard tells it."""
    line: int | None = None
    """Its line, 1-based."""
    source: str | None = None
    """The source line."""


class Recompile(Record, frozen=True, kw_only=True):
    """One time that Dynamo had to compile a function again."""

    call: int
    """Position of the call in the replay, 0-based."""
    function: str
    """The function compiled again, as ``file:line in function``."""
    failure: GuardFailure
    """The guard that failed: of the compiled versions, the one that says most."""
    others: tuple[str, ...] = ()
    """The first failed guard of each other version."""
    at_limit: bool = False
    """Whether torch's limit stopped it: nothing was compiled, and the call ran eagerly."""


class Storm(Record, frozen=True, kw_only=True):
    """Recompiles of one cause on one thing."""

    cause: Cause
    """The cause."""
    guarded: str
    """What was guarded."""
    count: int
    """How many times."""
    calls: tuple[int, ...]
    """At which calls, 0-based."""
    sentence: str
    """The cause in one plain sentence."""
    fix: str
    """What to do about it."""
    code: str | None = None
    """The fix as a line of code."""


class Tried(Record, frozen=True, kw_only=True):
    """A fix that was tried on the same replay."""

    name: str
    """``mark_dynamic``, ``mark_unbacked(min=1)``, ``dynamic=True``."""
    code: str
    """What the user would write."""
    graphs: int | None
    """Graphs that remain; None where it failed."""
    agrees: bool = False
    """Whether every output still agreed with eager's."""
    failed: str | None = None
    """Why it failed, in one line."""


StaleCause = Literal[
    "FLOAT_ARGUMENT",
    "BREAK_VALUE",
    "REGION_GLOBAL",
    "MODULE_ATTRIBUTE",
    "UNGUARDED_STATE",
    "COMPILER",
    "UNKNOWN",
]


class Stale(Record, frozen=True, kw_only=True, tag="stale"):
    """A compiled call that answered wrongly because something changed that no guard covers.

    The cause is found by experiment: each is the one change under which the same calls come out right.
    """

    call: int
    """Position of the first wrong call in the replay, 0-based."""
    relative: float | None
    """Largest relative error (Frobenius) of an output against eager; None: not finite, or not alike."""
    cause: StaleCause
    """The true cause."""
    what: tuple[str, ...] = ()
    """Names of what changed unseen."""
    sentence: str
    """The cause in one plain sentence."""
    fix: str
    """What to do about it."""
    code: str | None = None
    """The fix as a line of code."""
    evidence: tuple[str, ...]
    """Each experiment and how it came out."""


class RecompileStudy(Record, frozen=True, kw_only=True, tag="recompiles"):
    """How often ``torch.compile`` compiles over the recorded traffic, and why."""

    calls: int
    """Calls replayed."""
    graphs: int
    """Graphs compiled."""
    compiles: int
    """Times that Dynamo compiled a function, recompiles included."""
    recompiles: tuple[Recompile, ...] = ()
    """Each recompile, in order."""
    storms: tuple[Storm, ...] = ()
    """The same by cause and what was guarded, most frequent first."""
    limit: int
    """Torch's limit on versions of one function."""
    limited: tuple[str, ...] = ()
    """Functions that hit it, as ``file:line in function``."""
    eager_calls: tuple[int, ...] = ()
    """Calls in which a function that hit the limit ran eagerly, 0-based."""
    allowed: int | None = None
    """The policy's ``max_recompiles``."""
    exceeds: bool = False
    """Whether there are more graphs than the policy allows."""
    tried: tuple[Tried, ...] = ()
    """Fixes tried on the same replay."""
    refused: str | None = None
    """Why Dynamo cannot run this model at all, where it cannot."""
