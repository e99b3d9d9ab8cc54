"""Write the calibration catalogs of all engines from a pooled fit of all runs: `make fit`."""

from collections.abc import Mapping
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from fits.pooled_fit import COMMON_PRIORS, PooledFit, fit_pooled, load_measured_runs
from fits.process_fit import summarize_left_out
from fits.residual_fit import write_residuals
from planner.core.catalog import CATALOG_DIR
from planner.core.files import get_report_date, replace_atomically
from planner.core.readers import read_text
from planner.latency.coefficient_lookup import (
    RELEASE_BOUNDARIES,
    load_calibration_catalog,
    look_up_coefficients,
)

MIN_EFFECT_CHANGE, MIN_PACE_CHANGE = 0.02, 0.002
"""Factors closer to 1 get no entry. The limit is lower for the pace, which scales the entire step.
"""


def build_calibration_catalog(fit: PooledFit, engine: str, date: str) -> dict[str, Any]:
    """Return the entries of an engine's calibration catalog by name."""
    catalog = _EngineCatalog(fit, engine)
    catalog.add_common(date)
    catalog.add_releases()
    catalog.add_generations()
    catalog.add_gpus()
    catalog.add_models()
    return catalog.entries


class _EngineCatalog:
    """The entries of one engine, from the effects of the fit to the runs of all engines."""

    def __init__(self, fit: PooledFit, engine: str) -> None:
        self.fit, self.engine, self.entries = fit, engine, dict[str, Any]()
        self.runs = [run for run in fit.pool.runs if run.deployment.engine.name == engine]
        self.effects = dict(zip(fit.pool.effects, fit.effect_logs.tolist(), strict=True))
        self.bounds = RELEASE_BOUNDARIES[engine]
        self.newest = f"{engine}|"  # the era above the last boundary

    def sum_effects(self, *places: tuple[str, str]) -> dict[str, float]:
        """Return the sum of the logarithms at these places, by coefficient."""
        total = {
            name: sum(self.effects.get((*place, name), 0.0) for place in places)
            for name in self.fit.pool.names
        }
        return {name: value for name, value in total.items() if value}

    def add(
        self,
        name: str,
        logs: Mapping[str, float],
        conditions: Mapping[str, object],
        always: bool = False,
    ) -> None:
        """Add an entry of factors, if one is far enough from 1 or `always`."""
        changes = {
            key: value
            for key, value in logs.items()
            if abs(value) > (MIN_PACE_CHANGE if key == "pace" else MIN_EFFECT_CHANGE)
        }
        factors = {key: round(float(np.exp(value)), 3) for key, value in changes.items()}
        if factors or always:
            self.entries[name] = {**conditions, **({"times": factors} if factors else {})}

    def list_groups(self, kind: str, *, all_engines: bool = False) -> list[str]:
        """List the groups of runs of one kind of effect."""
        runs = self.fit.pool.runs if all_engines else self.runs
        return list(dict.fromkeys(run.effect_groups[kind] for run in runs))

    def add_common(self, date: str) -> None:
        """Add the coefficients that all GPUs and models share."""
        start = self.sum_effects(("common", ""), ("engine", self.engine), ("release", self.newest))
        self.entries["common"] = {
            "coefficients": {
                name: float(f"{value * np.exp(start.get(name, 0)):.4g}")
                for name, (value, _) in COMMON_PRIORS.items()
            },
            "source": f"{len(self.runs)} public runs, see validation/measured_runs.csv; make fit",
            "date": date,
        }

    def add_releases(self) -> None:
        """Add what older releases change."""
        latest = self.sum_effects(("release", self.newest))
        measured = set(self.list_groups("release"))
        for bound in self.bounds:
            if (era := f"{self.engine}|{bound}") in measured:
                older = _subtract(self.sum_effects(("release", era)), latest)
                self.add(f"before {bound}", older, {"before": bound})

    def add_generations(self) -> None:
        """Add what generations of GPUs change, at the newest release and at older ones."""
        measured = self.list_groups("generation")
        for generation in self.list_groups("generation", all_engines=True):
            newest = ("release generation", f"{self.newest}|{generation}")
            latest = self.sum_effects(newest)
            own = self.sum_effects(("generation", generation), newest)
            self.add(generation, own, {"generation": generation}, always=generation in measured)
            for bound in self.bounds:
                era = f"{self.engine}|{bound}|{generation}"
                if older := self.sum_effects(("release generation", era)):
                    conditions = {"generation": generation, "before": bound}
                    self.add(f"{generation} before {bound}", _subtract(older, latest), conditions)

    def add_gpus(self) -> None:
        """Add what GPUs change, and the KV cache formats that recipes give some."""
        for gpu in self.list_groups("gpu", all_engines=True):
            own = self.sum_effects(("gpu", gpu), ("gpu engine", f"{gpu}|{self.engine}"))
            points = sum(run.deployment.gpu.name == gpu for run in self.runs)
            self.add(gpu, own, {"gpu": gpu, "points": points}, always=points > 0)
        for name, effect in load_calibration_catalog(self.engine).effects.items():
            if effect.kv_cache_dtype != "auto":  # from the recipes; no fit gives it
                entry = self.entries.setdefault(name, {"gpu": effect.gpu})
                entry["kv_cache_dtype"] = effect.kv_cache_dtype

    def add_models(self) -> None:
        """Add what families of models, and their number formats, change."""
        measured = self.list_groups("model")
        for family in self.list_groups("model", all_engines=True):
            own = self.sum_effects(("model", family), ("model engine", f"{family}|{self.engine}"))
            self.add(family, own, {"model": family}, always=family in measured)
        for label in self.list_groups("model format"):
            family, method = label.split("|")
            own = self.sum_effects(("model format", label))
            self.add(f"{family} {method}", own, {"model": family, "quantization": method})


def _subtract(older: Mapping[str, float], latest: Mapping[str, float]) -> dict[str, float]:
    names = dict.fromkeys((*older, *latest))
    return {name: older.get(name, 0) - latest.get(name, 0) for name in names}


def write_calibration_catalogs(fit: PooledFit, folder: Path = CATALOG_DIR / "calibration") -> None:
    """Write the catalogs of all engines, and what the fit leaves of each run."""
    for engine in RELEASE_BOUNDARIES:
        entries = build_calibration_catalog(fit, engine, f"{get_report_date():%Y-%m-%d}")
        replace_catalog_entries(
            folder / f"{engine}.yaml",
            yaml.dump(entries, sort_keys=False, width=110, Dumper=_CatalogDumper),
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
    write_residuals(fitted)
    replace_catalog_entries(
        CATALOG_DIR / "validation" / "held_back.yaml",
        yaml.dump(summarize_left_out(fitted), sort_keys=False, width=110, Dumper=_CatalogDumper),
    )
