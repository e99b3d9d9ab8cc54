"""Find the server commands of YAML and JSON: compose files, manifests, charts' values."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from planner.core.errors import PlannerError
from planner.core.readers import parse_yaml
from planner.core.units import parse_bytes
from planner.engines.argument_names import load_argument_names
from planner.engines.cli_options import (
    get_cli_options,
    list_versions_with_spelling,
    load_flag_lists,
)
from planner.tools.lint.findings import LintFinding
from planner.tools.lint.named_gpus import find_named_gpu, name_slice
from planner.tools.lint.network_reader import (
    get_nested,
    list_items,
    read_compose_uses,
    read_pod_uses,
)
from planner.tools.lint.server_commands import (
    DEFAULT_SHM_BYTES,
    SERVER_MENTION_PATTERN,
    ContainerSetup,
    PortUse,
    ServerCommand,
    find_commands,
    list_visible_gpus,
    parse_container,
    parse_image_name,
)
from planner.tools.lint.shell_parser import expand_variables, parse_statements, split_words

YamlMapping = Mapping[str, object]
MAX_DEPTH = 40
"""Depth of a document to which commands are looked for."""
_COMMAND_KEY_PATTERN = re.compile(r"args|argv|arguments|command|cmd|flags|options", re.IGNORECASE)
"""Keys of a chart's values under which options of an engine stand."""
_CHART_ONLY_KEYS = (
    "extraArgs",
    "v0",
    "v1",
    "modelURL",
    "enableTool",
    "port",
    "env",
    "hfTokenSecret",
)
"""Keys of production-stack's `vllmConfig` that are no options of vLLM."""
_ENGINES = ("vllm", "sglang", "trtllm")
_MODEL_KEYS = ("model", "modelName", "modelId", "modelURL", "model_name", "model_id")
_KSERVE_OPTIONS = {"--model_name", "--model_id", "--model_dir", "--backend"}
RUNTIME_KINDS = ("ServingRuntime", "ClusterServingRuntime")
KSERVE_DIRECTORY = "/mnt/models"
"""Where KServe puts what `storageUri` names (kserve.github.io, storage)."""
KSERVE_PORT = 8080
"""Port at which KServe asks a container that names none (kserve.github.io, custom predictor)."""
_GPU_COUNT_VARIABLES = ("DSTACK_GPUS_NUM", "SKYPILOT_NUM_GPUS_PER_NODE")
"""Variables with the number of a task's GPUs (dstack.ai, docs.skypilot.co: environment variables)."""
_CLUSTER_KINDS = ("LeaderWorkerSet", "RayCluster", "RayService", "RayClusterFleet")
_CLUSTER_PATTERN = re.compile(r"\bray start\b|multi-node-serving\.sh|run_cluster\.sh")
"""By which a container is known as one of several that run one server."""
_WORKER_PATTERN = re.compile(
    r"\bray start\b|KUBERAY_GEN_RAY_START_CMD|multi-node-serving\.sh worker"
)
"""By which a container only joins such a cluster, unless it starts a server beside that."""
_PROBE_DEFAULTS = {"initialDelaySeconds": 0, "periodSeconds": 10, "failureThreshold": 3}
"""Defaults of a probe (kubernetes.io, Configure Liveness, Readiness and Startup Probes)."""


class FileFinder(Protocol):
    """Where the files lie that a text names."""

    def find(self, path: str) -> str | None:
        """Return the content of a file; None if it is not here."""
        ...


@dataclass(frozen=True)
class _Place:
    """Where a node stands: its path, the pod around it, and what lies near."""

    files: FileFinder
    engine: str | None = None
    path: str = ""
    depth: int = 0
    pod: YamlMapping | None = None
    model: str = ""  # that a chart's values name
    compose_variables: Mapping[str, str] | None = None  # None: not in a compose file
    awaited: frozenset[str] = frozenset()  # services of it that others wait for
    objects: tuple[YamlMapping, ...] = ()  # of Kubernetes, that are applied together
    labels: YamlMapping = field(default_factory=dict)  # of the pod
    config_maps: Mapping[str, YamlMapping] | None = None
    gpu: str = ""  # that the file names for what is here
    environment: Mapping[str, str] = field(default_factory=dict)  # of shell text
    image: str = ""  # in which shell text runs
    kind: str = ""  # of the document

    def enter(self, key: object) -> "_Place":
        """Return the place of the value under a key, or of an item of a list."""
        path = f"{self.path}[{key}]" if isinstance(key, int) else f"{self.path}.{key}".lstrip(".")
        return replace(self, path=path, depth=self.depth + 1)


def replace_expressions(text: str) -> str:
    """Return a Helm template with shell variables for its expressions, without control lines."""

    def name_expression(match: re.Match[str]) -> str:
        if not match[2]:  # it does not end in its line
            return match[0]
        inner = match[1].removeprefix("-").removesuffix("-").strip()
        return "${" + re.sub(r"[^\w.]+", "_", inner) + "}"

    text = re.sub(r"^[ \t]*\{\{-?.*\}\}[ \t]*\n", "", text, flags=re.MULTILINE)
    return re.sub(r"\{\{(.*?)(\}\}|$)", name_expression, text, flags=re.MULTILINE)


def load_yaml_documents(text: str, name: str) -> tuple[list[YamlMapping | list[object]], str]:
    """Return the mappings and lists of a YAML or JSON text, and why the rest does not parse."""
    documents = list[YamlMapping | list[object]]()
    parts = re.split(r"^---[ \t\r]*$", replace_expressions(text), flags=re.MULTILINE)
    for number, part in enumerate(parts):
        try:
            document = parse_yaml(part, name or "the text")
        except PlannerError as error:
            above = sum(one.count("\n") for one in parts[:number])
            line = re.search(r": line (\d+)", message := str(error))
            # of the text, not of its document
            counted = f": line {int(line[1]) + above}" if line else ""
            return documents, message.replace(line[0], counted, 1) if line else message
        except RecursionError:
            return documents, "it is nested too deep"
        if isinstance(document, dict | list):
            documents.append(document)
    return documents, ""


def find_starting_image(node: object, depth: int = 0) -> str:
    """Return the first image in a document that starts a server by itself; empty without one."""
    if depth > MAX_DEPTH:
        return ""
    name = _read_image_name(node) if isinstance(node, Mapping) else ""
    if (image := parse_image_name(name)) and image.starts:
        return name
    inner = node.values() if isinstance(node, Mapping) else node if isinstance(node, list) else ()
    return next(filter(None, (find_starting_image(one, depth + 1) for one in inner)), "")


def find_commands_in_documents(
    documents: Sequence[object], engine: str | None, files: FileFinder
) -> Iterator[ServerCommand]:
    """Yield the commands of YAML documents that are applied together."""
    documents = list(join_runtimes(documents))
    objects = [document for document in documents if isinstance(document, Mapping)]
    objects += [
        item for one in objects if isinstance(items := one.get("items"), list)
        for item in items if isinstance(item, Mapping)
    ]  # fmt: skip
    config_maps = {
        str(get_nested(one, "metadata", "name")): data
        for one in objects if one.get("kind") == "ConfigMap"
        if isinstance(data := one.get("data"), Mapping)
    }  # fmt: skip
    place = _Place(files, engine, objects=tuple(objects), config_maps=config_maps)
    for document in documents:
        here = place
        if isinstance(document, Mapping) and isinstance(document.get("services"), Mapping):
            variables = parse_assignments(files.find(".env") or "")
            waits = (get_nested(one, "depends_on") for one in document["services"].values())
            awaited = {
                str(name)
                for wait in waits if isinstance(wait, Mapping)
                for name, how in wait.items()
                if get_nested(how, "condition") == "service_healthy"
            }  # fmt: skip
            here = replace(place, compose_variables=variables, awaited=frozenset(awaited))
        elif isinstance(document, Mapping):
            here = replace(place, kind=str(document.get("kind", "")))
        yield from _find_in_node(document, here)


def _find_in_node(node: object, place: _Place) -> Iterator[ServerCommand]:
    """Yield the commands anywhere inside a document: containers, and shell text."""
    if place.depth > MAX_DEPTH:
        return
    if isinstance(node, list):
        for index, item in enumerate(node):
            yield from _find_in_node(item, place.enter(index))
        return
    if not isinstance(node, Mapping):
        if isinstance(node, str) and (mention := SERVER_MENTION_PATTERN.search(node)):
            try:
                image = parse_image_name(place.image)
                for command in find_commands(node, place.path, None, place.environment):
                    is_ours = image is not None and image.engine == command.engine
                    version = image.version if image and is_ours else ""
                    yield replace(command, gpu=place.gpu, version=command.version or version)
            except PlannerError as error:
                engine = next((name for name in ("sglang", "trtllm") if name in mention[0]), "vllm")
                unread = (mention[0], f"({error})")
                yield ServerCommand(place.path, engine, (), {}, unread=unread)
        return
    if gpu := find_named_gpu(node):
        place = replace(place, gpu=gpu)
        count = gpu.partition("x")[0] if re.match(r"\d+x", gpu) else ""
        counted = dict.fromkeys(_GPU_COUNT_VARIABLES, count) if count else {}
        place = replace(place, environment={**place.environment, **counted})
    place = replace(place, image=_read_image_name(node) or place.image)
    for key in ("env", "envs"):  # of dstack and SkyPilot
        known = {k: v for k, v in _parse_environment(node.get(key)).items() if v != f"${{{k}}}"}
        place = replace(place, environment={**place.environment, **known})
    if isinstance(node.get("modelURL"), str) and ("vllmConfig" in node or "repository" in node):
        yield replace(_parse_production_stack(node, place.path), gpu=place.gpu)
        return
    served = node.get("model")
    if isinstance(served, Mapping) and "modelURL" in served:
        # production-stack's operator has the chart's names in two places, older ones beside the model
        spellings = get_cli_options("vllm", load_flag_lists("vllm").versions[-1]).spellings
        config = node.get("vllmConfig") or {
            key: value
            for key, value in node.items()
            if key == "extraArgs" or f"--{_convert_camel_case(str(key))}" in spellings
        }
        yield from _find_in_node({**served, "vllmConfig": {**served, **config}}, place)
        return
    if isinstance(node.get("modelFormat"), Mapping):
        yield from _parse_kserve(node, place)
        return
    if options := _read_config_options(node, place.engine):
        yield ServerCommand(
            place.path or "configuration", place.engine or "vllm", options, {}, subcommand=True
        )
        return
    if isinstance(labels := get_nested(node, "metadata", "labels"), Mapping):
        place = replace(place, labels=labels)
    if isinstance(node.get("containers"), list):
        place = replace(place, pod=node)
    models = [value for name in _MODEL_KEYS if isinstance(value := node.get(name), str)]
    if isinstance(artifacts := node.get("modelArtifacts"), Mapping):  # llm-d's charts
        models += [str(artifacts[key]) for key in ("name", "uri") if artifacts.get(key)]
    models += [value for value in node.values() if str(value).startswith("hf://")]
    place = replace(place, model=models[0]) if models else place
    commands = list(_parse_container_node(node, place)) or list(_parse_values_node(node, place))
    yield from commands
    for key, value in node.items():
        is_read = commands and (key == "image" or _COMMAND_KEY_PATTERN.search(str(key)))
        if not is_read and key != "entrypoint":
            yield from _find_in_node(value, place.enter(key))


def _parse_container_node(node: YamlMapping, place: _Place) -> Iterator[ServerCommand]:
    """Yield the command of a compose service, or of a manifest's container."""
    variables = place.compose_variables
    image = node.get("image")  # vLLM's chart has the command in it
    holder = {**image, **node} if isinstance(image, Mapping) else node
    lists = {
        key: _split_command_value(holder.get(key), variables)
        for key in ("entrypoint", "command", "args")
    }
    words = [word for key in lists for word in lists[key]]
    name = _read_image_name(node)
    if variables is not None:
        name = expand_variables(name, variables)
    runs_text = node.get("commands") or node.get(
        "run"
    )  # of dstack and SkyPilot, read as shell text
    if not words and (runs_text or not parse_image_name(name)):
        return
    text = " ".join(words)
    if _WORKER_PATTERN.search(text) and not SERVER_MENTION_PATTERN.search(text):
        return  # the server starts in another container of its cluster
    environment, findings = _read_environment(node, place)
    if variables is None:
        words = _expand_references(words, environment)
    # Kubernetes' command is in place of the image's entry point, and compose's is not.
    is_replaced = bool(lists["entrypoint"]) or (variables is None and bool(lists["command"]))
    setup = replace(_read_setup(node, place), image=name)
    commands = list(parse_container(name, words, environment, place.path, is_replaced))
    is_member = place.kind in _CLUSTER_KINDS or _CLUSTER_PATTERN.search(text)
    setup = replace(setup, is_member=bool(is_member))
    # another server, or a program in the background, may be the one that is asked
    if commands[1:] or re.search(r"(?<![&>|])&(?![&>\d])", text):
        setup = replace(setup, network="shared")
    for command in commands:
        known = (*findings, *command.findings)
        yield replace(command, setup=setup, findings=known, gpu=_name_gpu(node, place))


def _expand_references(words: Iterable[str], environment: Mapping[str, str]) -> list[str]:
    """Return the words of a container with its variables, as Kubernetes writes them: $(NAME)."""
    pattern = r"\$\(([A-Za-z_]\w*)\)"
    return [
        re.sub(pattern, lambda match: environment.get(match[1], match[0]), word) for word in words
    ]


def _name_gpu(node: YamlMapping, place: _Place) -> str:
    """Return the GPU, or the slice of it, that the file names for a container."""
    return name_slice(place.gpu, get_nested(node, "resources", "limits") or {})


def _read_image_name(node: YamlMapping) -> str:
    """Return the image of a container or of a chart's values, with its tag; empty without one."""
    image = node.get("image")
    if isinstance(image, Mapping):
        tag = image.get("tag")
        return f"{image.get('repository', '')}{f':{tag}' if tag else ''}"
    return "" if image is None else str(image)


def _parse_values_node(node: YamlMapping, place: _Place) -> Iterator[ServerCommand]:
    """Yield the command of a chart's values: options of an engine in a list, without its image."""
    for key, value in node.items():
        if not _COMMAND_KEY_PATTERN.search(str(key)):
            continue
        try:
            words = _split_command_value(value, place.compose_variables)
        except PlannerError:
            continue
        named = str(node.get("engine", "")).lower().replace("-", "")
        guessed = named if words and named in _ENGINES else _guess_engine(words)
        engine = place.engine or guessed
        if engine is None or not words:
            continue
        image = parse_image_name(_read_image_name(node))
        options = get_cli_options(engine, load_flag_lists(engine).versions[-1])
        has_model = {"model", "model_path"} & set(options.parse(words).values)
        if place.model and not has_model and words[0].startswith("-"):
            words = [place.model.removeprefix("hf://"), *words]
        environment, findings = _read_environment(node, place)
        words = _expand_references(words, environment)
        # a chart's values are not all that it gives its container
        is_container = bool(place.pod and place.kind) or place.compose_variables is not None
        place = place if is_container else replace(place, pod=None)
        setup = _read_setup(node, place) if is_container or "resources" in node else None
        yield ServerCommand(
            f"{place.path}.{key}".lstrip("."),
            engine,
            tuple(words),
            environment,
            image.version if image and image.engine == engine else "",
            container=is_container,
            subcommand=True,
            note=f"read as options of {engine}",
            findings=findings,
            setup=setup and replace(setup, image=_read_image_name(node)),
            gpu=_name_gpu(node, place),
        )


def _guess_engine(words: Sequence[str]) -> str | None:
    """Return the engine that has most of a list's options; None for another program's."""
    names = {word.partition("=")[0] for word in words if word.startswith("--")}
    counts = {
        engine: sum(
            bool(list_versions_with_spelling(engine, name.replace("_", "-") if engine != "trtllm" else name))
            for name in names
        )
        for engine in _ENGINES
    }  # fmt: skip
    best = max(counts, key=lambda engine: counts[engine])
    known = set(load_argument_names(best).arguments)
    specific = {name.removeprefix("--").replace("-", "_") for name in names} & known
    return best if counts[best] >= max(1 if specific else 2, len(names) / 2) else None


def _read_setup(node: YamlMapping, place: _Place) -> ContainerSetup:
    """Return what a compose service or a manifest's container is given."""
    if place.compose_variables is not None:
        setup = _read_compose_setup(node, place.compose_variables)
        is_awaited = place.path.rpartition(".")[2] in place.awaited
        limit_s = _read_health_limit(node.get("healthcheck")) if is_awaited else None
        return (
            setup if limit_s is None else replace(setup, probe="healthcheck", start_limit_s=limit_s)
        )
    resources, pod = node.get("resources"), place.pod or {}
    limits = get_nested(resources, "limits")
    limits = limits if isinstance(limits, Mapping) else {}
    mounts = {
        str(get_nested(mount, "name")): get_nested(mount, "mountPath")
        for mount in list_items(node.get("volumeMounts"))
    }
    shm: float | None = DEFAULT_SHM_BYTES
    for volume in list_items(pod.get("volumes")):
        if mounts.get(str(get_nested(volume, "name"))) == "/dev/shm":
            size = get_nested(volume, "emptyDir", "sizeLimit")
            shm = parse_bytes(str(size)) if size else None
    is_foreign = not place.pod  # a template whose pod is not here
    probe, limit_s = _read_start_limit(node)
    beside = [*list_items(pod.get("containers"))[1:], *list_items(pod.get("initContainers"))]
    has_others = (is_foreign and "containerPort" not in node) or any(
        one in list_items(pod.get("containers")) or get_nested(one, "restartPolicy") == "Always"
        for one in beside
    )
    uses = [*read_pod_uses(node, place.labels, place.objects)]
    if isinstance(port := node.get("containerPort"), int):  # of a chart's values
        uses.append(PortUse("containerPort", (port,), f"containerPort: {port}"))
    is_kserve = place.kind in (
        *RUNTIME_KINDS,
        "InferenceService",
    )  # which fetches the weights itself
    if is_kserve and not is_foreign:
        uses.append(read_kserve_use(node))
    return ContainerSetup(
        "kubernetes",
        is_foreign
        or place.kind in RUNTIME_KINDS  # whose GPUs the InferenceService gives
        or any("/" in str(name) for name in limits)
        or bool(get_nested(resources, "claims")),
        _parse_count(
            next(
                (count for name, count in limits.items() if str(name).endswith(("/gpu", "/gaudi"))),
                None,
            )
        ),
        None if is_foreign or pod.get("hostIPC") is True else shm,
        probe,
        limit_s,
        tuple(
            str(get_nested(one, "metadata", "name"))
            for one in place.objects
            if one.get("kind") == "Service" and pod.get("enableServiceLinks") is not False
        ),
        volumes=None if is_foreign or is_kserve else tuple(map(str, mounts.values())),
        uses=tuple(uses),
        network="host" if pod.get("hostNetwork") is True else "shared" if has_others else "own",
    )


def _read_start_limit(node: YamlMapping) -> tuple[str, float | None]:
    """Return the probe that kills a container which does not answer, and after how many seconds."""
    for key in ("startupProbe", "livenessProbe"):
        if isinstance(probe := node.get(key), Mapping):
            values = {name: probe.get(name, default) for name, default in _PROBE_DEFAULTS.items()}
            numbers = [float(value) for value in values.values() if isinstance(value, int | float)]
            if len(numbers) < len(values):
                return key, None
            delay, period, failures = numbers
            return key, delay + period * failures
    return "", None


def _read_health_limit(check: object) -> float | None:
    """Return after how many seconds a service counts as unhealthy; None if that is not known.

    docs.docker.com, Dockerfile reference: failures within the start period do not count.
    """
    if not isinstance(check, Mapping) or not check.get("test"):
        return None
    start, interval = (
        _parse_duration(check.get(key, default))
        for key, default in (("start_period", "0s"), ("interval", "30s"))
    )
    retries = check.get("retries", 3)
    if start is None or interval is None or not isinstance(retries, int):
        return None
    return start + interval * retries


def _parse_duration(text: object) -> float | None:
    """Return the seconds of "1m30s"; None for other text."""
    units = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 1e-3}
    parts = re.findall(r"(\d{1,9}(?:\.\d{1,9})?)(ms|[hms])", str(text))
    if not parts or "".join(map("".join, parts)) != str(text):
        return None
    return sum(float(number) * units[unit] for number, unit in parts)


def _read_compose_setup(node: YamlMapping, variables: Mapping[str, str]) -> ContainerSetup:
    """Return what a compose service gives its container."""
    reserved = list_items(get_nested(node, "deploy", "resources", "reservations", "devices"))
    gpus = node.get("gpus")
    requests = [*reserved, *list_items(gpus), *([{}] if gpus == "all" else [])]
    count, ids = (get_nested(requests[0] if requests else None, key) for key in ("count", "device_ids"))  # fmt: skip
    named = (
        ",".join(_interpolate(str(one), variables) for one in list_items(ids)).split(",")
        if ids
        else []
    )
    mounts = dict[str, str]()
    for one in list_items(node.get("volumes")):
        source, _, target = str(one).partition(":")
        if isinstance(one, Mapping):
            source, target = str(one.get("source", "")), str(one.get("target", ""))
        mounts[target.partition(":")[0]] = source
    tmpfs = node.get("tmpfs")
    memory = [
        str(one).partition(":")[0]
        for one in ([tmpfs] if isinstance(tmpfs, str) else list_items(tmpfs))
    ]
    is_shared = str(node.get("ipc", "private")) not in ("private", "shareable", "none")
    size = node.get("shm_size")
    mode, networks = str(node.get("network_mode") or ""), node.get("networks")
    joined = networks.values() if isinstance(networks, Mapping) else ()
    addresses = (get_nested(one, "ipv4_address") for one in joined)
    return ContainerSetup(
        "compose",
        bool(requests or gpus or node.get("devices") or node.get("runtime") or node.get("privileged")),
        count if isinstance(count, int) else len(named) or None,
        None if is_shared or "/dev/shm" in (*mounts, *memory)
        else parse_bytes(str(size)) if size else DEFAULT_SHM_BYTES,
        mounts=mounts,
        volumes=tuple(mounts),
        uses=tuple(read_compose_uses(node, mode == "host")),
        network="host" if mode == "host" else "shared" if ":" in mode else "own",
        addresses=tuple(map(str, filter(None, addresses))),
        # compose asks for every GPU where neither a number nor ids are given
        visible_gpus=list_visible_gpus("all" if count is None else count, named) if requests else (),
        profiles=tuple(map(str, list_items(node.get("profiles")))),
    )  # fmt: skip


def _parse_count(value: object) -> int | None:
    text = str(value)
    return int(text) if text.isdecimal() and len(text) < 10 else None


def _parse_production_stack(node: YamlMapping, location: str) -> ServerCommand:
    """Return the command that vLLM's production-stack builds from a model's `vllmConfig`."""
    config = node.get("vllmConfig")
    pairs = list[tuple[str, object]]()
    for key, value in config.items() if isinstance(config, Mapping) else ():
        if key not in _CHART_ONLY_KEYS and value != "" and _is_scalar(value):
            name = _convert_camel_case(str(key))
            pairs.append((f"--no-{name}", True) if value is False else (f"--{name}", value))
    extra = config.get("extraArgs") if isinstance(config, Mapping) else None
    engine_image = parse_image_name(f"{node.get('repository', '')}:{node.get('tag', '')}")
    words = (
        _format_scalar(node["modelURL"]),
        *_format_as_words(pairs),
        *_split_command_value(extra, None),
    )
    version = engine_image.version if engine_image else ""
    has_workers = get_nested(node, "raySpec", "enabled") is True  # with GPUs of their own
    count = None if has_workers else _parse_count(node.get("requestGPU", ""))
    environment = _parse_environment(node.get("env"))
    # the chart mounts /dev/shm for its own key of tensor parallelism, not for one in extraArgs
    # (helm/templates/deployment-vllm-multi.yaml, commit 010004e)
    mounts = [get_nested(one, "mountPath") for one in list_items(node.get("extraVolumeMounts"))]
    has_shm = (
        (isinstance(config, Mapping) and "tensorParallelSize" in config)
        or "raySpec" in node
        or "/dev/shm" in mounts
        or get_nested(node, "lmcacheConfig", "enablePD") is True
    )
    shm_bytes = None if has_shm else DEFAULT_SHM_BYTES
    setup = ContainerSetup("kubernetes", count != 0, count, shm_bytes)
    return ServerCommand(location, "vllm", words, environment, version, True, True, setup=setup)


def _convert_camel_case(name: str) -> str:
    """Return maxModelLen as max-model-len, and enableLoRA as enable-lora."""
    return (
        re.sub(r"(?<=[a-z])(?=[A-Z])", "-", name.replace("LoRA", "Lora")).lower().replace("_", "-")
    )


def _parse_kserve(node: YamlMapping, place: _Place) -> Iterator[ServerCommand]:
    """Yield the command that KServe's vLLM runtimes build from an InferenceService's model.

    `--model_id` and `--model_name` are options of its Hugging Face server, and
    `--backend=huggingface` starts no vLLM (kserve.github.io, Hugging Face runtime, 0.15 to 0.20).
    """
    kind = str(get_nested(node, "modelFormat", "name")).lower()
    words = [
        part for word in _split_command_value(node.get("args"), None) for part in word.split("=", 1)
    ]
    kserve_options = {
        name: words[index + 1] for index, name in enumerate(words[:-1]) if name in _KSERVE_OPTIONS
    }
    if kind not in ("huggingface", "vllm") or kserve_options.get("--backend") == "huggingface":
        return
    consumed = {
        index + offset
        for index, name in enumerate(words[:-1])
        if name in _KSERVE_OPTIONS
        for offset in (0, 1)
    }
    model = (
        kserve_options.get("--model_id")
        or str(node.get("storageUri", "")).removeprefix("hf://")
        or kserve_options.get("--model_dir", "")
    )
    remaining = [word for index, word in enumerate(words) if index not in consumed]
    argv = (*(["--model", model] if model else []), *remaining)
    note = f"left to KServe: {', '.join(kserve_options)}" if kserve_options else ""
    environment, findings = _read_environment(node, place)
    yield ServerCommand(
        place.path,
        "vllm",
        argv,
        environment,
        container=True,
        note=note,
        findings=findings,
        setup=_read_setup(node, place),
        gpu=_name_gpu(node, place),
    )


def join_runtimes(objects: Sequence[object]) -> Iterator[object]:
    """Yield the objects of a file, each InferenceService with its runtime's container in it.

    KServe appends the arguments of the InferenceService to those of the runtime, and what else it
    says of the container is in place of the runtime's (kserve pkg/controller, MergeRuntimeContainers).
    """
    runtimes = {
        _read_object_name(one): one
        for one in objects
        if isinstance(one, Mapping) and one.get("kind") in RUNTIME_KINDS
    }
    joined, used = list[object](), set[str]()
    for one in objects:
        model = get_nested(one, "spec", "predictor", "model")
        name = _find_runtime(model, runtimes) if isinstance(model, Mapping) else ""
        if name and isinstance(one, Mapping):
            used.add(name)
            joined.append(_join_runtime(one, runtimes[name]))
        else:
            joined.append(one)
    yield from (
        one
        for one in joined
        if not (
            isinstance(one, Mapping)
            and one.get("kind") in RUNTIME_KINDS
            and _read_object_name(one) in used
        )
    )


def read_kserve_use(container: YamlMapping) -> PortUse:
    """Return the port at which KServe asks a container: its first, or else 8080."""
    ports = [get_nested(one, "containerPort") for one in list_items(container.get("ports"))]
    port = next((one for one in ports if isinstance(one, int)), None if ports else KSERVE_PORT)
    return PortUse("KServe", (port,) if port else (), f"KServe: port {port}")


def _read_object_name(one: YamlMapping) -> str:
    return str(get_nested(one, "metadata", "name"))


def _find_runtime(model: YamlMapping, runtimes: Mapping[str, YamlMapping]) -> str:
    """Return the runtime of a model: the one that it names, or else the only one of its format."""
    if runtime := model.get("runtime"):
        return str(runtime) if str(runtime) in runtimes else ""
    wanted = get_nested(model, "modelFormat", "name")
    fitting = [
        name
        for name, one in runtimes.items()
        if any(
            get_nested(known, "name") == wanted and get_nested(known, "autoSelect") is True
            for known in list_items(get_nested(one, "spec", "supportedModelFormats"))
        )
    ]
    return fitting[0] if len(fitting) == 1 else ""


def _join_runtime(service: Mapping[str, Any], runtime: Mapping[str, Any]) -> dict[str, Any]:
    predictor, model = service["spec"]["predictor"], service["spec"]["predictor"]["model"]
    spec = runtime.get("spec") or {}
    first, *others = list_items(spec.get("containers")) or [{}]
    uri = str(model.get("storageUri") or "").removeprefix("hf://")

    def fill_in(word: object) -> object:
        option, equals, value = str(word).rpartition("=")
        is_model = uri and value.rstrip("/") == KSERVE_DIRECTORY
        return f"{option}{equals}{uri}" if is_model and "://" not in uri else word

    container = {
        **first,
        **{key: value for key, value in model.items() if key in ("image", "resources", "command")},
        "args": [
            fill_in(w) for w in (*list_items(first.get("args")), *list_items(model.get("args")))
        ],
        "env": [*list_items(first.get("env")), *list_items(model.get("env"))],
        "volumeMounts": [
            *list_items(first.get("volumeMounts")),
            *list_items(model.get("volumeMounts")),
        ],
    }
    for key in ("command", *(key for key in ("startupProbe", "livenessProbe") if model.get(key))):
        words = container.get(key)
        container[key] = (
            [fill_in(word) for word in words] if isinstance(words, list) else model.get(key, words)
        )
    pod = {
        **spec,
        **{key: value for key, value in predictor.items() if key != "model"},
        "volumes": [*list_items(spec.get("volumes")), *list_items(predictor.get("volumes"))],
        "containers": [container, *others],
    }
    return {**service, "spec": {**service["spec"], "predictor": pod}}


def _split_command_value(value: object, variables: Mapping[str, str] | None) -> list[str]:
    """Return the words of a command that is a list or a text.

    `variables` are those that compose fills in, which then splits a text at blanks and line
    breaks alike; without them a shell reads the text.
    """
    if isinstance(value, list):
        words = [_format_scalar(word) for word in value if isinstance(word, str | int | float)]
        return words if variables is None else [_interpolate(word, variables) for word in words]
    if not isinstance(value, str):
        return []
    if variables is not None:
        return split_words(_interpolate(value, variables))
    statements = parse_statements(value)
    if len(statements) == 1:
        return list(statements[0].words)
    return ["sh", "-c", value] if statements else []


def _interpolate(text: str, variables: Mapping[str, str]) -> str:
    """Fill in a compose file's variables; `$$` is a dollar."""
    return expand_variables(text.replace("$$", "\0"), variables).replace("\0", "$")


def _format_scalar(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _read_environment(
    node: YamlMapping, place: _Place
) -> tuple[dict[str, str], tuple[LintFinding, ...]]:
    """Return a container's environment, and findings about what of it is not here."""
    environment, findings = dict[str, str](), list[LintFinding]()
    for item in [*list_items(node.get("env_file")), node.get("env_file")]:
        path = item.get("path") if isinstance(item, Mapping) else item
        if isinstance(path, str):
            text = place.files.find(path)
            environment |= parse_assignments(text or "")
            if text is None and not (isinstance(item, Mapping) and item.get("required") is False):
                findings.append(make_unread_variables(path))
    for item in list_items(node.get("envFrom")):
        name = str(get_nested(item, "configMapRef", "name"))
        data = (place.config_maps or {}).get(name)
        environment |= _parse_environment(data)
        if data is None and get_nested(item, "configMapRef"):
            findings.append(make_unread_variables(name))
    given = _parse_environment(node.get("environment")) | _parse_environment(node.get("env"))
    if place.compose_variables is not None:
        given = {
            name: _interpolate(value, place.compose_variables) for name, value in given.items()
        }
    for item in list_items(node.get("env")):
        reference = get_nested(item, "valueFrom", "configMapKeyRef")
        data = (place.config_maps or {}).get(str(get_nested(reference, "name")))
        if data and (key := str(get_nested(reference, "key"))) in data:
            given[str(item.get("name"))] = _format_scalar(data[key])
    return environment | given, tuple(findings)


def make_unread_variables(source: str) -> LintFinding:
    """Return a finding about a file or ConfigMap of variables that is not here."""
    why = "it is not here: its variables are not known"
    return LintFinding("setting", source[:80], f"variables of {source}"[:300], "unread", why)


def parse_assignments(text: str) -> dict[str, str]:
    """Return the variables of a file of NAME=value lines."""
    lines = re.findall(r"^[ \t]*(?:export[ \t]+)?([A-Za-z_]\w*)=(.*)$", text, re.MULTILINE)
    return {
        name: re.sub(r"(?<!\s)\s+#.*$", "", value.strip()).strip("'\"") for name, value in lines
    }


def _parse_environment(value: object) -> dict[str, str]:
    """Return an environment given as a mapping, or as a list of NAME=value or name and value."""
    if isinstance(value, Mapping):
        return {
            str(name): "" if content is None else _format_scalar(content)
            for name, content in value.items()
        }
    environment = {}
    for entry in list_items(value):
        if isinstance(entry, Mapping) and "name" in entry:
            name = str(entry["name"])
            environment[name] = (
                _format_scalar(entry["value"]) if "value" in entry else f"${{{name}}}"
            )
        elif isinstance(entry, str):
            name, equals, content = entry.partition("=")
            environment[name] = content if equals else f"${{{name}}}"
    return environment


def _read_config_options(node: YamlMapping, engine: str | None) -> tuple[str, ...]:
    """Return a `--config` file, or a chart's mapping, as options; empty if it is something else."""
    engine = engine or "vllm"
    cli_options = get_cli_options(engine, load_flag_lists(engine).versions[-1])
    options = {
        f"--{_convert_camel_case(name)}": value
        for name, value in node.items()
        if isinstance(name, str)
    }
    names = list(options)
    spellings = [cli_options.find_spellings(name) for name in names]
    known = {cli_options[matches[0]].argument for matches in spellings if len(matches) == 1}
    is_specific = bool(known & set(load_argument_names(engine).arguments))
    if (
        len(names) < 2
        or sum(len(matches) == 1 for matches in spellings) < 0.6 * len(node)
        or not is_specific
        or not all(_is_scalar(value) for value in node.values())
    ):
        return ()
    # a chart's own keys, such as name and image, are words; options that nobody knows are not
    used = (
        (name, value)
        for (name, value), matches in zip(options.items(), spellings, strict=True)
        if matches or "-" in name[2:]
    )
    return tuple(_format_as_words(used))


def _is_scalar(value: object) -> bool:
    return not isinstance(value, Mapping | list) or (
        isinstance(value, list) and all(map(_is_scalar, value))
    )


def format_config_as_words(config: YamlMapping) -> tuple[str, ...]:
    """Return the scalars of a `--config` file as words of a command line."""
    return tuple(
        _format_as_words(
            [(f"--{name}", value) for name, value in config.items() if _is_scalar(value)]
        )
    )


def _format_as_words(pairs: Iterable[tuple[str, object]]) -> Iterator[str]:
    """Yield options and values as words of a command line."""
    for name, value in pairs:
        if value is True or value is None:
            yield name
        elif isinstance(value, list):
            yield from (name, *map(_format_scalar, value))
        elif value is not False:
            yield from (name, _format_scalar(value))
