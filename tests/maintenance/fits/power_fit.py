"""Compare board power with measured runs, and fit its energies to them.

`python -m fits.power_fit` prints both. The energies of `catalogs/power.yaml` are
fitted at the measured rates, so they do not depend on the planner's rates. The spread in the
catalog is what remains at the planner's own rates, which the last line prints.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import numpy as np
import pandas as pd
from pydantic import PositiveFloat, PositiveInt
from scipy.optimize import least_squares

from fits.catalog_rows import load_catalog_rows
from planner.core.catalog import StrictEntry
from planner.engines.deployment import Deployment, deploy_on
from planner.latency.power import (
    apply_board_limit,
    compute_power_terms,
    estimate_gpu_activity,
)
from planner.planning.prediction import evaluate_batch
from planner.workload.length_distribution import LengthDistribution
from planner.workload.workload import Workload

POWER_RUNS_FILE = "validation/power.csv"
HOLDOUT_GROUPS = {"model and GPU": ("model", "gpu"), "model": ("model",), "GPU": ("gpu",)}
"""Fields that define the groups left out of the fit."""


class MeasuredPowerRun(StrictEntry):
    """One line of the catalog: steady decoding at a constant batch, and mean W of each board."""

    model: str
    gpu: str
    tp: PositiveInt
    dp: PositiveInt
    ep: PositiveInt
    max_num_seqs: PositiveInt
    prompt: PositiveFloat
    output: PositiveFloat
    batch: PositiveFloat
    output_tps: PositiveFloat
    watts: PositiveFloat

    @property
    def deployment_and_workload(self) -> tuple[Deployment, Workload]:
        """The deployment that ran, and what was sent."""
        deployment = deploy_on(
            self.model, self.gpu, tp=self.tp, dp=self.dp, ep=self.ep, engine_version="0.11.1",
            max_model_len=20480,
            max_num_seqs=self.max_num_seqs, max_num_batched_tokens=8192,
        )  # fmt: skip
        lengths = (
            LengthDistribution.from_constant(self.prompt),
            LengthDistribution.from_constant(self.output),
        )
        return deployment, Workload(*lengths, concurrency=self.max_num_seqs)

    @property
    def terms(self) -> tuple[float, float, float]:
        """The terms of its power at the measured rate, with a step running all the time."""
        deployment, workload = self.deployment_and_workload
        activity = estimate_gpu_activity(
            deployment,
            workload,
            self.output_tps / self.output,
            self.batch / deployment.num_engine_instances,
        )
        return compute_power_terms(replace(activity, busy=1.0), deployment.gpu.board_limit_w)

    @property
    def board_limit_fraction(self) -> float:
        """Measured W as a fraction of the board limit."""
        return self.watts / self.deployment_and_workload[0].gpu.board_limit_w


@cache
def load_power_runs() -> tuple[MeasuredPowerRun, ...]:
    """Load the public runs.

    Raises `PlannerError` naming the first line that cannot be read.
    """
    return load_catalog_rows(POWER_RUNS_FILE, MeasuredPowerRun)


def fit_energies(terms: np.ndarray, fractions: np.ndarray) -> np.ndarray:
    """Fit (idle, pJ per byte, root of pJ per FLOP) to least absolute ln(predicted / measured).

    Errors below 2% count as squares (Huber loss), which makes the sum smooth at its minimum.
    """

    def compute_errors(c: np.ndarray) -> np.ndarray:
        return np.asarray(np.log(apply_board_limit(terms @ c) / fractions))

    c: np.ndarray = least_squares(
        compute_errors, (0.15, 100.0, 1.0), loss="huber", f_scale=0.02, x_scale="jac",
        bounds=(1e-6, np.inf),
    ).x  # fmt: skip
    return c


def evaluate_power_holdout(runs: Sequence[MeasuredPowerRun]) -> pd.DataFrame:
    """Return the median error and interval coverage of groups left out of the fit.

    The interval is that of the residuals of the runs fitted to.
    """
    x = np.array([run.terms for run in runs])
    fractions = np.array([run.board_limit_fraction for run in runs])
    rows = []
    for name, fields in HOLDOUT_GROUPS.items():
        groups = np.array(["/".join(getattr(run, field) for field in fields) for run in runs])
        ratio, inside = np.empty(len(runs)), np.empty(len(runs), bool)
        for group in np.unique(groups):
            is_omitted = groups == group
            c = fit_energies(x[~is_omitted], fractions[~is_omitted])
            lo, hi = np.quantile(
                fractions[~is_omitted] / apply_board_limit(x[~is_omitted] @ c), (0.1, 0.9)
            )
            ratio[is_omitted] = fractions[is_omitted] / apply_board_limit(x[is_omitted] @ c)
            inside[is_omitted] = (lo <= ratio[is_omitted]) & (ratio[is_omitted] <= hi)
        rows.append({
            "left out": name, "groups": len(np.unique(groups)),
            "median error": float(np.median(np.abs(1 / ratio - 1))),
            "inside 80%": float(inside.mean()),
        })  # fmt: skip
    return pd.DataFrame(rows)


if __name__ == "__main__":
    idle, byte, root = fit_energies(
        np.array([run.terms for run in load_power_runs()]),
        np.array([run.board_limit_fraction for run in load_power_runs()]),
    )
    print(
        f"{len(load_power_runs())} runs: idle {idle:.3f}, byte_pj {byte:.1f}, flop_pj {root**2:.2f}"
    )
    print(evaluate_power_holdout(load_power_runs()).to_string(index=False))
    predictions = evaluate_batch(
        run.deployment_and_workload for run in load_power_runs()
    )  # at the rates that the planner predicts in closed form
    ratios = np.array(
        [
            run.watts / prediction.gpu_power_w.mid
            for run, prediction in zip(load_power_runs(), predictions, strict=True)
            if prediction.gpu_power_w
        ]
    )
    error, (lo, hi) = np.median(np.abs(1 / ratios - 1)), np.quantile(ratios, (0.1, 0.9))
    print(f"at predicted rates: median error {error:.3f}, spread [{1 / lo - 1:.2f}, {hi - 1:.2f}]")
