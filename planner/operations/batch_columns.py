"""A row of the batch interface as a deployment and a workload: which columns there are, and how a cell is read."""

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from os.path import isfile
from pathlib import Path
from typing import Any

from planner.core.catalog import read_yaml
from planner.core.quantities import PlannerError, bytes_of, closest, told_of
from planner.facts.deployment import Deployment, Speculation, deploy_on
from planner.facts.engines import behind_dynamo, engine, unsupported
from planner.facts.gpus import gpu
from planner.facts.traces import read_trace
from planner.facts.workload import Lengths, Workload
from planner.latency.pool_costs import pool_costs
from planner.memory.budget import memory_of
from planner.models.registry import Model, model
from planner.parallelism.layouts import refuse

POOL_SIZES = ("workers", "tp", "dp", "ep")
COLUMNS: Mapping[str, Any] = read_yaml(Path(__file__).parent / "templates" / "columns.yaml")
ENGINE_ARGS: Mapping[str, str] = COLUMNS["engine_args"]
INPUTS = {**{name: kind for kind, names in COLUMNS["inputs"].items() for name in names}, **ENGINE_ARGS}
"""Every input column and how its cells are read."""


def read_cells(row: Mapping[str, str]) -> tuple[dict[str, Any], list[str]]:
    """The filled cells of known columns, read; and notes on columns that look misspelt."""
    cells: dict[str, Any] = {}
    notes = []
    for name, text in row.items():
        if unknown(name):
            notes += [ignored(name)] if _meant(name) else []
        elif cell := text.strip():
            kind = COLUMNS["kinds"][INPUTS.get(name) or COLUMNS["measured"][name]]
            try:
                cells[name] = _read(cell, **kind)
            except (ValueError, KeyError, OverflowError):
                raise PlannerError(f"{name}: expected {kind['accepts']}, got {cell!r}") from None
    return cells, notes


def unknown(name: str) -> bool:
    """Whether a column has a name that is not known."""
    return name not in ("", *INPUTS, *COLUMNS["measured"])


def _meant(name: str) -> str:
    return closest(COLUMNS["called"].get(name, name), INPUTS, 0.85)


def ignored(name: str) -> str:
    """What to say of an unknown column."""
    return f"column {name} is ignored" + (f", did you mean {known}?" if (known := _meant(name)) else "")


def _read(cell: str, accepts: str, least: float | None = None, most: float = math.inf, whole: bool = False) -> Any:
    """The text, truth value or number in a cell; `ValueError` or `KeyError` for what its kind does not accept."""
    if least is None:
        return cell if accepts == "text" else COLUMNS["flags"][cell.casefold()]
    number = float(cell)
    if not least <= number <= most or (whole and number != math.floor(number)):
        raise ValueError
    return int(number) if whole else number


def read_model(cells: Mapping[str, Any], folder: Path, prefix: str = "") -> Model:
    """The model (or, with the prefix "draft_", the draft) that a row names."""
    name, config = cells.get(f"{prefix}model"), cells.get(f"{prefix}model_config")
    if config is not None and not any(map(isfile, (folder / config, folder / config / "config.json"))):
        raise PlannerError(f"{prefix}model_config: there is no file {config} in {folder}")
    if config is None and name is None:
        raise PlannerError(f"{prefix}model (or {prefix}model_config) is missing")
    source = str(name if config is None else folder / config)
    if prefix:
        return _known(source)
    bits, stored, dtype = cells.get("weight_bits"), cells.get("quantization"), cells.get("dtype")
    stored = None if stored == "checkpoint" else stored  # as a scenario says it
    found = _known(source, stored, dtype)
    if bits is not None and bits != found.quantization.weight_bits:
        if stored is None:
            if (stored := {16: "none", 8: "int8", 4: "awq"}.get(int(bits))) is None:
                raise PlannerError(f"weight_bits: 16, 8 or 4 are known without a quantization, got {bits:g}")
            found = _known(source, stored, dtype)
        if found.quantization.schemes and bits != found.quantization.weight_bits:
            schemes = tuple((where, replace(scheme, bits=float(bits))) for where, scheme in found.quantization.schemes)
            found = replace(found, quantization=replace(found.quantization, schemes=schemes))
    return found if name is None else replace(found, name=name)


def _known(source: str, quantization: str | None = None, dtype: str | None = None) -> Model:
    found = _asked_once(source, quantization, dtype)
    if isinstance(found, PlannerError):
        raise found
    return found


@cache
def _asked_once(source: str, quantization: str | None, dtype: str | None) -> Model | PlannerError:
    """The model, or why there is none: an unknown name is looked up once, not once a row."""
    try:
        return model(source, quantization=quantization, dtype=dtype)
    except PlannerError as error:
        return error


def read_deployment(
    served: Model, cells: Mapping[str, Any], folder: Path, notes: list[str], pool: str = ""
) -> Deployment:
    """What a row deploys: all of it, or its "prefill" or "decode" pool."""
    if "gpu" not in cells:
        raise PlannerError("gpu is missing")
    sizes = {name: cells[name] for name in ("tp", "pp", "dp", "ep", "dcp", "replicas") if name in cells}
    if pool:
        sizes = {size: cells[f"{pool}_{size}"] for size in POOL_SIZES if f"{pool}_{size}" in cells}
        sizes["replicas"] = sizes.pop("workers", 1)
    sizes = _as_meant(sizes, served, cells, notes, squared=not pool)
    speculation = None
    if "speculative_method" in cells:
        if "num_speculative_tokens" not in cells:
            raise PlannerError("num_speculative_tokens is missing beside speculative_method")
        draft = read_model(cells, folder, "draft_") if {"draft_model", "draft_model_config"} & set(cells) else None
        rate = cells.get("acceptance_rate", 0.7)
        speculation = Speculation(cells["speculative_method"], cells["num_speculative_tokens"], rate, draft)
    names = ("interconnect", "gpus_per_node", "engine", "engine_version")
    named = {name: cells[name] for name in names if name in cells}
    if pool and {"engine", "engine_version"} <= set(named):
        meant = behind_dynamo(named["engine"], named["engine_version"])
        if meant != named["engine_version"]:
            notes.append(f"engine_version {named['engine_version']} is read as Dynamo's, which ships {meant}")
            named["engine_version"] = meant
    most, memory = gpu(cells["gpu"]).memory, dict[str, Any]()
    for size in ("gpu_total", "gpu_free", "other_tenants"):
        if (column := f"{size}_gib") in cells:
            memory[size] = bytes_of(cells[column], most, column)
    args = ({} if pool else _recipe(served, cells)) | {name: cells[name] for name in ENGINE_ARGS if name in cells}
    if pool == "prefill":  # workers that only compute prompts are started with more tokens a step than others
        usual = pool_costs(engine(str(named.get("engine", "vllm")), named.get("engine_version"))).prefill_tokens
        args.setdefault("max_num_batched_tokens", usual)
    deployment = deploy_on(served, cells["gpu"], speculation=speculation, **sizes, **named, **memory, **args)
    if reason := unsupported(deployment.gpu, deployment.engine):
        notes.append(reason)
    if reason := refuse(served, deployment.layout, deployment.layout.gpus_per_replica, deployment.engine):
        if deployment.engine.name == "vllm":
            raise PlannerError(reason)
        notes.append(f"vLLM would refuse this layout: {reason}")  # others pad heads, or attend data-parallel
    return _with_room(deployment, pool, notes) if pool and "gpu_memory_utilization" not in cells else deployment


def _recipe(served: Model, cells: Mapping[str, Any]) -> dict[str, Any]:
    """Engine arguments that InferenceX's scripts set, for a row in its form."""
    family, card = served.architecture.model_type, gpu(cells["gpu"]).name
    found: dict[str, Any] = {}
    for recipe in COLUMNS["recipes"] if {"length_range_ratio", "concurrency"} <= cells.keys() else ():
        same = recipe["engine"] == cells.get("engine") and family in recipe["models"] and card in recipe["gpus"]
        if same and cells["concurrency"] >= recipe["concurrency"]:
            found |= recipe["args"]
    return found


ROOM, LEAST = 0.95, 0.05
"""Share of its memory that a pool is given where the default leaves the KV cache less than `LEAST` of it: pools that
barely hold a model run so (InferenceX's recipe for DeepSeek-R1 FP8 on four GB200: mem-fraction-static 0.95)."""


def _with_room(deployment: Deployment, pool: str, notes: list[str]) -> Deployment:
    """`deployment`, with more of the GPU's memory where the engine's default leaves next to nothing for the cache."""
    usual = deployment.args.gpu_memory_utilization
    if usual >= ROOM or memory_of(deployment).kv_available.mid > LEAST * deployment.gpu_total:
        return deployment
    notes.append(f"{pool}: gpu_memory_utilization {usual:g} leaves hardly any KV cache: planned with {ROOM:g}")
    return deployment.with_args(gpu_memory_utilization=ROOM)


def _as_meant(
    sizes: dict[str, Any], served: Model, cells: Mapping[str, Any], notes: list[str], squared: bool
) -> dict[str, Any]:
    """Sizes that no engine could run, read as benchmark tables mean them.

    InferenceX's tables give TP8 with EP8 as 64 and 64 (the same runs stand beside it as 8 and 8; `squared`, not in its
    tables of pools), attention that is data-parallel over all GPUs of a rack as that many tp, and wide expert
    parallelism behind data-parallel attention (SGLang's DeepEP sets it by itself) as ep 1.
    """
    tp, ep = sizes.get("tp", 1), sizes.get("ep", 1)
    node = cells.get("gpus_per_node") or gpu(cells["gpu"]).gpus_per_node
    side = math.isqrt(tp)
    if squared and tp == ep == side * side and side <= node < tp:
        notes.append(f"tp {tp} with ep {ep} is read as tp {side} with ep {side} on {side} GPUs")
        return {**sizes, "tp": side, "ep": side}
    wide = served.architecture.is_mla and not squared and ep == tp > max(node, 8)  # all would hold the whole KV cache
    if served.architecture.is_moe and tp > node and (served.architecture.heads % tp or wide):
        notes.append(f"attention cut over {tp} GPUs is read as data-parallel attention on {tp} GPUs")
        return {**sizes, "tp": 1, "dp": tp, "ep": tp}
    ranks = sizes.get("dp", 1) * tp
    if ep == 1 < sizes.get("dp", 1) and ranks > 8 and served.architecture.is_moe:
        notes.append(f"experts cut over {ranks} data-parallel ranks are read as expert parallelism")
        return {**sizes, "ep": ranks}
    return sizes


def read_workload(cells: Mapping[str, Any], folder: Path, notes: list[str]) -> Workload | None:
    """The traffic of a row; None where it has none, and only memory can be planned."""
    rate, concurrency, prompts = cells.get("request_rate"), cells.get("concurrency"), cells.get("num_prompts")
    if "trace" not in cells and not {"isl", "osl"} & set(cells):
        if asked := {"request_rate", "concurrency"} & set(cells):
            notes.append(
                f"{min(asked)} without isl and osl, the mean tokens of prompt and answer: only memory is planned"
            )
        return None
    if rate == math.inf:  # everything is sent at once
        rate, concurrency, prompts = None, concurrency or prompts or 1000, prompts or 1000
        concurrency = min(concurrency, prompts)
    load = {"burstiness": cells.get("burstiness", 1.0), "prefix_tokens": cells.get("prefix_tokens", 0)}
    load |= {"prefix_hit_rate": cells.get("prefix_hit_rate", 1.0 if "prefix_tokens" in cells else 0.0)}
    load |= {name: cells[name] for name in ("adapters", "adapter_zipf") if name in cells}
    if "trace" in cells:
        base = Workload.from_trace(read_trace(folder / cells["trace"]).busiest_hour(), rate)
        given = {name: value for name, value in (load | {"num_prompts": prompts}).items() if name in cells}
        given |= {of: _lengths(cells, name) for of, name in (("prompt", "isl"), ("output", "osl")) if name in cells}
        if concurrency and not rate:  # its lengths, with so many always in flight
            return replace(base, rate=None, trace=None, **{"num_prompts": None, **given}, concurrency=concurrency)
        return replace(base, concurrency=concurrency, **given)
    if rate is None and concurrency is None:
        notes.append("no concurrency and no request_rate: one request at a time")
        concurrency = 1
    lengths = {name: _lengths(cells, name) for name in ("isl", "osl")}
    return Workload(lengths["isl"], lengths["osl"], rate=rate, concurrency=concurrency, num_prompts=prompts, **load)


def _lengths(cells: Mapping[str, Any], name: str) -> Lengths:
    if name not in cells:
        raise PlannerError(f"{name} is missing")
    with told_of(name):
        if "length_range_ratio" in cells:
            return Lengths.uniform(cells[name], cells["length_range_ratio"])
        return Lengths.lognormal(cells[name], *(cells.get(f"{name}_{what}") for what in ("p95", "p50", "max")))
