"""Scenarios, and how they are read from one YAML file."""

import copy
import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from os.path import isfile
from pathlib import Path
from typing import Any, cast

from planner.core.catalog import CATALOG_DIR, validate_entry
from planner.core.errors import (
    PlannerError,
    add_error_context,
    make_unknown_name_error,
    validate_unicode_text,
)
from planner.core.intervals import Interval
from planner.core.number_format import format_number
from planner.core.readers import parse_json, read_text, read_yaml
from planner.core.templates import render_template
from planner.core.units import GIB, convert_gib_to_bytes
from planner.engines.cli_options import find_pooling_option
from planner.engines.engine import Engine, get_engine, list_engines
from planner.engines.engine_args import EngineArgs, resolve_engine_args
from planner.engines.speculation_methods import explain_missing_draft, explain_unsupported_method
from planner.hardware.gpus import Gpu, get_gpu, resolve_link_bandwidth
from planner.hardware.prices import HOURS_PER_MONTH, PriceSelection, find_seller, look_up_gpu_price
from planner.latency.coefficient_lookup import apply_user_calibrations, load_user_calibrations
from planner.latency.startup_time import validate_storage
from planner.models.quantization import parse_quantization
from planner.models.registry import load_model
from planner.planning.framework_choice import WorkloadTraits
from planner.planning.scenario_schema import (  # fmt: skip
    OPEN_FIGURE,
    ApiEntry,
    ArtifactKind,
    BillingAlternativesEntry,
    OpenFigure,
    ScenarioEntry,
    SpeculationEntry,
    TrafficRange,
    TrafficVolume,
    coerce_engine_args,
)
from planner.planning.scenario_workload import (
    parse_daily_profile,
    parse_workload,
    resolve_existing_path,
    resolve_path,
)
from planner.planning.slo import SloTarget
from planner.workload.daily_profile import DailyProfile
from planner.workload.workload import Workload

SCENARIO_DIR = CATALOG_DIR / "scenarios"


@dataclass(frozen=True)
class CandidateGpu:
    """A GPU that may be used, and its machines; fields that are None follow the catalog."""

    gpu: Gpu
    max_gpus: int
    gpus_per_node: int | None = None
    interconnect: str | None = None
    sold_in: tuple[int, ...] = ()  # GPUs of the machines for rent

    @property
    def machine_sizes(self) -> tuple[int, ...]:
        """GPUs of the rentable machines, up to one node; empty if any number can be rented."""
        if self.sold_in or self.gpus_per_node is None or not self.gpu.sold_in:
            return self.sold_in or self.gpu.sold_in
        smaller = {size for size in self.gpu.sold_in if size < self.gpus_per_node}
        return tuple(sorted({*smaller, self.gpus_per_node}))

    @property
    def max_machine_gpus(self) -> int:
        """GPUs of the largest machine."""
        return min([self.gpus_per_node or self.gpu.gpus_per_node, *self.machine_sizes[-1:]])


@dataclass(frozen=True)
class Scenario:
    """A capacity question: a model, candidate GPUs, a workload and SLOs.

    `workload` is an open loop (`rate`, or the arrivals of a trace), or a closed loop without a
    rate: `concurrency` users, each of whom sends a request as soon as the one before is answered.
    If `offline`, all requests arrive at once, and `workload.rate` is the pace that meets the
    deadline. With a `daily_profile`, `workload` is its busiest hour.
    """

    name: str
    question: str
    model: str
    quantizations: tuple[str | None, ...]  # None: the checkpoint's own format
    formats_left_out: tuple[str, ...]  # also asked for, but of another checkpoint
    kv_cache_dtypes: tuple[str, ...]
    gpus: tuple[CandidateGpu, ...]
    engine: Engine  # the preferred one
    workload: Workload
    slo_targets: tuple[SloTarget, ...]
    offline: bool
    engine_args: Mapping[str, Any]
    layout: Mapping[str, int]  # fixed parallel sizes
    headroom: float  # fraction of the capacity free in the busiest hour; 0 for a closed loop
    refused_at_most: float  # fraction of requests that may exceed max_model_len
    context_buffer: float
    storage: str  # where a starting server reads its weights from
    prices: PriceSelection
    owned_usd_per_hour: Mapping[str, float]  # of a purchase, without power, by GPU
    budget_usd_per_hour: float | None
    spare_replicas: int  # that may fail while every SLO is still met
    other_tenants: int  # bytes on each GPU
    host_memory_gib: float  # GiB per GPU that may keep KV blocks
    memory_calibration: Mapping[str, float]  # bytes to add to terms of every memory plan
    speculation: SpeculationEntry | None
    allow_disaggregation: bool  # whether prefill and decode pools are candidates too
    traits: WorkloadTraits
    files: tuple[Path, ...]  # read for this scenario
    other_engines: tuple[Engine, ...]  # also allowed
    output_kinds: tuple[ArtifactKind, ...]  # files to write
    daily_profile: DailyProfile | None = None
    replicas_at_least: int = 1  # in the quietest hour
    open_figure: OpenFigure | None = None  # that the search has to find
    found_figure: OpenFigure | None = None  # that it has found; a limit is that of the first SLO
    volume: TrafficVolume | None = None  # of which the busiest hour's rate was worked out
    peak_to_mean: float = (
        1.0  # the busiest hour of a volume, in mean hours, without a daily profile
    )
    confidence: float = 0.8  # probability of meeting every SLO that a plan needs
    load_sigma: float = 0.0  # standard deviation of ln(load), of traffic that is given as a range
    billing_alternatives: BillingAlternativesEntry = field(default_factory=BillingAlternativesEntry)
    # of its file, paths absolute
    fields: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)

    @property
    def deadline_hours(self) -> float | None:
        """The hours within which a job has to be done; None for other work."""
        load = self.workload
        if not self.offline or not load.num_prompts or not load.rate:
            return None
        return load.num_prompts / load.rate / 3600

    @property
    def rate_range(self) -> Interval | None:
        """The requests/s with the range that the file states; None without a rate."""
        rate = self.workload.rate
        return None if rate is None else Interval.from_lognormal(rate, self.load_sigma)

    def get_idle_share(self, gpu: Gpu) -> float:
        """Return the share of a GPU's price that is paid on or off: reserved, or owned but for its power."""
        if self.prices.tier == "reserved":
            return 1.0
        owned = self.owned_usd_per_hour.get(gpu.name)
        return owned / self.prices.user_prices[gpu.name] if owned else 0.0

    @property
    def mean_fraction(self) -> float:
        """A mean hour's traffic as a fraction of that of the busiest, which is planned for."""
        return self.daily_profile.mean_fraction if self.daily_profile else 1 / self.peak_to_mean

    @property
    def sized_hour(self) -> dict[str, float | int | None] | None:
        """The busiest hour, which is sized for: all others have less traffic, or the same; None without a rate."""
        rate, day = self.workload.rate, self.daily_profile
        if rate is None or self.offline:
            return None
        hour = day.hourly_fractions.index(max(day.hourly_fractions)) if day else None
        times = 1 / self.mean_fraction
        return {"requests_per_s": rate, "times_mean_hour": times, "hour": hour}

    @property
    def assumptions(self) -> tuple[str, ...]:
        """Sentences about what the file leaves open and the plan fills in."""
        model, pooling = load_model(self.model), list[tuple[Engine, str]]()
        if self.workload.output.max_tokens <= 1:
            for engine in (self.engine, *self.other_engines):
                task = model.pooling_task or "embed"
                option = find_pooling_option(engine.name, engine.release, task)
                pooling.append((engine, " ".join(option)))
        values = {
            "scenario": self, "model": model, "pooling": pooling, "number": format_number,
            "passed": [name for name in self.engine_args if name not in EngineArgs.__dataclass_fields__],
        }  # fmt: skip
        return tuple(render_template("planning", "assumptions", **values).splitlines())

    @property
    def split_by_engine(self) -> tuple["Scenario", ...]:
        """The scenario once for each engine that it allows."""
        engines = (self.engine, *self.other_engines)
        return tuple(replace(self, engine=engine, other_engines=()) for engine in engines)

    def __str__(self) -> str:
        return (
            f"{self.name}: {self.model} on {' or '.join(c.gpu.name for c in self.gpus)};"
            f" {self.workload}"
        )


def list_scenarios() -> tuple[str, ...]:
    """List the names of the shipped scenarios."""
    return tuple(sorted(path.stem for path in SCENARIO_DIR.glob("*.yaml")))


def find_scenario_file(name: str | Path, folder: Path = Path()) -> Path:
    """Find the file of a shipped scenario, or of the path `name`, in `folder` if it is there.

    A folder that has a plan.json stands for it.
    """
    if Path(name).suffix in (".yaml", ".yml", ".json"):
        return folder / name if isfile(folder / name) else Path(name)
    if str(name) in list_scenarios():
        return SCENARIO_DIR / f"{name}.yaml"
    if isfile(Path(name) / "plan.json"):
        return Path(name) / "plan.json"
    raise make_unknown_name_error(str(name), list_scenarios(), "scenario")


def read_scenario_file(path: Path) -> tuple[str, Any]:
    """Read the name and the fields of a scenario: of a YAML file, or of the plan.json of its plan."""
    if path.suffix != ".json":
        return path.stem, read_yaml(path)
    plan = parse_json(read_text(path), path.name)
    if not isinstance(plan, dict) or not isinstance(plan.get("question"), dict):
        raise PlannerError(
            f"{path.name} has no scenario in the field question: expected the plan.json that"
            " `headroom plan --out` wrote"
        )
    return str(plan.get("scenario", path.stem)), plan["question"]


def load_scenario(name: str | Path, overrides: Mapping[str, Any] | None = None) -> Scenario:
    """Load the shipped scenario `name`, or that of a file; `PlannerError` if it is wrong.

    `overrides` sets fields by dotted name, items of a list by number: {"workload.rate": 12,
    "gpus.0.at_most": 8}.
    """
    path = find_scenario_file(name)
    title, data = read_scenario_file(path)
    if isinstance(data, dict):
        data = apply_overrides(data, overrides or {}, path.name)
    scenario = parse_scenario(data, validate_unicode_text(title, "scenario"), path.parent)
    # a plan may take the place of the one that it is compared with
    own = () if path.suffix == ".json" else (path,)
    return replace(scenario, files=(*own, *scenario.files))


def read_models(name: str | Path, overrides: Mapping[str, Any]) -> Any:
    """Read the `model` of the scenario `name`, or of `overrides`: a name, or a list of several to compare."""
    _, data = read_scenario_file(find_scenario_file(name))
    return overrides.get("model", data.get("model") if isinstance(data, dict) else None)


def apply_overrides(
    data: Mapping[str, Any], overrides: Mapping[str, Any], location: str
) -> dict[str, Any]:
    """Return a copy of `data`, the fields of the file `location`, with `overrides` applied."""
    fields = copy.deepcopy(dict(data))
    if not _list_engines(fields) & _list_engines({**fields, **overrides}):
        fields.pop("engine_version", None)  # a release of an engine that is asked no more
    for key, value in overrides.items():
        place: Any = fields
        *parents, last = key.split(".", 20)
        for parent in parents:
            if isinstance(place, dict):
                place[parent] = {} if place.get(parent) is None else place[parent]
            place = place[_resolve_path_part(place, parent, key, location)]
        place[_resolve_path_part(place, last, key, location)] = value
    return fields


def _list_engines(fields: Mapping[str, Any]) -> set[str]:
    """Return the names of the engines in the fields of a scenario file."""
    names = fields.get("engine") or "vllm"
    return {str(name).partition(" ")[0] for name in ([names] if isinstance(names, str) else names)}


def _resolve_path_part(place: Any, name: str, key: str, location: str) -> Any:
    """Return the key or the index by which `place` holds `name`; `PlannerError` if it has none."""
    if isinstance(place, dict):
        return name
    if isinstance(place, list):
        if name.isdecimal() and int(name[:9]) < len(place):
            return int(name)
        raise PlannerError(
            f"cannot set {key}: {location} has {len(place)} items there, numbered from 0, not"
            f" {name}"
        )
    raise PlannerError(
        f"cannot set {key}: {location} has {place!r:.40} there, which has no field {name}"
    )


FIELDS_COPIED_FROM_FILE = (
    "model", "refused_at_most", "context_buffer", "spare_replicas", "host_memory_gib",
    "speculation", "replicas_at_least", "confidence",
)  # fmt: skip
"""Fields that a scenario takes from its file unchanged."""


def parse_scenario(data: Mapping[str, object], name: str, folder: Path = Path()) -> Scenario:
    """Parse the fields of a scenario file called `name`; `PlannerError` if one is wrong.

    Fields without a value count as left out. Trace, calibration and a model's config.json are
    searched in `folder`, then in the working directory.
    """
    if not isinstance(data, Mapping):
        raise PlannerError(
            f"{name}: expected fields such as model, gpus and workload, got {type(data).__name__}"
        )
    entry = validate_entry(ScenarioEntry, _drop_empty_fields(data), name)
    if isfile(folder / entry.model) or isfile(folder / entry.model / "config.json"):
        entry = entry.model_copy(update={"model": str(folder / entry.model)})
    with add_error_context(name):
        given = {**(entry.adapters.engine_args if entry.adapters else {}), **entry.engine_args}
        engines = _parse_engines(entry, folder)
        engine_args = coerce_engine_args(given, engines[0])
        context = float(load_model(entry.model).architecture.max_position)
        longest = float(engine_args.get("max_model_len") or context)
        day = parse_daily_profile(entry.workload, folder)
        day_trace = str(entry.workload.day) if day and day.peak_rps else None
        prices, rate = _parse_prices(entry), cast(object, entry.workload.rate)
        workload = parse_workload(
            entry.workload, longest, max(longest, context), folder, day, entry.adapters
        )
        scenario = Scenario(
            name=name,
            question=entry.question or f"What does it take to serve {entry.model}?",
            **{field: getattr(entry, field) for field in FIELDS_COPIED_FROM_FILE},
            allow_disaggregation=entry.pools,
            billing_alternatives=_price_api_bill(entry, workload, day),
            quantizations=(formats := _split_formats(entry))[0],
            formats_left_out=formats[1],
            kv_cache_dtypes=entry.kv_cache_dtype,
            gpus=_parse_candidate_gpus(entry, prices),
            engine=engines[0],
            other_engines=tuple(engines[1:]),
            workload=workload,
            slo_targets=_parse_slo_targets(entry),
            offline=entry.workload.requests is not None,
            engine_args=engine_args,
            layout={name: size for name, size in entry.layout.items() if size},
            headroom=entry.headroom if entry.workload.concurrency is None else 0.0,
            storage=validate_storage(entry.storage),
            prices=prices,
            owned_usd_per_hour={
                get_gpu(name).name: bought.usd_per_hour for name, bought in entry.owned.items()
            },
            budget_usd_per_hour=entry.budget.per_hour if entry.budget else None,
            open_figure=entry.open_figure,
            volume=entry.workload.volume,
            peak_to_mean=entry.workload.peak_to_mean or 1.0,
            load_sigma=rate.sigma if isinstance(rate, TrafficRange) else 0.0,
            other_tenants=convert_gib_to_bytes(
                entry.other_tenants_gib,
                max((get_gpu(g.gpu).memory_bytes for g in entry.gpus), default=0),
                "other_tenants_gib",
            ),
            memory_calibration={term: gib * GIB for term, gib in entry.memory_calibration.items()},
            traits=entry.traits,
            output_kinds=entry.files,
            daily_profile=day,
            fields=resolve_file_fields(data, folder),
            files=tuple(
                resolve_path(folder, file)
                for file in (entry.calibration, entry.workload.trace, day_trace)
                if file
            ),
        )
        _check_consistency(scenario)
        if (mean := scenario.workload.mean_tokens_per_request) > longest:
            limit = (
                "engine_args, field max_model_len"
                if "max_model_len" in engine_args
                else "the model's context length"
            )
            raise PlannerError(
                f"workload: prompt_tokens and output_tokens, {mean:,.0f} together on average, do"
                f" not fit into {limit} ({longest:,.0f} tokens)"
            )
    return scenario


FILE_FIELDS = ("model", "calibration", "workload.trace", "workload.day")
"""Fields that may name a file."""


def resolve_file_fields(data: Mapping[str, object], folder: Path) -> dict[str, Any]:
    """Return the fields of a scenario file such that they can be read again from any folder."""
    fields = copy.deepcopy(dict(data))
    for name in FILE_FIELDS:
        *parents, last = name.split(".")
        place: Any = fields
        for parent in parents:
            place = place.get(parent) or {}
        file = place.get(last)
        if isinstance(file, str) and (path := resolve_path(folder, file)).exists():
            place[last] = str(path.resolve())
    return fields


def _drop_empty_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that have a value, at any depth."""
    return {
        name: _drop_empty_fields(value) if isinstance(value, Mapping) else value
        for name, value in fields.items()
        if value is not None
    }


def _split_formats(entry: ScenarioEntry) -> tuple[tuple[str | None, ...], tuple[str, ...]]:
    """Split the weight formats into those to plan and, beside the checkpoint's own, those that it cannot take.

    Raises `PlannerError` for a format that is not known, and without "checkpoint" for what it cannot take.
    """
    formats: list[str | None] = [None if q == "checkpoint" else q for q in entry.quantization]
    left_out = list[str]()
    for quantization in filter(None, formats) if None in formats else ():
        parse_quantization(quantization)
        try:
            load_model(entry.model, quantization=quantization)
        except PlannerError:
            left_out.append(quantization)
    return tuple(q for q in formats if q not in left_out), tuple(left_out)


def _price_api_bill(
    entry: ScenarioEntry, workload: Workload, day: DailyProfile | None
) -> BillingAlternativesEntry:
    """Turn an API's bill of a month into its price of this traffic's tokens."""
    instead, is_open = entry.instead, entry.open_figure or entry.workload.requests is not None
    usd = instead.api_usd_per_month
    if usd is None:
        return instead
    if instead.api or is_open or workload.rate is None:
        raise PlannerError(
            "instead, field api_usd_per_month: takes the bill of a workload with a rate or a volume,"
            " and no prices in `api` beside it"
        )
    busy = day.mean_fraction if day else 1 / (entry.workload.peak_to_mean or 1.0)
    requests = workload.rate * busy * HOURS_PER_MONTH * 3600
    per_mtok = usd / (requests * workload.mean_tokens_per_request) * 1e6
    api = ApiEntry(usd_per_mtok_input=per_mtok, usd_per_mtok_output=per_mtok)
    return instead.model_copy(update={"api": api})


def _parse_prices(entry: ScenarioEntry) -> PriceSelection:
    """Parse the user's own prices, and whose quotes count for other GPUs."""
    own = {get_gpu(key).name: usd for key, usd in entry.prices.items()}
    bought = {
        get_gpu(key).name: bought.usd_per_hour
        + bought.usd_per_kwh * get_gpu(key).board_limit_w / 1e3
        for key, bought in entry.owned.items()
    }
    if twice := ", ".join({*own} & {*bought}):
        raise PlannerError(f"owned: prices already names {twice}: leave out one of the two")
    seller = find_seller(entry.price_seller) if entry.price_seller else None
    return PriceSelection({**own, **bought}, entry.price_tier, seller)


def _parse_slo_targets(entry: ScenarioEntry) -> tuple[SloTarget, ...]:
    """Parse the SLOs; one whose limit is the question comes first, with a second until it is found."""
    limits = [
        (metric, percentile, limit)
        for metric, ats in entry.service_level.items()
        for percentile, limit in ats.items()
    ]
    return tuple(
        SloTarget(
            metric, percentile, 1.0 if limit == OPEN_FIGURE else limit / 1e3, entry.confidence
        )
        for metric, percentile, limit in sorted(limits, key=lambda each: each[2] != OPEN_FIGURE)
    )


def _parse_candidate_gpus(entry: ScenarioEntry, prices: PriceSelection) -> tuple[CandidateGpu, ...]:
    """Parse the candidate GPUs, each as many as the budget buys at most."""
    candidates, quotes, usd = [], [], entry.budget.per_hour if entry.budget else math.inf
    for g in entry.gpus:
        gpu, count = get_gpu(g.gpu), g.at_most
        if entry.budget:
            if (price := look_up_gpu_price(gpu, prices)) is None:
                raise PlannerError(
                    f"budget: no price of {gpu.name} is known: name one under prices"
                )
            count = min(count, math.floor(usd / price.median_usd + 1e-9))
            quotes.append(f"{gpu.name} ${price.median_usd:.2f}")
        sizes = tuple(sorted(set(g.sold_in)))
        candidates += [CandidateGpu(gpu, count, g.gpus_per_node, g.interconnect, sizes)] * bool(
            count
        )
    if quotes and not candidates:
        raise PlannerError(f"budget: ${usd:.2f} an hour buys no GPU ({', '.join(quotes)})")
    return tuple(candidates)


def _parse_engines(entry: ScenarioEntry, folder: Path) -> list[Engine]:
    """Parse the allowed engines, NAME or NAME VERSION, with the user's own calibration.

    `engine_version` is that of the first one without a version that has such a release; the others
    without one are at the newest known.
    """
    pairs = [name.partition(" ")[::2] for name in entry.engine]
    engines = [get_engine(name, version.strip() or None) for name, version in pairs]
    unversioned = [i for i, (_, version) in enumerate(pairs) if not version.strip()]
    for i in unversioned if entry.engine_version else ():
        with suppress(PlannerError):
            engines[i] = get_engine(engines[i].name, entry.engine_version)
            break
    else:
        for i in unversioned[:1] if entry.engine_version else ():
            get_engine(engines[i].name, entry.engine_version)  # says which releases are known
    if ended := [engine for engine in engines if engine.facts.ended]:
        raise PlannerError(
            f"engine: {ended[0].name} was {ended[0].facts.ended}; accepted:"
            f" {', '.join(list_engines())}; `headroom predict` answers for {ended[0].name}, too"
        )
    if entry.calibration is None:
        return engines
    path = resolve_existing_path(folder, entry.calibration, "calibration")
    calibrations = load_user_calibrations(path)
    engines = [apply_user_calibrations(engine, calibrations) for engine in engines]
    if not any(engine.calibration for engine in engines):
        measured = ", ".join(sorted({entry.engine for entry in calibrations.values()})) or "nothing"
        allowed = " or ".join(engine.name for engine in engines)
        raise PlannerError(
            f"calibration: {entry.calibration} was measured under {measured}, not {allowed}"
        )
    return engines


def _check_consistency(scenario: Scenario) -> None:
    """Raise `PlannerError` for valid fields that contradict each other or the catalogs."""
    if not scenario.gpus:
        raise PlannerError("gpus: name at least one candidate GPU")
    for candidate in scenario.gpus:
        node = candidate.gpus_per_node or candidate.gpu.gpus_per_node
        if candidate.sold_in and candidate.sold_in[-1] > node:
            raise PlannerError(
                f"gpus, {candidate.gpu.name}, field sold_in: machines of at most {node} GPUs"
            )
        if candidate.interconnect:
            resolve_link_bandwidth(candidate.gpu, candidate.interconnect)
    if not scenario.slo_targets and not scenario.offline:
        raise PlannerError(
            "service_level: state at least one limit, such as {ttft: {p95: 1000}} (ms)"
        )
    models = [
        load_model(scenario.model, quantization=quantization)
        for quantization in scenario.quantizations
    ]
    if scenario.speculation:
        drafting = scenario.speculation.to_config()
        for served_by in (scenario.engine, *scenario.other_engines):
            if reason := explain_unsupported_method(drafting.method, served_by):
                raise PlannerError(f"speculation, field method: {reason}")
            if scenario.speculation.allowed and (
                reason := explain_missing_draft(drafting, served_by)
            ):
                raise PlannerError(f"speculation, field head: {reason}")
    for kv_cache_dtype in scenario.kv_cache_dtypes:
        args, refusals = {"kv_cache_dtype": kv_cache_dtype, **scenario.engine_args}, []
        for candidate in scenario.gpus:
            try:
                resolve_engine_args(args, scenario.engine, candidate.gpu, models[0])
            except PlannerError as error:
                refusals.append(error)
        if len(refusals) == len(scenario.gpus):
            raise refusals[0]
