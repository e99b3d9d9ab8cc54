"""What a command's deployment does on a GPU: whether it starts, what fits, how fast it is, and what would be better."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from planner.core.quantities import GIB
from planner.facts.deployment import Deployment, deploy_on
from planner.facts.workload import Lengths, Workload
from planner.latency.performance import Performance
from planner.memory.budget import MemoryPlan, longest_model_len, plan, safe_utilization
from planner.memory.limits import preemption_risk, safe_max_num_seqs
from planner.operations.lint.deployment import deployed, names
from planner.operations.lint.judging import Judged
from planner.parallelism.layouts import refuse
from planner.planning.prediction import Prediction, predict

PROMPT, OUTPUT = 1000, 200
"""Tokens of a request, on average, where nobody says what the traffic is."""
SHARE = 0.95
"""The most of a GPU that is proposed for vLLM; `catalogs/flags/rules.yaml` calls 0.98 risky."""
GAIN = 0.02
"""A change is worth proposing from this share on."""


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
        return self.memory.pool.sequences(round(self.workload.tokens))


def traffic(most: int) -> Workload:
    """Requests whose lengths nobody has told: spread as public traces of these means are, within a context."""
    prompt, output = (min(float(mean), most * share) for mean, share in ((PROMPT, 0.6), (OUTPUT, 0.2)))
    prompts, outputs = Lengths.typical(prompt, "prompt", 0.75 * most), Lengths.typical(output, "output", 0.25 * most)
    return Workload(prompts, outputs, concurrency=1)


def planned(judged: Judged, gpu: str, version: str, workload: Workload | None = None) -> Planned:
    """The command on a GPU, under its traffic or one of usual lengths, and the changes that are worth something."""
    deployment = deployed(judged, gpu, version)
    found = plan(deployment)
    if workload:
        load = replace(workload, rate=None, concurrency=1, num_prompts=None, trace=None)
    else:
        load = traffic(deployment.args.max_model_len)
    many, engines = _most(found, load), deployment.engines
    sizes = sorted({engines, max(1, many // engines // 4) * engines, many}) if found.starts else []
    loads = tuple(predict(deployment, replace(load, concurrency=size)) for size in sizes)
    fixed = judged.command.role or (judged.command.planned_on and not workload)  # chosen for traffic that is not named
    steps, better = worthwhile(found, load, () if fixed else tuple(_PROPOSALS))
    return Planned(deployment, found, load, loads, steps, better)


def worthwhile(
    found: MemoryPlan, load: Workload, arguments: Sequence[str] | None = None
) -> tuple[tuple[Step, ...], Prediction | None]:
    """What makes a deployment start, then which of `arguments` (all) serve the traffic better, and it with them."""
    steps, best = ([], found.deployment) if found.status == "ok" else _until_it_starts(found)
    if not steps and not found.starts:
        return (), None
    most = replace(load, concurrency=_most(plan(best), load))
    now = predict(best, most)
    called = names(best.engine.name).theirs
    for name in _PROPOSALS if arguments is None else arguments:
        value = _PROPOSALS[name](best, most) if name in called else None
        changed = best if value is None else best.with_args(**{name: value})
        then = predict(changed, most) if value is not None and plan(changed).status == "ok" else None
        if then and then.performance and now.performance and (worth := _worth(now, then, most)):
            steps.append(Step(called[name], value, worth))
            best, now = changed, then
    return tuple(steps), now if steps else None


def _most(found: MemoryPlan, load: Workload) -> int:
    """Requests in flight over all engines that memory and max_num_seqs carry, at most 256 an engine."""
    fit, args = found.pool.sequences(round(load.tokens)), found.deployment.args
    return max(1, min(fit, args.max_num_seqs, 256)) * found.deployment.engines


def _until_it_starts(found: MemoryPlan) -> tuple[list[Step], Deployment]:
    """The change after which it surely starts, if need be beside a smaller share of memory; none where none helps."""
    for argument, value, changed in _starting(found):
        if (then := plan(changed)).status == "ok":
            return [Step(argument, value, f"it starts: {then.pool.kv_tokens:,} tokens of KV cache")], changed
    for argument, share, changed in _safe_share(found.deployment):
        if share < found.deployment.args.gpu_memory_utilization:
            steps, best = _until_it_starts(plan(changed))
            if steps:
                return [Step(argument, share, "leaves what the engine takes outside of it"), *steps], best
    return [], found.deployment


def _safe_share(deployment: Deployment) -> Iterator[tuple[str, float, Deployment]]:
    """The share of memory that is safe, where the command has another."""
    share = min(safe_utilization(deployment), SHARE)
    if 0 < share != deployment.args.gpu_memory_utilization:
        name = names(deployment.engine.name).theirs["gpu_memory_utilization"]
        yield name, share, deployment.with_args(gpu_memory_utilization=share)


def _starting(found: MemoryPlan) -> Iterator[tuple[str, Any, Deployment]]:
    """Changes after which it may start, the smallest first."""
    deployment = found.deployment
    called = names(deployment.engine.name).theirs
    yield from _safe_share(deployment)
    if deployment.args.max_num_seqs > 256:
        yield called["max_num_seqs"], 256, deployment.with_args(max_num_seqs=256)
    if (length := longest_model_len(found)[0] // 16 * 16) >= 1024:
        yield called["max_model_len"], length, deployment.with_args(max_model_len=length)
    accepted = deployment.engine.facts["kv_cache_dtypes"]
    if "kv_cache_dtype" in called and (not accepted or "fp8" in accepted):
        yield called["kv_cache_dtype"], "fp8", deployment.with_args(kv_cache_dtype="fp8")
    wide = {"tgi": "num_shard"}.get(deployment.engine.name, "tensor_parallel_size")
    for tp in (2, 4, 8):
        layout = replace(deployment.layout, tp=tp, ep=1)
        node = deployment.gpus_per_node
        if deployment.layout.tp < tp and layout.gpus <= node and not refuse(deployment.model, layout, node):
            yield wide, tp, replace(deployment, layout=layout)


def _share(deployment: Deployment, load: Workload) -> float | None:
    """More memory for vLLM's pool, where it holds fewer requests than may run: what is safe, and not risky."""
    share = min(safe_utilization(deployment), SHARE)
    fit = plan(deployment).pool.sequences(round(load.tokens))
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
    "enforce_eager": lambda deployment, _: False if deployment.args.enforce_eager else None,
    "gpu_memory_utilization": _share, "max_num_batched_tokens": _tokens, "max_num_seqs": _seqs,
}  # fmt: skip
"""By the argument, the value that may serve the same traffic better; None where there is none to try."""


def _worth(now: Prediction, then: Prediction, load: Workload) -> str:
    """What a change does to the same traffic, in words; nothing where it is not worth it."""
    before, after = now.performance, then.performance
    assert before and after
    rate = after.output_tps.mid / before.output_tps.mid - 1
    pace = before.at("tpot", "mean").mid / after.at("tpot", "mean").mid - 1
    first = before.at("ttft", "p50").mid / after.at("ttft", "p50").mid - 1
    fits = [found.memory.pool.sequences(round(load.tokens)) for found in (now, then)]
    calmer = before.preemptions - after.preemptions > 0.01
    if (
        min(rate, pace) < -GAIN
        or (first < -0.1 and not calmer)
        or not (max(rate, pace) > GAIN or (first > 0.1 and pace > -GAIN / 2) or calmer or fits[1] > 1.05 * fits[0])
    ):
        return ""
    said = [f"TPOT {_ms(before, 'tpot', 'mean')} -> {_ms(after, 'tpot', 'mean')}"] if abs(pace) > GAIN / 2 else []
    said += [f"median TTFT {_ms(before, 'ttft', 'p50')} -> {_ms(after, 'ttft', 'p50')}"] if abs(first) > 0.05 else []
    served = f"{before.output_tps.mid:,.0f} -> {after.output_tps.mid:,.0f} output tokens/s"
    said += [served] if abs(rate) > GAIN / 2 else []
    said += [f"{before.preemptions:.2f} -> {after.preemptions:.2f} preemptions a request"] if calmer else []
    said += [f"{fits[0]:,} -> {fits[1]:,} requests fit"] if fits[1] != fits[0] else []
    return ", ".join(said) + f" at {load.concurrency} in flight"


def _ms(performance: Performance, metric: str, point: str) -> str:
    return f"{performance.at(metric, point).mid * 1e3:,.1f} ms"


def figures(found: Planned) -> dict[str, Any]:
    """What was planned, as JSON: GiB, ms, tokens/s, [middle, low, high]."""
    loads = [
        {
            "concurrency": one.workload.concurrency, "output_tps": one.performance.output_tps.triple,
            "ttft_ms_p50": (one.performance.at("ttft", "p50") * 1e3).triple,
            "ttft_ms_p95": (one.performance.at("ttft", "p95") * 1e3).triple,
            "tpot_ms_mean": (one.performance.at("tpot", "mean") * 1e3).triple,
            "preemptions_per_request": one.performance.preemptions,
        }
        for one in found.loads if one.performance and one.workload
    ]  # fmt: skip
    return {
        "deployment": str(found.deployment), "starts": found.memory.starts, "status": found.memory.status,
        "reason": found.memory.reason, "kv_available_gib": (found.memory.kv_available / GIB).triple,
        "kv_tokens": found.memory.pool.kv_tokens, "sequences": found.sequences,
        "prompt_tokens_mean": found.workload.prompt.mean, "output_tokens_mean": found.workload.output.mean,
        "loads": loads, "steps": [vars(step) for step in found.steps],
    }  # fmt: skip
