"""Serving engines by version: facts about each release, its GPUs, and NVIDIA Dynamo's releases."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt

from planner.core.catalog import EntryT, SourcedEntry, StrictEntry, load_catalog, validate_entry
from planner.core.errors import PlannerError, make_unknown_name_error
from planner.core.versions import Version, is_nightly
from planner.engines.coefficients import UserCalibration
from planner.hardware.gpus import Gpu


class BatchLimitTier(StrictEntry):
    """Default batch limits of some GPUs."""

    memory_gib: NonNegativeFloat
    named: tuple[str, ...] = ()
    not_named: tuple[str, ...] = ()
    max_num_batched_tokens: PositiveInt
    max_num_seqs: PositiveInt
    largest_graph: tuple[PositiveInt, PositiveInt] | None = None  # below TP4, and from it on


class StaticMemory(StrictEntry):
    """MiB that SGLang leaves beside weights and KV cache: the head of `catalogs/engines.yaml`."""

    base: NonNegativeFloat
    token: NonNegativeFloat
    graph: NonNegativeFloat
    gpu: NonNegativeFloat
    copy_graph: NonNegativeFloat
    many_copy_graph: NonNegativeFloat
    prompt_graph: NonNegativeFloat
    latent_prompt_graphs: NonNegativeFloat
    draft: NonNegativeFloat
    draft_model: NonNegativeFloat
    least: NonNegativeFloat


class SplitPool(StrictEntry):
    """A pool of its own for recurrent states or windows, beside that of full attention."""

    ratio: float = Field(gt=0)
    per_sequence: PositiveInt = 1
    model_types: tuple[str, ...] = ()


class CudaGraphCapture(StrictEntry):
    """Which batch sizes get a CUDA graph."""

    max: PositiveInt
    max_cc10: PositiveInt
    coarse_from: PositiveInt
    by_seqs: bool
    pieces: Literal["every step", "prompts", "none"]


class ModelRunnerV2(StrictEntry):
    """The models that vLLM's model runner V2 serves, and what it does as the first one does."""

    model_types: tuple[str, ...] = ()
    quantized: bool = False
    others: Literal["none", "dense", "all"] = "none"
    estimates: bool = False
    offloads: bool = False


class EngineFacts(StrictEntry):
    """Facts about one engine version; the head of `catalogs/engines.yaml` explains every field."""

    upto: Version
    program: str
    port: PositiveInt
    gpu_memory_utilization: float = Field(gt=0, le=1)
    memory_budget: Literal["total", "static", "free"]
    limits: tuple[BatchLimitTier, ...]
    block_size: PositiveInt
    cudagraph_memory: Literal["outside", "estimated"] = "outside"
    kv_tokens: Literal["blocks", "concurrency"] = "blocks"
    window_batches: Literal["one", "concurrent"] = "one"
    null_block_reserved: bool = False
    state_block_per_sequence: bool = False
    fp8_block_experts_whole: bool = True
    prefix_caching: bool
    prefix_caching_hybrid: bool
    chunked_prefill: bool
    data_parallel_attention: bool
    aligns_prefills: bool = False
    kv_handover: Literal["none", "same", "wider", "any"] = "none"
    async_scheduling: bool
    capture: CudaGraphCapture
    kv_cache_dtypes: tuple[str, ...]
    online: tuple[str, ...]
    fp8_kv_capability: NonNegativeFloat = 0
    plugins: dict[str, str] = Field(default_factory=dict)
    runner_v2: ModelRunnerV2 = ModelRunnerV2()
    lora_ends: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    lora_extra_vocabulary: NonNegativeInt = 0
    static_memory: StaticMemory | None = None
    num_seqs_of_model: dict[str, PositiveInt] = Field(default_factory=dict)
    num_seqs_with_draft: PositiveInt | None = None
    own_constants: bool = False
    backend_blocks: bool = False
    shares_layer_caches: bool = True
    window_pages: bool = True
    state_checkpoints: bool = False
    lean_copies: bool = True
    casts_bfloat16: bool = True
    padded_experts: bool = False
    scheduler_0_33: bool = True
    tensor_parallel_only: bool = False
    pads_heads: bool = True
    gathers_expert_tokens: bool = False
    mxfp4_widened_from: NonNegativeFloat = 0
    shares_limits: bool = False
    state_pool: SplitPool | None = None
    window_pool: SplitPool | None = None
    prefills_first: bool = False
    ended: str = ""


class EngineEntry(SourcedEntry):
    """The facts that one version changed."""

    facts: dict[str, Any]


class EnginePackaging(SourcedEntry):
    """One engine of `catalogs/launch.yaml`: images, endpoints and names of methods."""

    images: dict[str, str | None]
    health: str
    key: str | None
    methods: dict[str, str]
    router: str | None = None


class DynamoReleases(SourcedEntry):
    """An entry of `catalogs/dynamo.yaml`: release of NVIDIA Dynamo -> version of the engine."""

    shipped: dict[str, str]
    own: tuple[str, ...] = ()


class CloudNames(SourcedEntry):
    """An entry of `catalogs/clouds.yaml`, whose head explains it."""

    names: dict[str, str]


@dataclass(frozen=True)
class Engine:
    """An engine at a version, with the facts of the nearest catalog version up to it."""

    name: str
    version: str
    facts_version: Version
    facts: EngineFacts
    # a user's own by GPU, used instead of the catalog's
    calibration: Mapping[str, UserCalibration] = field(default_factory=dict)

    def __hash__(self) -> int:
        return hash((self.name, self.version))

    def __str__(self) -> str:
        return f"{self.name} {self.version}"

    @property
    def release(self) -> Version:
        """The version for comparing; a nightly build counts as the newest known version."""
        return Version.parse(self.version) if self.version[0].isdigit() else self.facts_version

    @property
    def constants_release(self) -> Version:
        """The release whose constants of `catalogs/memory.yaml` hold: the newest for unmeasured engines."""
        return self.release if self.facts.own_constants else Version(99, 0)

    @property
    def is_default(self) -> bool:
        """Whether it is the engine that is meant where none is named."""
        return self.name == "vllm"

    @property
    def is_v0(self) -> bool:
        """vLLM before 0.8, whose engine V0 sizes its KV cache and schedules in another way."""
        return self.name == "vllm" and self.release < Version(0, 8)

    @property
    def substitution_note(self) -> str:
        """The version whose facts replace those of this one; empty if they are its own."""
        is_exact = self.version[0].isdigit() and self.release == self.facts_version
        facts = "" if is_exact else f"with the facts of {self.facts_version}"
        scheduler = "with engine V1's scheduler" if self.is_v0 else ""
        substitutions = " and ".join(filter(None, (facts, scheduler)))
        return substitutions and f"{self} is planned {substitutions}"


def select_entry_for_release(name: str, engine: Engine, known_names: Iterable[str]) -> str:
    """Select the entry that holds for the engine's release: "NAME before RELEASE", else "NAME".

    Of several bounds above the release the lowest holds.
    """
    prefix = f"{name} before "
    bounds = (
        Version.parse(entry.removeprefix(prefix))
        for entry in known_names
        if entry.startswith(prefix)
    )
    later = [bound for bound in bounds if engine.release < bound]
    return f"{prefix}{min(later)}" if later else name


def load_entries_by_release(
    file: str, entry_type: type[EntryT]
) -> list[tuple[str, Version, EntryT]]:
    """Load (engine, version, entry) by ascending version from entries named "ENGINE VERSION"."""
    rows = []
    for title, entry in load_catalog(file, entry_type).items():
        name, _, version = title.partition(" ")
        rows.append((name, Version.parse(version), entry))
    return sorted(rows, key=lambda row: row[1])


@cache
def _load_engine_catalog() -> dict[str, dict[Version, EngineFacts]]:
    """Load engine name -> version -> all its facts, versions in ascending order."""
    known: dict[str, dict[Version, EngineFacts]] = {}
    facts: dict[str, dict[str, Any]] = {}
    for name, version, entry in load_entries_by_release("engines.yaml", EngineEntry):
        merged = facts.setdefault(name, {})
        for key, fact in entry.facts.items():
            merged[key] = {**merged.get(key, {}), **fact} if isinstance(fact, dict) else fact
        known.setdefault(name, {})[version] = validate_entry(
            EngineFacts, merged, f"engines.yaml, entry {name} {version}"
        )
    return known


def _normalize_engine_name(name: str) -> str:
    name = re.sub(r"[\s_-]", "", name.casefold())
    return {"tensorrtllm": "trtllm", "textgenerationinference": "tgi"}.get(name, name)


def list_engines() -> dict[str, tuple[str, ...]]:
    """List each engine that is developed: its newest release, and those before it that changed facts."""
    return {
        name: tuple(dict.fromkeys(map(str, (versions[max(versions)].upto, *reversed(versions)))))
        for name, versions in _load_engine_catalog().items()
        if not versions[max(versions)].ended
    }


def get_engine(name: str = "vllm", version: str | Version | None = None) -> Engine:
    """Get an engine at a version (None: the newest known); `PlannerError` if either is unknown."""
    name, engines = _normalize_engine_name(name), _load_engine_catalog()
    if name not in engines:
        raise make_unknown_name_error(name, engines, "engine")
    versions = engines[name]
    first, newest = min(versions), max(versions)
    upto = versions[newest].upto
    version = str(version or upto).strip().removeprefix("v")
    try:
        if is_nightly(version):
            return Engine(name, version, newest, versions[newest])
        release = Version.parse(version)
    except PlannerError as error:
        raise PlannerError(f"engine_version {error}") from None
    if release < first or release.series > upto.series:
        raise PlannerError(
            f"engine_version {version} of {name} is not known; accepted: {first} to {upto}"
        )
    facts_version = max(known for known in versions if known <= release)
    return Engine(name, version, facts_version, versions[facts_version])


def resolve_dynamo_version(name: str, version: str) -> str:
    """Return the engine version in Dynamo `version` if a table means Dynamo's, else `version`.

    A release candidate, a release of the engine's own, or one newer than every Dynamo is the
    engine's.
    """
    dynamo_releases = load_catalog("dynamo.yaml", DynamoReleases).get(_normalize_engine_name(name))
    if dynamo_releases is None or not version[:1].isdigit():
        return version
    release = Version.parse(version)
    shipped = {Version.parse(text): ships for text, ships in dynamo_releases.shipped.items()}
    earlier = [dynamo for dynamo in shipped if dynamo <= release]
    is_engine_release = (
        re.search(r"\drc", version)
        or version in dynamo_releases.own
        or release.series > max(shipped).series
    )
    return version if is_engine_release or not earlier else shipped[max(earlier)]


def get_monthly_image_version(name: str, month: str) -> str:
    """Get the engine version in NVIDIA's image of a month, such as "26.05"; empty if unknown."""
    cloud_names = load_catalog("clouds.yaml", CloudNames).get(f"nvidia {name}")
    return cloud_names.names.get(month, "") if cloud_names else ""


def explain_unsupported_gpu(gpu: Gpu, engine: Engine) -> str | None:
    """Explain why the engine does not run on a GPU, by the catalog; None if it does."""
    if engine.name not in gpu.supported:
        alternatives = (
            f"supported there: {', '.join(gpu.supported)}"
            if gpu.supported
            else "no engine that is known here does"
        )
        return f"{engine.name} does not support {gpu.name}; {alternatives}"
    first, last = gpu.supported[engine.name]
    if engine.release < first:
        return f"{engine.name} supports {gpu.name} from {first} on, not yet in {engine.version}"
    if last is not None and engine.release.series > last.series:
        return f"{engine.name} supports {gpu.name} up to {last}, no longer in {engine.version}"
    return None
