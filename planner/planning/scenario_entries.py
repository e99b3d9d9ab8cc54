"""What a scenario file may say: fields, types and bounds; `catalogs/scenarios/chat-70b.yaml` explains every one."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, get_type_hints

from pydantic import AfterValidator, BeforeValidator, Field, create_model
from pydantic_core import PydanticCustomError

from planner.core.catalog import Entry, check
from planner.core.quantities import all_known
from planner.facts.days import DAY, WEEK
from planner.facts.deployment import Speculation
from planner.facts.engines import LORA_RANKS, EngineArgs
from planner.facts.prices import Tier
from planner.latency.start_up import STORAGE
from planner.memory.budget import Term
from planner.models.registry import model

MOST_GPUS = 16_384
"""Of one kind that a scenario may ask about."""
Setting = int | float | bool | str
FileKind = Literal[
    "script", "unit", "benchmark", "alerts", "dashboard", "checklist",
    "compose", "kubernetes", "production-stack", "kserve", "dynamo", "skypilot", "runpod",
]  # fmt: skip
DEFAULT_FILES: tuple[FileKind, ...] = ("script", "unit", "benchmark", "alerts", "dashboard", "checklist")
"""What is written unless a scenario says otherwise."""
Metric = Literal["ttft", "itl", "tpot", "e2e"]
Percentile = Literal["mean", "p50", "p95", "p99"]


def _listed(value: Any) -> Any:
    """One item without its list is a list of one."""
    return (value,) if isinstance(value, str | dict) else value


def _several(value: Any) -> Any:
    """One number without its list is a list of one."""
    return (value,) if isinstance(value, int) else value


def _hours(value: Any) -> Any:
    """A day as it came: a name or a file, or one figure an hour."""
    if value is None or isinstance(value, str):
        return value
    figures = value if isinstance(value, list | tuple) else [None]
    if not all(isinstance(hour, int | float) and type(hour) is not bool and 0 <= hour <= 1e12 for hour in figures):
        accepted = f"Input should be {DAY} to {WEEK} hourly figures from 0 to 1e12, a profile's name, or a trace's file"
        raise PydanticCustomError("day", accepted)
    return tuple(figures)


def _described(value: Any) -> Any:
    """Lengths as they came; a bare number says neither what is meant nor how lengths spread."""
    if isinstance(value, int | float | str):
        raise PydanticCustomError("lengths", "Input should be {mean: tokens, p50: ..., p95: ...} or {exactly: tokens}")
    return value


def _traffic(rate: float) -> float:
    """A rate as it came; less than a request in eleven days is no traffic."""
    if not rate >= 1e-6:
        closed = "for users who each wait for their answer leave it out and give concurrency"
        raise PydanticCustomError("rate", f"Input should be above 0 requests per second ({closed})")
    return rate


Positive = Annotated[float, Field(gt=0, le=1e12)]
Amount = Annotated[float, Field(ge=0, le=1e6)]
Part = Annotated[float, Field(ge=0, lt=1)]
Size = Annotated[int, Field(gt=0, le=10**12)]
Count = Annotated[int, Field(ge=0, le=10**12)]
Names = Annotated[tuple[str, ...], BeforeValidator(_listed), Field(min_length=1)]


class LengthsEntry(Entry):
    """Tokens per request: a mean, spread as `p50`, `p95` or a comparable trace say; or `exactly` so many."""

    mean: Positive | None = None
    exactly: Positive | None = None
    p50: Positive | None = None
    p95: Positive | None = None
    max: Positive | None = None


class PrefixEntry(Entry):
    """The shared beginning of the prompts."""

    tokens: Count = 0
    hit_rate: Amount = 1.0


class WorkloadEntry(Entry):
    """Traffic: lengths or a trace; a rate, users in a closed loop, or requests to finish within some hours."""

    others_say: ClassVar = dict.fromkeys(
        ("think", "user", "session"),
        "of N users who ask every T seconds, answer and thinking together, the rate is N / T, on the safe side, as "
        "users who still wait ask no more; of N who ask again at once, concurrency is N",
    )

    prompt_tokens: Annotated[LengthsEntry | None, BeforeValidator(_described)] = None
    output_tokens: Annotated[LengthsEntry | None, BeforeValidator(_described)] = None
    trace: str | None = None
    rate: Annotated[float, Field(le=1e12), AfterValidator(_traffic)] | None = None
    concurrency: Size | None = None
    burstiness: Positive | None = None
    requests: Size | None = None
    within_hours: Positive | None = None
    shared_prefix: PrefixEntry | None = None
    day: Annotated[str | tuple[float, ...] | None, BeforeValidator(_hours)] = None


class ServerlessEntry(Entry):
    """GPUs that are paid by the second, while a replica starts, works, and waits `idle_seconds` for another request."""

    usd_per_gpu_second: Positive
    cold_start: Positive | None = None
    idle_seconds: Amount = 0.0
    warm_replicas: Annotated[int, Field(ge=0, le=1024)] = 0


class ApiEntry(Entry):
    """The same model, or one that would do, paid by the token: USD per million."""

    usd_per_mtok_input: Amount
    usd_per_mtok_output: Amount


class InsteadEntry(Entry):
    """What could be paid instead of GPUs by the hour."""

    serverless: ServerlessEntry | None = None
    api: ApiEntry | None = None


class AdaptersEntry(Entry):
    """LoRA adapters, of which every request asks for one."""

    count: Annotated[int, Field(gt=0, le=10_000)]
    ranks: Annotated[
        tuple[Annotated[int, Field(gt=0, le=LORA_RANKS[-1])], ...], BeforeValidator(_several), Field(min_length=1)
    ] = (16,)
    zipf: Annotated[float, Field(ge=0, le=10)] = 0.0
    max_loras: Annotated[int, Field(gt=0, le=10_000)] | None = None
    max_cpu_loras: Annotated[int, Field(gt=0, le=10_000)] | None = None

    @property
    def engine_args(self) -> dict[str, Setting]:
        """What an engine that serves them is started with, as far as it is settled."""
        rank = next(rank for rank in LORA_RANKS if rank >= max(self.ranks))
        kept = self.max_cpu_loras or max(self.count, self.max_loras or 0)
        slots: dict[str, Setting] = {"max_loras": self.max_loras} if self.max_loras else {}
        return {"max_lora_rank": rank, "max_cpu_loras": kept, **slots}


class CandidateEntry(Entry):
    """One kind of GPU that may be used."""

    gpu: str
    at_most: Annotated[int, Field(gt=0, le=MOST_GPUS)]
    gpus_per_node: Annotated[int, Field(gt=0, le=MOST_GPUS)] | None = None
    interconnect: str | None = None
    sold_in: Annotated[tuple[Annotated[int, Field(gt=0, le=MOST_GPUS)], ...], BeforeValidator(_several)] = ()


class LayoutEntry(Entry):
    """Parallel sizes that are settled; the search chooses the others, and how many replicas there are."""

    tp: Size | None = None
    pp: Size | None = None
    dp: Size | None = None
    ep: Size | None = None


class SpeculationEntry(Entry):
    """Speculative decoding to judge; candidates use it where it is `allowed`."""

    method: str
    num_speculative_tokens: Size
    acceptance_rate: Amount
    draft_model: str | None = None
    head: str | None = None
    allowed: bool = True

    def load(self) -> Speculation:
        """As a deployment wants it."""
        draft = model(self.draft_model) if self.draft_model else None
        return Speculation(self.method, self.num_speculative_tokens, self.acceptance_rate, draft, self.head)

    def __str__(self) -> str:
        return f"{self.method}, k = {self.num_speculative_tokens}, acceptance rate {self.acceptance_rate:.2f}"


class ScenarioEntry(Entry):
    """A scenario file; `catalogs/scenarios/chat-70b.yaml` explains every field."""

    question: str
    model: str
    quantization: Names = ("checkpoint",)
    kv_cache_dtype: Names = ("auto",)
    gpus: Annotated[tuple[CandidateEntry, ...], BeforeValidator(_listed)]
    engine: Names = ("vllm",)
    engine_version: str | None = None
    engine_args: dict[str, Setting] = Field(default_factory=dict)
    layout: LayoutEntry = Field(default_factory=LayoutEntry)
    workload: WorkloadEntry
    adapters: AdaptersEntry | None = None
    service_level: dict[Metric, dict[Percentile, Positive]] = Field(default_factory=dict)
    headroom: Part = 0.2
    refused_at_most: Part = 0.01
    context_buffer: Amount = 0.1
    storage: str = STORAGE
    prices: dict[str, Positive] = Field(default_factory=dict)
    price_tier: Tier = "on_demand"
    instead: InsteadEntry = Field(default_factory=InsteadEntry)
    spare_replicas: Annotated[int, Field(ge=0, le=1024)] = 0
    replicas_at_least: Annotated[int, Field(ge=1, le=1024)] = 1
    start_up_at_most: Positive | None = None
    power_at_most: Positive | None = None
    other_tenants_gib: Amount = 0.0
    memory_calibration: dict[Term, Annotated[float, Field(ge=-1e4, le=1e4)]] = Field(default_factory=dict)
    calibration: str | None = None
    speculation: SpeculationEntry | None = None
    pools: bool = False
    traits: dict[str, bool] = Field(default_factory=dict)
    files: Annotated[tuple[FileKind, ...], BeforeValidator(_listed)] = DEFAULT_FILES


_FIELDS: dict[str, Any] = {
    name: (Annotated[kind, Field(le=2**40)] | None if kind in (int, int | None) else kind | None, None)
    for name, kind in get_type_hints(EngineArgs).items()
}
_EngineArgs = create_model("_EngineArgs", __base__=Entry, **_FIELDS)


def engine_arguments(given: Mapping[str, Setting]) -> Mapping[str, Setting]:
    """Engine arguments with the types that the engine gives them."""
    all_known(given, EngineArgs.__dataclass_fields__, "engine argument")
    return check(_EngineArgs, given, "engine_args").model_dump(exclude_none=True)
