"""Compare measured speed-ups of speculative decoding, and fit the host's costs to them.

`python -m fits.speculation_fit` prints both, also with whole models left out.
`catalogs/validation/speculation.csv` holds speed-ups measured on one machine with and without
drafts, and the tokens per step. It leaves out Llama-4-Scout of SpecForge's bundle (many of its
plain steps take longer than those that verify), draft trees, and engines that lost their CUDA
graphs by drafting (vLLM issues 35387, 49547: such a step takes three to five times as long as a
plain one). The costs of `catalogs/drafting.yaml` are fitted on top of the measured plain steps, so
they do not depend on the planner's step costs.
"""

from functools import cache, cached_property
from itertools import product

import numpy as np
import pandas as pd
from pydantic import PositiveFloat, PositiveInt

from fits.catalog_rows import load_catalog_rows
from planner.core.catalog import SourcedEntry
from planner.engines.deployment import Deployment, deploy_on
from planner.engines.layout import SpeculationConfig
from planner.latency.speculative_decoding import (
    SpeculationSpeedup,
    estimate_step_s,
    evaluate_speculation,
    infer_acceptance_rate,
)

SPECULATION_RUNS_FILE = "validation/speculation.csv"
STEP_COST_GRID_US, PASS_COST_GRID_US = np.arange(0, 4001, 200), np.arange(0, 1201, 100)
"""Host costs that the fit tries, microseconds."""
MAX_COUNTED_ERROR = 0.15
"""Largest error that counts in the fit: beyond it, the host or the experts are a special case."""


class MeasuredSpeculationRun(SourcedEntry):
    """One line of the catalog: decoding `batch` sequences with and without drafts on one machine.

    `plain_ms` is the time of a step without drafts. SpecForge states neither release, GPU, layout
    nor lengths. Assumed are SGLang 0.5.10, whose step costs match the plain steps, the fewest H200
    that hold the model, and short prompts and outputs, as its questions and answers are.
    """

    family: str
    model: str
    gpu: str
    tp: PositiveInt
    engine: str
    engine_version: str
    method: str
    k: PositiveInt
    batch: PositiveInt
    context: PositiveInt
    tokens_per_step: PositiveFloat
    plain_ms: PositiveFloat
    speedup: PositiveFloat

    @property
    def deployment(self) -> Deployment:
        """The deployment that ran; its acceptance rate gives the measured tokens per step."""
        rate = infer_acceptance_rate(min(self.tokens_per_step, self.k + 1), self.k)
        return deploy_on(
            self.model, self.gpu, tp=self.tp, engine=self.engine,
            engine_version=self.engine_version or None,
            max_model_len=8192, speculation=SpeculationConfig(self.method, self.k, rate),
        )  # fmt: skip

    @property
    def predicted_speedup(self) -> SpeculationSpeedup:
        """The planner's prediction."""
        return evaluate_speculation(self.deployment, self.batch, self.context)

    @cached_property
    def device_ms(self) -> tuple[float, float]:
        """GPU milliseconds that verification adds to a plain step, and of one draft pass."""
        plain, verify, whole = (
            float(s) * 1e3
            for s in estimate_step_s(self.deployment, self.batch, self.context, (0, 0))
        )
        return verify - plain, (whole - verify) / self.k


@cache
def load_speculation_runs() -> tuple[MeasuredSpeculationRun, ...]:
    """Load all lines of the catalog."""
    return load_catalog_rows(SPECULATION_RUNS_FILE, MeasuredSpeculationRun)


def compute_speedup_error(run: MeasuredSpeculationRun, step_us: float, pass_us: float) -> float:
    """Return ln(predicted / measured) speed-up for these host costs and the measured plain step."""
    added, drafted = run.device_ms
    step = run.plain_ms + added + step_us * 1e-3 + run.k * max(drafted, pass_us * 1e-3)
    return float(np.log(run.tokens_per_step * run.plain_ms / step / run.speedup))


@cache
def fit_host_costs(runs: tuple[MeasuredSpeculationRun, ...]) -> tuple[int, int]:
    """Fit (step_us, pass_us) to the least mean error, with every model counted once.

    Errors are absolute, and count up to `MAX_COUNTED_ERROR`.
    """
    models: dict[str, list[MeasuredSpeculationRun]] = {}
    for run in runs:
        models.setdefault(run.model, []).append(run)

    def error(costs: tuple[int, int]) -> float:
        errors = (
            np.mean(
                [
                    min(abs(compute_speedup_error(run, *costs)), MAX_COUNTED_ERROR)
                    for run in model_runs
                ]
            )
            for model_runs in models.values()
        )
        return float(np.mean(list(errors)))

    return min(product(map(int, STEP_COST_GRID_US), map(int, PASS_COST_GRID_US)), key=error)


def evaluate_speculation_holdout() -> pd.DataFrame:
    """Return every run's speed-up errors, as predicted and with host costs from other models.

    `error` is the planner's own; `beside` starts from the measured plain step.
    """
    rows = []
    for run in load_speculation_runs():
        others = tuple(
            other
            for other in load_speculation_runs()
            if other.engine == run.engine and other.model != run.model
        )
        costs, interval = fit_host_costs(others), run.predicted_speedup.speedup
        plain, _, whole = estimate_step_s(
            run.deployment, run.batch, run.context, (costs[0] * 1e-6, costs[1] * 1e-6)
        )
        rows.append({
            "family": run.family, "model": run.model, "engine": run.engine,
            "within": interval.lo <= run.speedup <= interval.hi,
            "error": interval.mid / run.speedup - 1,
            "error, model left out": run.tokens_per_step * float(plain / whole) / run.speedup - 1,
            "beside, model left out": np.expm1(compute_speedup_error(run, *costs)),
        })  # fmt: skip
    return pd.DataFrame(rows)


def summarize_errors(frame: pd.DataFrame, by: str) -> pd.DataFrame:
    """Return median and 90th percentile of the absolute errors, and the interval coverage."""
    errors = ["error", "error, model left out", "beside, model left out"]
    sizes = frame[errors].abs().groupby(frame[by])
    high = sizes.quantile(0.9).rename(columns=lambda name: f"{name}, p90")
    return (
        sizes.median().join(high).join(frame.groupby(by)["within"].agg(["mean", "size"])).round(3)
    )


if __name__ == "__main__":
    for engine in sorted({run.engine for run in load_speculation_runs()}):
        print(
            engine,
            "step_us, pass_us:",
            fit_host_costs(tuple(run for run in load_speculation_runs() if run.engine == engine)),
        )
    table = evaluate_speculation_holdout()
    for column in ("family", "model"):
        print(summarize_errors(table, column).to_string())
    print(summarize_errors(table.assign(all="all"), "all").to_string())
