"""The parts of ``torchstone check``: grammar, sizes, inference, merging, formats, what goes wrong."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path
from xml.etree import ElementTree

import pytest

from torchstone.errors import EnvironmentLacksError, InputError, WorkloadError
from torchstone.records import (
    CheckReport,
    Dim,
    FileCheck,
    Finding,
    Place,
    Prover,
    SymbolicRun,
)
from torchstone.shapecheck import check, exchange, pyrefly
from torchstone.shapecheck.directive import TensorArgument, directives
from torchstone.shapecheck.merge import merge

FILES = {
    "named": """
        # torchstone: check Net(width=8), x=f32[B, S, 8], S=2..40
        import torch
        from torch import nn

        class Head(nn.Module):
            def __init__(self, width):
                super().__init__()
                self.out = nn.Linear(64, width)

            def forward(self, x):
                return self.out(x.flatten(1))

        class Net(nn.Module):
            def __init__(self, width):
                super().__init__()
                self.heads = nn.ModuleList([nn.Identity(), Head(width)])

            def forward(self, x):
                for head in self.heads:
                    x = head(x)
                return x
    """,
    "range_end": """
        # torchstone: check Net(), x=f32[B, 2, S], S=2..40
        from torch import nn

        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.conv = nn.Conv1d(2, 3, kernel_size=5)

            def forward(self, x):
                return self.conv(x)
    """,
    "divisible": """
        # torchstone: check Fold(), x=f32[B, S, 4]
        from torch import nn

        class Fold(nn.Module):
            def forward(self, x):
                return x.view(x.shape[0], x.shape[1] // 8, 8, 4)
    """,
    "guessed": """
        from torch import nn

        class Net(nn.Module):
            def __init__(self, width: int = 16):
                super().__init__()
                self.conv = nn.Conv2d(3, width, 3, padding=1)
                self.norm = nn.BatchNorm2d(32)

            def forward(self, x):
                return self.norm(self.conv(x))

        class Scorer(nn.Module):
            def __init__(self):
                super().__init__()
                self.conv = nn.Conv2d(3, 4, 1)
                self.fc = nn.Linear(4 * 20 * 30, 5)

            def forward(self, x):
                return self.fc(self.conv(x).flatten(1))
    """,
    "values": """
        # torchstone: check Net(), x=f32[B, 6], keep=bool[B]
        import torch
        from torch import nn

        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                rates = [r.item() for r in torch.linspace(0, 0.5, 3)]
                self.drop = nn.Dropout(rates[1])
                self.fc = nn.Linear(7, 2)

            def forward(self, x, keep):
                if self.drop.p > 0.1:
                    x = self.drop(x)
                while torch.isnan(x).any():
                    x = x.nan_to_num()
                return self.fc(x[keep])
    """,
    "annotated": """
        from __future__ import annotations
        from torch import nn

        class Net(nn.Module):
            def __init__(self, width: int = 24):
                super().__init__()
                self.width = width
                self.mix = nn.Linear(width, width)
                self.gate = nn.Linear(width, 2 * width)

            def forward(self, x: Float[Tensor, "b time width"], gain: Shaped[Tensor, "[b, time]"]):
                return self.mix(x) * gain.unsqueeze(-1) * self.gate(x)
    """,
    "typed": """
        import torch
        from torch import nn

        def never_called():
            a = torch.randn(2, 3)
            return a @ torch.randn(4, 5)
    """,
    "crash": """
        # torchstone: check build(), f32[B, 2]
        import os, signal
        def build():
            os.kill(os.getpid(), signal.SIGSEGV)
    """,
    "leave": "import os\nos._exit(3)\n",
    "no_module": "import no_such_package_here\n",
    "raises": """
        # torchstone: check Net(), f32[B, 2]
        from torch import nn
        class Net(nn.Module):
            def forward(self, x):
                return self.missing(x)
    """,
    "constructor": """
        # torchstone: check Net(), f32[B, S, 30]
        from torch import nn
        class Net(nn.Module):
            def __init__(self, heads=4):
                super().__init__()
                self.attention = nn.MultiheadAttention(30, heads)
            def forward(self, x):
                return self.attention(x, x, x)
    """,
    "nothing": "x = 1\n",
}


@pytest.fixture(scope="module")
def checked(tmp_path_factory: pytest.TempPathFactory) -> dict[str, FileCheck]:
    """All of FILES, and a package and a workload, checked at once."""
    folder = tmp_path_factory.mktemp("files")
    for name, text in FILES.items():
        (folder / f"{name}.py").write_text(textwrap.dedent(text))
    package = folder / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "layers.py").write_text("from torch import nn\n\nhead = nn.Linear(4, 4)\n")
    (package / "net.py").write_text(
        "from .layers import head\n\n"
        "def build():\n    return head\n\n"
        "def example():\n    import torch\n    return torch.randn(3, 5)\n"
    )
    workload = folder / "workload"
    workload.mkdir()
    (workload / "torchstone.toml").write_text(
        '[workload]\nmodel = "model:build"\ninputs = "model:inputs"\n'
        '[dims]\nB = "1..8"\n[inputs.input]\nshape = ["B", 6]\n'
    )
    (workload / "model.py").write_text(
        "import torch\n\ndef build():\n    return torch.nn.Linear(5, 2)\n\n"
        "def inputs():\n    return torch.randn(4, 6)\n"
    )
    files = [str(folder / f"{name}.py") for name in FILES]
    files += [str(package / "net.py"), str(workload)]
    report = check(files)
    return {Path(file.file).stem: file for file in report.files}


def only(file: FileCheck) -> Finding:
    (finding,) = file.findings
    return finding


def test_sizes_are_named_in_the_users_dims(checked: dict[str, FileCheck]) -> None:
    found = only(checked["named"])
    assert found.message == "linear: expected 64 as the input's last size, got 8*S"
    assert (found.place.line, found.path, found.proved_by) == (12, "heads.1.out", ("symbolic",))
    assert [o.shape for o in found.operands[:2]] == [("B", "8*S"), (8, 64)]
    assert found.entry == "Net(width=8)"


def test_both_ends_of_a_stated_range_must_run(checked: dict[str, FileCheck]) -> None:
    found = only(checked["range_end"])
    assert found.sizes["S"] == 2
    assert (found.rule, found.place.line) == ("conv1d", 11)


def test_an_unstated_dim_must_run_at_some_size_only(checked: dict[str, FileCheck]) -> None:
    assert checked["divisible"].findings == ()
    (entry,) = checked["divisible"].entries
    assert entry.status == "clean"
    assert "runs at S=32, not at S=37" in "".join(entry.notes).replace("B=5, ", "")


def test_guessed_inputs_prove_only_what_does_not_hang_on_them(checked: dict[str, FileCheck]) -> None:
    found = only(checked["guessed"])
    assert (found.place.line, found.entry, found.rule) == (11, "Net()", "batch_norm")
    statuses = {entry.name: entry.status for entry in checked["guessed"].entries}
    assert statuses == {"Net()": "failed", "Scorer()": "not-run"}  # 20 x 30 could not be guessed


def test_annotations_state_inputs(checked: dict[str, FileCheck]) -> None:
    found = only(checked["annotated"])
    assert found.message == "mul: 24 and 48 do not broadcast, in the dim 1 from the right"
    assert checked["annotated"].entries[0].dims == ("b", "time")


def test_values_that_no_fake_tensor_has(checked: dict[str, FileCheck]) -> None:
    found = only(checked["values"])
    assert found.message.startswith("linear: expected 7 as the input's last size, got 6")


def test_what_is_read_and_what_is_executed_are_told_apart(checked: dict[str, FileCheck]) -> None:
    found = only(checked["typed"])
    assert found.proved_by == ("pyrefly",)
    assert found.place.line == 7
    assert "conflicting extents 3 and 4" in found.message


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("crash", "SIGSEGV"),
        ("leave", "exited with code 3"),
        ("no_module", "no_such_package_here"),
        ("raises", "has no attribute 'missing'"),
    ],
)
def test_what_cannot_run_is_told_and_fails_nothing(
    checked: dict[str, FileCheck], name: str, says: str
) -> None:
    found = only(checked[name])
    assert found.kind == "could-not-run"
    assert says in found.message
    assert CheckReport(files=(checked[name],), checkers=("symbolic",), seconds=0.0).passed


def test_a_constructor_may_be_wrong_too(checked: dict[str, FileCheck]) -> None:
    found = only(checked["constructor"])
    assert (found.kind, found.place.line) == ("shape", 7)
    assert "embed_dim must be divisible by num_heads" in found.message


def test_packages_and_workloads(checked: dict[str, FileCheck]) -> None:
    assert only(checked["net"]).message == "linear: expected 4 as the input's last size, got 5"
    found = only(checked["model"])
    assert found.message == "linear: expected 5 as the input's last size, got 6"
    assert checked["model"].entries[0].how == "workload"


def test_a_file_without_a_model_says_so(checked: dict[str, FileCheck]) -> None:
    assert checked["nothing"].findings == ()
    assert "nothing to execute" in checked["nothing"].notes[0]


@pytest.mark.slow
def test_a_hang_is_ended_and_the_other_files_are_checked(tmp_path: Path) -> None:
    (tmp_path / "hang.py").write_text("while True:\n    pass\n")
    (tmp_path / "named.py").write_text(textwrap.dedent(FILES["named"]))
    hang, named = check(
        [str(tmp_path / "hang.py"), str(tmp_path / "named.py")], limit_s=4, lanes=1
    ).files
    assert "longer than 4 s" in only(hang).message
    assert only(named).rule == "linear"


def test_the_grammar_of_directives() -> None:
    one, two = directives(
        Path("m.py"),
        "x = '# torchstone: check No()'\n"
        "# torchstone: check Net(4, mode='a'), i64[B], x=f32[B, 3, 2*S + 1],\n"
        "#     steps=4, mask=None, S=2..8, B=16*k\n"
        "def f():\n    pass  # torchstone: check f, bool[T]\n",
    )
    assert (one.line, one.model, one.names) == (2, "Net(4, mode='a')", ("B", "S"))
    assert one.positional == (TensorArgument("int64", ("B",)),)
    assert one.keywords == {
        "x": TensorArgument("float32", ("B", "3", "2 * S + 1")),
        "steps": 4,
        "mask": None,
    }
    assert one.dims == (Dim(name="S", low=2, high=8), Dim(name="B", low=16, high=1024, multiple=16))
    assert (two.line, two.model, two.positional) == (5, "f", (TensorArgument("bool", ("T",)),))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "names no model"),
        ("Net(, x=f32[B]", "does not parse"),
        ("Net(), x=q32[B]", "'q32' is no dtype"),
        ("Net(), x=f32[B / 2]", "no size"),
        ("Net(), x=f32[-1]", "no size"),
        ("Net(), x=f32[B], B=9..2", "empty"),
        ("Net(), x=other", "neither a tensor"),
    ],
)
def test_a_bad_directive_is_refused_at_its_line(text: str, says: str) -> None:
    with pytest.raises(WorkloadError, match=says) as caught:
        directives(Path("m.py"), f"import torch\n# torchstone: check {text}\n")
    assert (caught.value.where, caught.value.line) == ("m.py", 2)
    assert caught.value.hint


def finding(line: int, *provers: Prover, rule: str = "linear", message: str = "m") -> Finding:
    return Finding(
        kind="shape",
        rule=rule,
        message=message,
        place=Place(file="m.py", line=line, end_line=line + 1),
        proved_by=provers,
    )


def test_one_bug_is_told_once_and_false_alarms_are_kept_apart() -> None:
    run = SymbolicRun(findings=(finding(5, "symbolic"),), executed=(9, 20), unreached=(16, 17))
    declared = "Returned type `Tensor[[2]]` is not assignable to declared return type `Tensor[[3]]`"
    read = [
        finding(6, "pyrefly"),
        finding(8, "pyrefly"),
        finding(12, "pyrefly"),
        finding(16, "pyrefly"),
        finding(20, "pyrefly", rule="bad-return", message=declared),
    ]
    merged = merge("m.py", read, run)
    found = {f.place.line: f.proved_by for f in merged.findings}
    assert found == {5: ("pyrefly", "symbolic"), 12: ("pyrefly",), 20: ("pyrefly",)}
    assert [f.place.line for f in merged.refuted] == [8]
    assert [f.place.line for f in merged.held] == [16]
    alone = merge("m.py", read, None)
    assert len(alone.findings) == 5
    assert alone.refuted == ()


def test_sarif_has_what_the_standard_requires(checked: dict[str, FileCheck]) -> None:
    report = CheckReport(files=tuple(checked.values()), checkers=("pyrefly", "symbolic"), seconds=1.0)
    answer = json.loads(exchange.sarif(report))
    assert answer["version"] == "2.1.0"
    (run,) = answer["runs"]
    driver = run["tool"]["driver"]
    assert driver["name"]
    rules = [rule["id"] for rule in driver["rules"]]
    assert len(rules) == len(set(rules))
    assert len(run["results"]) == sum(len(f.findings) + len(f.refuted) for f in checked.values())
    for result in run["results"]:
        assert rules[result["ruleIndex"]] == result["ruleId"]
        assert result["level"] in ("error", "note")
        assert result["message"]["text"]
        (location,) = result["locations"]
        region = location["physicalLocation"]["region"]
        assert 1 <= region["startLine"] <= region["endLine"]
        assert region["startColumn"] >= 1
        assert location["physicalLocation"]["artifactLocation"]["uri"].startswith("file:///")


def test_junit_has_a_case_for_each_entry(checked: dict[str, FileCheck]) -> None:
    report = CheckReport(files=tuple(checked.values()), checkers=("pyrefly", "symbolic"), seconds=1.0)
    root = ElementTree.fromstring(exchange.junit(report).partition("\n")[2])
    suites = {Path(suite.get("name", "")).stem: suite for suite in root}
    assert set(suites) == set(checked)
    assert [case.get("name") for case in suites["guessed"]] == ["Net()", "Scorer()", "as read"]
    assert [len(case.findall("failure")) for case in suites["guessed"]] == [1, 0, 0]
    assert suites["guessed"].get("skipped") == "1"
    assert int(root.get("failures", "0")) == len(list(root.iter("failure"))) > 0


@pytest.mark.parametrize(
    ("file", "text", "says"),
    [
        ("none.py", None, "no such file"),
        ("m.txt", "x", "no Python file"),
        ("m.py", "def f(:\n", "syntax"),
        ("m.py", "# torchstone: check\n", "names no model"),
        ("m.py", b"\xff\xfe\x00", "syntax|UTF-8|null"),
    ],
)
def test_bad_files_are_refused(tmp_path: Path, file: str, text: str | bytes | None, says: str) -> None:
    path = tmp_path / file
    if text is not None:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(InputError, match=says) as caught:
        check([str(path)])
    assert caught.value.where == str(path)


def test_without_pyrefly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "m.py"
    file.write_text("x = 1\n")
    monkeypatch.setattr(pyrefly.sysconfig, "get_path", lambda _: str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "not installed" in (pyrefly.absent() or "")
    with pytest.raises(EnvironmentLacksError) as caught:
        check([str(file)], checker="pyrefly")
    assert caught.value.exit_code == 3
    report = check([str(file)])
    assert report.checkers == ("symbolic",)
    assert "not installed" in report.notes[0]


def command(*arguments: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "torchstone", "check", *map(str, arguments)],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.slow
def test_the_command(tmp_path: Path) -> None:
    for name in ("named", "divisible", "typed"):
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(FILES[name]))
    done = command("named.py", "typed.py", cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    line = "named.py:12:16: linear: expected 64 as the input's last size, got 8*S"
    assert f"{line} [proved by symbolic execution]" in done.stdout
    assert "linear([B, 8*S], [8, 64], [8])" in done.stdout
    assert "typed.py:7:12: " in done.stdout
    assert "[proved by pyrefly]" in done.stdout
    assert "2 errors in 2 files" in done.stdout
    done = command("divisible.py", "--json", "--output", "out/report.json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "out/report.json").read_text())["checkers"] == ["pyrefly", "symbolic"]
    done = command("typed.py", "--checker", "symbolic", cwd=tmp_path)
    assert done.returncode == 0
    done = command("typed.py", "--checker", "pyrefly", "--format", "sarif", cwd=tmp_path)
    assert done.returncode == 1
    uri = json.loads(done.stdout)["runs"][0]["results"][0]["locations"][0]["physicalLocation"]
    assert uri["artifactLocation"]["uri"] == "typed.py"
    assert command("none.py", cwd=tmp_path).returncode == 2


def test_checking_loads_no_torch_in_the_main_process() -> None:
    code = "import sys, torchstone.shapecheck, torchstone.cli.check; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
