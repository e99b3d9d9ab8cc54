"""Find the server commands of a text in any supported format, and the metrics that it names.

Supported are command lines, shell scripts, systemd units, Dockerfiles, compose files, manifests,
supervisord and Nomad files.
"""

import json
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path, PurePath
from typing import NamedTuple

from planner.core.errors import PlannerError
from planner.core.readers import parse_yaml, read_text
from planner.core.units import MIB
from planner.engines.cli_options import get_cli_options, is_unresolved, load_flag_lists
from planner.tools.lint.server_commands import (
    SERVER_MENTION_PATTERN,
    ServerCommand,
    find_commands,
    parse_container,
    parse_image_name,
)
from planner.tools.lint.shell_parser import (
    expand_variables,
    extract_here_documents,
    parse_statements,
)

MAX_FILE_BYTES = MIB
"""Maximum size of a file."""
MAX_COMMANDS_PER_FILE = 20
"""Maximum number of commands that are checked per file."""
YamlMapping = Mapping[str, object]
_KSERVE_OPTIONS = {"--model_name", "--model_id", "--model_dir", "--backend"}
_METRIC_NAME_PATTERN = re.compile(r"(?<![\w/.@:-])(?:vllm|sglang):[a-zA-Z]\w*(?![\w./-])")


@dataclass(frozen=True)
class ParsedSource:
    """The servers that a text starts, and the engines' metrics that it names."""

    commands: tuple[ServerCommand, ...]
    metrics: tuple[str, ...]


def read_source(what: str, engine: str | None = None) -> ParsedSource:
    """Return the servers and metrics of the file `what`, or of the command line `what`.

    Raises `PlannerError` if there are none.
    """
    path = _find_file(what)
    text, name = (read_text(path, MAX_FILE_BYTES), path.name) if path else (what, "")
    nearby = _NearbyFiles(text, name, path.parent if path else Path())
    # PowerShell continues a line with a backquote, and cmd with a caret.
    text = re.sub(r"(?<=[ \t])[`^][ \t]*\r?\n", "\\\\\n", text)
    if len(text) > MAX_FILE_BYTES:
        raise PlannerError(
            f"a command line has at most {MAX_FILE_BYTES:,} characters, got {len(text):,}"
        )
    server_commands = list(
        islice(_find_commands_in_text(text, name, engine), MAX_COMMANDS_PER_FILE)
    )
    for script in (
        () if server_commands else re.findall(r"^ExecStart=.*?(\S+\.sh)\b", text, re.MULTILINE)
    ):
        server_commands += islice(
            _find_commands_in_text(nearby.find(script) or "", "", engine), MAX_COMMANDS_PER_FILE
        )
    commands = tuple(
        _apply_config_file(_apply_plan_header(command, text), nearby) for command in server_commands
    )
    metrics = tuple(
        dict.fromkeys(word for word in _METRIC_NAME_PATTERN.findall(text) if "_" in word)
    )
    if not commands and not metrics:
        location = path.name if path else f"{what!r:.60}"
        hint = "" if engine else "; --engine says whose options they are"
        raise PlannerError(
            f"no server starts in {location}: expected `vllm serve`, `python -m sglang.launch_server`,"
            f" `trtllm-serve` or `text-generation-launcher`, or one of their images{hint}"
        )
    return ParsedSource(commands, metrics)


def _apply_plan_header(command: ServerCommand, text: str) -> ServerCommand:
    """Add the GPU, and a missing version, from the header of a plan's file."""
    title = re.search(
        rf"^# .+ on (?:.+ of )?(.+), {command.engine} (\d[\w.+]*|nightly[\w-]*)$",
        text[:2000],
        re.MULTILINE,
    )
    return (
        replace(command, version=command.version or title[2], planned_on=title[1])
        if title
        else command
    )


class _NearbyFiles(NamedTuple):
    """The places of configuration files that a text's commands name: in the text, or next to it."""

    text: str
    name: str
    folder: Path

    def find(self, path: str) -> str | None:
        """Return the content of the file at `path`; None if it is unknown."""
        name = PurePath(path).name
        if name in (here_documents := extract_here_documents(self.text)):
            return here_documents[name]
        for document in _load_yaml_documents(self.text, self.name):
            data = document.get("data") if isinstance(document, Mapping) else None
            if isinstance(data, Mapping) and isinstance(data.get(name), str):
                return str(data[name])
        for candidate in (self.folder / path, self.folder / name):
            with suppress(OSError, ValueError, PlannerError):
                if candidate.is_file():
                    return read_text(candidate, MAX_FILE_BYTES)
        return None


def _apply_config_file(command: ServerCommand, nearby: _NearbyFiles) -> ServerCommand:
    """Merge a command's configuration file: options in front, or TensorRT-LLM's settings."""
    cli_options = get_cli_options(command.engine, load_flag_lists(command.engine).versions[-1])
    options = [
        option
        for option in cli_options.parse(command.argv).options
        if option.option and option.option.argument == "config"
    ]
    if not options or not options[-1].words:
        return command
    path = options[-1].words[0]
    try:
        content = None if is_unresolved(path) else parse_yaml(nearby.find(path) or "", path)
    except PlannerError as error:
        return replace(command, note=str(error))
    if not isinstance(content, Mapping):
        return replace(command, note=f"what {path!r:.80} sets is not known: no such file here")
    note = f"read with {path!r:.80}: {', '.join(map(str, content))[:200]}"
    if command.engine == "trtllm":
        settings = {str(name).replace("-", "_"): value for name, value in content.items()}
        return replace(command, config={**command.config, **settings}, note=note)
    words = _format_as_words(
        [(f"--{name}", value) for name, value in content.items() if _is_scalar(value)]
    )
    num_leading = (
        1 if command.subcommand and command.argv and not command.argv[0].startswith("-") else 0
    )
    return replace(
        command, argv=(*command.argv[:num_leading], *words, *command.argv[num_leading:]), note=note
    )


def _find_file(what: str) -> Path | None:
    """Return the path if `what` is a file; None if it is a command line."""
    with suppress(OSError, ValueError):
        if 0 < len(what) < 4096 and "\n" not in what and Path(what).exists():
            return Path(what)
    if re.fullmatch(r"[\w./~-]+\.(service|ya?ml|json|sh|txt|env|conf)", what):
        raise PlannerError(f"cannot read {what}: no such file")
    return None


def _find_commands_in_text(text: str, name: str, engine: str | None) -> Iterator[ServerCommand]:
    """Yield the commands of a text of any format."""
    if re.search(r"^\[program:", text, re.MULTILINE):  # supervisord
        for line in re.findall(r"^command\s*=\s*(.+)$", text, re.MULTILINE):
            yield from find_commands(line, "command", engine)
    elif re.search(r"^\[Service\]\s*$", text, re.MULTILINE):
        yield from _parse_systemd_unit(text, engine)
    elif re.search(r'^\s*task\s+"[^"\n]*"\s*\{', text, re.MULTILINE):
        yield from _parse_nomad_job(text)
    elif all(
        re.search(rf"^\s*{line}", text, re.MULTILINE)
        for line in (r"FROM\s+\S+", r"(CMD|ENTRYPOINT|RUN)\b")
    ):
        yield from _parse_dockerfile(text, engine)
    elif re.search(
        r"^\s*(- )?[\w./\"-]+\s*:(\s|$)", text, re.MULTILINE
    ) or text.lstrip().startswith("{"):
        documents = list(_load_yaml_documents(text, name))
        if documents:
            for document in documents:
                yield from _find_commands_in_node(document, "", engine)
        else:
            yield from find_commands(
                re.sub(r"^(\s*)- (?=[\"'-])", r"\1\\\n", text, flags=re.MULTILINE), "", engine
            )
    else:
        yield from find_commands(text, "", engine)


def _parse_nomad_job(text: str) -> Iterator[ServerCommand]:
    """Yield the commands that the tasks of a Nomad job start in containers."""
    for task in re.split(r'^\s*task\s+"[^"\n]*"\s*\{', text, flags=re.MULTILINE)[1:]:
        pairs = dict(
            re.findall(r'^\s*"?(\w+)"?\s*=\s*"((?:[^"\\\n]|\\.)*)"\s*$', task, re.MULTILINE)
        )
        lists = dict(re.findall(r"^\s*(args|entrypoint)\s*=\s*(\[[^\]]*\])", task, re.MULTILINE))
        words = {
            key: _parse_json_list(re.sub(r",\s*\]", "]", value)) for key, value in lists.items()
        }
        command = [pairs["command"]] if "command" in pairs else []
        command_words = [*words.get("entrypoint", []), *command, *words.get("args", [])]
        environment = {name: value for name, value in pairs.items() if name.isupper()}
        yield from parse_container(
            pairs.get("image", ""), command_words, environment, "task", "entrypoint" in lists
        )


def _parse_systemd_unit(text: str, engine: str | None) -> Iterator[ServerCommand]:
    """Yield the commands that a systemd unit starts."""
    text = re.sub(r"\\\n\s*", " ", text)
    environment: dict[str, str] = {}
    for line in re.findall(r"^Environment=(.*)$", text, re.MULTILINE):
        with suppress(ValueError):
            environment |= dict(
                word.partition("=")[::2] for word in shlex.split(line) if "=" in word
            )
    for number, line in enumerate(
        re.findall(r"^ExecStart=[@\-:+!]*(.+)$", text, re.MULTILINE), start=1
    ):
        yield from find_commands(
            line, f"ExecStart {number}" if number > 1 else "ExecStart", engine, environment
        )


def _parse_dockerfile(text: str, engine: str | None) -> Iterator[ServerCommand]:
    """Yield the command that an image built from a Dockerfile starts."""
    text = re.sub(r"\\\r?\n", " ", text)
    image, environment, instructions = (
        "",
        dict[str, str](),
        {"ENTRYPOINT": list[str](), "CMD": list[str]()},
    )
    for key, rest in re.findall(r"^\s*([A-Z]+)\s+(.+?)\s*$", text, re.MULTILINE):
        if key == "FROM":
            image, instructions = rest.split()[0], {"ENTRYPOINT": [], "CMD": []}
        elif key == "ENV":
            words = rest.split() if "=" not in rest.split()[0] else _split_words(rest)
            assignments = words if "=" in words[0] else [f"{words[0]}={' '.join(words[1:])}"]
            environment |= dict(word.partition("=")[::2] for word in assignments)
        elif key in instructions:
            instructions[key] = _parse_json_list(rest) or ["sh", "-c", rest]
    yield from parse_container(
        image,
        [*instructions["ENTRYPOINT"], *instructions["CMD"]],
        environment,
        "CMD",
        bool(instructions["ENTRYPOINT"]),
    )


def _split_words(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError:
        return text.split()


def _parse_json_list(text: str) -> list[str]:
    """Return a JSON list of words, as in a Dockerfile; empty if `text` is none."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return []
    return [str(word) for word in value] if isinstance(value, list) else []


def _load_yaml_documents(text: str, name: str) -> Iterator[YamlMapping | list[object]]:
    """Yield the mappings and lists of a YAML or JSON text; none if it does not parse."""
    for part in re.split(r"^---\s*$", text, flags=re.MULTILINE):
        try:
            document = parse_yaml(part, name or "the text")
        except (PlannerError, RecursionError):
            return
        if isinstance(document, dict | list):
            yield document


def _find_commands_in_node(
    node: object, location: str, engine: str | None, depth: int = 0
) -> Iterator[ServerCommand]:
    """Yield the commands anywhere inside a document: containers, and shell text."""
    if depth > 40:
        return
    if isinstance(node, list):
        for index, item in enumerate(node):
            yield from _find_commands_in_node(item, f"{location}[{index}]", engine, depth + 1)
        return
    if not isinstance(node, Mapping):
        if isinstance(node, str) and SERVER_MENTION_PATTERN.search(node):
            with suppress(PlannerError):
                yield from find_commands(node, location, None)
        return
    if "modelURL" in node:
        yield _parse_production_stack(node, location)
        return
    if isinstance(node.get("modelFormat"), Mapping):
        yield from _parse_kserve(node, location)
        return
    if options := _read_config_options(node, engine):
        yield ServerCommand(
            location or "configuration", engine or "vllm", options, {}, subcommand=True
        )
        return
    server_commands = list(_parse_container_node(node, location))
    yield from server_commands
    for key, value in node.items():
        if not (server_commands and key in ("command", "args", "entrypoint")):
            yield from _find_commands_in_node(
                value, f"{location}.{key}".lstrip("."), engine, depth + 1
            )


def _parse_container_node(node: YamlMapping, location: str) -> Iterator[ServerCommand]:
    """Yield the command of a compose service, or of a manifest's container."""
    words = [
        word
        for key in ("entrypoint", "command", "args")
        for word in _split_command_value(node.get(key))
    ]
    image = node.get("image")
    image = image.get("repository") if isinstance(image, Mapping) else image
    name = "" if image is None else str(image)
    if not words and not parse_image_name(name):
        return
    environment = _parse_environment(node.get("environment")) | _parse_environment(node.get("env"))
    expanded = []
    for word in words:
        word = re.sub(
            r"\$\(([A-Za-z_]\w*)\)", lambda match: environment.get(match[1], match[0]), word
        )
        expanded.append(expand_variables(word.replace("$$", "\0"), {}).replace("\0", "$"))
    is_replaced = "entrypoint" in node or ("command" in node and "args" in node)
    for command in parse_container(name, expanded, environment, location, is_replaced):
        yield replace(command, num_visible_gpus=_read_gpu_limit(node))


def _read_gpu_limit(node: YamlMapping) -> int | None:
    """Return the number of GPUs of a pod's container or compose service; None if it is not set."""
    limits = _get_nested(node, "resources", "limits")
    if isinstance(limits, Mapping):
        counts = (limits[name] for name in limits if str(name).endswith(("/gpu", "/gaudi")))
        return _parse_count(next(counts, None))
    devices = _get_nested(node, "deploy", "resources", "reservations", "devices")
    device = devices[0] if isinstance(devices, list) and devices else None
    count, ids = _get_nested(device, "count"), _get_nested(device, "device_ids")
    return count if isinstance(count, int) else len(ids) if isinstance(ids, list) else None


def _get_nested(node: object, *keys: str) -> object:
    """Return the value under nested keys; None if there is none."""
    for key in keys:
        node = node.get(key) if isinstance(node, Mapping) else None
    return node


def _parse_count(value: object) -> int | None:
    text = str(value)
    return int(text) if text.isdecimal() and len(text) < 10 else None


def _parse_production_stack(node: YamlMapping, location: str) -> ServerCommand:
    """Return the command that vLLM's production-stack builds from a model's `vllmConfig`."""
    config = node.get("vllmConfig")
    pairs = list[tuple[str, object]]()
    for key, value in config.items() if isinstance(config, Mapping) else ():
        name = re.sub(r"(?<=[a-z])(?=[A-Z])", "-", str(key)).lower()
        if key not in ("extraArgs", "v1") and _is_scalar(value):
            pairs.append((f"--no-{name}", True) if value is False else (f"--{name}", value))
    extra = config.get("extraArgs") if isinstance(config, Mapping) else None
    engine_image = parse_image_name(f"{node.get('repository', '')}:{node.get('tag', '')}")
    words = (
        _format_scalar(node["modelURL"]),
        *_format_as_words(pairs),
        *_split_command_value(extra),
    )
    version = engine_image.version if engine_image else ""
    return ServerCommand(
        location,
        "vllm",
        words,
        _parse_environment(node.get("env")),
        version,
        True,
        True,
        num_visible_gpus=_parse_count(node.get("requestGPU", "")),
    )


def _parse_kserve(node: YamlMapping, location: str) -> Iterator[ServerCommand]:
    """Yield the command that KServe's vLLM runtimes build from an InferenceService's model.

    `--model_id` and `--model_name` are options of its Hugging Face server, and
    `--backend=huggingface` starts no vLLM (kserve.github.io, Hugging Face runtime, 0.15 to 0.20).
    """
    kind = str(_get_nested(node, "modelFormat", "name")).lower()
    words = [part for word in _split_command_value(node.get("args")) for part in word.split("=", 1)]
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
    yield ServerCommand(
        location,
        "vllm",
        argv,
        _parse_environment(node.get("env")),
        container=True,
        note=note,
        num_visible_gpus=_read_gpu_limit(node),
    )


def _split_command_value(value: object) -> list[str]:
    """Return the words of a command that is a list, or a text that a shell splits."""
    if isinstance(value, list):
        return [_format_scalar(word) for word in value if isinstance(word, str | int | float)]
    if not isinstance(value, str):
        return []
    statements = parse_statements(value)
    if len(statements) == 1:
        return list(statements[0].words)
    return ["sh", "-c", value] if statements else []


def _format_scalar(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _parse_environment(value: object) -> dict[str, str]:
    """Return an environment given as a mapping, or as a list of NAME=value or name and value."""
    if isinstance(value, Mapping):
        return {
            str(name): "" if content is None else _format_scalar(content)
            for name, content in value.items()
        }
    environment = {}
    for entry in value if isinstance(value, list) else []:
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
    """Return a `--config` file as options; empty if the mapping is something else."""
    cli_options = get_cli_options(engine or "vllm", load_flag_lists(engine or "vllm").versions[-1])
    names = [f"--{name}" for name in node if isinstance(name, str)]
    num_known = sum(len(cli_options.find_spellings(name)) == 1 for name in names)
    if (
        len(names) < 2
        or num_known < 0.6 * len(node)
        or not all(_is_scalar(value) for value in node.values())
    ):
        return ()
    return tuple(_format_as_words(zip(names, node.values(), strict=False)))


def _is_scalar(value: object) -> bool:
    return not isinstance(value, Mapping | list) or (
        isinstance(value, list) and all(map(_is_scalar, value))
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
