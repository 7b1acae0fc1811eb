"""The JSON schemas of what is reported, with every field's docstring as its description.

``python -m torchstone.report.schema > docs/report.schema.json`` writes the committed file, and so do
``inspection`` and ``tuning`` after the command, each to the file of its name.
"""

from __future__ import annotations

import ast
import inspect
import json
import sys
from types import ModuleType
from typing import Any

import msgspec

from torchstone.records import (
    Inspection,
    compiles,
    divergence,
    environment,
    evidence,
    inspection,
    inventory,
    rewrites,
    shapes,
    tuning,
    verdict,
    workload,
)
from torchstone.records.tuning import Tuning
from torchstone.report import collect

__all__ = ["KINDS", "schema", "text"]

_URI = "https://json-schema.org/draft/2020-12/schema"

KINDS: dict[str, type] = {"report": collect.Report, "inspection": Inspection, "tuning": Tuning}
"""What has a schema, by the name that the command takes."""

_MODULES = (
    workload,
    environment,
    verdict,
    evidence,
    divergence,
    collect,
    compiles,
    inventory,
    shapes,
    inspection,
    tuning,
    rewrites,
)


def schema(kind: str = "report") -> dict[str, Any]:
    """JSON schema (draft 2020-12) of one of :data:`KINDS`."""
    made = msgspec.json.schema(KINDS[kind], schema_hook=_anything)
    documents = {key: text for module in _MODULES for key, text in _docstrings(module).items()}
    for name, definition in made["$defs"].items():
        for field, described in definition.get("properties", {}).items():
            if (name, field) in documents:
                described["description"] = documents[name, field]
    return {"$schema": _URI, "title": f"Torchstone {kind}", **made}


def text(kind: str = "report") -> str:
    """The schema as the committed file holds it."""
    return json.dumps(schema(kind), indent=1, sort_keys=True) + "\n"


def _anything(kind: type) -> dict[str, Any]:
    if kind is object:
        return {"type": ["array", "boolean", "null", "number", "object", "string"]}
    raise NotImplementedError  # msgspec's schema_hook says so that a type is not its business


def _docstrings(module: ModuleType) -> dict[tuple[str, str], str]:
    """(class, field) -> the string under the field, white space folded."""
    found = {}
    tree = ast.parse(inspect.getsource(module))
    for cls in (node for node in tree.body if isinstance(node, ast.ClassDef)):
        for field, below in zip(cls.body, cls.body[1:], strict=False):
            if (
                isinstance(field, ast.AnnAssign)
                and isinstance(field.target, ast.Name)
                and isinstance(below, ast.Expr)
                and isinstance(below.value, ast.Constant)
            ):
                found[cls.name, field.target.id] = " ".join(str(below.value.value).split())
    return found


if __name__ == "__main__":
    sys.stdout.write(text(*sys.argv[1:]))
