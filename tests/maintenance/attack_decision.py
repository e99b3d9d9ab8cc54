"""The guarantees of the decision on random scenarios.

`python tests/maintenance/attack_decision.py 0 100` prints what breaks one. Names of checks
after the seeds run those alone: `python tests/maintenance/attack_decision.py 0 60 pinned halves`.

Scenarios are drawn over everything that people ask, with no regard to what is likely to hold.
"""

import math
import sys
import time
from collections.abc import Container, Iterator
from itertools import pairwise, product
from typing import Any

import numpy as np

from planner.core.errors import PlannerError
from planner.engines.deployment import Deployment
from planner.hardware.gpus import get_gpu, list_gpus
from planner.memory.memory_plan import get_memory_plan
from planner.models.registry import list_models, load_model
from planner.planning.engine_tuning import (
    BATCHED_TOKENS_VALUES,
    NUM_SEQS_LADDER,
    generate_neighbours,
)
from planner.planning.plan import Plan
from planner.planning.scenario import Scenario, parse_scenario
from planner.planning.search import search_deployments
from planner.planning.tolerance import state_deployment

ENGINES = ("vllm", "vllm", "vllm", "sglang", "trtllm")
POINTS = {"mean": 1.0, "p50": 1.0, "p95": 1.6, "p99": 2.5}
CHECKS = ("verdict", "neighbours", "halves", "alone", "harder", "pinned")
PRICE_SLACK = 1e-6
"""Bills that differ by no more are one: rounding."""
PROBABILITY_SLACK = 0.05
"""A probability is found to 0.05 sigma, from short or long replays: so far apart may two of one deployment be."""


def draw_scenario(seed: int) -> dict[str, Any]:
    """Draw a scenario as its file would be read."""
    rng = np.random.default_rng([seed, 32])

    def pick(options: Any) -> Any:
        return options[int(rng.integers(len(options)))]

    def draw(low: float, high: float) -> float:
        return float(math.exp(rng.uniform(math.log(low), math.log(max(high, low)))))

    while True:
        model = load_model(pick(list_models()))
        size, window = model.architecture.params_total, model.architecture.max_position
        if 1e9 <= size <= 1.2e12 and window >= 4096:
            break
    gpus = []
    for card in rng.permutation([gpu.name for gpu in list_gpus()])[: int(rng.integers(1, 5))]:
        copy = size * model.quantization.weight_bits / 8 / get_gpu(str(card)).memory_bytes
        gpus.append({"gpu": str(card), "at_most": max(1, min(64, round(copy * draw(1, 16))))})
    prompt, output = draw(50, min(60_000, window / 4)), draw(20, min(8000, window / 8))
    work = 2 * model.architecture.params_active * (prompt + 20 * output)
    flops = sum(2e14 * each["at_most"] / len(gpus) for each in gpus)
    rate = float(np.clip(draw(0.02, 1) * flops / work, 0.05, 200))
    load: dict[str, Any] = {
        side: {"mean": round(mean, 1), "p95": round(mean * draw(1.3, 3), 1)}
        for side, mean in (("prompt_tokens", prompt), ("output_tokens", output))
    }
    match pick(("rate", "rate", "rate", "users", "offline", "day")):
        case "users":
            load["concurrency"] = max(1, round(rate * draw(1, 30)))
        case "offline":
            load |= {"requests": max(100, round(rate * 3600)), "within_hours": round(draw(0.5, 8), 1)}  # fmt: skip
        case "day":
            load |= {"rate": float(f"{rate:.3g}"), "day": "campus-rag"}
        case _:
            load["rate"] = float(f"{rate:.3g}")
    if rng.random() < 0.3:
        load["shared_prefix"] = {"tokens": round(prompt / 2), "hit_rate": round(rng.uniform(0.3, 1), 2)}  # fmt: skip
    pace = draw(8, 150)
    first = 200 + 0.2 * prompt * draw(0.5, 3)
    limits = {"ttft": first, "tpot": pace, "itl": 1.3 * pace, "e2e": first + 1.5 * pace * output}
    asked: dict[str, Any] = {
        "question": f"seed {seed}", "model": model.name, "gpus": gpus, "workload": load,
        "engine": pick(ENGINES), "headroom": pick((0, 0.2, 0.4)),
    }  # fmt: skip
    if model.quantization.method == "none":
        asked["quantization"] = ["checkpoint", *pick(([], ["fp8"], ["awq"]))]
    if "requests" not in load:
        asked["service_level"] = {
            str(metric): {(at := pick(list(POINTS))): round(limits[metric] * POINTS[at], 1)}
            for metric in rng.permutation(list(limits))[: int(rng.integers(1, 4))].tolist()
        }
    if rng.random() < 0.1 and asked["engine"] == "vllm":
        asked["adapters"] = {"count": pick((4, 20)), "ranks": 16}
    return asked


def loosen(asked: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Make questions that are no harder than `asked`, each with what was changed."""
    level = asked.get("service_level", {})
    looser = {metric: {at: 1.5 * ms for at, ms in ats.items()} for metric, ats in level.items()}
    if level:
        yield "limits 1.5 times as long", {**asked, "service_level": looser}
    load = asked["workload"]
    key = next(name for name in ("rate", "concurrency", "requests") if name in load)
    less = load[key] * 0.7 if key == "rate" else max(1, int(load[key] * 0.7))
    yield f"{key} of 70%", {**asked, "workload": {**load, key: less}}
    if asked["headroom"]:
        yield "no headroom", {**asked, "headroom": 0}
    offered = {each["gpu"] for each in asked["gpus"]}
    more = next(name for name in ("H100-SXM", "L40S", "MI300X", "B200", "L4") if name not in offered)  # fmt: skip
    yield f"{more} beside", {**asked, "gpus": [*asked["gpus"], {"gpu": more, "at_most": 8}]}


def get_bill(plan: Plan) -> tuple[bool, float]:
    """What `plan` costs by the rule, in which stages have to save a third; (True, inf) if it does not hold."""
    return plan.chosen.rank_cost if plan.verdict == "holds" and plan.chosen else (True, math.inf)


def costs_more(one: tuple[bool, float], other: tuple[bool, float]) -> bool:
    """Tell whether `one` is dearer; what has no price is dearer than what has one."""
    return one > (other[0], other[1] * (1 + PRICE_SLACK))


def check_verdict(plan: Plan) -> Iterator[str]:
    if (plan.verdict == "holds") != (plan.probability >= plan.scenario.confidence):
        yield f"{plan.verdict} at {plan.probability:.0%}"
    bills = [each.cost_key for each in plan.options.values()]
    if any(costs_more(a, b) for a, b in pairwise(bills)):
        yield f"options cost {bills}"


def describe_args(deployment: Deployment) -> str:
    args = deployment.args
    return f"({args.max_num_seqs} requests, {args.max_num_batched_tokens} tokens, k {deployment.num_draft_tokens})"


def check_neighbours(plan: Plan) -> Iterator[str]:
    """No other arguments on the ladders are clearly likelier at the same price."""
    if plan.chosen is None or plan.is_disaggregated:
        return
    for other in generate_neighbours(plan.scenario, plan.chosen.deployment):
        yield from check_likelier(plan, other)


def check_likelier(plan: Plan, other: Deployment) -> Iterator[str]:
    """Full simulations give `other` at most five points more than the plan."""
    stated = state_deployment(plan.scenario, other)
    if plan.chosen and stated.probability >= plan.probability + 0.05:
        odds = f"{stated.probability:.0%} and {plan.probability:.0%}"
        yield f"{describe_args(other)} against {describe_args(plan.chosen.deployment)}: {odds}"


def check_halves(plan: Plan) -> Iterator[str]:
    """Half or twice the requests or tokens of a step, at the same price, are not clearly likelier."""
    if plan.chosen is None or plan.is_disaggregated:
        return
    scenario, chosen = plan.scenario, plan.chosen.deployment
    for name, factor in product(("max_num_seqs", "max_num_batched_tokens"), (0.5, 2)):
        value = max(1, int(getattr(chosen.args, name) * factor))
        if name in scenario.engine_args or value > chosen.args.max_num_batched_tokens * 2:
            continue
        try:
            other = chosen.with_args(**{name: value})
        except PlannerError:
            continue
        memory = get_memory_plan(other)
        if other.args.max_num_seqs > other.args.max_num_batched_tokens or memory.status != "ok":
            continue
        yield from check_likelier(plan, other)


def pin(asked: dict[str, Any], plan: Plan, seed: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Fix a layout, a format and an argument that the search may choose: a smaller choice."""
    rng = np.random.default_rng([seed, 50])
    shapes = sorted({(c.deployment.layout.tp, c.deployment.layout.pp, c.deployment.layout.dp)
                     for c in plan.candidates if not c.is_disaggregated})  # fmt: skip
    if shapes:
        tp, pp, dp = shapes[int(rng.integers(len(shapes)))]
        yield f"tp {tp}, pp {pp}, dp {dp}", {**asked, "layout": {"tp": tp, "pp": pp, "dp": dp}}
    if formats := asked.get("quantization"):
        weights = formats[int(rng.integers(len(formats)))]
        yield f"{weights} weights", {**asked, "quantization": [weights]}
    name, ladder = (("max_num_seqs", NUM_SEQS_LADDER[4:-2]), ("max_num_batched_tokens", BATCHED_TOKENS_VALUES[1:]))[
        int(rng.integers(2))
    ]  # fmt: skip
    value = ladder[int(rng.integers(len(ladder)))]
    yield f"{name} {value}", {**asked, "engine_args": {name: value}}


def check_pinned(asked: dict[str, Any], plan: Plan, seed: int) -> Iterator[str]:
    """Nothing that is fixed by hand is cheaper than the search's own choice."""
    for what, pinned in pin(asked, plan, seed):
        try:
            found = search_deployments(parse_scenario(pinned, what))
        except PlannerError:
            continue
        if found.chosen and costs_more(get_bill(plan), get_bill(found)):
            chosen, bills = found.chosen, (get_bill(found)[1], get_bill(plan)[1])
            args, odds = describe_args(chosen.deployment), f"{found.probability:.0%}"
            yield f"{what}: {chosen.description} {args} is {bills[0]:.4g} at {odds}, not {bills[1]:.4g}"


def check_alone(asked: dict[str, Any], plan: Plan) -> Iterator[str]:
    """What is said of the next best and of the options is what planning each alone says."""
    for name, said in {"next best": plan.runner_up, **plan.options}.items():
        if said is None or said.is_disaggregated or name == "recommended":
            continue
        layout, card = said.deployment.layout, said.deployment.gpu.name
        alone = {
            **asked,
            "gpus": [each for each in asked["gpus"] if each["gpu"] == card],
            "layout": {"tp": layout.tp, "pp": layout.pp, "dp": layout.dp},
            "confidence": min(max(said.probability - PROBABILITY_SLACK, 0.01), 0.99),
        }
        bill = get_bill(search_deployments(parse_scenario(alone, name)))
        if costs_more(bill, said.cost_key):
            yield f"{name}: {said.description} costs {bill[1]:.4g} alone, not {said.cost_key[1]:.4g}"


def check_harder(asked: dict[str, Any], plan: Plan) -> Iterator[str]:
    """No looser question costs more."""
    for change, looser in loosen(asked):
        bill = get_bill(search_deployments(parse_scenario(looser, change)))
        if costs_more(bill, get_bill(plan)):
            yield f"{change}: {bill[1]:.4g} instead of {get_bill(plan)[1]:.4g}"


def attack(seed: int, names: Container[str] = CHECKS) -> tuple[float, Plan, list[str]]:
    """Plan `seed`; return the CPU seconds of the plan, the plan and every guarantee of `names` that it breaks."""
    asked = draw_scenario(seed)
    scenario: Scenario = parse_scenario(asked, f"seed {seed}")
    before = time.process_time()
    plan = search_deployments(scenario)
    taken = time.process_time() - before
    found: dict[str, Iterator[str]] = {
        "verdict": check_verdict(plan), "neighbours": check_neighbours(plan),
        "halves": check_halves(plan), "alone": check_alone(asked, plan),
        "harder": check_harder(asked, plan), "pinned": check_pinned(asked, plan, seed),
    }  # fmt: skip
    return taken, plan, [text for name in CHECKS if name in names for text in found[name]]


def main(first: int, last: int, *names: str) -> None:
    times = []
    for seed in range(first, last):
        try:
            taken, plan, found = attack(seed, names or CHECKS)
        except PlannerError as refused:
            print(f"{seed}: refused: {refused}", flush=True)
            continue
        times.append(taken)
        where = plan.chosen.description if plan.chosen else "-"
        print(f"{seed}: {taken:.1f} s, {plan.verdict} {plan.probability:.0%}, {where}", flush=True)
        for text in found:
            print(f"    {text}", flush=True)
    print(f"CPU seconds: median {np.median(times):.1f}, worst {max(times):.1f}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:3]), *sys.argv[3:])
