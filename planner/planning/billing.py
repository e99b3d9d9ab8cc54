"""Compare billing: what a day costs by the GPU-hour, the GPU-second and the token."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from planner.core.intervals import Interval
from planner.hardware.prices import HOURS_PER_MONTH
from planner.planning.autoscaling import AutoscalingPlan
from planner.planning.candidate import Candidate
from planner.planning.evaluation import compute_offered_rps, estimate_run_hours, get_capacity_rps
from planner.planning.max_load import is_least_load
from planner.planning.scenario import Scenario
from planner.planning.scenario_schema import ApiEntry, ServerlessEntry
from planner.workload.workload import Workload

BILLING_FIXED, BILLING_AUTOSCALED, BILLING_API = "fixed fleet", "scaled by the hour", "API"
EQUAL_COST_SHARE = 0.05
"""Two ways that differ by less cost about the same: quotes of one GPU differ by more."""


@dataclass(frozen=True)
class BillingComparison:
    """Ways to pay for the same day."""

    usd: Mapping[str, float]  # mean of 24 hours by way to pay, as far as prices are known
    requests: float  # in such a day
    cold: float  # fraction of the quietest hour's requests that wait for a serverless start
    stopped_usd: float | None  # scaled, if no replica runs in hours without traffic


@dataclass(frozen=True)
class ApiComparison:
    """What the traffic costs on the plan's GPUs, and by the token from an API."""

    own_usd: float
    api_usd: float
    api_usd_per_mtok_output: float  # what goes in included
    is_monthly: bool  # else for a run that ends
    # mean requests/s from which on GPUs that are always on cost less, None beyond what they serve
    break_even_rps: float | None = None

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
    per_request = price_api_request(api, load)
    per_mtok = per_request / load.output.mean * 1e6
    if (hours := estimate_run_hours(scenario, candidate)) and load.num_prompts:
        return ApiComparison(usd * hours.mid, load.num_prompts * per_request, per_mtok, False)
    if daily is not None:
        days = HOURS_PER_MONTH / 24
        own, api_usd = daily.usd[BILLING_AUTOSCALED], daily.usd[BILLING_API]
        return ApiComparison(days * own, days * api_usd, per_mtok, True)
    peak = load.rate or compute_offered_rps(scenario, candidate.prediction)
    mean_rps, per_rps = peak * scenario.mean_fraction, HOURS_PER_MONTH * 3600 * per_request
    turn = usd * HOURS_PER_MONTH / per_rps if per_request else None
    if turn and turn > served.mid * (1 - scenario.headroom) * scenario.mean_fraction:
        turn = None
    return ApiComparison(usd * HOURS_PER_MONTH, mean_rps * per_rps, per_mtok, True, turn)


def measure_budget(scenario: Scenario, candidate: Candidate) -> dict[str, float | bool] | None:
    """Measure what `candidate` takes of the scenario's budget; None without a budget or a price.

    `is_bound_by_at_most` says that a replica more would be within the budget, but is beyond what the
    scenario has of the GPU.
    """
    budget, usd, deployment = (
        scenario.budget_usd_per_hour, candidate.usd_per_hour, candidate.deployment,
    )  # fmt: skip
    if budget is None or usd is None:
        return None
    replica, prediction = deployment.layout.gpus_per_replica, candidate.prediction
    most = next(each.max_gpus for each in scenario.gpus if each.gpu == deployment.gpu)
    is_affordable = usd * (1 + replica / prediction.num_gpus_billed) <= budget
    is_bound = is_affordable and prediction.num_gpus + replica > most
    used = {"usd_per_hour": budget, "spent_fraction": usd / budget}
    return used | {"is_bound_by_at_most": is_bound}


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
    price, usd, stopped, cold = scaling.usd_per_gpu_hour, dict[str, float](), None, 0.0
    if price is not None:
        usd[BILLING_FIXED] = price * scaling.fixed_gpu_hours / days
        usd[BILLING_AUTOSCALED] = price * scaling.count_paid_hours(scaling.gpu_hours) / days
        if (hours := scaling.stopped_gpu_hours) is not None and scaling.idle_share < 1:
            stopped = price * scaling.count_paid_hours(hours) / days
    if instead.serverless:
        paid, cold = price_serverless(instead.serverless, scaling)
        usd["serverless"] = paid / days
    if instead.api:
        usd[BILLING_API] = requests * price_api_request(instead.api, scenario.workload)
    return BillingComparison(usd, requests, cold, stopped)


def price_serverless(paid: ServerlessEntry, scaling: AutoscalingPlan) -> tuple[float, float]:
    """Return the USD of the hours, and the fraction of the quietest one's requests that wait for a start.

    If one replica suffices and none is kept warm, requests arrive
    at random at rate l, a start takes C, and the replica stays for D: an answer and the idle time
    after it. From one start to the next C + e^(lD) / l seconds pass (a busy period of M/G/inf and
    the idle time 1 / l), of which all but 1 / l are paid. Of l C + e^(lD) requests, 1 + l C find no
    running replica.
    """
    rates, start = np.array(scaling.rates), paid.cold_start or scaling.lead_s
    assert scaling.max_load_replica.performance is not None
    stay = scaling.max_load_replica.performance.get("e2e", "mean").mid + paid.idle_seconds
    cycle = rates * start + np.exp(np.minimum(rates * stay, 700.0))
    needed = np.ceil(rates / scaling.max_replica_rps - 1e-9)
    single = needed <= 1
    running = np.maximum(np.where(single, 1 - 1 / cycle, needed), paid.warm_replicas)
    started = np.maximum(np.diff(needed, prepend=needed[-1]), 0)[~single].sum() * start
    seconds = running.sum() * 3600 + (started if paid.warm_replicas < needed.max() else 0.0)
    is_cold = single & (rates > 0) & (paid.warm_replicas == 0)
    waits = np.where(is_cold, (1 + rates * start) / cycle, 0.0)
    gpus = scaling.deployment.layout.gpus_per_replica
    return float(seconds * gpus * paid.usd_per_gpu_second), float(waits.max())
