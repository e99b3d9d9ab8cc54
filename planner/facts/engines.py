"""Serving engines by version: what each is known to do, its arguments, and how it fills in what the user left out."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt

from planner.core.catalog import E, Entry, Sourced, check, entries
from planner.core.quantities import GIB, PlannerError, all_known, did_you_mean
from planner.facts.gpus import Gpu

if TYPE_CHECKING:
    from planner.facts.coefficients import Calibration
    from planner.models.registry import Model

_SPELLINGS = {"bf16": "bfloat16", "fp16": "float16", "half": "float16"}
"""Short forms that people write for dtypes."""
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values of `--max-lora-rank` (vLLM 0.20.2 and 0.33.0)."""


class Tier(Entry):
    """Default batch limits of some GPUs."""

    memory_gib: NonNegativeFloat
    named: tuple[str, ...] = ()
    not_named: tuple[str, ...] = ()
    max_num_batched_tokens: PositiveInt
    max_num_seqs: PositiveInt
    gpu_memory_utilization: float | None = Field(default=None, gt=0, le=1)


class Capture(Entry):
    """Which batch sizes get a CUDA graph."""

    max: PositiveInt
    max_cc10: PositiveInt
    coarse_from: PositiveInt
    by_seqs: bool
    pieces: Literal["every step", "prompts", "none"]


class RunnerV2(Entry):
    """Which models vLLM's second model runner serves by default, and whether it estimates its CUDA graphs."""

    model_types: tuple[str, ...]
    quantized: bool
    others: Literal["none", "dense", "all"]
    estimates: bool


class Facts(Entry):
    """Everything known of one engine version; the head of `catalogs/engines.yaml` explains every field."""

    upto: str
    program: str
    port: PositiveInt
    gpu_memory_utilization: float = Field(gt=0, le=1)
    memory_budget: Literal["total", "static", "free"]
    limits: tuple[Tier, ...]
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
    capture: Capture
    kv_cache_dtypes: tuple[str, ...]
    fp8_kv_capability: NonNegativeFloat
    plugins: dict[str, str]
    runner_v2: RunnerV2
    lora_ends: dict[str, tuple[str, ...]]
    lora_extra_vocabulary: NonNegativeInt


class EngineEntry(Sourced):
    """What one version changed."""

    facts: dict[str, Any]


class DynamoEntry(Sourced):
    """An entry of `catalogs/dynamo.yaml`: release of NVIDIA Dynamo -> the engine's version in it."""

    shipped: dict[str, str]
    own: tuple[str, ...] = ()


class Named(Sourced):
    """An entry of `catalogs/clouds.yaml`, whose head explains it."""

    names: dict[str, str]


@dataclass(frozen=True)
class Engine:
    """An engine at a version, and the facts of the nearest earlier version that the catalog knows."""

    name: str
    version: str
    facts_version: str
    facts: Mapping[str, Any]
    calibration: Mapping[str, Calibration] = field(default_factory=dict)  # an owner's, by GPU; wins over the catalog's

    def __hash__(self) -> int:
        return hash((self.name, self.version))

    def __str__(self) -> str:
        return f"{self.name} {self.version}"

    @property
    def release(self) -> tuple[int, int, int]:
        """The version as numbers, for comparing; a nightly build counts as the newest known version."""
        return release(self.version if self.version[0].isdigit() else self.facts_version)

    @property
    def v0(self) -> bool:
        """vLLM's first engine, before 0.8: its pool is what torch's allocator left, its scheduler another."""
        return self.name == "vllm" and self.release < (0, 8, 0)

    @property
    def note(self) -> str:
        """What stands in for facts of this version; empty when they are its own."""
        own = self.version[0].isdigit() and self.release == release(self.facts_version)
        others = "" if own else f"with the facts of {self.facts_version}"
        scheduler = "with engine V1's scheduler" if self.v0 else ""
        stand_ins = " and ".join(filter(None, (others, scheduler)))
        return stand_ins and f"{self} is planned {stand_ins}"


def plugin(engine: Engine, method: str) -> str | None:
    """The package that `engine` needs for weights in the format `method`, which left its tree; else None."""
    found: Mapping[str, str] = engine.facts["plugins"]
    return found.get(method)


def at_release(name: str, engine: Engine, known: Iterable[str]) -> str:
    """Which of the entries NAME and NAME before RELEASE holds for `engine`: of those before a later one the lowest."""
    bounds = (entry.partition(" before ")[2] for entry in known if entry.startswith(f"{name} before "))
    later = [bound for bound in bounds if engine.release < release(bound)]
    return f"{name} before {min(later, key=release)}" if later else name


@lru_cache(maxsize=1024)
def release(version: str) -> tuple[int, int, int]:
    """(major, minor, patch) of a version such as "v0.19.0", "0.15.2rc1.dev93" or "0.20.2+cu130", else `PlannerError`.

    What follows the numbers (rc, dev, post, local part) is not compared: a candidate counts as its release.
    """
    match = re.fullmatch(r"v?(\d+)\.(\d+)(?:\.(\d+))?(?:[.-]?[a-z][\w.+-]*|\+[\w.]+)?", version.strip().lower())
    if not match:
        raise PlannerError(f"engine_version {version!r} is not a version; write it like 0.20.2")
    return int(match[1]), int(match[2]), int(match[3] or 0)


def by_release(file: str, kind: type[E]) -> list[tuple[str, str, E]]:
    """(engine, version, entry) of a catalog whose entries are called ENGINE VERSION, versions in ascending order."""
    listed = [(*title.partition(" ")[::2], entry) for title, entry in entries(file, kind).items()]
    return sorted(listed, key=lambda found: release(found[1]))


@cache
def _catalog() -> dict[str, dict[str, dict[str, Any]]]:
    """Engine name -> version -> all its facts, versions in ascending order."""
    known: dict[str, dict[str, dict[str, Any]]] = {}
    for name, version, entry in by_release("engines.yaml", EngineEntry):
        versions = known.setdefault(name, {})
        facts = dict(next(reversed(versions.values()), {}))
        for key, fact in entry.facts.items():
            facts[key] = {**facts.get(key, {}), **fact} if isinstance(fact, dict) else fact
        versions[version] = check(Facts, facts, f"engines.yaml, entry {name} {version}").model_dump()
    return known


def _folded(name: str) -> str:
    name = re.sub(r"[\s_-]", "", name.casefold())
    return {"tensorrtllm": "trtllm", "textgenerationinference": "tgi"}.get(name, name)


def engines() -> dict[str, tuple[str, ...]]:
    """Every engine, with the newest release that is known, and those before it that changed something."""
    return {
        name: tuple(dict.fromkeys((next(reversed(versions.values()))["upto"], *reversed(versions))))
        for name, versions in _catalog().items()
    }


def engine(name: str = "vllm", version: str | None = None) -> Engine:
    """The engine at `version` (None: the newest known); `PlannerError` for an unknown engine or version."""
    name = _folded(name)
    if name not in _catalog():
        raise did_you_mean(name, _catalog(), "engine")
    versions = _catalog()[name]
    first, newest = next(iter(versions)), next(reversed(versions))
    upto = versions[newest]["upto"]
    version = (version or upto).strip().removeprefix("v")
    if version.startswith("nightly"):
        return Engine(name, version, newest, versions[newest])
    wanted = release(version)
    if wanted < release(first) or wanted[:2] > release(upto)[:2]:
        raise PlannerError(f"engine_version {version} of {name} is not known; accepted: {first} to {upto}")
    facts_version = max((known for known in versions if release(known) <= wanted), key=release)
    return Engine(name, version, facts_version, versions[facts_version])


def behind_dynamo(name: str, version: str) -> str:
    """The version of the engine that Dynamo `version` ships, where tables mean that; else `version` as it is."""
    known = entries("dynamo.yaml", DynamoEntry).get(_folded(name))
    if known is None or not version[:1].isdigit():
        return version
    earlier = [found for found in known.shipped if release(found) <= release(version)]
    newest = max(map(release, known.shipped))
    meant = re.search(r"\drc", version) or version in known.own or release(version)[:2] > newest[:2]
    return version if meant or not earlier else known.shipped[max(earlier, key=release)]


def inside_dynamo(name: str, version: str) -> str:
    """The version of the engine in the image of Dynamo `version`; empty where it is not known."""
    known = entries("dynamo.yaml", DynamoEntry).get(name)
    shipped = known.shipped if known else entries("clouds.yaml", Named)[f"dynamo {name}"].names
    return shipped.get(version, "")


def shipped_by_dynamo(engine: Engine) -> tuple[str, str]:
    """(newest release of Dynamo whose engine is of this minor version, that engine's); `PlannerError` for none."""
    known = entries("clouds.yaml", Named).get(f"dynamo {engine.name}")
    names = known.names if known else {}
    fitting = [one for one, ships in names.items() if release(ships)[:2] == engine.release[:2]]
    if not fitting:
        known_versions = ", ".join(names.values()) or "none"
        raise PlannerError(f"files: no known release of Dynamo ships {engine}; known: {known_versions}")
    newest = max(fitting, key=release)
    return newest, names[newest]


def unsupported(gpu: Gpu, engine: Engine) -> str | None:
    """Why `engine` does not run on `gpu`, by the catalog; None if it does."""
    if engine.name not in gpu.supported:
        there = f"supported there: {', '.join(gpu.supported)}" if gpu.supported else "no engine that is known here does"
        return f"{engine.name} does not support {gpu.name}; {there}"
    first, last = gpu.supported[engine.name]
    if engine.release < release(first):
        return f"{engine.name} supports {gpu.name} from {first} on, not yet in {engine.version}"
    if last is not None and engine.release[:2] > release(last)[:2]:
        return f"{engine.name} supports {gpu.name} up to {last}, no longer in {engine.version}"
    return None


@dataclass(frozen=True, kw_only=True)
class EngineArgs:
    """An engine's own names of arguments, as it has started with them; open is only what backends decide."""

    gpu_memory_utilization: float
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int | None = None
    kv_cache_dtype: str | None = None
    dtype: str
    enforce_eager: bool = False
    enable_prefix_caching: bool
    enable_chunked_prefill: bool
    async_scheduling: bool
    max_loras: int = 0  # 0: no LoRA
    max_lora_rank: int = 16
    max_cpu_loras: int = 0  # adapters kept in host memory; 0: as many as max_loras
    kv_offloading_size: float = 0.0  # GiB of host memory for KV blocks, over all ranks of an engine; 0: none
    long_prefill_token_threshold: int = 0  # 0: none
    scheduling_policy: str = "fcfs"
    scheduler_recv_interval: int = 1  # SGLang: decode steps between two looks for new requests
    limit_mm_per_prompt: str | None = None  # "image=2,video=0"
    revision: str | None = None  # branch, tag or commit of the checkpoint's repository


MOST = {"max_num_seqs": 2**20, "max_num_batched_tokens": 2**24}
"""Whose step costs are tabled: more than the longest context that a model of the catalog was made for."""


OFFLOADS, MOST_HOST_GIB = (0, 12, 0), 65536
"""The first vLLM with --kv-offloading-size (catalogs/flags/vllm.csv), and GiB that are planned at most."""


def resolve(given: Mapping[str, Any], engine: Engine, gpu: Gpu, model: Model) -> EngineArgs:
    """Fill in what is not `given` (or None) as `engine` does at start; `PlannerError` where it would refuse to start.

    `block_size` stays as given: backends and hybrid models change its default (see `memory.kv_cache`).
    Order: vLLM 0.20.2 engine/arg_utils.py:2339, 0.33.0 engine/arg_utils.py:3151.
    """
    facts, shape, tier = engine.facts, model.architecture, _tier(engine, gpu)
    all_known(given, EngineArgs.__dataclass_fields__, "engine argument")
    given = {name: value for name, value in given.items() if value is not None}
    given |= {name: _SPELLINGS.get(given[name], given[name]) for name in ("dtype", "kv_cache_dtype") if name in given}
    length = given.get("max_model_len") or shape.max_position
    chunked = given.get("enable_chunked_prefill", facts["chunked_prefill"])
    tokens = tier["max_num_batched_tokens"]
    if engine.name == "vllm":
        seqs = given.get("max_num_seqs") or tier["max_num_seqs"]
        tokens = min(tokens if chunked else max(tokens, length), seqs * length)
    tokens = given.get("max_num_batched_tokens", tokens)
    defaults = {
        "gpu_memory_utilization": tier["gpu_memory_utilization"] or facts["gpu_memory_utilization"],
        "max_model_len": length,
        "max_num_seqs": min(tier["max_num_seqs"], tokens),
        "max_num_batched_tokens": tokens,
        "dtype": "float16" if model.dtype == "bfloat16" and "bf16" not in gpu.flops else model.dtype,
        "enable_prefix_caching": facts["prefix_caching_hybrid" if shape.is_hybrid else "prefix_caching"],
        "enable_chunked_prefill": chunked,
        "async_scheduling": facts["async_scheduling"],
    }
    filled = EngineArgs(**{**defaults, **given})
    if (reason := _refusal(filled, engine, gpu, model)) is not None:
        raise PlannerError(reason)
    return filled


def _tier(engine: Engine, gpu: Gpu) -> Mapping[str, Any]:
    """The version's default limits on this GPU: by total memory and by parts of the device name, as the engine does."""

    def fits(tier: Mapping[str, Any]) -> bool:
        named, not_named = (any(part in gpu.name.lower() for part in tier[key]) for key in ("named", "not_named"))
        return gpu.memory >= tier["memory_gib"] * GIB and (named or not tier["named"]) and not not_named

    return next(filter(fits, engine.facts["limits"]))


def _refusal(args: EngineArgs, engine: Engine, gpu: Gpu, model: Model) -> str | None:
    """Why the engine would not start with these arguments (vLLM config/scheduler.py, cache.py, model.py); else None."""
    length, tokens, seqs = args.max_model_len, args.max_num_batched_tokens, args.max_num_seqs
    accepted = engine.facts["kv_cache_dtypes"]
    longest = model.architecture.max_position
    for name in ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "block_size"):
        if (value := getattr(args, name)) is not None and value < 1:
            return f"{name} is {value}; it must be at least 1"
    for name, most in MOST.items():
        if (value := getattr(args, name)) > most:
            return f"{name} is {value}; at most {most} are planned"
    if args.long_prefill_token_threshold < 0:
        return f"long_prefill_token_threshold is {args.long_prefill_token_threshold}; it must be 0 (off) or more"
    if not re.fullmatch(r"(image|video|audio)=\d+(,(image|video|audio)=\d+)*", args.limit_mm_per_prompt or "image=1"):
        return f"limit_mm_per_prompt is {args.limit_mm_per_prompt!r:.80}; expected such as image=2,video=0"
    if args.revision is not None and not re.fullmatch(r"[\w][\w./-]{0,199}", args.revision):
        return f"revision is {args.revision!r:.80}; expected a branch, tag or commit"
    if not 0 < args.gpu_memory_utilization <= 1:
        return f"gpu_memory_utilization is {args.gpu_memory_utilization}; it must be above 0 and at most 1"
    if length > longest:
        return f"max_model_len {length} is more than the {longest} tokens that {model.name} was made for"
    if tokens < seqs and engine.name == "vllm":
        return f"max_num_batched_tokens ({tokens}) must be greater than or equal to max_num_seqs ({seqs})"
    if tokens < length and engine.name == "vllm" and not args.enable_chunked_prefill:
        return f"max_num_batched_tokens ({tokens}) is smaller than max_model_len ({length}) without chunked prefill"
    if accepted and args.kv_cache_dtype not in (None, *accepted):
        return f"kv_cache_dtype {args.kv_cache_dtype!r} is none of {', '.join(accepted)}"
    least, capability = engine.facts["fp8_kv_capability"], gpu.compute_capability
    if (args.kv_cache_dtype or "").startswith("fp8") and capability and capability < least:
        where = f"{gpu.name} (compute capability {capability}) in {engine}"
        return f"kv_cache_dtype {args.kv_cache_dtype} does not run on {where}; it needs {least}: use auto"
    if args.dtype == "bfloat16" and "bf16" not in gpu.flops:
        return f"dtype bfloat16 does not run on {gpu.name}; use float16"
    if args.max_loras and args.max_lora_rank not in LORA_RANKS:
        return f"max_lora_rank {args.max_lora_rank} is none of {', '.join(map(str, LORA_RANKS))}"
    if 0 < args.max_cpu_loras < args.max_loras:  # vLLM 0.33.0 config/lora.py
        return f"max_cpu_loras {args.max_cpu_loras} is less than max_loras {args.max_loras}"
    if not 0 <= args.kv_offloading_size <= MOST_HOST_GIB:
        return f"kv_offloading_size is {args.kv_offloading_size:g} GiB; it must be 0 to {MOST_HOST_GIB:,}"
    if args.kv_offloading_size and (engine.name != "vllm" or engine.release < OFFLOADS):
        return f"{engine} has no kv_offloading_size; vllm has it from 0.12.0 on"
    if args.kv_offloading_size and not args.enable_prefix_caching:
        return "kv_offloading_size keeps prefixes, and enable_prefix_caching is off"
    if args.scheduling_policy not in ("fcfs", "priority"):
        return f"scheduling_policy {args.scheduling_policy!r} is neither fcfs nor priority"
    if args.scheduler_recv_interval < 1 or (args.scheduler_recv_interval > 1 and engine.name != "sglang"):
        return f"scheduler_recv_interval is {args.scheduler_recv_interval}; it must be at least 1, and 1 but for sglang"
    return None


def cudagraph_sizes(engine: Engine, args: EngineArgs, gpu: Gpu, k: int = 0) -> tuple[int, ...]:
    """Batch sizes (tokens) that get a CUDA graph, with `k` speculative tokens; none with `enforce_eager`.

    vLLM 0.20.2 config/vllm.py:1423, 0.33.0 config/vllm.py:2398.
    """
    capture = engine.facts["capture"]
    most = capture["max_cc10" if int(gpu.compute_capability or 0) == 10 else "max"]
    if capture["by_seqs"]:
        most = min(most, 2 * args.max_num_seqs * (1 + k))
    most = 0 if args.enforce_eager else min(most, args.max_num_batched_tokens)
    coarse = capture["coarse_from"]
    sizes = (1, 2, 4, *range(8, coarse, 8), *range(coarse, most + 1, 16))
    return tuple(size for size in sizes if size <= most)
