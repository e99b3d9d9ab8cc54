"""Estimate mean board power: what a GPU moves and multiplies per second, times the energy of each.

Watts = idle + energy per byte x bytes/s + sqrt(board limit x energy per FLOP x FLOP/s), the last
for dense and for expert kernels. Energies by GPU or architecture are in `catalogs/power.yaml`. The
root is empirical: a matrix unit that mostly waits, or is padded, draws more than its share.
Whatever slows steps lowers both rates, so the step rate tells if a GPU waits for its host or for
other GPUs.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import TypeVar

import numpy as np
from pydantic import NonNegativeFloat, PositiveFloat

from planner.core.catalog import SourcedEntry, load_catalog
from planner.core.errors import PlannerError
from planner.core.intervals import Interval
from planner.engines.deployment import Deployment
from planner.hardware.gpus import Gpu, list_gpus
from planner.latency.step_model import build_step_model, count_attention_pairs
from planner.latency.step_work import count_step_work
from planner.workload.workload import Workload

POWER_CATALOG = "power.yaml"
BOARD_LIMIT_FRACTION, BOARD_LIMIT_NORM_ORDER = 0.98, 8
"""Fraction of the board limit that a GPU settles at, and how sharply (order of the norm).

403 runs reach at most 0.99.
"""
EXPERT_TILE_ROWS = 16, 64
"""Rows to which a fused-experts kernel pads each expert.

The first figure is for fewer tokens than experts, the second otherwise or with block-quantized
weights (vLLM 0.11.1, fused_moe.get_default_config).
"""
FORMAT_ENERGY_FACTORS = {"fp8": 0.6, "int8": 0.6, "fp4": 0.36}
"""Energy of a FLOP relative to 16 bits.

An H200 draws the same power in FP8 and BF16, at 1.68 times the throughput (serialalice.pt,
2026-06). FP4 is extrapolated by the same factor. Block-scaled FP8 saves nothing in the fitted
runs.
"""
PREFILL_ONLY_SIGMA = 0.15
"""Standard deviation of ln(measured / predicted) that prompts-only loads add: none was measured."""


NumericT = TypeVar("NumericT", float, np.ndarray)


class GpuEnergy(SourcedEntry):
    """One catalog entry: of a GPU, an architecture, or `prior`."""

    # fraction of the board limit that is drawn with a model loaded and no work
    idle: PositiveFloat
    byte_pj: PositiveFloat  # pJ per byte read from memory
    flop_pj: PositiveFloat  # pJ per FLOP
    # 80% range of measured / predicted: 1 / (1 + first) to 1 + second
    spread: tuple[NonNegativeFloat, NonNegativeFloat]


@dataclass(frozen=True)
class GpuActivity:
    """Mean activity of one GPU per second."""

    bytes: float
    # in 16 bits, of dense kernels and attention, and of experts including the padding of tiles
    flops: tuple[float, float]
    busy: float  # fraction of time in which steps run, 0 to 1
    prompts: float  # fraction of prompt tokens among those computed


@cache
def load_energies() -> Mapping[str, GpuEnergy]:
    """Load the catalog by name.

    Raises `PlannerError` if `prior` is missing, or if a name is neither a GPU nor an architecture.
    """
    energies = load_catalog(POWER_CATALOG, GpuEnergy)
    if (
        odd := energies.keys()
        - {"prior"}
        - {name for gpu in list_gpus() for name in (gpu.name, *_list_architecture_keys(gpu))}
    ):
        raise PlannerError(
            f"{POWER_CATALOG}, entry {min(odd)}: no GPU and no architecture in gpus.yaml has this"
            " name"
        )
    if "prior" not in energies:
        raise PlannerError(
            f"{POWER_CATALOG}: the entry prior is missing, which GPUs that nobody measured use"
        )
    return energies


def _list_architecture_keys(gpu: Gpu) -> tuple[str, str]:
    """Return its architecture with and without the compute capability.

    The compute capability tells boards with HBM from those with GDDR.
    """
    return f"{gpu.architecture} {gpu.compute_capability}", gpu.architecture


def get_gpu_energy(gpu: Gpu) -> GpuEnergy:
    """Return the energies of `gpu`: its own entry, its architecture's, or the prior."""
    energies = load_energies()
    names = (gpu.name, *_list_architecture_keys(gpu), "prior")
    return next(energies[name] for name in names if name in energies)


def estimate_gpu_activity(
    deployment: Deployment,
    load: Workload,
    request_tps: float,
    decode_batch: float,
    *,
    prefills: bool = True,
    decodes: bool = True,
) -> GpuActivity:
    """Estimate the activity of a GPU while `deployment` serves `request_tps` requests/s of `load`.

    `decode_batch` is the number of sequences decoding in one engine while it runs. A pool of a
    disaggregated deployment only `prefills` or only `decodes`.
    """
    w, step, layout = (
        count_step_work(deployment),
        build_step_model(deployment, load),
        deployment.layout,
    )
    served = request_tps / deployment.num_engine_instances
    computed = (load.prompt.mean - load.mean_cached_tokens) if prefills else 0.0
    # sequences x steps
    decoded = served * max(load.output.mean - 1, 0) / step.tokens_per_step if decodes else 0.0
    prompts, chunks = served * computed, served * math.ceil(computed / step.max_tokens)
    # fraction of prompt chunks without a decoding sequence in their step
    alone = math.exp(-decode_batch) if decoded else 1.0
    steps = max(
        decoded / max(decode_batch, 1.0) + chunks * alone, (prompts + decoded) / step.max_tokens
    )
    if steps == 0:
        return GpuActivity(0.0, (0.0, 0.0), 0.0, 0.0)
    rows, mixed = decoded * (1 + step.num_draft_tokens) / steps, -math.expm1(-chunks / steps)
    # steps without and with prompts
    kinds = (1 - mixed, rows), (mixed, rows + prompts / steps / max(mixed, 1e-12))

    in_blocks = deployment.model.quantization.method == "fp8_block"
    read, dense, experts = w.head.bytes, (rows + served / steps) * w.head.flops, 0.0
    for share, tokens in kinds:
        for m in w.matmuls:
            flops = m.flops * (1.0 if in_blocks else FORMAT_ENERGY_FACTORS.get(m.dtype, 1.0))
            read += share * m.bytes
            dense += share * tokens * flops
        for e in w.experts:
            routed = tokens * layout.dp
            touched = e.held * (1 - (1 - e.active / e.total) ** routed)
            tile = (
                EXPERT_TILE_ROWS[0] if routed <= e.total and not in_blocks else EXPERT_TILE_ROWS[1]
            )
            padded = max(touched * tile, routed * e.active / e.ranks + touched * tile / 2)
            read += share * e.layers * touched * e.bytes
            experts += (
                share
                * e.layers
                * padded
                * e.flops
                * (1.0 if in_blocks else FORMAT_ENERGY_FACTORS.get(e.dtype, 1.0))
            )
    read, dense, experts = (steps * each for each in (read, dense, experts))
    read += decoded * w.state_bytes
    for c in w.contexts:
        seen = min(load.mean_decode_context, c.window or math.inf)
        read += decoded * seen * c.bytes
        dense += decoded * (1 + step.num_draft_tokens) * seen * c.query_flops
        dense += (
            served
            * float(count_attention_pairs(computed, load.mean_cached_tokens, c.window))
            * c.prefill_flops
        )

    seconds = step.fixed_s + float(step.interpolate_rows_s(rows)) + mixed * step.prefill_step_s
    seconds += sum(share * float(step.interpolate_tokens_s(tokens)) for share, tokens in kinds)
    seconds += decoded / steps * float(step.estimate_decode_attention_s(load.mean_decode_context))
    seconds += (
        served / steps * float(step.estimate_prefill_attention_s(computed, load.mean_cached_tokens))
    )
    return GpuActivity(
        bytes=read / layout.pp,
        flops=(dense / layout.pp, experts / layout.pp),
        busy=min(steps * seconds / layout.pp, 1.0),
        prompts=prompts / (prompts + decoded * (1 + step.num_draft_tokens)),
    )


def compute_power_terms(activity: GpuActivity, limit: float) -> tuple[float, float, float]:
    """Return the fractions of a board's limit in W that unit energies would draw.

    They are for an idle fraction of 1, 1 pJ per byte and 1 pJ per FLOP.
    """
    roots = sum(math.sqrt(activity.busy * flops * 1e-12 / limit) for flops in activity.flops)
    return 1.0, activity.bytes * 1e-12 / limit, roots


def apply_board_limit(share: NumericT) -> NumericT:
    """Return the fraction of the limit that a board draws which would draw `share` without one."""
    return (share**-BOARD_LIMIT_NORM_ORDER + BOARD_LIMIT_FRACTION**-BOARD_LIMIT_NORM_ORDER) ** (
        -1 / BOARD_LIMIT_NORM_ORDER
    )


def compute_board_watts(activity: GpuActivity, limit: float, energy: GpuEnergy) -> float:
    """Return the mean W of a board with a limit of `limit` W."""
    prices = energy.idle, energy.byte_pj, math.sqrt(energy.flop_pj)
    return float(
        limit
        * apply_board_limit(
            sum(x * y for x, y in zip(compute_power_terms(activity, limit), prices, strict=True))
        )
    )


def estimate_board_power(gpu: Gpu, activity: GpuActivity) -> Interval:
    """Estimate the mean W of one `gpu` with its 80% interval, within the board's limit."""
    energy = get_gpu_energy(gpu)
    mid = compute_board_watts(activity, gpu.board_limit_w, energy)
    lo, hi = (math.hypot(side, PREFILL_ONLY_SIGMA * activity.prompts**4) for side in energy.spread)
    return Interval(mid / (1 + lo), mid, max(min(mid * (1 + hi), gpu.board_limit_w), mid))


def compute_joules_per_token(power: Interval, gpus: int, output_tps: Interval) -> Interval | None:
    """Return J per output token of `gpus` boards, None without tokens."""
    if not output_tps.mid > 0:
        return None
    mid = power.mid * gpus / output_tps.mid
    less = math.hypot(math.log(power.mid / power.lo), math.log(output_tps.hi / output_tps.mid))
    more = math.hypot(math.log(power.hi / power.mid), math.log(output_tps.mid / output_tps.lo))
    return Interval(mid * math.exp(-less), mid, mid * math.exp(more))
