"""Engine arguments by the engine's own names, and what a version resolves them to."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from planner.core.errors import PlannerError, make_unknown_name_error
from planner.core.units import GIB, MAX_COUNT, MIB
from planner.core.versions import Version
from planner.engines.argument_names import load_argument_names
from planner.engines.cli_options import CliOption, get_cli_options
from planner.engines.engine import BatchLimitTier, Engine
from planner.engines.layout import ParallelLayout, SpeculationConfig
from planner.hardware.gpus import Gpu
from planner.models.registry import Model

_DTYPE_SPELLINGS = {"bf16": "bfloat16", "fp16": "float16", "half": "float16"}
"""Common short forms of dtypes -> the engine's name."""
PROMPT_GRAPH_TOKENS = (
    *range(4, 33, 4), *range(48, 257, 16), *range(288, 513, 32), *range(576, 1025, 64),
    *range(1280, 4097, 256), *range(4608, 2**15, 512),
)  # fmt: skip
"""Tokens of SGLang's graphs of prompts (0.5.12 server_args.py:1662)."""
VISION_SHARE, VISION_SHARE_SLOPE, VISION_SHARE_BOUNDS = 0.95, 0.1, (0.8, 1.05)
REFERENCE_TOWER = 24 * 1024**2
"""A model with a vision tower gets 0.95 of the share, less with a larger tower than ViT-L/14: layers
x width^2 (SGLang 0.5.16 server_args.py:7951)."""
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values of `--max-lora-rank` (vLLM 0.20.2 and 0.33.0)."""


OptionValue = str | int | float | bool | tuple[str, ...]
"""The value of an option that is passed on: JSON as its text, several words as a tuple."""


@dataclass(frozen=True, kw_only=True)
class EngineArgs:
    """Resolved arguments of a started engine, by its own names; None: left to its backends."""

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
    cpu_offload_gb: float = 0.0  # GiB of weights of each GPU that stay in host memory
    kv_offloading_size: float = 0.0  # GiB of host memory for KV blocks, over all ranks; 0: none
    long_prefill_token_threshold: int = 0  # 0: none
    scheduling_policy: str = "fcfs"
    scheduler_recv_interval: int = 1  # SGLang: decode steps between polls for requests
    limit_mm_per_prompt: str | None = None  # "image=2,video=0"
    revision: str | None = None  # branch, tag or commit of the checkpoint's repository
    # what the engine takes beside these, by its own names: passed on to it, and not modelled
    options: tuple[tuple[str, OptionValue], ...] = ()


MAX_BATCH_LIMITS = {"max_num_seqs": 2**20, "max_num_batched_tokens": 2**24}
"""Largest batches with tabulated step costs; above the longest context of the catalog's models."""
POSITIVE_COUNTS = {"max_model_len", *MAX_BATCH_LIMITS, "block_size", "scheduler_recv_interval"}
"""Arguments of which 0 is none."""
FIRST_RELEASE_WITH_KV_OFFLOAD = Version(0, 12)
"""The first vLLM with --kv-offloading-size (catalogs/flags/vllm.csv)."""
MAX_OFFLOAD_GIB = 65536


def format_media_limits(limits: object) -> object:
    """Return limits of media in one form; what is of no form that engines take stays as it is.

    >>> format_media_limits('{"image": 2, "audio": {"count": 0}}')
    'image=2,audio=0'
    """
    if isinstance(limits, str) and limits.lstrip().startswith("{"):
        try:
            limits = json.loads(limits)
        except ValueError:
            return limits
    if not isinstance(limits, Mapping):
        return limits
    counts = {
        kind: limit.get("count") if isinstance(limit, Mapping) else limit
        for kind, limit in limits.items()
    }
    return ",".join(f"{kind}={count}" for kind, count in counts.items() if isinstance(count, int))


def split_engine_args(given: Mapping[str, Any], engine: Engine) -> dict[str, Any]:
    """Return the arguments that are not None by the planner's names, and other options as `options`.

    Raises `PlannerError` for an option that this release's parser refuses, or that the plan decides.
    """
    names, known = (
        load_argument_names(engine.name),
        {*EngineArgs.__dataclass_fields__} - {"options"},
    )
    args = {
        names.arguments.get(name, name): value for name, value in given.items() if value is not None
    }
    passed = dict(args.pop("options")) if isinstance(args.get("options"), tuple) else {}
    for name in [name for name in args if name not in known]:
        options, value = get_cli_options(engine.name, engine.version), args.pop(name)
        option = options.find_argument(name)
        if option is None:
            taken = {each.argument for each in options.by_spelling.values()}
            raise make_unknown_name_error(name, known | taken, f"engine argument of {engine}")
        if decided := names.decided.get(option.argument):
            raise PlannerError(f"engine_args: {name} is not passed on; {decided}")
        if isinstance(value, Mapping | list | tuple):
            is_json = option.kind.startswith("json") or isinstance(value, Mapping)
            value = json.dumps(value, ensure_ascii=False) if is_json else tuple(map(str, value))
        parsed = options.parse(spell_option(option, value))
        if parsed.errors or parsed.positional:  # a switch takes no words
            problem = next(iter(parsed.errors), "must be true or false")
            raise PlannerError(f"engine_args, field {name}: {problem}")
        passed[option.argument] = value
    if isinstance(limits := args.get("limit_mm_per_prompt"), str | Mapping):
        args["limit_mm_per_prompt"] = format_media_limits(limits)
    return {**args, "options": tuple(passed.items())} if passed else args


def spell_option(option: CliOption, value: OptionValue) -> list[str]:
    """Return the words of a command that give an option this value; none for a switch that is off."""
    if isinstance(value, bool) and option.kind == "nothing":
        return [option.name] if value else [*option.negations[:1]]
    words = (
        value
        if isinstance(value, tuple)
        else (str(value).lower() if isinstance(value, bool) else str(value),)
    )
    return [option.name, *words]


def resolve_engine_args(
    user_args: Mapping[str, Any], engine: Engine, gpu: Gpu, model: Model,
    layout: ParallelLayout | None = None, speculation: SpeculationConfig | None = None,
) -> EngineArgs:  # fmt: skip
    """Fill in missing or None arguments as the engine does; `PlannerError` if it would not start.

    Batch limits are those of one engine, also where copies of the attention share them
    (`divide_batch_limits`). `block_size` stays as given: backends and hybrid models change its default (see
    `memory.kv_cache`). Order of steps: vLLM 0.20.2 engine/arg_utils.py:2339, 0.33.0
    engine/arg_utils.py:3151.
    """
    facts, shape, tier = engine.facts, model.architecture, _select_batch_limits(engine, gpu)
    user_args = split_engine_args(user_args, engine)
    user_args |= {
        name: _DTYPE_SPELLINGS.get(user_args[name], user_args[name])
        for name in ("dtype", "kv_cache_dtype")
        if name in user_args
    }
    length = user_args.get("max_model_len") or shape.max_position
    chunked = user_args.get("enable_chunked_prefill", facts.chunked_prefill)
    copies = count_attention_copies(engine, model, layout)
    tokens, most_seqs = tier.max_num_batched_tokens // copies, tier.max_num_seqs
    if facts.num_seqs_of_model or (speculation and facts.num_seqs_with_draft):
        drafted = facts.num_seqs_with_draft if speculation else None
        shared = facts.num_seqs_of_model.get(shape.model_type, drafted)
        most_seqs = max(shared // copies, 1) if shared else most_seqs
    if engine.name == "vllm":
        seqs = user_args.get("max_num_seqs") or tier.max_num_seqs
        tokens = min(tokens if chunked else max(tokens, length), seqs * length)
    tokens = user_args.get("max_num_batched_tokens", tokens)
    is_cast = model.dtype == "bfloat16" and "bf16" not in gpu.peak_flops and facts.casts_bfloat16
    defaults = {
        "gpu_memory_utilization": facts.gpu_memory_utilization,
        "max_model_len": length,
        "max_num_seqs": most_seqs if facts.shares_limits else min(most_seqs, tokens),
        "max_num_batched_tokens": tokens,
        "dtype": "float16" if is_cast else model.dtype,
        "enable_prefix_caching": (
            facts.prefix_caching_hybrid if shape.is_hybrid else facts.prefix_caching
        ),
        "enable_chunked_prefill": chunked,
        "async_scheduling": facts.async_scheduling,
    }
    args = EngineArgs(**{**defaults, **user_args})
    if facts.static_memory and "gpu_memory_utilization" not in user_args:
        share = _compute_static_share(args, engine, gpu, model, layout, speculation)
        args = replace(args, gpu_memory_utilization=share)
    # vLLM config/scheduler.py, cache.py and model.py
    rules = (*_list_batch_rules(args, engine, model), *_list_kv_cache_rules(args, engine, gpu))
    if reason := next((reason for is_broken, reason in rules if is_broken), ""):
        raise PlannerError(reason)
    return args


def count_attention_copies(engine: Engine, model: Model, layout: ParallelLayout | None) -> int:
    """Count the copies of the attention that share the batch limits of a command."""
    shares_limits = engine.facts.shares_limits and model.architecture.is_moe
    return layout.dp if layout and shares_limits else 1


def divide_batch_limits(args: Mapping[str, Any], copies: int) -> dict[str, Any]:
    """Divide the batch limits of a command among copies of the attention, as SGLang does.

    SGLang 0.5.16 server_args.py:5609, mem_cache/kv_cache_configurator.py:1631.
    """
    return {
        name: max(value // copies, 1) if name in MAX_BATCH_LIMITS and value > 0 else value
        for name, value in args.items()
    }


def _compute_static_share(
    args: EngineArgs, engine: Engine, gpu: Gpu, model: Model, layout: ParallelLayout | None,
    speculation: SpeculationConfig | None,
) -> float:  # fmt: skip
    """Compute the default mem_fraction_static (SGLang 0.5.16 server_args.py:4054)."""
    facts, shape = engine.facts, model.architecture
    mib, tier = facts.static_memory, _select_batch_limits(engine, gpu)
    assert mib is not None and tier.largest_graph is not None
    copies, memory = count_attention_copies(engine, model, layout), gpu.memory_bytes / MIB
    stage = layout.tp * copies if layout else 1
    graph, tokens = tier.largest_graph[stage >= 4], max(args.max_num_batched_tokens * copies, 2048)
    reserved = mib.base + mib.token * tokens + mib.graph * graph
    reserved += mib.gpu * stage * (layout.pp if layout else 1)
    if copies > 1:
        reserved += graph * copies * (mib.many_copy_graph if graph > 300 else mib.copy_graph)
    eager = speculation or copies > 1 or (layout and layout.pp > 1) or args.max_loras
    if not (eager or shape.vision_towers or gpu.vendor != "nvidia"):
        graphs = sum(size <= args.max_num_batched_tokens for size in PROMPT_GRAPH_TOKENS)
        reserved += mib.latent_prompt_graphs if shape.is_mla else mib.prompt_graph * graphs
    reserved = max(reserved, mib.least) if memory > 60 * 1024 else reserved
    if speculation and speculation.method != "ngram":
        reserved += mib.draft_model if speculation.method == "draft_model" else mib.draft
    share = 1 - reserved / memory
    blocks = [weight for weight in shape.vision_towers if weight.copies > 1 and weight.cols > 1]
    if blocks:
        size = max(w.copies for w in blocks) * min(w.cols for w in blocks) ** 2 / REFERENCE_TOWER
        low, high = VISION_SHARE_BOUNDS
        share *= VISION_SHARE * min(max(1 - VISION_SHARE_SLOPE * (size - 1), low), high)
    return max(round(share, 3), 0.001)  # nothing fits then, as in the engine


def _select_batch_limits(engine: Engine, gpu: Gpu) -> BatchLimitTier:
    """Select the default batch limits of a GPU by its memory and parts of its name."""
    name = gpu.name.lower()
    return next(
        tier
        for tier in engine.facts.limits
        if gpu.memory_bytes >= tier.memory_gib * GIB
        and (not tier.named or any(part in name for part in tier.named))
        and not any(part in name for part in tier.not_named)
    )


BrokenRule = tuple[bool, str]
"""Whether arguments break a rule of the engine, and a sentence that says so."""


def _list_batch_rules(args: EngineArgs, engine: Engine, model: Model) -> list[BrokenRule]:
    """List the rules of lengths, batches and scheduling, in the order in which they are checked."""
    length, tokens, seqs = args.max_model_len, args.max_num_batched_tokens, args.max_num_seqs
    counts = {name: value for name, value in vars(args).items() if type(value) is int}
    media = r"(image|video|audio)=\d+"
    max_position, is_vllm = model.architecture.max_position, engine.name == "vllm"
    return [
        *(
            (not least <= count <= most, f"{name} is {count}; it must be {least} to {most:,}")
            for name, count in counts.items()
            for least in [int(name in POSITIVE_COUNTS)]
            for most in [MAX_BATCH_LIMITS.get(name, MAX_COUNT)]
        ),
        (
            not re.fullmatch(f"{media}(,{media})*", args.limit_mm_per_prompt or "image=1"),
            f"limit_mm_per_prompt is {args.limit_mm_per_prompt!r:.80}; expected such as"
            " image=2,video=0",
        ),
        (
            args.revision is not None and not re.fullmatch(r"\w[\w./-]{0,199}", args.revision),
            f"revision is {args.revision!r:.80}; expected a branch, tag or commit",
        ),
        (
            not 0 < args.gpu_memory_utilization <= 1,
            f"gpu_memory_utilization is {args.gpu_memory_utilization}; it must be above 0 and at"
            " most 1",
        ),
        (
            length > max_position,
            f"max_model_len {length} is more than the {max_position} tokens that {model.name} was"
            " made for",
        ),
        (
            tokens < seqs and is_vllm,
            f"max_num_batched_tokens ({tokens}) must be greater than or equal to max_num_seqs"
            f" ({seqs})",
        ),
        (
            tokens < length and is_vllm and not args.enable_chunked_prefill,
            f"max_num_batched_tokens ({tokens}) is smaller than max_model_len ({length}) without"
            " chunked prefill",
        ),
        (
            args.max_loras != 0 and args.max_lora_rank not in LORA_RANKS,
            f"max_lora_rank {args.max_lora_rank} is none of {', '.join(map(str, LORA_RANKS))}",
        ),
        (  # vLLM 0.33.0 config/lora.py
            0 < args.max_cpu_loras < args.max_loras,
            f"max_cpu_loras {args.max_cpu_loras} is less than max_loras {args.max_loras}",
        ),
        (
            args.scheduling_policy not in ("fcfs", "priority"),
            f"scheduling_policy {args.scheduling_policy!r} is neither fcfs nor priority",
        ),
        (
            args.scheduler_recv_interval != 1 and engine.name != "sglang",
            f"scheduler_recv_interval is {args.scheduler_recv_interval}; it must be 1 but for sglang",
        ),
    ]


def _list_kv_cache_rules(args: EngineArgs, engine: Engine, gpu: Gpu) -> list[BrokenRule]:
    """List the rules of number formats and host memory, in the order in which they are checked."""
    known_dtypes, dtype = engine.facts.kv_cache_dtypes, args.kv_cache_dtype
    required, capability = engine.facts.fp8_kv_capability, gpu.compute_capability
    offloaded = {name: getattr(args, name) for name in ("kv_offloading_size", "cpu_offload_gb")}
    has_kv_offload = engine.name == "vllm" and engine.release >= FIRST_RELEASE_WITH_KV_OFFLOAD
    return [
        (
            bool(known_dtypes) and dtype not in (None, *known_dtypes),
            f"kv_cache_dtype {dtype!r} is none of {', '.join(known_dtypes)}",
        ),
        (
            (dtype or "").startswith("fp8") and 0 < (capability or 0) < required,
            f"kv_cache_dtype {dtype} does not run on {gpu.name} (compute capability {capability})"
            f" in {engine}; it needs {required}: use auto",
        ),
        (
            args.dtype == "bfloat16" and "bf16" not in gpu.peak_flops,
            f"dtype bfloat16 does not run on {gpu.name}; use float16",
        ),
        *(
            (
                not 0 <= size <= MAX_OFFLOAD_GIB,
                f"{name} is {size:g} GiB; it must be 0 to {MAX_OFFLOAD_GIB:,}",
            )
            for name, size in offloaded.items()
        ),
        (
            args.kv_offloading_size > 0 and not has_kv_offload,
            f"{engine} has no kv_offloading_size; vllm has it from 0.12.0 on",
        ),
        (
            args.cpu_offload_gb > 0 and engine.name not in ("vllm", "sglang"),
            f"{engine} has no cpu_offload_gb",
        ),
        (
            args.kv_offloading_size > 0 and not args.enable_prefix_caching,
            "kv_offloading_size keeps prefixes, and enable_prefix_caching is off",
        ),
    ]


def list_cudagraph_sizes(engine: Engine, args: EngineArgs, gpu: Gpu, k: int = 0) -> tuple[int, ...]:
    """List the batch sizes (tokens) that get a CUDA graph, with `k` speculative tokens.

    There are none with `enforce_eager`. Source: vLLM 0.20.2 config/vllm.py:1423, 0.33.0
    config/vllm.py:2398.
    """
    capture = engine.facts.capture
    largest = capture.max_cc10 if int(gpu.compute_capability or 0) == 10 else capture.max
    if capture.by_seqs:
        largest = min(largest, 2 * args.max_num_seqs * (1 + k))
    largest = 0 if args.enforce_eager else min(largest, args.max_num_batched_tokens)
    coarse = capture.coarse_from
    sizes = (1, 2, 4, *range(8, coarse, 8), *range(coarse, largest + 1, 16))
    return tuple(size for size in sizes if size <= largest)
