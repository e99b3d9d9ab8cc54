"""Predict the pinned cohort of measured runs without their own curves: `catalogs/validation/cohort.csv`.

The residual process forgets a run's curve, and the run is predicted as any deployment is, from step
costs to simulation. The step costs' coefficients, which thousands of runs share, were fitted with
it. `make cohort` writes the predictions anew, and `tests/maintenance/test_gate.py` compares.
"""

import csv
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from itertools import groupby
from typing import get_args

import numpy as np
from validation.serving_points import (
    COHORT_FILE,
    COHORT_GROUPS,
    SERVING_METRICS,
    load_cohort,
)

from fits.accuracy_page import write_cohort
from fits.pooled_fit import MEASURED_RUNS_FILE, MeasuredRun, load_rows, parse_measured_runs
from planner.core.files import replace_atomically
from planner.hardware.gpus import get_gpu
from planner.latency import measured_residuals, step_model
from planner.latency.measured_residuals import (
    ResidualMetric,
    compute_covariance,
    describe_traits,
    load_process_shapes,
)
from planner.planning.simulation_runs import run_short_simulation

MOST_SEQUENCES = {"light": 8, "medium": 64}
"""Most sequences per engine that are such a load; more are a heavy one."""


def select_cohort(rows: Sequence[dict[str, str]]) -> list[dict[str, str]]:
    """Select rows of `measured_runs.csv`: of each model, GPU and engine, two loads of its longest curve.

    They are the middle and the highest one. Ties go to the curve that was written down first.
    """
    selected = []
    timed = [row for row in rows if row["measured_tpot_ms"]]
    for _, group in groupby(sorted(timed, key=_get_pair), _get_pair):
        curves: dict[str, list[dict[str, str]]] = {}
        for row in group:
            curves.setdefault(row["curve"], []).append(row)
        by_length = sorted(curves.values(), key=lambda curve: -len(curve))
        longest = sorted(by_length[0], key=_get_load)
        selected += [longest[k] for k in sorted({len(longest) // 2, len(longest) - 1})]
    return selected


def _get_pair(row: Mapping[str, str]) -> tuple[str, str, str]:
    return row["engine"], get_gpu(row["gpu"]).name, row["model"]


def _get_load(row: Mapping[str, str]) -> float:
    return float(row["concurrency"] or row["request_rate"] or 0)


@contextmanager
def forget_curve(engine: str, curve: str) -> Iterator[None]:
    """Let the residual process go without the runs of a curve."""
    known = {metric: _load_shortened(engine, curve, metric) for metric in get_args(ResidualMetric)}
    load = measured_residuals._load_runs
    measured_residuals._load_runs = lambda _, metric: known[metric]  # type: ignore[assignment]
    _forget_estimates()
    try:
        yield
    finally:
        measured_residuals._load_runs = load
        _forget_estimates()


def _forget_estimates() -> None:
    for estimate in (
        step_model.build_step_model,
        step_model._build_corrected_step_model,
        step_model._estimate_residuals,
        measured_residuals.estimate_residual,
        measured_residuals._whiten_runs,
        measured_residuals._relate_traits,
    ):
        estimate.cache_clear()


@cache
def _invert_covariance(engine: str, metric: ResidualMetric) -> np.ndarray:
    shape, runs = load_process_shapes()[metric], measured_residuals._load_runs(engine, metric)
    prior = compute_covariance(shape, (runs.positions,) * 2, (runs.codes, runs.codes))
    return np.linalg.inv(prior + np.diag(runs.noise**2))


def _load_shortened(engine: str, curve: str, metric: ResidualMetric) -> "measured_residuals._Runs":
    runs, inverse = (
        measured_residuals._load_runs(engine, metric),
        _invert_covariance(engine, metric),
    )
    is_out = np.array([row["curve"] == curve for row in runs.rows], dtype=bool)
    out, kept = np.flatnonzero(is_out), np.flatnonzero(~is_out)
    # weights of the rest without these runs: those of a smaller system, by its Schur complement
    own = np.linalg.solve(inverse[np.ix_(out, out)], runs.pull[out])
    return replace(
        runs,
        rows=[runs.rows[k] for k in kept],
        positions=runs.positions[kept],
        codes=runs.codes[:, kept],
        noise=runs.noise[kept],
        pull=runs.pull[kept] - inverse[np.ix_(kept, out)] @ own,
    )


def predict_cohort(rows: Sequence[Mapping[str, str]]) -> list[dict[str, str]]:
    """Predict each row without its curve; return the rows with what `load_cohort` reads of them."""
    runs = parse_measured_runs(rows, COHORT_FILE)
    predicted = []
    pairs = zip(rows, runs, strict=True)
    for (engine, curve), group in groupby(
        pairs, lambda pair: (pair[1].deployment.engine.name, pair[1].curve)
    ):
        with forget_curve(engine, curve):
            predicted += [
                {
                    **row,
                    **_predict_run(run),
                    "campaign": re.split("[@,(]", row["source"])[0].strip(),
                }
                for row, run in group
            ]
    return predicted


def _predict_run(run: MeasuredRun) -> dict[str, str]:
    deployment, workload = run.deployment, run.workload
    traits = dict(describe_traits(deployment))
    sequences = (workload.concurrency or 0) / deployment.num_engine_instances
    loads = [name for name, most in MOST_SEQUENCES.items() if sequences <= most]
    result = run_short_simulation(deployment, workload, workload.num_requests)
    cells = {
        "generation": traits["generation"],
        "attention": traits["attention"],
        "experts": "experts" if deployment.model.architecture.is_moe else "dense",
        "layout": traits["layout_kind"],
        "format": traits["quantization"],
        "load": (loads or ["heavy"])[0] if workload.concurrency else "open loop",
    }
    for metric in (name.lower() for name in SERVING_METRICS):
        predicted = result.get(metric, "mean") * 1e3
        for end in ("lo", "mid", "hi"):
            cells[f"{metric}_{end}_ms"] = f"{getattr(predicted, end):.5g}"
    return cells


if __name__ == "__main__":
    is_new = "--select" in sys.argv
    chosen = select_cohort(load_rows(MEASURED_RUNS_FILE)) if is_new else load_rows(COHORT_FILE)
    table = predict_cohort(chosen)
    with replace_atomically(COHORT_FILE) as (part,), part.open("w", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(table[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(table)
    write_cohort(load_cohort(), COHORT_GROUPS)
