"""The forms that other programs read: SARIF 2.1.0 for code scanning, JUnit XML for test reports."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from urllib.parse import quote
from xml.etree import ElementTree

from torchstone import __version__
from torchstone.records import CheckReport, FileCheck, Finding, Place

__all__ = ["junit", "proof", "sarif", "sentence"]

_SARIF = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
_HOME = "https://github.com/torchstone/torchstone"
_NOT_XML = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_WHO = {"pyrefly": "pyrefly", "symbolic": "symbolic execution"}


def sentence(finding: Finding) -> str:
    """What is wrong, in which module, of which entry, and who proved it; on one line."""
    where = f" (in {finding.path})" if finding.path else ""
    return f"{finding.message}{where} [{proof(finding)}]"


def proof(finding: Finding) -> str:
    """``proved by pyrefly and symbolic execution``."""
    if finding.kind == "could-not-run":
        return "could not be executed"
    return f"proved by {' and '.join(_WHO[prover] for prover in finding.proved_by)}"


def sarif(report: CheckReport) -> str:
    """The report as SARIF 2.1.0: one run, one result a finding; refuted ones are suppressed."""
    found = [(finding, False) for file in report.files for finding in file.findings]
    found += [(finding, True) for file in report.files for finding in file.refuted]
    rules = sorted({_rule(finding) for finding, _ in found})
    driver = {
        "name": "torchstone check",
        "version": __version__,
        "informationUri": _HOME,
        "rules": [_described(rule) for rule in rules],
    }
    run = {
        "tool": {"driver": driver},
        "columnKind": "unicodeCodePoints",
        "results": [_result(finding, rules, refuted=refuted) for finding, refuted in found],
    }
    return json.dumps({"$schema": _SARIF, "version": "2.1.0", "runs": [run]}, indent=2) + "\n"


def _rule(finding: Finding) -> str:
    return f"{finding.kind}/{finding.rule}" if finding.kind != "could-not-run" else finding.kind


def _described(rule: str) -> dict[str, Any]:
    kind, _, name = rule.partition("/")
    texts = {
        "shape": f"The sizes of tensors do not fit ({name}).",
        "type": f"A type error that is not about shapes ({name}).",
        "could-not-run": "A model could not be executed, so that its shapes are not known.",
    }
    return {"id": rule, "shortDescription": {"text": texts[kind]}}


def _result(finding: Finding, rules: list[str], *, refuted: bool) -> dict[str, Any]:
    rule = _rule(finding)
    result: dict[str, Any] = {
        "ruleId": rule,
        "ruleIndex": rules.index(rule),
        "level": "note" if finding.kind == "could-not-run" else "error",
        "message": {"text": sentence(finding)},
        "locations": [_location(finding.place)],
        "properties": {"provedBy": list(finding.proved_by)},
    }
    if refuted:
        why = "symbolic execution ran this line without a failure"
        result["suppressions"] = [{"kind": "external", "status": "accepted", "justification": why}]
    return result


def _location(place: Place) -> dict[str, Any]:
    region = {"startLine": place.line, "startColumn": place.column, "endLine": place.end_line}
    if place.end_column is not None and (
        place.end_line > place.line or place.end_column >= place.column
    ):
        region["endColumn"] = place.end_column
    uri = quote(Path(place.file).as_posix())
    artifact = {"uri": f"file://{uri}" if Path(place.file).is_absolute() else uri}
    return {"physicalLocation": {"artifactLocation": artifact, "region": region}}


def junit(report: CheckReport) -> str:
    """The report as JUnit XML: a suite a file, with a case for each entry and one for the code."""
    root = ElementTree.Element(
        "testsuites", {"name": "torchstone check", "time": f"{report.seconds:.3f}"}
    )
    for file in report.files:
        _suite(root, file)
    for count in ("tests", "failures", "errors", "skipped"):
        root.set(count, str(sum(int(suite.get(count, "0")) for suite in root)))
    ElementTree.indent(root)
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{ElementTree.tostring(root, encoding="unicode")}\n'


def _suite(root: ElementTree.Element, file: FileCheck) -> None:
    suite = ElementTree.SubElement(root, "testsuite", {"name": _clean(file.file)})
    names = [entry.name for entry in file.entries]
    cases = {name: _case(suite, file.file, name) for name in dict.fromkeys((*names, ""))}
    for finding in file.findings:
        case = cases.get(finding.entry or "", cases[""])
        kind = "skipped" if finding.kind == "could-not-run" else "failure"
        told = ElementTree.SubElement(case, kind, {"message": _clean(sentence(finding))})
        if kind == "failure":
            told.set("type", finding.rule)
            told.text = _clean(f"{finding.place.file}:{finding.place.line}: {finding.message}")
    for entry in file.entries:
        if entry.status == "not-run" and not len(cases[entry.name]):
            note = "; ".join(entry.notes) or "could not be executed"
            ElementTree.SubElement(cases[entry.name], "skipped", {"message": _clean(note)})
    tags = [[child.tag for child in case] for case in suite]
    suite.set("tests", str(len(tags)))
    suite.set("failures", str(sum("failure" in found for found in tags)))
    suite.set("errors", "0")
    suite.set("skipped", str(sum("skipped" in found and "failure" not in found for found in tags)))


def _case(suite: ElementTree.Element, file: str, entry: str) -> ElementTree.Element:
    attributes = {"classname": _clean(file), "name": _clean(entry or "as read"), "time": "0"}
    return ElementTree.SubElement(suite, "testcase", attributes)


def _clean(text: str) -> str:
    """Without the characters that XML 1.0 cannot hold."""
    return _NOT_XML.sub("\N{REPLACEMENT CHARACTER}", text)
