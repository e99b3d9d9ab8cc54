"""Measured speed-ups of speculative decoding, and the host's costs fitted to them, whole models left out:

`python -m planner.operations.fits.speculation` prints both.

`catalogs/validation/speculation.csv` holds what was measured with and without drafts, on one machine, with the tokens
that a step yielded. Left out: Llama-4-Scout of SpecForge's bundle (many of its plain steps take longer than those that
verify), trees of drafts, and engines that lost their CUDA graphs by drafting (vLLM issues 35387, 49547: such a step
takes three to five times as long as a plain one). The costs of `catalogs/drafting.yaml` are fitted beside the plain
steps that were measured, so that they hold whatever the planner makes of those.
"""

from functools import cache, cached_property
from itertools import product

import numpy as np
import pandas as pd
from pydantic import PositiveFloat, PositiveInt

from planner.core.catalog import Sourced, rows
from planner.facts.deployment import Deployment, Speculation, deploy_on
from planner.latency.speculation import Speedup, acceptance_from_length, speculate, step_seconds

FILE = "validation/speculation.csv"
STEP_US, PASS_US = np.arange(0, 4001, 200), np.arange(0, 1201, 100)
"""Costs of the host that the fit tries, microseconds."""
FAR = 0.15
"""An error above this counts as this in the fit: such a machine's host, or such a model's experts, are their own."""


class SpeculationRun(Sourced):
    """One line of the catalog: decoding of `batch` sequences with and without drafts on the same machine.

    `plain_ms` is what a step took without. SpecForge states neither release, GPU nor layout: SGLang 0.5.10, whose step
    costs suit the plain steps, H200, as few as hold the model; nor lengths: its questions and answers are short.
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
        rate = acceptance_from_length(min(self.tokens_per_step, self.k + 1), self.k)
        return deploy_on(
            self.model, self.gpu, tp=self.tp, engine=self.engine, engine_version=self.engine_version or None,
            max_model_len=8192, speculation=Speculation(self.method, self.k, rate),
        )  # fmt: skip

    @property
    def predicted(self) -> Speedup:
        """What the planner says of it."""
        return speculate(self.deployment, self.batch, self.context)

    @cached_property
    def fixed(self) -> tuple[float, float]:
        """Milliseconds that verifying adds to the plain step on the GPU, and of one pass over the draft there."""
        plain, verify, whole = (float(s) * 1e3 for s in step_seconds(self.deployment, self.batch, self.context, (0, 0)))
        return verify - plain, (whole - verify) / self.k


@cache
def speculation_runs() -> tuple[SpeculationRun, ...]:
    """All lines of the catalog."""
    return rows(FILE, SpeculationRun)


def beside_measured(run: SpeculationRun, step_us: float, pass_us: float) -> float:
    """ln(predicted / measured) of a speed-up beside the measured plain step, with these costs of the host."""
    added, drafted = run.fixed
    step = run.plain_ms + added + step_us * 1e-3 + run.k * max(drafted, pass_us * 1e-3)
    return float(np.log(run.tokens_per_step * run.plain_ms / step / run.speedup))


@cache
def fit(runs: tuple[SpeculationRun, ...]) -> tuple[int, int]:
    """(step_us, pass_us) with the least mean of absolute errors up to `FAR`, every model counted once."""
    models: dict[str, list[SpeculationRun]] = {}
    for run in runs:
        models.setdefault(run.model, []).append(run)

    def error(costs: tuple[int, int]) -> float:
        each = (np.mean([min(abs(beside_measured(run, *costs)), FAR) for run in its]) for its in models.values())
        return float(np.mean(list(each)))

    return min(product(map(int, STEP_US), map(int, PASS_US)), key=error)


def held_back() -> pd.DataFrame:
    """A row for every run, and its speed-up's errors: as predicted, and with the host's costs fitted without its model.

    `error` is of the planner as it is, `beside` of the same beside the measured plain step.
    """
    told = []
    for run in speculation_runs():
        others = tuple(one for one in speculation_runs() if one.engine == run.engine and one.model != run.model)
        costs, found, deployment = fit(others), run.predicted.speedup, run.deployment
        plain, _, whole = step_seconds(deployment, run.batch, run.context, (costs[0] * 1e-6, costs[1] * 1e-6))
        told.append({
            "family": run.family, "model": run.model, "engine": run.engine,
            "within": found.lo <= run.speedup <= found.hi,
            "error": found.mid / run.speedup - 1,
            "error, model left out": run.tokens_per_step * float(plain / whole) / run.speedup - 1,
            "beside, model left out": np.expm1(beside_measured(run, *costs)),
        })  # fmt: skip
    return pd.DataFrame(told)


def summary(frame: pd.DataFrame, by: str) -> pd.DataFrame:
    """Median and 90th percentile of the absolute errors, and the share within the 80% interval."""
    errors = ["error", "error, model left out", "beside, model left out"]
    sizes = frame[errors].abs().groupby(frame[by])
    high = sizes.quantile(0.9).rename(columns=lambda name: f"{name}, p90")
    return sizes.median().join(high).join(frame.groupby(by)["within"].agg(["mean", "size"])).round(3)


if __name__ == "__main__":
    for engine in sorted({run.engine for run in speculation_runs()}):
        print(engine, "step_us, pass_us:", fit(tuple(run for run in speculation_runs() if run.engine == engine)))
    table = held_back()
    for column in ("family", "model"):
        print(summary(table, column).to_string())
    print(summary(table.assign(all="all"), "all").to_string())
