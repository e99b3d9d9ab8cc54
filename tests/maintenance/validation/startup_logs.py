"""Compare planned memory with public startup logs, each planned as it was deployed."""

from functools import cache
from typing import Any

import pandas as pd
from pydantic import PositiveInt

from planner.core.catalog import SourcedEntry, StrictEntry, load_catalog
from planner.core.units import GIB
from planner.engines.deployment import Deployment, deploy_on
from planner.memory.memory_plan import plan_memory


class LoggedMemory(StrictEntry):
    """What a log states: GiB per GPU, and the number of requests of max_model_len."""

    weights: float
    activation: float | None = None
    non_torch: float | None = None
    kv_available: float
    max_concurrency: float | None = None


class PublishedRun(SourcedEntry):
    """A deployment of vLLM whose measurements were published."""

    model: str
    gpu: str
    tp: PositiveInt = 1
    engine_version: str
    args: dict[str, Any]

    @property
    def deployment(self) -> Deployment:
        """The deployment that ran."""
        return deploy_on(
            self.model, self.gpu, tp=self.tp, engine_version=self.engine_version, **self.args
        )


class PublishedLog(PublishedRun):
    """One entry of `catalogs/validation/startup_logs.yaml`."""

    logged: LoggedMemory


@cache
def load_published_logs() -> dict[str, PublishedLog]:
    """Load the public logs by label."""
    return load_catalog("validation/startup_logs.yaml", PublishedLog)


def compute_memory_residuals() -> pd.DataFrame:
    """Return planned (80% interval) and logged weights, KV cache and sequences, one row per log.

    Sizes are in GiB. `error (%)` and `interval (%)` are the logged KV cache and the planned
    interval, both minus the expected value, in percent of the memory budget, of which an operator
    could change 1%.
    """
    rows = []
    for name, run in load_published_logs().items():
        memory, logged = plan_memory(run.deployment), run.logged
        budget, kv = memory.budget_bytes / GIB / 100, memory.kv_available / GIB
        rows.append({
            "log": name, "GPU": memory.deployment.gpu.name,
            "planned weights (GiB)": memory.weights / GIB, "logged weights (GiB)": logged.weights,
            "planned KV (GiB)": kv, "logged KV (GiB)": logged.kv_available,
            "planned sequences": memory.max_concurrency, "logged sequences": logged.max_concurrency,
            "error (%)": (logged.kv_available - kv.mid) / budget,
            "interval (%)": (kv - kv.mid) / budget,
            "inside": kv.lo - 0.005 <= logged.kv_available <= kv.hi + 0.005,
        })  # fmt: skip
    return pd.DataFrame(rows)


def summarize_memory_accuracy(results: pd.DataFrame) -> str:
    """Summarize the mean absolute errors of `compute_memory_residuals` in a sentence."""

    def compute_error(quantity: str) -> float:
        frame = results[results[f"logged {quantity}"].notna()]
        mids = frame[f"planned {quantity}"].map(lambda interval: interval.mid)
        logged = frame[f"logged {quantity}"]
        return float(((mids - logged) / logged).abs().mean())

    weights, kv, sequences = map(compute_error, ("weights (GiB)", "KV (GiB)", "sequences"))
    return (
        f"Over these {len(results)} logs the mean absolute error is {weights:.1%} for the weights,"
        f" {results['error (%)'].abs().mean():.1f}% of the budget for the KV cache ({kv:.1%} of its"
        f" own size) and {sequences:.1%} for the number of full-length sequences;"
        f" {results['inside'].sum()} of the {len(results)} logged KV caches lie in their 80%"
        " interval."
    )
