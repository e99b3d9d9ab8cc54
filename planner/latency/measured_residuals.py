"""What measured runs say beyond the step model: a Gaussian process over ln(measured / predicted).

    ln truth(d, x) = ln step model(d, x) + r(d, x),   r ~ Gaussian process

d is a deployment, x the operating point: ln of the sequences per engine, of the context, of TP, of
the time of a step with one sequence, and of prompt over output tokens. The covariance of two runs
is a sum over the levels of `catalogs/calibration/process.yaml` that both belong to (the same GPU,
model, pair of both, layout, ...): offset^2 + varying^2 exp(-|x - x'|^2 / 2), distances in length
scales. Where runs were measured nearby, the mean corrects the step model and the error is small;
where nothing is shared it is that of all levels together. Rasmussen and Williams, "Gaussian
Processes for Machine Learning" (2006), chapter 2.

`catalogs/calibration/residuals_ENGINE.csv` has the runs (`make fit` writes it). `pull` are their
weights in the mean, K^-1 y; `noise` is each one's own standard deviation.
"""

import csv
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from io import StringIO
from typing import Literal, NamedTuple

import numpy as np
from pydantic import NonNegativeFloat, PositiveFloat

from planner.core.catalog import CATALOG_DIR, StrictEntry, validate_entry
from planner.core.readers import read_text, read_yaml
from planner.core.units import MIB
from planner.core.versions import Version
from planner.engines.deployment import Deployment
from planner.hardware.gpus import get_gpu
from planner.latency.coefficient_lookup import (
    CalibrationBasis,
    find_era,
    find_known_release,
    get_weight_format_name,
)
from planner.models.architecture import DecoderLayer

ResidualMetric = Literal["tpot", "ttft"]
USUAL_SEQUENCES = 64.0
"""Sequences per engine up to which `ProcessShape.load` changes nothing."""
MAX_NEIGHBOURS = 64
"""Runs that share most with what is asked, from which the width of its error comes."""
ROWS_AT_ONCE = 64
"""Rows of a covariance that are compared at once, for memory."""
MAX_RUNS_BYTES = 16 * MIB
SHARED_TRAITS = (
    "version", "gpu", "model_type", "model", "quantization", "attention", "tp", "pp", "dp", "ep",
    "curve",
)  # fmt: skip
"""Columns of a run that levels are made of; `complete_traits` adds what follows from them."""
POSITION_COLUMNS = ("sequences", "context_tokens", "tp", "first_step_s", "prompt_per_output")
NOVELTY_TRAITS: Mapping[str, tuple[str, ...]] = {
    "pair": ("model_type", "quantization", "gpu"), "model": ("model_type",), "gpu": ("gpu",),
    "generation": ("generation",), "format": ("quantization", "generation"), "version": ("era",),
    "attention": ("attention",), "layout": ("layout_kind",),
}  # fmt: skip
"""What may be new about a deployment, and the traits that a measured run would have to share."""


class ProcessLevel(StrictEntry):
    """Runs that share all of `shares` have a residual in common."""

    shares: tuple[str, ...]
    offset: NonNegativeFloat = 0.0  # standard deviation of what is the same at all loads
    varying: NonNegativeFloat = 0.0  # of what changes with the operating point
    unseen: NonNegativeFloat = (
        0.0  # added where no run belongs: what the step model's effects leave open
    )


class ProcessShape(StrictEntry):
    """The covariance of one metric's residuals."""

    levels: dict[str, ProcessLevel]
    length_scales: tuple[PositiveFloat, ...]  # of `POSITION_COLUMNS`, in ln
    noise: PositiveFloat  # standard deviation between repeats of a run
    widths: dict[str, PositiveFloat]  # factors of the deviation, by engine or kind of layout
    load: float  # exponent of the sequences over `USUAL_SEQUENCES` that it grows with

    @cached_property
    def variances(self) -> np.ndarray:
        """[2, levels] of what is the same at all loads, and of what changes with them."""
        deviations = [(level.offset, level.varying) for level in self.levels.values()]
        return np.array(deviations).T ** 2


class OperatingPoint(NamedTuple):
    """A deployment under a load, as the process compares it with measured runs."""

    engine: str
    traits: tuple[tuple[str, str], ...]
    position: tuple[float, ...]  # ln of `POSITION_COLUMNS`


@cache
def load_process_shapes() -> dict[str, ProcessShape]:
    """Load the covariances by metric."""
    file = "calibration/process.yaml"
    return {
        metric: validate_entry(ProcessShape, fields, f"{file}, entry {metric}")
        for metric, fields in read_yaml(CATALOG_DIR / file).items()
    }


def name_attention(layers: Sequence[DecoderLayer]) -> str:
    """Name the kinds of attention and state of a model's layers, joined by +."""
    kinds = set()
    for mixer in (layer.mixer for layer in layers):
        is_sparse = getattr(mixer, "index_heads", 0) or getattr(mixer, "compress", 1) != 1
        within = " sparse" if is_sparse else " window" if getattr(mixer, "window", None) else ""
        name = "LatentAttention" if mixer and mixer.is_latent else type(mixer).__name__
        kinds.add(f"{name}{within}")
    return "+".join(sorted(kinds))


def complete_traits(engine: str, traits: Mapping[str, str]) -> dict[str, str]:
    """Add what follows from a run's columns: its era, the GPU's die and generation, the kind of layout."""
    kinds = {name: int(traits[name]) > 1 for name in ("pp", "dp", "tp")}
    gpu = get_gpu(traits["gpu"])
    return {
        "release": traits["version"],
        **traits,
        "engine": engine,
        "era": find_era(engine, Version.parse(traits["version"])),
        "generation": gpu.kernel_generation,
        "die": gpu.die,
        "layout_kind": next((name for name, is_used in kinds.items() if is_used), "one GPU"),
    }


@lru_cache(maxsize=16_384)
def describe_traits(deployment: Deployment) -> tuple[tuple[str, str], ...]:
    """Return names and values of a deployment's traits; it belongs to no measured curve.

    `version` is the last release at which its kind of model was measured, `release` the engine's.
    """
    model, layout, engine = deployment.model, deployment.layout, deployment.engine
    known = find_known_release(engine, model.architecture.model_type)
    traits = complete_traits(
        engine.name,
        {
            "version": known.plain, "release": engine.release.plain,
            "gpu": deployment.gpu.name,
            "model_type": model.architecture.model_type, "model": model.name,
            "quantization": get_weight_format_name(model),
            "attention": name_attention(model.architecture.layers),
            "tp": f"{layout.tp}", "pp": f"{layout.pp}", "dp": f"{layout.dp}", "ep": f"{layout.ep}",
            "curve": "",
        },
    )  # fmt: skip
    return tuple(traits.items())


@dataclass(frozen=True)
class _Runs:
    """The measured runs of an engine that have one metric."""

    rows: list[dict[str, str]]
    positions: np.ndarray  # [runs, positions]
    codes: np.ndarray  # [levels, runs]
    keys: list[dict[tuple[str, ...], int]]  # the code of each group, by level
    noise: np.ndarray  # [runs]
    pull: np.ndarray  # [runs]


@cache
def load_measured_rows(engine: str) -> list[dict[str, str]]:
    """Load the measured runs of an engine, with their traits; none of an engine without any."""
    path = CATALOG_DIR / "calibration" / f"residuals_{engine}.csv"
    if not path.exists():
        return []
    rows = csv.DictReader(StringIO(read_text(path, MAX_RUNS_BYTES), newline=""))
    return [complete_traits(engine, row) for row in rows]


@cache
def _load_runs(engine: str, metric: ResidualMetric) -> _Runs:
    rows = [row for row in load_measured_rows(engine) if row[f"{metric}_pull"]]
    levels = load_process_shapes()[metric].levels.values()
    keys: list[dict[tuple[str, ...], int]] = [{} for _ in levels]
    codes = [
        [found.setdefault(tuple(row[t] for t in level.shares), len(found)) for row in rows]
        for level, found in zip(levels, keys, strict=True)
    ]
    return _Runs(
        rows,
        np.log([[float(row[name]) for name in POSITION_COLUMNS] for row in rows]).reshape(
            len(rows), len(POSITION_COLUMNS)
        ),
        np.array(codes),
        keys,
        np.array([float(row[f"{metric}_noise"]) for row in rows]),
        np.array([float(row[f"{metric}_pull"]) for row in rows]),
    )


def compute_covariance(
    shape: ProcessShape,
    positions: tuple[np.ndarray, np.ndarray],
    codes: tuple[np.ndarray, np.ndarray],
) -> np.ndarray:
    """Compute the prior covariance [n, m] of two sets of points, by their positions and groups.

    `codes` are [levels, n] and [levels, m].
    """
    shared = _compare_groups(shape, *codes)
    return np.asarray(shared[0] + shared[1] * _compare_positions(shape, *positions))


def _compare_positions(shape: ProcessShape, one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Return exp(-|x - x'|^2 / 2), [n, m]."""
    sides = zip(one.T, other.T, shape.length_scales, strict=True)
    return np.asarray(np.exp(-0.5 * sum(((a[:, None] - b) / s) ** 2 for a, b, s in sides)))


def _compare_groups(shape: ProcessShape, one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Return the variances [2, n, m] of the groups that two sets of points share."""
    blocks = [
        np.tensordot(shape.variances, block[:, :, None] == other[:, None, :], 1)
        for block in np.split(one, range(ROWS_AT_ONCE, one.shape[1], ROWS_AT_ONCE), axis=1)
    ]
    return np.concatenate(blocks, axis=1)


@lru_cache(maxsize=1024)
def _relate_traits(
    engine: str, metric: ResidualMetric, traits: tuple[tuple[str, str], ...]
) -> tuple[np.ndarray, np.ndarray, float]:
    """Return the groups [levels] of these traits, new ones negative, and what they share with each run.

    Last comes the variance of such a point before any run, noise included.
    """
    shape, runs, known = load_process_shapes()[metric], _load_runs(engine, metric), dict(traits)
    codes = [
        found.get(tuple(known[trait] for trait in level.shares), -1)
        for level, found in zip(shape.levels.values(), runs.keys, strict=True)
    ]
    new = (
        level.unseen**2
        for level, code in zip(shape.levels.values(), codes, strict=True)
        if code < 0
    )
    prior = float(shape.variances.sum()) + shape.noise**2 + sum(new)
    shared = _compare_groups(shape, np.array(codes)[:, None], runs.codes)[:, 0]
    return np.array(codes), shared, prior


def _relate_to_runs(
    points: Sequence[OperatingPoint], metric: ResidualMetric
) -> tuple[_Runs, np.ndarray]:
    """Return the runs of the points' engine, and the covariance [n, runs] of both."""
    shape, runs = load_process_shapes()[metric], _load_runs(points[0].engine, metric)
    shared = [_relate_traits(point.engine, metric, point.traits)[1] for point in points]
    near = _compare_positions(shape, np.array([point.position for point in points]), runs.positions)
    offsets, varying = np.stack(shared, axis=1)
    return runs, offsets + varying * near


def estimate_mean_residuals(points: Sequence[OperatingPoint], metric: ResidualMetric) -> np.ndarray:
    """Estimate the means [n] of the residuals of points of one engine."""
    runs, cross = _relate_to_runs(points, metric)
    return np.asarray(cross @ runs.pull)


def _explain(engine: str, metric: ResidualMetric, cross: np.ndarray) -> np.ndarray:
    """Return what the runs that share most explain of points, as factors [runs, n] of a covariance."""
    near = np.sort(np.argsort(-cross.max(0), kind="stable")[:MAX_NEIGHBOURS])
    return np.asarray(_whiten_runs(engine, metric, tuple(near.tolist())) @ cross[:, near].T)


@lru_cache(maxsize=512)  # loads and arguments of a layout have the same runs nearby
def _whiten_runs(engine: str, metric: ResidualMetric, near: tuple[int, ...]) -> np.ndarray:
    """Return the inverse Cholesky factor of these runs' covariance, [runs, runs]."""
    shape, runs = load_process_shapes()[metric], _load_runs(engine, metric)
    among, places = runs.codes[:, near], runs.positions[list(near)]
    own = compute_covariance(shape, (places, places), (among, among))
    return np.linalg.inv(np.linalg.cholesky(own + np.diag(runs.noise[list(near)] ** 2)))


@lru_cache(maxsize=65_536)
def estimate_residual(point: OperatingPoint, metric: ResidualMetric) -> tuple[float, float]:
    """Estimate mean and standard deviation of the residual at one operating point."""
    runs, cross = _relate_to_runs([point], metric)
    explained = _explain(point.engine, metric, cross)
    prior = _relate_traits(point.engine, metric, point.traits)[2]
    variance = prior - float((explained**2).sum())
    return float(cross[0] @ runs.pull), math.sqrt(max(variance, 1e-6))


def widen_sigma(point: OperatingPoint, metric: ResidualMetric, *sigmas: float) -> float:
    """Widen the standard deviation that independent ones make at a point, to hold what was left out.

    It is never less than what repeats differ by.
    """
    shape, kind = load_process_shapes()[metric], dict(point.traits)["layout_kind"]
    factors = shape.widths.get(point.engine, 1.0) * shape.widths.get(kind, 1.0)
    factors *= max(math.exp(point.position[0]) / USUAL_SEQUENCES, 1.0) ** shape.load
    return max(factors * math.hypot(*sigmas), shape.noise)


def find_nearest_run(point: OperatingPoint) -> Mapping[str, str] | None:
    """Find the measured run that shares most with `point`; None of an engine without any."""
    runs, cross = _relate_to_runs([point], "tpot")
    return runs.rows[int(cross[0].argmax())] if runs.rows else None


@cache
def _list_measured_traits(engine: str) -> dict[str, set[tuple[str, ...]]]:
    return {
        kind: {tuple(row[name] for name in names) for row in load_measured_rows(engine)}
        for kind, names in NOVELTY_TRAITS.items()
    }


@cache
def list_novelties(engine: str, traits: tuple[tuple[str, str], ...]) -> tuple[str, ...]:
    """List what no measured run of the engine shares with these traits, of `NOVELTY_TRAITS`."""
    asked, measured = dict(traits), _list_measured_traits(engine)
    return tuple(
        kind
        for kind, names in NOVELTY_TRAITS.items()
        if tuple(asked[name] for name in names) not in measured[kind]
    )


def get_basis(point: OperatingPoint) -> CalibrationBasis:
    """Return what the step cost at `point` rests on."""
    new = list_novelties(point.engine, point.traits)
    if not {"pair", "layout"} & set(new):
        return "measured"
    if "gpu" not in new:
        return "model-transfer"
    is_alike = not {"generation", "format", "model", "attention", "layout"} & set(new)
    return "gpu-transfer" if is_alike else "prior"
