"""Fit the step cost's coefficients to measured runs, starting from what the catalog knows of that GPU and engine.

A coefficient moves as far as the measurements pull it: each has a lognormal prior around the catalog's value. Residuals
are ln(predicted / measured) of mean TPOT and TTFT under a Student-t loss (4 degrees of freedom), so that a few bad runs
do no harm; Gauss-Newton with Levenberg's damping on the coefficients' logarithms.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import yaml

from planner.coefficients import Calibration, Coefficients, calibration_of, calibrations, coefficient_names
from planner.deployment import Deployment
from planner.latency import step_model
from planner.memory import plan
from planner.quantities import Z80, PlannerError
from planner.steady import closed_loop, open_loop
from planner.workload import Lengths, Workload

if TYPE_CHECKING:
    import pandas as pd

NOISE_TPOT, NOISE_TTFT = 0.05, 0.15
"""Spread of ln(measured) that no model explains: repeats of a public point differ by 1-9 % (TPOT) and 4-16 % (TTFT)."""
SPREAD = {
    "memory": 0.05, "memory_fp4": 0.1, "expert_memory": 0.1, "kv": 0.12, "gemm_bf16": 0.1, "gemm_fp8": 0.15,
    "gemm_fp4": 0.2, "expert_gemm": 0.2, "expert_spread": 0.05, "attention": 0.15, "link": 0.15, "allreduce_s": 0.25,
    "kernel_s": 0.25, "token_passes": 0.25, "step_s": 0.35, "row_s": 0.35, "launch_s": 0.35, "request_s": 0.4,
    "prompt_token_s": 0.5,
}  # fmt: skip
"""Prior standard deviation of each coefficient's logarithm around the catalog's value: how much GPUs differ."""
FREEDOM = 4.0


@dataclass(frozen=True)
class Point:
    """One measured run: what ran, under which load, and its mean latencies in seconds (None: not measured)."""

    name: str
    deployment: Deployment
    workload: Workload
    ttft: float | None
    tpot: float | None


@dataclass(frozen=True)
class Fitted:
    """New coefficients for one entry of a calibration catalog, and what they change."""

    entry: str
    engine: str
    before: Coefficients
    after: Coefficients
    points: tuple[Point, ...]
    errors: np.ndarray  # [points, before and after, TTFT and TPOT]: ln(predicted / measured), NaN where not measured
    kv_cache_dtype: str

    def sigma(self, column: int) -> float:
        """Robust standard deviation after the fit, of TTFT (0) or TPOT (1): from the 80th percentile of the errors."""
        left = np.abs(self.errors[:, 1, column])
        left = left[np.isfinite(left)]
        if not len(left):
            return float("nan")
        freed = len(left) / max(len(left) - 3, 1)  # few points look better than they are
        return float(np.quantile(left, 0.8) / Z80 * freed)

    def calibration(self, date: str) -> Calibration:
        """The catalog entry."""
        names = [point.deployment.model.architecture.model_type for point in self.points]
        median = [np.nanmedian(np.abs(np.expm1(self.errors[:, 1, column]))) for column in (1, 0)]
        sigmas = [value if np.isfinite(value) and value > 0 else None for value in (self.sigma(1), self.sigma(0))]
        return Calibration(
            coefficients={name: float(f"{getattr(self.after, name):.3g}") for name in coefficient_names()},
            sigma_tpot=sigmas[0] and max(round(sigmas[0], 3), 0.02),
            sigma_ttft=sigmas[1] and max(round(sigmas[1], 3), 0.05),
            kv_cache_dtype=self.kv_cache_dtype,
            models=tuple(sorted(set(names))),
            points=len(self.points),
            versions=tuple(sorted({point.deployment.engine.version for point in self.points})),
            residuals=f"median after the fit: TPOT {median[0]:.1%}, TTFT {median[1]:.1%}",
            source="planner calibrate on " + ", ".join(sorted({point.name for point in self.points})[:3]),
            date=date,
        )

    def save(self, catalog: Path, date: str) -> None:
        """Put the entry at the end of the calibration file `catalog`, in the place of any before it."""
        text = catalog.read_text(encoding="utf-8") if catalog.exists() else ""
        kept, skipping = [], False
        for line in text.splitlines(keepends=True):
            if line[:1].strip() and not line.startswith("#"):
                skipping = line.startswith(f"{self.entry}:")
            if not skipping:
                kept.append(line)
        entry = self.calibration(date).model_dump(mode="json", exclude_defaults=True)
        added = yaml.safe_dump({self.entry: entry}, sort_keys=False, width=110)
        catalog.write_text("".join(kept).rstrip() + "\n\n" + added, encoding="utf-8")
        calibrations.cache_clear()

    def frame(self) -> pd.DataFrame:
        """One row per run: measured milliseconds and the errors before and after, as fractions."""
        import pandas as pd

        rows = []
        for point, errors in zip(self.points, np.expm1(self.errors), strict=True):
            row: dict[str, object] = {"run": point.name}
            for column, name, value in ((0, "ttft", point.ttft), (1, "tpot", point.tpot)):
                row[f"{name}_ms"] = None if value is None else value * 1e3
                row[f"{name}_before"], row[f"{name}_after"] = errors[0, column], errors[1, column]
            rows.append(row)
        return pd.DataFrame(rows)

    def __str__(self) -> str:
        lines = [f"{self.entry} under {self.engine}, {len(self.points)} runs"]
        for column, name in ((1, "TPOT"), (0, "TTFT")):
            if np.isfinite(self.errors[:, :, column]).any():
                old, new = np.nanmedian(np.abs(np.expm1(self.errors[:, :, column])), axis=0)
                lines.append(f"median error of {name}: {old:.1%} before, {new:.1%} after")
        moved = {name: getattr(self.after, name) / getattr(self.before, name) for name in coefficient_names()}
        for name, factor in sorted(moved.items(), key=lambda item: -abs(np.log(item[1])))[:6]:
            if abs(factor - 1) > 0.02:
                lines.append(f"{name}: {getattr(self.before, name):.3g} -> {getattr(self.after, name):.3g}")
        return "\n".join(lines)


def bench_points(path: Path, deployment: Deployment) -> list[Point]:
    """The runs in a result file of `vllm bench serve --save-result` (several with `--append-result`, one a line).

    Lengths come from `input_lens` and `output_lens` (`--save-detailed`), else from the totals.
    """
    try:
        text = path.read_text(encoding="utf-8")
        runs = [json.loads(text)] if text.count("\n") < 2 else [json.loads(line) for line in text.splitlines() if line]
    except (OSError, UnicodeDecodeError) as error:
        raise PlannerError(f"cannot read {path}: {error}") from None
    except ValueError:
        try:
            runs = [json.loads(text)]
        except ValueError as error:
            raise PlannerError(f"{path.name} is not a benchmark result in JSON: {error}") from None
    found = []
    for number, run in enumerate(runs, 1):
        where = path.name if len(runs) == 1 else f"{path.name}, run {number}"
        try:
            count = int(run["completed"])
            lengths = []
            for side in ("input", "output"):
                each = [length for length in run.get(f"{side}_lens") or [] if length > 0]
                mean = run[f"total_{side}_tokens"] / count
                lengths.append(Lengths.empirical(np.array(each)) if each else Lengths.fixed(max(mean, 1)))
            rate, most = float(run.get("request_rate") or "inf"), run.get("max_concurrency")
            workload = Workload(
                prompt=lengths[0],
                output=lengths[1],
                rate=None if np.isinf(rate) else rate,
                concurrency=int(most) if most else (count if np.isinf(rate) else None),
                burstiness=float(run.get("burstiness") or 1),
                num_prompts=count,
            )
            found.append(Point(where, deployment, workload, run["mean_ttft_ms"] / 1e3, run["mean_tpot_ms"] / 1e3))
        except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
            raise PlannerError(f"{where} is not a result of vllm bench serve: {type(error).__name__} {error}") from None
    return found


def predicted(point: Point, c: Coefficients) -> tuple[float, float]:
    """Mean TTFT and TPOT in seconds of a run, with these coefficients."""
    step, workload = step_model(point.deployment, c), point.workload
    loop = closed_loop if workload.rate is None else open_loop
    found = loop(point.deployment, plan(point.deployment), workload, step)
    return found.ttft["mean"].mid, found.tpot["mean"].mid


def fit(points: Sequence[Point], rounds: int = 12) -> Fitted:
    """The coefficients that measured runs of one GPU and engine ask for; `PlannerError` for a mixture of them."""
    kinds = {(point.deployment.gpu.name, point.deployment.engine.name) for point in points}
    if len(kinds) != 1:
        raise PlannerError(f"calibrate one GPU and engine at a time, got {len(kinds)}: {', '.join(map(str, kinds))}")
    ((entry, engine),) = kinds
    known = calibration_of(points[0].deployment.model, points[0].deployment.gpu, points[0].deployment.engine)
    names, before = coefficient_names(), known.coefficients
    start, width = np.log([getattr(before, name) for name in names]), np.array([SPREAD[name] for name in names])
    measured = np.log([[np.nan if v is None else v for v in (p.ttft, p.tpot)] for p in points])
    noise = np.array([NOISE_TTFT, NOISE_TPOT])

    def errors(logs: np.ndarray) -> np.ndarray:
        c = replace(before, **dict(zip(names, map(float, np.exp(logs)), strict=True)))
        return np.log([predicted(point, c) for point in points]) - measured

    def loss(found: np.ndarray, logs: np.ndarray) -> float:
        unlikely = FREEDOM * np.log1p((found / noise) ** 2 / FREEDOM)
        return float(np.nansum(unlikely) + (((logs - start) / width) ** 2).sum())

    logs, damping = start.copy(), 1e-2
    first = found = errors(logs)
    best = loss(found, logs)
    for _ in range(rounds):
        slope = np.stack([(errors(logs + 0.03 * axis) - found) / 0.03 for axis in np.eye(len(names))], axis=-1)
        use = np.isfinite(found)
        scale = np.broadcast_to(noise, found.shape)[use]
        residual, jacobian = found[use] / scale, slope[use] / scale[:, None]
        weight = 1 / (1 + residual**2 / FREEDOM)
        normal = (jacobian * weight[:, None]).T @ jacobian + np.diag(1 / width**2)
        pull = -jacobian.T @ (weight * residual) - (logs - start) / width**2
        while damping < 1e4:
            trial = logs + np.clip(np.linalg.solve(normal + damping * np.diag(np.diag(normal)), pull), -0.7, 0.7)
            next_found = errors(trial)
            if (cost := loss(next_found, trial)) < best:
                break
            damping *= 5
        else:
            break
        gain, damping = best - cost, damping / 4
        logs, found, best = trial, next_found, cost
        if gain < 1e-3 * best:
            break
    after = replace(before, **dict(zip(names, map(float, np.exp(logs)), strict=True)))
    return Fitted(entry, engine, before, after, tuple(points), np.stack([first, found], axis=1), known.kv_cache_dtype)
