"""Score and learn the covariance of `catalogs/calibration/process.yaml`.

Whole curves, pairs of model and GPU, models, GPUs, formats and releases are left out, of the fit to
first order as well, and predicted from the rest of their engine. What is learned makes the residuals
of curves, pairs and models likeliest, under a Student-t likelihood. `PYTHONPATH=tests python -m
fits.process_fit FIT` learns from a pickled `PooledFit` and prints the values to take over.
"""

import pickle
import sys
from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from pathlib import Path

import numpy as np

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
    ProcessShape,
    ResidualMetric,
    complete_traits,
    compute_covariance,
    load_process_shapes,
)
from planner.latency.step_model import PROMPT_CORRECTION_SEQUENCES

LEFT_OUT: Mapping[str, float] = {"curve": 1.0, "pair": 1.0, "model": 0.7}
"""What is left out to learn from, and the weight of its likelihood."""
NO_EVIDENCE = 30.0
"""Noise of a run that predicts no other."""
REPORTED = ("curve", "pair", "model", "gpu", "format", "version")
METRIC_COLUMNS: Mapping[ResidualMetric, int] = {"tpot": 1, "ttft": 0}
LEAST_VALUE, FIRST_STEP, LAST_STEP, MAX_SWEEPS = 1e-3, 0.6, 0.08, 12
"""Least standard deviation that is told from nothing; steps of ln, and sweeps, of the search."""


class _EngineRuns:
    """The runs of one engine with a metric, and the residuals that remain where each group is left out."""

    def __init__(
        self, fit: PooledFit, engine: str, column: int, kinds: Iterable[str] = LEFT_OUT
    ) -> None:
        steps, noise, ttft = compute_step_residuals(fit)
        residuals = steps if column == 1 else ttft
        self.column = column
        runs = fit.pool.runs
        own = np.array([run.deployment.engine.name == engine for run in runs])
        self.known = np.flatnonzero(own & np.isfinite(residuals))
        rows = [describe_runs([runs[k]])[0] for k in self.known]
        self.rows = [complete_traits(engine, row) for row in rows]
        self.positions = np.log([[float(row[name]) for name in POSITION_COLUMNS] for row in rows])
        self.residuals = residuals[self.known]
        self.most = MAX_PLAUSIBLE_RESIDUAL["tpot" if column == 1 else "ttft"]
        self.noise = (noise if column == 1 else np.ones(len(noise)))[self.known]
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

    def predict_left_out(self, shape: ProcessShape, kind: str) -> tuple[np.ndarray, np.ndarray]:
        """Predict each group from the others: errors and standard deviations, [runs]."""
        errors, sigma, _ = self.correct_left_out(shape, kind)
        return errors, sigma

    def correct_left_out(
        self, shape: ProcessShape, kind: str
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Predict as `predict_left_out` does, and return the errors after the correction too.

        TTFT is corrected as with `PROMPT_CORRECTION_SEQUENCES`, whatever the load.
        """
        codes = encode_levels(self.rows, shape)
        prior = compute_covariance(shape, (self.positions,) * 2, (codes, codes))
        usual = self.positions.copy()
        if self.column == METRIC_COLUMNS["ttft"]:
            usual[:, 0] = np.log(PROMPT_CORRECTION_SEQUENCES)
        cross = compute_covariance(shape, (usual, self.positions), (codes, codes))
        noise = weigh_runs(prior, self.residuals, shape.noise * self.noise)
        noise[np.abs(self.residuals) > self.most] = NO_EVIDENCE
        inverse = np.linalg.inv(prior + np.diag(noise**2))
        errors, sigma, corrected = (np.empty(len(prior)) for _ in range(3))
        for label in np.unique(self.groups[kind]):
            out = np.flatnonzero(self.groups[kind] == label)
            residuals = self.residuals + self.changes[kind, label]
            block = np.linalg.inv(inverse[np.ix_(out, out)])
            pull = inverse @ residuals
            errors[out] = block @ pull[out]
            others = pull - inverse[:, out] @ errors[out]  # 0 for those that are out
            corrected[out] = residuals[out] - cross[out] @ others
            variance = np.diag(block) - noise[out] ** 2 + (shape.noise * self.noise[out]) ** 2
            sigma[out] = np.sqrt(np.maximum(variance, 1e-4))
        return errors, sigma, corrected


def compute_loss(shape: ProcessShape, engines: Sequence[_EngineRuns]) -> float:
    """Compute the mean negative log likelihood of what is left out, up to a constant."""
    total = 0.0
    for kind, weight in LEFT_OUT.items():
        pairs = [runs.predict_left_out(shape, kind) for runs in engines]
        errors, sigma = (np.concatenate(each) for each in zip(*pairs, strict=True))
        scale = sigma * 0.8  # a Student-t with this scale has about that 80% interval
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
    return ProcessShape(levels=levels, length_scales=tuple(numbers[count:-1]), noise=numbers[-1])


def learn_shape(start: ProcessShape, engines: Sequence[_EngineRuns]) -> ProcessShape:
    """Learn a covariance, one value after the other, with steps that shrink where none helps."""
    values = _list_values(start)
    steps, best = np.full(len(values), FIRST_STEP), compute_loss(start, engines)
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


def summarize_left_out(fit: PooledFit) -> dict[str, dict[str, dict[str, dict[str, float]]]]:
    """Summarize errors and intervals by engine, what was left out, and metric.

    The score is that of Winkler (1972) for an 80% interval of ln(measured / predicted): its width,
    plus ten times what lies outside.
    """
    summary: dict[str, dict[str, dict[str, dict[str, float]]]] = {}
    for engine, (metric, column) in product(RELEASE_BOUNDARIES, METRIC_COLUMNS.items()):
        runs, shape = _EngineRuns(fit, engine, column, REPORTED), load_process_shapes()[metric]
        for kind in REPORTED:
            errors, sigma, corrected = runs.correct_left_out(shape, kind)
            # what runs say of this load beyond the correction is part of the width
            sizes, reach = np.abs(corrected), Z_SCORE_80PCT * np.hypot(corrected - errors, sigma)
            summary.setdefault(engine, {}).setdefault(kind, {})[metric] = {
                "runs": len(sizes),
                "median": round(float(np.expm1(np.median(sizes))), 4),
                "mean": round(float(np.expm1(sizes).mean()), 4),
                "inside": round(float(np.mean(sizes <= reach)), 3),
                "score": round(float(np.mean(2 * reach + 10 * np.maximum(sizes - reach, 0))), 2),
            }
    return summary


if __name__ == "__main__":
    pooled: PooledFit = pickle.loads(Path(sys.argv[1]).read_bytes())
    for name, its_column in METRIC_COLUMNS.items():
        measured = [_EngineRuns(pooled, engine, its_column) for engine in RELEASE_BOUNDARIES]
        print(name, learn_shape(load_process_shapes()[name], measured))
