"""``torchstone explain``, and rewritten programs through the public door and in a bundle."""

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from torch import nn

import torchstone
from torchstone import bundle
from torchstone import workload as workload_module
from torchstone.candidate import slug
from torchstone.cli import cli
from torchstone.policy import Policy
from torchstone.recipe import parse
from torchstone.records import Build, ReferenceErrors, Unsupported, VerdictEntry, Verified
from torchstone.report.progress import QuietProgress
from torchstone.run import Request, Run, execute

MODEL = """
import torch
from torch import nn

class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(256, 256), nn.Linear(256, 512)

    def forward(self, x):
        return self.outer(torch.relu(self.inner(x))).sum(-1)

def model():
    torch.manual_seed(0)
    return Head().eval()

def example():
    return {"x": torch.randn(8, 256)}
"""
WORKLOAD = """
[workload]
name = "head"
model = "head:model"
inputs = "head:example"
[dims]
B = "1..32"
[inputs.x]
shape = ["B", 256]
"""


@pytest.fixture
def workload(tmp_path: Path) -> Path:
    folder = tmp_path / "head"
    folder.mkdir()
    (folder / "head.py").write_text(MODEL)
    (folder / "torchstone.toml").write_text(WORKLOAD)
    return folder


@pytest.mark.slow
def test_explain_says_what_fires_and_where(workload: Path) -> None:
    done = CliRunner().invoke(cli, ["explain", str(workload)])
    assert done.exit_code == 0, done.output
    assert "sum_of_linear" in done.output
    assert "head.py:11" in done.output
    assert "Nothing is proved here" in done.output


@pytest.mark.slow
def test_explain_as_json_and_by_family(workload: Path) -> None:
    done = CliRunner().invoke(cli, ["explain", str(workload), "--families", "attention", "--json"])
    found = json.loads(done.stdout)
    assert found["recipe"] == "rewrite(attention)"
    assert found["rewrites"]["fired"] == []
    assert found["nodes"][0] > 0


def test_an_unknown_family_is_refused(workload: Path) -> None:
    done = CliRunner().invoke(cli, ["explain", str(workload), "--families", "magic"])
    assert done.exit_code != 0
    assert "magic" in str(done.exception)


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(64, 64), nn.Linear(64, 512)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(torch.relu(self.inner(x))).sum(-1)


LINE = Head.forward.__code__.co_firstlineno + 1


def head() -> nn.Module:
    torch.manual_seed(0)
    return Head().eval()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    recipes = (*RECIPES, "eager(program) + rewrite(attention)")
    workload = workload_module.from_objects(
        head, torch.randn(8, 64), dims={"B": "1..32"}, policy=Policy(), shapes={"x": ["B", 64]}
    )
    request = Request(
        workload=workload,
        recipes=tuple(map(parse, recipes)),
        home=tmp_path_factory.mktemp("home"),
        until="verify",
    )
    return execute(request, QuietProgress())


RECIPES = ("eager(program) + rewrite", "aotinductor + rewrite(pooling)", "inductor + rewrite(pooling)")


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_rewritten_program_is_proved_shipped_and_loaded(run: Run, recipe: str, tmp_path: Path) -> None:
    entry, build = (
        run.store.get(f"verdict/{recipe}", VerdictEntry),
        run.store.get(f"build/{recipe}", Build),
    )
    assert entry is not None
    assert build is not None
    assert isinstance(entry.verdict, Verified), entry.verdict
    assert build.rewrites is not None
    assert [f.rule for f in build.rewrites.fired] == ["sum_of_linear"]
    assert "rewritten.pt2" in build.files
    references = [e for e in run.store.entries if isinstance(e, ReferenceErrors)]
    contents = bundle.Contents(
        name="head",
        recipe=recipe,
        decision="PROMOTE",
        program=run.store.files / "program.pt2",
        artifact=run.store.files / slug(recipe),
        spec=run.store.header.workload,
        cases=tuple(r.case for r in references if r.problem is None),
        environment=run.store.header.environment,
        evidence=(),
        output_spec=None,
    )
    loaded = torchstone.load(bundle.write(contents, tmp_path / "bundle"))
    x, module = torch.randn(11, 64), head()
    torch.testing.assert_close(loaded(x), module(x), rtol=1e-5, atol=1e-4)


@pytest.mark.slow
def test_the_page_says_what_was_rewritten(run: Run) -> None:
    text = run.report().read_text()
    assert "What was rewritten" in text
    assert "sum_of_linear" in text
    assert f"test_explain.py:{LINE}" in text


@pytest.mark.slow
def test_where_no_rule_pays_there_is_no_candidate(run: Run) -> None:
    entry = run.store.get("verdict/eager(program) + rewrite(attention)", VerdictEntry)
    assert entry is not None
    assert isinstance(entry.verdict, Unsupported)
    assert entry.verdict.text == "no rewrite pays on this program"
