"""What a pool's workers cost beside the step costs of engines that do both, prefill and decode, in every step.

Step costs are fitted to serving where prompts interrupt decoding, and share with it what that costs
the host and the kernels. A worker of a pool does one of both. `catalogs/pools.yaml` says what that
changes, fitted by `make pools`.
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
    """An entry of `catalogs/pools.yaml`, whose head explains its fields."""

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
"""An engine whose pools nobody measured: its step costs as they are, one step until the first token, wide intervals."""


@cache
def _load_pool_costs() -> dict[str, WorkerPoolCosts]:
    pool_costs = load_catalog("pools.yaml", WorkerPoolCosts)
    for name, costs in pool_costs.items():
        check_coefficient_names(
            costs.prefill.keys() | costs.decode.keys(), f"pools.yaml, entry {name}"
        )
    return pool_costs


def get_pool_entry_name(engine: Engine) -> str:
    """The name of the entry that holds for `engine`."""
    return select_entry_for_release(engine.name, engine, _load_pool_costs())


def get_pool_costs(engine: Engine) -> WorkerPoolCosts:
    """What the catalog knows of pools under `engine`."""
    return _load_pool_costs().get(get_pool_entry_name(engine), UNMEASURED_POOL_COSTS)


def get_pool_coefficients(
    deployment: Deployment,
    phase: Literal["prefill", "decode"],
    costs: WorkerPoolCosts | None = None,
) -> StepCoefficients:
    """The coefficients of a worker that only computes prompts, or only decodes; `costs` replaces the catalog's."""
    costs = costs or get_pool_costs(deployment.engine)
    coefficients = get_deployment_coefficients(
        deployment, layouts=False
    ).coefficients  # a layout's own pace is that of mixed steps
    given = dict(getattr(costs, phase))
    if phase == "prefill" and deployment.layout.dp > 1:
        given["pace"] = given.get("pace", 1.0) * costs.attention_dp
    pace = coefficients.pace * given.get(
        "pace", 1.0
    )  # of the whole step: what is given in seconds must not be scaled by it
    values = {
        name: (
            value / pace if name in COEFFICIENTS_IN_SECONDS else value * getattr(coefficients, name)
        )
        for name, value in given.items()
    }
    return replace(coefficients, **values)


def get_pool_sigmas(deployment: Deployment, tpot: float, ttft: float) -> tuple[float, float]:
    """Standard deviations of ln(measured / predicted) TPOT and TTFT of pools of `deployment`.

    Those of curves left out of the fit; a GPU or a model whose pools nobody measured has at least
    the step cost's own, `tpot` and `ttft`.
    """
    costs = get_pool_costs(deployment.engine)
    if (
        deployment.gpu.name in costs.gpus
        and deployment.model.architecture.model_type in costs.models
    ):
        return costs.sigma_tpot, costs.sigma_ttft
    return max(costs.sigma_tpot, tpot), max(costs.sigma_ttft, ttft)
