"""The HTML page: well formed, self-contained, safe, complete, and never wider than its window."""

from __future__ import annotations

import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import report_samples as samples
from torchstone.report import format as fmt
from torchstone.report import html, words
from torchstone.report.collect import collect
from torchstone.report.html import markup, scale

VOID = ("meta",)
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Page(HTMLParser):
    """Checks nesting; gathers text, tags and attributes."""

    def __init__(self, source: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.headings: list[str] = []
        self.feed(source)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert len(dict(attrs)) == len(attrs), f"{tag} repeats an attribute"
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in ("h1", "h2", "h3"):
            self.headings.append(data)
        self.words.append(data)

    @property
    def text(self) -> str:
        return squeezed("".join(self.words))


def squeezed(text: str) -> str:
    return re.sub(r"\s", "", fmt.clean(text))


@pytest.fixture(scope="module", params=samples.RUNS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def page(name: str) -> Page:
    return Page(html.render(collect(*samples.RUNS[name]())))


def test_page_is_well_formed_and_the_same_each_time(name: str) -> None:
    source = html.render(collect(*samples.RUNS[name]()))
    Page(source)
    assert source == html.render(collect(*samples.RUNS[name]()))
    source.encode("utf-8")


def test_nothing_is_fetched_and_nothing_runs(name: str) -> None:
    source = html.render(collect(*samples.RUNS[name]()))
    for tag, attributes in Page(source).tags:
        assert tag not in ("script", "link", "img", "iframe", "object", "embed", "form", "a", "base")
        assert not [
            a for a in attributes if a in ("src", "href", "xlink:href", "style") or a.startswith("on")
        ]
    (style,) = re.findall(r"<style>(.*?)</style>", source, re.DOTALL)
    assert not re.search(r"url\(|@import|https?:", style)


def test_every_recipe_verdict_and_reason_is_there(name: str) -> None:
    report = collect(*samples.RUNS[name]())
    text = page(name).text
    for row in report.rows:
        assert squeezed(row.recipe) in text
        assert row.status.replace(" ", "") in text
        for command in row.reproduce:
            assert squeezed(command) in text
        if row.verdict is not None and row.status not in ("promoted", "baseline", "verified"):
            assert squeezed(words.reason(row.verdict.verdict)) in text
        for case in row.verdict.cases if row.verdict else ():
            assert squeezed(case.case) in text
    for reason in report.decision.reasons if report.decision else ():
        assert squeezed(reason.text) in text
        assert reason.code in text


def test_drawings_and_tables_are_named(name: str) -> None:
    tags = page(name).tags
    lanes = [attributes for tag, attributes in tags if tag == "svg" and attributes.get("role") == "img"]
    assert lanes
    assert all(attributes.get("aria-label") for attributes in lanes)
    assert sum(tag == "table" for tag, _ in tags) == sum(tag == "caption" for tag, _ in tags)
    assert sum(tag == "h1" for tag, _ in tags) == 1
    ids = {attributes["id"] for _, attributes in tags if "id" in attributes}
    assert all(a["aria-labelledby"] in ids for _, a in tags if "aria-labelledby" in a)


def test_no_figure_is_broken(name: str) -> None:
    source = html.render(collect(*samples.RUNS[name]()))
    assert not re.search(
        r"\b(nan|inf|None)\b", re.sub(r"<style>.*?</style>", "", source, flags=re.DOTALL)
    )


def test_figures_of_the_promoted_candidate_come_first() -> None:
    text = page("full").text
    top = text[: text.index("Theladder")]
    for part in (
        "Runopenvino,1.62xfasterthaneager",
        "102ms",
        "9.8e-07",
        "804MiB",
        "14.2s",
        "FASTEST",
        "584ms",
    ):
        assert part in top
    assert "1.58" in top
    assert "1.66" in top


def test_long_logs_are_cut_and_said_to_be() -> None:
    text = page("hostile").text
    assert "Log,last60of400lines" in text
    assert "line399" in text
    assert "line300" not in text


def test_page_stays_small() -> None:
    assert len(html.render(collect(*samples.full()))) < 300_000


@given(st.text(max_size=80))
def test_text_cannot_become_markup(text: str) -> None:
    made = Page(markup.element("p", text, title=text))
    assert [tag for tag, _ in made.tags] == ["p"]
    assert "".join(made.words) == fmt.clean(text)
    assert made.tags[0][1]["title"] == fmt.clean(text)


@given(st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=20))
def test_scales_hold_their_values_in_order(values: list[float]) -> None:
    made = scale.nice(values)
    places = [made.at(v) for v in sorted(values)]
    assert places == sorted(places)
    assert 0 <= places[0] <= places[-1] <= 100
    assert list(made.ticks) == sorted(set(made.ticks))
    assert all(made.low <= tick <= made.high for tick in made.ticks)


@given(st.lists(st.floats(0, 1e12), max_size=20))
def test_error_scale_always_shows_the_bound(shares: list[float]) -> None:
    made = scale.decades(shares)
    assert 1.0 in made.ticks
    assert 0 < made.at(1.0) < 100
    assert all(0 <= made.at(share) <= 100 for share in shares if share > 0)


REPORTING = """<script>
addEventListener("load", () => parent.postMessage(
  [innerWidth, document.documentElement.scrollWidth, document.body.innerText.length], "*"));
</script></body>"""
GATHERING = """<!doctype html><body><script>
addEventListener("message", (event) => {
  const line = document.createElement("p");
  line.textContent = "measured " + event.data.join(" ");
  document.body.append(line);
});
</script>"""


def never_scrolls_sideways(folder: Path, pages: dict[str, str]) -> None:
    """Lay pages out with everything unfolded, in frames of three widths, and measure them."""
    assert CHROMIUM is not None
    frames = []
    for name, source in pages.items():
        opened = source.replace("<details", "<details open").replace("open open", "open")
        (folder / f"{name}.html").write_text(opened.replace("</body>", REPORTING), encoding="utf-8")
        frames += [
            f'<iframe src="{name}.html" width="{w}" height="900"></iframe>' for w in (360, 390, 1280)
        ]
    outer = folder / "outer.html"
    outer.write_text(GATHERING + "".join(frames), encoding="utf-8")
    command = [
        CHROMIUM,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-quic",
        "--no-first-run",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        f"--user-data-dir={folder / 'profile'}",
        "--window-size=1400,900",
        "--virtual-time-budget=10000",
        "--dump-dom",
        outer.as_uri(),
    ]
    dom = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True).stdout
    measured = [tuple(map(int, m)) for m in re.findall(r"measured (\d+) (\d+) (\d+)", dom)]
    assert sorted(width for width, _, _ in measured) == [w for w in (360, 390, 1280) for _ in pages]
    for width, needed, letters in measured:
        assert needed <= width
        assert letters > 1000


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium, to lay the page out")
def test_page_never_scrolls_sideways(tmp_path: Path) -> None:
    runs = ("full", "hostile", "partial")
    never_scrolls_sideways(tmp_path, {r: html.render(collect(*samples.RUNS[r]())) for r in runs})
