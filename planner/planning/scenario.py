"""A capacity question, and how it is read from one YAML file."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from os.path import isfile
from pathlib import Path
from typing import Any

from planner.core.catalog import CATALOG_DIR, validate_entry
from planner.core.errors import (
    PlannerError,
    add_error_context,
    check_known_names,
    make_unknown_name_error,
    validate_unicode_text,
)
from planner.core.readers import read_yaml
from planner.core.units import GIB, convert_gib_to_bytes
from planner.engines.engine import Engine, find_dynamo_release, get_engine
from planner.engines.engine_args import resolve_engine_args
from planner.engines.speculation_methods import explain_missing_draft, explain_unsupported_method
from planner.hardware.gpus import Gpu, get_gpu, resolve_link_bandwidth
from planner.hardware.prices import PriceSelection
from planner.latency.coefficient_lookup import apply_user_calibrations, load_user_calibrations
from planner.latency.startup_time import validate_storage
from planner.models.registry import load_model
from planner.planning.framework_choice import WorkloadTraits
from planner.planning.scenario_schema import (  # fmt: skip
    ArtifactKind,
    BillingAlternativesEntry,
    ScenarioEntry,
    SettingValue,
    SpeculationEntry,
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
    """A GPU that may be used, how many of it at most, and how they are wired (None: as the catalog says)."""

    gpu: Gpu
    max_gpus: int
    gpus_per_node: int | None = None
    interconnect: str | None = None
    sold_in: tuple[int, ...] = ()  # GPUs of the machines that are let

    @property
    def machine_sizes(self) -> tuple[int, ...]:
        """GPUs of the machines to choose from, at most a node's; none: any number is let."""
        if self.sold_in or self.gpus_per_node is None or not self.gpu.sold_in:
            return self.sold_in or self.gpu.sold_in
        return tuple(
            sorted(
                {
                    *(size for size in self.gpu.sold_in if size < self.gpus_per_node),
                    self.gpus_per_node,
                }
            )
        )

    @property
    def max_machine_gpus(self) -> int:
        """GPUs of the largest machine."""
        return min([self.gpus_per_node or self.gpu.gpus_per_node, *self.machine_sizes[-1:]])


@dataclass(frozen=True)
class Scenario:
    """What is asked: a model, the hardware to choose from, the traffic and the service level.

    `workload` is an open loop (`rate`; a trace's own arrivals where it has one), or a closed loop:
    `concurrency` users, of whom each sends a request as soon as the one before is answered, and
    then no rate is given. Where `offline`, all requests are there at once, and `workload.rate` is
    the pace that the deadline asks for.
    """

    name: str
    question: str
    model: str
    quantizations: tuple[str | None, ...]  # None: as the checkpoint is
    kv_cache_dtypes: tuple[str, ...]
    gpus: tuple[CandidateGpu, ...]
    engine: Engine  # the first of those that may be used
    workload: Workload
    slo_targets: tuple[SloTarget, ...]
    offline: bool
    engine_args: Mapping[str, SettingValue]
    layout: Mapping[str, int]  # parallel sizes that are settled
    # share of the capacity (requests/s) that stays free in the busiest hour; 0 for users in a loop
    headroom: float
    refused_at_most: float  # share of requests that may be refused, being longer than max_model_len
    context_buffer: float
    storage: str  # what a starting server reads its weights from
    prices: PriceSelection
    spare_replicas: int  # that may be lost while every promise still holds
    start_up_at_most: float | None  # seconds until a replica answers, nothing cached
    power_at_most: float | None  # W of all GPUs, on average under the planned load
    other_tenants: int  # bytes on each GPU
    memory_calibration: Mapping[str, float]  # bytes to add to terms of every plan
    speculation: SpeculationEntry | None
    allow_disaggregation: bool  # whether separate prefill and decode pools are looked at, too
    traits: WorkloadTraits
    files: tuple[Path, ...]  # that it was read from
    other_engines: tuple[Engine, ...]  # that may be used as well
    output_kinds: tuple[ArtifactKind, ...]  # to be written
    daily_profile: DailyProfile | None = (
        None  # how the traffic rises and falls; `workload` is its busiest hour
    )
    replicas_at_least: int = 1  # in its quietest hour
    billing_alternatives: BillingAlternativesEntry = field(default_factory=BillingAlternativesEntry)

    @property
    def assumptions(self) -> tuple[str, ...]:
        """What the file leaves open and the plan takes for granted, in sentences for its reader."""
        return (
            *(f"{note.rstrip('.')}." for note in load_model(self.model).warnings),
            *self.workload.assumptions,
        )

    @property
    def split_by_engine(self) -> tuple["Scenario", ...]:
        """The same question of each engine that may be used."""
        engines = (self.engine, *self.other_engines)
        return tuple(replace(self, engine=engine, other_engines=()) for engine in engines)

    def __str__(self) -> str:
        return (
            f"{self.name}: {self.model} on {' or '.join(c.gpu.name for c in self.gpus)};"
            f" {self.workload}"
        )


def list_scenarios() -> tuple[str, ...]:
    return tuple(sorted(path.stem for path in SCENARIO_DIR.glob("*.yaml")))


def find_scenario_file(name: str | Path, folder: Path = Path()) -> Path:
    """The file of the shipped scenario `name`, or `name` itself where it is a YAML file's path, maybe in `folder`."""
    if Path(name).suffix in (".yaml", ".yml"):
        return folder / name if isfile(folder / name) else Path(name)
    if str(name) not in list_scenarios():
        raise make_unknown_name_error(str(name), list_scenarios(), "scenario")
    return SCENARIO_DIR / f"{name}.yaml"


def load_scenario(name: str | Path, overrides: Mapping[str, Any] | None = None) -> Scenario:
    """The shipped scenario `name`, or the one in the YAML file `name`; `PlannerError` for whatever is wrong in it.

    `overrides` sets fields by dotted name, items of a list by number: {"workload.rate": 12,
    "gpus.0.at_most": 8}.
    """
    path = find_scenario_file(name)
    data = read_yaml(path)
    if isinstance(data, dict):
        data = apply_overrides(data, overrides or {}, path.name)
    scenario = parse_scenario(data, validate_unicode_text(path.stem, "scenario"), path.parent)
    return replace(scenario, files=(path, *scenario.files))


def apply_overrides(
    data: Mapping[str, Any], overrides: Mapping[str, Any], location: str
) -> dict[str, Any]:
    """A copy of the fields `data` of the file `where`, with those set that `overrides` names."""
    found = copy.deepcopy(dict(data))
    for key, value in overrides.items():
        place: Any = found
        *parents, last = key.split(".", 20)
        for parent in parents:
            if isinstance(place, dict):
                place[parent] = {} if place.get(parent) is None else place[parent]
            place = place[_resolve_path_part(place, parent, key, location)]
        place[_resolve_path_part(place, last, key, location)] = value
    return found


def _resolve_path_part(place: Any, name: str, key: str, location: str) -> Any:
    """What `place` calls its part `name`: a field, or the number of an item."""
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
    "question", "model", "refused_at_most", "context_buffer", "spare_replicas", "start_up_at_most",
    "power_at_most",
    "speculation", "replicas_at_least",
)  # fmt: skip
"""Fields that a question has from its file as they are."""


def parse_scenario(data: Mapping[str, object], name: str, folder: Path = Path()) -> Scenario:
    """A scenario from the fields of a file called `name`.

    Fields without a value count as left out. Trace, calibration and a model's config.json are
    looked for from `folder`, then from the working directory.
    """
    if not isinstance(data, Mapping):
        raise PlannerError(
            f"{name}: expected fields such as model, gpus and workload, got {type(data).__name__}"
        )
    entry = validate_entry(
        ScenarioEntry, {field: value for field, value in data.items() if value is not None}, name
    )
    if isfile(folder / entry.model) or isfile(folder / entry.model / "config.json"):
        entry = entry.model_copy(update={"model": str(folder / entry.model)})
    with add_error_context(name):
        given = {**(entry.adapters.engine_args if entry.adapters else {}), **entry.engine_args}
        engine_args, served_by = coerce_engine_args(given), _parse_engines(entry, folder)
        longest = float(
            engine_args.get("max_model_len") or load_model(entry.model).architecture.max_position
        )
        day = parse_daily_profile(entry.workload, folder)
        own_day = str(entry.workload.day) if day and day.peak_rps else None
        scenario = Scenario(
            name=name,
            **{field: getattr(entry, field) for field in FIELDS_COPIED_FROM_FILE},
            allow_disaggregation=entry.pools,
            billing_alternatives=entry.instead,
            quantizations=tuple(None if q == "checkpoint" else q for q in entry.quantization),
            kv_cache_dtypes=entry.kv_cache_dtype,
            gpus=tuple(
                CandidateGpu(
                    get_gpu(g.gpu),
                    g.at_most,
                    g.gpus_per_node,
                    g.interconnect,
                    tuple(sorted(set(g.sold_in))),
                )
                for g in entry.gpus
            ),
            engine=served_by[0],
            other_engines=tuple(served_by[1:]),
            workload=parse_workload(entry.workload, longest, folder, day, entry.adapters),
            slo_targets=tuple(
                SloTarget(metric, percentile, limit / 1e3)
                for metric, limits in entry.service_level.items()
                for percentile, limit in limits.items()
            ),
            offline=entry.workload.requests is not None,
            engine_args=engine_args,
            layout=entry.layout.model_dump(exclude_none=True),
            headroom=entry.headroom if entry.workload.concurrency is None else 0.0,
            storage=validate_storage(entry.storage),
            prices=PriceSelection(
                {get_gpu(key).name: usd for key, usd in entry.prices.items()}, entry.price_tier
            ),
            other_tenants=convert_gib_to_bytes(
                entry.other_tenants_gib,
                max((get_gpu(g.gpu).memory_bytes for g in entry.gpus), default=0),
                "other_tenants_gib",
            ),
            memory_calibration={term: gib * GIB for term, gib in entry.memory_calibration.items()},
            traits=WorkloadTraits(
                **check_known_names(entry.traits, WorkloadTraits.__dataclass_fields__, "trait")
            ),
            output_kinds=entry.files,
            daily_profile=day,
            files=tuple(
                resolve_path(folder, file)
                for file in (entry.calibration, entry.workload.trace, own_day)
                if file
            ),
        )
        _check_consistency(scenario)
        if (mean := scenario.workload.mean_tokens_per_request) > longest:
            of = (
                "engine_args, field max_model_len"
                if "max_model_len" in engine_args
                else "the model's context length"
            )
            raise PlannerError(
                f"workload: prompt_tokens and output_tokens, {mean:,.0f} together on average, do"
                f" not fit into {of} ({longest:,.0f} tokens)"
            )
    return scenario


def _parse_engines(entry: ScenarioEntry, folder: Path) -> list[Engine]:
    """The engines that may be used, each NAME or NAME VERSION, with the step costs that the owner measured."""
    if entry.engine_version and len(entry.engine) > 1:
        raise PlannerError(
            f"engine_version: with several engines each has its own, such as {entry.engine[0]}"
            f" {entry.engine_version}"
        )
    asked = [name.partition(" ")[::2] for name in entry.engine]
    engines = [get_engine(name, version.strip() or entry.engine_version) for name, version in asked]
    if entry.calibration is None:
        return engines
    own = load_user_calibrations(resolve_existing_path(folder, entry.calibration, "calibration"))
    engines = [apply_user_calibrations(engine, own) for engine in engines]
    if not any(one.calibration for one in engines):
        under = ", ".join(sorted({calibration.engine for calibration in own.values()})) or "nothing"
        names = " or ".join(one.name for one in engines)
        raise PlannerError(
            f"calibration: {entry.calibration} was measured under {under}, not {names}"
        )
    return engines


def check_artifact_supported(kind: str, engine: Engine) -> None:
    """Raise `PlannerError` where files of this `kind` can never start `engine`."""
    if kind == "dynamo":
        find_dynamo_release(engine)
    if kind in ("production-stack", "runpod") and engine.name != "vllm":
        raise PlannerError(f"files: {kind} serves vLLM alone, not {engine.name}")


def _check_consistency(scenario: Scenario) -> None:
    """Raise `PlannerError` for what is well-formed but cannot be meant."""
    if not scenario.gpus:
        raise PlannerError("gpus: name at least one candidate GPU")
    for candidate_gpu in scenario.gpus:
        if candidate_gpu.sold_in and candidate_gpu.sold_in[-1] > (
            node := candidate_gpu.gpus_per_node or candidate_gpu.gpu.gpus_per_node
        ):
            raise PlannerError(
                f"gpus, {candidate_gpu.gpu.name}, field sold_in: machines of at most {node} GPUs"
            )
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
    for served_by in (scenario.engine, *scenario.other_engines):
        for kind in scenario.output_kinds:
            check_artifact_supported(kind, served_by)
    for candidate in scenario.gpus:
        if candidate.interconnect:
            resolve_link_bandwidth(candidate.gpu, candidate.interconnect)
