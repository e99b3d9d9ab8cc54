"""Predicted against measured: public serving points kept in `catalogs/validation`, and what the predictions rest on."""

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
from planner.latency.coefficient_lookup import get_deployment_coefficients
from planner.latency.speculative_decoding import build_step_model
from planner.planning.simulation_runs import run_short_simulation
from planner.workload.length_distribution import LengthDistribution
from planner.workload.workload import Workload

SERVING_POINTS_FILE = "validation/serving_points.yaml"
SERVING_METRICS = ("TPOT", "TTFT")
FULL_KV_USAGE = 0.97
"""Share of the KV blocks in use at which the pool, and nothing else, holds requests back: the rest is rounding."""


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
        """What ran, and what was sent, at this concurrency; InferenceX's scripts, as the catalog's head tells."""
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


@cache
def load_serving_curves() -> dict[str, ServingCurve]:
    return load_catalog(SERVING_POINTS_FILE, ServingCurve)


def simulate_serving_points(curves: Mapping[str, ServingCurve] | None = None) -> pd.DataFrame:
    """One row per point of `curves` (None: the catalog's), each benchmark replayed as it was run.

    For TPOT and TTFT: "measured", "predicted" (80% interval, ms), "error" (predicted / measured -
    1), "inside". `PlannerError` naming the entry for a deployment that cannot have run.
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
    deployment, workload = curve.build_case(concurrency)
    run = run_short_simulation(deployment, workload, workload.num_requests)
    row: dict[str, object] = {
        "model": curve.model, "GPU": deployment.gpu.name, "engine": curve.engine,
        "concurrency": concurrency, "basis": build_step_model(deployment).basis,
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
    """Errors and interval coverage of `serving_points` in percent, one row for each value of the columns `by`."""
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


def summarize_serving_accuracy(points: pd.DataFrame) -> str:
    """How far off the predictions of `serving_points` are, in two sentences."""
    (every,) = compute_serving_accuracy(points).to_dict("records")
    full = points[points["pool full"]]
    text = (
        f"Over these {len(points)} points of {points['curve'].nunique()} curves the median error is"
        f" {every['TPOT median (%)']:.1f}% for the mean TPOT and {every['TTFT median (%)']:.0f}%"
        f" for the mean TTFT; {every['TPOT inside (%)']:.0f}% and {every['TTFT inside (%)']:.0f}%"
        " of the 80% intervals hold what was measured."
    )
    if len(full):
        (tight,) = compute_serving_accuracy(full).to_dict("records")
        text += (
            f" At {len(full)} of them the KV pool is full and requests queue for it: there the"
            f" errors are {tight['TPOT median (%)']:.1f}% and {tight['TTFT median (%)']:.0f}%."
        )
    return text


def find_tightest_curve(points: pd.DataFrame, other_than: str = "") -> str:
    """The curve of `serving_points` on which requests were measured to wait longest where the KV pool is full."""
    others = points[points["curve"] != other_than]
    full = others[others["pool full"]]
    return str((full if len(full) else others).sort_values("measured TTFT (ms)")["curve"].iloc[-1])


def find_nearest_curve(
    deployment: Deployment, curves: Mapping[str, ServingCurve] | None = None
) -> str:
    """The curve most like `deployment`: by engine, then GPU, then model family, then as many GPUs."""

    def unlike(item: tuple[str, ServingCurve]) -> tuple[bool, bool, bool, int]:
        other = item[1].build_case(1)[0]
        families = [each.model.architecture.model_type for each in (deployment, other)]
        return (
            other.engine.name != deployment.engine.name,
            other.gpu.name != deployment.gpu.name,
            families[0] != families[1],
            abs(other.layout.num_gpus - deployment.layout.gpus_per_replica),
        )

    return min((curves or load_serving_curves()).items(), key=unlike)[0]


def load_holdout_errors() -> pd.DataFrame:
    """How far off the shipped coefficients are on runs that their fit went without, by what was new in them."""
    rows = []
    for engine, wholes in read_yaml(CATALOG_DIR / HOLDOUT_ERRORS_FILE).items():
        for what, known in wholes.items():
            row = {"engine": engine, "new": what}
            for metric, value in ((metric, known[metric.lower()]) for metric in SERVING_METRICS):
                row |= {
                    f"{metric} runs": value["runs"],
                    f"{metric} error (%)": value["median"] * 100,
                }
                row[f"{metric} inside (%)"] = value["inside"] * 100
            rows.append(row)
    return pd.DataFrame(rows)


def describe_calibration_basis(deployment: Deployment) -> str:
    """What the step costs of `deployment` rest on, and how wide its intervals are for that."""
    gpu, engine, family = (
        deployment.gpu.name,
        deployment.engine,
        deployment.model.architecture.model_type,
    )
    coefficients = get_deployment_coefficients(deployment)
    here = f"{gpu} under {engine.name}"
    basis = {
        "measured": (
            f"on {coefficients.points} measured points of {here}, such models among them"
            f" ({coefficients.note})"
        ),
        "model-transfer": (
            f"on {coefficients.points} measured points of {here}, none of them of a model like this"
            f" ({family})"
        ),
        "gpu-transfer": (
            f"on measurements of other GPUs, for there are none of {here} ({coefficients.note})"
        ),
        "prior": f"on what GPUs have in common, for there are no measurements of {here}",
    }[coefficients.basis]
    new = (
        f" New here: {', '.join(NOVELTY_LABELS[what] for what in coefficients.novelties)}."
        if coefficients.novelties
        else ""
    )
    tpot, ttft = (
        Interval.from_lognormal(1.0, sigma).relative_half_width
        for sigma in (coefficients.sigma_tpot, coefficients.sigma_ttft)
    )
    return (
        f"The step costs of {deployment} rest {basis}.{new} Its 80% intervals reach {tpot} for the"
        f" mean TPOT and {ttft} for the mean TTFT."
    )


HOLDOUT_ERRORS_FILE = "validation/held_back.yaml"
NOVELTY_LABELS = {
    "pair": "this model in this format on this GPU", "model": "models of this kind",
    "gpu": "the GPU",
    "version": "the release",
}  # fmt: skip
"""What may be new in a question, in words."""
