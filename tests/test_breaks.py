"""Graph breaks: what each is called, that the edits said to help do, and nested breaks as a recipe."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

import break_models as models
from backends_samples import agree, sample
from torchstone.capture.compiled import breaktext
from torchstone.capture.compiled.breaks import study_breaks
from torchstone.compat import dynamo as doors
from torchstone.records import BreakStudy, Build, Unsupported
from torchstone.workload import Workload

FILE = str(models.__file__)
X = torch.rand(3, 4) + 1


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Dynamo's own
        yield


def study(module: nn.Module, **options: Any) -> BreakStudy:
    module = module.eval()
    made = Workload(name="w", model=lambda: module, inputs=lambda: (X,))
    return study_breaks(made, made.module(), **{"backend": "eager", "seconds": 0.0, **options})


def breaks_of(module: nn.Module) -> list[doors.BreakEvent]:
    doors.reset()
    with torch.no_grad(), doors.watch_breaks() as events:
        doors.compiled(module, doors.backend("eager"))(X)
    doors.reset()
    return events


# --- words ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("module", "kind", "line"),
    [
        (models.Prints, "PRINT", 'print("rows", x.shape[0])'),
        (models.Warns, "WARNING", 'warnings.warn("careful")'),
        (models.Logs, "LOGGING", 'logger.info("at work")'),
        (models.Item, "ITEM", "total = x.sum().item()"),
        (models.Int, "ITEM", "return x[: int(x[0, 0])] * 2"),
        (models.List, "TOLIST", "values = (x + 1).tolist()"),
        (models.Branches, "DATA_BRANCH", "if x.sum() > 0:"),
        (models.Masks, "DYNAMIC_SIZE", "return x[x > 0] * 2"),
        (models.NumpyRandom, "NUMPY_RANDOM", "np.random.rand()"),
        (models.Clock, "CLOCK", "time.time()"),
        (models.Opens, "BUILTIN", "open(__file__)"),
        (models.Disabled, "DISABLED", "return self.helper(x + 1) * 2"),
        (models.Recurrent, "RNN", "return self.rnn(x)[0] * 2"),
        (models.Asks, "ASKED_FOR", "torch._dynamo.graph_break()"),
    ],
)
def test_each_kind_is_told_from_dynamos_own_words(module: type[nn.Module], kind: str, line: str) -> None:
    event = breaks_of(module())[0]
    frame = [f for f in event.stack if f.filename == FILE][-1]
    told = breaktext.told(event.kind, event.text, str(frame.line))
    assert told.kind == kind
    assert line in str(frame.line)
    assert "{" not in told.reason
    assert told.edit
    assert told.raw


@pytest.mark.parametrize(
    ("module", "options"),
    [
        (models.Prints, {"reorderable_logging_functions": {print}}),
        (models.Warns, {"reorderable_logging_functions": {warnings.warn}}),
        (models.Logs, {"ignore_logging_functions": {models.logger.info}}),
        (models.Item, {"capture_scalar_outputs": True}),
        (models.Masks, {"capture_dynamic_output_shape_ops": True}),
        (models.Recurrent, {"allow_rnn": True}),
    ],
)
def test_an_option_that_is_said_to_help_does(module: type[nn.Module], options: dict[str, Any]) -> None:
    event = breaks_of(module())[0]
    told = breaktext.told(event.kind, event.text, "")
    assert all(f"torch._dynamo.config.{name}" in told.edit for name in options)
    with doors.config(**options):
        assert breaks_of(module()) == []


@pytest.mark.parametrize("module", [models.Computes, models.Conditional, models.Wraps])
def test_an_edit_that_is_said_to_help_does(module: type[nn.Module]) -> None:
    assert breaks_of(module()) == []


def test_an_unknown_kind_keeps_dynamos_explanation() -> None:
    text = (
        "Never seen\n  Explanation: It is new.\n  Hint: wait\n\n  Developer debug context: thing()\n\n"
    )
    told = breaktext.told("Never seen", text, "x = thing()")
    assert (told.kind, told.reason, told.raw) == ("OTHER", "It is new.", "Never seen: thing()")


# --- the study -----------------------------------------------------------------------------------


def test_a_break_two_calls_deep() -> None:
    found = study(models.Outer())
    (only,) = found.breaks
    assert (only.file, only.function, only.kind) == (FILE, "forward", "ASKED_FOR")
    assert only.text == "torch._dynamo.graph_break()"
    assert only.depth == 2
    assert [line.startswith(FILE) and line.endswith(" in forward") for line in only.path] == [True] * 3
    assert only.limits == ()
    assert only.outside_s is not None
    assert found.plain is not None
    assert (found.plain.graphs, found.plain.breaks, only.times) == (6, 3, 3)
    if not doors.has_nested_breaks():
        assert found.nested is None
        return
    assert found.nested is not None
    assert (found.nested.graphs, found.nested.breaks, only.nested_times) == (2, 1, 1)
    assert (found.plain.entered, found.nested.entered) == (6, 2)
    assert found.nested.operations == found.plain.operations
    assert found.relative == 0
    better = found.nested.steady_s <= found.plain.steady_s * 1.02
    assert found.recipe == ("inductor(module, nested)" if better else "inductor(module)")


def test_without_a_break_there_is_nothing_to_nest() -> None:
    found = study(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    assert (found.breaks, found.nested, found.recipe) == ((), None, "inductor(module)")
    assert found.plain is not None
    assert (found.plain.graphs, found.plain.entered, found.plain.eager_functions) == (1, 1, ())


def test_a_torch_without_nested_breaks_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doors, "has_nested_breaks", lambda: False)
    found = study(models.Asks())
    assert found.nested is None
    assert found.why == "This torch has no nested graph breaks."
    assert found.breaks[0].nested_times is None


def test_what_cannot_be_compiled_is_said_in_words() -> None:
    found = study(models.Fails())
    assert found.refused == "The model itself fails on its example inputs: RuntimeError: not today"
    assert (found.plain, found.recipe) == (None, "eager")
    found = study(models.Recurrent())
    assert found.refused == "Dynamo compiles nothing of this model: all of it runs eagerly."
    assert found.breaks[0].kind == "RNN"
    assert found.breaks[0].outside_s is None
    assert found.recipe == "eager"


def test_keyword_inputs_leave_the_way_to_the_break_as_it_is() -> None:
    module = models.Asks()
    made = Workload(name="w", model=lambda: module, inputs=lambda: {"x": X})
    found = study_breaks(made, made.module(), backend="eager", seconds=0.0)
    (only,) = found.breaks
    assert (only.depth, only.text) == (0, "torch._dynamo.graph_break()")
    assert msgspec.json.decode(msgspec.json.encode(found), type=BreakStudy) == found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("inside", "kind", "text", "edited"),
    [
        (models.Loops, "LOOP", "for block in self.blocks:", (models.Unrolled, models.Recursive)),
        (models.LoopsOverNumbers, "LOOP", "for i in range(len(self.blocks)):", ()),
        (models.Tries, "TRY", "try:", (models.TriesLess,)),
        pytest.param(
            models.Comprehends,
            "COMPREHENSION",
            "parts = [block(x)",
            (models.Listed,),
            marks=pytest.mark.skipif(sys.version_info >= (3, 12), reason="PEP 709: no frame of its own"),
        ),
        (models.Generates, "GENERATOR", "def parts(", (models.Returns,)),
    ],
)
def test_where_nesting_has_no_effect_and_the_edit_that_gives_it(
    inside: type[nn.Module], kind: str, text: str, edited: tuple[type[nn.Module], ...]
) -> None:
    found = study(inside())
    limit = found.breaks[0].limits[0]
    assert limit.kind == kind
    assert limit.text.startswith(text)
    assert found.plain is not None
    assert found.plain.eager_functions
    if not doors.has_nested_breaks():
        return
    assert found.nested is not None
    assert found.nested.entered == found.plain.entered
    assert found.recipe == "inductor(module)"
    for module in edited:
        better = study(module())
        assert [b.limits for b in better.breaks] == [()] * len(better.breaks)
        assert better.plain is not None
        assert better.nested is not None
        assert better.nested.entered < better.plain.entered
        assert better.relative == 0


@pytest.mark.slow
def test_the_recipe_compiles_nested(tmp_path: Path) -> None:
    made = sample(tmp_path, models.Outer(), (X,))
    with doors.nested_breaks(False):
        apart, first = made.build("inductor(module)")
        expected = first(X)
        doors.reset()
        nested, second = made.build("inductor(module, nested)")
        if not doors.has_nested_breaks():
            assert isinstance(nested, Unsupported)
            return
        assert isinstance(apart, Build)
        assert isinstance(nested, Build)
        assert (apart.recompiles, nested.recompiles) == (6, 2)
        agree(second(X), made.eager(X), 1e-6)
        agree(second(X), list(expected), 1e-6)
        doors.reset()
