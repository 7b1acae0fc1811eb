"""Recipes: the text form."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchstone import recipe
from torchstone.errors import RecipeError
from torchstone.recipe import (
    AOTInductor,
    CudaGraph,
    Custom,
    Eager,
    Inductor,
    Numerics,
    OnnxRuntime,
    OpenVINO,
    Precision,
    Quantize,
    Recipe,
    Rewrite,
    parse,
)

booleans = st.booleans()
graphs = st.one_of(st.none(), st.just(CudaGraph()))
names = st.from_regex(r"[a-z_][a-z0-9_]{0,8}", fullmatch=True)
numerics = st.one_of(
    st.none(),
    st.builds(Precision, st.sampled_from(["bf16", "bf16_autocast", "fp16"])),
    st.builds(Quantize, st.sampled_from(["int8_dynamic", "int8_weight_only"])),
)
families = st.sets(st.sampled_from(recipe.FAMILIES), min_size=1).map(
    lambda named: (
        "all" if named == {*recipe.FAMILIES} else ".".join(f for f in recipe.FAMILIES if f in named)
    )
)
rewrites = st.builds(Rewrite, st.one_of(st.just("all"), families))
recipes = st.one_of(
    st.builds(
        Recipe,
        st.sampled_from(
            [Inductor(), AOTInductor(freezing=True), OpenVINO(), OnnxRuntime(), recipe.fallback().engine]
        ),
        st.none(),
        rewrites,
    ),
    st.builds(Recipe, st.just(Inductor()), st.just(Quantize("pt2e_static")), rewrites),
    st.builds(
        Recipe,
        st.builds(Inductor, booleans, booleans),
        st.builds(Precision, st.sampled_from(["bf16x3", "bf16x6"])),
        st.one_of(st.none(), rewrites),
        graphs,
    ),
    st.builds(Recipe, st.just(Eager()), numerics, st.none(), graphs),
    st.builds(Recipe, st.builds(Inductor, booleans, booleans, booleans), numerics),
    st.builds(Recipe, st.builds(Inductor, booleans, booleans, st.just(True), booleans), numerics),
    st.builds(Recipe, st.builds(AOTInductor, booleans, booleans), numerics),
    st.builds(Recipe, st.just(Eager()), numerics),
    st.just(recipe.fallback()),
    st.builds(Recipe, st.builds(OpenVINO, st.sampled_from(["f32", "bf16", "f16", "auto"]))),
    st.builds(Recipe, st.builds(Custom, names)),
    st.just(Recipe(OnnxRuntime())),
    st.builds(
        Recipe,
        st.builds(AOTInductor, booleans, booleans),
        st.builds(Quantize, st.sampled_from(["pt2e_static", "pt2e_dynamic"])),
    ),
)


@given(recipes)
def test_the_text_form_round_trips(made: Recipe) -> None:
    assert parse(str(made)) == made
    assert str(parse(str(made))) == str(made)


def test_families_have_one_order() -> None:
    assert str(parse("inductor + rewrite(norms.pooling)")) == "inductor + rewrite(pooling.norms)"
    assert str(parse(f"inductor + rewrite({'.'.join(recipe.FAMILIES)})")) == "inductor + rewrite"


@given(recipes, st.data())
def test_space_and_order_do_not_matter(made: Recipe, data: st.DataObject) -> None:
    steps = data.draw(st.permutations(str(made).split(" + ")))
    assert parse("  +  ".join(f" {s} " for s in steps)) == made


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "not a step"),
        ("tensorrt", "not a step"),
        ("inductor(fast)", "unknown option 'fast'"),
        ("inductor(freezing, freezing)", "given twice"),
        ("inductor + eager", "2 engine"),
        ("precision(bf16)", "0 engine"),
        ("inductor + precision(bf16) + quantize(int8_dynamic)", "2 precision"),
        ("inductor + precision(fp7)", "precision"),
        ("openvino(fp8)", "openvino"),
        ("custom", "target"),
        ("onnxruntime + precision(bf16)", "takes no precision"),
        ("eager + quantize(pt2e_static)", "simulation"),
        ("inductor(module) + quantize(pt2e_static)", "captured program"),
        ("inductor(nested)", "no graph breaks to nest"),
        ("onnxruntime(x)", "unknown option 'x'"),
        ("eager(program) + precision(bf16)", "own precision"),
        ("eager + rewrite", "needs the captured program"),
        ("inductor(module) + rewrite", "needs the captured program"),
        ("inductor + rewrite + rewrite(norms)", "2 rewrite"),
        ("inductor + rewrite(magic)", "'magic' is no family"),
        ("inductor + rewrite + precision(bf16)", "leave out one"),
        ("openvino + cudagraph", "does not launch through torch"),
        ("inductor + cudagraph + cudagraph", "2 graph"),
        ("inductor + cudagraph(magic)", "cudagraph"),
        ("eager + precision(bf16x3)", "operators in the captured program"),
        ("inductor(module) + precision(bf16x6)", "operators in the captured program"),
    ],
)
def test_what_does_not_parse_says_why(text: str, says: str) -> None:
    with pytest.raises(RecipeError) as caught:
        parse(text)
    assert says in str(caught.value)


def test_default_recipes_start_with_the_baseline_and_are_canonical() -> None:
    made = recipe.default_recipes()
    assert made[0] == recipe.baseline()
    assert len(set(made)) == len(made)
    assert all(parse(str(r)) == r for r in made)


@pytest.mark.parametrize(
    ("text", "numerics"),
    [
        ("eager", Numerics.EXACT),
        ("eager(program)", Numerics.REASSOCIATES),
        ("inductor(freezing)", Numerics.REASSOCIATES),
        ("openvino", Numerics.REASSOCIATES),
        ("openvino(auto)", Numerics.LOSSY),
        ("aotinductor + precision(bf16)", Numerics.LOSSY),
        ("custom(mine)", Numerics.REASSOCIATES),
    ],
)
def test_the_numerics_class_follows_from_the_recipe(text: str, numerics: Numerics) -> None:
    assert parse(text).numerics is numerics
