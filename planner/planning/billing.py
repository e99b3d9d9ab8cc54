"""Compare billing: what a day costs by the GPU-hour, the GPU-second and the token."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from planner.core.intervals import Interval
from planner.core.number_format import format_number, format_usd
from planner.hardware.prices import HOURS_PER_MONTH, look_up_gpu_price
from planner.planning.autoscaling import AutoscalingPlan
from planner.planning.candidate import Candidate
from planner.planning.evaluation import compute_offered_rps, estimate_run_hours, get_capacity_rps
from planner.planning.max_load import is_least_load
from planner.planning.scenario import Scenario
from planner.planning.scenario_schema import ApiEntry, ServerlessEntry, TrafficVolume
from planner.workload.workload import Workload

BILLING_FIXED, BILLING_AUTOSCALED, BILLING_SERVERLESS, BILLING_API = (
    "fixed fleet",
    "scaled by the hour",
    "serverless",
    "API",
)
BILLING_RESERVED = "all reserved"
BILLING_PAIRS = (
    (BILLING_SERVERLESS, BILLING_AUTOSCALED),
    (BILLING_API, BILLING_AUTOSCALED),
    (BILLING_API, BILLING_SERVERLESS),
)
"""Ways that are compared with each other."""
EQUAL_COST_SHARE = 0.05
"""Two ways that differ by less cost about the same: quotes of one GPU differ by more."""
TRAFFIC_FACTORS = np.append(np.geomspace(1e-4, 1, 481), np.geomspace(1, 10, 121)[1:])
"""Multiples of the traffic at which a break-even is searched, the traffic itself among them."""


@dataclass(frozen=True)
class BillingComparison:
    """Ways to pay for the same day.

    `break_even_requests` holds, for a pair of ways, the requests a day up to which the first is
    cheaper: 0 if never, infinity if always.
    """

    usd: Mapping[str, float]  # mean of 24 hours by way to pay, as far as prices are known
    requests: float  # in such a day
    break_even_requests: Mapping[tuple[str, str], float]
    cold: float | None  # fraction of the quietest hour's requests that wait for a serverless start
    cold_start: float | None  # s
    stopped_usd: float | None = None  # scaled, if no replica runs in hours without traffic
    max_traffic_factor: float = math.inf  # that the fixed fleet serves
    num_days: float = 1.0  # of which such a day is the mean


@dataclass(frozen=True)
class ApiComparison:
    """What the traffic costs on the plan's GPUs, and by the token from an API."""

    own_usd: float
    api_usd: float
    api_usd_per_mtok_output: float  # what goes in included
    is_monthly: bool  # else for a run that ends
    is_rate_constant: bool  # all day as in the busiest hour, for want of a daily profile
    break_even_rps: float | None  # mean rate from which on those GPUs cost less than the API
    usable_rps: float  # mean rate that those GPUs serve at most
    stopped_usd: float | None = None  # of those GPUs, if none runs in hours without traffic
    mean_rps: float = 0.0  # of the traffic, in a mean hour
    peak_rps: float = 0.0  # in the busiest
    volume: TrafficVolume | None = None  # as which the traffic is stated
    given_usd: float | None = None  # the API's bill, where that is stated

    @property
    def is_about_equal(self) -> bool:
        """Whether the two differ by less than prices do from one quotation to the next."""
        return self.saved_usd < EQUAL_COST_SHARE * max(self.own_usd, self.api_usd)

    @property
    def is_api_cheaper(self) -> bool:
        """Whether the API costs clearly less."""
        return self.api_usd < self.own_usd and not self.is_about_equal

    @property
    def saved_usd(self) -> float:
        """What the cheaper of them saves."""
        return abs(self.own_usd - self.api_usd)

    @property
    def outcome(self) -> str:
        """What the cheaper of them saves."""
        if self.is_about_equal:
            return "about the same"
        saver = "the API saves" if self.is_api_cheaper else "own GPUs save"
        return f"{saver} {format_usd(self.saved_usd)}"

    @property
    def api_bill(self) -> str:
        """The API's bill, as it was given if it was."""
        return format_usd(self.api_usd) if self.given_usd is None else f"${self.given_usd:,.10g}"

    @property
    def assumption(self) -> str:
        """What a comparison without a daily profile takes for granted; empty with one."""
        if not self.is_rate_constant:
            return ""
        if self.volume:
            return "spread evenly over 24 hours"
        return f"at {format_number(self.mean_rps)} requests/s around the clock"

    @property
    def turn(self) -> str:
        """Where it turns, as far as these GPUs serve such a load; empty if it is not known."""
        if self.break_even_rps is None:
            return ""
        if self.is_about_equal:
            return f"equal at {self._format_load(self.break_even_rps)}"
        if self.is_api_cheaper and self.break_even_rps > self.usable_rps:
            return (
                f"at any load that these GPUs serve, up to {self._format_load(self.usable_rps, 2)}"
            )
        side = "below" if self.is_api_cheaper else "above"
        return f"{side} {self._format_load(self.break_even_rps)}"

    def _format_load(self, mean_rps: float, digits: int = 3) -> str:
        """Format a load in the unit of the traffic, with its mean rate and that of its busiest hour."""
        rate, times = f"{format_number(mean_rps, digits)} requests/s", mean_rps / self.mean_rps
        if self.peak_rps > self.mean_rps:
            peak = format_number(self.peak_rps * times, digits)
            rate += f" on average, {peak} in the busiest hour"
        if self.volume is None:
            return rate
        amount = float(f"{self.volume.amount * times:.{digits}g}")
        return f"{replace(self.volume, amount=amount)} ({rate})"


def compare_to_api(
    scenario: Scenario, candidate: Candidate, daily: BillingComparison | None
) -> ApiComparison | None:
    """Compare the cost of `candidate` with that of the scenario's API.

    With a daily profile its `daily` comparison is told by the month, of GPUs that follow the
    traffic; otherwise the GPUs cost the same at any load. None if the scenario names no API, or no
    price of the GPU is known.
    """
    api, load, usd = scenario.billing_alternatives.api, scenario.workload, candidate.usd_per_hour
    performance = candidate.prediction.performance
    served = get_capacity_rps(scenario, performance) if performance else None
    if api is None or usd is None or served is None:
        return None
    usd_per_request = price_api_request(api, load)
    per_mtok = usd_per_request / load.output.mean * 1e6
    if (hours := estimate_run_hours(scenario, candidate)) and load.num_prompts:
        total = load.num_prompts * usd_per_request
        return ApiComparison(usd * hours.mid, total, per_mtok, False, False, None, served.mid)
    usable_rps, peak_rps = served.mid * (1 - scenario.headroom), load.rate or 0.0
    usable_rps *= scenario.mean_fraction
    given_usd = scenario.billing_alternatives.api_usd_per_month
    stated = peak_rps, scenario.volume, given_usd
    if daily is not None:
        days = HOURS_PER_MONTH / 24
        own, api_usd = days * daily.usd[BILLING_AUTOSCALED], days * daily.usd[BILLING_API]
        turn = daily.break_even_requests[BILLING_API, BILLING_AUTOSCALED] / 86400
        stopped = daily.stopped_usd and days * daily.stopped_usd
        break_even = turn if 0 < turn < math.inf else None
        usable_rps = daily.requests / 86400 * daily.max_traffic_factor
        return ApiComparison(
            own, api_usd, per_mtok, True, False, break_even, usable_rps, stopped,
            daily.requests / 86400, *stated,
        )  # fmt: skip
    own, seconds = usd * HOURS_PER_MONTH, HOURS_PER_MONTH * 3600
    peak = load.rate or compute_offered_rps(scenario, candidate.prediction)
    mean_rps = peak * scenario.mean_fraction
    api_usd = mean_rps * seconds * usd_per_request
    break_even = own / (usd_per_request * seconds) if usd_per_request else None
    is_constant = load.trace is None and scenario.mean_fraction == 1
    return ApiComparison(
        own, api_usd, per_mtok, True, is_constant, break_even, usable_rps, None, mean_rps,
        *stated,
    )  # fmt: skip


@dataclass(frozen=True)
class BudgetUse:
    """What a plan takes of the budget."""

    usd_per_hour: float  # the budget
    spent_fraction: float
    # a replica more would be within the budget, but is beyond what the scenario has of the GPU
    is_bound_by_at_most: bool


def measure_budget(scenario: Scenario, candidate: Candidate) -> BudgetUse | None:
    """Measure what `candidate` takes of the scenario's budget; None without a budget or a price."""
    budget, usd, deployment = (
        scenario.budget_usd_per_hour,
        candidate.usd_per_hour,
        candidate.deployment,
    )
    if budget is None or usd is None:
        return None
    replica, prediction = deployment.layout.gpus_per_replica, candidate.prediction
    most = next(each.max_gpus for each in scenario.gpus if each.gpu == deployment.gpu)
    is_affordable = usd * (1 + replica / prediction.num_gpus_billed) <= budget
    return BudgetUse(budget, usd / budget, is_affordable and prediction.num_gpus + replica > most)


TokenSide = Literal["output", "prompt"]


def price_tokens(scenario: Scenario, candidate: Candidate) -> tuple[Interval, TokenSide] | None:
    """Return USD per million tokens of GPUs that stay on: over the day, where one is given.

    They are output tokens, or prompt tokens where there are no answers (embeddings). None also for
    one request at a time, which nobody would pay GPUs for.
    """
    usd = candidate.prediction.usd_per_mtok_output
    if usd is None or is_least_load(scenario):
        return None
    usd, load = usd / scenario.mean_fraction, scenario.workload
    if load.output.max_tokens > 1:
        return usd, "output"
    return usd * (load.output.mean / load.prompt.mean), "prompt"


def price_api_request(api: ApiEntry, workload: Workload) -> float:
    """Return the USD of the tokens in and out of a request of mean lengths."""
    prompt, output = workload.prompt.mean, workload.output.mean
    return (prompt * api.usd_per_mtok_input + output * api.usd_per_mtok_output) / 1e6


def compare_billing(scenario: Scenario, scaling: AutoscalingPlan) -> BillingComparison:
    """Compare every way to pay for the day of `scaling`, at the scenario's prices."""
    instead, days = scenario.billing_alternatives, len(scaling.rates) / 24
    requests = sum(scaling.rates) / scaling.admitted_fraction * 3600 / days
    ways: dict[str, Callable[[float], float]] = {}
    usd: dict[str, float] = {}
    stopped, price = None, scaling.usd_per_gpu_hour
    if price is not None:

        def price_hours(gpu_hours: float) -> float:
            return scaling.count_paid_gpu_hours(gpu_hours) * price / days

        least = scenario.replicas_at_least
        ways[BILLING_AUTOSCALED] = lambda times: price_hours(
            scaling.compute_billed_gpu_hours(
                np.maximum(scaling.compute_replicas_needed(times), least)
            )
        )
        usd |= {
            BILLING_FIXED: price_hours(scaling.fixed_gpu_hours),
            BILLING_AUTOSCALED: price_hours(scaling.gpu_hours),
        }
        if (hours := scaling.stopped_gpu_hours) is not None and scaling.idle_share < 1:
            stopped = price_hours(hours)
    reserved = look_up_gpu_price(scaling.deployment.gpu, replace(scenario.prices, tier="reserved"))
    if reserved and not reserved.is_user_given:
        usd[BILLING_RESERVED] = scaling.fixed_gpu_hours * reserved.median_usd / days
    if (serverless := instead.serverless) is not None:
        ways[BILLING_SERVERLESS] = lambda times: (
            price_serverless(serverless, scaling, times)[0] / days
        )
    if (api_entry := instead.api) is not None:
        usd_per_day = requests * price_api_request(api_entry, scenario.workload)
        ways[BILLING_API] = lambda times: times * usd_per_day
    usd |= {way: cost(1.0) for way, cost in ways.items() if way != BILLING_AUTOSCALED}
    curves = (
        {way: np.array([cost(times) for times in TRAFFIC_FACTORS]) for way, cost in ways.items()}
        if len(ways) > 1
        else {}
    )
    break_even_requests = {
        pair: _find_break_even(*(curves[way] for way in pair)) * requests
        for pair in BILLING_PAIRS
        if curves.keys() >= {*pair}
    }
    cold = price_serverless(serverless, scaling, 1.0)[1] if serverless else None
    cold_start = (serverless.cold_start or scaling.lead_s) if serverless else None
    factor = scaling.max_replica_rps * scaling.deployment.layout.replicas / max(scaling.rates)
    return BillingComparison(
        usd, requests, break_even_requests, cold, cold_start, stopped, factor, days
    )


def _find_break_even(first: np.ndarray, second: np.ndarray) -> float:
    """Return the traffic factor nearest to 1 up to which `first` is cheaper.

    It is 0 if `first` is dearer at all that is less, and infinite if it is cheaper at all that is
    more.
    """
    today = int(np.searchsorted(TRAFFIC_FACTORS, 1.0, side="right")) - 1
    cheaper = first < second
    if cheaper[today]:
        dearer = np.flatnonzero(~cheaper[today:])
        return float(TRAFFIC_FACTORS[today + dearer[0] - 1]) if len(dearer) else math.inf
    below = np.flatnonzero(cheaper[:today])
    return float(TRAFFIC_FACTORS[below[-1]]) if len(below) else 0.0


def price_serverless(
    paid: ServerlessEntry, scaling: AutoscalingPlan, times: float
) -> tuple[float, float]:
    """Return the USD, and the fraction of the quietest hour's requests that wait for a start.

    Both are at `times` the traffic. If one replica suffices and none is kept warm, requests arrive
    at random at rate l, a start takes C, and the replica stays for D: an answer and the idle time
    after it. From one start to the next C + e^(lD) / l seconds pass (a busy period of M/G/inf and
    the idle time 1 / l), of which all but 1 / l are paid. Of l C + e^(lD) requests, 1 + l C find no
    running replica.
    """
    rates, start = np.array(scaling.rates) * times, paid.cold_start or scaling.lead_s
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
