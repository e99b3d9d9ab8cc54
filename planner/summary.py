"""The answer in words and tables: what the summary of a report says about a plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING

from planner.candidate import Candidate, describe
from planner.deployment import Deployment, ParallelLayout
from planner.deployments import deployment_of
from planner.models import model
from planner.parallelism import legal_layouts
from planner.quantities import GIB
from planner.search import Plan
from planner.steady import Performance
from planner.what_if import WhatIf

if TYPE_CHECKING:
    import pandas as pd


def state(candidate: Candidate) -> str:
    """Whether it "meets" the service level, meets it only "at risk", or "misses" it."""
    return "misses" if not candidate.meets else "at risk" if candidate.at_risk else "meets"


def subject(plan: Plan) -> Deployment:
    """The deployment to talk about: the chosen one, else the nearest, else the widest layout there is."""
    if plan.best:
        return plan.best.deployment
    scenario, card = plan.scenario, plan.scenario.gpus[0]
    served = model(scenario.model, quantization=scenario.quantizations[-1])
    layouts = legal_layouts(served, card.gpu, card.at_most, card.gpus_per_node, scenario.engine) or [ParallelLayout()]
    return deployment_of(scenario, card, served, max(layouts, key=lambda layout: (layout.gpus, layout.tp)))


def verdict(plan: Plan) -> str:
    """The answer in a sentence or two."""
    if plan.chosen is None:
        return f"Nothing that was allowed meets the service level. {plan.binding}"
    answer = f"Run {plan.chosen}."
    return answer + (f" What holds at the pessimistic end too: {plan.safer}." if plan.safer else "")


def limits(plan: Plan) -> str:
    """The binding constraint, and the runner-up."""
    after = (
        f" The runner-up is {plan.runner_up}." if plan.runner_up else " No other layout or GPU meets the service level."
    )
    return f"Binding: {plan.binding.constraint}. {plan.binding}" + (after if plan.chosen else "")


def latencies(candidate: Candidate) -> pd.DataFrame:
    """TTFT, ITL, TPOT and E2E in ms, each as mean, p50, p95 and p99 with its 80 % interval."""
    import pandas as pd

    found = candidate.prediction.performance
    columns = ("mean", "p50", "p95", "p99")
    rows = [
        [metric.upper(), *(getattr(found, metric)[at] * 1e3 for at in columns)]
        for metric in (("ttft", "tpot", "itl", "e2e") if found else ())
    ]
    return pd.DataFrame(rows, columns=["", *(f"{at} (ms)" for at in columns)])


def figures(candidate: Candidate) -> pd.DataFrame:
    """What the candidate takes, holds, serves and costs, with units and, where predicted, 80 % intervals."""
    import pandas as pd

    memory, found, layout = candidate.prediction.memory, candidate.prediction.performance, candidate.deployment.layout
    rows: list[tuple[str, object, str]] = [
        ("GPUs", layout.gpus, ""),
        ("weights on one GPU", memory.weights / GIB, "GiB"),
        ("KV cache on one GPU", memory.kv_available / GIB, "GiB"),
        ("full-length sequences that fit in one replica", memory.max_concurrency, ""),
    ]
    if found:
        rows += [
            ("output throughput", found.output_tps, "tokens/s"),
            ("requests served", found.request_tps, "requests/s"),
            ("sequences decoding in one engine", found.decode_batch, ""),
            ("KV pool in use", found.kv_usage * 100, "%"),
        ]
    if cost := candidate.prediction.cost:
        per_token = cost.usd_per_million_output_tokens
        rows += [
            ("cost", f"{cost.usd_per_hour:,.2f}", "USD per hour"),
            ("cost", f"{cost.usd_per_month:,.0f}", "USD per month"),
            ("cost", f"{per_token:.2f}", "USD per million output tokens"),
        ]
    return pd.DataFrame(rows, columns=["figure", "value", "unit"])


def _usd(amount: float | None) -> str | None:
    return None if amount is None else f"{amount:,.2f}"


def alternatives(plan: Plan, most: int = 10) -> pd.DataFrame:
    """The best candidates, a row each, from best to worst."""
    import pandas as pd

    rows = []
    for candidate in plan.candidates[:most]:
        found = candidate.prediction.performance
        row: dict[str, object] = {
            "deployment": describe(candidate.deployment),
            "USD per hour": _usd(candidate.usd_per_hour),
        }
        for target in plan.scenario.service_level:
            value = getattr(found, target.metric)[target.percentile] if found else None
            row[f"{target.name} (ms)"] = value and value * 1e3
        if plan.scenario.offline:
            row["requests/s"] = found and found.request_tps
        rows.append(row | {"service level": state(candidate)})
    return pd.DataFrame(rows)


def rejections(plan: Plan, most: int = 12) -> pd.DataFrame:
    """What could not be evaluated, and why, the largest first."""
    import pandas as pd

    told = sorted(plan.rejected, key=lambda rejection: -rejection.gpus)[:most]
    return pd.DataFrame([(r.what, r.reason) for r in told], columns=["layout", "why not"])


def counts(plan: Plan) -> str:
    """How much was looked at."""
    why = Counter(rejection.bottleneck for rejection in plan.rejected)
    out = ", ".join(f"{number} for {bottleneck}" for bottleneck, number in why.most_common())
    meeting = sum(candidate.meets for candidate in plan.candidates)
    return f"Deployments evaluated: {len(plan.candidates)}, of which {meeting} meet the service level" + (
        f"; ruled out before: {len(plan.rejected)} ({out})." if why else "."
    )


def changes(plan: Plan, found: tuple[WhatIf, ...]) -> pd.DataFrame:
    """Each change with the plan that follows, and its cost beside today's."""
    import pandas as pd

    today = plan.chosen.usd_per_hour if plan.chosen else None
    rows = []
    for item in found:
        best = item.plan.chosen
        usd = best.usd_per_hour if best else None
        against = f"{(usd / today - 1) * 100:+.0f}" if usd is not None and today else None
        rows.append(
            (
                item.change,
                describe(best.deployment) if best else "nothing meets it",
                _usd(usd),
                against,
                state(best) if best else "misses",
            )
        )
    columns = ["change", "plan", "USD per hour", "cost change (%)", "service level"]
    return pd.DataFrame(rows, columns=columns).drop(columns=[] if today else "cost change (%)")


def ramp_table(predicted: Mapping[float, Performance]) -> pd.DataFrame:
    """One row per step of a benchmark ramp on one replica: request rate, p99 TTFT and ITL, output throughput."""
    import pandas as pd

    rows = [(f"{rate:.3g}", p.ttft["p99"] * 1e3, p.itl["p99"] * 1e3, p.output_tps) for rate, p in predicted.items()]
    return pd.DataFrame(rows, columns=["requests/s", "TTFT p99 (ms)", "ITL p99 (ms)", "output tokens/s"])
