"""Estimate the startup of a vLLM server, phase by phase: `catalogs/start_up.yaml`."""

import math
from dataclasses import dataclass
from functools import cache

from planner.core.catalog import load_catalog
from planner.core.errors import make_unknown_name_error
from planner.core.intervals import Interval
from planner.core.units import GB
from planner.core.versions import Version
from planner.engines.deployment import Deployment
from planner.engines.engine_args import list_cudagraph_sizes
from planner.memory.runtime_overhead import FittedConstant, get_constant
from planner.memory.weights import compute_checkpoint_bytes, compute_read_bytes

STARTUP_CATALOG = "start_up.yaml"
DEFAULT_STORAGE = "nvme"
"""Default storage of the weights."""
DEFAULT_MAX_STARTUP_S = 1800.0
"""Longest startup that is assumed if none is predicted."""


@cache
def _list_storages() -> tuple[str, ...]:
    return tuple(
        title.partition(" ")[2]
        for title in load_catalog(STARTUP_CATALOG, FittedConstant)
        if title.startswith("storage ")
    )


def validate_storage(name: str) -> str:
    """Return `name` if the catalog knows its rate; raise `PlannerError` otherwise."""
    if name not in _list_storages():
        raise make_unknown_name_error(name, _list_storages(), "storage")
    return name


def get_storage_rate(name: str, release: Version) -> float:
    """Return the bytes/s at which files are read from a storage; `PlannerError` if not known."""
    found = get_constant(f"storage {validate_storage(name)}", release, STARTUP_CATALOG)
    assert found is not None
    return found.value * GB


@dataclass(frozen=True)
class StartupTime:
    """Seconds of each phase, one after the other.

    `cached_compilation` replaces `compilation` with a warm compile cache. `machine_factor` is how
    many times as long another host's processors may take for all phases but the weights.
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
        """Whole startup with a cold compile cache."""
        return self._sum_phases(self.compilation)

    @property
    def total_with_cache(self) -> Interval:
        """Whole startup with a warm compile cache."""
        return self._sum_phases(self.cached_compilation)

    def _sum_phases(self, compilation: Interval) -> Interval:
        on_host = self.process + compilation + self.profiling + self.graphs + self.ready
        return on_host + (self.machine_factor - 1.0) * on_host.mid + self.weights

    def __str__(self) -> str:
        parts = {
            "process": self.process,
            "weights": self.weights,
            "compilation": self.compilation,
            "profiling": self.profiling,
            "CUDA graphs": self.graphs,
            "server": self.ready,
        }
        listed = ", ".join(f"{name} {phase.mid:.0f}" for name, phase in parts.items() if phase.mid)
        return (
            f"{self.total:.0f} s ({listed}), {self.total_with_cache:.0f} s with compiled code"
            " cached"
        )


def estimate_startup(deployment: Deployment, storage: str = DEFAULT_STORAGE) -> StartupTime | None:
    """Estimate the startup of one replica that reads its checkpoint from `storage`.

    Every rank copies its own shard at the loader's rate; the storage, which reads each tensor once,
    may be slower. Returns None for engines other than vLLM.
    """
    validate_storage(storage)
    if not deployment.engine.facts.own_constants:
        return None
    model, layout, args = deployment.model, deployment.layout, deployment.args

    def of(items: float, *names: str) -> Interval:
        """Return the product of `items` and the constants `names`."""
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
            read(max(compute_read_bytes(deployment)), "loader"),
            read(compute_checkpoint_bytes(deployment), f"storage {storage}"),
            key=lambda phase: phase.mid,
        ),
        compilation=of(layers, *compilation),
        cached_compilation=of(layers, *compilation, "compile-cached"),
        profiling=of(1.0, "profile"),
        graphs=of(layers * sizes / 1e3, "capture-layer", *["capture-experts"] * experts),
        ready=of(1.0, "ready"),
        machine_factor=of(1.0, "machine"),
    )
