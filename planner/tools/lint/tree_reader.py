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
    ENGINES,
    SERVER_MENTION_PATTERN,
    ServerCommand,
    find_commands,
    guess_engine,
    parse_container,
    parse_image_name,
)
from planner.tools.lint.shell_parser import (
    Variables,
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
        variables = Variables({name: [value] for name, value in given.items()})
        self.engine, self.find_file, self.used = engine, find_file, list[object]()
        self.documents = [_normalize(one, variables) for one in documents]
        mappings = [one for one in self.documents if isinstance(one, Mapping)]
        self.objects: list[Mapping[str, Any]] = mappings + [
            item for one in mappings for item in list_items(one.get("items")) if isinstance(item, Mapping)
        ]  # fmt: skip

    def read(self) -> Iterator[ServerCommand | LintFinding]:
        """Yield the servers, and what may say something of one and was not understood."""
        joined = [(one, self._join(one, one)) for one in self.documents]
        for document, whole in joined:
            known = whole if isinstance(whole, Mapping) else {}
            kind = str(known.get("kind", ""))
            # what another object names is read there
            is_used = any(document is one for one in self.used)
            if not is_used and not (kind == "ConfigMap" and self.objects[1:]):
                is_compose = isinstance(known.get("services"), Mapping)
                yield from self._walk(whole, _Place(kind=kind, is_compose=is_compose))

    def _join(self, node: Any, document: object, depth: int = 0) -> Any:
        """Return a node with what the objects that it names say of its container, and of its model.

        KServe appends the arguments of the InferenceService to those of the runtime, and what else it
        says of the container is in place of the runtime's (kserve pkg/controller, MergeRuntimeContainers).
        """
        if isinstance(node, list) and depth < MAX_DEPTH:
            return [self._join(one, document, depth + 1) for one in node]
        if not isinstance(node, Mapping) or depth >= MAX_DEPTH:
            return node
        node = {key: self._join(value, document, depth + 1) for key, value in node.items()}
        for key in (key for key in load_forms().names["reference_keys"] if node.get(key)):
            name = get_nested(node, key, "name") or node[key]
            for one in self.objects:
                if one is not document and get_nested(one, "metadata", "name") == name:
                    self.used.append(one)
                    spec = one.get("spec") or {}
                    own = {
                        name: each
                        for name, each in node.items()
                        if name != key and each is not None
                    }
                    if not (containers := list_items(spec.get("containers"))):
                        return {
                            name: each for name, each in spec.items() if "hf://" in str(each)
                        } | own
                    theirs = {
                        name: each
                        for name, each in containers[0].items()
                        if name not in own or (isinstance(each, list) and name != "command")
                    }
                    return {**spec, "containers": [merge_json(theirs, own), *containers[1:]]}
        return node

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
        found = [*self._read_container(node, place)]
        if not any(one.argv or one.unread for one in found):
            found = [*self._read_options(node, place)] or found
        yield from (_name_model(one, place.model) for one in found)
        is_ours = re.search("|".join(ENGINES), f"{place.engine} {place.image} {[*node]}")
        for key, value in node.items():
            is_options = _COMMAND_KEY.search(key) or _is_option_mapping(key, value)
            if key == "entrypoint" or (found and (key == "image" or is_options)):
                continue
            inner = [*self._walk(value, place.enter(key, node))]
            yield from inner
            if is_ours and not inner and value and _SERVING_KEY.search(key):
                name = f"{place.path}.{key}".lstrip(".")
                why = f"nothing here reads {name:.80}, which may change what is served"
                yield LintFinding("setting", name[-80:], name, "unread", why)

    def _read_around(self, node: YamlMapping, place: _Place) -> _Place:
        """Return the place of what is inside a mapping: with what the mapping says of a server."""
        environment, findings = dict(place.environment), [*place.findings]
        for item in [*list_items(node.get("env_file")), node.get("env_file")]:
            path = item.get("path") if isinstance(item, Mapping) else item
            if isinstance(path, str):
                text = self.find_file(path)
                environment |= parse_assignments(text or "")
                findings += [_make_unread("env_file", "its variables are")] * (text is None)
        for item in list_items(node.get("envFrom")):
            if name := get_nested(item, "configMapRef", "name"):
                findings.append(_make_unread(str(name), "its variables are"))
        for key in ("environment", "env", "envs"):
            environment |= _parse_environment(node.get(key))
        gpu = find_named_gpu(node)
        if count := re.match(r"(\d+)x", gpu):
            environment |= dict.fromkeys(load_forms().names["gpu_counts"], count[1])
        return replace(
            place,
            environment=environment,
            findings=tuple(findings),
            gpu=gpu or place.gpu,
            image=_read_image_name(node) or place.image,
            engine=_find_engine(node) or place.engine,
            model=_find_model(node) or place.model,
            pod=node if isinstance(node.get("containers"), list) else place.pod,
        )

    def _read_container(self, node: YamlMapping, place: _Place) -> Iterator[ServerCommand]:
        """Yield the server of a compose service, or of what else has an image and words for it."""
        image = node.get("image")  # vLLM's chart has the command in it
        holder, environment = (
            {**image, **node} if isinstance(image, Mapping) else node,
            dict(place.environment),
        )
        lists = [
            _split_command(holder.get(key), place.is_compose)
            for key in ("entrypoint", "command", "args", "exec")
        ]
        for option, value in (
            place.environment.items() if image else ()
        ):  # such as VLLM_ADDITIONAL_ARGS
            given = split_words(value) if _COMMAND_KEY.search(option) else []
            if option not in str(lists) and guess_engine(given):
                lists[-1] = [*lists[-1], *given]
                del environment[option]
        words, name = [word for one in lists for word in one], _read_image_name(node)
        is_task = node.get("commands") or node.get("run")  # read as shell text
        if not words and (is_task or not image or not parse_image_name(name)):
            return
        text = " ".join(words)
        if _WORKER_PATTERN.search(text) and not SERVER_MENTION_PATTERN.search(text):
            return  # the server starts in another container of its cluster
        # Kubernetes' command is in place of the image's entry point, and compose's is not
        is_program = bool(lists[1]) and not lists[1][0].startswith("-")
        is_cleared = holder.get("entrypoint") is not None  # of compose by [], too
        is_replaced = bool(lists[0]) or (is_cleared if place.is_compose else is_program)
        words = _fill_in(words, environment, place)
        commands = list(parse_container(name, words, environment, place.path, is_replaced))
        is_member = place.kind in load_forms().names["cluster_kinds"] or _CLUSTER_PATTERN.search(
            text
        )
        setup = replace(self._read_setup(node, place), image=name, is_member=bool(is_member))
        # another server, or a program in the background, may be the one that is asked
        if commands[1:] or re.search(r"(?<![&>|])&(?![&>\d])", text):
            setup = replace(setup, network="shared")
        for command in commands:
            known = (*place.findings, *command.findings)
            yield replace(command, setup=setup, findings=known, gpu=_name_gpu(node, place))

    def _read_options(self, node: YamlMapping, place: _Place) -> Iterator[ServerCommand]:
        """Yield the server of a mapping that holds options of an engine: in lists, or by name."""
        is_kserve, image = (
            isinstance(node.get("modelFormat"), Mapping),
            parse_image_name(place.image),
        )
        engine = self.engine or place.engine or (image.engine if image else "")
        holders = {"": node} | {
            key: one for key, one in node.items()
            if isinstance(one, Mapping) and _is_option_mapping(key, one)
        }  # fmt: skip
        environment, findings = dict(place.environment), [*place.findings]
        is_whole = place.pod or place.is_compose or is_kserve or not place.kind
        listed, named, is_server = list[str](), list[tuple[str, object]](), False
        for key, holder in holders.items():
            for name, value in holder.items():
                words = _split_command(value, place.is_compose) if _COMMAND_KEY.search(name) else []
                words = [] if _START_PATTERN.search(" ".join(words)) else words
                is_options = is_kserve or (words and words[0].startswith("-"))
                if guessed := guess_engine(words) or (is_options and engine):
                    engine, listed = engine or str(guessed), [*listed, *words]
            environment |= _parse_environment(holder.get("env")) if key else {}
            options, others = _read_named_options(holder, engine or "vllm", bool(key))
            is_many = len(options) > 1 and (key or not others)
            if options and (is_many or re.search("vllm|sglang|trtllm|engine", key, re.IGNORECASE)):
                engine = engine or "vllm"
            named += options if engine else []
            is_server |= bool(options) and (bool(key) or not others)
            if options if key else not is_whole:
                why = "what becomes of it is", "and it may change what is served"
                findings += [_make_unread(f"{key}.{one}".lstrip("."), *why) for one in others]
        if not engine or not (listed or is_server or is_kserve):
            return
        if "--backend=huggingface" in listed:  # another server
            return
        spellings = get_cli_options(engine, load_flag_lists(engine).versions[-1]).spellings
        theirs = load_forms().spellings["kserve_options"] if is_kserve else {}
        pairs = [
            (theirs.get(name, name), sign + value)
            for name, sign, value in (word.partition("=") for word in listed)
        ]
        words = [name + value for name, value in pairs if name]
        is_container = bool(place.pod and place.kind) or place.is_compose
        around = place if is_container else replace(place, pod=None)
        is_set_up = is_container or is_kserve or {"resources", "requestGPU"} & node.keys()
        setup = self._read_setup(node, around) if is_set_up else None
        yield ServerCommand(
            place.path,
            engine,
            tuple(_fill_in([*words, *format_options(named, spellings)], environment, place)),
            environment,
            image.version if image and image.engine == engine else "",
            container=is_container or is_kserve or "requestGPU" in node,
            subcommand=not is_kserve,
            note=f"read as options of {engine}",
            findings=tuple(findings),
            setup=setup and replace(setup, image=place.image, is_member="raySpec" in node),
            gpu=_name_gpu(node, place),
        )

    def _read_setup(self, node: YamlMapping, place: _Place) -> ContainerSetup:
        """Return what a compose service or a manifest's container is given."""
        if place.is_compose:
            name, others = place.path.rpartition(".")[2], place.parent.values()
            waits = [get_nested(one, "depends_on", name, "condition") for one in others]
            return read_service_setup(node, is_awaited="service_healthy" in waits)
        return read_pod_setup(node, place.pod, place.kind, self.objects)


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
        return variables.expand_text(node.replace("$$", "\0")).replace("\0", "$")
    return node


def _read_shell(text: str, place: _Place) -> Iterator[ServerCommand]:
    """Yield the servers that shell text starts."""
    if not _START_PATTERN.search(text):
        return
    image = parse_image_name(place.image)
    if re.search(r"(^|\.)(cmd|command)$", place.path):  # no shell is named that would end a line
        text = re.sub(r"\\?\n(?=\s*-)", " ", text)
    for command in find_commands(text, place.path, None, place.environment):
        is_ours = image is not None and image.engine == command.engine
        version = command.version or (image.version if image and is_ours else "")
        known = (*place.findings, *command.findings)
        yield replace(command, gpu=place.gpu, version=version, findings=known)


def _find_engine(node: YamlMapping) -> str:
    """Return the engine that a mapping names; KServe's format of the Hugging Face server is vLLM's."""
    for key in load_forms().names["engine_keys"]:
        value = node.get(key)
        name = str(get_nested(value, "name") if isinstance(value, Mapping) else value)
        name = "vllm" if name == "huggingface" else name.lower().replace("-", "")
        if name in ENGINES:
            return name
    return ""


def _find_model(node: YamlMapping) -> str:
    """Return the model that a mapping names, as on the Hub; empty if it names none."""
    inner = [
        one
        for key in load_forms().names["model_holders"]
        if isinstance(one := node.get(key), Mapping)
    ]
    texts = [node.get(key) for key in load_forms().names["model_keys"]]
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


def _read_named_options(
    holder: YamlMapping, engine: str, is_inner: bool
) -> tuple[list[tuple[str, object]], list[str]]:
    """Return the options of a mapping by name, such as max-model-len or maxModelLen, and other keys.

    Unless it is the value of a key for options, or has them alone, those count that say how a model is served.
    """
    options, forms = get_cli_options(engine, load_flag_lists(engine).versions[-1]), load_forms()
    known_here = (
        forms.names["own_keys"],
        forms.names["model_keys"],
        forms.names["reference_keys"],
        forms.names["engine_keys"],
        forms.names["gpu_keys"],
    )
    theirs = {name for names in known_here for name in names} - {"model"}
    spelled = {
        key: "--" + re.sub(r"(?<=[a-z])(?=[A-Z])", "-", key.replace("LoRA", "Lora")).lower().replace("_", "-")
        for key, value in holder.items()
        if key not in theirs and is_scalar(value) and not _COMMAND_KEY.search(key)
        and not str(value).startswith("hf://")
    }  # fmt: skip
    found = {
        key: options[name].argument for key, name in spelled.items() if name in options.spellings
    }
    served = load_argument_names(engine).arguments
    sizes = [key for key, name in found.items() if name in served or name.endswith("parallel_size")]
    is_file = 1 < len(holder) <= len(found) / 0.6 and all(map(is_scalar, holder.values()))
    taken = sizes
    if sizes and (is_inner or is_file):
        taken = [key for key in spelled if key in found or re.search("[a-z][-_]", key)]
    others = sorted(
        key for key in spelled.keys() - {*taken, "model"} if not isinstance(holder[key], list)
    )
    return [(spelled[key], holder[key]) for key in taken], others


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
    statements = parse_statements(value)
    return list(statements[0].words) if len(statements) == 1 else ["sh", "-c", value]


def _is_option_mapping(key: str, value: object) -> bool:
    """Return whether a value is a mapping of options, by its key."""
    is_options = isinstance(value, Mapping) and not _SERVER_KEYS & value.keys()
    return bool(is_options and _HOLDER_KEY.search(key))


def _format_scalar(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _make_unread(name: str, what: str, so: str = "") -> LintFinding:
    """Return a finding about something of which it is not known here what it says."""
    why = f"{what} not known here{f', {so}' if so else ''}"
    return LintFinding("setting", name, name, "unread", why)


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


def is_scalar(value: object) -> bool:
    return not isinstance(value, Mapping | list) or (
        isinstance(value, list) and all(map(is_scalar, value))
    )


def format_options(pairs: Iterable[tuple[str, object]], spellings: Iterable[str]) -> Iterator[str]:
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
