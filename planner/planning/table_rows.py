"""Rows of the batch interface: their columns, and how they become a deployment and a workload."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cache
from os.path import isfile
from pathlib import Path
from typing import Any

from planner.core.errors import PlannerError, add_error_context, find_closest
from planner.core.intervals import Interval
from planner.core.readers import read_yaml
from planner.core.units import GIB, convert_gib_to_bytes
from planner.engines.deployment import Deployment, deploy_on
from planner.engines.engine import get_engine, resolve_dynamo_version
from planner.engines.engine_args import count_attention_copies, divide_batch_limits
from planner.engines.layout import ParallelLayout, SpeculationConfig
from planner.hardware.gpus import get_gpu
from planner.latency.performance import LATENCY_METRICS, LATENCY_STATISTICS
from planner.latency.startup_time import estimate_startup
from planner.latency.worker_pool_costs import get_pool_costs
from planner.memory.memory_plan import find_max_model_len, get_memory_plan
from planner.models.registry import Model, load_model
from planner.parallelism.layouts import explain_illegal_layout
from planner.parallelism.start_gate import explain_refused_model
from planner.planning.prediction import RATE_METRICS, Prediction
from planner.workload.length_distribution import LengthDistribution
from planner.workload.traces import read_trace
from planner.workload.workload import Workload

POOL_SIZE_COLUMNS = ("workers", "tp", "dp", "ep")
COLUMN_CATALOG: Mapping[str, Any] = read_yaml(Path(__file__).with_name("table_columns.yaml"))
ENGINE_ARG_COLUMNS: Mapping[str, str] = COLUMN_CATALOG["engine_args"]
INPUT_COLUMNS = {
    **{name: kind for kind, names in COLUMN_CATALOG["inputs"].items() for name in names},
    **ENGINE_ARG_COLUMNS,
}
"""Every input column and the kind of its cells."""


def parse_cells(row: Mapping[str, str]) -> tuple[dict[str, Any], list[str]]:
    """Parse the filled cells of known columns; return them and notes on misspelled columns.

    Raises `PlannerError` for a cell that its kind does not accept.
    """
    cells: dict[str, Any] = {}
    notes = []
    for name, text in row.items():
        if ignored := explain_unknown_column(name):
            notes += [ignored] * ("did you mean" in ignored)
        elif name and (cell := text.strip()):
            kind = COLUMN_CATALOG["kinds"][
                INPUT_COLUMNS.get(name) or COLUMN_CATALOG["measured"][name]
            ]
            try:
                cells[name] = _parse_cell(cell, **kind)
            except (ValueError, KeyError, OverflowError):
                raise PlannerError(f"{name}: expected {kind['accepts']}, got {cell!r}") from None
    return cells, notes


def explain_unknown_column(name: str) -> str:
    """Explain that a column is ignored, with the known one it may mean; empty for a known one.

    A column without a name is an index, as of pandas.
    """
    if name in ("", *INPUT_COLUMNS, *COLUMN_CATALOG["measured"]):
        return ""
    known = find_closest(COLUMN_CATALOG["called"].get(name, name), INPUT_COLUMNS, 0.85)
    return f"column {name} is ignored" + (f", did you mean {known}?" if known else "")


def _parse_cell(
    cell: str, accepts: str, least: float | None = None, most: float = math.inf, whole: bool = False
) -> str | bool | float:
    """Parse a cell as text, truth value or number; `ValueError` or `KeyError` if it is none."""
    if least is None:
        return cell if accepts == "text" else COLUMN_CATALOG["flags"][cell.casefold()]
    number = float(cell)
    if not least <= number <= most or (whole and number != math.floor(number)):
        raise ValueError
    return int(number) if whole else number


def parse_model(cells: Mapping[str, Any], folder: Path, prefix: str = "") -> Model:
    """Load the model of a row, or with the prefix "draft_" its draft model."""
    name, config = cells.get(f"{prefix}model"), cells.get(f"{prefix}model_config")
    if config is not None and not any(
        map(isfile, (folder / config, folder / config / "config.json"))
    ):
        raise PlannerError(f"{prefix}model_config: there is no file {config} in {folder}")
    if config is None and name is None:
        raise PlannerError(f"{prefix}model (or {prefix}model_config) is missing")
    source = str(name if config is None else folder / config)
    if prefix:
        return _load_model_cached(source)
    bits, method, dtype = cells.get("weight_bits"), cells.get("quantization"), cells.get("dtype")
    method = None if method == "checkpoint" else method  # the word of scenarios
    model = _load_model_cached(source, method, dtype)
    if bits is not None and bits != model.quantization.weight_bits:
        if method is None:
            if (method := {16: "none", 8: "int8", 4: "awq"}.get(int(bits))) is None:
                raise PlannerError(
                    f"weight_bits: 16, 8 or 4 are known without a quantization, got {bits:g}"
                )
            model = _load_model_cached(source, method, dtype)
        if model.quantization.schemes and bits != model.quantization.weight_bits:
            schemes = tuple(
                (where, replace(scheme, bits=float(bits)))
                for where, scheme in model.quantization.schemes
            )
            model = replace(model, quantization=replace(model.quantization, schemes=schemes))
    return model if name is None else replace(model, name=name)


def _load_model_cached(
    source: str, quantization: str | None = None, dtype: str | None = None
) -> Model:
    model = _try_load_model(source, quantization, dtype)
    if isinstance(model, PlannerError):
        raise model
    return model


@cache
def _try_load_model(
    source: str, quantization: str | None, dtype: str | None
) -> Model | PlannerError:
    """Load a model, or return the error, so that an unknown name is looked up only once."""
    try:
        return load_model(source, quantization=quantization, dtype=dtype)
    except PlannerError as error:
        return error


def parse_deployment(
    model: Model, cells: Mapping[str, Any], folder: Path, notes: list[str], pool: str = ""
) -> Deployment:
    """Build the deployment of a row, or that of its "prefill" or "decode" pool.

    Appends to `notes` what was read in another way than it is written.
    """
    if "gpu" not in cells:
        raise PlannerError("gpu is missing")
    sizes = {
        name: cells[name] for name in ("tp", "pp", "dp", "ep", "dcp", "replicas") if name in cells
    }
    if pool:
        sizes = {
            size: cells[f"{pool}_{size}"] for size in POOL_SIZE_COLUMNS if f"{pool}_{size}" in cells
        }
        sizes["replicas"] = sizes.pop("workers", 1)
    sizes = _correct_layout_sizes(sizes, model, cells, notes, squared=not pool)
    speculation = None
    if "speculative_method" in cells:
        if "num_speculative_tokens" not in cells:
            raise PlannerError("num_speculative_tokens is missing beside speculative_method")
        draft = (
            parse_model(cells, folder, "draft_")
            if {"draft_model", "draft_model_config"} & set(cells)
            else None
        )
        rate = cells.get("acceptance_rate", 0.7)
        speculation = SpeculationConfig(
            cells["speculative_method"], cells["num_speculative_tokens"], rate, draft
        )
    names = ("interconnect", "gpus_per_node", "engine", "engine_version")
    options = {name: cells[name] for name in names if name in cells}
    if pool and {"engine", "engine_version"} <= set(options):
        version = resolve_dynamo_version(options["engine"], options["engine_version"])
        if version != options["engine_version"]:
            notes.append(
                f"engine_version {options['engine_version']} is read as Dynamo's, which ships"
                f" {version}"
            )
            options["engine_version"] = version
    gpu_bytes, memory = get_gpu(cells["gpu"]).memory_bytes, dict[str, Any]()
    for size in ("gpu_total", "gpu_free", "other_tenants"):
        if (column := f"{size}_gib") in cells:
            memory[size] = convert_gib_to_bytes(cells[column], gpu_bytes, column)
    args = ({} if pool else _get_recipe_args(model, cells)) | {
        name: cells[name] for name in ENGINE_ARG_COLUMNS if name in cells
    }
    engine = get_engine(str(options.get("engine", "vllm")), options.get("engine_version"))
    args = divide_batch_limits(args, count_attention_copies(engine, model, ParallelLayout(**sizes)))
    if pool == "prefill":  # prefill workers are started with more tokens per step than others
        args.setdefault("max_num_batched_tokens", get_pool_costs(engine).prefill_tokens)
    deployment = deploy_on(
        model, cells["gpu"], speculation=speculation, **sizes, **options, **memory, **args
    )
    if reason := explain_refused_model(model, deployment.gpu, deployment.engine):
        if not set(cells) & set(COLUMN_CATALOG["measured"]):
            raise PlannerError(reason)
        notes.append(reason)  # what was measured did start
    if reason := explain_illegal_layout(
        model, deployment.layout, deployment.layout.gpus_per_replica, deployment.engine
    ):
        if not deployment.engine.facts.pads_heads:
            raise PlannerError(reason)
        # Other engines pad heads, or run attention data-parallel.
        notes.append(f"vLLM would refuse this layout: {reason}")
    return (
        _raise_memory_utilization(deployment, pool, notes)
        if pool and "gpu_memory_utilization" not in cells
        else deployment
    )


def _get_recipe_args(model: Model, cells: Mapping[str, Any]) -> dict[str, Any]:
    """Return the engine arguments that InferenceX's scripts set, for a row of its tables."""
    family, gpu = model.architecture.model_type, get_gpu(cells["gpu"]).name
    recipe_args, has_copies = dict[str, Any](), cells.get("dp", 1) > 1
    if cells.get("length_range_ratio") != 0.8 or "concurrency" not in cells:
        return recipe_args
    for recipe in COLUMN_CATALOG["recipes"]:
        if (
            recipe["engine"] == cells.get("engine")
            and family in recipe["models"]
            and gpu in recipe["gpus"]
            and cells["concurrency"] >= recipe["concurrency"]
            and recipe.get("dp", has_copies) == has_copies
        ):
            recipe_args |= recipe["args"]
    return recipe_args


POOL_MEMORY_UTILIZATION, MIN_POOL_CACHE_FRACTION = 0.95, 0.05
"""gpu_memory_utilization of a pool if the default leaves the KV cache less than this fraction of
the memory. Pools that barely hold a model run so (InferenceX's recipe for DeepSeek-R1 FP8 on four
GB200: mem-fraction-static 0.95)."""


def _raise_memory_utilization(deployment: Deployment, pool: str, notes: list[str]) -> Deployment:
    """Raise gpu_memory_utilization if the engine's default leaves hardly any KV cache."""
    default = deployment.args.gpu_memory_utilization
    if (
        default >= POOL_MEMORY_UTILIZATION
        or get_memory_plan(deployment).kv_available.mid
        > MIN_POOL_CACHE_FRACTION * deployment.gpu_total_bytes
    ):
        return deployment
    notes.append(
        f"{pool}: gpu_memory_utilization {default:g} leaves hardly any KV cache: planned with"
        f" {POOL_MEMORY_UTILIZATION:g}"
    )
    return deployment.with_args(gpu_memory_utilization=POOL_MEMORY_UTILIZATION)


def _correct_layout_sizes(
    sizes: dict[str, Any], model: Model, cells: Mapping[str, Any], notes: list[str], squared: bool
) -> dict[str, Any]:
    """Correct sizes that no engine can run to those that benchmark tables mean.

    InferenceX's tables give TP8 with EP8 as 64 and 64, and the same runs also as 8 and 8
    (`squared`; not in its tables of pools). They give attention that is data-parallel over all GPUs
    of a rack as that many tp, and wide expert parallelism behind data-parallel attention, which
    SGLang's DeepEP sets by itself, as ep 1.
    """
    tp, ep = sizes.get("tp", 1), sizes.get("ep", 1)
    node = cells.get("gpus_per_node") or get_gpu(cells["gpu"]).gpus_per_node
    side = math.isqrt(tp)
    if squared and tp == ep == side * side and side <= node < tp:
        notes.append(f"tp {tp} with ep {ep} is read as tp {side} with ep {side} on {side} GPUs")
        return {**sizes, "tp": side, "ep": side}
    # With tensor parallel latent attention every GPU would hold the whole KV cache.
    wide = model.architecture.is_mla and not squared and ep == tp > max(node, 8)
    if (
        model.architecture.is_moe
        and tp > node
        and (model.architecture.num_query_heads % tp or wide)
    ):
        notes.append(
            f"attention cut over {tp} GPUs is read as data-parallel attention on {tp} GPUs"
        )
        return {**sizes, "tp": 1, "dp": tp, "ep": tp}
    ranks = sizes.get("dp", 1) * tp
    if ep == 1 < sizes.get("dp", 1) and ranks > 8 and model.architecture.is_moe:
        notes.append(f"experts cut over {ranks} data-parallel ranks are read as expert parallelism")
        return {**sizes, "ep": ranks}
    return sizes


def parse_row_workload(cells: Mapping[str, Any], folder: Path, notes: list[str]) -> Workload | None:
    """Parse the workload of a row; None if it has none, so that only memory can be planned."""
    names = ("request_rate", "concurrency", "num_prompts")
    rate, concurrency, prompts = map(cells.get, names)
    if "trace" not in cells and not {"isl", "osl"} & set(cells):
        if ignored := {"request_rate", "concurrency"} & set(cells):
            notes.append(
                f"{min(ignored)} without isl and osl, the mean tokens of prompt and answer: only"
                " memory is planned"
            )
        return None
    if rate == math.inf:  # all requests are sent at once
        rate, concurrency, prompts = None, concurrency or prompts or 1000, prompts or 1000
        concurrency = min(concurrency, prompts)
    load = {
        "burstiness": cells.get("burstiness", 1.0),
        "prefix_tokens": cells.get("prefix_tokens", 0),
        "prefix_hit_rate": cells.get("prefix_hit_rate", 1.0 if "prefix_tokens" in cells else 0.0),
        **{name: cells[name] for name in ("adapters", "adapter_zipf") if name in cells},
    }
    if "trace" in cells:
        base = Workload.from_trace(read_trace(folder / cells["trace"]).select_busiest_hour(), rate)
        given = {
            name: value
            for name, value in (load | {"num_prompts": prompts}).items()
            if name in cells
        }
        given |= {
            side: _parse_row_lengths(cells, name)
            for side, name in (("prompt", "isl"), ("output", "osl"))
            if name in cells
        }
        if concurrency and not rate:  # a closed loop with the lengths of the trace
            return replace(
                base,
                rate=None,
                trace=None,
                **{"num_prompts": None, **given},
                concurrency=concurrency,
            )
        return replace(base, concurrency=concurrency, **given)
    if rate is None and concurrency is None:
        notes.append("no concurrency and no request_rate: one request at a time")
        concurrency = 1
    lengths = {name: _parse_row_lengths(cells, name) for name in ("isl", "osl")}
    return Workload(
        lengths["isl"],
        lengths["osl"],
        rate=rate,
        concurrency=concurrency,
        num_prompts=prompts,
        **load,
    )


def _parse_row_lengths(cells: Mapping[str, Any], name: str) -> LengthDistribution:
    if name not in cells:
        raise PlannerError(f"{name} is missing")
    with add_error_context(name):
        if "length_range_ratio" in cells:
            return LengthDistribution.from_uniform(cells[name], cells["length_range_ratio"])
        return LengthDistribution.from_lognormal(
            cells[name], *(cells.get(f"{name}_{figure}") for figure in ("p95", "p50", "max"))
        )


_LATENCY_COLUMNS = tuple(f"{m}_ms_{q}" for m in LATENCY_METRICS for q in LATENCY_STATISTICS)
_MEMORY_COLUMNS, _LOAD_COLUMNS, _INTERVAL_COLUMNS = COLUMN_CATALOG["outputs"].values()
_INTERVAL_END_COLUMNS = [f"{name}_{end}" for name in _INTERVAL_COLUMNS for end in ("lo", "hi")]
OUTPUT_COLUMNS = (
    *_MEMORY_COLUMNS, *_LATENCY_COLUMNS, *_LOAD_COLUMNS, *_INTERVAL_END_COLUMNS, "calibration",
    "warnings",
)  # fmt: skip
"""Every output column, in order; `table_columns.yaml` explains them."""


def build_output_row(prediction: Prediction, notes: Iterable[str] = ()) -> dict[str, object]:
    """Build the output columns of one prediction, with the interval ends of the main figures."""
    columns = _compute_output_columns(prediction)
    intervals = {
        name: value
        for name in _INTERVAL_COLUMNS
        if isinstance(value := columns.get(name), Interval)
    }
    ends = {
        f"{name}_{end}": getattr(value, end)
        for name, value in intervals.items()
        for end in ("lo", "hi")
    }
    middles = {
        name: value.mid if isinstance(value, Interval) else value for name, value in columns.items()
    }
    return middles | ends | {"warnings": ";".join((*notes, *prediction.warnings))}


def parse_measured_run(
    cells: Mapping[str, Any], folder: Path, notes: list[str]
) -> tuple[Deployment, Workload]:
    """Parse the deployment and the workload of a measured row; `PlannerError` if one is missing."""
    workload = parse_row_workload(cells, folder, notes)
    if workload is None:
        raise PlannerError("isl and osl are missing")
    deployment = parse_deployment(parse_model(cells, folder), cells, folder, notes)
    if "max_model_len" not in cells:
        deployment = fit_max_model_len(deployment, workload, notes)
    return deployment, workload


def fit_max_model_len(deployment: Deployment, workload: Workload, notes: list[str]) -> Deployment:
    """Lower max_model_len to the largest that fits if only the model's own is too long."""
    memory = get_memory_plan(deployment)
    longest = find_max_model_len(memory)[1]
    if memory.pool.max_concurrency_x >= 1 or longest < workload.compute_total_tokens_quantile(1.0):
        return deployment
    notes.append(
        f"max_model_len {deployment.args.max_model_len:,} does not fit: planned with {longest:,}"
    )
    return deployment.with_args(max_model_len=longest)


def _compute_output_columns(prediction: Prediction) -> dict[str, object]:
    """Compute the output columns of one prediction, with intervals unsplit."""
    memory, performance = prediction.memory, prediction.performance
    pool, architecture = memory.pool, prediction.deployment.model.architecture
    startup = estimate_startup(prediction.deployment)
    columns: dict[str, object] = {
        "status": "ok", "params_total": architecture.params_total,
        "params_active": architecture.params_active,
        **{
            f"{term}_gib": getattr(memory, term) / GIB
            for term in ("weights", "activation", "cudagraph", "non_torch")
        },
        "kv_available_gib": memory.kv_available / GIB,
        "kv_bytes_per_token": pool.layout.kv_bytes_per_token,
        "state_bytes_per_seq": pool.layout.state_bytes_per_seq, "num_gpu_blocks": pool.num_blocks,
        "block_size": pool.layout.block_size, "bytes_per_block": pool.bytes_per_block,
        "kv_tokens": pool.reported_tokens,
        "max_concurrency_x": memory.max_concurrency, "usd_per_hour": prediction.usd_per_hour,
        "start_up_s": startup and startup.total,
    }  # fmt: skip
    if performance is None:
        if prediction.workload is not None or not memory.can_start:
            columns |= {
                "status": "does_not_fit",
                "error": ". ".join(
                    f"{text[:1].upper()}{text[1:]}"
                    for text in (memory.reason, memory.remedy)
                    if text
                ),
            }
        return columns
    columns |= {
        f"{m}_ms_{q}": performance.get(m, q) * 1e3
        for m in LATENCY_METRICS
        for q in LATENCY_STATISTICS
    }
    return columns | {
        **{name: getattr(performance, name) for name in RATE_METRICS},
        "output_tps_per_gpu": performance.output_tps / prediction.num_gpus,
        "preemptions_per_request": performance.preemptions,
        "kv_usage_p99": performance.kv_usage_p99 or performance.kv_usage,
        "queue_ms_p99": performance.queue * 1e3,
        "decode_batch_mean": performance.decode_batch, "spec_speedup": prediction.speedup,
        "calibration": performance.basis,
        "usd_per_mtok_output": prediction.usd_per_mtok_output, "capacity_rps": performance.capacity,
        "power_w_per_gpu": prediction.gpu_power_w,
        "joules_per_output_token": prediction.joules_per_output_token,
    }  # fmt: skip
