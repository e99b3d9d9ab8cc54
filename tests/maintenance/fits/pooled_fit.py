"""Fit the step-cost coefficients of all engines at once to every measured run.

The logarithm of a coefficient is a sum of effects: what all runs have in common, and what the
engine, the GPU's generation and die, the release, the model and the layout add. Each effect has a
normal prior around 0 (`EFFECT_LEVELS`), so a few runs move it little, and what a GPU lacks comes
from its generation (partial pooling). Errors are ln(predicted / measured) under a Student-t
likelihood (`robust_fit`). Predictions are analytical, shifted by how much the simulation of each
run differs. `catalog_writer` writes the result.

What it leaves of each run goes to `residual_fit`.
"""

import csv
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from io import StringIO
from itertools import product
from pathlib import Path
from typing import TypedDict

import numpy as np
from scipy.sparse import block_diag, csr_array
from validation.timed_runs import load_timed_runs

from planner.calibration.robust_fit import (
    RobustFit,
    estimate_slopes,
    fit_student_t,
    remember_last,
)
from planner.calibration.user_fit import COEFFICIENT_PRIORS
from planner.core.catalog import CATALOG_DIR
from planner.core.errors import PlannerError, add_error_context
from planner.core.readers import read_text, read_yaml
from planner.core.units import MIB
from planner.engines.coefficients import StepCoefficients, list_coefficient_names
from planner.engines.deployment import Deployment
from planner.latency.coefficient_lookup import (
    adapt_to_power,
    find_era,
    find_matrix_shares,
    get_weight_format_name,
)
from planner.latency.step_model import StepModel, build_target_step_model
from planner.memory.memory_plan import get_memory_plan
from planner.planning.capacity import derive_effective_workload
from planner.planning.prediction import solve_load_cases
from planner.planning.table_rows import parse_cells, parse_measured_run
from planner.queueing.steady_state import LoadCase
from planner.simulator.simulation import count_serving_engines, simulate_workload
from planner.workload.workload import Workload

MEASURED_RUNS_FILE = CATALOG_DIR / "validation" / "measured_runs.csv"
FIT_METRICS = ("ttft", "tpot", "output_tps", "itl_p50")
MEASURED_COLUMN_NAMES = (
    "measured_ttft_ms",
    "measured_tpot_ms",
    "measured_output_tps",
    "measured_itl_p50_ms",
)
MEASUREMENT_NOISE = np.array([0.14, 0.05, 0.08, 0.06])
"""Spread of ln(measured) by `FIT_METRICS` that no model explains: repeats of a public point differ
by as much."""
STEADY_NOISE_FACTOR = 0.5
"""Fraction of that noise in an open-loop run, whose mean contains no initial burst."""
POOLED_STUDENT_T_DOF = 4.0
COMMON_PRIORS: Mapping[str, tuple[float, float]] = {
    name: prior["kernels"] for name, prior in COEFFICIENT_PRIORS.items()
}
"""Median and sigma of each coefficient before any serving run."""
COMMON_MEDIANS = {name: COMMON_PRIORS[name][0] for name in list_coefficient_names()}


class EffectLevel(TypedDict, total=False):
    """Prior sigmas of one level's effects; `levels.yaml` explains the fields."""

    device: float
    host: float
    own: dict[str, float]


EFFECT_LEVELS: Mapping[str, EffectLevel] = read_yaml(Path(__file__).with_name("levels.yaml"))
"""Prior sigmas of the effects; the file explains them."""
ATTENTION_DP = "attention data parallelism"
OWN_LEVELS = ("pair", "layout", "curve")
"""Levels whose effects no run of another pair shares."""


@dataclass(frozen=True)
class MeasuredRun:
    """One measured run; `measured` holds ln of the means by `FIT_METRICS` (seconds, tokens/s)."""

    deployment: Deployment
    workload: Workload
    measured: np.ndarray
    curve: str
    is_mixed: bool = False  # a median over several releases, under the name of one

    @property
    def effect_groups(self) -> dict[str, str]:
        """The groups that share an effect with the run, by level; names are joined by |."""
        engine, gpu, model = self.deployment.engine, self.deployment.gpu, self.deployment.model
        family = model.architecture.model_type
        model_format = f"{family}|{get_weight_format_name(model)}"
        pair = f"{model_format}|{gpu.name}|{engine.name}"
        era = find_era(engine.name, engine.release)
        return {
            "common": "",
            "engine": engine.name,
            "generation": gpu.kernel_generation,
            "die": gpu.die,
            "die engine": f"{gpu.die}|{engine.name}",
            "release": f"{engine.name}|{era}",
            "release generation": f"{engine.name}|{era}|{gpu.kernel_generation}",
            "model": family,
            "model engine": f"{family}|{engine.name}",
            "model format": model_format,
            "pair": pair,
            "layout": f"{pair}|{self.deployment.layout.tp}|{self.deployment.layout.dp}",
            "curve": self.curve,
        }

    @property
    def holdout_groups(self) -> dict[str, str]:
        """The groups that the run is held out with, by what may be new in a scenario."""
        groups, engine = self.effect_groups, self.deployment.engine
        gpu = self.deployment.gpu.name
        shared = {"pair": groups["pair"], "model": groups["model"], "gpu": gpu}
        if self.deployment.layout.dp > 1:
            shared["pair"] += f"|{ATTENTION_DP}"
        weight_format = get_weight_format_name(self.deployment.model)
        shared["format"] = f"{weight_format}|{groups['generation']}|{engine.name}"
        return {"curve": self.curve, **shared, "version": f"{engine.name} {engine.version}"}


def load_rows(path: Path) -> list[dict[str, str]]:
    """Load the rows of a CSV file as text."""
    return list(csv.DictReader(StringIO(read_text(path, 16 * MIB), newline="")))


def parse_measured_runs(rows: Sequence[Mapping[str, str]], path: Path) -> list[MeasuredRun]:
    """Parse rows of the CSV file `path`.

    Columns are those of `headroom predict`, `MEASURED_COLUMN_NAMES`, `releases` (of
    which a row is a median; empty: one), `curve` and `source`.
    """
    measured_runs = []
    for number, row in enumerate(rows, start=2):
        with add_error_context(f"{path.name}, line {number}"):
            deployment, workload = parse_measured_run(parse_cells(row)[0], path.parent, [])
            if not (memory := get_memory_plan(deployment)).can_start:
                raise PlannerError(memory.reason)
        values = [
            float(row.get(name) or "nan") / (1e3 if name.endswith("_ms") else 1)
            for name in MEASURED_COLUMN_NAMES
        ]
        measured_runs.append(
            MeasuredRun(
                deployment,
                derive_effective_workload(deployment, workload),
                np.log(values),
                row["curve"],
                int(row.get("releases") or 1) > 1,
            )
        )
    return measured_runs


def load_measured_runs(path: Path = MEASURED_RUNS_FILE) -> list[MeasuredRun]:
    """Load the runs of a CSV file, and the timed ones."""
    measured_runs = parse_measured_runs(load_rows(path), path)
    for name, timed in load_timed_runs().items():
        measured_runs.append(
            MeasuredRun(
                timed.deployment, timed.workload, np.log([*timed.means, np.nan, np.nan]), name
            )
        )
    return measured_runs


class PooledRuns:
    """Measured runs, and the effects that their log coefficients are sums of.

    `effects` are (level, group, coefficient); `design` [runs x coefficients, effects] is 1 where an
    effect applies.
    """

    def __init__(self, runs: Sequence[MeasuredRun]) -> None:
        self.runs, self.names = list(runs), list_coefficient_names()
        self.plans = [get_memory_plan(run.deployment) for run in runs]
        self.measured = np.array([run.measured for run in runs])
        gpus = [run.deployment.gpu for run in runs]
        medians = [get_prior_medians(gpu.die, gpu.kernel_generation) for gpu in gpus]
        self.prior_logs = np.log([list(each.values()) for each in medians])
        self.noise = MEASUREMENT_NOISE * np.array(
            [[STEADY_NOISE_FACTOR if run.workload.rate else 1.0] for run in runs]
        )
        self.is_measured = np.isfinite(self.measured)
        self.simulation_shift = np.zeros_like(self.measured)  # ln(simulated / analytical)
        indices: dict[tuple[str, str, str], int] = {}
        rows, columns = list[int](), list[int]()
        for k, run in enumerate(runs):
            for (level, group), (coefficient, name) in product(
                run.effect_groups.items(), enumerate(self.names)
            ):
                if _get_prior_sigma(level, name) > 0:
                    rows.append(k * len(self.names) + coefficient)
                    columns.append(indices.setdefault((level, group, name), len(indices)))
        self.effects = list(indices)
        self.prior_sigma = np.array([_get_prior_sigma(level, name) for level, _, name in indices])
        self.design = csr_array(
            (np.ones(len(rows)), (rows, columns)), shape=(self.prior_logs.size, len(indices))
        )

    def compute_log_coefficients(self, effect_logs: np.ndarray) -> np.ndarray:
        """Return the logarithms of each run's coefficients, [runs, coefficients]."""
        return np.asarray(
            self.prior_logs + (self.design @ effect_logs).reshape(self.prior_logs.shape)
        )

    def build_step_models(self, logs: np.ndarray) -> list[StepModel]:
        """Return the step model of each run with these log coefficients."""
        values = np.exp(logs).tolist()
        return [
            build_target_step_model(
                run.deployment, adapt_to_power(run.deployment.gpu, StepCoefficients(*row))
            )
            for run, row in zip(self.runs, values, strict=True)
        ]

    def predict_logs(self, log_coefficients: np.ndarray) -> np.ndarray:
        """Return the logarithms of the analytical estimates, [runs, metrics]."""
        steps = self.build_step_models(log_coefficients)
        cases = [
            LoadCase(run.deployment, plan, run.workload, step)
            for run, plan, step in zip(self.runs, self.plans, steps, strict=True)
        ]
        logs_by_metric = np.full_like(self.measured, np.nan)
        logs_by_metric[:, :3] = [
            (
                performance.get("ttft", "mean").mid,
                performance.get("tpot", "mean").mid,
                performance.output_tps.mid,
            )
            for performance in solve_load_cases(cases)
        ]
        for k in np.flatnonzero(np.isfinite(self.measured[:, 3])).tolist():
            workload = self.runs[k].workload
            batch = max(
                (workload.concurrency or 1) / self.runs[k].deployment.num_engine_instances, 1.0
            )
            logs_by_metric[k, 3] = steps[k].estimate_decode_step_s(
                batch, workload.prompt.mean + workload.output.mean / 2
            )
        return np.asarray(np.log(logs_by_metric))

    def simulate_logs(self, log_coefficients: np.ndarray) -> np.ndarray:
        """Return the logarithms of simulated means, [runs, metrics]; NaN if none was measured."""
        logs_by_metric = np.full_like(self.measured, np.nan)
        for k, (run, step) in enumerate(
            zip(self.runs, self.build_step_models(log_coefficients), strict=True)
        ):
            if np.isfinite(self.measured[k, :3]).any():
                result = simulate_workload(run.deployment, self.plans[k].pool, step, run.workload)
                tokens = result.output_tps * count_serving_engines(run.deployment, run.workload)
                logs_by_metric[k, :3] = (
                    result.summarize("ttft")["mean"],
                    result.summarize("tpot")["mean"],
                    tokens,
                )
        return np.asarray(np.log(logs_by_metric))

    def compute_errors(self, effect_logs: np.ndarray) -> np.ndarray:
        """Return ln(predicted / measured) of everything that was measured, [errors]."""
        predicted = (
            self.predict_logs(self.compute_log_coefficients(effect_logs)) + self.simulation_shift
        )
        return np.asarray((predicted - self.measured)[self.is_measured])

    def compute_jacobian(self, logs: np.ndarray) -> np.ndarray:
        """Return the derivatives of `predict_logs`, [runs, metrics, coefficients]."""
        slopes = estimate_slopes(lambda trials: map(self.predict_logs, trials), logs, 0.05)
        return np.asarray(np.nan_to_num(np.clip(slopes, -3, 3)))

    def compute_slopes(self, effect_logs: np.ndarray) -> csr_array:
        """Return the derivatives of `compute_errors`, [errors, effects]."""
        slopes = self.compute_jacobian(self.compute_log_coefficients(effect_logs))
        return (block_diag(slopes, "csr") @ self.design)[self.is_measured.ravel()]


def get_prior_medians(*names: str) -> dict[str, float]:
    """Return the median of each coefficient on a die or generation before any serving run.

    Of several names the first with an entry in the kernel tables counts.
    """
    entry = find_matrix_shares(*names)
    return {**COMMON_MEDIANS, **(entry.shares if entry else {})}


def compute_log_ratios(values: Mapping[str, float], bases: Mapping[str, float]) -> dict[str, float]:
    """Return ln(value / base) by name, where it is not 0."""
    return {
        name: math.log(values[name] / base) for name, base in bases.items() if values[name] != base
    }


def _get_prior_sigma(level: str, name: str) -> float:
    """Return the prior sigma of a level's effect on a coefficient; 0 if it has none."""
    effect_level = EFFECT_LEVELS[level]
    on_host = COEFFICIENT_PRIORS[name].get("host")
    factor = effect_level.get("host", 0.0) if on_host else effect_level.get("device", 0.0)
    return effect_level.get("own", {}).get(name, COMMON_PRIORS[name][1] * factor)


@dataclass(frozen=True)
class PooledFit:
    """A pooled fit: its runs, the effects, and ln(predicted / measured) of everything measured."""

    pool: PooledRuns
    fit: RobustFit

    @property
    def effect_logs(self) -> np.ndarray:
        """The fitted effects, [effects]."""
        return self.fit.x

    @cached_property
    def _is_curve(self) -> np.ndarray:
        return np.array([level == "curve" for level, _, _ in self.pool.effects])

    @cached_property
    def _shared_fit(self) -> RobustFit:
        """The fit without the effects of curves: one that is left out has none of its own."""
        shared = ~self._is_curve
        return replace(
            self.fit, x=self.effect_logs[shared], slopes=self.fit.slopes[:, shared],
            prior_sigma=self.fit.prior_sigma[shared],
        )  # fmt: skip

    def compute_physics_errors(self, without: np.ndarray | None = None) -> np.ndarray:
        """Compute ln(predicted / measured) [runs, metrics] by what runs of other pairs share too.

        Effects of pairs, layouts and curves are left out: the residual process has them. `without`
        selects runs [runs] that the fit goes without, to first order.
        """
        own = np.array([level in OWN_LEVELS for level, _, _ in self.pool.effects])
        change = np.where(own, -self.effect_logs, 0.0)
        if without is not None:
            rows = without[np.nonzero(self.pool.is_measured)[0]]
            step = np.zeros_like(change)
            step[~self._is_curve] = self._shared_fit.compute_step_without(rows)
            change = np.where(own, change, step)
        errors = np.full(self.pool.measured.shape, np.nan)
        errors[self.pool.is_measured] = self.fit.errors + self.fit.slopes @ change
        return errors


def fit_pooled(
    runs: Sequence[MeasuredRun],
    max_evaluations: int = 5,
    replays: int = 3,
    report: Callable[[str], None] = lambda line: None,
) -> PooledFit:
    """Fit all effects, then again after each of `replays` simulations of all runs."""
    pool = PooledRuns(runs)
    effect_logs, scale = np.zeros(len(pool.effects)), pool.noise[pool.is_measured]
    compute_slopes = remember_last(pool.compute_slopes)  # a stage starts where the last one ended
    for stage in range(replays + 1):
        if stage:
            logs = pool.compute_log_coefficients(effect_logs)
            simulated = pool.simulate_logs(logs) - pool.predict_logs(logs)
            pool.simulation_shift = np.nan_to_num(np.clip(simulated, -1, 1))
        fit = fit_student_t(
            pool.compute_errors, compute_slopes, scale, pool.prior_sigma, POOLED_STUDENT_T_DOF,
            start=effect_logs, max_evaluations=max_evaluations,
        )  # fmt: skip
        effect_logs = fit.x
        metrics = np.nonzero(pool.is_measured)[1]
        errors = ((name, fit.errors[metrics == k]) for k, name in enumerate(FIT_METRICS))
        text = ", ".join(
            f"{name} {np.expm1(np.median(np.abs(values))):.1%}"
            for name, values in errors
            if len(values)
        )
        report(f"fit {stage + 1} of {replays + 1}: median errors {text}")
    return PooledFit(pool, fit)
