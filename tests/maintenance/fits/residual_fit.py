"""Write what the step model leaves of each measured run: `catalogs/calibration/residuals_*.csv`.

The covariance is that of `catalogs/calibration/process.yaml`, which `process_fit` learns. Runs far
off count less: their noise is that of a Student-t likelihood, by reweighting.
"""

import csv
from collections.abc import Sequence
from io import StringIO

import numpy as np

from fits.pooled_fit import MeasuredRun, PooledFit
from planner.core.catalog import CATALOG_DIR
from planner.core.files import replace_atomically
from planner.latency.coefficient_lookup import RELEASE_BOUNDARIES, get_deployment_coefficients
from planner.latency.measured_residuals import (
    POSITION_COLUMNS,
    SHARED_TRAITS,
    ProcessShape,
    complete_traits,
    compute_covariance,
    load_process_shapes,
)
from planner.latency.step_model import locate_operating_point

STUDENT_T_DOF, REWEIGHTING_ROUNDS, MAX_RESIDUAL = 4.0, 4, 2.0
MAX_PLAUSIBLE_RESIDUAL = {"tpot": 0.5, "ttft": 1.0}
"""Runs further off ran something else than was written down, or waited for memory."""
MIXED_NOISE = 2.0
"""Noise, relative to that of others, of a run that is a median over several releases.

DeepSeek-V4-Pro on B200 with one request takes 13.2 ms at 0.20.0, 12.5 at 0.21.0 and 10.9 at 0.22.0 of vLLM.
"""
STAND_IN_NOISE = {1: 1.0, 2: 1.5, 3: 1.3}
"""Noise relative to that of TPOT, by the metric that tells it: TPOT, throughput, median ITL."""


def describe_runs(runs: Sequence[MeasuredRun]) -> list[dict[str, str]]:
    """Return traits and position of each run, as columns."""
    rows = []
    for run in runs:
        point = locate_operating_point(run.deployment, run.workload)
        traits = {**dict(point.traits), "curve": run.curve}
        position = dict(zip(POSITION_COLUMNS, np.exp(point.position).tolist(), strict=True))
        rows.append(
            {name: traits[name] for name in SHARED_TRAITS}
            | {name: f"{value:.4g}" for name, value in position.items() if name not in traits}
        )
    return rows


def compute_step_residuals(fit: PooledFit) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Compute ln(measured / predicted) of the catalogs, [runs]: of steps, and of TTFT.

    Between them is the noise of both, [TTFT and steps, runs], relative to that of repeats. Where
    TPOT was not measured, throughput or the median gap tells it. NaN: not measured.
    """
    pool = fit.pool
    coefficients = [get_deployment_coefficients(run.deployment).coefficients for run in pool.runs]
    logs = np.log([[getattr(each, name) for name in pool.names] for each in coefficients])
    errors = pool.measured - pool.predict_logs(logs) - pool.simulation_shift
    steps, noise = np.full(len(errors), np.nan), np.ones(len(errors))
    for column, relative in reversed(STAND_IN_NOISE.items()):
        known = np.isfinite(errors[:, column])
        steps[known] = errors[known, column] * (-1 if column == 2 else 1)
        noise[known] = relative
    mixed = np.where([run.is_mixed for run in pool.runs], MIXED_NOISE, 1.0)
    return (
        np.clip(steps, -MAX_RESIDUAL, MAX_RESIDUAL),
        np.stack([mixed, noise * mixed]),
        np.clip(errors[:, 0], -MAX_RESIDUAL, MAX_RESIDUAL),
    )


def encode_levels(rows: Sequence[dict[str, str]], shape: ProcessShape) -> np.ndarray:
    """Return the group of each run by level, as numbers [levels, runs]."""
    labels = (
        ["|".join(row[trait] for trait in level.shares) for row in rows]
        for level in shape.levels.values()
    )
    return np.array([np.unique(each, return_inverse=True)[1] for each in labels])


def weigh_runs(prior: np.ndarray, residuals: np.ndarray, noise: np.ndarray) -> np.ndarray:
    """Return the noise of each run [runs] under a Student-t likelihood, by reweighting."""
    weights = np.ones(len(residuals))
    for _ in range(REWEIGHTING_ROUNDS):
        pull = np.linalg.solve(prior + np.diag(noise**2 / weights), residuals)
        left = residuals - prior @ pull
        weights = (STUDENT_T_DOF + 1) / (STUDENT_T_DOF + (left / noise) ** 2)
    return np.asarray(noise / np.sqrt(weights))


def write_residuals(fit: PooledFit) -> None:
    """Write the residuals of all runs, by engine, with their weights in the process's mean."""
    rows = describe_runs(fit.pool.runs)
    steps, noise, ttft = compute_step_residuals(fit)
    columns = {"tpot": (steps, noise[1]), "ttft": (ttft, noise[0])}
    for row, measured in zip(rows, np.exp(fit.pool.measured), strict=True):
        row["measured_tpot_ms"] = f"{measured[1] * 1e3:.5g}" if np.isfinite(measured[1]) else ""
    engines = np.array([run.deployment.engine.name for run in fit.pool.runs])
    for engine in RELEASE_BOUNDARIES:
        for metric, (residuals, relative) in columns.items():
            shape = load_process_shapes()[metric]
            is_plausible = np.abs(residuals) <= MAX_PLAUSIBLE_RESIDUAL[metric]
            known = np.flatnonzero((engines == engine) & is_plausible)
            own = [complete_traits(engine, rows[k]) for k in known]
            positions = np.log([[float(row[name]) for name in POSITION_COLUMNS] for row in own])
            codes = encode_levels(own, shape)
            prior = compute_covariance(shape, (positions, positions), (codes, codes))
            own_noise = weigh_runs(prior, residuals[known], shape.noise * relative[known])
            pull = np.linalg.solve(prior + np.diag(own_noise**2), residuals[known])
            for k, its_noise, its_pull in zip(known, own_noise, pull, strict=True):
                rows[k] |= {
                    f"{metric}_noise": f"{its_noise:.3g}",
                    f"{metric}_pull": f"{its_pull:.5g}",
                }
        _write_rows(engine, [rows[k] for k in np.flatnonzero(engines == engine)])


def _write_rows(engine: str, rows: Sequence[dict[str, str]]) -> None:
    text = StringIO()
    names = dict.fromkeys(name for row in rows for name in row)
    writer = csv.DictWriter(text, list(names), restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    with replace_atomically(CATALOG_DIR / "calibration" / f"residuals_{engine}.csv") as (part,):
        part.write_text(text.getvalue(), encoding="utf-8")
