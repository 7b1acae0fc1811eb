"""The top of the page: what the model is, what a call costs, and what is worth knowing."""

from __future__ import annotations

from collections.abc import Iterator

from torchstone.records import BreakStudy, Inspection, Inventory, RecompileStudy, ShapeContract
from torchstone.report import format as fmt
from torchstone.report import inspect_headline as headline
from torchstone.report import inspect_words as words
from torchstone.report.html.inspection.pieces import bullets
from torchstone.report.html.markup import Html, element

__all__ = ["section"]


def section(found: Inspection) -> Html:
    """The headline, figures and findings."""
    first, *rest = headline.summary(found)
    known = headline.headline(found)[1 + len(rest) :]
    tiles = [*_tiles(found)]
    title = first.removeprefix(f"{found.workload.name}: ")
    return element(
        "section",
        element("p", "inspection", class_="kicker"),
        element("h1", title[:1].upper() + title[1:]),
        *(element("p", f"{text[:1].upper()}{text[1:]}.", class_="lede") for text in rest),
        element("div", *tiles, class_="tiles") if tiles else "",
        bullets(f"{text[:1].upper()}{text[1:]}." for text in known),
        class_="verdict",
    )


def _tiles(found: Inspection) -> Iterator[Html]:
    if found.inventory is not None:
        yield from _inventory_tiles(found.inventory)
    if found.breaks is not None:
        yield _breaks_tile(found.breaks)
    if found.recompiles is not None:
        yield _recompiles_tile(found.recompiles)
    if found.contract is not None:
        yield _sizes_tile(found.contract)


def _tile(name: str, figure: str, *lines: str) -> Html:
    body = (element("p", line) for line in lines if line)
    return element("div", element("h2", name), element("p", figure, class_="big"), *body, class_="tile")


def _inventory_tiles(inventory: Inventory) -> Iterator[Html]:
    times = inventory.example
    yield _tile(
        "Eager call on the example",
        fmt.seconds(times.median_s),
        f"p90 {fmt.seconds(times.p90_s)}; the first: {fmt.seconds(inventory.first_call_s)}",
        "" if times.steady else "times were still falling",
    )
    bounds = inventory.roofline.example if inventory.roofline else None
    if bounds is not None:
        yield _tile(
            "Over its roofline time",
            fmt.maybe(fmt.ratio, bounds.eager_over_operations),
            f"operation by operation: {fmt.seconds(bounds.operations_s)}",
            f"fused: {fmt.seconds(bounds.fused_s)} ({fmt.maybe(fmt.ratio, bounds.eager_over_fused)})",
        )
    cost, rate = inventory.dollars_per_million, inventory.requests_per_s
    served = "" if rate is None else f"{fmt.rate(rate)} in one process, never idle"
    if cost is not None:
        yield _tile("A million requests", fmt.money(cost), served)
    elif inventory.mean_s is not None:
        yield _tile("Eager over the traffic, mean", fmt.seconds(inventory.mean_s), served)


def _breaks_tile(study: BreakStudy) -> Html:
    if study.refused is not None:
        return _tile("Graph breaks", fmt.DASH, study.refused)
    plain = study.plain
    graphs = "" if plain is None else f"{words.plural(plain.graphs, 'graph')} as it is"
    if study.nested is not None:
        graphs += f"{', ' if graphs else ''}{study.nested.graphs} with nested graph breaks"
    return _tile("Graph breaks", fmt.count(len(study.breaks)), graphs, f"recipe: {study.recipe}")


def _recompiles_tile(study: RecompileStudy) -> Html:
    if study.refused is not None:
        return _tile("Recompiles", fmt.DASH, study.refused)
    graphs = f"{words.plural(study.graphs, 'graph')} over {words.plural(study.calls, 'call')}"
    allowed = "" if study.allowed is None else f"the policy allows {study.allowed}"
    return _tile("Recompiles", fmt.count(len(study.recompiles)), graphs, allowed)


def _sizes_tile(contract: ShapeContract) -> Html:
    if contract.subject == "none":
        return _tile("Sizes that one graph holds for", "none", "no range could be captured")
    if contract.sound:
        return _tile("Sizes that one graph holds for", "all declared", _swept(contract))
    listed = words.clauses(contract)
    return _tile(
        "Sizes that one graph holds for",
        "not all",
        f"{words.plural(len(listed), 'condition')} beyond the declared ranges",
        _swept(contract),
    )


def _swept(contract: ShapeContract) -> str:
    return words.plural(len(contract.probes), "combination") + " tried" if contract.probes else ""
