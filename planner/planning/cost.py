"""What a deployment costs: USD per hour, per million output tokens, per request."""

from __future__ import annotations

import math
from dataclasses import dataclass

from planner.core.quantities import Interval, PlannerError

HOURS_PER_MONTH = 730.5
"""Hours in an average month: 365.25 / 12 days."""


@dataclass(frozen=True)
class Cost:
    """Running cost of a whole deployment in USD; the intervals are those of the predicted throughput."""

    usd_per_hour: float
    usd_per_million_output_tokens: Interval
    usd_per_request: Interval
    utilisation: Interval
    """Share of the throughput that the deployment could reach which the traffic uses (1 = saturated)."""

    @property
    def usd_per_month(self) -> float:
        """At the same price around the clock."""
        return self.usd_per_hour * HOURS_PER_MONTH

    def __str__(self) -> str:
        return (
            f"${self.usd_per_hour:,.2f} per hour, ${self.usd_per_million_output_tokens:.2f} per million output tokens"
            f" at {self.utilisation:.0%} utilisation"
        )


def cost(
    usd_per_gpu_hour: float,
    gpus: int,
    output_tps: Interval,
    request_tps: Interval,
    capacity_tps: Interval | None = None,
) -> Cost:
    """Cost of `gpus` at a price, serving `output_tps` tokens/s and `request_tps` requests/s over all replicas.

    `capacity_tps`: output tokens/s when saturated; without it the deployment counts as fully used.
    """
    if usd_per_gpu_hour < 0 or gpus < 1:
        raise PlannerError(f"cost needs a price of 0 or more and at least one GPU, got {usd_per_gpu_hour} and {gpus}")
    usd_per_hour = usd_per_gpu_hour * gpus
    used = Interval.exactly(1.0) if capacity_tps is None else capacity_tps.map(lambda tps: _per(output_tps.mid, tps))
    per_token = output_tps.map(lambda tps: _per(usd_per_hour / 3600, tps))
    return Cost(usd_per_hour, per_token * 1e6, request_tps.map(lambda rate: _per(usd_per_hour / 3600, rate)), used)


def _per(value: float, rate: float) -> float:
    return value / rate if rate > 0 else math.inf
