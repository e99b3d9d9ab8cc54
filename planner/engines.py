"""Serving engines by version, their arguments, and how a version fills in what the user left out."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from planner.catalog import Entry, check, entries
from planner.hardware import Gpu
from planner.quantities import GIB, PlannerError, did_you_mean

if TYPE_CHECKING:
    from planner.models import Model


class Tier(Entry):
    """Default batch limits of the GPUs with at least `memory_gib`."""

    memory_gib: NonNegativeFloat
    excluded: tuple[str, ...] = Field(default=(), alias="except")
    max_num_batched_tokens: PositiveInt
    max_num_seqs: PositiveInt


class Capture(Entry):
    """Which batch sizes get a CUDA graph."""

    max: PositiveInt
    max_cc10: PositiveInt
    coarse_from: PositiveInt
    by_seqs: bool


class Facts(Entry):
    """Everything the planner knows of one engine version; the head of `catalogs/engines.yaml` explains every field."""

    upto: str
    gpu_memory_utilization: PositiveFloat
    limits: tuple[Tier, ...]
    block_size: PositiveInt
    cudagraph_memory: Literal["outside", "estimated"]
    kv_tokens: Literal["blocks", "concurrency"]
    window_batches: Literal["one", "concurrent"]
    null_block_reserved: bool
    prefix_caching: bool
    prefix_caching_hybrid: bool
    chunked_prefill: bool
    async_scheduling: bool
    capture: Capture


class EngineEntry(Entry):
    """One version's changed facts."""

    source: str
    date: str
    facts: dict[str, Any]


@dataclass(frozen=True)
class Engine:
    """An engine at a version, and the facts of the nearest earlier version that the catalog knows."""

    name: str
    version: str
    facts_version: str
    facts: Mapping[str, Any]

    def __hash__(self) -> int:
        return hash((self.name, self.version))

    @property
    def release(self) -> tuple[int, int, int]:
        """The version as numbers, for comparing."""
        return release(self.version)

    @property
    def note(self) -> str:
        """Which version's facts stand in for this one's; empty when they are its own."""
        if release(self.version) == release(self.facts_version):
            return ""
        return f"{self.name} {self.version} planned with the facts of {self.facts_version}"


def release(version: str) -> tuple[int, int, int]:
    """(major, minor, patch) of a version such as "v0.19.0", "0.15.2rc1.dev93" or "0.20.2+cu130"; `PlannerError` if none.

    A release candidate counts as its release; what follows the numbers (rc, dev, post, local part) is not compared.
    """
    match = re.fullmatch(r"v?(\d+)\.(\d+)(?:\.(\d+))?(?:[._+-]?[a-z][\w.+-]*|\+[\w.]+)?", version.strip().lower())
    if not match:
        raise PlannerError(f"engine_version {version!r} is not a version; something like 0.20.2 would be")
    return int(match[1]), int(match[2]), int(match[3] or 0)


@cache
def _catalog() -> dict[str, dict[str, Mapping[str, Any]]]:
    """Engine name -> version -> all its facts, versions in ascending order."""
    known: dict[str, dict[str, Mapping[str, Any]]] = {}
    for title, entry in entries("engines.yaml", EngineEntry).items():
        name, _, version = title.partition(" ")
        versions = known.setdefault(name, {})
        inherited = next(reversed(versions.values()), {})
        facts = {**inherited, **entry.facts}
        check(Facts, facts, f"engines.yaml, entry {title}")
        versions[version] = facts
    return known


def engine(name: str = "vllm", version: str | None = None) -> Engine:
    """The engine at `version` (None: the newest the catalog has facts for); `PlannerError` outside the known range."""
    folded = re.sub(r"[\s_-]", "", name.casefold())
    folded = {"tensorrtllm": "trtllm", "textgenerationinference": "tgi"}.get(folded, folded)
    if folded not in _catalog():
        raise did_you_mean(name, _catalog(), "engine")
    versions = _catalog()[folded]
    newest = next(reversed(versions))
    version = (version or newest).strip().removeprefix("v")
    wanted = release(version)
    first, upto = next(iter(versions)), versions[newest]["upto"]
    if not release(first) <= wanted or wanted[:2] > release(upto)[:2]:
        raise PlannerError(f"engine_version {version}: {folded} {first} to {upto} can be planned")
    facts_version = max((known for known in versions if release(known) <= wanted), key=release)
    return Engine(folded, version, facts_version, versions[facts_version])


@dataclass(frozen=True)
class EngineArgs:
    """The engine's own argument names; None means the engine's default for this version, GPU and model."""

    gpu_memory_utilization: float | None = None
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    block_size: int | None = None
    kv_cache_dtype: str | None = None
    dtype: str | None = None
    enforce_eager: bool | None = None
    enable_prefix_caching: bool | None = None
    enable_chunked_prefill: bool | None = None
    async_scheduling: bool | None = None
    max_loras: int | None = None
    max_lora_rank: int | None = None
    long_prefill_token_threshold: int | None = None
    scheduling_policy: str | None = None


def _limits(engine: Engine, gpu: Gpu) -> Tier:
    """The version's default batch limits on this GPU (by the total memory it reports and its name)."""
    device = gpu.name.lower()
    tiers = (Tier.model_validate(tier) for tier in engine.facts["limits"])
    return next(t for t in tiers if gpu.memory >= t.memory_gib * GIB and not any(word in device for word in t.excluded))


def resolve(args: EngineArgs, engine: Engine, gpu: Gpu, model: Model) -> EngineArgs:
    """Fill every field as `engine` does on start-up; `PlannerError` where it would refuse to start.

    Order and checks: vLLM 0.20.2 engine/arg_utils.py:2339 and config/scheduler.py, 0.33.0 engine/arg_utils.py:3151.
    `block_size` stays as given: backends and hybrid models change it (see `planner.kv`).
    """
    facts, limits = engine.facts, _limits(engine, gpu)
    architecture = model.architecture
    derived = architecture.max_position
    length = args.max_model_len or derived
    if length > derived:
        raise PlannerError(
            f"max_model_len {length} is above the {derived} tokens of {model.name}; give at most {derived}"
        )
    chunked = facts["chunked_prefill"] if args.enable_chunked_prefill is None else args.enable_chunked_prefill
    prefix = facts["prefix_caching_hybrid" if architecture.is_hybrid else "prefix_caching"]
    tokens, seqs = args.max_num_batched_tokens, args.max_num_seqs
    if tokens is None:
        tokens = limits.max_num_batched_tokens if chunked else max(limits.max_num_batched_tokens, length)
        tokens = min(tokens, (seqs or limits.max_num_seqs) * length)
    if seqs is None:
        seqs = min(limits.max_num_seqs, tokens)
    filled = EngineArgs(
        gpu_memory_utilization=facts["gpu_memory_utilization"],
        max_model_len=length,
        max_num_seqs=seqs,
        max_num_batched_tokens=tokens,
        kv_cache_dtype="auto",
        dtype=model.dtype,
        enforce_eager=False,
        enable_prefix_caching=prefix,
        enable_chunked_prefill=chunked,
        async_scheduling=facts["async_scheduling"],
        max_loras=0,
        max_lora_rank=16,
        long_prefill_token_threshold=0,
        scheduling_policy="fcfs",
    )
    given = {f.name: value for f in fields(args) if (value := getattr(args, f.name)) is not None}
    filled = replace(filled, **given)
    _refuse(filled)
    return filled


def _refuse(args: EngineArgs) -> None:
    """The engine's own validity checks."""


def cudagraph_sizes(engine: Engine, args: EngineArgs, gpu: Gpu, k: int = 0) -> tuple[int, ...]:
    """Batch sizes (tokens) that get a CUDA graph, with `k` speculative tokens; empty with `enforce_eager`.

    vLLM 0.20.2 config/vllm.py:1423, 0.33.0 config/vllm.py:2398.
    """
    if args.enforce_eager:
        return ()
    capture = Capture.model_validate(engine.facts["capture"])
    most = capture.max_cc10 if gpu.compute_capability is not None and int(gpu.compute_capability) == 10 else capture.max
    if capture.by_seqs:
        most = min(most, 2 * (args.max_num_seqs or 0) * (1 + k))
    most = min(most, args.max_num_batched_tokens or most)
    sizes = (1, 2, 4, *range(8, capture.coarse_from, 8), *range(capture.coarse_from, most + 1, 16))
    return tuple(size for size in sizes if size <= most)
