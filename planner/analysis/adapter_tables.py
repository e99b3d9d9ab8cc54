"""Compare one endpoint for all LoRA adapters with one per merged adapter by analytical cost."""

from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from planner.analysis.layout_tables import estimate_max_rps
from planner.planning.scenario import Scenario
from planner.planning.search import search_analytically
from planner.workload.workload import compute_zipf_fractions

SHARED_ENDPOINT_LABEL, DEDICATED_ENDPOINT_LABEL = "one for all", "one for each"


@dataclass(frozen=True)
class EndpointComparison:
    """USD per hour by number of adapters at the same total traffic, shared or dedicated."""

    frame: pd.DataFrame  # Adapters, Endpoints, USD per hour; infeasible numbers have no row
    dedicated_deployment: str  # one replica for one adapter
    dedicated_usd_per_hour: float
    # requests/s of one adapter from which a dedicated endpoint costs less than its share, if any
    min_dedicated_rps: float | None

    @property
    def break_even_adapters(self) -> int | None:
        """The fewest adapters in the table for which a shared endpoint costs less; None if none."""
        costs = self.frame.pivot(index="Adapters", columns="Endpoints", values="USD per hour")
        costs = costs.reindex(columns=[SHARED_ENDPOINT_LABEL, DEDICATED_ENDPOINT_LABEL])
        cheaper = costs.index[costs[SHARED_ENDPOINT_LABEL] < costs[DEDICATED_ENDPOINT_LABEL]]
        return int(cheaper[0]) if len(cheaper) else None


def compare_adapter_endpoints(scenario: Scenario) -> EndpointComparison | None:
    """Compare both ways for 1, 2, 4, ... adapters, up to all of the scenario's.

    Returns None if either is impossible or has no price. An adapter's own endpoint is the cheaper
    of two deployments, and has as many replicas as its requests/s need with the scenario's
    headroom, at least one.
    """
    load, engine_args = scenario.workload, scenario.engine_args
    if not load.adapters or load.rate is None or scenario.offline:
        return None
    args = {name: value for name, value in engine_args.items() if "lora" not in name}
    shared, dedicated = search_analytically(scenario).chosen, []
    # the deployments planned for one adapter's mean traffic and for all traffic
    for rate in (load.rate / load.adapters, load.rate):
        merged = replace(
            scenario, engine_args=args, workload=replace(load.with_rate(rate), adapters=0)
        )
        if (chosen := search_analytically(merged).chosen) and chosen.usd_per_hour:
            deployment = chosen.deployment.with_replicas(1)
            capacity = estimate_max_rps(merged, deployment) * (1 - scenario.headroom)
            dedicated.append(
                (chosen.usd_per_hour / chosen.deployment.layout.replicas, capacity, str(deployment))
            )
    if not (dedicated and shared and shared.usd_per_hour):
        return None
    rows = []
    for count in sorted({*(2**k for k in range(load.adapters.bit_length())), load.adapters}):
        rates = load.rate * compute_zipf_fractions(count, load.adapter_zipf)
        cheapest = np.min(
            [usd * np.maximum(np.ceil(rates / capacity), 1) for usd, capacity, _ in dedicated],
            axis=0,
        )
        rows.append((count, DEDICATED_ENDPOINT_LABEL, cheapest.sum()))
        if (
            candidate := search_analytically(
                replace(scenario, workload=replace(load, adapters=count))
            ).chosen
        ) and candidate.usd_per_hour:
            rows.append((count, SHARED_ENDPOINT_LABEL, candidate.usd_per_hour))
    frame = pd.DataFrame(rows, columns=["Adapters", "Endpoints", "USD per hour"])
    share = shared.usd_per_hour / load.rate
    min_rps = min(
        (usd / share for usd, capacity, _ in dedicated if usd <= share * capacity),
        default=None,
    )
    usd, _, description = min(dedicated)
    return EndpointComparison(frame, description, usd, min_rps)


def describe_adapter_endpoints(
    scenario: Scenario, slots: int, compared: EndpointComparison | None
) -> str:
    """Describe, as Markdown, what adapters cost on one endpoint or each; empty without adapters."""
    if not scenario.workload.adapters:
        return ""
    text = (
        "## One endpoint for all adapters, or one for each\n\n"
        f"Every request asks for one of {scenario.workload.adapters:,} LoRA adapters. The engine"
        f" keeps {slots:,} of them in slots on every GPU, and has no more different ones in a step:"
        " requests for others wait, whatever came first. Each different adapter in a step costs"
        " time of its own, however few tokens it changes, so rare adapters make steps slow.\n\n"
    )
    if compared is None:
        return (
            f"{text}What an endpoint for each would cost is not compared: it takes a rate, prices,"
            " and a feasible plan."
        )
    text += (
        "An adapter that has its own endpoint is merged into the weights and costs nothing more,"
        f" but takes at least {compared.dedicated_deployment}, USD"
        f" {compared.dedicated_usd_per_hour:,.2f} per hour. "
    )
    if count := compared.break_even_adapters:
        text += f"One endpoint for all costs less from **{count} adapters** on. "
    if rate := compared.min_dedicated_rps:
        return (
            f"{text}An adapter that is asked for more than **{rate:,.3g} times a second** by itself"
            " costs less on its own."
        )
    return f"{text}However often an adapter is asked for, it costs no less on its own."
