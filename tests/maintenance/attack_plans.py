"""Attacks on the recommendation: two figures for one quantity, impossible figures, a cheaper plan that holds.

`python tests/maintenance/attack_plans.py --count 60 --seed 0` plans so many random scenarios and prints one
line per violation; with `--checks brute` small ones, of which everything that costs less is
replayed. Every `check_*` takes a scenario and its plan and returns sentences; none of them trusts
the search that it judges.
"""

import argparse
import contextlib
import io
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import pairwise, product
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import yaml

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ.setdefault("XDG_CACHE_HOME", str(Path.home() / ".cache"))  # which the suite replaces

from scenario_generator import generate, small
from shipped import answer_of, row_of

from planner.analysis.tail_latency import build_latency_table
from planner.core.errors import PlannerError
from planner.core.intervals import Interval
from planner.core.units import GIB
from planner.deploy import render_artifacts
from planner.engines.deployment import Deployment, choose_machines, deploy_on
from planner.engines.engine import explain_unsupported_gpu
from planner.engines.engine_args import resolve_engine_args
from planner.engines.layout import ParallelLayout
from planner.hardware.prices import PriceSelection, look_up_gpu_price
from planner.latency.step_model import build_step_model
from planner.latency.step_work import count_step_work
from planner.memory.memory_plan import find_safe_memory_utilization, get_memory_plan
from planner.models.registry import list_models, load_model
from planner.parallelism.layouts import list_legal_layouts
from planner.planning.candidate import Candidate, describe_deployment
from planner.planning.engine_tuning import BATCHED_TOKENS_VALUES
from planner.planning.evaluation import evaluate_candidate
from planner.planning.plan import GAMBLE_PROBABILITY, Plan
from planner.planning.scenario import CandidateGpu, Scenario, load_scenario, parse_scenario
from planner.planning.search import choose_on_each_gpu, search_deployments
from planner.planning.tolerance import simulate_candidate, state_deployment
from planner.planning.what_if import limit_to_budget
from planner.simulator.results import SimulationResult
from planner.simulator.simulation import simulate_workload
from planner.tools.batch import predict_row
from planner.ui import cli
from planner.ui import plan_tables as tables
from planner.workload.sessions import SessionTrace

METRICS, POINTS = ("ttft", "tpot", "itl", "e2e"), ("mean", "p50", "p95", "p99")
RUN, SEEDS, MORE = 1500, (101, 102), tuple(range(103, 115))
"""Requests of one engine that the referee replays with each seed, and the seeds of a second opinion; no search sees
these seeds, and two of them can be unlucky: what is reported has stood in both."""
SLACK, LUCK = 0.02, 0.10
"""What a cheaper plan must hold its limits by to refute; how far a stated figure may be from the referee's interval."""
PROBABILITY_SLACK = 0.03
"""What a cheaper deployment's probability must exceed the asked one by: the tolerance is found to 0.05 sigma."""
SEQS = (8, 16, 32, 64, 128, 256, 512)
"""Values of max_num_seqs that brute force tries."""
WAVES = 12
"""Times that every slot is taken, to learn what is served at most: with three it is 17% too little, of long tails."""
BRUTE, PATIENCE = 200, 20.0
"""Legal deployments up to which all are replayed, and seconds after which a check ends."""
Bill = tuple[bool, float]


def shown(plan: Plan) -> list[tuple[str, Candidate]]:
    """The candidates that a reader sees."""
    named = (("chosen", plan.chosen), ("runner-up", plan.runner_up), ("safer", plan.safe))
    return [(name, candidate) for name, candidate in named if candidate]


def numbers(thing: Any, path: str) -> Iterator[tuple[str, tuple[float, ...]]]:
    """Every figure inside, an interval as its ends and middle, with where it is."""
    if isinstance(thing, Interval):
        yield path, (thing.lo, thing.mid, thing.hi)
    elif isinstance(thing, int | float):
        yield path, (thing,)
    elif isinstance(thing, Mapping):
        for key, value in thing.items():
            yield from numbers(value, f"{path} {key}")


def middle(value: Any) -> float:
    """Of an interval, or the number itself; NaN for what is neither."""
    found = [ends for _, ends in numbers(value, "")]
    return float(found[0][len(found[0]) // 2]) if found else math.nan


def check_figures(asked: Scenario, plan: Plan) -> list[str]:
    """No figure is negative, NaN, out of order or beyond what the hardware can do."""
    return [
        f"{name}: {text}"
        for name, candidate in shown(plan)
        for text in _impossible(asked, candidate)
    ]


def _impossible(asked: Scenario, candidate: Candidate) -> Iterator[str]:
    performance, memory, args = (
        candidate.prediction.performance,
        candidate.prediction.memory,
        candidate.deployment.args,
    )
    layout, outputs = candidate.deployment.layout, asked.workload.output
    if performance is None:
        yield "it is recommended without a performance"
        return
    for path, ends in numbers(vars(performance), "performance"):
        if outputs.max_tokens < 1.5 and re.search("tpot|itl", path) and any(map(math.isnan, ends)):
            continue
        if not all(math.isfinite(end) and end >= 0 for end in ends) or list(ends) != sorted(ends):
            yield f"{path} is {ends}"
        if "kv_usage" in path and ends[-1] > 1:
            yield f"{path} is {ends[-1]}, above 1"
    for metric in METRICS:
        mids = [performance.latencies[metric][at].mid for at in POINTS[1:]]
        if any(low > high * 1.0001 for low, high in pairwise(mids)):
            yield f"percentiles of {metric} fall: {[round(mid * 1e3, 3) for mid in mids]} ms"
    rented = candidate.deployment.num_gpus_billed
    if rented > (most := next(w.max_gpus for w in asked.gpus if w.gpu == candidate.deployment.gpu)):
        yield f"{rented} GPUs, of which {most} may be had"
    if (
        sum(memory.bytes_by_part.values()) != memory.total_bytes
        or min(memory.bytes_by_part.values()) < 0
    ):
        yield f"memory parts {memory.bytes_by_part} do not make up {memory.total_bytes} bytes"
    served, tokens, rate = (
        performance.request_tps.mid,
        performance.output_tps.mid,
        asked.workload.rate,
    )
    if asked.workload.trace is None and not math.isclose(
        tokens, served * outputs.mean, rel_tol=0.05
    ):
        yield f"{tokens:.4g} output tokens/s are not {served:.4g} requests/s of {outputs.mean:.4g}"
    if performance.decode_batch > (args.max_num_seqs or math.inf) * 1.001:
        yield (
            f"{performance.decode_batch:.0f} sequences decode at once, above max_num_seqs"
            f" {args.max_num_seqs}"
        )
    holding = (
        served
        * (outputs.mean - 1)
        * performance.get("tpot", "mean").mid
        / layout.replicas
        / layout.dp
    )
    if (
        outputs.mean > 20
        and holding > 3
        and not 0.5 / layout.pp < performance.decode_batch / holding < 1.7
    ):
        yield (
            f"{performance.decode_batch:.1f} sequences decode at once, and {holding:.1f} by its"
            " rate and TPOT"
        )
    if (capacity := middle(getattr(performance, "capacity", None))) < served * 0.98:
        yield (
            f"its capacity, {capacity:.4g} requests/s, is less than the {served:.4g} that it serves"
        )
    if (
        rate
        and not asked.offline
        and asked.workload.trace is None
        and candidate.is_feasible
        and served < 0.95 * rate
    ):
        yield f"meets, but serves {served:.4g} of {rate:.4g} requests/s"
    yield from _beyond_hardware(asked, candidate.deployment, performance)


def _beyond_hardware(asked: Scenario, deployment: Deployment, performance: Any) -> Iterator[str]:
    """FLOP/s above the matrix units' peak, or steps faster than the weights can be read."""
    gpu, layout, need = deployment.gpu, deployment.layout, count_step_work(deployment)
    cached = asked.workload.mean_cached_tokens if deployment.args.enable_prefix_caching else 0.0
    tokens = performance.total_tps.mid - performance.request_tps.mid * cached
    busy = (
        tokens
        / layout.num_gpus
        * layout.tp
        * sum(m.flops / gpu.peak_flops[m.dtype] for m in need.matmuls)
    )
    if busy > 1:  # the stages of a pipeline work side by side
        yield f"{tokens:,.0f} tokens/s take {busy:.2f} x the peak FLOP/s"
    routed = sum(e.layers * e.bytes * e.held * e.active / e.total / layout.ep for e in need.experts)
    read = (sum(m.bytes for m in need.matmuls) + routed) / gpu.memory_bandwidth
    drafted = 1 + deployment.num_draft_tokens
    for metric, share in (("tpot", drafted), ("itl", 1), ("ttft", 1)):
        seconds = performance.latencies[metric]["p50"].mid
        if asked.workload.output.p50 > drafted and seconds < 0.95 * read / share:
            yield (
                f"p50 {metric} is {seconds * 1e3:.3f} ms, but reading the weights takes"
                f" {read / share * 1e3:.3f} ms"
            )


def stated(candidate: Candidate) -> dict[str, float]:
    """The figures of a candidate by their columns in the batch interface; ms, tokens/s, USD."""
    performance, per_token = (
        candidate.prediction.performance,
        candidate.prediction.usd_per_mtok_output,
    )
    assert performance
    found: dict[str, float] = {
        "kv_available_gib": candidate.prediction.memory.kv_available.mid / GIB
    }
    for metric, at in product(METRICS, POINTS):
        value = performance.latencies[metric][at] * 1e3
        found |= {
            f"{metric}_ms_{at}{end}": getattr(value, end[1:] or "mid") for end in ("", "_lo", "_hi")
        }
    found |= {"output_tps": performance.output_tps.mid, "request_tps": performance.request_tps.mid}
    found |= {
        "decode_batch_mean": performance.decode_batch,
        "preemptions_per_request": performance.preemptions,
    }
    found |= {name: middle(getattr(performance, of, None))
              for name, of in (("capacity_rps", "capacity"), ("kv_usage_p99", "kv_usage_p99"))}  # fmt: skip
    if per_token:
        found |= {
            "usd_per_hour": middle(candidate.usd_per_hour),
            "usd_per_mtok_output": per_token.mid,
        }
    return {name: value for name, value in found.items() if math.isfinite(value)}


def _unlike(where: str, one: Mapping[str, float], other: Mapping[Any, Any]) -> list[str]:
    """The figures that both have and that differ, in a line."""
    pairs = [(name, value, middle(other[name])) for name, value in one.items() if name in other]
    differing = [
        f"{name} {b:.6g} instead of {a:.6g}" for name, a, b in pairs
        if not (math.isclose(a, b, rel_tol=0.002, abs_tol=1e-6) or math.isnan(a) or math.isnan(b))
    ]  # fmt: skip
    more = f" and {len(differing) - 4} others" if len(differing) > 4 else ""
    return [f"{where} says {', '.join(differing[:4])}{more}"] if differing else []


def check_agreement(asked: Scenario, plan: Plan) -> list[str]:
    """One quantity, one value: in the plan, the summary's tables, the batch interface and every file written."""
    if plan.chosen is None:
        return []
    told = stated(plan.chosen)
    assert plan.chosen.prediction.performance
    table = build_latency_table(plan.chosen.prediction.performance).set_index("latency")
    cells = {
        f"{m}_ms_{at}": table.loc[m.upper(), f"{at} (ms)"] for m, at in product(METRICS, POINTS)
    }
    asked_for = {
        f"{t.name} (ms)": told.get(f"{t.metric}_ms_{t.percentile}", math.nan)
        for t in asked.slo_targets
    }
    found = _unlike("the summary", told, cells)
    found += [
        f"passed over, yet it holds for less: {other}" for other in choose_on_each_gpu(plan)
        if other.candidate and not other.reason
        and other.candidate.price_key[1] < plan.chosen.price_key[1] * plan.chosen.billed_fraction * (1 - 1e-6)
    ]  # fmt: skip
    found += _unlike(
        "the table of alternatives",
        asked_for,
        tables.build_candidate_table(answer_of(plan)).iloc[0].to_dict(),
    )
    if isinstance(asked.workload.trace, SessionTrace):  # which rows do not have
        return found + _texts(asked, plan.chosen, told)
    answer = predict_row(row_of(plan))
    if answer["status"] != "ok":
        found.append(
            f"headroom predict says {answer['status']} of the plan's own row: {answer.get('error')}"
        )
    other = (
        asked.prices != PriceSelection()
        or plan.chosen.deployment.num_gpus_billed != plan.chosen.deployment.layout.num_gpus
    )
    unpriced = {
        name: value for name, value in told.items() if not (other and name.startswith("usd"))
    }
    return found + _unlike("headroom predict", unpriced, answer) + _texts(asked, plan.chosen, told)


CONFIG = "trtllm.yaml"
"""What an engine reads beside its command, which names the model."""


def _texts(asked: Scenario, chosen: Candidate, told: Mapping[str, float]) -> list[str]:
    """What the deployment files say of model, arguments and figures."""
    args, texts = chosen.deployment.args, render_artifacts(chosen.prediction, asked.slo_targets)
    others = {name for name in list_models() if name != asked.model}
    named = {file: set(re.findall(r"[\w.-]+/[\w.-]+", text)) for file, text in texts.items()}
    wrong = [
        file
        for file, names in named.items()
        if others & names or (asked.model not in names and file != CONFIG)
    ]
    found = (
        [f"{', '.join(wrong)}: asked was {asked.model}, named is {others & named[wrong[0]]}"]
        if wrong
        else []
    )
    figures = (
        ("serve.sh", "tensor-parallel-size ", chosen.deployment.layout.tp),
        ("serve.sh", "max-model-len ", args.max_model_len),
        ("serve.sh", "max-num-seqs ", args.max_num_seqs),
        ("checklist.md", "p99 TTFT within ", told.get("ttft_ms_p99")),
        ("checklist.md", "p99 ITL within ", told.get("itl_ms_p99")),
        ("checklist.md", r"replicas? of \d+: \$", told.get("usd_per_hour")),
    )
    for file, before, value in figures:
        for text in re.findall(before + r"([\d,]+\.?\d*)", texts.get(file, "")):
            if value is not None and abs(
                float(text.replace(",", "")) - value
            ) > 0.51 * 10.0 ** -len(text.partition(".")[2]):
                found.append(f"{file} says {before}{text}, the plan {value:.6g}")
    return found


def check_plan_json(plan: Plan, path: Path) -> list[str]:
    """`headroom plan FILE --json` says what the plan says, where the command exists already."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = cli.main(["plan", str(path), "--json"])
        except SystemExit:
            return (
                []
                if "invalid choice" in err.getvalue()
                else [f"headroom plan: {err.getvalue().strip()}"]
            )
    answer = json.loads(out.getvalue())
    wanted = (
        ("nothing_meets", 4)
        if plan.chosen is None
        else ("at_risk", 3)
        if plan.chosen.at_risk
        else ("holds", 0)
    )
    said = (answer["verdict"], code)
    found = [f"plan.json: {said}, the search: {wanted}"] if said != wanted else []
    if plan.chosen is None:
        return found
    flat = {f"{name}_{at}{end}": (ends or [math.nan] * 3)[k] for name in ("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms")
            for at, ends in answer["predicted"][name].items() for k, end in enumerate(("", "_lo", "_hi"))}  # fmt: skip
    flat |= {
        name: (answer[name] or [math.nan])[0]
        for name in ("capacity_rps", "usd_per_hour", "usd_per_mtok_output")
    }
    flat |= {
        "output_tps": answer["predicted"]["output_tps"][0],
        "kv_usage_p99": answer["predicted"]["kv_usage_p99"],
    }
    found += (
        [f"plan.json plans {answer['model']}"] if answer["model"] != plan.scenario.model else []
    )
    return found + _unlike("plan.json", stated(plan.chosen), flat)


def referee(
    asked: Scenario, deployment: Deployment, run: int = RUN, seeds: tuple[int, ...] = SEEDS
) -> dict[str, float]:
    """A replay of one's own: the share that each promise takes of its limit, `rate` of the capacity that may be used.

    Beside them the replayed seconds by metric and percentile. Empty where `deployment` cannot
    start.
    """
    memory, table, workload = (
        get_memory_plan(deployment),
        build_step_model(deployment, asked.workload),
        asked.workload,
    )
    seqs, engines = (
        deployment.args.max_num_seqs or 1,
        deployment.layout.replicas * deployment.layout.dp,
    )
    longest = workload.prompt.compute_quantile(1 - getattr(asked, "refused_at_most", 0.01))
    if not memory.can_start or longest >= (deployment.args.max_model_len or 0):
        return {}
    many = max(run, WAVES * seqs) * engines
    slots = (
        seqs * engines * (1 if asked.offline else 2)
    )  # of traffic that comes by itself, others wait for their turn
    crowd = replace(workload, rate=None, concurrency=slots, num_prompts=many, trace=None)
    usual = workload if workload.trace else replace(workload, num_prompts=run * engines)
    try:
        runs = [simulate_workload(deployment, memory.pool, table, crowd, seed=seeds[0])]
        rate = _steady_rate(runs[0])
        if not asked.offline:
            runs = [
                simulate_workload(deployment, memory.pool, table, usual, seed=seed)
                for seed in seeds
            ]
        elif (
            workload.num_requests < many
        ):  # the first of a short job come at once, and are more of it
            job = replace(crowd, num_prompts=workload.num_requests)
            runs = [
                simulate_workload(deployment, memory.pool, table, job, seed=seed) for seed in seeds
            ]
    except PlannerError:
        return {}
    found = {
        f"{m} {at}": float(np.mean([one.summarize(m)[at] for one in runs]))
        for m, at in product(METRICS, POINTS)
    }
    if workload.rate:
        found["rate"] = workload.rate / rate / engines / (1 - getattr(asked, "headroom", 0.0))
    return found | {
        target.name: _seconds(found, target) / target.seconds for target in asked.slo_targets
    }


def _seconds(found: Mapping[str, float], target: Any) -> float:
    return found.get(f"{target.metric} {target.percentile}", math.nan)


def _steady_rate(run: SimulationResult) -> float:
    """Requests/s between the first and the last quarter of a run: without its filling and its end."""
    done = np.sort(run.sent + run.e2e)
    low, high = len(done) // 4, 3 * len(done) // 4
    return (
        float((high - low) / max(done[high] - done[low], 1e-9)) if high > low else run.request_tps
    )


def worst(asked: Scenario, found: Mapping[str, float]) -> tuple[float, str]:
    """The largest share of any limit, and whose; infinite where it does not start."""
    shares = [
        (found[name], name)
        for name in ("rate", *(t.name for t in asked.slo_targets))
        if name in found
    ]
    return max(
        (share for share in shares if not math.isnan(share[0])),
        default=(math.inf, "what it can start or serve"),
    )


def check_promises(asked: Scenario, plan: Plan) -> list[str]:
    """The chosen plan holds with other arrivals than the search saw, and its stated figures are what they do."""
    if plan.chosen is None or plan.chosen.prediction.performance is None:
        return []
    return _broken(asked, plan.chosen, SEEDS) and _broken(asked, plan.chosen, MORE)


def _broken(asked: Scenario, chosen: Candidate, seeds: tuple[int, ...]) -> list[str]:
    """What replays with `seeds` find otherwise than stated."""
    truth, said = (
        referee(asked, chosen.deployment, seeds=seeds),
        "at risk" if chosen.at_risk else "met",
    )
    assert chosen.prediction.performance
    share, name = worst(asked, truth)
    found = (
        [f"{said}, but replayed {name} takes {share:.2f} x its limit"] if share > 1 + LUCK else []
    )
    for target in asked.slo_targets:
        value = chosen.prediction.performance.get(target.metric, target.percentile)
        seconds = _seconds(truth, target)
        if seconds < value.lo * (1 - LUCK) or seconds > value.hi * (1 + LUCK):
            found.append(
                f"{target.name} is stated as {value * 1e3:.1f} ms, and replayed"
                f" {seconds * 1e3:.1f} ms"
            )
    return found


def bill(plan: Plan) -> Bill:
    """What plans are compared by; the worst where nothing meets."""
    return plan.chosen.cost_key if plan.chosen else (True, math.inf)


def paid_gpus(asked: Scenario, wanted: CandidateGpu, layout: ParallelLayout, replicas: int) -> int:
    """GPUs that are rented for so many replicas and the spare ones."""
    many = replicas + asked.spare_replicas
    return (
        sum(choose_machines(many, layout.num_gpus, wanted.machine_sizes))
        if wanted.machine_sizes
        else many * layout.num_gpus
    )


def _cheaper(asked: Scenario, below: Bill) -> list[tuple[float, Callable[..., Deployment]]]:
    """Every legal combination with as many replicas as cost less: what it costs, and what deploys it."""
    found: list[tuple[float, Callable[..., Deployment]]] = []
    given, longest = asked.speculation, asked.workload.compute_total_tokens_quantile(0.999)
    known = [
        wanted for wanted in asked.gpus if not explain_unsupported_gpu(wanted.gpu, asked.engine)
    ]
    for wanted, quantization in product(known, asked.quantizations):
        served, price = (
            load_model(asked.model, quantization=quantization),
            look_up_gpu_price(wanted.gpu, asked.prices),
        )
        length = min(math.ceil(longest * 1.01), served.architecture.max_position)
        layouts = list_legal_layouts(
            served, wanted.gpu, wanted.max_gpus, wanted.max_machine_gpus, asked.engine
        )
        speculations = [None, given.to_config()] if given and given.allowed else [None]
        for layout, kv, speculation in product(layouts, asked.kv_cache_dtypes, speculations):
            each = price.median_usd if price else 1.0
            paid = [
                paid_gpus(asked, wanted, layout, many)
                for many in range(1, wanted.max_gpus // layout.num_gpus + 1)
            ]
            least = below[1] / each - 1e-6 if (price is None) == below[0] else math.inf
            replicas = sum(gpus <= wanted.max_gpus and gpus < least for gpus in paid)
            if replicas < 1 or (price is None and not below[0]):
                continue
            options: dict[str, Any] = {
                "tp": layout.tp, "pp": layout.pp, "dp": layout.dp, "ep": layout.ep,
                "replicas": replicas,
                "engine": asked.engine, "speculation": speculation,
                "other_tenants": asked.other_tenants,
                "interconnect": wanted.interconnect, "gpus_per_node": wanted.max_machine_gpus,
                "max_model_len": length,
                "kv_cache_dtype": kv,
            }  # fmt: skip
            deploy = partial(deploy_on, served, wanted.gpu, **{**options, **asked.engine_args})
            found.append((each * paid[replicas - 1], deploy))
    return found


def check_nothing_cheaper(asked: Scenario, plan: Plan) -> list[str]:
    """Every legal deployment that costs less, replayed; only for scenarios with few of them."""
    found: list[str] = []
    below, until = bill(plan), time.perf_counter() + PATIENCE
    legal = _cheaper(asked, below)
    instead = (
        f"{describe_deployment(plan.chosen.deployment) if plan.chosen else 'nothing'},"
        f" {below[1]:.2f}"
    )
    tried = {"max_num_seqs": (64, 16), "max_num_batched_tokens": (512, 16384)}
    sizes = [
        {},
        *({name: size} for name in tried if name not in asked.engine_args for size in tried[name]),
    ]
    for usd, deploy in sorted(legal, key=lambda item: -item[0]) if len(legal) <= BRUTE else ():
        for seqs in sizes:
            if time.perf_counter() > until or len(found) == 3:
                return found
            with contextlib.suppress(PlannerError):
                deployment = deploy(**seqs)
                if worst(asked, referee(asked, deployment, RUN // 5, SEEDS[:1]))[0] > 1.2:
                    continue
                if worst(asked, referee(asked, deployment))[0] > 1 - SLACK:
                    continue
                share, name = worst(asked, referee(asked, deployment, seeds=MORE))
                if share <= 1 - SLACK and _is_likelier(asked, deployment, plan):
                    what = (
                        f"{describe_deployment(deployment)}, max_num_seqs"
                        f" {deployment.args.max_num_seqs}, {usd:.2f}"
                    )
                    found.append(
                        f"{what}: {share:.0%} of {name} at most when replayed; recommended is"
                        f" {instead}"
                    )
                    break
    return found


def fingerprint(plan: Plan) -> str:
    """All that a plan says, to the last digit."""
    said = [(name, str(c), c.deployment.args, str(vars(c.prediction.performance)))
            for name, c in shown(plan) if c.prediction.performance]  # fmt: skip
    return repr((said, str(plan.binding_constraint), plan.notes))


def check_metamorphic(asked: Scenario, plan: Plan) -> list[str]:
    """More traffic, tighter limits and fewer options never cost less; names, order and prices change nothing else."""
    found, until, load = [], time.perf_counter() + PATIENCE, asked.workload
    gpus, level = asked.gpus, asked.slo_targets
    slots = load.concurrency and math.ceil(load.concurrency * 1.3)
    harder: list[tuple[str, dict[str, Any]]] = [
        (
            "1.3 x the traffic",
            {"workload": replace(load, rate=load.rate and load.rate * 1.3, concurrency=slots)},
        ),
        (
            "limits of 0.8",
            {
                "slo_targets": tuple(
                    replace(target, seconds=0.8 * target.seconds) for target in level
                )
            },
        ),
    ]
    for k, wanted in enumerate(gpus):
        fewer = (replace(wanted, max_gpus=wanted.max_gpus - 1),) if wanted.max_gpus > 1 else ()
        harder += [(f"one {wanted.gpu.name} less", {"gpus": (*gpus[:k], *fewer, *gpus[k + 1 :])})]
        harder += [(f"without {wanted.gpu.name}", {"gpus": gpus[:k] + gpus[k + 1 :]})]
    for name in ("quantizations", "kv_cache_dtypes"):
        options = getattr(asked, name)
        harder += [
            (f"without {one}", {name: tuple(o for o in options if o != one)})
            for one in options
            if options[1:]
        ]
    before = bill(plan)
    for what, changes in harder:
        if time.perf_counter() < until and changes.get("gpus", gpus):
            with contextlib.suppress(PlannerError):
                other = search_deployments(replace(asked, **changes))
                if bill(other) < before and not math.isclose(
                    bill(other)[1], before[1], rel_tol=1e-6
                ):
                    found.append(
                        f"{what} costs {bill(other)[1]:.2f}, {before[1]:.2f} before; {other.chosen}"
                    )
    if {
        fingerprint(search_deployments(asked)),
        fingerprint(search_deployments(replace(asked, name="b"))),
    } != {fingerprint(plan)}:
        found.append("a second search, or one under another name, says something else")
    turned = bill(
        search_deployments(replace(asked, gpus=gpus[::-1], quantizations=asked.quantizations[::-1]))
    )
    if turned != before:
        found.append(
            f"in another order of GPUs and formats it costs {turned[1]:.2f}, {before[1]:.2f} before"
        )
    prices = {wanted.gpu.name: look_up_gpu_price(wanted.gpu, asked.prices) for wanted in gpus}
    if plan.chosen and all(prices.values()):
        twice = search_deployments(
            replace(
                asked,
                prices=PriceSelection(
                    {name: 2 * price.median_usd for name, price in prices.items() if price}
                ),
            )
        )
        same = twice.chosen and describe_deployment(twice.chosen.deployment) == describe_deployment(
            plan.chosen.deployment
        )
        if not same or not math.isclose(bill(twice)[1], 2 * before[1], rel_tol=1e-9):
            found.append(f"with prices doubled it is {twice.chosen}, before {plan.chosen}")
    return found


def check_knobs(asked: Scenario, plan: Plan) -> list[str]:
    """No other value of one engine argument, given in the scenario, makes anything cheaper that holds when replayed."""
    if plan.best is None:
        return []
    cheaper = limit_to_budget(asked, plan.chosen, 0.98) if plan.chosen else asked
    found, below, args = [], bill(plan), plan.best.deployment.args
    usual = resolve_engine_args(
        {"max_model_len": args.max_model_len},
        asked.engine,
        plan.best.deployment.gpu,
        load_model(asked.model),
    )
    tokens, seqs, share = (
        args.max_num_batched_tokens,
        args.max_num_seqs,
        args.gpu_memory_utilization,
    )
    others = [
        ("max_num_batched_tokens", size)
        for size in (tokens // 2, 2 * tokens, usual.max_num_batched_tokens)
    ]
    others += [
        ("max_num_seqs", size)
        for size in (seqs // 2, seqs - 8, seqs + 8, 2 * seqs, usual.max_num_seqs)
    ]
    others += [("gpu_memory_utilization", round(share + d, 3)) for d in (-0.02, 0.02)]
    others += [
        ("enable_prefix_caching", not args.enable_prefix_caching),
        ("enable_chunked_prefill", False),
    ]
    for name, value in [
        other for other in others if cheaper.gpus and other[0] not in asked.engine_args
    ]:
        with contextlib.suppress(PlannerError):
            other = search_deployments(
                replace(cheaper, engine_args={**asked.engine_args, name: value})
            )
            if (
                other.chosen
                and other.chosen.cost_key[0] == below[0]
                and other.chosen.cost_key[1] < 0.98 * below[1]
            ):
                replays = (
                    worst(asked, referee(asked, other.chosen.deployment, seeds=who))
                    for who in (SEEDS, MORE)
                )
                if all(used <= 1 - SLACK for used, _ in replays):
                    found.append(
                        f"{name}={value}: {other.chosen}; recommended is {plan.chosen},"
                        f" {below[1]:.2f}"
                    )
    return found


def check_brute(asked: Scenario, plan: Plan) -> list[str]:
    """Every layout that costs less by 2%, with every combination of the knobs of `planning.engine_tuning`, replayed.

    Of each as many replicas as cost less: with fewer, each of them has more to do.
    """
    below = bill(plan)
    instead = (
        f"{describe_deployment(plan.chosen.deployment) if plan.chosen else 'nothing'},"
        f" {below[1]:.2f}"
    )
    found: list[tuple[float, str]] = []
    for usd, deploy in _cheaper(asked, (below[0], below[1] / 1.02)):
        with contextlib.suppress(PlannerError):
            usual = deploy()
            shares = {
                usual.args.gpu_memory_utilization,
                find_safe_memory_utilization(usual) or usual.args.gpu_memory_utilization,
            }
            for tokens, seqs, used in product(BATCHED_TOKENS_VALUES, SEQS, sorted(shares)):
                knobs = {
                    "max_num_batched_tokens": tokens,
                    "max_num_seqs": seqs,
                    "gpu_memory_utilization": used,
                }
                with contextlib.suppress(PlannerError):
                    share, name = _held(asked, deploy(**knobs))
                    if share <= 1 - SLACK and _is_likelier(asked, deploy(**knobs), plan):
                        what = f"{describe_deployment(usual)}, {knobs}, {usd:.2f}"
                        found.append(
                            (
                                share,
                                f"{what}: {share:.0%} of {name} at most; recommended is {instead}",
                            )
                        )
    return [text for _, text in sorted(found)[:3]]


def _is_likelier(asked: Scenario, deployment: Deployment, plan: Plan) -> bool:
    """It keeps its promises with the probability that the plan was chosen by."""
    needed = asked.confidence if plan.verdict == "holds" else GAMBLE_PROBABILITY
    return state_deployment(asked, deployment).probability >= needed + PROBABILITY_SLACK


def _held(asked: Scenario, deployment: Deployment) -> tuple[float, str]:
    """`worst` of a replay, of a short one where that is far off; what holds must do so in the stated replay too."""
    found = worst(asked, referee(asked, deployment, RUN // 5, SEEDS[:1]))
    found = found if found[0] > 1.2 else worst(asked, referee(asked, deployment))
    if found[0] > 1 - SLACK:
        return found
    stated = simulate_candidate(
        asked, evaluate_candidate(asked, deployment, deployment.layout.replicas)
    )
    return max(
        found,
        (
            stated.limit_utilization,
            stated.violated_constraints[0] if stated.violated_constraints else found[1],
        ),
    )


CHECKS: dict[str, Callable[[Scenario, Plan], list[str]]] = {
    "figures": check_figures, "agreement": check_agreement, "promises": check_promises,
    "cheaper": check_nothing_cheaper, "brute": check_brute, "knobs": check_knobs,
    "metamorphic": check_metamorphic,
}  # fmt: skip

USUAL = tuple(name for name in CHECKS if name != "brute")
"""What every random scenario is attacked with."""
Found = list[tuple[str, str]]


def attack(seed: int, folder: Path, checks: tuple[str, ...] = USUAL) -> tuple[str, float, Found]:
    """Plan the random scenario `seed` and attack the answer: all that it says, its seconds, and (kind, violation).

    Brute force is for small ones only.
    """
    name, data = small(seed) if "brute" in checks else generate(seed, folder)
    path, begun = folder / f"{name}.yaml", time.perf_counter()
    path.write_text(yaml.safe_dump(data, sort_keys=False))
    seconds, answer, kind, found = 0.0, "", "exception", []
    try:
        asked = parse_scenario(data, name, folder)
        plan = search_deployments(asked)
        seconds = time.perf_counter() - begun
        answer = (
            f"{plan.chosen or f'nothing meets it. {plan.binding_constraint}'}\n{fingerprint(plan)}"
        )
        for kind in checks:
            found += [(kind, text) for text in CHECKS[kind](asked, plan)]
            found += (
                [(kind, text) for text in check_plan_json(plan, path)]
                if kind == "agreement"
                else []
            )
    except PlannerError as error:
        answer = answer or f"refused: {error}"
        if seconds or "\n" in str(error) or len(str(error)) > 400:
            found.append((kind, f"PlannerError: {error}"))
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        found.append(
            (
                f"{kind}: exception",
                f"{type(error).__name__}: {error} ({where.name}, line {where.lineno})",
            )
        )
    return answer, seconds or time.perf_counter() - begun, found


def main() -> int:
    """Attack so many scenarios, and plan the first ten again in another process; 1 when anything was found."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument(
        "--seed", type=int, default=0, help="of the first scenario; the next have the next"
    )
    parser.add_argument("--checks", default=",".join(USUAL),
                        help="which, comma separated, of " + ", ".join(CHECKS) + "; none: whole answers")  # fmt: skip
    options = parser.parse_args()
    checks, times, kinds, answers = (
        tuple(filter(None, options.checks.split(","))),
        [],
        Counter[str](),
        [],
    )
    seeds = range(options.seed, options.seed + options.count)
    with tempfile.TemporaryDirectory() as folder:
        search_deployments(load_scenario("edge-8b-24gb"))  # compiles
        for seed in seeds:
            answer, seconds, found = attack(seed, Path(folder), checks)
            times.append(seconds)
            answers.append(" ".join(answer.split()))
            kinds.update(kind for kind, _ in found)
            short = f"random-{seed} ({seconds:.1f} s): {answer.splitlines()[0] if answer else ''}"
            print(
                "\n  ".join([short, *map(": ".join, found)]) if checks else answers[-1], flush=True
            )
    if not checks:
        return 0
    if "brute" in checks:
        print(
            "\n".join(f"{count:4} {kind}" for kind, count in kinds.most_common()) or "nothing found"
        )
        return int(bool(kinds))
    command = [
        sys.executable,
        __file__,
        "--checks",
        "",
        f"--count={min(10, options.count)}",
        f"--seed={options.seed}",
    ]
    second = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    differing = [
        seed for seed, one, other in zip(seeds, answers, second, strict=False) if one != other
    ]
    kinds.update("another process says something else" for _ in differing)
    refused, nothing = (
        sum(answer.startswith(word) for answer in answers) for word in ("refused", "nothing")
    )
    print(f"\n{len(seeds)} scenarios: {refused} refused, {nothing} that nothing meets; {median(times):.2f} s median, "
          f"{max(times):.1f} s worst (random-{seeds[int(np.argmax(times))]})")  # fmt: skip
    print(
        f"another process says something else of {differing}"
        if differing
        else "another process says the same"
    )
    print("\n".join(f"{count:4} {kind}" for kind, count in kinds.most_common()) or "nothing found")
    return int(bool(kinds))


if __name__ == "__main__":
    sys.exit(main())
