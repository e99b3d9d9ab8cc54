"""Measured speed-ups of speculative decoding, and the host's costs fitted to them, whole models left out:

`python -m planner.calibration.speculation_fit` prints both.

`catalogs/validation/speculation.csv` holds what was measured with and without drafts, on one
machine, with the tokens that a step yielded. Left out: Llama-4-Scout of SpecForge's bundle (many of
its plain steps take longer than those that verify), trees of drafts, and engines that lost their
CUDA graphs by drafting (vLLM issues 35387, 49547: such a step takes three to five times as long as
a plain one). The costs of `catalogs/drafting.yaml` are fitted beside the plain steps that were
measured, so that they hold whatever the planner makes of those.
"""

from functools import cache, cached_property
from itertools import product

import numpy as np
import pandas as pd
from pydantic import PositiveFloat, PositiveInt

from planner.core.catalog import SourcedEntry, load_catalog_rows
from planner.engines.deployment import Deployment, SpeculationConfig, deploy_on
from planner.latency.speculative_decoding import (
    SpeculationSpeedup,
    estimate_step_s,
    evaluate_speculation,
    infer_acceptance_rate,
)

SPECULATION_RUNS_FILE = "validation/speculation.csv"
STEP_COST_GRID_US, PASS_COST_GRID_US = np.arange(0, 4001, 200), np.arange(0, 1201, 100)
"""Costs of the host that the fit tries, microseconds."""
MAX_COUNTED_ERROR = 0.15
"""An error above this counts as this in the fit: such a machine's host, or such a model's experts, are their own."""


class MeasuredSpeculationRun(SourcedEntry):
    """One line of the catalog: decoding of `batch` sequences with and without drafts on the same machine.

    `plain_ms` is what a step took without. SpecForge states neither release, GPU nor layout: SGLang
    0.5.10, whose step costs suit the plain steps, H200, as few as hold the model; nor lengths: its
    questions and answers are short.
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
        """What ran, with the acceptance that yields the measured tokens a step."""
        rate = infer_acceptance_rate(min(self.tokens_per_step, self.k + 1), self.k)
        return deploy_on(
            self.model, self.gpu, tp=self.tp, engine=self.engine,
            engine_version=self.engine_version or None,
            max_model_len=8192, speculation=SpeculationConfig(self.method, self.k, rate),
        )  # fmt: skip

    @property
    def predicted_speedup(self) -> SpeculationSpeedup:
        """What the planner says of it."""
        return evaluate_speculation(self.deployment, self.batch, self.context)

    @cached_property
    def device_ms(self) -> tuple[float, float]:
        """Milliseconds that verifying adds to the plain step on the GPU, and of one pass over the draft there."""
        plain, verify, whole = (
            float(s) * 1e3
            for s in estimate_step_s(self.deployment, self.batch, self.context, (0, 0))
        )
        return verify - plain, (whole - verify) / self.k


@cache
def load_speculation_runs() -> tuple[MeasuredSpeculationRun, ...]:
    """All lines of the catalog."""
    return load_catalog_rows(SPECULATION_RUNS_FILE, MeasuredSpeculationRun)


def compute_speedup_error(run: MeasuredSpeculationRun, step_us: float, pass_us: float) -> float:
    """ln(predicted / measured) of a speed-up beside the measured plain step, with these costs of the host."""
    added, drafted = run.device_ms
    step = run.plain_ms + added + step_us * 1e-3 + run.k * max(drafted, pass_us * 1e-3)
    return float(np.log(run.tokens_per_step * run.plain_ms / step / run.speedup))


@cache
def fit_host_costs(runs: tuple[MeasuredSpeculationRun, ...]) -> tuple[int, int]:
    """(step_us, pass_us) with the least mean of absolute errors up to `FAR`, every model counted once."""
    models: dict[str, list[MeasuredSpeculationRun]] = {}
    for run in runs:
        models.setdefault(run.model, []).append(run)

    def error(costs: tuple[int, int]) -> float:
        each = (
            np.mean(
                [min(abs(compute_speedup_error(run, *costs)), MAX_COUNTED_ERROR) for run in its]
            )
            for its in models.values()
        )
        return float(np.mean(list(each)))

    return min(product(map(int, STEP_COST_GRID_US), map(int, PASS_COST_GRID_US)), key=error)


def evaluate_speculation_holdout() -> pd.DataFrame:
    """A row for every run, and its speed-up's errors: as predicted, and with the host's costs fitted without its model.

    `error` is of the planner as it is, `beside` of the same beside the measured plain step.
    """
    told = []
    for run in load_speculation_runs():
        others = tuple(
            measured_speculation_run
            for measured_speculation_run in load_speculation_runs()
            if measured_speculation_run.engine == run.engine
            and measured_speculation_run.model != run.model
        )
        costs, interval, deployment = (
            fit_host_costs(others),
            run.predicted_speedup.speedup,
            run.deployment,
        )
        plain, _, whole = estimate_step_s(
            deployment, run.batch, run.context, (costs[0] * 1e-6, costs[1] * 1e-6)
        )
        told.append({
            "family": run.family, "model": run.model, "engine": run.engine,
            "within": interval.lo <= run.speedup <= interval.hi,
            "error": interval.mid / run.speedup - 1,
            "error, model left out": run.tokens_per_step * float(plain / whole) / run.speedup - 1,
            "beside, model left out": np.expm1(compute_speedup_error(run, *costs)),
        })  # fmt: skip
    return pd.DataFrame(told)


def summarize_errors(frame: pd.DataFrame, by: str) -> pd.DataFrame:
    """Median and 90th percentile of the absolute errors, and the share within the 80% interval."""
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
