"""Join KServe's InferenceServices with the ServingRuntimes on which they run."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from planner.tools.lint.network_reader import get_nested, list_items
from planner.tools.lint.server_commands import PortUse

RUNTIME_KINDS = ("ServingRuntime", "ClusterServingRuntime")
MODEL_DIRECTORY = "/mnt/models"
"""Where KServe puts what `storageUri` names (kserve.github.io, storage)."""
DEFAULT_PORT = 8080
"""Port at which KServe asks a container that names none (kserve.github.io, custom predictor)."""


def join_runtimes(objects: Sequence[object]) -> Iterator[object]:
    """Yield the objects of a file, each InferenceService with its runtime's container in it.

    KServe appends the arguments of the InferenceService to those of the runtime, and what else it
    says of the container is in place of the runtime's (kserve pkg/controller, MergeRuntimeContainers).
    """
    runtimes = {
        _read_name(one): one
        for one in objects
        if isinstance(one, Mapping) and one.get("kind") in RUNTIME_KINDS
    }
    joined, used = list[object](), set[str]()
    for one in objects:
        model = get_nested(one, "spec", "predictor", "model")
        name = _find_runtime(model, runtimes) if isinstance(model, Mapping) else ""
        if name and isinstance(one, Mapping):
            used.add(name)
            joined.append(_join(one, runtimes[name]))
        else:
            joined.append(one)
    yield from (
        one
        for one in joined
        if not (
            isinstance(one, Mapping)
            and one.get("kind") in RUNTIME_KINDS
            and _read_name(one) in used
        )
    )


def read_kserve_use(container: Mapping[str, Any]) -> PortUse:
    """Return the port at which KServe asks a container: its first, or else 8080."""
    ports = [get_nested(one, "containerPort") for one in list_items(container.get("ports"))]
    port = next((one for one in ports if isinstance(one, int)), None if ports else DEFAULT_PORT)
    return PortUse("KServe", (port,) if port else (), f"KServe: port {port}")


def _read_name(one: Mapping[str, Any]) -> str:
    return str(get_nested(one, "metadata", "name"))


def _find_runtime(model: Mapping[str, Any], runtimes: Mapping[str, Mapping[str, Any]]) -> str:
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


def _join(service: Mapping[str, Any], runtime: Mapping[str, Any]) -> dict[str, Any]:
    predictor, model = service["spec"]["predictor"], service["spec"]["predictor"]["model"]
    spec = runtime.get("spec") or {}
    first, *others = list_items(spec.get("containers")) or [{}]
    uri = str(model.get("storageUri") or "").removeprefix("hf://")

    def fill_in(word: object) -> object:
        option, equals, value = str(word).rpartition("=")
        is_model = uri and value.rstrip("/") == MODEL_DIRECTORY
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
