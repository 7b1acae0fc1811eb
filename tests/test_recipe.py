"""Recipes: the text form."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchstone import recipe
from torchstone.errors import RecipeError
from torchstone.recipe import (
    AOTInductor,
    Custom,
    Eager,
    Inductor,
    Numerics,
    OnnxRuntime,
    OpenVINO,
    Precision,
    Quantize,
    Recipe,
    parse,
)

booleans = st.booleans()
names = st.from_regex(r"[a-z_][a-z0-9_]{0,8}", fullmatch=True)
numerics = st.one_of(
    st.none(),
    st.builds(Precision, st.sampled_from(["bf16", "bf16_autocast", "fp16"])),
    st.builds(Quantize, st.sampled_from(["int8_dynamic", "int8_weight_only"])),
)
recipes = st.one_of(
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
