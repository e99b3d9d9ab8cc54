"""Adapt step costs to workers of a disaggregated pool, which only prefill or only decode.

Step costs are fitted to engines in which prompts interrupt decoding, and include what that costs
the host and the kernels. `catalogs/pools.yaml` says what changes in a pool, fitted by
`make pools`.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from planner.core.catalog import SourcedEntry, load_catalog
from planner.engines.coefficients import StepCoefficients
from planner.engines.deployment import Deployment
from planner.engines.engine import Engine, select_entry_for_release
from planner.latency.coefficient_lookup import check_coefficient_names, get_deployment_coefficients

COEFFICIENTS_IN_SECONDS = ("row_s", "request_s")
"""Coefficients that `catalogs/pools.yaml` gives in seconds; all others are factors."""


class WorkerPoolCosts(SourcedEntry):
    """An entry of `catalogs/pools.yaml`, whose header explains its fields."""

    prefill: Mapping[str, PositiveFloat] = Field(default_factory=dict)
    decode: Mapping[str, PositiveFloat] = Field(default_factory=dict)
    attention_dp: PositiveFloat = 1.0
    handover: NonNegativeFloat = 1.0
    prefill_tokens: PositiveInt | None = None
    sigma_tpot: PositiveFloat
    sigma_ttft: PositiveFloat
    gpus: tuple[str, ...] = ()
    models: tuple[str, ...] = ()
    points: int = 0


UNMEASURED_POOL_COSTS = WorkerPoolCosts(
    sigma_tpot=0.25, sigma_ttft=0.6, source="no pools of this engine were measured", date="2026-11"
)
"""Costs of an engine whose pools were not measured.

Its step costs are unchanged, the first token takes one step, and intervals are wide.
"""


@cache
def _load_pool_costs() -> dict[str, WorkerPoolCosts]:
    pool_costs = load_catalog("pools.yaml", WorkerPoolCosts)
    for name, costs in pool_costs.items():
        check_coefficient_names(
            costs.prefill.keys() | costs.decode.keys(), f"pools.yaml, entry {name}"
        )
    return pool_costs


def get_pool_entry_name(engine: Engine) -> str:
    """Return the name of the entry that applies to `engine`."""
    return select_entry_for_release(engine.name, engine, _load_pool_costs())


def get_pool_costs(engine: Engine) -> WorkerPoolCosts:
    """Return the catalog's costs of pools under `engine`."""
    return _load_pool_costs().get(get_pool_entry_name(engine), UNMEASURED_POOL_COSTS)


def get_pool_coefficients(
    deployment: Deployment,
    phase: Literal["prefill", "decode"],
    costs: WorkerPoolCosts | None = None,
) -> StepCoefficients:
    """Return the coefficients of a worker that only prefills or only decodes.

    `costs` replaces the catalog's.
    """
    costs = costs or get_pool_costs(deployment.engine)
    coefficients = get_deployment_coefficients(deployment).coefficients
    changes = dict(getattr(costs, phase))
    if phase == "prefill" and deployment.layout.dp > 1:
        changes["pace"] = changes.get("pace", 1.0) * costs.attention_dp
    # the pace scales the whole step, but not the coefficients in seconds
    pace = coefficients.pace * changes.get("pace", 1.0)
    values = {
        name: (
            value / pace if name in COEFFICIENTS_IN_SECONDS else value * getattr(coefficients, name)
        )
        for name, value in changes.items()
    }
    return replace(coefficients, **values)


def get_pool_sigmas(deployment: Deployment, tpot: float, ttft: float) -> tuple[float, float]:
    """Return standard deviations of ln(measured / predicted) TPOT and TTFT of pools.

    They are those of held-out curves. A GPU or a model whose pools were not measured has at least
    the step cost's own, `tpot` and `ttft`.
    """
    costs = get_pool_costs(deployment.engine)
    if (
        deployment.gpu.name in costs.gpus
        and deployment.model.architecture.model_type in costs.models
    ):
        return costs.sigma_tpot, costs.sigma_ttft
    return max(costs.sigma_tpot, tpot), max(costs.sigma_ttft, ttft)
