"""Build the launch of a plan: program, arguments, environment, nodes, replicas, image and ports.

`templates/flags/ENGINE.j2` holds each engine's options, and the reason for each.
"""

import math
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import yaml
from pydantic import Field

from planner.core.catalog import SourcedEntry, StrictEntry, load_catalog
from planner.core.errors import PlannerError
from planner.core.templates import render_template
from planner.core.units import GIB
from planner.core.versions import Version
from planner.deploy.arguments import (
    SHELL,
    Argument,
    EnvVariable,
    ReplicaPort,
    SiblingFile,
    format_argument,
)
from planner.engines.cli_options import CliOptions, find_pooling_option, get_cli_options
from planner.engines.deployment import Deployment
from planner.engines.engine import (
    EnginePackaging,
    select_entry_for_release,
)
from planner.engines.engine_args import spell_option
from planner.engines.layout import SpeculationConfig
from planner.engines.speculation_methods import (
    explain_missing_draft,
    explain_unsupported_method,
    get_draft_method,
    normalize_method_name,
)
from planner.latency.startup_time import DEFAULT_STORAGE, StartupTime, estimate_startup
from planner.memory.memory_plan import explain_memory_utilization, get_memory_plan
from planner.models.registry import load_model, resolve_repository
from planner.planning.prediction import Prediction

DRAIN_TIMEOUT_S = 120
"""Seconds that running requests get to finish when the server stops."""
MASTER_PORT = 29501
"""Port on which the nodes of a replica rendezvous."""
KV_TRANSFER_PORTS = {"prefill": 5600, "decode": 5700}
"""First port for KV transfer handshakes by pool; each data-parallel rank has its own."""
BOOTSTRAP_PORT = 8998
"""SGLang's default port on which a node's first prefill worker is asked for KV caches."""
DECODE_PORT_OFFSET = 100
"""Offset of decode workers' ports, as prefill workers may run on the same node."""


class RdmaAccess(StrictEntry):
    """What a pod needs for RDMA between nodes."""

    resource: str
    environment: dict[str, str]


class AcceleratorKind(SourcedEntry):
    """One kind of `catalogs/devices.yaml`: how its GPUs are selected and requested."""

    visible: str
    resource: str
    groups: tuple[str, ...]
    compose: dict[str, Any]
    product: str | None = None
    rdma: RdmaAccess | None = None


class ModelFlagsEntry(SourcedEntry):
    """Why a model family needs remote code, and since when not: `catalogs/model_flags.yaml`."""

    remote_code: str
    until: dict[str, Version] = Field(default_factory=dict)


@dataclass(frozen=True)
class LaunchFlag:
    """One option of a launch, and the reason for it."""

    name: str
    words: tuple[Argument, ...]
    reason: str

    @property
    def value(self) -> str | None:
        """The value as text; None for an option without one."""
        return " ".join(map(format_argument, self.words)) if self.words else None

    @property
    def arguments(self) -> tuple[Argument, ...]:
        """The option as arguments; a value that begins with a dash is joined by `=`."""
        first = self.words[0][0] if self.words else ""
        tied = isinstance(first, str) and first.startswith("-")
        return ((f"{self.name}=", *self.words[0]),) if tied else ((self.name,), *self.words)

    def __str__(self) -> str:
        return " ".join(format_argument(word, SHELL) for word in self.arguments)


@dataclass(frozen=True)
class LaunchSpec:
    """The launch of one replica; all nodes but the first also get `worker_arguments`."""

    deployment: Deployment
    serving: EnginePackaging
    device: AcceleratorKind
    program: tuple[Argument, ...]
    flags: tuple[LaunchFlag, ...]
    worker_arguments: tuple[str, ...] = ()
    environment: Mapping[str, Argument] = field(default_factory=dict)
    config: str = ""  # the engine's own configuration file
    nodes: int = 1
    start_up: StartupTime | None = None
    note: str = ""
    drain_s: int = DRAIN_TIMEOUT_S
    role: str = ""  # "prefill" or "decode" for a worker of that pool

    @property
    def title(self) -> str:
        """The first line of its files."""
        deployment = self.deployment
        return (
            f"{deployment.model.served_name} on {deployment.layout} of {deployment.gpu.name},"
            f" {deployment.engine}"
        )

    @property
    def port(self) -> int:
        """The port of the first replica on a node."""
        return get_port(self.deployment, self.role)

    @property
    def gpus(self) -> int:
        """GPUs of one replica on one of its nodes."""
        return self.deployment.layout.gpus_per_replica // self.nodes

    @property
    def replicas_per_node(self) -> int:
        """Replicas that fit the largest rented machine; 1 if a replica spans nodes."""
        room = max(self.deployment.machines, default=self.deployment.gpus_per_node) // self.gpus
        return max(min(room, self.deployment.num_replicas), 1)

    @property
    def image(self) -> str | None:
        """The engine's published image at this version; None if this kind of GPU has none."""
        engine, images = self.deployment.engine, self.serving.images
        image = images.get(select_entry_for_release(self.deployment.gpu.vendor, engine, images))
        return (
            image.format(version=engine.version).replace(":vnightly", ":nightly") if image else None
        )

    @property
    def arguments(self) -> tuple[Argument, ...]:
        """The whole command on the first node."""
        return (*self.program, *(word for flag in self.flags for word in flag.arguments))

    @property
    def variables(self) -> dict[str, EnvVariable]:
        """The variables that must be set at launch, by name."""
        words = (*self.arguments, *self.environment.values())
        return {part.name: part for word in words for part in word if isinstance(part, EnvVariable)}

    @property
    def command(self) -> list[str]:
        """The command as text, with variables as a shell writes them."""
        return [format_argument(word) for word in self.arguments]

    @property
    def shell_lines(self) -> dict[str, str]:
        """The command in a line by where it is run: the pool, and the nodes where they differ."""
        words = [*((f"{name}=", *word) for name, word in self.environment.items()), *self.arguments]
        line = " ".join(format_argument(word, SHELL) for word in words)
        if not self.worker_arguments:
            return {self.role: line}
        pool = f"{self.role}, " if self.role else ""
        others = " ".join([line, *self.worker_arguments])
        return {f"{pool}first node": line, f"{pool}other nodes": others}

    def __str__(self) -> str:
        program = " ".join(format_argument(word, SHELL) for word in self.program)
        return " \\\n  ".join([program, *map(str, self.flags)])


def get_accelerator_kind(deployment: Deployment) -> AcceleratorKind:
    """Return the entry of `catalogs/devices.yaml` for the GPUs of `deployment`."""
    known, gpu = load_catalog("devices.yaml", AcceleratorKind), deployment.gpu
    return known["gaudi" if gpu.name.startswith("Gaudi") else gpu.vendor]


def count_nodes(deployment: Deployment) -> int:
    """Return the fewest nodes of a replica that hold equal numbers of tensor-parallel groups.

    Raises `PlannerError` if a tensor-parallel group does not fit one node.
    """
    layout = deployment.layout
    groups, held = layout.pp * layout.dp, deployment.gpus_per_node // layout.tp
    if not held:
        raise PlannerError(
            f"tensor parallel size {layout.tp} is more than the {deployment.gpus_per_node} GPUs of"
            " a node"
        )
    return next(
        nodes for nodes in range(math.ceil(groups / held), groups + 1) if groups % nodes == 0
    )


def get_port(deployment: Deployment, role: str = "") -> int:
    """Return the port of the first replica on a node, or of a pool's first worker."""
    offset = DECODE_PORT_OFFSET * (role == "decode") + deployment.first_gpu
    return deployment.engine.facts.port + offset


def build_launches(
    prediction: Prediction, storage: str = DEFAULT_STORAGE
) -> tuple[LaunchSpec, ...]:
    """Return the launch of a replica, or of a worker of each pool."""
    if prediction.prefill is None:
        return (build_launch(prediction, storage),)
    pools = zip(("prefill", "decode"), prediction.pools, strict=True)
    workers = [
        (role, replace(prediction, deployment=pool, memory=get_memory_plan(pool), prefill=None))
        for role, pool in pools
    ]
    return tuple(build_launch(worker, storage, role) for role, worker in workers)


def build_launch(
    prediction: Prediction, storage: str = DEFAULT_STORAGE, role: str = ""
) -> LaunchSpec:
    """Return the launch of one replica; `PlannerError` if the engine lacks an option for it."""
    deployment, memory, workload = prediction.deployment, prediction.memory, prediction.workload
    assert workload is not None
    fit = memory.pool.count_sequences(round(workload.mean_tokens_per_request))
    return build_deployment_launch(
        deployment, storage, total_gib=memory.total_bytes / GIB, fit=f"{fit:,}",
        p99_tokens=f"{workload.compute_total_tokens_quantile(0.99):,.0f}",
        adapters=workload.adapters, role=role,
    )  # fmt: skip


def build_deployment_launch(
    deployment: Deployment, storage: str = DEFAULT_STORAGE, *, total_gib: float | None = None,
    fit: str = "some",
    p99_tokens: str = "so many", adapters: int = 0, role: str = "",
) -> LaunchSpec:  # fmt: skip
    """Return the launch of one replica of `deployment`, or of a pool's worker (`role`)."""
    engine, layout = deployment.engine, deployment.layout
    cli_options, facts, nodes = (
        get_cli_options(engine.name, engine.version),
        load_catalog("launch.yaml", EnginePackaging)[engine.name],
        count_nodes(deployment),
    )
    weights, converted = get_checkpoint(deployment), _get_conversion_quantization(deployment)
    if isinstance(weights, EnvVariable) and (revision := deployment.args.revision):
        raise PlannerError(f"revision {revision} is of a repository, and the model names none")
    task = deployment.model.pooling_task
    rendered = _render_engine_template(
        engine.name, cli_options, d=deployment, args=deployment.args, layout=layout, nodes=nodes,
        remote_code=_explain_remote_code(deployment),
        name=deployment.served_name, speculative=_build_speculation_values(deployment, facts),
        online_quantization=converted if isinstance(weights, str) else "",
        total_gib=total_gib or deployment.gpu_total_bytes / GIB, fit=fit, p99_tokens=p99_tokens,
        share_why=explain_memory_utilization(deployment),
        rank=lambda times=1: EnvVariable("NODE_RANK", "this node, counted from 0", times),
        drain_s=DRAIN_TIMEOUT_S,
        address=EnvVariable("MASTER_ADDR", "the address of node 0"),
        master_port=ReplicaPort(MASTER_PORT + deployment.first_gpu), beside=SiblingFile,
        pooling=find_pooling_option(engine.name, engine.version, task) if task else (),
        adapters=adapters,
        adapter_list=EnvVariable(
            "ADAPTERS",
            f"name the adapters ({adapters}) as NAME=PATH, separated by spaces; for a container only the"
            " first, the others as arguments after it",
            is_list=True,
        ),
        hosts=EnvVariable("HOSTFILE", "a file with the names of the nodes"),
        port=ReplicaPort(get_port(deployment, role)),
        role=role, bootstrap_port=ReplicaPort(BOOTSTRAP_PORT),
        handover_port=ReplicaPort(KV_TRANSFER_PORTS.get(role, 0), layout.dp),
        here=EnvVariable("VLLM_NIXL_SIDE_CHANNEL_HOST", "the address of this node, as workers on others reach it"),
        release=engine.release, at=Version.parse, limits=deployment.media_limits,
    )  # fmt: skip
    program = [
        (weights,) if part == "{model}" else (part,) for part in shlex.split(engine.facts.program)
    ]
    notes = (cli_options.note, engine.substitution_note, *rendered["notes"])
    return LaunchSpec(
        deployment, facts, get_accelerator_kind(deployment),
        program=(*((part,) for part in rendered["before"]), *program),
        flags=tuple(rendered["flags"]), worker_arguments=tuple(rendered["others"]),
        environment=rendered["environment"], nodes=nodes,
        config=yaml.safe_dump(rendered["config"], sort_keys=False, allow_unicode=True) if rendered["config"] else "",
        start_up=estimate_startup(deployment, storage), note="; ".join(filter(None, notes)), role=role,
    )  # fmt: skip


def _render_engine_template(engine: str, options: CliOptions, **values: Any) -> dict[str, Any]:
    """Render the engine's template; returns flags, words, environment, configuration and notes."""
    rendered: dict[str, Any] = {name: [] for name in ("flags", "others", "before", "notes")}
    rendered |= {"environment": {}, "config": {}}
    named_engine = values["d"].engine

    def flag(name: str, *word: Any, why: str) -> str:
        parts = tuple(str(part) if isinstance(part, int | float) else part for part in word)
        given = LaunchFlag(name, (parts,) if parts else (), " ".join(why.split()))
        if name not in options.spellings:
            raise PlannerError(f"{named_engine} has no option {name}, which is needed: {why}")
        if errors := options.parse([format_argument(word) for word in given.arguments]).errors:
            raise PlannerError(f"{named_engine} cannot be started as planned: {errors[0]}")
        rendered["flags"].append(given)
        return ""

    def switch(name: str, on: bool, why: str) -> str:
        if on or name not in options.spellings:
            return flag(name, why=why)
        if options[name].negations:
            return flag(options[name].negations[0], why=why)
        # else off unless asked for
        return flag(name, "false", why=why) if options[name].kind == "bool" else ""

    def refuse(what: str) -> None:
        raise PlannerError(f"{named_engine} {what}")

    render_template(
        "deploy", f"flags/{engine}", **values, **rendered, can=options.spellings, flag=flag, switch=switch,
        refuse=refuse,
    )  # fmt: skip
    for argument, value in values["args"].options:
        option = options.find_argument(argument)
        assert option is not None  # checked when it was read
        rendered["flags"] = [one for one in rendered["flags"] if one.name not in option.spellings]
        for name, *words in filter(None, [spell_option(option, value)]):
            why = "as the scenario gives it in engine_args; what it changes is not planned"
            rendered["flags"].append(LaunchFlag(name, tuple((word,) for word in words), why))
    return rendered


def _build_speculation_values(
    deployment: Deployment, facts: EnginePackaging
) -> dict[str, Any] | None:
    """Return the engine's name of the method, the tokens, and the draft model or its variable."""
    drafting = deployment.speculation
    if drafting is None:
        return None
    if reason := explain_unsupported_method(
        drafting.method, deployment.engine
    ) or explain_missing_draft(drafting, deployment.engine):
        raise PlannerError(reason)
    method, draft_method = normalize_method_name(drafting.method), get_draft_method(drafting.method)
    name = facts.methods.get(select_entry_for_release(method, deployment.engine, facts.methods))
    if name is None:
        raise PlannerError(f"{deployment.engine.name} has no speculative method {method}")
    return {"kind": method, "method": name, "k": drafting.num_speculative_tokens,
            "model": _get_draft_location(drafting), "parallel": draft_method.draft in ("model", "layer")}  # fmt: skip


def _get_draft_location(drafting: SpeculationConfig) -> str | EnvVariable | None:
    """Return where the draft's weights are; None if the method needs none of its own."""
    if drafting.head:
        return drafting.head
    if drafting.draft:
        return resolve_repository(drafting.draft.name)
    if get_draft_method(drafting.method).draft in (
        "layer",
        "heads",
    ):  # weights that the plan knows only the size of
        return EnvVariable("DRAFT", f"name the repository of its {drafting.method} head")
    return None


def _explain_remote_code(deployment: Deployment) -> str:
    """Return why this engine version must run code of the model's repository; empty if it need not."""
    known = load_catalog("model_flags.yaml", ModelFlagsEntry)
    entry, engine = known.get(deployment.model.architecture.model_type), deployment.engine
    until = entry and entry.until.get(engine.name)
    return entry.remote_code if entry and not (until and engine.release >= until) else ""


def get_checkpoint(deployment: Deployment) -> str | EnvVariable:
    """Return the repository that the engine loads, which never looks like an option, or a variable.

    Only who launches it knows where the weights lie of a model that was read from a file, and those
    of a format that the engine does not convert to.
    """
    converted = _get_conversion_quantization(deployment)
    if converted and converted not in deployment.engine.facts.online:
        return EnvVariable("MODEL", f"name its checkpoint quantized with {converted}")
    if deployment.model.local_name:
        return EnvVariable(
            "MODEL",
            "name the repository of its weights, or their folder as the server sees it (a container: below /cache)",
        )
    text = resolve_repository(deployment.model.name)
    return f"./{text}" if text.startswith("-") else text


def _get_conversion_quantization(deployment: Deployment) -> str:
    """Return the format that the plan converts a checkpoint to; empty if it serves it as stored."""
    try:
        stored = load_model(deployment.model.name).quantization.method
    except PlannerError:  # a local configuration, which has no stored format
        return ""
    planned = deployment.model.quantization.method
    return planned if planned not in (stored, "none") else ""
