"""Score and learn the covariance and the widths of `catalogs/calibration/process.yaml`.

Whole curves, pairs of model and GPU, models, GPUs, formats and releases are left out, of the fit to
first order as well, and predicted from the rest of their engine. What is learned makes the residuals
of curves, pairs and models likeliest, under a Student-t likelihood; then widths are such that 80%
intervals hold 80% of what was left out. `PYTHONPATH=tests/maintenance python -m fits.process_fit FIT`
learns from a pickled `PooledFit` and prints the values to take over.
"""

import pickle
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import NamedTuple

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import csr_array, eye_array, hstack

from fits.pooled_fit import PooledFit
from fits.residual_fit import (
    MAX_PLAUSIBLE_RESIDUAL,
    STUDENT_T_DOF,
    compute_step_residuals,
    describe_runs,
    encode_levels,
    weigh_runs,
)
from planner.core.intervals import Z_SCORE_80PCT
from planner.latency.coefficient_lookup import RELEASE_BOUNDARIES
from planner.latency.measured_residuals import (
    POSITION_COLUMNS,
    USUAL_SEQUENCES,
    OperatingPoint,
    ProcessShape,
    ResidualMetric,
    complete_traits,
    compute_covariance,
    load_process_shapes,
    widen_sigma,
)
from planner.latency.step_model import (
    PROMPT_CORRECTION_SEQUENCES,
    PROMPT_WAIT_SIGMA,
    build_uncorrected_step_model,
    estimate_prompt_share,
)

LEFT_OUT: Mapping[str, float] = {"curve": 1.0, "pair": 1.0, "model": 0.7}
"""What is left out to learn from, and the weight of its likelihood."""
NO_EVIDENCE = 30.0
"""Noise of a run that predicts no other."""
REPORTED = ("curve", "pair", "model", "gpu", "format", "version")
WIDENING = ("curve", "pair", "model", "gpu", "version")
"""What is left out to learn widths from."""
METRIC_COLUMNS: Mapping[ResidualMetric, int] = {"tpot": 1, "ttft": 0}
LEAST_VALUE, FIRST_STEP, LAST_STEP, MAX_SWEEPS = 1e-3, 0.6, 0.15, 6
"""Least standard deviation that is told from nothing; steps of ln, and sweeps, of the search."""


class _LeftOut(NamedTuple):
    """Predictions of runs from the rest of their engine, [runs]."""

    errors: np.ndarray  # ln(measured / predicted), with what runs say of this very load
    sigma: np.ndarray
    corrected: np.ndarray  # as predictions are corrected: prompts alike at all loads


class _EngineRuns:
    """The runs of one engine with a metric, and the residuals that remain where each group is left out."""

    def __init__(
        self,
        fit: PooledFit,
        engine: str,
        metric: ResidualMetric,
        kinds: Iterable[str] = LEFT_OUT,
    ) -> None:
        steps, noise, ttft = compute_step_residuals(fit)
        residuals = steps if metric == "tpot" else ttft
        self.engine, self.metric, column = engine, metric, METRIC_COLUMNS[metric]
        runs = fit.pool.runs
        own = np.array([run.deployment.engine.name == engine for run in runs])
        self.known = np.flatnonzero(own & np.isfinite(residuals))
        rows = [describe_runs([runs[k]])[0] for k in self.known]
        self.rows = [complete_traits(engine, row) for row in rows]
        self.positions = np.log([[float(row[name]) for name in POSITION_COLUMNS] for row in rows])
        self.residuals = residuals[self.known]
        self.noise = noise[column][self.known]
        self.waits = np.array(
            [
                estimate_prompt_share(
                    build_uncorrected_step_model(run.deployment.with_replicas(1), None),
                    run.workload,
                    float(np.exp(position[0])),
                )
                for run, position in zip((runs[k] for k in self.known), self.positions, strict=True)
            ]
        )
        before = fit.compute_physics_errors()[self.known, column]
        self.groups = {
            kind: np.array([runs[k].holdout_groups[kind] for k in self.known]) for kind in kinds
        }
        self.changes = {
            (kind, label): np.nan_to_num(
                before
                - fit.compute_physics_errors(
                    np.array([run.holdout_groups[kind] == label for run in runs])
                )[self.known, column]
            )
            for kind, labels in self.groups.items()
            for label in np.unique(labels)
        }

    @lru_cache(maxsize=1)  # noqa: B019 - what is left out differs, the covariance does not
    def _solve(self, shape_text: str) -> tuple[np.ndarray, ...]:
        """Return codes, cross-covariance at the usual load, noise and inverse covariance."""
        shape = ProcessShape.model_validate_json(shape_text)
        codes = encode_levels(self.rows, shape)
        prior = compute_covariance(shape, (self.positions,) * 2, (codes, codes))
        cross = prior
        if self.metric == "ttft":
            usual = self.positions.copy()
            usual[:, 0] = np.log(PROMPT_CORRECTION_SEQUENCES)
            cross = compute_covariance(shape, (usual, self.positions), (codes, codes))
        noise = weigh_runs(prior, self.residuals, shape.noise * self.noise)
        noise[np.abs(self.residuals) > MAX_PLAUSIBLE_RESIDUAL[self.metric]] = NO_EVIDENCE
        return codes, cross, noise, np.linalg.inv(prior + np.diag(noise**2))

    def predict_left_out(self, shape: ProcessShape, kind: str) -> _LeftOut:
        """Predict each group from the others."""
        codes, cross, noise, inverse = self._solve(shape.model_dump_json())
        errors, sigma, corrected = (np.empty(len(noise)) for _ in range(3))
        for label in np.unique(self.groups[kind]):
            is_out = self.groups[kind] == label
            out = np.flatnonzero(is_out)
            residuals = self.residuals + self.changes[kind, label]
            block = np.linalg.inv(inverse[np.ix_(out, out)])
            pull = inverse @ residuals
            errors[out] = block @ pull[out]
            others = pull - inverse[:, out] @ errors[out]  # 0 for those that are out
            corrected[out] = residuals[out] - cross[out] @ others
            variance = np.diag(block) - noise[out] ** 2 + (shape.noise * self.noise[out]) ** 2
            for level, groups in zip(shape.levels.values(), codes, strict=True):
                variance += level.unseen**2 * ~np.isin(groups[out], groups[~is_out])
            sigma[out] = np.sqrt(np.maximum(variance, 1e-4))
        return _LeftOut(errors, sigma, corrected)

    def compute_spread(self, found: _LeftOut) -> np.ndarray:
        """Compute the standard deviations of predictions before their widths, [runs]."""
        if self.metric == "tpot":
            return np.asarray(np.hypot(found.sigma, PROMPT_WAIT_SIGMA * self.waits))
        return np.asarray(np.hypot(found.sigma, found.corrected - found.errors))

    def list_width_features(self) -> np.ndarray:
        """List what widths depend on: engine, kind of layout, ln of the sequences, [runs, features]."""
        kinds = np.array([row["layout_kind"] for row in self.rows])
        is_kind = [kinds == kind for kind in WIDTH_LAYOUTS]
        is_engine = [np.full(len(kinds), self.engine == name) for name in RELEASE_BOUNDARIES]
        load = np.maximum(self.positions[:, 0] - np.log(USUAL_SEQUENCES), 0.0)
        return np.column_stack([*is_engine, *is_kind, load]).astype(float)


WIDTH_LAYOUTS = ("dp", "pp")
"""Kinds of layout with a width of their own."""


def compute_loss(shape: ProcessShape, engines: Sequence[_EngineRuns]) -> float:
    """Compute the mean negative log likelihood of what is left out, up to a constant."""
    total = 0.0
    for kind, weight in LEFT_OUT.items():
        found = [runs.predict_left_out(shape, kind) for runs in engines]
        errors, scale = (np.concatenate([each[k] for each in found]) for k in (0, 1))
        scale *= 0.8  # a Student-t with this scale has about that 80% interval
        t = np.log1p((errors / scale) ** 2 / STUDENT_T_DOF)
        total += weight * float(np.mean(np.log(scale) + (STUDENT_T_DOF + 1) / 2 * t))
    return total


def _list_values(shape: ProcessShape) -> np.ndarray:
    levels = [value for level in shape.levels.values() for value in (level.offset, level.varying)]
    return np.log(np.maximum([*levels, *shape.length_scales, shape.noise], LEAST_VALUE))


def _build_shape(values: np.ndarray, like: ProcessShape) -> ProcessShape:
    numbers, count = np.exp(values).tolist(), 2 * len(like.levels)
    levels = {
        name: level.model_copy(update={"offset": numbers[2 * k], "varying": numbers[2 * k + 1]})
        for k, (name, level) in enumerate(like.levels.items())
    }
    learned = {
        "levels": levels,
        "length_scales": tuple(numbers[count:-1]),
        "noise": numbers[-1],
    }
    return like.model_copy(update=learned)


def learn_shape(start: ProcessShape, engines: Sequence[_EngineRuns]) -> ProcessShape:
    """Learn a covariance, one value after the other, with steps that shrink where none helps."""
    values = _list_values(start)
    steps, best = np.full(len(values), FIRST_STEP), compute_loss(start, engines)
    # levels that only say what is unseen stay so
    steps[np.flatnonzero(values <= np.log(LEAST_VALUE))] = 0.0
    for _ in range(MAX_SWEEPS):
        for k in np.flatnonzero(steps >= LAST_STEP).tolist():
            for change in (steps[k], -steps[k]):
                trial = values.copy()
                trial[k] = max(trial[k] + change, np.log(LEAST_VALUE))
                loss = compute_loss(_build_shape(trial, start), engines)
                if loss < best - 1e-4:
                    best, values, steps[k] = loss, trial, 1.2 * abs(change)
                    break
            else:
                steps[k] *= 0.45
    return _build_shape(values, start)


def learn_widths(shape: ProcessShape, engines: Sequence[_EngineRuns]) -> ProcessShape:
    """Learn by what intervals are wider where, so that they hold 80% of what is left out.

    The 80% quantile of ln(|error| / half-width) is linear in engine, layout and ln of the load
    (Koenker and Bassett, "Regression quantiles", 1978). No kind of layout is more certain than the
    usual ones, which have more runs.
    """
    features, ratios = [], []
    for runs, kind in product(engines, WIDENING):
        found = runs.predict_left_out(shape, kind)
        sizes = np.maximum(np.abs(found.corrected), 1e-4)
        features.append(runs.list_width_features())
        ratios.append(np.log(sizes / (Z_SCORE_80PCT * runs.compute_spread(found))))
    x, y = np.concatenate(features), np.concatenate(ratios)
    count, width = x.shape
    cost = np.concatenate([np.zeros(2 * width), np.full(count, 0.8), np.full(count, 0.2)])
    balance = hstack([csr_array(x), csr_array(-x), eye_array(count), -eye_array(count)])
    solved = linprog(cost, A_eq=balance, b_eq=y).x
    weights = solved[:width] - solved[width : 2 * width]
    names = (*RELEASE_BOUNDARIES, *WIDTH_LAYOUTS)
    weights[len(RELEASE_BOUNDARIES) : -1] = np.maximum(weights[len(RELEASE_BOUNDARIES) : -1], 0.0)
    widths = dict(zip(names, np.exp(weights[:-1]).round(2).tolist(), strict=True))
    return shape.model_copy(update={"widths": widths, "load": round(float(weights[-1]), 3)})


def summarize_left_out(fit: PooledFit) -> dict[str, dict[str, dict[str, dict[str, float]]]]:
    """Summarize errors and intervals by engine, what was left out, and metric.

    The score is that of Winkler (1972) for an 80% interval of ln(measured / predicted): its width,
    plus ten times what lies outside.
    """
    summary: dict[str, dict[str, dict[str, dict[str, float]]]] = {}
    for engine, metric in product(RELEASE_BOUNDARIES, METRIC_COLUMNS):
        runs, shape = _EngineRuns(fit, engine, metric, REPORTED), load_process_shapes()[metric]
        points = [
            OperatingPoint(engine, tuple(row.items()), tuple(position))
            for row, position in zip(runs.rows, runs.positions.tolist(), strict=True)
        ]
        for kind in REPORTED:
            found = runs.predict_left_out(shape, kind)
            sizes = np.abs(found.corrected)
            spreads = zip(points, runs.compute_spread(found).tolist(), strict=True)
            reach = Z_SCORE_80PCT * np.array(
                [widen_sigma(point, metric, spread) for point, spread in spreads]
            )
            summary.setdefault(engine, {}).setdefault(kind, {})[metric] = {
                "runs": len(sizes),
                "median": round(float(np.expm1(np.median(sizes))), 4),
                "mean": round(float(np.expm1(sizes).mean()), 4),
                "inside": round(float(np.mean(sizes <= reach)), 3),
                "width": round(float(np.exp(2 * np.median(reach))), 2),
                "score": round(float(np.mean(2 * reach + 10 * np.maximum(sizes - reach, 0))), 2),
            }
    return summary


if __name__ == "__main__":
    pooled: PooledFit = pickle.loads(Path(sys.argv[1]).read_bytes())
    for name in METRIC_COLUMNS:
        measured = [_EngineRuns(pooled, engine, name) for engine in RELEASE_BOUNDARIES]
        learned = learn_shape(load_process_shapes()[name], measured)
        measured = [_EngineRuns(pooled, engine, name, WIDENING) for engine in RELEASE_BOUNDARIES]
        print(name, learn_widths(learned, measured))
