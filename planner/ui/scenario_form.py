"""Convert between the fields of a scenario file and the values of the cockpit's controls."""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, get_args

import yaml

from planner.core.errors import PlannerError
from planner.core.files import replace_atomically
from planner.hardware.gpus import get_gpu
from planner.hardware.prices import HOURS_PER_MONTH
from planner.planning.scenario import (
    Scenario,
    apply_overrides,
)
from planner.planning.scenario_schema import (
    DAY_FIELDS,
    VOLUME_FIELDS,
    AdaptersEntry,
    ScenarioEntry,
)
from planner.planning.slo import LatencyStatistic

COCKPIT_FILE_HEADER = (
    "# A question of Headroom's cockpit, which writes over it; copy it to keep it.\n"
)
"""The first line of files that the cockpit may overwrite."""
STATISTIC_CHOICES: tuple[LatencyStatistic, ...] = get_args(LatencyStatistic)
FORMAT_CHOICES = ("checkpoint", "fp8", "awq", "gptq", "int8", "nvfp4", "mxfp4")
KV_CACHE_CHOICES = ("auto", "fp8")
BEST_LIMIT = "best"
"""What is typed as a limit to ask for the shortest that is met."""
ScenarioFields = dict[str, Any]


def read_control_values(scenario: Scenario) -> dict[str, Any]:
    """Return the values of the controls for a scenario."""
    fields = scenario.fields
    workload, workload_fields = scenario.workload, fields["workload"]
    day = workload_fields.get("day") or ""
    budget, own_prices = fields.get("budget") or {}, scenario.prices.user_prices
    return {
        "question": scenario.question,
        "model": scenario.model,
        "gpus": tuple(candidate_gpu.gpu.name for candidate_gpu in scenario.gpus),
        "at_most": max(candidate_gpu.max_gpus for candidate_gpu in scenario.gpus),
        "engine": scenario.engine.name,
        "engine_version": scenario.engine.version,
        "load": next(
            (kind for kind in ("trace", "requests", "concurrency") if workload_fields.get(kind)),
            "rate",
        ),
        "find_max": scenario.open_figure in ("rate", "concurrency"),
        "rate": 1.0 if scenario.open_figure == "rate" else workload.rate or 1.0,
        "concurrency": 64 if scenario.open_figure == "concurrency" else workload.concurrency or 64,
        "requests": workload.num_prompts or 100_000,
        "within_hours": float(workload_fields.get("within_hours") or 8.0),
        "prompt": workload.prompt.mean,
        "output": workload.output.mean,
        "reuse": round(100 * workload.cache_hit_fraction, 2),
        "day": day if isinstance(day, str) else ", ".join(f"{hour:g}" for hour in day),
        "adapters": workload.adapters,
        "rank": scenario.engine_args.get(
            "max_lora_rank", AdaptersEntry.model_fields["ranks"].default[0]
        ),
        "zipf": workload.adapter_zipf,
        "headroom": round(
            100 * fields.get("headroom", ScenarioEntry.model_fields["headroom"].default), 2
        ),
        "quantization": tuple(
            quantization or "checkpoint" for quantization in scenario.quantizations
        ),
        "kv_cache_dtype": scenario.kv_cache_dtypes,
        "confidence": round(100 * scenario.confidence, 2),
        "tier": scenario.prices.tier,
        "seller": scenario.prices.seller or "",
        "own_price": next(
            (own_prices[c.gpu.name] for c in scenario.gpus if c.gpu.name in own_prices), ""
        ),
        "budget": budget.get("usd_per_month")
        or (budget.get("usd_per_hour") or 0) * HOURS_PER_MONTH
        or "",
        "spare_replicas": scenario.spare_replicas,
        "speculation": bool(scenario.speculation and scenario.speculation.allowed),
        **{
            f"{t.metric} {t.percentile}": (
                BEST_LIMIT
                if scenario.open_figure == "limit" and t == scenario.slo_targets[0]
                else f"{t.seconds * 1e3:g}"
            )
            for t in scenario.slo_targets
        },
    }


def _as_share(percent: float) -> float:
    return round(percent / 100, 4)


def _set(field: str, convert: Callable[[Any], object] = lambda value: value) -> "_Control":
    return lambda value, _, __: {field: convert(value)}


def _set_load(name: str) -> "_Control":
    """Set a figure of the load, without the figures of which a rate was worked out."""
    worked_out = dict.fromkeys(f"workload.{each}" for each in (*VOLUME_FIELDS, "peak_to_mean"))
    return lambda value, _, __: {**worked_out, f"workload.{name}": value}


def _scale_lengths(side: str) -> "_Control":
    """Set the mean length of a side, and all its statistics with it, so that the shape stays."""

    def scale(value: Any, fields: ScenarioFields, values: Mapping[str, Any]) -> dict[str, object]:
        lengths = fields["workload"].get(f"{side}_tokens") or {"mean": values[side]}
        factor = value / values[side]
        scaled = {name: float(f"{tokens * factor:.6g}") for name, tokens in lengths.items()}
        return {f"workload.{side}_tokens": scaled}

    return scale


def _set_gpus(names: Any, fields: ScenarioFields, values: Mapping[str, Any]) -> dict[str, object]:
    known = {get_gpu(entry["gpu"]).name: entry for entry in fields["gpus"]}
    return {"gpus": [known.get(n, {"gpu": n, "at_most": values["at_most"]}) for n in names]}


def _find_max(
    is_asked: Any, fields: ScenarioFields, values: Mapping[str, Any]
) -> dict[str, object]:
    kind = "concurrency" if fields["workload"].get("concurrency") else "rate"
    return {f"workload.{kind}": "max" if is_asked else values[kind]}


_Control = Callable[[Any, ScenarioFields, Mapping[str, Any]], dict[str, object]]
CONTROL_FIELDS: dict[str, _Control] = {
    **{name: _set(name) for name in ("model", "engine_version", "spare_replicas")},
    **{name: _set(name, _as_share) for name in ("headroom", "confidence")},
    "quantization": _set("quantization", lambda names: list(names) or [FORMAT_CHOICES[0]]),
    "kv_cache_dtype": _set("kv_cache_dtype", lambda names: list(names) or [KV_CACHE_CHOICES[0]]),
    "tier": _set("price_tier"),
    "seller": _set("price_seller", lambda value: value or None),
    "budget": _set("budget", lambda usd: {"usd_per_month": usd} if usd else None),
    "reuse": _set("workload.shared_prefix", lambda percent: {"hit_rate": _as_share(percent)}),
    "rank": _set("adapters.ranks", lambda rank: [rank]),
    "zipf": _set("adapters.zipf"),
    "speculation": _set("speculation.allowed"),
    "engine": lambda value, *_: {"engine": value, "engine_version": None},
    "adapters": lambda count, *_: {"adapters.count": count} if count else {"adapters": None},
    "gpus": _set_gpus,
    "at_most": lambda most, fields, _: {
        "gpus": [{**entry, "at_most": most} for entry in fields["gpus"]]
    },
    "own_price": lambda usd, fields, _: {
        "prices": {entry["gpu"]: usd for entry in fields["gpus"]} if usd else {}
    },
    "prompt": _scale_lengths("prompt"),
    "output": _scale_lengths("output"),
    "find_max": _find_max,
    "rate": _set_load("rate"),
    "concurrency": _set_load("concurrency"),
    "requests": _set_load("requests"),
    "within_hours": _set_load("within_hours"),
    "load": lambda kind, fields, values: {"workload": _replace_load(fields, kind, values)},
    "day": lambda text, *_: {
        **dict.fromkeys(f"workload.{name}" for name in DAY_FIELDS),
        "workload.day": _parse_hours(str(text or "").strip()) or None,
    },
}
"""What each control sets: fields of the scenario, by its value, the fields and all values."""


def apply_control(
    fields: ScenarioFields, name: str, value: Any, values: Mapping[str, Any]
) -> ScenarioFields:
    """Return the fields with the control `name` set to `value`; `values` are of all controls."""
    if control := CONTROL_FIELDS.get(name):
        return apply_overrides(fields, control(value, fields, values), "the scenario")
    metric, percentile = name.split()
    level = {key: dict(limits) for key, limits in (fields.get("service_level") or {}).items()}
    level.setdefault(metric, {}).pop(percentile, None)
    if limit := str(value).strip():  # an empty one removes the target
        name = f"{percentile} {metric.upper()}"
        is_best = limit == BEST_LIMIT
        level[metric][percentile] = (
            limit if is_best else parse_quantity(limit, MILLISECOND_UNITS, name)
        )
    kept = {key: limits for key, limits in level.items() if limits}
    return {**fields, "service_level": kept}


def _replace_load(
    fields: ScenarioFields, kind: str, values: Mapping[str, Any]
) -> dict[str, object]:
    """Return the workload with another kind of load, at the values of its controls."""
    gone = {
        "rate",
        "concurrency",
        "requests",
        "within_hours",
        *VOLUME_FIELDS,
        "peak_to_mean",
        "trace",
    }
    gone |= set() if kind == "rate" else {"burstiness", *DAY_FIELDS}  # a day needs an open loop
    workload = {name: value for name, value in fields["workload"].items() if name not in gone}
    if fields["workload"].get("trace"):
        for side in ("prompt", "output"):
            workload.setdefault(f"{side}_tokens", {"mean": round(values[side], 1)})
    hours = {"within_hours": values["within_hours"]} if kind == "requests" else {}
    return {**workload, kind: values[kind], **hours}


def _parse_hours(text: str) -> str | list[float]:
    """Return a day for a scenario: a number per hour, or the name of a profile or file."""
    try:
        return [float(hour) for hour in text.split(",")]
    except ValueError:
        return text


def save_scenario(fields: Mapping[str, Any], name: str) -> Path:
    """Write the fields to NAME.yaml in the working folder; return it.

    The file must be new, or written by the cockpit.
    """
    if not re.fullmatch(r"[\w][\w. -]{0,80}", name.strip()):
        raise PlannerError(f"a name has letters, digits, dots, dashes and blanks, got {name!r:.90}")
    path = Path(f"{name.strip().removesuffix('.yaml')}.yaml")
    with replace_atomically(path, updating=True) as (part,):
        if path.exists() and not path.read_text(encoding="utf-8", errors="replace").startswith(
            COCKPIT_FILE_HEADER
        ):
            raise PlannerError(
                f"{path} is not the cockpit's and stays as it is: choose another name"
            )
        part.write_text(
            COCKPIT_FILE_HEADER
            + yaml.safe_dump(dict(fields), sort_keys=False, allow_unicode=True, width=120),
            encoding="utf-8",
        )
    return path


MILLISECOND_UNITS: Mapping[str, float] = {"": 1.0, "ms": 1.0, "s": 1e3, "min": 60e3, "h": 3600e3}
COUNT_UNITS: Mapping[str, float] = {"": 1.0, "k": 1e3, "m": 1e6, "/s": 1.0, "%": 1.0, "$": 1.0}


def parse_quantity(text: object, units: Mapping[str, float], name: str) -> float:
    """Parse what people type, such as "1,500", "2k" or "1.5 s", into the unit of `units[""]`."""
    match = re.fullmatch(
        r"\$?\s*([\d,]*\.?\d+(?:e[+-]?\d+)?)\s*([a-z/%$]*)", str(text).strip().lower()
    )
    factor = match and {**COUNT_UNITS, **units}.get(match[2])
    if not match or factor is None:
        raise PlannerError(
            f"{name}: expected a number such as 1,500, 2k or 800 ms, got {text!r:.40}"
        )
    return float(match[1].replace(",", "")) * factor
