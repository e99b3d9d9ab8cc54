"""Compare predictions with public serving points: of shipped curves, and of the pinned cohort."""

from collections.abc import Mapping
from functools import cache
from typing import Literal

import pandas as pd
from pydantic import Field, PositiveFloat, PositiveInt

from planner.core.catalog import CATALOG_DIR, SourcedEntry, load_catalog
from planner.core.errors import add_error_context
from planner.core.intervals import Interval
from planner.core.readers import read_yaml
from planner.engines.deployment import Deployment, deploy_on
from planner.latency.step_model import (
    build_step_model,
)
from planner.planning.simulation_runs import run_short_simulation
from planner.workload.length_distribution import LengthDistribution
from planner.workload.workload import Workload

SERVING_POINTS_FILE = "validation/serving_points.yaml"
SERVING_METRICS = ("TPOT", "TTFT")
COHORT_FILE = CATALOG_DIR / "validation" / "cohort.csv"
COHORT_GROUPS = (
    "engine", "generation", "experts", "attention", "layout", "format", "load", "campaign",
)  # fmt: skip
"""What the pinned cohort is grouped by: `generation` of GPUs, kinds of `attention` and `layout`."""
FULL_KV_USAGE = 0.97
"""Fraction of KV blocks in use from which the KV cache limits the running requests; the rest is
rounding."""


class ServingCurve(SourcedEntry):
    """One entry of the catalog: a deployment, and its mean latencies at several concurrencies."""

    model: str
    gpu: str
    engine: str
    engine_version: str | None = None
    quantization: str | None = None
    tp: PositiveInt = 1
    ep: PositiveInt = 1
    harness: Literal["inferencex"]
    isl: PositiveInt
    osl: PositiveInt
    points: tuple[tuple[PositiveInt, PositiveFloat, PositiveFloat], ...] = Field(min_length=1)

    def build_case(self, concurrency: int) -> tuple[Deployment, Workload]:
        """Return what ran and what InferenceX's scripts sent at this concurrency."""
        deployment = deploy_on(
            self.model, self.gpu, tp=self.tp, ep=self.ep, engine=self.engine,
            engine_version=self.engine_version,
            quantization=self.quantization, gpu_memory_utilization=0.9, enable_prefix_caching=False,
            max_model_len=self.isl + self.osl + 200, max_num_seqs=max(256, concurrency),
        )  # fmt: skip
        prompt, output = (
            LengthDistribution.from_uniform(tokens, 0.8) for tokens in (self.isl, self.osl)
        )
        return deployment, Workload(
            prompt, output, concurrency=concurrency, num_prompts=10 * concurrency
        )


class PeerErrors(SourcedEntry):
    """What another planner publishes of its errors: means of |predicted / measured - 1|, percent."""

    tpot_mean_percent: PositiveFloat
    ttft_mean_percent: PositiveFloat
    points: PositiveInt | None = None

    def to_row(self) -> dict[str, object]:
        """Return the entry as columns of a table."""
        return {
            "points": self.points,
            "TPOT mean (%)": self.tpot_mean_percent,
            "TTFT mean (%)": self.ttft_mean_percent,
            "source": f"{self.source}, {self.date}",
        }


@cache
def load_serving_curves() -> dict[str, ServingCurve]:
    """Load the public curves by label."""
    return load_catalog(SERVING_POINTS_FILE, ServingCurve)


def simulate_serving_points(curves: Mapping[str, ServingCurve] | None = None) -> pd.DataFrame:
    """Simulate the benchmark of each point of `curves` (None: the catalog's), one row per point.

    Columns for TPOT and TTFT: "measured", "predicted" (80% interval, ms), "error" (predicted /
    measured - 1), "inside". Raises `PlannerError` naming the entry whose deployment cannot have
    run.
    """
    rows = []
    for name, curve in (curves or load_serving_curves()).items():
        for point in curve.points:
            with add_error_context(f"{SERVING_POINTS_FILE}, entry {name}"):
                rows.append({"curve": name, **_compare_point(curve, *point)})
    return pd.DataFrame(rows)


def _compare_point(
    curve: ServingCurve, concurrency: int, ttft: float, tpot: float
) -> dict[str, object]:
    """Simulate one point of a curve, and compare its latencies with the measured ones."""
    deployment, workload = curve.build_case(concurrency)
    run = run_short_simulation(deployment, workload, workload.num_requests)
    row: dict[str, object] = {
        "model": curve.model, "GPU": deployment.gpu.name, "engine": curve.engine,
        "concurrency": concurrency, "basis": build_step_model(deployment, workload).basis,
        "pool full": run.mid.compute_kv_usage_quantile(0.99) > FULL_KV_USAGE,
    }  # fmt: skip
    for metric, measured in zip(SERVING_METRICS, (tpot, ttft), strict=True):
        predicted = run.get(metric.lower(), "mean") * 1e3
        row |= {
            f"measured {metric} (ms)": measured,
            f"predicted {metric} (ms)": predicted,
            f"{metric} error": predicted.mid / measured - 1,
            f"{metric} inside": predicted.lo <= measured <= predicted.hi,
        }
    return row


def compute_serving_accuracy(points: pd.DataFrame, by: tuple[str, ...] = ()) -> pd.DataFrame:
    """Return errors and interval coverage in percent, one row per value of the columns `by`.

    `points` come from `simulate_serving_points`.
    """
    rows = []
    groups = points.groupby(list(by), sort=False) if by else [((), points)]
    for values, group in groups:
        row = {**dict(zip(by, values, strict=True)), "points": len(group)}
        for metric in SERVING_METRICS:
            sizes = group[f"{metric} error"].abs() * 100
            row |= {f"{metric} median (%)": sizes.median(), f"{metric} mean (%)": sizes.mean()}
            row[f"{metric} inside (%)"] = group[f"{metric} inside"].mean() * 100
        rows.append(row)
    return pd.DataFrame(rows)


def load_cohort() -> pd.DataFrame:
    """Load the pinned cohort: measured runs, each predicted without its own curve.

    Columns are those of `simulate_serving_points` and `COHORT_GROUPS`. `make cohort` writes the file.
    """
    rows = pd.read_csv(COHORT_FILE)
    points = rows[["model", "curve", *COHORT_GROUPS]].copy()
    for metric in SERVING_METRICS:
        lo, mid, hi = (rows[f"{metric.lower()}_{end}_ms"] for end in ("lo", "mid", "hi"))
        measured = rows[f"measured_{metric.lower()}_ms"]
        points[f"measured {metric} (ms)"] = measured
        points[f"predicted {metric} (ms)"] = pd.Series(list(map(Interval, lo, mid, hi)))
        points[f"{metric} error"] = mid / measured - 1
        points[f"{metric} inside"] = measured.between(lo, hi).where(measured.notna())
    return points


def compute_cohort_accuracy(points: pd.DataFrame) -> pd.DataFrame:
    """Return errors and interval coverage of `load_cohort` by each of `COHORT_GROUPS`."""
    tables = [
        compute_serving_accuracy(points, (by,)).rename(columns={by: "group"}).assign(by=by)
        for by in COHORT_GROUPS
    ]
    table = pd.concat(tables, ignore_index=True)
    table["group"] = table["group"].map(_name_mixers)
    return table[["by", *table.columns.drop("by")]]


def _name_mixers(group: str) -> str:
    """Name a group for readers: the kinds of layers of `name_attention` in words."""
    for kind, words in MIXER_LABELS.items():
        group = group.replace(kind, words)
    return group.replace("+", " + ")


@cache
def load_peer_errors() -> pd.DataFrame:
    """Load the errors that other planners publish of themselves, one row each."""
    peers = load_catalog("validation/peers.yaml", PeerErrors)
    return pd.DataFrame([{"planner": name, **peer.to_row()} for name, peer in peers.items()])


def load_holdout_errors() -> pd.DataFrame:
    """Return the held-out errors of the shipped coefficients, by what was new in the runs."""
    rows = []
    for engine, errors_by_kind in read_yaml(CATALOG_DIR / HOLDOUT_ERRORS_FILE).items():
        for kind, errors in errors_by_kind.items():
            row = {"engine": engine, "new": kind}
            for metric, value in ((metric, errors[metric.lower()]) for metric in SERVING_METRICS):
                row |= {
                    f"{metric} runs": value["runs"],
                    f"{metric} error (%)": value["median"] * 100,
                }
                row[f"{metric} inside (%)"] = value["inside"] * 100
            rows.append(row)
    return pd.DataFrame(rows)


MIXER_LABELS = {
    "GroupedQueryAttention": "full attention", "full attention window": "sliding window",
    "full attention sparse": "sparse attention", "LatentAttention": "latent (MLA)",
    "RecurrentMixer": "recurrent", "NoneType": "no mixer",
}  # fmt: skip
"""Kinds of layers as `name_attention` calls them, and in words; later ones see what earlier ones made."""
HOLDOUT_ERRORS_FILE = "validation/held_back.yaml"
