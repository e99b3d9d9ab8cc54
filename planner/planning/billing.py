"""What a day costs by the GPU-hour, by the GPU-second and by the token, and up to how much traffic each is cheaper."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from planner.planning.autoscaling import AutoscalingPlan
from planner.planning.scenario import Scenario
from planner.planning.scenario_schema import ApiEntry, ServerlessEntry

BILLING_FIXED, BILLING_AUTOSCALED, BILLING_SERVERLESS, BILLING_API = (
    "fixed fleet",
    "scaled by the hour",
    "serverless",
    "API",
)
TRAFFIC_FACTORS = np.geomspace(1e-4, 10, 600)
"""How many times the traffic a break-even is looked for at."""


@dataclass(frozen=True)
class BillingComparison:
    """Ways to pay for the same day."""

    usd: Mapping[
        str, float
    ]  # a day of 24 hours on average, by way; those of which no price is known are left out
    requests: float  # in such a day
    break_even_requests: Mapping[
        tuple[str, str], float
    ]  # requests a day up to which the first is cheaper than the second; inf, 0
    cold: (
        float | None
    )  # share of the requests of the quietest hour that wait for a serverless replica to start
    cold_start: float | None  # s

    @property
    def sentences(self) -> tuple[str, ...]:
        """What they cost, and up to where each is cheaper, in sentences."""
        costs = ", ".join(
            f"{way} ${usd:,.2f}" for way, usd in sorted(self.usd.items(), key=lambda item: item[1])
        )
        lines = [f"a day of {self.requests:,.0f} requests costs: {costs}"]
        for (first, second), most in self.break_even_requests.items():
            if not 0 < most < math.inf:
                ever = "always" if most else "never"
                lines.append(
                    f"{first} is {ever} cheaper than {second}, up to ten times the traffic"
                )
            else:
                lines.append(
                    f"{first} is cheaper than {second} up to {float(f'{most:.2g}'):,.0f} requests"
                    " a day"
                )
        if self.cold is not None and self.cold >= 1e-4:
            start = f"{self.cold_start:,.0f} s"
            lines.append(
                f"of the quietest hour's requests {self.cold:.2%} wait for a serverless start"
                f" ({start})"
            )
        return tuple(lines)


def compare_billing(scenario: Scenario, scaling: AutoscalingPlan) -> BillingComparison:
    """Every way to pay for the day of `scaling` at the scenario's prices, compared."""
    instead, days = scenario.billing_alternatives, len(scaling.rates) / 24
    ways: dict[str, Callable[[float], float]] = {}
    usd: dict[str, float] = {}
    if (price := scaling.usd_per_gpu_hour) is not None:
        usd |= {
            BILLING_FIXED: scaling.fixed_gpu_hours * price / days,
            BILLING_AUTOSCALED: scaling.gpu_hours * price / days,
        }
        least = scenario.replicas_at_least
        ways[BILLING_AUTOSCALED] = lambda times: (
            scaling.compute_billed_gpu_hours(
                np.maximum(scaling.compute_replicas_needed(times), least)
            )
            * price
            / days
        )
    if (paid := instead.serverless) is not None:
        ways[BILLING_SERVERLESS] = lambda times: price_serverless(paid, scaling, times)[0] / days
    if (api_entry := instead.api) is not None:
        ways[BILLING_API] = lambda times: _price_api(api_entry, scaling, times) / days
    usd |= {way: cost(1.0) for way, cost in ways.items() if way != BILLING_AUTOSCALED}
    requests = sum(scaling.rates) * 3600 / days
    curves = (
        {way: np.array([cost(times) for times in TRAFFIC_FACTORS]) for way, cost in ways.items()}
        if len(ways) > 1
        else {}
    )
    pairs = [(first, second) for first, second in ((BILLING_SERVERLESS, BILLING_AUTOSCALED), (BILLING_API, BILLING_AUTOSCALED), (BILLING_API, BILLING_SERVERLESS))
             if first in curves and second in curves]  # fmt: skip
    up_to = {pair: _find_break_even(*(curves[way] for way in pair)) * requests for pair in pairs}
    cold = price_serverless(paid, scaling, 1.0)[1] if paid else None
    return BillingComparison(
        usd, requests, up_to, cold, _get_cold_start_s(paid, scaling) if paid else None
    )


def _find_break_even(first: np.ndarray, second: np.ndarray) -> float:
    """The largest of `TIMES` at which the `first` costs less; 0 where it never does, infinity where it does last."""
    cheaper = np.flatnonzero(first < second)
    return (
        0.0
        if not len(cheaper)
        else (
            math.inf
            if cheaper[-1] == len(TRAFFIC_FACTORS) - 1
            else float(TRAFFIC_FACTORS[cheaper[-1]])
        )
    )


def _get_cold_start_s(paid: ServerlessEntry, scaling: AutoscalingPlan) -> float:
    return paid.cold_start or scaling.lead_s


def price_serverless(
    paid: ServerlessEntry, scaling: AutoscalingPlan, times: float
) -> tuple[float, float]:
    """(USD, the share of the quietest hour's requests that wait for a start) at so many times the traffic.

    Where one replica does and none is kept warm, requests come at rate l, at random, a start takes
    C, and the replica stays for D, an answer and the wait after it. From one start to the next C +
    e^(lD) / l seconds pass (a busy period of M/G/inf and the idle time 1 / l), of which all but 1 /
    l are paid; and of l C + e^(lD) requests 1 + l C meet no replica that runs.
    """
    rates, start = np.array(scaling.rates) * times, _get_cold_start_s(paid, scaling)
    assert scaling.max_load_replica.performance is not None
    stay = scaling.max_load_replica.performance.e2e["mean"].mid + paid.idle_seconds
    cycle = rates * start + np.exp(np.minimum(rates * stay, 700.0))
    needed = scaling.compute_replicas_needed(times)
    single = needed <= 1
    running = np.maximum(np.where(single, 1 - 1 / cycle, needed), paid.warm_replicas)
    started = np.maximum(np.diff(needed, prepend=needed[-1]), 0)[~single].sum() * start
    seconds = running.sum() * 3600 + (started if paid.warm_replicas < needed.max() else 0.0)
    waits = np.where(
        single & (rates > 0) & (paid.warm_replicas == 0), (1 + rates * start) / cycle, 0.0
    )
    return float(
        seconds * scaling.deployment.layout.gpus_per_replica * paid.usd_per_gpu_second
    ), float(waits.max())


def _price_api(api: ApiEntry, scaling: AutoscalingPlan, times: float) -> float:
    """USD of all tokens in and out."""
    load = scaling.max_load_replica.workload
    assert load is not None
    usd = load.prompt.mean * api.usd_per_mtok_input + load.output.mean * api.usd_per_mtok_output
    return sum(scaling.rates) * 3600 * times * usd / 1e6
