"""Write the calibration catalogs of all engines from a pooled fit of all runs: `make fit`."""

import math
from collections import Counter
from collections.abc import Mapping
from functools import cached_property
from itertools import permutations, takewhile
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from fits.accuracy_page import write_left_out
from fits.pooled_fit import (
    COMMON_MEDIANS,
    PooledFit,
    compute_log_ratios,
    fit_pooled,
    get_prior_medians,
    load_measured_runs,
)
from fits.process_fit import summarize_left_out
from fits.residual_fit import write_residuals
from planner.core.catalog import CATALOG_DIR
from planner.core.files import get_report_date, replace_atomically
from planner.core.readers import read_text
from planner.hardware.gpus import Gpu
from planner.latency.coefficient_lookup import (
    RELEASE_BOUNDARIES,
    load_calibration_catalog,
    look_up_coefficients,
)

MIN_EFFECT_CHANGE, MIN_PACE_CHANGE = 0.02, 0.002
"""Factors closer to 1 get no entry. The limit is lower for the pace, which scales the entire step.
"""


ORDERED_PEAKS = {"gemm_bf16": "fp16", "gemm_fp8": "fp8", "attention": "fp16"}
"""Shares of peak whose rates keep the order of the data sheets, and the peak of each."""
ORDERING_ROUNDS = 20


def exceeds(one: Gpu, other: Gpu) -> bool:
    """Return whether a GPU of the same vendor has at least another's bandwidth and these peaks."""
    peaks = (
        (one.peak_flops.get(dtype, 0.0), other.peak_flops.get(dtype, 0.0))
        for dtype in set(ORDERED_PEAKS.values())
    )
    figures = ((one.memory_bandwidth, other.memory_bandwidth), *peaks)
    return one.vendor == other.vendor and all(mine >= theirs for mine, theirs in figures)


def build_calibration_catalog(fit: PooledFit, engine: str, date: str) -> dict[str, Any]:
    """Return the entries of an engine's calibration catalog by name."""
    catalog = _EngineCatalog(fit, engine)
    catalog.add_common(date)
    catalog.add_releases()
    catalog.add_generations()
    catalog.add_dies()
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
                name: float(f"{median * np.exp(start.get(name, 0)):.4g}")
                for name, median in COMMON_MEDIANS.items()
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
        """Add what generations change, at the newest release and at older ones.

        The KV cache formats that recipes give some stay.
        """
        measured = self.list_groups("generation")
        for generation in self.list_groups("generation", all_engines=True):
            newest = ("release generation", f"{self.newest}|{generation}")
            latest = self.sum_effects(newest)
            start = compute_log_ratios(get_prior_medians(generation), COMMON_MEDIANS)
            own = _add(self.sum_effects(("generation", generation), newest), start)
            self.add(generation, own, {"generation": generation}, always=generation in measured)
            for bound in self.bounds:
                era = f"{self.engine}|{bound}|{generation}"
                if older := self.sum_effects(("release generation", era)):
                    conditions = {"generation": generation, "before": bound}
                    self.add(f"{generation} before {bound}", _subtract(older, latest), conditions)
        for name, effect in load_calibration_catalog(self.engine).effects.items():
            if effect.kv_cache_dtype != "auto":  # from the recipes; no fit gives it
                self.entries[name]["kv_cache_dtype"] = effect.kv_cache_dtype

    def add_dies(self) -> None:
        """Add what dies change: where matrix products start from, and what their runs say."""
        gpus = {run.deployment.gpu.die: run.deployment.gpu for run in self.fit.pool.runs}
        measured = set(self.list_groups("die"))
        for die, gpu in gpus.items():
            usual = get_prior_medians(gpu.kernel_generation)
            start = compute_log_ratios(get_prior_medians(gpu.die, gpu.kernel_generation), usual)
            own = self.sum_effects(("die", die), ("die engine", f"{die}|{self.engine}"))
            entry = _add(_add(own, start), self.order_shift.get(die, {}))
            self.add(die, entry, {"die": die}, always=die in measured)

    @cached_property
    def order_shift(self) -> dict[str, dict[str, float]]:
        """What brings dies into the order of their data sheets, by die and coefficient, as logarithms.

        Where a die with at least another's bandwidth and peaks comes out slower in a product, both
        get the mean of their rates, each with the weight of its runs (pool adjacent violators).
        """
        gpus = {run.deployment.gpu.die: run.deployment.gpu for run in self.fit.pool.runs}
        weights = Counter(run.deployment.gpu.die for run in self.runs)
        shift: dict[str, dict[str, float]] = {die: {} for die in gpus}
        for name, dtype in ORDERED_PEAKS.items():
            rates = {
                die: self._sum_logs(gpu, name) + math.log(gpu.peak_flops[dtype])
                for die, gpu in gpus.items()
                if dtype in gpu.peak_flops
            }
            fitted = dict(rates)
            for _ in range(ORDERING_ROUNDS):
                for slow, fast in permutations(rates, 2):
                    if exceeds(gpus[fast], gpus[slow]) and rates[slow] > rates[fast]:
                        both = [weights[slow] + 1.0, weights[fast] + 1.0]
                        rates[slow] = rates[fast] = float(
                            np.average([rates[slow], rates[fast]], weights=both)
                        )
            for die, rate in rates.items():
                shift[die][name] = rate - fitted[die]
        return shift

    def _sum_logs(self, gpu: Gpu, name: str) -> float:
        """Return the logarithm of a coefficient on a GPU at the newest release."""
        generation = gpu.kernel_generation
        places = (
            ("common", ""), ("engine", self.engine), ("release", self.newest),
            ("generation", generation), ("release generation", f"{self.newest}|{generation}"),
            ("die", gpu.die), ("die engine", f"{gpu.die}|{self.engine}"),
        )  # fmt: skip
        start = get_prior_medians(gpu.die, generation)[name]
        return math.log(start) + self.sum_effects(*places).get(name, 0.0)

    def add_models(self) -> None:
        """Add what families of models, and their number formats, change."""
        measured = self.list_groups("model")
        for family in self.list_groups("model", all_engines=True):
            own = self.sum_effects(("model", family), ("model engine", f"{family}|{self.engine}"))
            releases = sorted(
                {
                    run.deployment.engine.release
                    for run in self.runs
                    if run.effect_groups["model"] == family
                },
                key=lambda release: (*release.series, release.patch),
            )
            known = {"releases": [release.plain for release in releases]} if releases else {}
            conditions = {"model": family, **known}
            self.add(family, own, conditions, always=family in measured)
        for label in self.list_groups("model format"):
            family, method = label.split("|")
            own = self.sum_effects(("model format", label))
            self.add(f"{family} {method}", own, {"model": family, "quantization": method})


def _subtract(older: Mapping[str, float], latest: Mapping[str, float]) -> dict[str, float]:
    return _add(older, {name: -value for name, value in latest.items()})


def _add(one: Mapping[str, float], other: Mapping[str, float]) -> dict[str, float]:
    return {name: one.get(name, 0) + other.get(name, 0) for name in dict.fromkeys((*one, *other))}


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
    left_out = summarize_left_out(fitted)
    replace_catalog_entries(
        CATALOG_DIR / "validation" / "held_back.yaml",
        yaml.dump(left_out, sort_keys=False, width=110, Dumper=_CatalogDumper),
    )
    write_left_out(left_out)
