"""A capacity question as its owner writes it down: one YAML file, checked on load."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, create_model

from planner.catalog import CATALOGS, Entry, check, read_yaml
from planner.coefficients import calibrated_by, own_calibrations
from planner.deployment import Speculation
from planner.engines import Engine, EngineArgs, engine, resolve
from planner.framework import Traits
from planner.hardware import Gpu, gpu, interconnect
from planner.memory import Term
from planner.models import Model, model
from planner.quantities import GIB, PlannerError, did_you_mean
from planner.workload import Lengths, Workload, read_trace

SCENARIOS = CATALOGS / "scenarios"
Setting = int | float | bool | str
Metric = Literal["ttft", "itl", "tpot", "e2e"]
Percentile = Literal["mean", "p50", "p95", "p99"]


class LengthsEntry(Entry):
    """Tokens per request; with a mean alone every request has that length."""

    mean: PositiveFloat
    p50: PositiveFloat | None = None
    p95: PositiveFloat | None = None
    max: PositiveFloat | None = None


class PrefixEntry(Entry):
    """The shared beginning of the prompts."""

    tokens: NonNegativeInt = 0
    hit_rate: NonNegativeFloat = 1.0


class WorkloadEntry(Entry):
    """Traffic: lengths or a trace; a rate, or a number of requests to finish within some hours."""

    prompt_tokens: LengthsEntry | None = None
    output_tokens: LengthsEntry | None = None
    trace: str | None = None
    rate: PositiveFloat | None = None
    burstiness: PositiveFloat | None = None
    requests: PositiveInt | None = None
    within_hours: PositiveFloat | None = None
    shared_prefix: PrefixEntry | None = None


class CandidateEntry(Entry):
    """One kind of GPU that may be used."""

    gpu: str
    at_most: PositiveInt
    gpus_per_node: PositiveInt | None = None
    interconnect: str | None = None


class SpeculationEntry(Entry):
    """Speculative decoding to judge; candidates use it where it is `allowed`."""

    method: str
    num_speculative_tokens: PositiveInt
    acceptance_rate: NonNegativeFloat
    draft_model: str | None = None
    allowed: bool = True

    def load(self) -> Speculation:
        """As a deployment wants it."""
        draft = model(self.draft_model) if self.draft_model else None
        return Speculation(self.method, self.num_speculative_tokens, self.acceptance_rate, draft)

    def __str__(self) -> str:
        return f"{self.method}, k = {self.num_speculative_tokens}, acceptance rate {self.acceptance_rate:.2f}"


class ScenarioEntry(Entry):
    """A scenario file; `catalogs/scenarios/chat-70b.yaml` explains every field."""

    question: str
    model: str
    quantization: tuple[str, ...] = ("checkpoint",)
    kv_cache_dtype: tuple[str, ...] = ("auto",)
    gpus: tuple[CandidateEntry, ...]
    engine: str = "vllm"
    engine_version: str | None = None
    engine_args: dict[str, Setting] = Field(default_factory=dict)
    workload: WorkloadEntry
    service_level: dict[Metric, dict[Percentile, PositiveFloat]] = Field(default_factory=dict)
    headroom: Annotated[float, Field(ge=0, lt=1)] = 0.2
    refused_at_most: Annotated[float, Field(ge=0, lt=1)] = 0.01
    context_buffer: NonNegativeFloat = 0.1
    prices: dict[str, PositiveFloat] = Field(default_factory=dict)
    other_tenants_gib: NonNegativeFloat = 0.0
    memory_calibration: dict[Term, Annotated[float, Field(ge=-1e4, le=1e4)]] = Field(default_factory=dict)
    calibration: str | None = None
    speculation: SpeculationEntry | None = None
    traits: dict[str, bool] = Field(default_factory=dict)


_FIELDS: dict[str, Any] = {name: (kind, None) for name, kind in get_type_hints(EngineArgs).items()}
_EngineArgs = create_model("_EngineArgs", __base__=Entry, **_FIELDS)


@dataclass(frozen=True)
class CandidateGpu:
    """A GPU that may be used, how many of it at most, and how they are wired (None: as the catalog says)."""

    gpu: Gpu
    at_most: int
    gpus_per_node: int | None = None
    interconnect: str | None = None


@dataclass(frozen=True)
class Target:
    """One promise of the service level: `metric` at `percentile` takes at most `seconds`."""

    metric: Metric
    percentile: Percentile
    seconds: float

    @property
    def name(self) -> str:
        """ "p95 TPOT"."""
        return f"{self.percentile} {self.metric.upper()}"

    def __str__(self) -> str:
        return f"{self.name} of at most {self.seconds * 1e3:,.0f} ms"


@dataclass(frozen=True)
class Scenario:
    """What is asked: a model, the hardware to choose from, the traffic and the service level."""

    name: str
    question: str
    model: str
    quantizations: tuple[str | None, ...]  # None: as the checkpoint is
    kv_cache_dtypes: tuple[str, ...]
    gpus: tuple[CandidateGpu, ...]
    engine: Engine
    workload: Workload
    service_level: tuple[Target, ...]
    offline: bool = False  # all requests are there at once, and `workload.rate` is what the deadline asks for
    engine_args: Mapping[str, Setting] = field(default_factory=dict)
    headroom: float = 0.2  # share of the capacity (requests/s) that stays free in the busiest hour
    refused_at_most: float = 0.01  # share of requests that may be refused, being longer than max_model_len
    context_buffer: float = 0.1
    prices: Mapping[str, float] = field(default_factory=dict)
    other_tenants: int = 0  # bytes on each GPU
    memory_calibration: Mapping[str, float] = field(default_factory=dict)  # bytes to add to terms of every plan
    speculation: SpeculationEntry | None = None
    traits: Traits = field(default_factory=Traits)

    def __str__(self) -> str:
        return f"{self.name}: {self.model} on {' or '.join(c.gpu.name for c in self.gpus)}; {self.workload}"


def scenarios() -> tuple[str, ...]:
    """Names of the shipped scenarios."""
    return tuple(sorted(path.stem for path in SCENARIOS.glob("*.yaml")))


def scenario_path(name: str | Path) -> Path:
    """The file of the shipped scenario `name`, or `name` itself where it is a YAML file's path."""
    if Path(name).suffix in (".yaml", ".yml"):
        return Path(name)
    if str(name) not in scenarios():
        raise did_you_mean(str(name), scenarios(), "scenario")
    return SCENARIOS / f"{name}.yaml"


def load_scenario(name: str | Path) -> Scenario:
    """The shipped scenario `name`, or the one in the YAML file `name`; `PlannerError` for whatever is wrong in it."""
    path = scenario_path(name)
    data = read_yaml(path)
    if not isinstance(data, dict):
        raise PlannerError(f"{path.name}: expected fields such as model, gpus and workload, got {type(data).__name__}")
    return scenario(data, path.stem, path.parent)


def scenario(data: Mapping[str, object], name: str, folder: Path = Path()) -> Scenario:
    """A scenario from the fields of a file called `name`; trace and calibration are looked for from `folder`."""
    entry = check(ScenarioEntry, data, name)
    try:
        found = Scenario(
            name=name,
            question=entry.question,
            model=entry.model,
            quantizations=tuple(None if q == "checkpoint" else q for q in entry.quantization),
            kv_cache_dtypes=entry.kv_cache_dtype,
            gpus=tuple(CandidateGpu(gpu(g.gpu), g.at_most, g.gpus_per_node, g.interconnect) for g in entry.gpus),
            engine=_engine(entry, folder),
            workload=_workload(entry.workload, folder),
            service_level=tuple(
                Target(metric, percentile, limit / 1e3)
                for metric, limits in entry.service_level.items()
                for percentile, limit in limits.items()
            ),
            offline=entry.workload.requests is not None,
            engine_args=_typed(entry.engine_args),
            headroom=entry.headroom,
            refused_at_most=entry.refused_at_most,
            context_buffer=entry.context_buffer,
            prices={gpu(key).name: usd for key, usd in entry.prices.items()},
            other_tenants=round(entry.other_tenants_gib * GIB),
            memory_calibration={term: gib * GIB for term, gib in entry.memory_calibration.items()},
            speculation=entry.speculation,
            traits=Traits(**_known(entry.traits, Traits.__dataclass_fields__, "trait")),
        )
        _possible(found)
    except PlannerError as error:
        raise PlannerError(f"{name}: {error}") from None
    return found


def _engine(entry: ScenarioEntry, folder: Path) -> Engine:
    """The engine, with the step costs that the owner measured."""
    found = engine(entry.engine, entry.engine_version)
    if entry.calibration is None:
        return found
    own = own_calibrations(folder / entry.calibration)
    found = calibrated_by(found, own)
    if not found.calibration:
        engines = ", ".join(sorted({calibration.engine for calibration in own.values()}))
        raise PlannerError(
            f"calibration: {entry.calibration} was measured under {engines or 'nothing'}, not {found.name}"
        )
    return found


def _known(given: Mapping[str, Any], known: Mapping[str, object], what: str) -> Mapping[str, Any]:
    """What was given, if all its names are known."""
    for key in given:
        if key not in known:
            raise did_you_mean(key, known, what)
    return given


def _refusal(args: EngineArgs, engine: Engine, card: Gpu, served: Model) -> PlannerError | None:
    """What the engine has against these arguments on this GPU."""
    try:
        resolve(args, engine, card, served)
    except PlannerError as error:
        return error
    return None


def _typed(given: Mapping[str, Setting]) -> Mapping[str, Setting]:
    """Engine arguments with the types that the engine gives them."""
    known = _known(given, EngineArgs.__dataclass_fields__, "engine argument")
    return check(_EngineArgs, known, "engine_args").model_dump(exclude_none=True)


def _workload(entry: WorkloadEntry, folder: Path) -> Workload:
    """The traffic of a scenario file; its own figures win over the trace's."""
    rate = entry.rate
    if (entry.requests is None) != (entry.within_hours is None):
        raise PlannerError("workload: requests and within_hours go together")
    if entry.requests and entry.within_hours:
        if rate is not None:
            raise PlannerError("workload: give a rate, or requests within_hours, not both")
        rate = entry.requests / (entry.within_hours * 3600)
    base = Workload.from_trace(read_trace(folder / entry.trace), rate) if entry.trace is not None else None
    if base is None and rate is None:
        raise PlannerError("workload: needs a rate (requests per second), a trace, or requests with within_hours")
    prefix = entry.shared_prefix or PrefixEntry(hit_rate=base.prefix_hit_rate if base else 0.0)
    return Workload(
        prompt=_lengths(entry.prompt_tokens, "prompt_tokens", base.prompt if base else None),
        output=_lengths(entry.output_tokens, "output_tokens", base.output if base else None),
        rate=base.rate if base else rate,
        burstiness=entry.burstiness or (base.burstiness if base else 1.0),
        prefix_tokens=prefix.tokens,
        prefix_hit_rate=prefix.hit_rate,
        num_prompts=entry.requests,
        trace=base.trace if base else None,
    )


def _lengths(entry: LengthsEntry | None, field: str, measured: Lengths | None) -> Lengths:
    """The lengths asked for, or else those measured."""
    if entry is None:
        if measured is None:
            raise PlannerError(f"workload: needs {field} (mean, and p50 or p95) or a trace")
        return measured
    try:
        return Lengths.lognormal(entry.mean, entry.p95, entry.p50, entry.max)
    except PlannerError as error:
        raise PlannerError(f"workload, {field}: {error}") from None


def _possible(scenario: Scenario) -> None:
    """Raise `PlannerError` for what is well-formed but cannot be meant."""
    if not scenario.gpus:
        raise PlannerError("gpus: name at least one candidate GPU")
    if not scenario.service_level and not scenario.offline:
        raise PlannerError("service_level: state at least one limit, such as {ttft: {p95: 1000}} (ms)")
    served = [model(scenario.model, quantization=quantization) for quantization in scenario.quantizations or (None,)]
    if scenario.speculation:
        scenario.speculation.load()
    for kv_cache_dtype in scenario.kv_cache_dtypes:
        args = EngineArgs(**{"kv_cache_dtype": kv_cache_dtype, **scenario.engine_args})  # type: ignore[arg-type]
        refusals = [_refusal(args, scenario.engine, candidate.gpu, served[0]) for candidate in scenario.gpus]
        if all(refusals):
            raise refusals[0]  # type: ignore[misc]
    for candidate in scenario.gpus:
        if candidate.interconnect:
            interconnect(candidate.gpu, candidate.interconnect)
