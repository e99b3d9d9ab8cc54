"""One endpoint for all LoRA adapters, or one for each with its adapter merged: which costs less, in closed form."""

from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from planner.analysis.layout_tables import estimate_max_rps
from planner.planning.scenario import Scenario
from planner.planning.search import search_analytically
from planner.workload.workload import compute_adapter_popularity

SHARED_ENDPOINT_LABEL, DEDICATED_ENDPOINT_LABEL = "one for all", "one for each"


@dataclass(frozen=True)
class EndpointComparison:
    """USD per hour by number of adapters, the traffic being the same, and what one endpoint of its own takes."""

    frame: pd.DataFrame  # Adapters, Endpoints, USD per hour; without rows for what nothing serves
    dedicated_deployment: str  # one replica for one adapter
    dedicated_usd_per_hour: float  # per hour
    min_dedicated_rps: (
        float | None
    )  # requests/s of one adapter from which its own costs less than its share; None: never

    @property
    def break_even_adapters(self) -> int | None:
        """The fewest adapters that were looked at for which one endpoint costs less; None where none do."""
        costs = self.frame.pivot(index="Adapters", columns="Endpoints", values="USD per hour")
        costs = costs.reindex(columns=[SHARED_ENDPOINT_LABEL, DEDICATED_ENDPOINT_LABEL])
        cheaper = costs.index[costs[SHARED_ENDPOINT_LABEL] < costs[DEDICATED_ENDPOINT_LABEL]]
        return int(cheaper[0]) if len(cheaper) else None


def compare_adapter_endpoints(scenario: Scenario) -> EndpointComparison | None:
    """Both ways for 1, 2, 4, ... up to all of the scenario's adapters; None where either is impossible or unpriced.

    An adapter's own endpoint is the cheaper of two deployments, and has as many replicas as its
    requests/s need with the scenario's headroom, one at least.
    """
    load, settled = scenario.workload, scenario.engine_args
    if not load.adapters or load.rate is None or scenario.offline:
        return None
    args = {name: value for name, value in settled.items() if "lora" not in name}
    all_of_them, ways = search_analytically(scenario).chosen, []
    for rate in (
        load.rate / load.adapters,
        load.rate,
    ):  # what suits an adapter's share, and what suits all of it
        merged = replace(
            scenario, engine_args=args, workload=replace(load.with_rate(rate), adapters=0)
        )
        if (alone := search_analytically(merged).chosen) and alone.usd_per_hour:
            deployment = alone.deployment.with_replicas(1)
            served = estimate_max_rps(merged, deployment) * (1 - scenario.headroom)
            ways.append(
                (alone.usd_per_hour / alone.deployment.layout.replicas, served, str(deployment))
            )
    if not (ways and all_of_them and all_of_them.usd_per_hour):
        return None
    rows = []
    for count in sorted({*(2**k for k in range(load.adapters.bit_length())), load.adapters}):
        asked = load.rate * compute_adapter_popularity(count, load.adapter_zipf)
        cheapest = np.min(
            [usd * np.maximum(np.ceil(asked / served), 1) for usd, served, _ in ways], axis=0
        )
        rows.append((count, DEDICATED_ENDPOINT_LABEL, cheapest.sum()))
        if (
            candidate := search_analytically(
                replace(scenario, workload=replace(load, adapters=count))
            ).chosen
        ) and candidate.usd_per_hour:
            rows.append((count, SHARED_ENDPOINT_LABEL, candidate.usd_per_hour))
    frame = pd.DataFrame(rows, columns=["Adapters", "Endpoints", "USD per hour"])
    share = all_of_them.usd_per_hour / load.rate
    worth = min((usd / share for usd, served, _ in ways if usd <= share * served), default=None)
    usd, _, own = min(ways)
    return EndpointComparison(frame, own, usd, worth)
