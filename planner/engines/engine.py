"""Serving engines by version: what each is known to do, its arguments, and how it fills in what the user left out."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt

from planner.core.catalog import EntryT, SourcedEntry, StrictEntry, load_catalog, validate_entry
from planner.core.errors import PlannerError, make_unknown_name_error
from planner.core.versions import Version
from planner.hardware.gpus import Gpu

if TYPE_CHECKING:
    from planner.engines.coefficients import UserCalibration


class BatchLimitTier(StrictEntry):
    """Default batch limits of some GPUs."""

    memory_gib: NonNegativeFloat
    named: tuple[str, ...] = ()
    not_named: tuple[str, ...] = ()
    max_num_batched_tokens: PositiveInt
    max_num_seqs: PositiveInt
    gpu_memory_utilization: float | None = Field(default=None, gt=0, le=1)


class CudaGraphCapture(StrictEntry):
    """Which batch sizes get a CUDA graph."""

    max: PositiveInt
    max_cc10: PositiveInt
    coarse_from: PositiveInt
    by_seqs: bool
    pieces: Literal["every step", "prompts", "none"]


class ModelRunnerV2(StrictEntry):
    """Which models vLLM's second model runner serves by default, and whether it estimates its CUDA graphs."""

    model_types: tuple[str, ...]
    quantized: bool
    others: Literal["none", "dense", "all"]
    estimates: bool


class EngineFacts(StrictEntry):
    """Everything known of one engine version; the head of `catalogs/engines.yaml` explains every field."""

    upto: Version
    program: str
    port: PositiveInt
    gpu_memory_utilization: float = Field(gt=0, le=1)
    memory_budget: Literal["total", "static", "free"]
    limits: tuple[BatchLimitTier, ...]
    block_size: PositiveInt
    cudagraph_memory: Literal["outside", "estimated"]
    kv_tokens: Literal["blocks", "concurrency"]
    window_batches: Literal["one", "concurrent"]
    null_block_reserved: bool
    fp8_block_experts_whole: bool
    prefix_caching: bool
    prefix_caching_hybrid: bool
    chunked_prefill: bool
    data_parallel_attention: bool
    kv_handover: Literal["none", "same", "wider", "any"]
    async_scheduling: bool
    capture: CudaGraphCapture
    kv_cache_dtypes: tuple[str, ...]
    fp8_kv_capability: NonNegativeFloat
    plugins: dict[str, str]
    runner_v2: ModelRunnerV2
    lora_ends: dict[str, tuple[str, ...]]
    lora_extra_vocabulary: NonNegativeInt


class EngineEntry(SourcedEntry):
    """What one version changed."""

    facts: dict[str, Any]


class DynamoReleases(SourcedEntry):
    """An entry of `catalogs/dynamo.yaml`: release of NVIDIA Dynamo -> the engine's version in it."""

    shipped: dict[str, str]
    own: tuple[str, ...] = ()


class CloudNames(SourcedEntry):
    """An entry of `catalogs/clouds.yaml`, whose head explains it."""

    names: dict[str, str]


@dataclass(frozen=True)
class Engine:
    """An engine at a version, and the facts of the nearest earlier version that the catalog knows."""

    name: str
    version: str
    facts_version: Version
    facts: EngineFacts
    calibration: Mapping[str, UserCalibration] = field(
        default_factory=dict
    )  # an owner's, by GPU; wins over the catalog's

    def __hash__(self) -> int:
        return hash((self.name, self.version))

    def __str__(self) -> str:
        return f"{self.name} {self.version}"

    @property
    def release(self) -> Version:
        """The version for comparing; a nightly build counts as the newest known version."""
        return Version.parse(self.version) if self.version[0].isdigit() else self.facts_version

    @property
    def is_v0(self) -> bool:
        """vLLM's first engine, before 0.8: its pool is what torch's allocator left, its scheduler another."""
        return self.name == "vllm" and self.release < Version(0, 8)

    @property
    def substitution_note(self) -> str:
        """What stands in for facts of this version; empty when they are its own."""
        own = self.version[0].isdigit() and self.release == self.facts_version
        others = "" if own else f"with the facts of {self.facts_version}"
        scheduler = "with engine V1's scheduler" if self.is_v0 else ""
        stand_ins = " and ".join(filter(None, (others, scheduler)))
        return stand_ins and f"{self} is planned {stand_ins}"


def find_required_plugin(engine: Engine, method: str) -> str | None:
    """The package that `engine` needs for weights in the format `method`, which left its tree; else None."""
    return engine.facts.plugins.get(method)


def select_entry_for_release(name: str, engine: Engine, known_names: Iterable[str]) -> str:
    """Which of the entries NAME and NAME before RELEASE holds for `engine`: of those before a later one the lowest."""
    prefix = f"{name} before "
    bounds = (
        Version.parse(entry.removeprefix(prefix))
        for entry in known_names
        if entry.startswith(prefix)
    )
    later = [bound for bound in bounds if engine.release < bound]
    return f"{prefix}{min(later)}" if later else name


def load_entries_by_release(file: str, kind: type[EntryT]) -> list[tuple[str, Version, EntryT]]:
    """(engine, version, entry) of a catalog whose entries are called ENGINE VERSION, versions in ascending order."""
    rows = []
    for title, entry in load_catalog(file, kind).items():
        name, _, version = title.partition(" ")
        rows.append((name, Version.parse(version), entry))
    return sorted(rows, key=lambda row: row[1])


@cache
def _load_engine_catalog() -> dict[str, dict[Version, EngineFacts]]:
    """Engine name -> version -> all its facts, versions in ascending order."""
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
    """Every engine, with the newest release that is known, and those before it that changed something."""
    return {
        name: tuple(dict.fromkeys(map(str, (versions[max(versions)].upto, *reversed(versions)))))
        for name, versions in _load_engine_catalog().items()
    }


def get_engine(name: str = "vllm", version: str | Version | None = None) -> Engine:
    """The engine at `version` (None: the newest known); `PlannerError` for an unknown engine or version."""
    name = _normalize_engine_name(name)
    if name not in _load_engine_catalog():
        raise make_unknown_name_error(name, _load_engine_catalog(), "engine")
    versions = _load_engine_catalog()[name]
    first, newest = min(versions), max(versions)
    upto = versions[newest].upto
    version = str(version or upto).strip().removeprefix("v")
    if version.startswith("nightly"):
        return Engine(name, version, newest, versions[newest])
    wanted = Version.parse(version)
    if wanted < first or wanted.series > upto.series:
        raise PlannerError(
            f"engine_version {version} of {name} is not known; accepted: {first} to {upto}"
        )
    facts_version = max(known for known in versions if known <= wanted)
    return Engine(name, version, facts_version, versions[facts_version])


def resolve_dynamo_version(name: str, version: str) -> str:
    """The version of the engine that Dynamo `version` ships, where tables mean that; else `version` as it is."""
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


def get_dynamo_image_version(name: str, version: str) -> str:
    """The version of the engine in the image of Dynamo `version`; empty where it is not known."""
    dynamo_releases = load_catalog("dynamo.yaml", DynamoReleases).get(name)
    shipped = (
        dynamo_releases.shipped
        if dynamo_releases
        else load_catalog("clouds.yaml", CloudNames)[f"dynamo {name}"].names
    )
    return shipped.get(version, "")


def find_dynamo_release(engine: Engine) -> tuple[str, str]:
    """(newest release of Dynamo whose engine is of this minor version, that engine's); `PlannerError` for none."""
    cloud_names = load_catalog("clouds.yaml", CloudNames).get(f"dynamo {engine.name}")
    names = cloud_names.names if cloud_names else {}
    fitting = [
        dynamo
        for dynamo, ships in names.items()
        if Version.parse(ships).series == engine.release.series
    ]
    if not fitting:
        known_versions = ", ".join(names.values()) or "none"
        raise PlannerError(
            f"files: no known release of Dynamo ships {engine}; known: {known_versions}"
        )
    newest = max(fitting, key=Version.parse)
    return newest, names[newest]


def explain_unsupported_gpu(gpu: Gpu, engine: Engine) -> str | None:
    """Why `engine` does not run on `gpu`, by the catalog; None if it does."""
    if engine.name not in gpu.supported:
        there = (
            f"supported there: {', '.join(gpu.supported)}"
            if gpu.supported
            else "no engine that is known here does"
        )
        return f"{engine.name} does not support {gpu.name}; {there}"
    first, last = gpu.supported[engine.name]
    if engine.release < first:
        return f"{engine.name} supports {gpu.name} from {first} on, not yet in {engine.version}"
    if last is not None and engine.release.series > last.series:
        return f"{engine.name} supports {gpu.name} up to {last}, no longer in {engine.version}"
    return None
