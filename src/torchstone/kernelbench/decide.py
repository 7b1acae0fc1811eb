"""From findings and samples to what we would run. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torchstone.bench import stats
from torchstone.kernelbench.judge import Judged
from torchstone.kernelbench.ours import CONTRACTS
from torchstone.records import Comparison, Samples
from torchstone.records.kernelbench import BenchOurs, BenchProof

__all__ = ["CONTROL", "Verdict", "compare", "keep", "ours"]

CONTROL = "control"
"""Label of the baseline's second sample of each round: what tells the two apart is noise."""


@dataclass
class Verdict:
    """What the trials so far say of a column."""

    suite: list[bool] = field(default_factory=list)
    """Whether it passed each of the suite's trials."""
    relative: float | None = None
    """Largest relative error against float64."""
    against: dict[float, str] = field(default_factory=dict)
    """By contract, what first spoke against it."""
    by_eager: set[float] = field(default_factory=set)
    """Contracts kept on some trial only by being no worse than eager."""
    kept: set[float] = field(default_factory=set)
    """Contracts kept on some trial."""
    unsure: bool = False
    """Whether right and wrong could not be told apart on some trial."""

    def add(self, found: Judged) -> None:
        """One more trial."""
        if found.suite is not None:
            self.suite.append(found.suite)
        if found.relative is not None and found.findings:
            self.relative = max(self.relative or 0.0, found.relative)
        if found.broken:
            self.against = dict.fromkeys(CONTRACTS, found.broken) | self.against
        for contract, finding in found.findings.items():
            if finding.kept in ("bound", "eager"):
                self.kept.add(contract)
            if finding.kept == "eager":
                self.by_eager.add(contract)
            if finding.kept in ("unverifiable", "broken"):
                self.against.setdefault(contract, finding.text)
                self.unsure |= finding.kept == "unverifiable"

    @property
    def lost(self) -> bool:
        """Whether no contract is left."""
        return all(contract in self.against for contract in CONTRACTS)

    def proofs(self) -> tuple[BenchProof, ...]:
        """One a contract; none where nothing was judged."""
        if not (self.kept or self.against):
            return ()
        return tuple(
            BenchProof(
                contract=c,
                proved=c in self.kept and c not in self.against,
                by="" if c in self.against else "eager" if c in self.by_eager else "bound",
                text=self.against.get(c, ""),
            )
            for c in CONTRACTS
        )


def compare(
    session: Mapping[str, Sequence[float]], against: str, finalists: Sequence[str]
) -> tuple[dict[str, Comparison], float]:
    """Each finalist against the baseline, and the noise of the session.

    :param session: seconds by label, one a round; the baseline and :data:`CONTROL` are among the labels.
    :param against: the baseline.
    """
    samples = {name: _samples(name, seconds, against) for name, seconds in session.items()}
    noise = stats.noise_of(samples[against], samples[CONTROL])
    wanted = [name for name in dict.fromkeys(finalists) if name in samples and name != against]
    confidence = 1 - (1 - stats.CONFIDENCE) / max(1, len(wanted))
    found = {n: stats.compare(samples[n], samples[against], noise, confidence) for n in wanted}
    return found, noise


def ours(contract: float, name: str | None, found: Comparison | None) -> BenchOurs:
    """What to run under a contract.

    :param name: the candidate that won the race among those proved; None if there is none.
    :param found: its comparison with the baseline, if there is one.
    """
    if name is None:
        return keep(contract, "no candidate that is about as fast is proved under this contract")
    if found is None:
        return keep(contract, f"{name} could not be compared")
    if found.relation == "FASTER":
        return BenchOurs(
            contract=contract,
            choice=name,
            reason=f"{name} is proved and faster than {found.against}",
            ratio=found.ratio,
            low=found.low,
            high=found.high,
            relation=found.relation,
        )
    text = f"{name}, the fastest that is proved, is {found.relation} beside {found.against}"
    text = f"{text}: {found.ratio:.3f}x, {found.low:.3f} to {found.high:.3f}"
    return BenchOurs(contract=contract, choice=_KEEP, reason=text, relation=found.relation)


def keep(contract: float, reason: str) -> BenchOurs:
    """The baseline is kept."""
    return BenchOurs(contract=contract, choice=_KEEP, reason=reason)


_KEEP = "KEEP_BASELINE"


def _samples(name: str, seconds: Sequence[float], against: str) -> Samples:
    label = "baseline" if name == against else "baseline-again" if name == CONTROL else "candidate"
    return Samples(
        session="kernelbench",
        recipe=name,
        label=label,
        rounds=tuple((s,) for s in seconds),
        order=(0,) * len(seconds),
        sizes=({},),
        warmup=(),
        steady=True,
    )
