"""Where a text starts a server: command line, shell script, systemd unit, Dockerfile, compose file or manifest."""

import json
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path, PurePath
from typing import Any, NamedTuple

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
"""Bytes of a file that is read."""
MAX_COMMANDS_PER_FILE = 20
"""Commands of one file that are looked at."""
_KSERVE_OPTIONS = {"--model_name", "--model_id", "--model_dir", "--backend"}
_METRIC_NAME_PATTERN = re.compile(r"(?<![\w/.@:-])(?:vllm|sglang):[a-zA-Z]\w*(?![\w./-])")


@dataclass(frozen=True)
class ParsedSource:
    """What a text holds: servers that it starts, and the engines' metrics that it names."""

    commands: tuple[ServerCommand, ...]
    metrics: tuple[str, ...]


def read_source(what: str, engine: str | None = None) -> ParsedSource:
    """What the file called `what`, or the command line `what`, starts and watches."""
    path = _find_file(what)
    text, name = (read_text(path, MAX_FILE_BYTES), path.name) if path else (what, "")
    beside = _NearbyFiles(text, name, path.parent if path else Path())
    text = re.sub(
        r"(?<=[ \t])[`^][ \t]*\r?\n", "\\\\\n", text
    )  # lines that PowerShell and cmd carry on
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
            _find_commands_in_text(beside.find(script) or "", "", engine), MAX_COMMANDS_PER_FILE
        )
    found = tuple(
        _apply_config_file(_apply_plan_header(command, text), beside) for command in server_commands
    )
    metrics = tuple(
        dict.fromkeys(word for word in _METRIC_NAME_PATTERN.findall(text) if "_" in word)
    )
    if not found and not metrics:
        where = path.name if path else f"{what!r:.60}"
        hint = "" if engine else "; --engine says whose options they are"
        raise PlannerError(
            f"no server starts in {where}: expected `vllm serve`, `python -m sglang.launch_server`,"
            f" `trtllm-serve` or `text-generation-launcher`, or one of their images{hint}"
        )
    return ParsedSource(found, metrics)


def _apply_plan_header(command: ServerCommand, text: str) -> ServerCommand:
    """The command with the GPU, and where it names none itself the version, that head the files of a plan."""
    title = re.search(
        rf"^# .+ on (?:.+ of )?(.+), {command.engine} (\d[\w.+]*|nightly\S*)$",
        text[:2000],
        re.MULTILINE,
    )
    return (
        replace(command, version=command.version or title[2], planned_on=title[1])
        if title
        else command
    )


class _NearbyFiles(NamedTuple):
    """Where the configuration files that a text's commands name may be: written in it, or lying beside it."""

    text: str
    name: str
    folder: Path

    def find(self, path: str) -> str | None:
        """What the file at `path` holds; None where nobody knows."""
        name = PurePath(path).name
        if name in (written := extract_here_documents(self.text)):
            return written[name]
        for document in _load_yaml_documents(self.text, self.name):
            data = document.get("data") if isinstance(document, Mapping) else None
            if isinstance(data, Mapping) and isinstance(data.get(name), str):
                return str(data[name])
        for place in (self.folder / path, self.folder / name):
            with suppress(OSError, ValueError, PlannerError):
                if place.is_file():
                    return read_text(place, MAX_FILE_BYTES)
        return None


def _apply_config_file(command: ServerCommand, beside: _NearbyFiles) -> ServerCommand:
    """The command with what its configuration file says: options in front, or what TensorRT-LLM keeps there."""
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
        content = None if is_unresolved(path) else parse_yaml(beside.find(path) or "", path)
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
    at = 1 if command.subcommand and command.argv and not command.argv[0].startswith("-") else 0
    return replace(command, argv=(*command.argv[:at], *words, *command.argv[at:]), note=note)


def _find_file(what: str) -> Path | None:
    """The file that is meant; None where it is a command line."""
    with suppress(OSError, ValueError):
        if 0 < len(what) < 4096 and "\n" not in what and Path(what).exists():
            return Path(what)
    if re.fullmatch(r"[\w./~-]+\.(service|ya?ml|json|sh|txt|env|conf)", what):
        raise PlannerError(f"cannot read {what}: no such file")
    return None


def _find_commands_in_text(text: str, name: str, engine: str | None) -> Iterator[ServerCommand]:
    """The commands of a text of any of the formats."""
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
    """What the tasks of a Nomad job start in their containers."""
    for task in re.split(r'^\s*task\s+"[^"\n]*"\s*\{', text, flags=re.MULTILINE)[1:]:
        pairs = dict(
            re.findall(r'^\s*"?(\w+)"?\s*=\s*"((?:[^"\\\n]|\\.)*)"\s*$', task, re.MULTILINE)
        )
        lists = dict(re.findall(r"^\s*(args|entrypoint)\s*=\s*(\[[^\]]*\])", task, re.MULTILINE))
        words = {
            key: _parse_json_list(re.sub(r",\s*\]", "]", found)) for key, found in lists.items()
        }
        command = [pairs["command"]] if "command" in pairs else []
        started = [*words.get("entrypoint", []), *command, *words.get("args", [])]
        environment = {name: value for name, value in pairs.items() if name.isupper()}
        yield from parse_container(
            pairs.get("image", ""), started, environment, "task", "entrypoint" in lists
        )


def _parse_systemd_unit(text: str, engine: str | None) -> Iterator[ServerCommand]:
    """What a systemd unit starts."""
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
    """What an image built from a Dockerfile starts."""
    text = re.sub(r"\\\r?\n", " ", text)
    base, environment, parts = "", dict[str, str](), {"ENTRYPOINT": list[str](), "CMD": list[str]()}
    for key, rest in re.findall(r"^\s*([A-Z]+)\s+(.+?)\s*$", text, re.MULTILINE):
        if key == "FROM":
            base, parts = rest.split()[0], {"ENTRYPOINT": [], "CMD": []}
        elif key == "ENV":
            words = rest.split() if "=" not in rest.split()[0] else _split_words(rest)
            tied = words if "=" in words[0] else [f"{words[0]}={' '.join(words[1:])}"]
            environment |= dict(word.partition("=")[::2] for word in tied)
        elif key in parts:
            parts[key] = _parse_json_list(rest) or ["sh", "-c", rest]
    yield from parse_container(
        base, [*parts["ENTRYPOINT"], *parts["CMD"]], environment, "CMD", bool(parts["ENTRYPOINT"])
    )


def _split_words(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError:
        return text.split()


def _parse_json_list(text: str) -> list[str]:
    """A JSON list of words, as in a Dockerfile; empty where it is none."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return []
    return [str(word) for word in value] if isinstance(value, list) else []


def _load_yaml_documents(text: str, name: str) -> Iterator[Any]:
    """The documents of a YAML (or JSON) text that are mappings or lists; none where it is no YAML."""
    for part in re.split(r"^---\s*$", text, flags=re.MULTILINE):
        try:
            document = parse_yaml(part, name or "the text")
        except (PlannerError, RecursionError):
            return
        if isinstance(document, dict | list):
            yield document


def _find_commands_in_node(
    node: Any, location: str, engine: str | None, depth: int = 0
) -> Iterator[ServerCommand]:
    """Commands anywhere inside a document: containers, and text that a shell would run."""
    if depth > 40:
        return
    if isinstance(node, list):
        for index, each in enumerate(node):
            yield from _find_commands_in_node(each, f"{location}[{index}]", engine, depth + 1)
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
    if flat := _read_config_options(node, engine):
        yield ServerCommand(
            location or "configuration", engine or "vllm", flat, {}, subcommand=True
        )
        return
    server_commands = list(_parse_container_node(node, location))
    yield from server_commands
    for key, value in node.items():
        if not (server_commands and key in ("command", "args", "entrypoint")):
            yield from _find_commands_in_node(
                value, f"{location}.{key}".lstrip("."), engine, depth + 1
            )


def _parse_container_node(node: Mapping[str, Any], location: str) -> Iterator[ServerCommand]:
    """What a service of a compose file, or a container of a manifest, starts."""
    words = [
        word
        for key in ("entrypoint", "command", "args")
        for word in _split_command_value(node.get(key))
    ]
    name = node.get("image")
    name = (
        ""
        if name is None
        else str(name.get("repository", "") if isinstance(name, Mapping) else name)
    )
    if not words and not parse_image_name(name):
        return
    environment = _parse_environment(node.get("environment")) | _parse_environment(node.get("env"))
    filled = []
    for word in words:
        word = re.sub(
            r"\$\(([A-Za-z_]\w*)\)", lambda match: environment.get(match[1], match[0]), word
        )
        filled.append(expand_variables(word.replace("$$", "\0"), {}).replace("\0", "$"))
    replaced = "entrypoint" in node or ("command" in node and "args" in node)
    for command in parse_container(name, filled, environment, location, replaced):
        yield replace(command, num_visible_gpus=_read_gpu_limit(node))


def _read_gpu_limit(node: Mapping[str, Any]) -> int | None:
    """GPUs that a pod's container, or a compose service, is limited to; None where nothing says how many."""
    limits = node.get("resources")
    limits = limits.get("limits") if isinstance(limits, Mapping) else None
    if isinstance(limits, Mapping):
        counts = [
            str(many) for name, many in limits.items() if str(name).endswith(("/gpu", "/gaudi"))
        ]
        return int(counts[0]) if counts and counts[0].isdecimal() and len(counts[0]) < 10 else None
    place: Any = node
    for key in ("deploy", "resources", "reservations", "devices"):
        place = place.get(key) if isinstance(place, Mapping) else None
    device = place[0] if isinstance(place, list) and place and isinstance(place[0], Mapping) else {}
    many, named = device.get("count"), device.get("device_ids")
    return many if isinstance(many, int) else len(named) if isinstance(named, list) else None


def _parse_production_stack(node: Mapping[str, Any], location: str) -> ServerCommand:
    """What vLLM's production-stack makes of a model's values: its `vllmConfig` as options."""
    config = node.get("vllmConfig")
    pairs = list[tuple[str, Any]]()
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
    asked = str(node.get("requestGPU", ""))
    gpus = int(asked) if asked.isdecimal() and len(asked) < 10 else None
    version = engine_image.version if engine_image else ""
    return ServerCommand(
        location,
        "vllm",
        words,
        _parse_environment(node.get("env")),
        version,
        True,
        True,
        num_visible_gpus=gpus,
    )


def _parse_kserve(node: Mapping[str, Any], location: str) -> Iterator[ServerCommand]:
    """What KServe's runtimes of vLLM make of an InferenceService's model; its Hugging Face server has names of its own.

    `--model_id` and `--model_name` are its own, and `--backend=huggingface` starts no vLLM
    (kserve.github.io, Hugging Face runtime, 0.15 to 0.20).
    """
    kind = str(node["modelFormat"].get("name", "")).lower()
    words = [part for word in _split_command_value(node.get("args")) for part in word.split("=", 1)]
    own = {name: words[at + 1] for at, name in enumerate(words[:-1]) if name in _KSERVE_OPTIONS}
    if kind not in ("huggingface", "vllm") or own.get("--backend") == "huggingface":
        return
    taken = {
        at + step
        for at, name in enumerate(words[:-1])
        if name in _KSERVE_OPTIONS
        for step in (0, 1)
    }
    model = (
        own.get("--model_id")
        or str(node.get("storageUri", "")).removeprefix("hf://")
        or own.get("--model_dir", "")
    )
    rest = [word for at, word in enumerate(words) if at not in taken]
    argv = (*(["--model", model] if model else []), *rest)
    note = f"left to KServe: {', '.join(own)}" if own else ""
    yield ServerCommand(
        location,
        "vllm",
        argv,
        _parse_environment(node.get("env")),
        container=True,
        note=note,
        num_visible_gpus=_read_gpu_limit(node),
    )


def _split_command_value(value: Any) -> list[str]:
    """A command as a list, or as one text that is split as a shell does."""
    if isinstance(value, list):
        return [_format_scalar(word) for word in value if isinstance(word, str | int | float)]
    if not isinstance(value, str):
        return []
    shell_statements = parse_statements(value)
    return (
        list(shell_statements[0].words)
        if len(shell_statements) == 1
        else ["sh", "-c", value]
        if shell_statements
        else []
    )


def _format_scalar(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _parse_environment(value: Any) -> dict[str, str]:
    """Environment in any of its forms: a mapping, a list of NAME=value, or a list of name and value."""
    if isinstance(value, Mapping):
        return {
            str(name): "" if held is None else _format_scalar(held) for name, held in value.items()
        }
    made = {}
    for entry in value if isinstance(value, list) else []:
        if isinstance(entry, Mapping) and "name" in entry:
            name = str(entry["name"])
            made[name] = _format_scalar(entry["value"]) if "value" in entry else f"${{{name}}}"
        elif isinstance(entry, str):
            name, equals, held = entry.partition("=")
            made[name] = held if equals else f"${{{name}}}"
    return made


def _read_config_options(node: Mapping[str, Any], engine: str | None) -> tuple[str, ...]:
    """A file for `--config` as the options that it stands for; empty where the mapping is something else."""
    cli_options = get_cli_options(engine or "vllm", load_flag_lists(engine or "vllm").versions[-1])
    names = [f"--{name}" for name in node if isinstance(name, str)]
    right = sum(len(cli_options.find_spellings(name)) == 1 for name in names)
    if (
        len(names) < 2
        or right < 0.6 * len(node)
        or not all(_is_scalar(value) for value in node.values())
    ):
        return ()
    return tuple(_format_as_words(zip(names, node.values(), strict=False)))


def _is_scalar(value: Any) -> bool:
    return not isinstance(value, Mapping | list) or (
        isinstance(value, list) and all(map(_is_scalar, value))
    )


def _format_as_words(pairs: Iterable[tuple[str, Any]]) -> Iterator[str]:
    """Options and values as they would stand in a command line."""
    for name, value in pairs:
        if value is True or value is None:
            yield name
        elif isinstance(value, list):
            yield from (name, *map(_format_scalar, value))
        elif value is not False:
            yield from (name, _format_scalar(value))
