"""Random spaces, and tables to search on a CPU."""

import zlib

from hypothesis import strategies as st

from torchstone.records.tuning import Config
from torchstone.tuner.replay import Row, Table
from torchstone.tuner.space import (
    Boolean,
    Choice,
    Constraint,
    Integer,
    Knob,
    Only,
    Permutation,
    PowerOfTwo,
    Space,
    key_of,
)

CHOICES = (
    ("nn", "tn", "nt"),
    (1, 2, 3, 5, 8),
    (0.25, 0.5, 2.0),
    (0, 1, 2),
    (1, "1", "True", 0),
    ((64, 64), (128, 32), (16, 16)),
    ((1,), (1, 2)),
    ("only",),
)


def with_default(values: tuple) -> st.SearchStrategy:
    return st.one_of(st.none(), st.sampled_from(values))


@st.composite
def plain_knobs(draw: st.DrawFn) -> Knob:
    kind = draw(st.integers(0, 4))
    if kind == 0:
        low, more = draw(st.integers(0, 4)), draw(st.integers(0, 4))
        return PowerOfTwo(2**low, 2 ** (low + more), draw(st.sampled_from([None, 2**low])))
    if kind == 1:
        low, step = draw(st.integers(-3, 3)), draw(st.integers(1, 3))
        knob = Integer(low, low + draw(st.integers(0, 6)), step=step)
        return Integer(knob.low, knob.high, draw(with_default(knob.values)), step)
    if kind == 2:
        return Boolean(draw(st.booleans()))
    if kind == 3:
        length = draw(st.integers(1, 4))
        return Permutation(length, draw(with_default(Permutation(length).values)))
    values = draw(st.sampled_from(CHOICES))
    return Choice(values, draw(with_default(values)))


def rare(config: Config) -> str | None:
    """Refuses about a third of configs, by their text."""
    return "by its text" if zlib.crc32(key_of(config).encode()) % 3 == 0 else None


@st.composite
def spaces(draw: st.DrawFn, constrained: bool | None = None, conditional: bool = True) -> Space:
    """A space of one to five knobs with at least one valid config."""
    knobs: dict[str, Knob] = {}
    for i in range(draw(st.integers(1, 5))):
        knob = draw(plain_knobs())
        if knobs and conditional and draw(st.booleans()):
            on = draw(st.sampled_from(sorted(knobs)))
            values = knobs[on].values
            among = draw(st.lists(st.sampled_from(values), min_size=1, max_size=len(values)))
            knob = Only(knob, on, tuple(among))
        knobs[f"k{i}"] = knob
    refusing = draw(st.booleans()) if constrained is None else constrained
    valid: tuple[Constraint, ...] = (rare,) if refusing else ()
    space = Space(knobs, valid=valid, derived={"length": lambda c: float(len(key_of(c)) - 8)})
    return space if space.all is None or space.all else Space(knobs)


def seconds_of(config: Config) -> float:
    """A kernel's time that somebody might believe: knobs depend on each other."""
    m, n, stages = int(config["M"]), int(config["N"]), int(config["stages"])
    time = 1e-4 * (1 + abs(m * n / 8192 - 1) / 8 + abs(stages - 3) / 3 + (m < n) / 2)
    return time * (0.8 if config["order"] == "column" and config["split"] else 1.0)


SPACE = Space(
    {
        "M": PowerOfTwo(16, 256, 16),
        "N": PowerOfTwo(16, 256, 16),
        "stages": Integer(1, 6),
        "order": Choice(("row", "column", "hilbert")),
        "split": Boolean(),
        "k": Only(PowerOfTwo(1, 8), "split", (True,)),
    },
    valid=(lambda c: int(c["M"]) * int(c["N"]) >= 512 or c["M"] == 16,),
)


class Fixed:
    """A proposer that always says the same."""

    def __init__(self, answer: str) -> None:
        self.answer = answer

    def propose(self, prompt: str) -> str:
        return self.answer


def table() -> Table:
    """All configs of :data:`SPACE`; what needs too much shared memory cannot be built."""
    knobs = {name: tuple(knob.values) for name, knob in SPACE.knobs.items()}
    rows = []
    for config in SPACE.all or ():
        values = tuple(config.values())
        if int(config["M"]) * int(config["stages"]) > 1024:
            rows.append(Row(values=values, status="invalid", compile_s=1.0, text="shared memory"))
        else:
            base = seconds_of(config) * (1 + int(config["k"]) / 100)
            rows.append(
                Row(values=values, seconds=tuple(base * f for f in (1.0, 1.01, 1.002)), compile_s=1.0)
            )
    return Table(
        kernel="sample",
        device="none",
        sizes={"n": 4096},
        knobs=knobs,
        rows=tuple(rows),
        default=SPACE.default(),
        floor_s=5e-5,
    )
