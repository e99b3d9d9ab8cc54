"""What a command's deployment does on a GPU: whether it starts, what fits, how fast it is, and what would be better."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from planner.core.quantities import GIB, PlannerError
from planner.facts.deployment import Deployment, ParallelLayout, Speculation, deploy_on
from planner.facts.engines import Engine, EngineArgs
from planner.facts.workload import Lengths, Workload
from planner.latency.performance import Performance
from planner.memory.budget import MemoryPlan, longest_model_len, plan, safe_utilization
from planner.memory.limits import preemption_risk, safe_max_num_seqs
from planner.models.registry import Model, model
from planner.operations.launch.command import serving
from planner.operations.lint.judging import Finding, Judged
from planner.parallelism.layouts import refuse
from planner.planning.prediction import Prediction, predict

PROMPT, OUTPUT = 1000, 200
"""Tokens of a request, on average, where nobody says what the traffic is."""
SHARE = 0.95
"""The most of a GPU that is proposed for vLLM; `catalogs/flags/rules.yaml` calls 0.98 risky."""
PACKED = ("awq", "gptq", "compressed-tensors", "exl2", "marlin")
"""Formats that only a checkpoint has: no engine makes them while it loads."""
GAIN = 0.02
"""A change is worth proposing from this share on."""
_ARGUMENTS = {
    "vllm": {name: name for name in (
        "gpu_memory_utilization", "max_model_len", "max_num_seqs", "max_num_batched_tokens", "block_size",
        "kv_cache_dtype", "dtype", "enforce_eager", "enable_prefix_caching", "enable_chunked_prefill",
        "async_scheduling", "long_prefill_token_threshold", "scheduling_policy")},
    "sglang": {
        "mem_fraction_static": "gpu_memory_utilization", "context_length": "max_model_len",
        "max_running_requests": "max_num_seqs", "chunked_prefill_size": "max_num_batched_tokens",
        "page_size": "block_size", "kv_cache_dtype": "kv_cache_dtype", "dtype": "dtype",
        "disable_cuda_graph": "enforce_eager", "scheduler_recv_interval": "scheduler_recv_interval"},
    "trtllm": {
        "free_gpu_memory_fraction": "gpu_memory_utilization", "max_seq_len": "max_model_len",
        "max_batch_size": "max_num_seqs", "max_num_tokens": "max_num_batched_tokens",
        "enable_chunked_prefill": "enable_chunked_prefill"},
    "tgi": {
        "cuda_memory_fraction": "gpu_memory_utilization", "max_total_tokens": "max_model_len",
        "max_batch_size": "max_num_seqs", "max_batch_prefill_tokens": "max_num_batched_tokens",
        "kv_cache_dtype": "kv_cache_dtype", "dtype": "dtype"},
}  # fmt: skip
"""The engine's own names of arguments, and the planner's."""


@dataclass(frozen=True)
class Step:
    """A change that is worth something: the engine's own argument, its value, and what it does."""

    argument: str
    value: Any
    worth: str


@dataclass(frozen=True)
class Planned:
    """A command's deployment on a GPU."""

    deployment: Deployment
    memory: MemoryPlan
    workload: Workload  # of one concurrency; the lengths are what counts
    loads: tuple[Prediction, ...]  # growing numbers of requests in flight
    steps: tuple[Step, ...]
    better: Prediction | None  # with all steps, at the most requests in flight

    @property
    def sequences(self) -> int:
        """Requests of the mean length that fit the KV pool of one engine."""
        return self.memory.pool.sequences(round(self.workload.prompt.mean + self.workload.output.mean))


def served_model(judged: Judged) -> tuple[str, Model]:
    """What the command serves, by its name or by the last part of a path; `PlannerError` where it is not known."""
    values = judged.parsed.values
    key = {"vllm": "model", "sglang": "model_path", "tgi": "model_id"}.get(judged.command.engine, "")
    words = judged.parsed.positional if key != "model_id" else ()
    given = words[0] if words else values.get(key) or judged.command.environment.get("MODEL_ID")
    if not given:
        raise PlannerError("the command names no model")
    name = str(given)
    if re.search(r"\$[{(]|{{", name):
        raise PlannerError(f"the model is {name!r:.80}, which is filled in only where it runs")
    try:
        return name, model(name)
    except PlannerError:
        last = name.rstrip("/").rpartition("/")[2]
        if name.count("/") < 2 and not name.startswith(("/", ".", "~")):
            raise
        return name, model(last)


def layout_of(engine: str, values: Mapping[str, Any]) -> ParallelLayout:
    """The parallel layout that the command asks for."""
    size = {key: value for key, value in values.items() if isinstance(value, int) and not isinstance(value, bool)}
    tp, pp = size.get("tensor_parallel_size", 1), size.get("pipeline_parallel_size", 1)
    dp = size.get("data_parallel_size", 1)
    if engine == "tgi":
        return ParallelLayout(tp=size.get("num_shard", 1))
    if engine == "sglang":
        shared = size.get("attn_dp_size", dp if values.get("enable_dp_attention") else 1)
        ranks = max(tp // max(shared, 1), 1)
        spread = tp if size.get("expert_parallel_size", 1) > 1 else 1
        if shared > 1:
            return ParallelLayout(tp=ranks, pp=pp, dp=shared, ep=spread)
        return ParallelLayout(tp=tp, pp=pp, ep=spread, replicas=dp)
    ep = tp * dp if values.get("enable_expert_parallel") or size.get("moe_expert_parallel_size", 1) > 1 else 1
    return ParallelLayout(tp=tp, pp=pp, dp=dp, ep=ep, dcp=size.get("decode_context_parallel_size", 1))


def arguments(engine: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """The command's arguments by the planner's names; those that only its machine can fill in are left out."""
    found = {
        ours: values[theirs]
        for theirs, ours in _ARGUMENTS[engine].items()
        if theirs in values and not (isinstance(values[theirs], str) and re.search(r"\$[{(]|{{", values[theirs]))
    }
    if found.get("max_model_len") in ("auto", "-1", -1):
        del found["max_model_len"]
    if found.get("dtype") == "auto":
        del found["dtype"]
    if engine == "sglang":
        if found.get("max_num_batched_tokens", 1) < 1:
            found |= {
                "enable_chunked_prefill": False,
                "max_num_batched_tokens": values.get("max_prefill_tokens", 16384),
            }
        if values.get("disable_radix_cache"):
            found["enable_prefix_caching"] = False
        if values.get("cuda_graph_backend_decode") == "disabled":
            found["enforce_eager"] = True
    if engine == "vllm" and values.get("enable_lora"):
        for name, usual in (("max_loras", 1), ("max_lora_rank", 16)):
            given = str(values.get(name, usual))
            found[name] = int(given) if given.isdecimal() else usual
    return {name: value for name, value in found.items() if name in EngineArgs.__dataclass_fields__}


def speculation_of(engine: str, values: Mapping[str, Any]) -> Speculation | None:
    """The drafting that the command asks for; `PlannerError` where its model or method is unknown."""
    if engine == "vllm" and isinstance(config := values.get("speculative_config"), dict):
        method = str(config.get("method") or ("draft_model" if config.get("model") else "ngram"))
        draft = model(str(config["model"])) if method == "draft_model" and config.get("model") else None
        return Speculation(method, config.get("num_speculative_tokens", 1), draft=draft)
    if engine == "sglang" and (algorithm := values.get("speculative_algorithm")):
        return Speculation(str(algorithm).lower(), max(values.get("speculative_num_draft_tokens", 4) - 1, 1))
    if engine == "tgi" and values.get("speculate"):
        return Speculation("ngram", values["speculate"])
    return None


def contradictions(judged: Judged, engine: Engine | None) -> Iterator[Finding]:
    """What the command's model and its own arguments contradict, whatever the GPU."""
    values = judged.parsed.values
    try:
        name, served = served_model(judged)
        layout = layout_of(judged.command.engine, values)
    except PlannerError:
        return
    if engine and engine.name == "sglang" and served.architecture.is_moe:  # DeepEP spreads experts by itself
        layout = replace(layout, ep=layout.tp * layout.dp)
    widest = "--num-shard" if judged.command.engine == "tgi" else "--tensor-parallel-size"
    if reason := refuse(served, layout, max(layout.tp, 1), engine):
        yield Finding(
            "flag", widest, f"{widest} {layout.tp}", "contradicts", f"{name}: {reason}"[:300], _divisor(served, layout)
        )
    yield from _format(judged, name, served)
    args = arguments(judged.command.engine, values)
    length, tokens = args.get("max_model_len"), args.get("max_num_batched_tokens")
    longest = served.architecture.max_position
    allowed = judged.command.environment.get("VLLM_ALLOW_LONG_MAX_MODEL_LEN") == "1" or "hf_overrides" in values
    stretched = {"rope_scaling", "json_model_override_args", "model_loader_extra_config"} & set(values)
    if isinstance(length, int) and length > longest and not (allowed or stretched):
        option = next(key for key, ours in _ARGUMENTS[judged.command.engine].items() if ours == "max_model_len")
        flag = f"--{option.replace('_', '-')}" if judged.command.engine != "trtllm" else f"--{option}"
        why = f"{name} was made for {longest:,} tokens"
        yield Finding("flag", flag, f"{flag} {length}", "contradicts", why, f"{flag} {longest}")
    if judged.command.engine == "vllm" and engine is not None and isinstance(tokens, int):
        chunked = args.get("enable_chunked_prefill", engine.facts["chunked_prefill"])
        needed = length if isinstance(length, int) else longest
        if not chunked and tokens < needed:
            why = f"without chunked prefill a prompt is one step, and max_model_len is {needed:,}"
            yield Finding(
                "flag",
                "--max-num-batched-tokens",
                f"--max-num-batched-tokens {tokens}",
                "contradicts",
                why,
                "--enable-chunked-prefill",
            )
        seqs = args.get("max_num_seqs")
        if isinstance(seqs, int) and tokens < seqs:
            why = f"each of {seqs} sequences takes a token of a step"
            yield Finding(
                "flag",
                "--max-num-batched-tokens",
                f"--max-num-batched-tokens {tokens}",
                "contradicts",
                why,
                f"--max-num-batched-tokens {seqs} or more",
            )


def _format(judged: Judged, name: str, served: Model) -> Iterator[Finding]:
    """A format that the checkpoint does not have; nothing is said of a checkpoint of which only the name is known."""
    values, stored = judged.parsed.values, served.quantization.method
    asked = values.get("quantization") or values.get("quantize")
    if not isinstance(asked, str) or "$" in asked or served.inferred:
        return
    option = "--quantize" if judged.command.engine == "tgi" else "--quantization"
    try:
        model(name, quantization=asked)
    except PlannerError as error:
        if stored != "none" and "unknown" not in str(error):
            instead = "leave it out: the checkpoint says it"
            yield Finding("flag", option, f"{option} {asked}", "contradicts", str(error), instead)
        return
    if stored == "none" and asked.partition("_")[0] in PACKED:
        why = (
            f"{name} is stored in {served.dtype}, and {judged.command.engine} packs nothing into {asked} while it loads"
        )
        yield Finding(
            "flag", option, f"{option} {asked}", "contradicts", why, f"a checkpoint in that format, or no {option}"
        )


def _divisor(served: Model, layout: ParallelLayout) -> str:
    """The largest power of two below that the heads allow."""
    fits = [tp for tp in (1, 2, 4, 8, 16) if tp < layout.tp and not refuse(served, replace(layout, tp=tp, ep=1), tp)]
    return f"--tensor-parallel-size {fits[-1]}" if fits else ""


def traffic(most: int) -> Workload:
    """Requests whose lengths nobody has told: spread as public traces of these means are, within a context."""
    prompt, output = (min(float(mean), most * share) for mean, share in ((PROMPT, 0.6), (OUTPUT, 0.2)))
    return Workload(
        Lengths.typical(prompt, "prompt", 0.75 * most), Lengths.typical(output, "output", 0.25 * most), concurrency=1
    )


def deployed(judged: Judged, gpu: str, version: str) -> Deployment:
    """The command's deployment on a GPU; `PlannerError` for what the planner does not know, or the engine refuses."""
    values, engine = judged.parsed.values, judged.command.engine
    name, served = served_model(judged)
    asked = values.get("quantization") or values.get("quantize")
    if (
        isinstance(asked, str)
        and "$" not in asked
        and served.quantization.method == "none"
        and asked in serving(engine).online
    ):
        served = model(served.name, quantization=asked)
    args = arguments(engine, values)
    dtype = args.pop("dtype", None)
    layout = layout_of(engine, values)
    if dtype:
        served = replace(served, dtype={"half": "float16", "float": "float32"}.get(dtype, dtype))
    args["speculation"] = speculation_of(engine, values)
    made = deploy_on(served, gpu, **vars(layout), engine=engine, engine_version=version, **args)
    if reason := refuse(made.model, layout, max(made.gpus_per_node, 1), made.engine):
        raise PlannerError(f"{name} on {layout}: {reason}")
    return made


def planned(judged: Judged, gpu: str, version: str, workload: Workload | None = None) -> Planned:
    """The command on a GPU, under its traffic or one of usual lengths, and the changes that are worth something.

    Raises `PlannerError` for what the planner does not know, and for what the engine refuses.
    """
    deployment = deployed(judged, gpu, version)
    found = plan(deployment)
    load = (
        replace(workload, rate=None, concurrency=1, num_prompts=None, trace=None)
        if workload
        else traffic(deployment.args.max_model_len)
    )
    steps, better, best = list[Step](), None, deployment
    loads = tuple(predict(deployment, at) for at in _loads(found, load)) if found.starts else ()
    if found.status != "ok":
        for argument, value, changed in _starting(found):
            if plan(changed).status == "ok":
                steps.append(Step(argument, value, f"it starts: {plan(changed).pool.kv_tokens:,} tokens of KV cache"))
                best = changed
                break
        else:
            if not found.starts:
                return Planned(deployment, found, load, (), (), None)
    most = replace(load, concurrency=_most(plan(best), load))
    now = predict(best, most)
    names = {ours: theirs for theirs, ours in _ARGUMENTS[deployment.engine.name].items()}
    for name, proposal in _PROPOSALS.items():
        value = proposal(best, most) if name in names else None
        changed = best if value is None else best.with_args(**{name: value})
        then = predict(changed, most) if value is not None and plan(changed).status == "ok" else None
        if then and then.performance and now.performance and (worth := _worth(now, then, most)):
            steps.append(Step(names[name], value, worth))
            best, now = changed, then
    if steps:
        better = now
    return Planned(deployment, found, load, loads, tuple(steps), better)


def _most(found: MemoryPlan, load: Workload) -> int:
    """Requests in flight over all engines that memory and max_num_seqs carry, at most 256 an engine."""
    fit = found.pool.sequences(round(load.prompt.mean + load.output.mean))
    return max(1, min(fit, found.deployment.args.max_num_seqs, 256)) * found.deployment.engines


def _loads(found: MemoryPlan, load: Workload) -> list[Workload]:
    """One request in flight, some, and as many as fit."""
    most = _most(found, load)
    sizes = sorted({1, max(1, most // 4), most})
    return [replace(load, concurrency=size) for size in sizes]


def _starting(found: MemoryPlan) -> Iterator[tuple[str, Any, Deployment]]:
    """Changes after which it may start, the smallest first."""
    deployment = found.deployment
    names = {ours: theirs for theirs, ours in _ARGUMENTS[deployment.engine.name].items()}
    share, current = min(safe_utilization(deployment), SHARE), deployment.args.gpu_memory_utilization
    if 0 < share != current:
        yield names["gpu_memory_utilization"], share, deployment.with_args(gpu_memory_utilization=share)
    if deployment.args.max_num_seqs > 256:
        yield names["max_num_seqs"], 256, deployment.with_args(max_num_seqs=256)
    if (length := longest_model_len(found)[0] // 16 * 16) >= 1024:
        yield names["max_model_len"], length, deployment.with_args(max_model_len=length)
    accepted = deployment.engine.facts["kv_cache_dtypes"]
    if "kv_cache_dtype" in names and (not accepted or "fp8" in accepted):
        yield names["kv_cache_dtype"], "fp8", deployment.with_args(kv_cache_dtype="fp8")
    wide = {"tgi": "num_shard"}.get(deployment.engine.name, "tensor_parallel_size")
    for tp in (2, 4, 8):
        layout = replace(deployment.layout, tp=tp, ep=1)
        if deployment.layout.tp < tp <= deployment.gpus_per_node and not refuse(
            deployment.model, layout, deployment.gpus_per_node
        ):
            yield wide, tp, replace(deployment, layout=layout)


def _graphs(deployment: Deployment, load: Workload) -> bool | None:
    """CUDA graphs, where there are none."""
    return False if deployment.args.enforce_eager else None


def _share(deployment: Deployment, load: Workload) -> float | None:
    """More memory for vLLM's pool, where it holds fewer requests than may run: what is safe, and not risky."""
    share = min(safe_utilization(deployment), SHARE)
    fit = plan(deployment).pool.sequences(round(load.prompt.mean + load.output.mean))
    more = deployment.engine.name == "vllm" and share > deployment.args.gpu_memory_utilization + 0.01
    return share if more and fit < deployment.args.max_num_seqs else None


def _tokens(deployment: Deployment, load: Workload) -> int | None:
    """The engine's own tokens of a step, where the command has fewer."""
    bare = deploy_on(
        deployment.model, deployment.gpu, **vars(deployment.layout), engine=deployment.engine,
        max_model_len=deployment.args.max_model_len,
    )  # fmt: skip
    usual = bare.args.max_num_batched_tokens
    return usual if deployment.args.max_num_batched_tokens < usual else None


def _seqs(deployment: Deployment, load: Workload) -> int | None:
    """As many sequences as hardly ever outgrow the pool, where the command has more."""
    found, many = plan(deployment), deployment.args.max_num_seqs
    safe = safe_max_num_seqs(found, load)
    crowded = preemption_risk(found, load, min(many, load.concurrency or 1)) > 0.05
    return safe if 0 < safe < many and crowded else None


_PROPOSALS: dict[str, Callable[[Deployment, Workload], Any]] = {
    "enforce_eager": _graphs, "gpu_memory_utilization": _share,
    "max_num_batched_tokens": _tokens, "max_num_seqs": _seqs,
}  # fmt: skip
"""By the argument, the value that may serve the same traffic better; None where there is none to try."""


def _worth(now: Prediction, then: Prediction, load: Workload) -> str:
    """What a change does to the same traffic, in words; nothing where it is not worth it."""
    before, after = now.performance, then.performance
    assert before and after
    rate = after.output_tps.mid / before.output_tps.mid - 1
    pace = before.at("tpot", "mean").mid / after.at("tpot", "mean").mid - 1
    first = before.at("ttft", "p50").mid / after.at("ttft", "p50").mid - 1
    fits = [found.memory.pool.sequences(round(load.prompt.mean + load.output.mean)) for found in (now, then)]
    calmer = before.preemptions - after.preemptions > 0.01
    if min(rate, pace) < -GAIN or not (
        max(rate, pace) > GAIN or (first > 0.1 and pace > -GAIN / 2) or calmer or fits[1] > 1.05 * fits[0]
    ):
        return ""
    said = [f"TPOT {_ms(before, 'tpot', 'mean')} -> {_ms(after, 'tpot', 'mean')}"] if abs(pace) > GAIN / 2 else []
    said += [f"median TTFT {_ms(before, 'ttft', 'p50')} -> {_ms(after, 'ttft', 'p50')}"] if abs(first) > 0.05 else []
    said += (
        [f"{before.output_tps.mid:,.0f} -> {after.output_tps.mid:,.0f} output tokens/s"] if abs(rate) > GAIN / 2 else []
    )
    said += [f"{before.preemptions:.2f} -> {after.preemptions:.2f} preemptions a request"] if calmer else []
    said += [f"{fits[0]:,} -> {fits[1]:,} requests fit"] if fits[1] != fits[0] else []
    return ", ".join(said) + f" at {load.concurrency} in flight"


def _ms(performance: Performance, metric: str, point: str) -> str:
    return f"{performance.at(metric, point).mid * 1e3:,.1f} ms"


def figures(found: Planned) -> dict[str, Any]:
    """What was planned, as JSON: GiB, ms, tokens/s, [middle, low, high]."""

    def triple(value: Any, scale: float = 1.0) -> list[float]:
        return [value.mid * scale, value.lo * scale, value.hi * scale]

    loads = [
        {
            "concurrency": one.workload.concurrency, "output_tps": triple(one.performance.output_tps),
            "ttft_ms_p50": triple(one.performance.at("ttft", "p50"), 1e3),
            "ttft_ms_p95": triple(one.performance.at("ttft", "p95"), 1e3),
            "tpot_ms_mean": triple(one.performance.at("tpot", "mean"), 1e3),
            "preemptions_per_request": one.performance.preemptions,
        }
        for one in found.loads if one.performance and one.workload
    ]  # fmt: skip
    return {
        "deployment": str(found.deployment), "starts": found.memory.starts, "status": found.memory.status,
        "reason": found.memory.reason, "kv_available_gib": triple(found.memory.kv_available, 1 / GIB),
        "kv_tokens": found.memory.pool.kv_tokens, "sequences": found.sequences,
        "prompt_tokens_mean": found.workload.prompt.mean, "output_tokens_mean": found.workload.output.mean,
        "loads": loads, "steps": [vars(step) for step in found.steps],
    }  # fmt: skip
