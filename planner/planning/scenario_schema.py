"""Fields of a scenario file, their types and bounds.

`catalogs/scenarios/chat-70b.yaml` explains every field.
"""

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self, get_type_hints

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    WrapValidator,
    create_model,
    model_validator,
)
from pydantic_core import PydanticCustomError

from planner.core.catalog import StrictEntry, validate_entry
from planner.core.errors import PlannerError
from planner.core.intervals import Z_SCORE_80PCT
from planner.core.units import MAX_COUNT
from planner.engines.engine import Engine
from planner.engines.engine_args import LORA_RANKS, EngineArgs, split_engine_args
from planner.engines.layout import SpeculationConfig
from planner.hardware.gpus import get_gpu
from planner.hardware.prices import HOURS_PER_MONTH, PriceTier
from planner.latency.startup_time import DEFAULT_STORAGE
from planner.memory.memory_plan import MemoryTerm
from planner.models.registry import load_model
from planner.planning.framework_choice import WorkloadTraits
from planner.planning.slo import LatencyMetric, LatencyStatistic
from planner.workload.daily_profile import HOURS_PER_DAY, HOURS_PER_WEEK

MAX_GPUS_PER_KIND, MAX_SPARE_REPLICAS = 16_384, 1024
"""Largest `at_most` of a scenario's GPU, and `spare_replicas`, of a scenario or a plan.json."""
LayoutSize = Literal["tp", "pp", "dp", "ep"]
SettingValue = int | float | bool | str
ArtifactKind = Literal[
    "script", "unit", "benchmark", "alerts", "dashboard", "checklist",
    "compose", "kubernetes", "runpod",
]  # fmt: skip
DEFAULT_ARTIFACTS: tuple[ArtifactKind, ...] = (
    "script",
    "unit",
    "benchmark",
    "alerts",
    "dashboard",
    "checklist",
)
"""Files that are written unless a scenario lists others."""


def _wrap_in_list(value: object) -> object:
    """Make a list of an item that is given without one."""
    return (value,) if isinstance(value, str | dict | int) else value


def _parse_hours(value: object) -> object:
    """Return a day unchanged: a name, a file, or one figure per hour, which are checked."""
    if value is None or isinstance(value, str):
        return value
    figures: Sequence[object] = value if isinstance(value, list | tuple) else [None]
    if not all(
        isinstance(hour, int | float) and type(hour) is not bool and 0 <= hour <= 1e12
        for hour in figures
    ):
        accepted = (
            f"must be {HOURS_PER_DAY} to {HOURS_PER_WEEK} hourly figures from 0 to 1e12, a"
            " profile's name, or a trace's file"
        )
        raise PydanticCustomError("day", accepted)
    return tuple(figures)


PositiveNumber = Annotated[float, Field(gt=0, le=1e12)]
UsdPerGpuHour = Annotated[float, Field(ge=0.001, le=10_000)]
NonNegativeNumber = Annotated[float, Field(ge=0, le=1e6)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
PositiveCount = Annotated[int, Field(gt=0, le=MAX_COUNT)]
NonNegativeCount = Annotated[int, Field(ge=0, le=MAX_COUNT)]
NameList = Annotated[tuple[str, ...], BeforeValidator(_wrap_in_list), Field(min_length=1)]


class LengthsEntry(StrictEntry):
    """Tokens per request: a mean with p50, p95 or the spread of a public trace; or `exactly`."""

    mean: PositiveNumber | None = None
    exactly: PositiveNumber | None = None
    p50: PositiveNumber | None = None
    p95: PositiveNumber | None = None
    max: PositiveNumber | None = None

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        others = {*self.model_dump(exclude_none=True)} - {"exactly"}
        if self.exactly is not None and others:
            raise ValueError(
                f"exactly says that all lengths are alike: leave out {', '.join(sorted(others))}"
            )
        if self.exactly is None and self.mean is None:
            raise ValueError(
                "needs the mean (best with p50 and p95), or exactly for lengths that are all alike"
            )
        return self


class PrefixEntry(StrictEntry):
    """The shared beginning of the prompts."""

    tokens: NonNegativeCount = 0
    hit_rate: NonNegativeNumber = 1.0


class TrafficRange(NamedTuple):
    """Ends of the 80% interval of the traffic, in requests/s."""

    low: float
    high: float

    @property
    def middle(self) -> float:
        """The rate that is as likely exceeded as not, of a lognormal."""
        return math.sqrt(self.low * self.high)

    @property
    def sigma(self) -> float:
        """The standard deviation of the logarithm of the rate.

        >>> round(TrafficRange(4, 6).sigma, 4)
        0.1582
        """
        return math.log(self.high / self.low) / (2 * Z_SCORE_80PCT)


OpenFigure = Literal["rate", "concurrency", "limit"]
OPEN_FIGURE = sys.maxsize
"""Stands for the figure that is the question: `max`, the largest load, or `best`, the shortest limit."""


def _accept_word(word: str) -> WrapValidator:
    """Accept a word in place of a figure, which it makes the question."""
    return WrapValidator(lambda value, validate: OPEN_FIGURE if value == word else validate(value))


def _accept_range(value: object, validate: Callable[[object], float]) -> float | TrafficRange:
    """Validate a rate, or both ends of a range of it."""
    if not isinstance(value, list | tuple):
        return validate(value)
    ends = [validate(end) for end in value]
    if len(ends) != 2 or not ends[0] < ends[1]:
        raise PydanticCustomError(
            "range", "must be a number, or two rising ones between which it lies in 4 of 5 cases"
        )
    return TrafficRange(*ends)


class SessionsEntry(StrictEntry):
    """Chats or agents: each turn repeats the turns before it, and comes after a time to think."""

    users: Annotated[PositiveNumber, _accept_word("max")] | None = None
    per_hour: PositiveNumber | None = None
    turns: LengthsEntry
    system_tokens: NonNegativeCount = 0
    context_tokens: LengthsEntry
    turn_tokens: LengthsEntry
    output_tokens: LengthsEntry
    think_seconds: LengthsEntry
    max_context: PositiveNumber | None = None
    answer_seconds: PositiveNumber | None = None

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if (self.users is None) == (self.per_hour is None):
            raise ValueError("give users (at work at the busiest time) or per_hour (new sessions)")
        return self


VOLUME_FIELDS = ("tokens_per_day", "tokens_per_month", "requests_per_day", "requests_per_month")
"""Fields of a workload that state its volume in place of a rate."""
DAY_FIELDS = ("day", "office_hours", "office_days")
"""Fields of a workload that say how its traffic rises and falls."""


class TrafficVolume(NamedTuple):
    """Traffic as a bill states it: tokens (prompt and output) or requests of a day or a month.

    Days without traffic do not count among the days; a month is a mean one, with all its days.
    """

    amount: float
    unit: str  # tokens or requests
    period: str  # day or month

    def __str__(self) -> str:
        millions = self.amount / 1e6
        amount = f"{self.amount:,.0f}" if millions < 1 else f"{millions:,.3g} million"
        return f"{amount} {self.unit} a {self.period}"


_LOADS = {"rate", "concurrency", "requests", "trace"}
EXCLUDED_FIELDS: tuple[tuple[set[str], set[str], str], ...] = (
    (
        {"sessions"},
        {*_LOADS, *VOLUME_FIELDS, "prompt_tokens", "output_tokens", "shared_prefix", "burstiness"}
        | {"within_hours", "peak_to_mean"},
        "sessions say lengths, load and shared prefixes",
    ),
    ({"rate: max", "concurrency: max"}, {*DAY_FIELDS, "trace", "requests"}, "max asks for a steady load"),
    ({"day", "office_hours"}, {"concurrency", "requests"}, "a day needs a rate, that of its busiest hour"),
    ({"day"}, {"office_hours", "office_days"}, "day says which hours have traffic"),
    ({"day", "office_hours"}, {"peak_to_mean"}, "a day says how much its busiest hour has"),
    (
        {"concurrency"},
        {"rate", "requests", "trace", "burstiness"},
        "with a concurrency a request comes when another is answered, so give rate instead, or",
    ),
    ({"requests"}, {"rate"}, "requests within_hours say the rate"),
    *(
        ({name}, {*_LOADS, *VOLUME_FIELDS} - {name}, f"{name} says the rate")
        for name in VOLUME_FIELDS
    ),
)  # fmt: skip
"""Fields of a workload, those that none of them stands beside, and why."""
NEEDED_FIELDS: tuple[tuple[str, set[str]], ...] = (
    ("office_days", {"office_hours"}),
    ("requests", {"within_hours"}),
    ("within_hours", {"requests"}),
    ("peak_to_mean", {*VOLUME_FIELDS}),
)
"""Fields of a workload, and those of which one has to stand beside each."""


class WorkloadEntry(StrictEntry):
    """Lengths or a trace, and the load: a rate, a closed loop, or requests within some hours."""

    misspelling_hints: ClassVar = dict.fromkeys(
        ("think", "user", "session"),
        "for N users who each ask every T s (answer and thinking time together) set rate to N / T;"
        " for N users who ask again at once set concurrency to N; for chats and agents of several"
        " turns give sessions",
    )

    prompt_tokens: LengthsEntry | None = None
    output_tokens: LengthsEntry | None = None
    sessions: SessionsEntry | None = None
    trace: str | None = None
    rate: (
        Annotated[
            float, Field(ge=1e-6, le=1e12), WrapValidator(_accept_range),
            _accept_word("max"),
        ]
        | None
    ) = None  # fmt: skip
    concurrency: Annotated[PositiveCount, _accept_word("max")] | None = None
    burstiness: PositiveNumber | None = None
    requests: PositiveCount | None = None
    within_hours: PositiveNumber | None = None
    shared_prefix: PrefixEntry | None = None
    tokens_per_day: PositiveNumber | None = None
    tokens_per_month: PositiveNumber | None = None
    requests_per_day: PositiveNumber | None = None
    requests_per_month: PositiveNumber | None = None
    peak_to_mean: Annotated[float, Field(ge=1, le=100)] | None = None
    day: Annotated[str | tuple[float, ...] | None, BeforeValidator(_parse_hours)] = None
    office_hours: (
        tuple[Annotated[int, Field(ge=0, le=24)], Annotated[int, Field(ge=0, le=24)]] | None
    ) = None
    office_days: Annotated[int, Field(ge=1, le=7)] | None = None

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        given = {name for name in type(self).model_fields if getattr(self, name) is not None}
        is_open = {"rate: max"} if self.sessions and self.sessions.users == OPEN_FIGURE else set()
        given |= is_open | {f"{name}: max" for name in given if getattr(self, name) == OPEN_FIGURE}
        for fields, excluded, reason in EXCLUDED_FIELDS:
            if fields & given and (others := excluded & given):
                raise ValueError(f"{reason}: leave out {', '.join(sorted(others))}")
        for name, needed in NEEDED_FIELDS:
            if name in given and not needed & given:
                raise ValueError(f"{name} needs {' or '.join(sorted(needed))} beside it")
        opens, closes = self.office_hours or (0, 24)
        if opens >= closes:
            raise ValueError("office_hours are those of opening and closing, such as [9, 18]")
        return self

    @property
    def volume(self) -> TrafficVolume | None:
        """The traffic of a day or a month, of which the rate is worked out; None if it is not given so."""
        for name in VOLUME_FIELDS:
            if amount := getattr(self, name):
                unit, period = name.split("_per_")
                return TrafficVolume(amount, unit, period)
        return None


class ServerlessEntry(StrictEntry):
    """GPUs billed by the second.

    They are billed while a replica starts, works, and waits `idle_seconds` for another request.
    """

    usd_per_gpu_second: PositiveNumber
    cold_start: PositiveNumber | None = None
    idle_seconds: NonNegativeNumber = 0.0
    warm_replicas: Annotated[int, Field(ge=0, le=1024)] = 0


class OwnedGpuEntry(StrictEntry):
    """A GPU that is bought: what it costs with its share of the machine, for how long, and its electricity."""

    purchase_usd: PositiveNumber
    years: PositiveNumber
    usd_per_kwh: NonNegativeNumber = 0.0

    @property
    def usd_per_hour(self) -> float:
        """The purchase, spread over its years, without electricity."""
        return self.purchase_usd / (self.years * 12 * HOURS_PER_MONTH)


class BudgetEntry(StrictEntry):
    """The most that the GPUs may cost, an hour or a month."""

    usd_per_hour: PositiveNumber | None = None
    usd_per_month: PositiveNumber | None = None

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if (self.usd_per_hour is None) == (self.usd_per_month is None):
            raise ValueError("give usd_per_hour or usd_per_month")
        return self

    @property
    def per_hour(self) -> float:
        """USD an hour, of a month its share."""
        return self.usd_per_hour or (self.usd_per_month or 0.0) / HOURS_PER_MONTH


class ApiEntry(StrictEntry):
    """The same model, or one as good, billed by the token: USD per million."""

    usd_per_mtok_input: NonNegativeNumber
    usd_per_mtok_output: NonNegativeNumber


class BillingAlternativesEntry(StrictEntry):
    """Alternatives to GPUs billed by the hour."""

    serverless: ServerlessEntry | None = None
    api: ApiEntry | None = None
    api_usd_per_month: PositiveNumber | None = None  # what this traffic's tokens cost there today


class AdaptersEntry(StrictEntry):
    """LoRA adapters; every request uses one."""

    count: Annotated[int, Field(gt=0, le=10_000)]
    ranks: Annotated[
        tuple[Annotated[int, Field(gt=0, le=LORA_RANKS[-1])], ...],
        BeforeValidator(_wrap_in_list),
        Field(min_length=1),
    ] = (16,)
    zipf: Annotated[float, Field(ge=0, le=10)] = 0.0
    max_loras: Annotated[int, Field(gt=0, le=10_000)] | None = None
    max_cpu_loras: Annotated[int, Field(gt=0, le=10_000)] | None = None

    @property
    def engine_args(self) -> dict[str, SettingValue]:
        """Engine arguments that serve them, as far as the scenario fixes them."""
        rank = next(rank for rank in LORA_RANKS if rank >= max(self.ranks))
        max_cpu_loras = self.max_cpu_loras or max(self.count, self.max_loras or 0)
        slots: dict[str, SettingValue] = {"max_loras": self.max_loras} if self.max_loras else {}
        return {"max_lora_rank": rank, "max_cpu_loras": max_cpu_loras, **slots}


class CandidateGpuEntry(StrictEntry):
    """A candidate GPU."""

    gpu: Annotated[str, AfterValidator(lambda name: get_gpu(name).name)]
    at_most: Annotated[int, Field(gt=0, le=MAX_GPUS_PER_KIND)]
    gpus_per_node: Annotated[int, Field(gt=0, le=MAX_GPUS_PER_KIND)] | None = None
    interconnect: str | None = None
    sold_in: Annotated[
        tuple[Annotated[int, Field(gt=0, le=MAX_GPUS_PER_KIND)], ...],
        BeforeValidator(_wrap_in_list),
    ] = ()


class SpeculationEntry(StrictEntry):
    """Speculative decoding to evaluate; candidates use it if it is `allowed`."""

    method: str
    num_speculative_tokens: PositiveCount
    acceptance_rate: NonNegativeNumber
    draft_model: str | None = None
    head: str | None = None
    allowed: bool = True

    def to_config(self) -> SpeculationConfig:
        """Convert to a deployment's configuration, with the draft model loaded."""
        draft = load_model(self.draft_model) if self.draft_model else None
        return SpeculationConfig(
            self.method, self.num_speculative_tokens, self.acceptance_rate, draft, self.head
        )

    def __str__(self) -> str:
        return (
            f"{self.method}, k = {self.num_speculative_tokens}, acceptance rate"
            f" {self.acceptance_rate:.2f}"
        )


class ScenarioEntry(StrictEntry):
    """A scenario file; `catalogs/scenarios/chat-70b.yaml` explains every field."""

    question: str = ""
    model: str
    quantization: NameList = ("checkpoint",)
    kv_cache_dtype: NameList = ("auto",)
    gpus: Annotated[tuple[CandidateGpuEntry, ...], BeforeValidator(_wrap_in_list)]
    engine: NameList = ("vllm",)
    engine_version: str | None = None
    engine_args: dict[str, Any] = Field(default_factory=dict)
    layout: dict[LayoutSize, PositiveCount | None] = Field(default_factory=dict)
    workload: WorkloadEntry
    adapters: AdaptersEntry | None = None
    service_level: dict[
        LatencyMetric,
        dict[LatencyStatistic, Annotated[PositiveNumber, _accept_word("best")]],
    ] = Field(default_factory=dict)
    headroom: Fraction = 0.2
    confidence: Annotated[float, Field(gt=0, lt=1)] = 0.8
    refused_at_most: Fraction = 0.01
    context_buffer: NonNegativeNumber = 0.1
    storage: str = DEFAULT_STORAGE
    budget: BudgetEntry | None = None
    prices: dict[str, UsdPerGpuHour] = Field(default_factory=dict)
    owned: dict[str, OwnedGpuEntry] = Field(default_factory=dict)
    price_tier: PriceTier = "on_demand"
    price_seller: str | None = None
    instead: BillingAlternativesEntry = Field(default_factory=BillingAlternativesEntry)
    spare_replicas: Annotated[int, Field(ge=0, le=MAX_SPARE_REPLICAS)] = 0
    replicas_at_least: Annotated[int, Field(ge=0, le=1024)] = 1
    other_tenants_gib: NonNegativeNumber = 0.0
    host_memory_gib: NonNegativeNumber = 0.0
    memory_calibration: dict[MemoryTerm, Annotated[float, Field(ge=-1e4, le=1e4)]] = Field(
        default_factory=dict
    )
    calibration: str | None = None
    speculation: SpeculationEntry | None = None
    pools: bool = False
    traits: WorkloadTraits = Field(default_factory=WorkloadTraits)
    files: Annotated[tuple[ArtifactKind, ...], BeforeValidator(_wrap_in_list)] = DEFAULT_ARTIFACTS

    @property
    def open_figure(self) -> OpenFigure | None:
        """Which figure is the question, if any; `PlannerError` where two are."""
        open_figures: list[OpenFigure] = [
            "limit" for ats in self.service_level.values() for each in ats.values() if each == OPEN_FIGURE
        ]  # fmt: skip
        load, sessions = self.workload, self.workload.sessions
        loads: dict[OpenFigure, tuple[object, ...]] = {
            "rate": (load.rate, sessions and sessions.users),
            "concurrency": (load.concurrency,),
        }
        open_figures += [kind for kind, values in loads.items() if OPEN_FIGURE in values]
        if len(open_figures) > 1:
            raise PlannerError("only one figure can be the question: one max, or one best")
        return next(iter(open_figures), None)


_FIELDS: dict[str, Any] = {
    name: (
        Annotated[kind, Field(le=MAX_COUNT)] | None if kind in (int, int | None) else kind | None,
        None,
    )
    for name, kind in get_type_hints(EngineArgs).items()
    if name != "options"  # the engine's own, checked by its parser
}
_EngineArgs = create_model("_EngineArgs", __base__=StrictEntry, **_FIELDS)


def coerce_engine_args(given: Mapping[str, Any], engine: Engine | None = None) -> Mapping[str, Any]:
    """Convert engine arguments to their types; `PlannerError` for unknown names and values.

    With an `engine` also its other options are accepted.
    """
    given = split_engine_args(given, engine) if engine else dict(given)
    options = dict(given.pop("options", ()))
    args = validate_entry(_EngineArgs, given, "engine_args").model_dump(exclude_none=True)
    return {**args, **options}
