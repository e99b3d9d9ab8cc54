"""Seconds from starting a vLLM server to its first answer, phase by phase, from `catalogs/start_up.yaml`."""

import math
from dataclasses import dataclass
from functools import cache

from planner.core.catalog import load_catalog
from planner.core.errors import make_unknown_name_error
from planner.core.intervals import Interval
from planner.core.units import GB
from planner.engines.deployment import Deployment
from planner.engines.engine_args import list_cudagraph_sizes
from planner.memory.runtime_overhead import FittedConstant, get_constant
from planner.memory.weights import compute_stage_bytes

STARTUP_CATALOG = "start_up.yaml"
DEFAULT_STORAGE = "nvme"
"""What weights are read from unless said otherwise."""
DEFAULT_MAX_STARTUP_S = 1800.0
"""How long a start is taken to last at most where none is predicted."""


@cache
def _list_storages() -> tuple[str, ...]:
    return tuple(
        title.partition(" ")[2]
        for title in load_catalog(STARTUP_CATALOG, FittedConstant)
        if title.startswith("storage ")
    )


def validate_storage(name: str) -> str:
    """`name`, where the catalog knows its rate; else `PlannerError`."""
    if name not in _list_storages():
        raise make_unknown_name_error(name, _list_storages(), "storage")
    return name


@dataclass(frozen=True)
class StartupTime:
    """Seconds of each phase, one after the other; `cached` is what stands for `compilation` once it was done before.

    `machine` is how many times as long another host's processors may take for all but the weights.
    """

    process: Interval
    weights: Interval
    compilation: Interval
    cached_compilation: Interval
    profiling: Interval
    graphs: Interval
    ready: Interval
    machine_factor: Interval

    @property
    def total(self) -> Interval:
        """All of them, nothing cached."""
        return self._sum_phases(self.compilation)

    @property
    def total_with_cache(self) -> Interval:
        """All of them, compiled code found in a cache."""
        return self._sum_phases(self.cached_compilation)

    def _sum_phases(self, compilation: Interval) -> Interval:
        here = self.process + compilation + self.profiling + self.graphs + self.ready
        return here + (self.machine_factor - 1.0) * here.mid + self.weights

    def __str__(self) -> str:
        parts = {"process": self.process, "weights": self.weights, "compilation": self.compilation,
                 "profiling": self.profiling, "CUDA graphs": self.graphs, "server": self.ready}  # fmt: skip
        listed = ", ".join(f"{name} {phase.mid:.0f}" for name, phase in parts.items() if phase.mid)
        return (
            f"{self.total:.0f} s ({listed}), {self.total_with_cache:.0f} s with compiled code"
            " cached"
        )


def estimate_startup(deployment: Deployment, storage: str = DEFAULT_STORAGE) -> StartupTime | None:
    """How long one replica takes to start, its checkpoint read from `storage`; None for engines other than vLLM.

    Every rank copies its own share at the loader's rate; the storage, which delivers each tensor
    once, may be slower.
    """
    validate_storage(storage)
    if deployment.engine.name != "vllm":
        return None
    model, layout, args = deployment.model, deployment.layout, deployment.args

    def of(items: float, *names: str) -> Interval:
        """The product of `items` and the constants `names`."""
        fitted_constants = [
            get_constant(name, deployment.engine.release, STARTUP_CATALOG) for name in names
        ]
        values, sigmas = zip(
            *(
                (fitted_constant.value, fitted_constant.sigma)
                for fitted_constant in fitted_constants
                if fitted_constant
            ),
            strict=True,
        )
        return Interval.from_lognormal(items * math.prod(values), math.hypot(*sigmas))

    def read(size: float, name: str) -> Interval:
        return of(1.0, name).map_monotone(lambda rate: size / GB / rate)

    held = compute_stage_bytes(deployment.with_args(max_loras=0))
    whole = sum(held) * layout.tp * (layout.dp if layout.ep > 1 else 1)
    layers = 0 if args.enforce_eager else math.ceil(len(model.architecture.layers) / layout.pp)
    experts = model.architecture.is_moe
    compilation = ["compile-layer", *["compile-experts"] * experts]
    compilation += ["compile-quantized"] * (model.quantization.activation != "bf16")
    sizes = len(
        list_cudagraph_sizes(deployment.engine, args, deployment.gpu, deployment.num_draft_tokens)
    )
    return StartupTime(
        process=of(1.0, "process") + (of(1.0, "workers") if layout.gpus_per_replica > 1 else 0.0),
        weights=max(
            read(max(held), "loader"),
            read(whole, f"storage {storage}"),
            key=lambda phase: phase.mid,
        ),
        compilation=of(layers, *compilation),
        cached_compilation=of(layers, *compilation, "compile-cached"),
        profiling=of(1.0, "profile"),
        graphs=of(layers * sizes / 1e3, "capture-layer", *["capture-experts"] * experts),
        ready=of(1.0, "ready"),
        machine_factor=of(1.0, "machine"),
    )
