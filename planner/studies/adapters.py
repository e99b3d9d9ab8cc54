"""One endpoint for all LoRA adapters, or one for each with its adapter merged: which costs less, in closed form."""

from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from planner.facts.workload import popularity
from planner.planning.scenario import Scenario
from planner.planning.search import ranked
from planner.studies.layout_study import served_within

SHARED, OWN = "one for all", "one for each"


@dataclass(frozen=True)
class Endpoints:
    """USD per hour by number of adapters, the traffic being the same, and what one endpoint of its own takes."""

    frame: pd.DataFrame  # Adapters, Endpoints, USD per hour; without rows for what nothing serves
    own: str  # one replica for one adapter
    own_usd: float  # per hour
    worth_rps: float | None  # requests/s of one adapter from which its own costs less than its share; None: never

    @property
    def break_even(self) -> int | None:
        """The fewest adapters that were looked at for which one endpoint costs less; None where none do."""
        costs = self.frame.pivot(index="Adapters", columns="Endpoints", values="USD per hour")
        costs = costs.reindex(columns=[SHARED, OWN])
        cheaper = costs.index[costs[SHARED] < costs[OWN]]
        return int(cheaper[0]) if len(cheaper) else None


def endpoints(scenario: Scenario) -> Endpoints | None:
    """Both ways for 1, 2, 4, ... up to all of the scenario's adapters; None where either is impossible or unpriced.

    An adapter's own endpoint is the cheaper of two deployments, and has as many replicas as its requests/s need with
    the scenario's headroom, one at least.
    """
    load, settled = scenario.workload, scenario.engine_args
    if not load.adapters or load.rate is None or scenario.offline:
        return None
    args = {name: value for name, value in settled.items() if "lora" not in name}
    all_of_them, ways = ranked(scenario).chosen, []
    for rate in (load.rate / load.adapters, load.rate):  # what suits an adapter's share, and what suits all of it
        merged = replace(scenario, engine_args=args, workload=replace(load.at(rate), adapters=0))
        if (alone := ranked(merged).chosen) and alone.usd_per_hour:
            one = alone.deployment.with_replicas(1)
            served = served_within(merged, one) * (1 - scenario.headroom)
            ways.append((alone.usd_per_hour / alone.deployment.layout.replicas, served, str(one)))
    if not (ways and all_of_them and all_of_them.usd_per_hour):
        return None
    rows = []
    for count in sorted({*(2**k for k in range(load.adapters.bit_length())), load.adapters}):
        asked = load.rate * popularity(count, load.adapter_zipf)
        cheapest = np.min([usd * np.maximum(np.ceil(asked / served), 1) for usd, served, _ in ways], axis=0)
        rows.append((count, OWN, cheapest.sum()))
        if (found := ranked(replace(scenario, workload=replace(load, adapters=count))).chosen) and found.usd_per_hour:
            rows.append((count, SHARED, found.usd_per_hour))
    frame = pd.DataFrame(rows, columns=["Adapters", "Endpoints", "USD per hour"])
    share = all_of_them.usd_per_hour / load.rate
    worth = min((usd / share for usd, served, _ in ways if usd <= share * served), default=None)
    usd, _, own = min(ways)
    return Endpoints(frame, own, usd, worth)
