"""Write the calibration catalogs of all engines from a pooled fit of all runs: `make fit`."""

from collections.abc import Mapping
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from planner.calibration.pooled_fit import (
    ATTENTION_DP,
    COMMON_PRIORS,
    INTERVAL_METRICS,
    RATE_METRIC_INDEX,
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
    RELEASE_BOUNDARIES,
    load_calibration_catalog,
    look_up_coefficients,
)

MIN_EFFECT_CHANGE, MIN_PACE_CHANGE = 0.02, 0.002
"""Factors closer to 1 get no entry. The limit is lower for the pace, which scales the entire step.
"""


def build_calibration_catalog(fit: PooledFit, engine: str, date: str) -> dict[str, Any]:
    """Return the entries of an engine's calibration catalog by name."""
    pool = fit.pool
    runs = [run for run in pool.runs if run.deployment.engine.name == engine]
    effects = dict(zip(pool.effects, fit.effect_logs.tolist(), strict=True))

    def sum_effects(*places: tuple[str, str]) -> dict[str, float]:
        total = {
            name: sum(effects.get((*place, name), 0.0) for place in places) for name in pool.names
        }
        return {name: value for name, value in total.items() if value}

    newest = f"{engine}|"  # the era above the last boundary
    start = sum_effects(("common", ""), ("engine", engine), ("release", newest))
    common = {
        "coefficients": {
            name: float(f"{value * np.exp(start.get(name, 0)):.4g}")
            for name, (value, _) in COMMON_PRIORS.items()
        },
        **{
            f"sigma_{metric}": {
                kind: round(fit.estimate_error_width(engine, kind, column), 3)
                for kind in (
                    ("curve", *NOVELTY_KINDS)
                    if column == RATE_METRIC_INDEX
                    else ("many", "many_version", "curve", *NOVELTY_KINDS)
                )
            }
            for column, metric in INTERVAL_METRICS.items()
            if any(np.isfinite(run.measured[column]) for run in runs)
        },
        "source": f"{len(runs)} public runs, see validation/measured_runs.csv; make fit",
        "date": date,
    }
    entries: dict[str, Any] = {"common": common}

    def add(
        name: str,
        logs: Mapping[str, float],
        conditions: Mapping[str, object],
        always: bool = False,
    ) -> None:
        changes = {
            key: value
            for key, value in logs.items()
            if abs(value) > (MIN_PACE_CHANGE if key == "pace" else MIN_EFFECT_CHANGE)
        }
        factors = {key: round(float(np.exp(value)), 3) for key, value in changes.items()}
        if factors or always:
            entries[name] = {**conditions, **({"times": factors} if factors else {})}

    def subtract(older: dict[str, float], latest: dict[str, float]) -> dict[str, float]:
        return {name: older.get(name, 0) - latest.get(name, 0) for name in older | latest}

    bounds = RELEASE_BOUNDARIES[engine]
    latest = sum_effects(("release", newest))
    measured = {run.effect_groups["release"] for run in runs}
    for bound in bounds:
        if f"{engine}|{bound}" in measured:
            add(
                f"before {bound}",
                subtract(sum_effects(("release", f"{engine}|{bound}")), latest),
                {"before": bound},
            )
    generations = {run.effect_groups["generation"] for run in runs}
    for generation in dict.fromkeys(run.effect_groups["generation"] for run in pool.runs):
        latest = sum_effects(("release generation", f"{newest}|{generation}"))
        own = sum_effects(
            ("generation", generation), ("release generation", f"{newest}|{generation}")
        )
        add(generation, own, {"generation": generation}, always=generation in generations)
        for column, metric in INTERVAL_METRICS.items():
            if spread := fit.describe_spread(engine, column, generation):
                entries[generation][f"spread_{metric}"] = spread
        for bound in bounds:
            if older := sum_effects(("release generation", f"{engine}|{bound}|{generation}")):
                conditions = {"generation": generation, "before": bound}
                add(f"{generation} before {bound}", subtract(older, latest), conditions)
    if any(run.spread_group == ATTENTION_DP for run in runs):
        entries[ATTENTION_DP] = {"attention_dp": True} | {
            f"spread_{metric}": spread
            for column, metric in INTERVAL_METRICS.items()
            if (spread := fit.describe_spread(engine, column, ATTENTION_DP))
        }
    for gpu in dict.fromkeys(run.effect_groups["gpu"] for run in pool.runs):
        add(gpu, sum_effects(("gpu", gpu), ("gpu engine", f"{gpu}|{engine}")), {"gpu": gpu})
    for name, effect in load_calibration_catalog(engine).effects.items():
        if effect.kv_cache_dtype != "auto":  # from the recipes; no fit gives it
            entries.setdefault(name, {"gpu": effect.gpu})["kv_cache_dtype"] = effect.kv_cache_dtype
    for family in dict.fromkeys(run.effect_groups["model"] for run in pool.runs):
        own = sum_effects(("model", family), ("model engine", f"{family}|{engine}"))
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
            sum_effects(("model format", label)),
            {"model": family, "quantization": method},
        )
    for label in dict.fromkeys(run.effect_groups["pair"] for run in runs):
        family, method, gpu, _ = label.split("|")
        pair_runs = [run for run in runs if run.effect_groups["pair"] == label]
        versions = sorted(
            {run.deployment.engine.version for run in pair_runs if run.is_release_stated},
            key=Version.parse,
        )
        conditions = {"gpu": gpu, "model": family, "quantization": method}
        name = f"{family} {method} on {gpu}"
        add(name, sum_effects(("pair", label)), conditions, always=True)
        entries[name] |= {
            "points": len(pair_runs),
            "attention_dp_points": sum(run.deployment.layout.dp > 1 for run in pair_runs),
            "curves": fit.count_curves[label],
            "versions": versions,
        }
        layouts = {(run.deployment.layout.tp, run.deployment.layout.dp) for run in pair_runs}
        for tp, dp in sorted(layouts):
            add(
                f"{name}, TP{tp}" + f" x DP{dp}" * (dp > 1),
                sum_effects(("layout", f"{label}|{tp}|{dp}")),
                {**conditions, "tp": tp, "dp": dp},
            )
    return entries


def write_calibration_catalogs(fit: PooledFit, folder: Path = CATALOG_DIR / "calibration") -> None:
    """Write the catalogs of all engines, and the held-out errors of the fit."""
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
    """Replace a catalog's entries with `text`; the comments at its head stay."""
    guide = "".join(
        takewhile(lambda line: line.startswith("#"), read_text(path).splitlines(keepends=True))
    )
    with replace_atomically(path) as (part,):
        part.write_text(f"{guide}\n{text}", encoding="utf-8")


class _CatalogDumper(yaml.SafeDumper):
    """Write lists and mappings of plain values on one line, with a blank line between entries."""

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
    fitted = fit_pooled(load_measured_runs(), report=print)
    write_calibration_catalogs(fitted)
    report = {**fitted.summarize(), "TPOT of held-out pairs": fitted.summarize_hardware()}
    print(yaml.dump(report, sort_keys=False, Dumper=_CatalogDumper))
