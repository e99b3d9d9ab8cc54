"""Fit the step costs of all engines at once to every measured run; `pooled_catalog` writes what comes of it.

The logarithm of a coefficient is a sum: what all have in common, and what the engine, the GPU's
generation, the GPU, the release, the model and the layout add. Each part has a normal prior around
0 (`LEVELS`), so that little data moves it little, and what a GPU lacks comes from its generation
(partial pooling). Residuals are ln(predicted / measured) under a Student-t loss; Gauss-Newton on
the closed form, which is moved by what the replay of each run gives beside it.

Held back, the fit goes without all runs of a curve, a pair of model and GPU, a model, a GPU or a
release at once, by one Newton step from the fit with all: their errors are the widths of the
catalog's intervals.
"""

import csv
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from io import StringIO
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from scipy.sparse import block_diag, csr_array

from planner.calibration.request_validation import load_timed_runs
from planner.calibration.robust_fit import RobustFit, fit_student_t
from planner.calibration.user_fit import COEFFICIENT_PRIORS
from planner.core.catalog import CATALOG_DIR
from planner.core.errors import PlannerError, add_error_context
from planner.core.intervals import Z_SCORE_80PCT
from planner.core.readers import read_text, read_yaml
from planner.core.units import MIB
from planner.engines.coefficients import StepCoefficients, list_coefficient_names
from planner.engines.deployment import Deployment
from planner.engines.engine import parse_release
from planner.latency.coefficient_lookup import (
    MIN_CURVES_PER_PAIR,
    NOVELTY_KINDS,
    get_weight_format_name,
)
from planner.latency.step_model import StepModel, build_target_step_model
from planner.memory.memory_plan import get_memory_plan
from planner.planning.capacity import derive_effective_workload
from planner.planning.prediction import solve_load_cases
from planner.planning.table_rows import parse_cells, parse_measured_run
from planner.queueing.steady_state import LoadCase
from planner.simulator.simulation import simulate_workload
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
"""Spread of ln(measured), by `METRICS`, that no model explains: what repeats of a public point differ by."""
STEADY_NOISE_FACTOR = 0.5
"""Of that, what is left of a run at a rate, whose mean holds no first burst."""
POOLED_STUDENT_T_DOF = 4.0
COMMON_PRIORS: Mapping[str, tuple[float, float]] = {
    name: tuple(told["kernels"]) for name, told in COEFFICIENT_PRIORS.items()
}
"""What is known of each coefficient before any serving run, and how well."""
EFFECT_LEVELS: Mapping[str, Mapping[str, Any]] = read_yaml(Path(__file__).with_name("levels.yaml"))
"""How much the parts of a coefficient add."""
RELEASE_BOUNDARIES = {
    "vllm": ("0.11.0", "0.12.0", "0.16.0", "0.18.0", "0.20.0"),
    "sglang": ("0.5.6", "0.5.9", "0.5.12"),
    "trtllm": ("1.0.0", "1.2.0"),
}
"""Where an engine's releases are parted: changes of its runner, its scheduler or its kernels."""
MIN_CURVES_PER_GENERATION = 5.0
"""Curves that say as much of a generation's spread as all other generations do."""
RATE_METRIC_INDEX = 2
INTERVAL_METRICS = {1: "tpot", 0: "ttft", RATE_METRIC_INDEX: "output_tps"}
"""Of `METRICS` those whose intervals have a width of their own."""


@dataclass(frozen=True)
class MeasuredRun:
    """One measured run: what ran, what was sent, and ln of what was measured by `METRICS` (seconds, tokens/s)."""

    deployment: Deployment
    workload: Workload
    measured: np.ndarray
    curve: str

    @property
    def effect_groups(self) -> dict[str, str]:
        """What it shares its parts with, by level; parts of a name are joined by |."""
        engine, gpu, model = self.deployment.engine, self.deployment.gpu, self.deployment.model
        family = model.architecture.model_type
        era = next(
            (
                bound
                for bound in RELEASE_BOUNDARIES[engine.name]
                if engine.release_tuple < parse_release(bound)
            ),
            "",
        )
        return {
            "common": "",
            "engine": engine.name,
            "generation": gpu.kernel_generation,
            "gpu": gpu.name,
            "gpu engine": f"{gpu.name}|{engine.name}",
            "release": f"{engine.name}|{era}",
            "release generation": f"{engine.name}|{era}|{gpu.kernel_generation}",
            "model": family,
            "model engine": f"{family}|{engine.name}",
            "model format": f"{family}|{get_weight_format_name(model)}",
            "pair": f"{family}|{get_weight_format_name(model)}|{gpu.name}|{engine.name}",
            "layout": (
                f"{family}|{get_weight_format_name(model)}|{gpu.name}|{engine.name}|{self.deployment.layout.tp}"
            ),
            "curve": self.curve,
        }

    @property
    def holdout_groups(self) -> dict[str, str]:
        """The whole that it belongs to, by what may be new in a question."""
        groups, engine = self.effect_groups, self.deployment.engine
        wholes = {"pair": groups["pair"], "model": groups["model"], "gpu": groups["gpu"]}
        return {"curve": self.curve, **wholes, "version": f"{engine.name} {engine.version}"}


def load_measured_runs(path: Path = MEASURED_RUNS_FILE) -> list[MeasuredRun]:
    """The runs of a CSV (the columns of `planner predict`, `COLUMNS`, `curve` and `source`) and the timed ones."""
    measured_runs = []
    for number, row in enumerate(
        csv.DictReader(StringIO(read_text(path, 16 * MIB), newline="")), start=2
    ):
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
            )
        )
    for name, timed in load_timed_runs().items():
        measured_runs.append(
            MeasuredRun(
                timed.deployment, timed.workload, np.log([*timed.means, np.nan, np.nan]), name
            )
        )
    return measured_runs


class PooledRuns:
    """Measured runs, and the parts that their coefficients are sums of.

    `parts` are (level, group, coefficient); `adds` [runs x coefficients, parts] is 1 where a part
    adds to it.
    """

    def __init__(self, runs: Sequence[MeasuredRun]) -> None:
        self.runs, self.names = list(runs), list_coefficient_names()
        self.plans = [get_memory_plan(run.deployment) for run in runs]
        self.measured = np.array([run.measured for run in runs])
        self.start = np.log([[COMMON_PRIORS[name][0] for name in self.names] for _ in runs])
        self.noise = MEASUREMENT_NOISE * np.array(
            [[STEADY_NOISE_FACTOR if run.workload.rate else 1.0] for run in runs]
        )
        self.is_measured = np.isfinite(self.measured)
        self.beside = np.zeros_like(self.measured)  # ln(replayed / closed form)
        places: dict[tuple[str, str, str], int] = {}
        rows, columns = list[int](), list[int]()
        for k, run in enumerate(runs):
            for (level, group), (which, name) in product(
                run.effect_groups.items(), enumerate(self.names)
            ):
                if _get_prior_sigma(level, name) > 0:
                    rows.append(k * len(self.names) + which)
                    columns.append(places.setdefault((level, group, name), len(places)))
        self.parts = list(places)
        self.spread = np.array([_get_prior_sigma(level, name) for level, _, name in places])
        self.adds = csr_array(
            (np.ones(len(rows)), (rows, columns)), shape=(self.start.size, len(places))
        )

    def compute_log_coefficients(self, sums: np.ndarray) -> np.ndarray:
        """[runs, coefficients] logarithms of each run's coefficients."""
        return np.asarray(self.start + (self.adds @ sums).reshape(self.start.shape))

    def build_step_models(self, logs: np.ndarray) -> list[StepModel]:
        values = np.exp(logs).tolist()
        return [
            build_target_step_model(run.deployment, StepCoefficients(*row))
            for run, row in zip(self.runs, values, strict=True)
        ]

    def predict_logs(self, logs: np.ndarray) -> np.ndarray:
        """[runs, metrics] logarithms of what the closed form gives."""
        steps = self.build_step_models(logs)
        cases = [
            LoadCase(run.deployment, plan, run.workload, step)
            for run, plan, step in zip(self.runs, self.plans, steps, strict=True)
        ]
        found = np.full_like(self.measured, np.nan)
        found[:, :3] = [
            (done.ttft["mean"].mid, done.tpot["mean"].mid, done.output_tps.mid)
            for done in solve_load_cases(cases)
        ]
        for k in np.flatnonzero(np.isfinite(self.measured[:, 3])).tolist():
            load = self.runs[k].workload
            batch = (load.concurrency or 1) / self.runs[k].deployment.num_engine_instances
            found[k, 3] = steps[k].estimate_decode_step_s(
                batch, load.prompt.mean + load.output.mean / 2
            )
        return np.asarray(np.log(found))

    def simulate_logs(self, logs: np.ndarray) -> np.ndarray:
        """[runs, metrics] logarithms of what the replay of each run's own requests gives; NaN where nothing asks."""
        found = np.full_like(self.measured, np.nan)
        for k, (run, step) in enumerate(zip(self.runs, self.build_step_models(logs), strict=True)):
            if np.isfinite(self.measured[k, :3]).any():
                result = simulate_workload(run.deployment, self.plans[k].pool, step, run.workload)
                tokens = (
                    float(result.output.sum())
                    * run.deployment.num_engine_instances
                    / result.duration
                )
                found[k, :3] = (
                    result.summarize("ttft")["mean"],
                    result.summarize("tpot")["mean"],
                    tokens,
                )
        return np.asarray(np.log(found))

    def compute_errors(self, sums: np.ndarray) -> np.ndarray:
        """[errors] ln(predicted / measured) of all that was measured."""
        predicted = self.predict_logs(self.compute_log_coefficients(sums)) + self.beside
        return np.asarray((predicted - self.measured)[self.is_measured])

    def compute_jacobian(self, logs: np.ndarray) -> np.ndarray:
        """[runs, metrics, coefficients] derivatives of `predict_logs`."""
        base, step = self.predict_logs(logs), 0.05 * np.eye(len(self.names))
        array = np.stack([self.predict_logs(logs + row) - base for row in step], axis=-1) / 0.05
        return np.asarray(np.nan_to_num(np.clip(array, -3, 3)))

    def compute_slopes(self, sums: np.ndarray) -> csr_array:
        """[errors, parts] derivatives of `compute_errors`."""
        slopes = self.compute_jacobian(self.compute_log_coefficients(sums))
        return (block_diag(slopes, "csr") @ self.adds)[self.is_measured.ravel()]


def _get_prior_sigma(level: str, name: str) -> float:
    parts = EFFECT_LEVELS[level]
    share = parts.get("host" if COEFFICIENT_PRIORS[name].get("host") else "device", 0.0)
    return float(parts.get("own", {}).get(name, COMMON_PRIORS[name][1] * share))


@dataclass(frozen=True)
class PooledFit:
    """A pooled fit: the parts' sums, and ln(predicted / measured) of every run, fitted and held back."""

    pool: PooledRuns
    fit: RobustFit

    @property
    def sums(self) -> np.ndarray:
        return self.fit.x

    @cached_property
    def held_out_errors(self) -> dict[str, np.ndarray]:
        """[runs, metrics] errors where the fit goes without the whole that a run belongs to, by what is left out.

        A curve that is left out has no part of its own.
        """
        shared = np.array([level != "curve" for level, _, _ in self.pool.parts])
        shared_fit = replace(
            self.fit, x=self.sums[shared], slopes=self.fit.slopes[:, shared],
            prior_sigma=self.fit.prior_sigma[shared],
        )  # fmt: skip
        run_indices = np.nonzero(self.pool.is_measured)[0]
        held_out_errors = {}
        for kind in ("curve", *NOVELTY_KINDS):
            groups = np.array([run.holdout_groups[kind] for run in self.pool.runs])[run_indices]
            errors, change = self.fit.errors.copy(), np.where(shared, 0.0, -self.sums)
            for group in np.unique(groups):
                rows = groups == group
                change[shared] = shared_fit.compute_step_without(rows)
                errors[rows] += self.fit.slopes[rows] @ change
            held_out_errors[kind] = np.full(self.pool.measured.shape, np.nan)
            held_out_errors[kind][self.pool.is_measured] = errors
        return held_out_errors

    def summarize(self) -> dict[str, dict[str, dict[str, dict[str, float]]]]:
        """By engine, what was left out and metric: runs, median and mean error, share inside the 80% interval.

        The interval of a run is put around by the errors of all other wholes than its own.
        """
        found: dict[str, dict[str, dict[str, dict[str, float]]]] = {}
        for engine in RELEASE_BOUNDARIES:
            mine = np.flatnonzero(self._select_engine_runs(engine)).tolist()
            for what in ("curve", *NOVELTY_KINDS):
                wholes = np.array([self.pool.runs[k].holdout_groups[what] for k in mine])
                for column, name in enumerate(FIT_METRICS):
                    seen = np.abs(self.held_out_errors[what][mine, column])
                    use = np.isfinite(seen)
                    if len(np.unique(wholes[use])) < 3:
                        continue
                    inside = [
                        seen[k] <= np.quantile(seen[use & (wholes != wholes[k])], 0.8) for k in np.flatnonzero(use)
                    ]  # fmt: skip
                    figures = {
                        "runs": int(use.sum()),
                        "median": np.median(seen[use]),
                        "mean": np.mean(seen[use]),
                    }
                    told = {
                        key: round(float(np.expm1(value)), 4)
                        for key, value in figures.items()
                        if key != "runs"
                    }
                    found.setdefault(engine, {}).setdefault(what, {})[name] = {
                        "runs": figures["runs"], **told, "inside": round(float(np.mean(inside)), 3)
                    }  # fmt: skip
        return found

    @cached_property
    def generation_spreads(self) -> dict[tuple[str, int, str], float]:
        """By engine, metric and generation, how its errors without the pair compare with those of all runs.

        Few curves say little: of `FEW` half of it counts.
        """
        generations = np.array([run.deployment.gpu.kernel_generation for run in self.pool.runs])
        curves = np.array([run.curve for run in self.pool.runs])
        found = {}
        for engine, column in product(RELEASE_BOUNDARIES, INTERVAL_METRICS):
            errors, mine = (
                self._get_held_out_sizes(column, "pair"),
                self._select_engine_runs(engine),
            )
            if not np.isfinite(errors[mine]).any():
                continue
            usual = np.nanquantile(errors[mine], 0.8)
            for generation in np.unique(generations[mine]).tolist():
                here = mine & (generations == generation) & np.isfinite(errors)
                if many := len(np.unique(curves[here])):
                    own = np.quantile(errors[here], 0.8) / usual
                    found[engine, column, generation] = float(
                        (many * own + MIN_CURVES_PER_GENERATION)
                        / (many + MIN_CURVES_PER_GENERATION)
                    )
        return found

    def estimate_error_width(self, engine: str, what: str, column: int) -> float:
        """Standard deviation of the errors held back, from their 80th percentile: a few bad runs don't count.

        Of loads ("curve") those of pairs with few of them, and those of pairs with `MANY` ("many"),
        are told apart, but for throughput, of which too few were measured; none of them is less
        certain than all that may be new.
        """
        mine, errors = (
            self._select_engine_runs(engine),
            self._get_held_out_sizes(column, "curve" if what == "many" else what),
        )
        if column != RATE_METRIC_INDEX and what in ("many", "curve"):
            mine &= np.array(
                [
                    self.count_curves[run.effect_groups["pair"]] >= MIN_CURVES_PER_PAIR
                    for run in self.pool.runs
                ]
            ) == (what == "many")
        kinds = (run.deployment.gpu.kernel_generation for run in self.pool.runs)
        scale = np.array(
            [self.generation_spreads.get((engine, column, generation), 1.0) for generation in kinds]
        )
        value = float(np.nanquantile((errors / scale)[mine], 0.8)) / Z_SCORE_80PCT
        return (
            min(value, max(self.estimate_error_width(engine, new, column) for new in NOVELTY_KINDS))
            if what == "curve"
            else value
        )

    def _get_held_out_sizes(self, column: int, what: str) -> np.ndarray:
        """[runs] sizes of errors held back: of one of `WIDE`; where TPOT was not measured, of throughput or ITL."""
        errors = np.abs(self.held_out_errors[what])
        places = (1, 2, 3) if column == 1 else (column,)
        return np.array(
            [next((row[k] for k in places if np.isfinite(row[k])), np.nan) for row in errors]
        )

    @cached_property
    def count_curves(self) -> Counter[str]:
        """How many curves of each pair were measured."""
        return Counter(
            pair for pair, _ in {(run.effect_groups["pair"], run.curve) for run in self.pool.runs}
        )

    def _select_engine_runs(self, engine: str) -> np.ndarray:
        return np.array([run.deployment.engine.name == engine for run in self.pool.runs])


def fit_pooled(
    runs: Sequence[MeasuredRun],
    max_evaluations: int = 5,
    replays: int = 3,
    tell: Callable[[str], None] = lambda line: None,
) -> PooledFit:
    """The parts that measured runs ask for, fitted, and fitted again after each of `replays` of all runs."""
    pool = PooledRuns(runs)
    sums, scale = np.zeros(len(pool.parts)), pool.noise[pool.is_measured]
    for stage in range(replays + 1):
        if stage:
            logs = pool.compute_log_coefficients(sums)
            simulated = pool.simulate_logs(logs) - pool.predict_logs(logs)
            pool.beside = np.nan_to_num(np.clip(simulated, -1, 1))
        fit = fit_student_t(
            pool.compute_errors, pool.compute_slopes, scale, pool.spread, POOLED_STUDENT_T_DOF,
            start=sums, max_evaluations=max_evaluations,
        )  # fmt: skip
        sums = fit.x
        metrics = np.nonzero(pool.is_measured)[1]
        errors = ((name, fit.errors[metrics == k]) for k, name in enumerate(FIT_METRICS))
        text = ", ".join(
            f"{name} {np.expm1(np.median(np.abs(each))):.1%}" for name, each in errors if len(each)
        )
        tell(f"fit {stage + 1} of {replays + 1}: median errors {text}")
    return PooledFit(pool, fit)
