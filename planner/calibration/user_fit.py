"""Fit step-cost coefficients to a user's runs, from the catalog's values for that GPU and engine.

Each coefficient has a lognormal prior around the catalog's value, so it moves as far as the
measurements pull it. Errors are ln(predicted / measured) of mean TPOT and TTFT under a Student-t
likelihood with 4 degrees of freedom (`robust_fit`), so a few bad runs do no harm. Predictions
simulate each run's own requests (`simulate_means`) or are analytical (`predict_means`); the slopes
are always analytical.
"""

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from planner.calibration.robust_fit import estimate_slopes, fit_student_t, remember_last
from planner.core.errors import PlannerError, add_error_context
from planner.core.files import check_replaceable, replace_atomically
from planner.core.intervals import Z_SCORE_80PCT, Interval
from planner.core.progress import show_step
from planner.core.readers import read_yaml
from planner.core.templates import render_template
from planner.engines.coefficients import StepCoefficients, UserCalibration, list_coefficient_names
from planner.engines.deployment import Deployment
from planner.latency.coefficient_lookup import (
    CalibratedCoefficients,
    get_deployment_coefficients,
    load_user_calibrations,
)
from planner.latency.step_model import StepModel, build_step_model
from planner.memory.memory_plan import get_memory_plan
from planner.planning.capacity import derive_effective_workload
from planner.planning.prediction import solve_load_cases
from planner.queueing.steady_state import LoadCase
from planner.simulator.simulation import simulate_workload
from planner.workload.workload import Workload

MEASUREMENT_NOISE_TPOT, MEASUREMENT_NOISE_TTFT = 0.05, 0.15
"""Spread of ln(measured) that no model explains: repeats of a public point differ by 1-9% (TPOT)
and 4-16% (TTFT)."""


COEFFICIENT_PRIORS: Mapping[str, Any] = read_yaml(Path(__file__).with_name("priors.yaml"))
"""Prior and description of each coefficient; the file explains the fields."""
STUDENT_T_DOF = 4.0
REPEAT_SIGMA_TTFT_TPOT = (0.08, 0.03)
"""Spread of ln(measured) of TTFT and TPOT between repeats on one machine. No prediction is more
certain."""
PRIOR_SIGMA_WEIGHT_RUNS = 4.0
"""Number of new runs that the catalog's sigma weighs as much as."""
MIN_REPORTED_CHANGE, MAX_MEDIAN_ERROR = 0.03, 0.5
"""What the report mentions: relative change of a coefficient, and median error."""


@dataclass(frozen=True)
class BenchmarkPoint:
    """One measured run; its mean latencies are in seconds (None: not measured)."""

    name: str
    deployment: Deployment
    workload: Workload
    ttft: float | None
    tpot: float | None
    statistics: Mapping[str, float] = field(default_factory=dict)  # "p95 ttft", "request_tps", ...


@dataclass(frozen=True)
class CalibrationFit:
    """New coefficients for one calibration entry, and their effect on the errors.

    Errors are ln(predicted / measured) of TTFT and TPOT, NaN if not measured. `held_out_errors` are
    those of a run in a fit without that run (to first order), by the analytical estimate, which
    intervals are built around.
    """

    entry: str
    coefficients: CalibratedCoefficients  # what was known before
    after: StepCoefficients
    points: tuple[BenchmarkPoint, ...]
    errors: np.ndarray  # [points, before and after, TTFT and TPOT]
    held_out_errors: np.ndarray  # [points, TTFT and TPOT]

    @property
    def step_before(self) -> StepModel:
        """The step model of the first run, without the fit."""
        return build_step_model(self.points[0].deployment, self.points[0].workload)

    def estimate_sigma(self, column: int) -> float:
        """Return the sigma of ln(measured / predicted) after the fit, of TTFT (0) or TPOT (1).

        It comes from the 80th percentile of the held-out errors, to ignore a few bad runs, and from
        the catalog's sigma with the weight of `PRIOR_SIGMA_WEIGHT_RUNS` runs. It is at least that
        of repeats.
        """
        errors = np.abs(self.held_out_errors[:, column])
        errors = errors[np.isfinite(errors)]
        prior_sigma = (self.step_before.sigma_ttft, self.step_before.sigma_tpot)[column]
        measured_sigma = float(np.quantile(errors, 0.8)) / Z_SCORE_80PCT if len(errors) else 0.0
        variance = (len(errors) * measured_sigma**2 + PRIOR_SIGMA_WEIGHT_RUNS * prior_sigma**2) / (
            len(errors) + PRIOR_SIGMA_WEIGHT_RUNS
        )
        return max(float(np.sqrt(variance)), REPEAT_SIGMA_TTFT_TPOT[column])

    def to_calibration(self, date: str) -> UserCalibration:
        """Return the catalog entry of this fit."""
        sources = list(dict.fromkeys(point.name.partition(", ")[0] for point in self.points))
        others = f" and {len(sources) - 3} more" if len(sources) > 3 else ""
        has_kv_dtype = all(point.deployment.args.kv_cache_dtype for point in self.points)
        medians = ", ".join(f"{name} {after:.1%}" for name, (_, after) in self.medians.items())
        return UserCalibration(
            coefficients={
                name: float(f"{getattr(self.after, name):.3g}") for name in list_coefficient_names()
            },
            sigma_tpot=round(self.estimate_sigma(1), 3),
            sigma_ttft=round(self.estimate_sigma(0), 3),
            kv_cache_dtype="auto" if has_kv_dtype else self.coefficients.kv_cache_dtype,
            models=tuple(
                sorted({point.deployment.model.architecture.model_type for point in self.points})
            ),
            points=len(self.points),
            versions=tuple(sorted({point.deployment.engine.version for point in self.points})),
            residuals=f"median after the fit: {medians}",
            engine=self.points[0].deployment.engine.name,
            source=f"headroom calibrate on {', '.join(sources[:3])}{others}",
            date=date,
        )

    def save(self, path: Path, date: str, *, force: bool = False) -> None:
        """Write the entry to the end of a user's calibration file, replacing a previous one.

        What others save to it at the same time is kept; by `force`, what is no calibration is not.
        """
        entry = self.to_calibration(date).model_dump(mode="json", exclude_defaults=True)
        new_text = yaml.safe_dump({self.entry: entry}, sort_keys=False, width=110)
        with replace_atomically(path, updating=True) as (part,):
            kept = load_kept_calibrations(path, force=force)
            previous = (kept or {}).get(self.entry)
            if previous and previous.engine not in ("", entry["engine"]):
                raise PlannerError(
                    f"{path} holds {self.entry} under {previous.engine}; keep {entry['engine']} in"
                    " another file"
                )
            text = path.read_text(encoding="utf-8") if kept is not None else ""
            before = rf"(?ms)^{re.escape(self.entry)}:.*?(?=^[^\s#]|\Z)"
            head = re.sub(before, "", text).rstrip()
            part.write_text(f"{head}\n\n{new_text}" if head else new_text, encoding="utf-8")

    @property
    def medians(self) -> dict[str, tuple[float, float]]:
        """The median error before and after the fit by metric, of those measured."""
        sizes = np.abs(np.expm1(self.errors))
        by_metric = {"TPOT": sizes[:, :, 1], "TTFT": sizes[:, :, 0]}
        return {
            name: tuple(np.nanmedian(size, axis=0).tolist())
            for name, size in by_metric.items()
            if np.isfinite(size).any()
        }

    def __str__(self) -> str:
        old, new = (vars(each) for each in (self.coefficients.coefficients, self.after))
        shifts = {name: abs(np.log(new[name] / old[name])) for name in list_coefficient_names()}
        sigmas = (
            (1, "TPOT", self.step_before.sigma_tpot),
            (0, "TTFT", self.step_before.sigma_ttft),
        )
        return render_template(
            "calibration",
            "calibration_fit",
            fit=self,
            models=Counter(point.deployment.model.name for point in self.points),
            widths=[
                (
                    name,
                    Interval.from_lognormal(1.0, sigma).relative_half_width,
                    Interval.from_lognormal(1.0, self.estimate_sigma(column)).relative_half_width,
                )
                for column, name, sigma in sigmas
            ],
            changes=[
                (name, old[name], new[name])
                for name in sorted(shifts, key=lambda name: -shifts[name])
                if abs(new[name] / old[name] - 1) > MIN_REPORTED_CHANGE
            ],
            priors=COEFFICIENT_PRIORS,
            most=MAX_MEDIAN_ERROR,
        ).strip("\n")


def predict_means(point: BenchmarkPoint, c: StepCoefficients) -> tuple[float, float]:
    """Return the analytical mean TTFT and TPOT in seconds of a run with these coefficients."""
    ((ttft, tpot),) = _predict_means_batch([point], [c])[0]
    return float(ttft), float(tpot)


def _predict_means_batch(
    points: Sequence[BenchmarkPoint], trials: Sequence[StepCoefficients]
) -> np.ndarray:
    """Return `predict_means` of every run for each trial, [trials, points, TTFT and TPOT]."""
    loads = [
        LoadCase(
            p.deployment,
            get_memory_plan(p.deployment),
            derive_effective_workload(p.deployment, p.workload),
        )
        for p in points
    ]
    cases: list[LoadCase] = []
    for c in trials:
        cases += [
            replace(load, step=build_step_model(load.deployment, load.workload, c))
            for load in loads
        ]
    means = [
        (performance.get("ttft", "mean").mid, performance.get("tpot", "mean").mid)
        for performance in solve_load_cases(cases)
    ]
    return np.array(means).reshape(len(trials), len(points), 2)


def simulate_means(point: BenchmarkPoint, c: StepCoefficients) -> tuple[float, float]:
    """Return the mean TTFT and TPOT in seconds of a run's own requests, simulated."""
    deployment = point.deployment
    result = simulate_workload(
        deployment,
        get_memory_plan(deployment).pool,
        build_step_model(deployment, point.workload, c),
        point.workload,
    )
    return result.summarize("ttft")["mean"], result.summarize("tpot")["mean"]


MeansFunction = Callable[[BenchmarkPoint, StepCoefficients], tuple[float, float]]
"""Mean TTFT and TPOT in seconds of a run with these coefficients."""


def load_kept_calibrations(path: Path, *, force: bool) -> dict[str, UserCalibration] | None:
    """Return what a fit that is saved to `path` has to keep; None if nothing of ours is there.

    Raises `PlannerError` without a folder for it, and for another file unless by `force`.
    """
    check_replaceable(path, "", force=True)
    try:
        return load_user_calibrations(path) if path.is_file() else None
    except PlannerError as error:
        if force:
            return None
        raise PlannerError(f"{error}; --force replaces it") from None


@show_step("fitting step costs")
def fit_calibration(
    points: Sequence[BenchmarkPoint],
    max_evaluations: int = 20,
    means: MeansFunction = predict_means,
    noise: tuple[float, float] = (MEASUREMENT_NOISE_TTFT, MEASUREMENT_NOISE_TPOT),
) -> CalibrationFit:
    """Fit the coefficients of one GPU and engine to measured runs, as predicted by `means`.

    `noise` is the spread of ln(measured) that no model explains, of TTFT and TPOT:
    `REPEAT_SIGMA_TTFT_TPOT` for one's own machine. Raises `PlannerError` for runs of several GPUs
    or engines, and for a run that the deployment could not have done.
    """
    kinds = Counter((point.deployment.gpu.name, point.deployment.engine.name) for point in points)
    if len(kinds) != 1:
        listed = (
            ", ".join(f"{gpu} under {name} ({count})" for (gpu, name), count in kinds.items())
            or "no runs"
        )
        raise PlannerError(f"calibrate one GPU and engine at a time, got {listed}")
    ((entry, _),) = kinds
    coefficients = get_deployment_coefficients(points[0].deployment)
    names, before = list_coefficient_names(), coefficients.coefficients
    start = np.log([getattr(before, name) for name in names])
    prior_sigma = np.array([COEFFICIENT_PRIORS[name]["spread"] for name in names])
    measured = np.log([[np.nan if v is None else v for v in (p.ttft, p.tpot)] for p in points])
    is_measured = np.isfinite(measured)

    def build_coefficients(x: np.ndarray) -> StepCoefficients:
        return replace(before, **dict(zip(names, np.exp(start + x).tolist(), strict=True)))

    @remember_last
    def compute_errors(x: np.ndarray) -> np.ndarray:
        predicted = [_compute_run_means(means, point, build_coefficients(x)) for point in points]
        return np.asarray(np.log(predicted) - measured)

    def predict_logs(trials: Sequence[np.ndarray]) -> np.ndarray:
        return np.asarray(
            np.log(_predict_means_batch(points, [build_coefficients(x) for x in trials]))
        )

    for point in points:
        _compute_run_means(predict_means, point, before)
    errors_before = compute_errors(np.zeros_like(start))
    fit = fit_student_t(
        lambda x: compute_errors(x)[is_measured],
        lambda x: estimate_slopes(predict_logs, x, 0.03)[is_measured],
        np.broadcast_to(noise, measured.shape)[is_measured], prior_sigma, STUDENT_T_DOF,
        max_evaluations=max_evaluations,
    )  # fmt: skip
    errors = np.stack([errors_before, np.full_like(measured, np.nan)], axis=1)
    errors[:, 1][is_measured] = fit.errors
    held_out_errors = predict_logs([fit.x])[0] - measured
    for k in range(len(points)):
        rows = np.nonzero(is_measured)[0] == k
        held_out_errors[k, is_measured[k]] += fit.slopes[rows] @ fit.compute_step_without(rows)
    return CalibrationFit(
        entry, coefficients, build_coefficients(fit.x), tuple(points), errors, held_out_errors
    )


def _compute_run_means(
    means: MeansFunction, point: BenchmarkPoint, c: StepCoefficients
) -> tuple[float, float]:
    """Return what `means` gives for a run; errors name the run."""
    with add_error_context(point.name):
        run_means = means(point, c)
        for metric, measured, value in zip(
            ("TTFT", "TPOT"), (point.ttft, point.tpot), run_means, strict=True
        ):
            if measured is not None and not 0 < value < np.inf:
                raise PlannerError(
                    f"a {metric} of {measured * 1e3:g} ms was measured, but it can have none"
                )
    return run_means
