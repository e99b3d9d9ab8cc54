"""The calibration catalogs of all engines, written from a pooled fit of every measured run: `make fit`."""

from collections.abc import Mapping
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from planner.calibration.pooled_fit import (
    COMMON_PRIORS,
    INTERVAL_METRICS,
    RATE_METRIC_INDEX,
    RELEASE_BOUNDARIES,
    PooledFit,
    fit_pooled,
    load_measured_runs,
)
from planner.core.catalog import CATALOG_DIR
from planner.core.files import get_report_date, replace_atomically
from planner.core.readers import read_text
from planner.core.versions import Version
from planner.latency.coefficient_lookup import (
    NOVELTY_KINDS,
    load_calibration_catalog,
    look_up_coefficients,
)

MIN_EFFECT_CHANGE, MIN_PACE_CHANGE = 0.02, 0.002
"""Factors nearer to 1 than this are not worth an entry; of the pace, which is the whole step's, than that."""


def build_calibration_catalog(fit: PooledFit, engine: str, date: str) -> dict[str, Any]:
    pool = fit.pool
    runs = [run for run in pool.runs if run.deployment.engine.name == engine]
    parts = dict(zip(pool.parts, fit.sums.tolist(), strict=True))

    def sums(*places: tuple[str, str]) -> dict[str, float]:
        total = {
            name: sum(parts.get((*place, name), 0.0) for place in places) for name in pool.names
        }
        return {name: value for name, value in total.items() if value}

    newest = max((run.deployment.engine.release, run.effect_groups["release"]) for run in runs)[1]
    start = sums(("common", ""), ("engine", engine), ("release", newest))
    common = {
        "coefficients": {
            name: float(f"{value * np.exp(start.get(name, 0)):.4g}")
            for name, (value, _) in COMMON_PRIORS.items()
        },
        **{
            f"sigma_{metric}": {
                what: round(fit.estimate_error_width(engine, what, column), 3)
                for what in (
                    ("curve", *NOVELTY_KINDS)
                    if column == RATE_METRIC_INDEX
                    else ("many", "curve", *NOVELTY_KINDS)
                )
            }
            for column, metric in INTERVAL_METRICS.items()
            if any(np.isfinite(run.measured[column]) for run in runs)
        },
        "source": f"{len(runs)} public runs, see validation/measured_runs.csv; make fit",
        "date": date,
    }
    made: dict[str, Any] = {"common": common}

    def add(
        name: str, of: Mapping[str, float], conditions: Mapping[str, object], always: bool = False
    ) -> None:
        told = {
            key: value
            for key, value in of.items()
            if abs(value) > (MIN_PACE_CHANGE if key == "pace" else MIN_EFFECT_CHANGE)
        }
        times = {key: round(float(np.exp(value)), 3) for key, value in told.items()}
        if times or always:
            made[name] = {**conditions, **({"times": times} if times else {})}

    def change(older: dict[str, float], latest: dict[str, float]) -> dict[str, float]:
        return {name: older.get(name, 0) - latest.get(name, 0) for name in older | latest}

    bounds, latest, measured = (
        RELEASE_BOUNDARIES[engine],
        sums(("release", newest)),
        {run.effect_groups["release"] for run in runs},
    )
    for bound in bounds:
        if f"{engine}|{bound}" in measured:
            add(
                f"before {bound}",
                change(sums(("release", f"{engine}|{bound}")), latest),
                {"before": bound},
            )
    era, generations = newest.partition("|")[2], {run.effect_groups["generation"] for run in runs}
    for generation in dict.fromkeys(run.effect_groups["generation"] for run in pool.runs):
        latest = sums(("release generation", f"{engine}|{era}|{generation}"))
        own = sums(
            ("generation", generation), ("release generation", f"{engine}|{era}|{generation}")
        )
        add(generation, own, {"generation": generation}, always=generation in generations)
        for column, metric in INTERVAL_METRICS.items():
            if spread := fit.generation_spreads.get((engine, column, generation)):
                made[generation][f"spread_{metric}"] = round(spread, 2)
        for bound in bounds:
            if older := sums(("release generation", f"{engine}|{bound}|{generation}")):
                conditions = {"generation": generation, "before": bound}
                add(f"{generation} before {bound}", change(older, latest), conditions)
    for gpu in dict.fromkeys(run.effect_groups["gpu"] for run in pool.runs):
        add(gpu, sums(("gpu", gpu), ("gpu engine", f"{gpu}|{engine}")), {"gpu": gpu})
    for name, effect in load_calibration_catalog(engine).effects.items():
        if effect.kv_cache_dtype != "auto":  # is a fact of the recipes, which no fit finds
            made.setdefault(name, {"gpu": effect.gpu})["kv_cache_dtype"] = effect.kv_cache_dtype
    for family in dict.fromkeys(run.effect_groups["model"] for run in pool.runs):
        own = sums(("model", family), ("model engine", f"{family}|{engine}"))
        add(
            family,
            own,
            {"model": family},
            always=any(run.effect_groups["model"] == family for run in runs),
        )
    for label in dict.fromkeys(run.effect_groups["model format"] for run in runs):
        family, method = label.split("|")
        add(
            f"{family} {method}",
            sums(("model format", label)),
            {"model": family, "quantization": method},
        )
    for label in dict.fromkeys(run.effect_groups["pair"] for run in runs):
        family, method, gpu, _ = label.split("|")
        mine = [run for run in runs if run.effect_groups["pair"] == label]
        versions = sorted({run.deployment.engine.version for run in mine}, key=Version.parse)
        conditions = {"gpu": gpu, "model": family, "quantization": method}
        name = f"{family} {method} on {gpu}"
        add(name, sums(("pair", label)), conditions, always=True)
        made[name] |= {"points": len(mine), "curves": fit.count_curves[label], "versions": versions}
        for tp in sorted({run.deployment.layout.tp for run in mine}):
            add(f"{name}, TP{tp}", sums(("layout", f"{label}|{tp}")), {**conditions, "tp": tp})
    return made


def write_calibration_catalogs(fit: PooledFit, folder: Path = CATALOG_DIR / "calibration") -> None:
    """Write the catalogs of all engines, and how far off their fit is on what it went without."""
    tables = {
        f"{engine}.yaml": build_calibration_catalog(fit, engine, f"{get_report_date():%Y-%m-%d}")
        for engine in RELEASE_BOUNDARIES
    }
    for name, entries in {**tables, "../validation/held_back.yaml": fit.summarize()}.items():
        replace_catalog_entries(
            folder / name, yaml.dump(entries, sort_keys=False, width=110, Dumper=_CatalogDumper)
        )
    load_calibration_catalog.cache_clear()
    look_up_coefficients.cache_clear()


def replace_catalog_entries(path: Path, text: str) -> None:
    """Put `text` in the place of a catalog's entries, below the guide that stands above them."""
    guide = "".join(
        takewhile(lambda line: line.startswith("#"), read_text(path).splitlines(keepends=True))
    )
    with replace_atomically(path) as (part,):
        part.write_text(f"{guide}\n{text}", encoding="utf-8")


class _CatalogDumper(yaml.SafeDumper):
    """Lists and mappings of plain values on one line, an empty line between entries."""

    def represent_mapping(self, tag: str, mapping: Any, flow_style: bool | None = None) -> Any:
        plain = all(not isinstance(value, dict | list) for value in mapping.values())
        return super().represent_mapping(tag, mapping, flow_style=plain and "source" not in mapping)

    def write_line_break(self, data: Any = None) -> None:
        super().write_line_break(data)
        if len(self.indents) == 1:
            super().write_line_break()

    def represent_sequence(self, tag: str, sequence: Any, flow_style: bool | None = None) -> Any:
        return super().represent_sequence(tag, sequence, flow_style=True)


if __name__ == "__main__":
    fitted = fit_pooled(load_measured_runs(), tell=print)
    write_calibration_catalogs(fitted)
    print(yaml.dump(fitted.summarize(), sort_keys=False, Dumper=_CatalogDumper))
