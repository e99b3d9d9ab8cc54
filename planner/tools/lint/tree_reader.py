"""Find the servers of YAML and JSON: one walk for compose files, manifests, charts and whatever else.

What looks like a container, holds options of an engine or is shell text with a server's command is a
server, wherever it stands; what is around it says the rest. `catalogs/flags/forms.yaml` has the names.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from planner.core.errors import PlannerError
from planner.core.readers import parse_yaml
from planner.engines.argument_names import load_argument_names
from planner.engines.cli_options import (
    get_cli_options,
    list_versions_with_spelling,
    load_flag_lists,
    merge_json,
)
from planner.tools.lint.container_setup import (
    ContainerSetup,
    get_nested,
    list_items,
    read_pod_setup,
    read_service_setup,
)
from planner.tools.lint.findings import LintFinding
from planner.tools.lint.forms import load_forms
from planner.tools.lint.named_gpus import find_named_gpu
from planner.tools.lint.server_commands import (
    SERVER_MENTION_PATTERN,
    ServerCommand,
    find_commands,
    parse_container,
    parse_image_name,
)
from planner.tools.lint.shell_parser import (
    Variables,
    expand_variables,
    parse_statements,
    split_words,
)

YamlMapping = Mapping[str, object]
MAX_DEPTH = 40
"""Depth of a document to which commands are looked for."""
_COMMAND_KEY = re.compile(r"args|argv|arguments|command|cmd|flags|options", re.IGNORECASE)
"""Keys under which words of a command stand."""
_HOLDER_KEY = re.compile(r"(?:config|args|options|flags|parameters|model)$", re.IGNORECASE)
"""Keys of mappings that hold options by name."""
_SERVING_KEY = re.compile(
    r"^(?:extra|additional|engine|server|vllm|sglang|trtllm)_?\w*(?:args|config|options|flags)$|^model_?ref$",
    re.IGNORECASE,
)
"""Keys that say something of a server, so that it is told if they were not understood."""
_SERVER_KEYS = {"image", "containers", "modelFormat"}
"""Keys of what is a server of its own, and not the options of one."""
_ENGINES = ("vllm", "sglang", "trtllm")
KSERVE_DIRECTORY = "/mnt/models"
"""Where KServe puts what `storageUri` names (kserve.github.io, storage)."""
_START_PATTERN = re.compile(
    rf"{SERVER_MENTION_PATTERN.pattern}|\b(?:docker|podman|nerdctl)\s+run\b"
)
"""What makes a text a command of a shell."""
_CLUSTER_PATTERN = re.compile(r"\bray start\b|multi-node-serving\.sh|run_cluster\.sh")
"""By which a container is known as one of several that run one server."""
_WORKER_PATTERN = re.compile(
    r"\bray start\b|KUBERAY_GEN_RAY_START_CMD|multi-node-serving\.sh worker"
)
"""By which a container only joins such a cluster, unless it starts a server beside that."""


FileFinder = Callable[[str], str | None]
"""Returns the content of a file that a text names; None if it is not here."""


@dataclass(frozen=True)
class _Place:
    """Where a node stands, and what the nodes around it say of a server."""

    path: str = ""
    depth: int = 0
    parent: YamlMapping = field(default_factory=dict)
    pod: YamlMapping | None = None
    kind: str = ""  # of the document
    is_compose: bool = False
    engine: str = ""
    model: str = ""
    gpu: str = ""
    image: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    findings: tuple[LintFinding, ...] = ()  # about what of it is not here

    def enter(self, key: object, node: object) -> "_Place":
        """Return the place of the value under a key of a node, or of an item of a list."""
        path = f"{self.path}[{key}]" if isinstance(key, int) else f"{self.path}.{key}".lstrip(".")
        parent = node if isinstance(node, Mapping) else self.parent
        return replace(self, path=path, depth=self.depth + 1, parent=parent)


def replace_expressions(text: str) -> str:
    """Return a Helm template with shell variables for its expressions, without control lines."""

    def name_expression(match: re.Match[str]) -> str:
        return "${" + re.sub(r"[^\w.]+", "_", match[1]) + "}"

    text = re.sub(r"^[ \t]*\{\{-?.*\}\}[ \t]*\n", "", text, flags=re.MULTILINE)
    return re.sub(r"\{\{-?[ \t]*(.*?)[ \t]*-?\}\}", name_expression, text)


def load_yaml_documents(text: str, name: str) -> tuple[list[YamlMapping | list[object]], str]:
    """Return the mappings and lists of a YAML or JSON text, and why the rest does not parse."""
    documents = list[YamlMapping | list[object]]()
    parts = re.split(r"^---[ \t\r]*$", replace_expressions(text), flags=re.MULTILINE)
    for number, part in enumerate(parts):
        try:
            document = parse_yaml(part, name or "the text")
        except PlannerError as error:
            above = sum(one.count("\n") for one in parts[:number])
            # of the text, not of its document
            line = re.search(r"(?<=: line )\d+", message := str(error))
            return documents, message.replace(
                line[0], f"{int(line[0]) + above}", 1
            ) if line else message
        except RecursionError:
            return documents, "it is nested too deep"
        if isinstance(document, dict | list):
            documents.append(document)
    return documents, ""


class TreeReader:
    """The walk through YAML documents that are applied together."""

    def __init__(
        self, documents: Sequence[object], engine: str | None, find_file: FileFinder
    ) -> None:
        given = parse_assignments(find_file(".env") or "")
        self.engine, self.find_file = engine, find_file
        self.documents = [
            _normalize(one, Variables({name: [value] for name, value in given.items()}))
            for one in documents
        ]
        mappings = [one for one in self.documents if isinstance(one, Mapping)]
        self.objects: list[Mapping[str, Any]] = mappings + [
            item for one in mappings for item in list_items(one.get("items")) if isinstance(item, Mapping)
        ]  # fmt: skip
        self.config_maps = {
            str(get_nested(one, "metadata", "name")): data for one in self.objects
            if one.get("kind") == "ConfigMap" and isinstance(data := one.get("data"), Mapping)
        }  # fmt: skip
        used = (
            self._find_referenced(node, str(one.get("kind")))
            for one in self.objects if len(mappings) > 1
            for node in list_mappings(one)
        )  # fmt: skip
        self.used = [one for one in used if one is not None]

    def read(self) -> Iterator[ServerCommand | LintFinding]:
        """Yield the servers, and what may say something of one and was not understood."""
        for document in self.documents:
            known = document if isinstance(document, Mapping) else {}
            kind = str(known.get("kind", ""))
            # what another object names is read there
            is_used = any(document is one for one in self.used)
            if is_used or (kind == "ConfigMap" and self.objects[1:]):
                continue
            place = _Place(kind=kind, is_compose=isinstance(known.get("services"), Mapping))
            yield from self._walk(document, place)

    def _walk(self, node: object, place: _Place) -> Iterator[ServerCommand | LintFinding]:
        """Yield the servers anywhere inside a document: containers, options, and shell text."""
        if place.depth > MAX_DEPTH:
            return
        if isinstance(node, str):
            if re.search(r"\.(ya?ml|json)$", place.path):  # of a ConfigMap
                for document in load_yaml_documents(node, place.path)[0]:
                    yield from self._walk(_normalize(document, None), place.enter("", None))
            yield from _read_shell(node, place)
        for index, item in enumerate(list_items(node)):
            yield from self._walk(item, place.enter(index, None))
        if not isinstance(node, Mapping):
            return
        place = self._read_around(node, place)
        if (referenced := self._find_referenced(node, place.kind)) is not None:
            node, place = _join_referenced(node, referenced, place)
        found = [*self._read_container(node, place)]
        if not any(one.argv or one.unread for one in found):
            found = [*self._read_options(node, place)] or found
        yield from (_name_model(one, place.model) for one in found)
        is_ours = re.search("|".join(_ENGINES), f"{place.engine} {place.image} {[*node]}")
        for key, value in node.items():
            is_read = found and (key == "image" or _is_holder(key, value))
            if is_read or key == "entrypoint":
                continue
            is_silent = True
            for one in self._walk(value, place.enter(key, node)):
                is_silent = False
                yield one
            is_known = referenced is not None and key in load_forms().reference_keys
            if is_ours and is_silent and value and not is_known and _SERVING_KEY.search(key):
                name = f"{place.path}.{key}".lstrip(".")
                why = f"nothing here reads {name:.80}, which may change what is served"
                yield LintFinding("setting", name[-80:], name, "unread", why)

    def _read_around(self, node: YamlMapping, place: _Place) -> _Place:
        """Return the place of what is inside a mapping: with what the mapping says of a server."""
        forms = load_forms()
        environment, findings = self._read_environment(node, place)
        if gpu := find_named_gpu(node):
            place = replace(place, gpu=gpu)
            count = gpu.partition("x")[0] if re.match(r"\d+x", gpu) else ""
            environment |= dict.fromkeys(forms.gpu_counts, count) if count else {}
        return replace(
            place,
            environment=environment,
            findings=findings,
            image=_read_image_name(node) or place.image,
            engine=_find_engine(node) or place.engine,
            model=_find_model(node) or place.model,
            pod=node if isinstance(node.get("containers"), list) else place.pod,
        )

    def _find_referenced(self, node: YamlMapping, kind: str) -> Mapping[str, Any] | None:
        """Find the object of another kind that says the rest of what a mapping of this one says."""
        others = [one for one in self.objects if one.get("kind") != kind]
        for key in load_forms().reference_keys:
            value = node.get(key)
            name = get_nested(value, "name") if isinstance(value, Mapping) else value
            for one in others if name else ():
                if get_nested(one, "metadata", "name") == name:
                    return one
        return None

    def _read_container(self, node: YamlMapping, place: _Place) -> Iterator[ServerCommand]:
        """Yield the server of a compose service, or of what else has an image and words for it."""
        image = node.get("image")  # vLLM's chart has the command in it
        holder = {**image, **node} if isinstance(image, Mapping) else node
        lists = [
            _split_command(holder.get(key), place.is_compose)
            for key in ("entrypoint", "command", "args", "exec")
        ]
        words, name = [word for one in lists for word in one], _read_image_name(node)
        is_task = node.get("commands") or node.get("run")  # read as shell text
        if not words and (is_task or not image or not parse_image_name(name)):
            return
        text = " ".join(words)
        if _WORKER_PATTERN.search(text) and not SERVER_MENTION_PATTERN.search(text):
            return  # the server starts in another container of its cluster
        environment = dict(place.environment)
        for option, value in place.environment.items():  # such as VLLM_ADDITIONAL_ARGS
            given = split_words(value) if _COMMAND_KEY.search(option) and option not in text else []
            if _guess_engine(given):
                words, _ = [*words, *given], environment.pop(option)
        # Kubernetes' command is in place of the image's entry point, and compose's is not
        is_program = bool(lists[1]) and not lists[1][0].startswith("-")
        is_cleared = holder.get("entrypoint") is not None  # of compose by [], too
        is_replaced = bool(lists[0]) or (is_cleared if place.is_compose else is_program)
        words = _fill_in(words, environment, place)
        commands = list(parse_container(name, words, environment, place.path, is_replaced))
        is_member = place.kind in load_forms().cluster_kinds or _CLUSTER_PATTERN.search(text)
        setup = replace(self._read_setup(node, place), image=name, is_member=bool(is_member))
        # another server, or a program in the background, may be the one that is asked
        if commands[1:] or re.search(r"(?<![&>|])&(?![&>\d])", text):
            setup = replace(setup, network="shared")
        for command in commands:
            known = (*place.findings, *command.findings)
            yield replace(command, setup=setup, findings=known, gpu=_name_gpu(node, place))

    def _read_options(self, node: YamlMapping, place: _Place) -> Iterator[ServerCommand]:
        """Yield the server of a mapping that holds options of an engine: in lists, or by name."""
        is_kserve = isinstance(node.get("modelFormat"), Mapping)
        if is_kserve and not place.engine:
            return
        image = parse_image_name(place.image)
        engine = self.engine or place.engine or (image.engine if image else "")
        holders: dict[str, YamlMapping] = {"": node} | {
            key: value for key, value in node.items()
            if _HOLDER_KEY.search(key) and isinstance(value, Mapping) and not _SERVER_KEYS & value.keys()
        }  # fmt: skip
        environment, findings = dict(place.environment), place.findings
        options = {key: _read_named_options(one, engine or "vllm") for key, one in holders.items()}
        served = [key for key, one in options.items() for _ in one.specific]
        names = " ".join([*served, *(f"{key} vllm" for key, one in options.items() if one.is_file)])
        if re.search("vllm|sglang|trtllm|engine", names, re.I) or (served[1:] and any(served)):
            engine = engine or "vllm"
        listed, named, unread = list[str](), list[tuple[str, object]](), list[str]()
        for key, holder in holders.items():
            for name, value in holder.items():
                words = _split_command(value, place.is_compose) if _COMMAND_KEY.search(name) else []
                is_options = is_kserve or (words and words[0].startswith("-"))
                words = [] if _START_PATTERN.search(" ".join(words)) else words
                if guessed := _guess_engine(words) or (is_options and engine):
                    engine, listed = engine or str(guessed), [*listed, *words]
            environment |= _parse_environment(holder.get("env")) if key else {}
            found = options[key]
            if engine and (found.is_file or (key and found.specific)):
                named += found.known
            is_whole = not key and (place.pod or place.is_compose or is_kserve or not place.kind)
            if found.specific if key else not is_whole:
                unread += [f"{key}.{one}".lstrip(".") for one in found.others]
        if not (listed or (engine and named) or is_kserve):
            return
        named += () if options[""].is_file else options[""].specific
        cli_options = get_cli_options(engine, load_flag_lists(engine).versions[-1])
        note = f"read as options of {engine}"
        if is_kserve:
            pairs = [word.partition("=") for word in listed]
            if any(name == "--backend" and value == "huggingface" for name, _, value in pairs):
                return
            theirs, note = load_forms().kserve_options, ""
            listed = [
                theirs.get(name, name) + sign + value
                for name, sign, value in pairs
                if name != "--backend"
            ]
        words = [*listed, *_format_as_words(named, cli_options.spellings)]
        is_container = bool(place.pod and place.kind) or place.is_compose
        around = place if is_container else replace(place, pod=None)
        is_set_up = is_container or is_kserve or {"resources", "requestGPU"} & node.keys()
        setup = self._read_setup(node, around) if is_set_up else None
        setup = setup and replace(setup, image=place.image, is_member="raySpec" in node)
        why = "what becomes of it is not known here, and it may change what is served"
        findings += tuple(
            LintFinding("setting", name, f"{place.path}.{name}", "unread", why) for name in unread
        )
        yield ServerCommand(
            place.path,
            engine,
            tuple(_fill_in(words, environment, place)),
            environment,
            image.version if image and image.engine == engine else "",
            container=is_container or is_kserve or "requestGPU" in node,
            subcommand=not is_kserve,
            note=note,
            findings=findings,
            setup=setup,
            gpu=_name_gpu(node, place),
        )

    def _read_setup(self, node: YamlMapping, place: _Place) -> ContainerSetup:
        """Return what a compose service or a manifest's container is given."""
        if place.is_compose:
            name, others = place.path.rpartition(".")[2], place.parent.values()
            waits = [get_nested(one, "depends_on", name, "condition") for one in others]
            return read_service_setup(node, is_awaited="service_healthy" in waits)
        return read_pod_setup(node, place.pod, place.kind, self.objects)

    def _read_environment(
        self, node: YamlMapping, place: _Place
    ) -> tuple[dict[str, str], tuple[LintFinding, ...]]:
        """Return a container's environment, and findings about what of it is not here."""
        environment, findings = dict(place.environment), [*place.findings]
        for item in [*list_items(node.get("env_file")), node.get("env_file")]:
            path = item.get("path") if isinstance(item, Mapping) else item
            if isinstance(path, str):
                text = self.find_file(path)
                environment |= parse_assignments(text or "")
                if text is None and get_nested(item, "required") is not False:
                    findings.append(make_unread_variables(path))
        for item in list_items(node.get("envFrom")):
            name = str(get_nested(item, "configMapRef", "name"))
            environment |= _parse_environment(self.config_maps.get(name))
            if name not in self.config_maps and get_nested(item, "configMapRef"):
                findings.append(make_unread_variables(name))
        for key in ("environment", "env", "envs"):
            environment |= _parse_environment(node.get(key))
        return environment, tuple(findings)


def list_mappings(node: object, depth: int = 0) -> Iterator[Mapping[str, Any]]:
    """Yield the mappings within a document."""
    if isinstance(node, Mapping):
        yield node
    inner = node.values() if isinstance(node, Mapping) else list_items(node)
    for value in inner if depth < MAX_DEPTH else ():
        yield from list_mappings(value, depth + 1)


def _normalize(node: Any, variables: Variables | None, depth: int = 0) -> Any:
    """Return a document with keys as most forms spell them, and a compose file's variables filled in.

    Image and ShmSize become image and shmSize; `$$` is a dollar of a compose file.
    """
    if isinstance(node, Mapping) and depth < MAX_DEPTH:
        is_compose = depth > 0 or isinstance(node.get("services"), Mapping)
        return {
            key[0].lower() + key[1:] if re.fullmatch("(?:[A-Z][a-z]+)+", key) else key:
            _normalize(value, variables if is_compose else None, depth + 1)
            for key, value in ((str(key), value) for key, value in node.items())
        }  # fmt: skip
    if isinstance(node, list) and depth < MAX_DEPTH:
        return [_normalize(value, variables if depth else None, depth + 1) for value in node]
    if isinstance(node, str) and variables is not None:
        return expand_variables(node.replace("$$", "\0"), variables).replace("\0", "$")
    return node


def _read_shell(text: str, place: _Place) -> Iterator[ServerCommand]:
    """Yield the servers that shell text starts."""
    if not (mention := _START_PATTERN.search(text)):
        return
    image = parse_image_name(place.image)
    try:
        for command in find_commands(text, place.path, None, place.environment):
            is_ours = image is not None and image.engine == command.engine
            version = image.version if image and is_ours else ""
            known = (*place.findings, *command.findings)
            yield replace(
                command, gpu=place.gpu, version=command.version or version, findings=known
            )
    except PlannerError:
        engine = next((name for name in ("sglang", "trtllm") if name in mention[0]), "vllm")
        yield ServerCommand(place.path, engine, (), {}, unread=(mention[0],))


def _find_engine(node: YamlMapping) -> str:
    """Return the engine that a mapping names; KServe's format of the Hugging Face server is vLLM's."""
    for key in load_forms().engine_keys:
        value = node.get(key)
        name = str(get_nested(value, "name") if isinstance(value, Mapping) else value)
        name = "vllm" if name == "huggingface" else name.lower().replace("-", "")
        if name in _ENGINES:
            return name
    return ""


def _find_model(node: YamlMapping) -> str:
    """Return the model that a mapping names, as on the Hub; empty if it names none."""
    inner = [one for key in load_forms().model_holders if isinstance(one := node.get(key), Mapping)]
    texts = [node.get(key) for key in load_forms().model_keys]
    texts += [one.get(key) for one in inner for key in ("model_source", "modelURL", "name", "uri")]
    texts += [value for value in node.values() if str(value).startswith("hf://")]
    named = [one for one in texts if isinstance(one, str) and one]
    model = named[0].removeprefix("hf://") if named else ""
    return re.sub(r"@\w+$", "", model) if named and named[0] != model else model


def _name_model(command: ServerCommand, model: str) -> ServerCommand:
    """Return a command with the model that is named around it, unless it names one itself."""
    options = get_cli_options(command.engine, load_flag_lists(command.engine).versions[-1])
    parsed = options.parse(command.argv)
    is_named = parsed.positional or {"model", "model_path"} & {*parsed.values}
    if is_named or not model or command.unread:
        return command
    option = "--model-path" if command.engine == "sglang" else "--model"
    words = (model,) if command.subcommand else (option, model)
    return replace(command, argv=(*words, *command.argv))


def _join_referenced(
    node: YamlMapping, referenced: Mapping[str, Any], place: _Place
) -> tuple[YamlMapping, _Place]:
    """Return a mapping with what the object that it names says of the container, and of the model.

    KServe appends the arguments of the InferenceService to those of the runtime, and what else it
    says of the container is in place of the runtime's (kserve pkg/controller, MergeRuntimeContainers).
    """
    spec = referenced.get("spec") or {}
    place = replace(place, model=_find_model(spec) or place.model)
    place = replace(place, gpu=find_named_gpu(spec) or place.gpu)
    if not (containers := list_items(spec.get("containers"))):
        return node, place
    replaced = {key for key in ("command", "startupProbe", "livenessProbe") if node.get(key)}
    first = {key: value for key, value in containers[0].items() if key not in replaced}
    joined = merge_json(first, {key: value for key, value in node.items() if value is not None})
    pod = {**merge_json(spec, dict(place.parent)), "containers": [joined, *containers[1:]]}
    return joined, replace(place, pod=pod, gpu=find_named_gpu(pod) or place.gpu)


def _fill_in(words: Iterable[str], environment: Mapping[str, str], place: _Place) -> list[str]:
    """Return the words of a container with its variables, as Kubernetes writes them, and its model."""
    filled = list[str]()
    for word in words:
        if not place.is_compose:
            word = re.sub(
                r"\$\(([A-Za-z_]\w*)\)", lambda match: environment.get(match[1], match[0]), word
            )
        option, equals, value = word.rpartition("=")
        is_model = (
            value.rstrip("/") == KSERVE_DIRECTORY and place.model and "://" not in place.model
        )
        filled.append(f"{option}{equals}{place.model}" if is_model else word)
    return filled


def _name_gpu(node: YamlMapping, place: _Place) -> str:
    """Return the GPU that the file names for a container; empty for a slice of it."""
    limits = get_nested(node, "resources", "limits")
    return "" if "/mig-" in str(limits) else place.gpu


def _read_image_name(node: YamlMapping) -> str:
    """Return the image of a container or of a chart's values, with its tag; empty without one."""
    image = node.get("image")
    image = node if image is None and "repository" in node else image
    if isinstance(image, Mapping):
        tag = image.get("tag")
        return f"{image.get('repository') or image.get('name') or ''}{f':{tag}' if tag else ''}"
    return "" if image is None else str(image)


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


@dataclass(frozen=True)
class _NamedOptions:
    """What a mapping gives by name: options of an engine, and other values."""

    known: tuple[tuple[str, object], ...]
    specific: tuple[tuple[str, object], ...]  # of the known, what says how a model is served
    others: tuple[str, ...]  # keys that are no options
    is_file: bool  # a file of options and nothing else


def _read_named_options(holder: YamlMapping, engine: str) -> _NamedOptions:
    """Read a mapping as options by their names, such as max-model-len, max_model_len or maxModelLen."""
    options, forms = get_cli_options(engine, load_flag_lists(engine).versions[-1]), load_forms()
    served = {*load_argument_names(engine).arguments}
    spelled = {
        key: f"--{_convert_camel_case(key)}" for key, value in holder.items()
        if _is_scalar(value) and not _COMMAND_KEY.search(key)
    }  # fmt: skip
    matches = {key: options.find_spellings(name) for key, name in spelled.items()}
    found = {key: options[names[0]].argument for key, names in matches.items() if names}
    own = {*forms.own_keys, *forms.model_keys}
    theirs = {*own, *forms.reference_keys, *forms.engine_keys, *forms.gpu_keys}
    sizes = [
        key for key, name in found.items()
        if key not in theirs and (name in served or name.endswith("parallel_size"))
    ]  # fmt: skip
    is_file = len(spelled) == len(holder) > 1 and len(found) >= 0.6 * len(holder) and bool(sizes)
    taken = [
        key for key in spelled
        if (is_file or key not in own) and (key in found or re.search("[a-z][-_]", key))
    ]  # fmt: skip
    others = (
        key for key in spelled.keys() - {*taken} - theirs
        if not isinstance(holder[key], list) and not str(holder[key]).startswith("hf://")
    )  # fmt: skip
    known, specific = (
        tuple((spelled[key], holder[key]) for key in keys) for keys in (taken, sizes)
    )
    return _NamedOptions(known, specific, tuple(sorted(others)), is_file)


def _convert_camel_case(name: str) -> str:
    """Return maxModelLen as max-model-len, and enableLoRA as enable-lora."""
    return (
        re.sub(r"(?<=[a-z])(?=[A-Z])", "-", name.replace("LoRA", "Lora")).lower().replace("_", "-")
    )


def _split_command(value: object, is_compose: bool) -> list[str]:
    """Return the words of a command that is a list or a text.

    Compose splits a text at blanks and line breaks alike; of other files a shell reads it.
    """
    if isinstance(value, list):
        return [_format_scalar(word) for word in value if isinstance(word, str | int | float)]
    if not isinstance(value, str):
        return []
    if is_compose:
        return split_words(value)
    try:
        statements = parse_statements(value)
    except PlannerError:
        return ["sh", "-c", value]
    if len(statements) == 1:
        return list(statements[0].words)
    return ["sh", "-c", value] if statements else []


def _is_holder(key: str, value: object) -> bool:
    """Return whether the words or the options of a server may stand under a key."""
    is_options = isinstance(value, Mapping) and not _SERVER_KEYS & value.keys()
    return bool(_COMMAND_KEY.search(key) or (is_options and _HOLDER_KEY.search(key)))


def _format_scalar(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def make_unread_variables(source: str) -> LintFinding:
    """Return a finding about a file or ConfigMap of variables that is not here."""
    why = "it is not here: its variables are not known"
    return LintFinding("setting", source, f"variables of {source}", "unread", why)


def parse_assignments(text: str) -> dict[str, str]:
    """Return the variables of a file of NAME=value lines."""
    lines = re.findall(r"^[ \t]*(?:export[ \t]+)?([A-Za-z_]\w*)=(.*)$", text, re.MULTILINE)
    return {
        name: re.sub(r"(?<!\s)\s+#.*$", "", value.strip()).strip("'\"") for name, value in lines
    }


def _parse_environment(value: object) -> dict[str, str]:
    """Return an environment given as a mapping, or as a list of NAME=value or name and value."""
    if isinstance(value, Mapping):
        value = [{"name": name, "value": content} for name, content in value.items()]
    environment = dict[str, str]()
    for entry in list_items(value):
        name, equals, content = str(entry).partition("=")
        given = content if equals else None
        if isinstance(entry, Mapping):
            name, given = str(entry.get("name")), entry.get("value", f"${{{entry.get('name')}}}")
            given = "" if given is None else _format_scalar(given)
        environment[name] = f"${{{name}}}" if given is None else given
    return environment


def _is_scalar(value: object) -> bool:
    return not isinstance(value, Mapping | list) or (
        isinstance(value, list) and all(map(_is_scalar, value))
    )


def format_config_as_words(config: YamlMapping) -> tuple[str, ...]:
    """Return the scalars of a `--config` file as words of a command line."""
    pairs = ((f"--{name}", value) for name, value in config.items() if _is_scalar(value))
    return tuple(_format_as_words(pairs, ()))


def _format_as_words(
    pairs: Iterable[tuple[str, object]], spellings: Iterable[str]
) -> Iterator[str]:
    """Yield options and values as words of a command line; what is switched off by its negation."""
    for name, value in pairs:
        negation = f"--no-{name.removeprefix('--')}"
        if value is True or value is None:
            yield name
        elif value is False:
            yield from (negation,) if negation in spellings else ()
        elif isinstance(value, list):
            yield from (name, *map(_format_scalar, value))
        elif value != "":
            yield from (name, _format_scalar(value))
