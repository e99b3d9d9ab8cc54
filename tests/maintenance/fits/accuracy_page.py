"""Write the tables of `notebooks/accuracy.md` that fits decide."""

import re
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import pandas as pd

from planner.core.catalog import PACKAGE_DIR
from planner.core.files import replace_atomically

ACCURACY_PAGE = PACKAGE_DIR.parent / "notebooks" / "accuracy.md"


def write_left_out(summary: Mapping[str, Mapping[str, Mapping[str, Mapping[str, float]]]]) -> None:
    """Write what `process_fit.summarize_left_out` found, a row for each engine and kind of new."""
    rows = [
        [engine, kind, *(cell for metric in ("tpot", "ttft") for cell in _format(errors[metric]))]
        for engine, by_kind in summary.items()
        for kind, errors in by_kind.items()
    ]
    _write_table("left out", ["engine", "left out", *_name_columns("runs")], rows)


def write_cohort(points: pd.DataFrame, groups: Sequence[str]) -> None:
    """Write errors of the pinned cohort, with a row for each group of ten points or more."""
    rows = []
    for by in groups:
        for group, chosen in points.groupby(by):
            if len(chosen) >= 10:
                metrics = (_measure(chosen, metric) for metric in ("TPOT", "TTFT"))
                rows.append([by, str(group), *(cell for each in metrics for cell in _format(each))])
    _write_table("cohort", ["by", "group", *_name_columns("points")], rows)


def _measure(points: pd.DataFrame, metric: str) -> dict[str, float]:
    known = points[points[f"{metric} error"].notna()]
    ends = [(each.lo, each.hi) for each in known[f"predicted {metric} (ms)"]]
    return {
        "runs": len(known),
        "median": float(known[f"{metric} error"].abs().median()),
        "inside": float(known[f"{metric} inside"].astype(float).mean()),
        "width": float(np.median([hi / lo for lo, hi in ends])) if ends else float("nan"),
    }


def _format(errors: Mapping[str, float]) -> list[str]:
    if not errors["runs"]:
        return ["0", "", "", ""]
    return [
        f"{errors['runs']:,}", f"{errors['median']:.1%}", f"{errors['inside']:.0%}",
        f"{errors['width']:.2f}",
    ]  # fmt: skip


def _name_columns(count: str) -> list[str]:
    return [
        f"{m}: {name}" for m in ("TPOT", "TTFT") for name in (count, "error", "inside", "width")
    ]


def _write_table(name: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    lines = [head, ["---"] * len(head), *rows]
    table = "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)
    text = ACCURACY_PAGE.read_text(encoding="utf-8")
    start = re.escape(f"<!-- {name} -->")
    text = re.sub(f"(?s)({start}\n).*?(<!-- end -->)", lambda m: f"{m[1]}\n{table}\n\n{m[2]}", text)
    with replace_atomically(ACCURACY_PAGE) as (part,):
        part.write_text(text, encoding="utf-8")
