"""The command line: help, exit codes, JSON, and errors that say what, where and what to do."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from torchstone import cli

COMMANDS = [name for name, _ in cli.COMMANDS]


def torchstone(*arguments: object, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "torchstone", *map(str, arguments)],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def call(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    """In this process, which saves starting one."""
    with pytest.raises(SystemExit) as stopped:
        cli.main([str(a) for a in arguments])
    out, err = capsys.readouterr()
    assert isinstance(stopped.value.code, int)
    return stopped.value.code, out, err


def workload(folder: Path, toml: str = "", python: str = "") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "torchstone.toml").write_text(
        textwrap.dedent(
            toml
            or """
            [workload]
            name = "tiny"
            model = "model:build"
            inputs = "model:inputs"
            recipes = ["eager"]
            [policy]
            bench_s = 2
            load_s = 0
            rounds = 5
            """
        )
    )
    (folder / "model.py").write_text(
        textwrap.dedent(
            python
            or """
            import torch

            def build():
                return torch.nn.Linear(4, 2).eval()

            def inputs():
                return torch.randn(3, 4)
            """
        )
    )
    return folder


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_an_example_and_json(
    capsys: pytest.CaptureFixture[str], command: str
) -> None:
    code, out, _ = call(capsys, command, "--help")
    assert code == 0
    assert "Example: torchstone " + command in out
    assert "--json" in out


def test_help_names_every_command_and_the_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys, "--help")
    assert code == 0
    assert all(name in out for name in COMMANDS)
    assert "Exit codes" in out


def test_help_and_import_load_no_torch() -> None:
    code = "import sys, torchstone; from torchstone import cli\ntry: cli.main(['--help'])\n"
    code += "except SystemExit: pass\nassert 'torch' not in sys.modules and 'rich' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)


@pytest.mark.parametrize(
    ("toml", "says"),
    [
        ("[workload]\nname = 'x'\nmodle = 'model:build'", "did you mean 'model'"),
        (
            "[workload]\nname='x'\nmodel='model:build'\ninputs='model:inputs'\n[dims]\nB='9..1'\n"
            "[inputs.input]\nshape=['B', 4]",
            "torchstone.toml:6",
        ),
        (
            "[workload]\nname='x'\nmodel='model:build'\ninputs='model:inputs'\n[inputs.input]\n"
            "shape=['C', 4]",
            "'C' is not declared",
        ),
        ("[workload]\nname='x'\nmodel='model:nothing'\ninputs='model:inputs'", "nothing"),
        (
            "[workload]\nname='x'\nmodel='model:build'\ninputs='model:inputs'\n[policy]\nrounds=1",
            "rounds",
        ),
        ("[workload\n", "torchstone.toml:"),
    ],
)
def test_a_bad_workload_is_exit_code_2_with_place_and_hint(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, toml: str, says: str
) -> None:
    folder = workload(tmp_path / "w", toml=toml)
    code, _, err = call(capsys, "run", folder, "--home", tmp_path / "home")
    assert code == 2
    assert says in err
    assert "torchstone.toml" in err or "model.py" in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("python", "says"),
    [
        (
            "import torch\ndef build():\n    raise ValueError('no weights')\n"
            "def inputs():\n    return torch.randn(3, 4)\n",
            ("model.py:3", "no weights"),
        ),
        (
            "import torch\ndef build():\n    return torch.nn.Linear(4, 2)\n"
            "def inputs():\n    return 'text'\n",
            ("str",),
        ),
    ],
)
def test_user_code_that_fails_is_told_at_its_line(
    tmp_path: Path, python: str, says: tuple[str, ...]
) -> None:
    done = torchstone("run", workload(tmp_path / "w", python=python), "--home", tmp_path / "home")
    assert done.returncode == 2
    for text in says:
        assert text in done.stderr
    assert "hint" in done.stderr
    assert "Traceback (most recent call last)" not in done.stderr


def test_errors_as_json(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, out, _ = call(capsys, "report", "none", "--json", "--home", tmp_path)
    assert code == 2
    assert json.loads(out)["hint"] == "torchstone ls shows the runs"
    code, _, err = call(capsys, "verify", tmp_path / "no-such", "--recipe", "eager")
    assert code == 2
    assert "no-such" in err
    code, _, err = call(capsys, "run", workload(tmp_path / "w"), "--recipe", "warp9")
    assert code == 2
    assert "not a step" in err


def test_doctor(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys, "doctor", "--json")
    facts = json.loads(out)
    assert code == 0
    assert "eager" in facts["present"]
    assert facts["environment"]["packages"]["torch"]
    code, out, _ = call(capsys, "doctor")
    assert "eager" in out


@pytest.mark.slow
def test_a_run_from_start_to_bundle(tmp_path: Path) -> None:
    folder, home = workload(tmp_path / "w"), tmp_path / "home"
    done = torchstone("run", folder, "--home", home, "--json", "--package", tmp_path / "bundle")
    assert done.returncode in (0, 1), done.stderr
    summary = json.loads(done.stdout)
    assert Path(summary["report"]).is_file()
    assert (tmp_path / "bundle" / "manifest.json").is_file()
    listed = json.loads(torchstone("ls", "--home", home, "--json").stdout)
    assert [line["state"] for line in listed] == [summary["decision"]["kind"]]
    again = torchstone("run", folder, "--home", home, "--json", "--resume")
    assert json.loads(again.stdout)["run"] == summary["run"]
    report = torchstone("report", "latest", "--home", home, "--html", tmp_path / "page.html")
    assert report.returncode == 0
    assert (tmp_path / "page.html").is_file()
    same = torchstone(
        "compare", "latest", "latest", "--ci", "--home", home, "--junit", tmp_path / "j.xml"
    )
    assert same.returncode == 0, same.stdout + same.stderr
    assert (tmp_path / "j.xml").read_text().startswith("<?xml")
    refused = torchstone("package", "latest", "--home", home, "--output", tmp_path / "bundle")
    assert refused.returncode == 2  # something is there already
    assert "already" in refused.stderr


@pytest.mark.slow
def test_verify_tells_right_from_wrong_and_absent(tmp_path: Path) -> None:
    folder = workload(
        tmp_path / "w",
        toml="""
        [workload]
        name = "tiny"
        model = "model:build"
        inputs = "model:inputs"
        [candidates]
        wrong = "model:wrong"
        """,
        python="""
        import torch

        def build():
            torch.manual_seed(0)
            return torch.nn.Linear(4, 2).eval()

        def inputs():
            return torch.randn(3, 4)

        def wrong(module):
            return lambda x: module(x) * 1.01
        """,
    )
    home = ("--home", tmp_path / "home")
    done = torchstone("verify", folder, "--recipe", "custom(wrong)", "--json", *home)
    assert done.returncode == 1, done.stderr
    (entry,) = json.loads(done.stdout)
    assert entry["verdict"]["type"] == "wrong"
    done = torchstone("verify", folder, "--recipe", "eager(program)", *home)
    assert done.returncode == 0, done.stdout + done.stderr
    done = torchstone("bench", folder, "--recipe", "custom(wrong)", "--json", *home)
    assert done.returncode == 1  # what is not right is not timed
    assert json.loads(done.stdout) == []
