"""Speed-up of what is promoted over eager and over the best installed peer, for each example.

Peers are what a user would reach for: ``torch.compile`` of the model (default mode), ONNX Runtime,
OpenVINO. All of them and the candidates are timed in one interleaved session, so every ratio is paired.

    python benchmarks/examples.py [EXAMPLE ...]
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import msgspec

from torchstone import recipe as recipes
from torchstone import run as run_module
from torchstone import settings
from torchstone import workload as workload_module
from torchstone.bench import stats
from torchstone.records import Comparison, Samples, VerdictEntry, Verified
from torchstone.report.progress import LiveProgress

ROOT = Path(__file__).parent.parent
EXAMPLES = ("minilm", "digits", "gpt", "tabular")
PEERS = ("inductor(module)", "onnxruntime", "openvino")
OURS = ("aotinductor", "inductor", "aotinductor(freezing) + quantize(pt2e_static)")


def main(names: list[str]) -> None:
    """Run the examples and print a line each."""
    lines = [line for name in names or EXAMPLES for line in measure(name)]
    print("\n".join(lines))


def measure(name: str) -> list[str]:
    """Run one example; its lines."""
    workload = workload_module.read(ROOT / "examples" / name)
    wanted = tuple(recipes.parse(text) for text in (*PEERS, *OURS))
    policy = msgspec.structs.replace(
        workload.policy, finalists=len(wanted) + 1, bench_s=60, load_s=0, search_s=900
    )
    request = run_module.Request(
        workload=dataclasses.replace(workload, policy=policy),
        recipes=wanted,
        home=settings.load().home,
    )
    run = run_module.execute(request, LiveProgress())
    assert run.decision is not None
    chosen = run.decision.recipe
    lines = [f"{name}: {run.decision.kind} {chosen}"]
    entries = run.store.entries
    final = [c for c in entries if isinstance(c, Comparison) and c.session.startswith("final/")]
    for c in sorted(final, key=lambda c: -c.ratio):
        role = "peer" if c.recipe in PEERS else "candidate"
        lines.append(f"  {role:<9} {c.recipe:<48} {text(c)} over eager, {c.relation}")
    for failed in (e for e in entries if isinstance(e, VerdictEntry)):
        if not isinstance(failed.verdict, Verified):
            kind = failed.verdict.__struct_config__.tag
            lines.append(f"  {kind}: {failed.recipe}: {getattr(failed.verdict, 'text', '')}"[:160])
    peers = [c for c in final if c.recipe in PEERS]
    best = max(peers, key=lambda c: c.ratio, default=None)
    session = [s for s in entries if isinstance(s, Samples) and final and s.session == final[0].session]
    if best is None:
        lines.append("  no peer is within the budget")
    elif best.recipe == chosen:
        lines.append(f"  the promoted one is the best peer, {best.recipe}")
    else:
        against = stats.compare_all(session, against=best.recipe)
        found = next(c for c in against if c.recipe == chosen)
        lines.append(f"  over the best peer, {best.recipe}: {text(found)}, {found.relation}")
    return lines


def text(c: Comparison) -> str:
    """A ratio with its interval."""
    return f"{c.ratio:.3f}x [{c.low:.3f}, {c.high:.3f}] (A/A noise {c.noise:.3f})"


if __name__ == "__main__":
    main(sys.argv[1:])
