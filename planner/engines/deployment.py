"""Deployments: a model on GPUs with its parallel layout, engine, arguments and speculation."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil
from typing import Any, Self

from planner.core.errors import PlannerError
from planner.core.versions import Version
from planner.engines.engine import Engine, get_engine
from planner.engines.engine_args import EngineArgs, resolve_engine_args
from planner.engines.layout import ParallelLayout, SpeculationConfig
from planner.hardware import gpus
from planner.hardware.gpus import Gpu
from planner.models import registry
from planner.models.architecture import WeightTensor
from planner.models.registry import Model

TEXT_ONLY_SINCE_0_10_1 = ("qwen2_5_vl", "qwen3_vl", "llama4", "mistral3")
"""Prefixes of `model_type` whose vision tower vLLM can leave out since 0.10.1 (pull 22299)."""


@lru_cache(maxsize=4096)
def choose_machines(
    replicas: int, gpus_per_replica: int, sold_in: tuple[int, ...]
) -> tuple[int, ...]:
    """Choose the machines to rent for all replicas; return the GPUs of each.

    All have one of the sizes `sold_in`, as nobody runs a service on a mixture: the size that leaves
    the fewest GPUs in total, then the fewest machines. A replica lies in one machine or, if none is
    large enough, evenly on as few as possible, which it shares with no other replica.
    """
    sizes = sorted(sold_in)
    if gpus_per_replica > sizes[-1]:
        count = ceil(gpus_per_replica / sizes[-1])
        return (next(size for size in sizes if size * count >= gpus_per_replica),) * (
            replicas * count
        )
    counts = {
        size: ceil(replicas / (size // gpus_per_replica))
        for size in sizes
        if size >= gpus_per_replica
    }
    size = min(counts, key=lambda size: (counts[size] * size, counts[size]))
    return (size,) * counts[size]


@dataclass(frozen=True)
class Deployment:
    """Everything that decides memory and latency of a replica; created by `deploy_on`."""

    model: Model
    gpu: Gpu
    layout: ParallelLayout
    engine: Engine
    args: EngineArgs
    speculation: SpeculationConfig | None
    gpus_per_node: int
    link_bandwidth: float  # bytes/s per direction per GPU inside a node
    gpu_total_bytes: int  # bytes per GPU as the driver reports
    gpu_free_bytes: int | None = None  # bytes free at start, if unexplained bytes are in use
    other_tenants_bytes: int = 0  # bytes per GPU that other processes hold
    # (term, bytes to add) of the memory plan, from a startup log
    memory_calibration: tuple[tuple[str, float], ...] = ()
    spare_replicas: int = 0  # beside those of the layout: paid, idle until one of these fails
    machine_sizes: tuple[int, ...] = ()  # GPUs of rentable machines; empty: any number
    first_gpu: int = 0  # of a machine that it shares; its ports begin as many further on

    @property
    def served_name(self) -> str:
        """The name that clients ask for, the first one if it has several."""
        given: Any = dict(self.args.options).get("served_model_name")
        return str(given[0] if isinstance(given, tuple) else given or self.model.served_name)

    @property
    def num_gpus(self) -> int:
        """GPUs of all replicas, including spares."""
        return self.layout.gpus_per_replica * self.num_replicas

    @property
    def num_replicas(self) -> int:
        """Replicas that run: those that the workload needs, and spares."""
        return self.layout.replicas + self.spare_replicas

    @property
    def machines(self) -> tuple[int, ...]:
        """GPUs of each rented machine; empty if GPUs are rented in any number."""
        if not self.machine_sizes:
            return ()
        return choose_machines(self.num_replicas, self.layout.gpus_per_replica, self.machine_sizes)

    @property
    def returnable_machines(self) -> tuple[int, ...]:
        """GPUs of each machine if one replica can be given back alone, where these are others."""
        if not self.machine_sizes:
            return ()
        one = choose_machines(1, self.layout.gpus_per_replica, self.machine_sizes)
        machines = one * self.num_replicas
        return machines if sum(machines) == sum(self.machines) and machines != self.machines else ()

    @property
    def num_gpus_billed(self) -> int:
        """GPUs that are paid, with idle ones if only whole machines are for rent."""
        return sum(self.machines) or self.num_gpus

    @property
    def num_engine_instances(self) -> int:
        """Schedulers that share the requests: data-parallel ranks of all replicas."""
        return self.layout.replicas * self.layout.dp

    @property
    def ranks_per_clock(self) -> int:
        """Schedulers whose steps start and end together: data-parallel ranks that share experts.

        Where the engine aligns their prompts, all do the same at a time, and one stands for them.
        """
        is_shared = self.model.architecture.is_moe and not self.engine.facts.aligns_prefills
        return self.layout.dp if is_shared else 1

    @property
    def num_slots(self) -> int:
        """Requests that run at once in all engines at most."""
        return self.args.max_num_seqs * self.num_engine_instances

    @property
    def num_clocks(self) -> int:
        """Engines whose steps are independent: ranks on one clock count as one."""
        return self.num_engine_instances // self.ranks_per_clock

    @property
    def num_draft_tokens(self) -> int:
        """Drafted tokens per sequence and step; 0 without speculation."""
        return self.speculation.num_speculative_tokens if self.speculation else 0

    @property
    def loaded_vision_towers(self) -> tuple[WeightTensor, ...]:
        """Loaded vision encoders; vLLM skips them if prompts may hold no media.

        From 0.15 on for all models, and before that for some: vllm pulls 22299 and 32757;
        docs/configuration/conserving_memory.md.
        """
        architecture = self.model.architecture
        if self.takes_vision or self.engine.name != "vllm":
            return architecture.vision_towers
        skips_early = architecture.model_type.startswith(TEXT_ONLY_SINCE_0_10_1)
        first = Version.parse("0.10.1" if skips_early else "0.15")
        return () if self.engine.release >= first else architecture.vision_towers

    @property
    def takes_vision(self) -> bool:
        """Whether a prompt may hold images or videos."""
        return any(self.media_limits.get(kind, 1) for kind in ("image", "video"))

    @property
    def media_limits(self) -> dict[str, int]:
        """How many media of a kind a prompt may hold, where `limit_mm_per_prompt` says it."""
        limits = (self.args.limit_mm_per_prompt or "").split(",")
        pairs = (limit.partition("=") for limit in limits if limit)
        return {kind: int(limit) for kind, _, limit in pairs}

    def with_args(self, **args: Any) -> Self:
        """Copy the deployment with other engine arguments."""
        return replace(self, args=replace(self.args, **args))

    def with_replicas(self, replicas: int) -> Self:
        """Copy the deployment with another number of replicas."""
        if self.layout.replicas == replicas:
            return self
        return replace(self, layout=replace(self.layout, replicas=replicas))

    def __str__(self) -> str:
        return (
            f"{self.model.name} on {self.layout.num_gpus} x {self.gpu.name}, {self.layout},"
            f" {self.engine}"
        )


def deploy_on(
    model: str | Model, gpu: str | Gpu, *, tp: int = 1, pp: int = 1, dp: int = 1, ep: int = 1,
    dcp: int = 1,
    replicas: int = 1, engine: str | Engine = "vllm", engine_version: str | None = None,
    speculation: SpeculationConfig | None = None, interconnect: str | None = None,
    gpus_per_node: int | None = None,
    gpu_total: int | None = None, gpu_free: int | None = None, other_tenants: int = 0,
    memory_calibration: Mapping[str, float] | None = None, quantization: str | None = None,
    dtype: str | None = None, spare_replicas: int = 0, sold_in: tuple[int, ...] = (),
    **engine_args: Any,
) -> Deployment:  # fmt: skip
    """Create a deployment from names or objects.

    `engine_args` are fields of `EngineArgs`; missing or None: the engine's default. A `model`
    object keeps its own quantization and dtype.
    """
    gpu = gpus.get_gpu(gpu) if isinstance(gpu, str) else gpu
    if isinstance(model, str):
        model = registry.load_model(model, quantization=quantization, dtype=dtype)
    engine = engine if isinstance(engine, Engine) else get_engine(engine, engine_version)
    layout = ParallelLayout(tp, pp, dp, ep, dcp, replicas)
    # vLLM config/speculative.py of 0.20.2 and 0.33.0: verify_equal_vocab_size_if_draft_model
    if (
        engine.name == "vllm" and speculation and (draft := speculation.draft)
        and draft.architecture.vocab != model.architecture.vocab
        and not (speculation.any_vocabulary and engine.release >= Version(0, 26))
    ):  # fmt: skip
        raise PlannerError(
            f"the draft {draft.name} has a vocabulary of {draft.architecture.vocab:,} and {model.name} one"
            f" of {model.architecture.vocab:,}: {engine} refuses that; accepted is a draft of the same"
            f" vocabulary{', or use_heterogeneous_vocab' * (engine.release >= Version(0, 26))}"
        )
    args = resolve_engine_args(engine_args, engine, gpu, model, layout, speculation)
    link = gpus.resolve_link_bandwidth(gpu, interconnect) if interconnect else gpu.link_bandwidth
    return Deployment(
        model, gpu, layout, engine, args, speculation, gpus_per_node or gpu.gpus_per_node, link,
        gpu_total or gpu.memory_bytes, gpu_free, other_tenants,
        tuple(sorted((memory_calibration or {}).items())),
        spare_replicas, sold_in,
    )  # fmt: skip


@lru_cache(maxsize=4096)
def get_default_memory_utilization(deployment: Deployment) -> float:
    """Get the share of a GPU's memory that the engine takes by itself."""
    args = {
        name: getattr(deployment.args, name) for name in ("max_num_batched_tokens", "max_model_len")
    }
    return resolve_engine_args(
        args, deployment.engine, deployment.gpu, deployment.model, deployment.layout,
        deployment.speculation,
    ).gpu_memory_utilization  # fmt: skip
