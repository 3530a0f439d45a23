"""The table ``docs/convolutions.md``: what each of PyG's convolutions gives when it is split over ranks.

Run as ``python -m tests.conv_table`` (``make table``). It makes the comparisons of
``tests/intercept/test_convolutions_exact.py`` anew; ``tests/test_conv_table.py`` says whether the
committed file still names every class, variant and verdict.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # as pytest does
sys.path.insert(0, str(Path(__file__).parent / "support"))

import torch
import torch_geometric
import torch_geometric.nn.conv as pyg_conv

from convolutions import CASES, ConvCase, sample_graph
from parity import TOLERANCE, case_build, one_rank, random_owner, split, whole, worst
from pool import Pool

PATH = Path(__file__).parents[1] / "docs" / "convolutions.md"
WORLDS = (2, 3)
EXACT, REFUSED, MISSING, DIFFERENT = "exact", "refused", "not installable here", "different"
ALIASES = {"ECConv": "NNConv", "PointConv": "PointNetConv"}


def cases_of(name: str) -> list[ConvCase]:
    """The registry's cases of one exported class; an alias is the class that it names."""
    return [case for case in CASES if ALIASES.get(case.name, case.name) == ALIASES.get(name, name)]


def expected_verdicts() -> dict[str, str]:
    """What the registry says of each class that PyG exports."""
    return {name: _said(cases_of(name)) for name in pyg_conv.__all__}


def _said(cases: list[ConvCase]) -> str:
    if any(case.build is not None for case in cases):
        return EXACT
    first = cases[0]
    return f"{REFUSED}: {first.refused}" if first.refused else f"{MISSING}: needs {first.needs}"


def error_of(case: ConvCase, ranks: Callable[..., list]) -> float:
    """The largest difference between split and whole, over all worlds, outputs, gradients and buffers."""
    data = sample_graph(seed=1, groups_of_four=case.needs_groups_of_four)
    data.x.requires_grad_()
    expected = (one_rank if case.random else whole)(case_build(case), data)
    found = [
        split(ranks, world, case_build(case), data, random_owner(data.num_nodes, world, seed=world))
        for world in WORLDS
    ]
    return max(worst(result, expected) for result in found)


def table(errors: dict[ConvCase, float]) -> str:
    """The page, from the largest difference of each built case."""
    rows, verdicts = [], Counter()
    for name in sorted(pyg_conv.__all__):
        cases, verdict, largest = cases_of(name), expected_verdicts()[name], ""
        built = [case for case in cases if case.build is not None]
        if built:
            wrong = [case for case in built if not errors[case] <= TOLERANCE]
            worst_case = max(built, key=lambda case: errors[case])
            largest = f"{errors[worst_case]:.0e}"
            if wrong:
                verdict = f"{DIFFERENT}: {', '.join(case.variant for case in wrong)}"
        verdicts[verdict.partition(":")[0]] += 1
        rows.append(f"| {name} | {tried(name)} | {verdict} | {largest} |")
    counts = [
        f"{verdicts[EXACT]} of {len(rows)} classes are exact",
        *([f"{verdicts[DIFFERENT]} are not"] if verdicts[DIFFERENT] else []),
        f"{verdicts[REFUSED]} do not train on one homogeneous graph",
        f"{verdicts[MISSING]} cannot be installed here",
    ]
    return "\n".join(
        [
            "# PyG's convolutions under Kagome",
            "",
            "Written by `make table`; do not edit.",
            "",
            f"{'; '.join(counts)}. {len(errors)} variants were run.",
            "",
            f"Each variant ran whole in plain PyG and split by Kagome over {' and '.join(map(str, WORLDS))} "
            "ranks (gloo, float64), unchanged, on a directed graph with self-loops, duplicate edges and "
            "isolated vertices. Exact: all outputs, buffers and gradients, that of the features included, "
            f"differ by less than {TOLERANCE:.0e} of the largest entry. Variants marked * draw random "
            "numbers and are compared with Kagome on one rank. "
            f"PyTorch {torch.__version__.partition('+')[0]}, PyG {torch_geometric.__version__}.",
            "",
            "| class | variants | verdict | largest difference |",
            "|---|---|---|---|",
            *rows,
            "",
        ]
    )


def tried(name: str) -> str:
    """The built variants of a class; * marks those that draw, an alias is named."""
    return ", ".join(
        f"{case.variant}{f' as {case.name}' if case.name != name else ''}{' *' if case.random else ''}"
        for case in cases_of(name)
        if case.build is not None
    )


def main() -> int:
    """Run every case and write the page."""
    torch.set_num_threads(1)
    pool, errors = Pool(), {}
    try:
        for case in CASES:
            if case.build is not None:
                errors[case] = error_of(case, pool.run)
                print(f"{errors[case]:8.1e}  {case.name}  {case.variant}", flush=True)
    finally:
        pool.close()
    PATH.write_text(table(errors), encoding="utf-8")
    wrong = [case for case, error in errors.items() if not error <= TOLERANCE]
    print(f"{PATH}: {len(errors)} variants, {len(wrong)} differ")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
