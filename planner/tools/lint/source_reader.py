"""Find the server commands of a text in any supported format, and the metrics that it names.

Supported are command lines, shell scripts, systemd units, compose files, manifests and charts'
values.
"""

import re
import shlex
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from pathlib import Path, PurePath

from planner.core.catalog import validate_entry
from planner.core.errors import PlannerError
from planner.core.readers import parse_yaml, read_text
from planner.core.units import MIB
from planner.engines.cli_options import get_cli_options, load_flag_lists
from planner.planning.planned_replica import PlanFile
from planner.tools.lint.container_setup import list_items
from planner.tools.lint.findings import LintFinding
from planner.tools.lint.named_gpus import resolve_gpu
from planner.tools.lint.server_commands import (
    SERVER_MENTION_PATTERN,
    ServerCommand,
    fill_in_parameters,
    find_commands,
    parse_image_name,
)
from planner.tools.lint.shell_parser import split_here_documents, split_words
from planner.tools.lint.tree_reader import (
    TreeReader,
    format_options,
    is_scalar,
    load_yaml_documents,
    replace_expressions,
)

MAX_FILE_BYTES = MIB
"""Maximum size of a file."""
MAX_COMMANDS_PER_FILE = 20
"""Maximum number of commands that are checked per file."""
MAX_WORDS = 21_000
"""Maximum number of words in the commands of a text."""
_UNREAD_FORMATS = {
    "Markdown or reStructuredText page": r"\A.+\.(?:md|mdx|markdown|rst)$|^(?:```|~~~)",
    "Dockerfile": r"^[ \t]*FROM[ \t]+\S+[\s\S]*?\n[ \t]*(?:CMD|ENTRYPOINT)\b",
    "Nomad job": r'^[ \t]*task[ \t]+"[^"\n]*"\s*\{',
    "PowerShell or cmd command of several lines": r"^.*[ \t][`^][ \t]*$\n",
}
"""What no command is read from, and by which line it is known; the first line is the file's name."""
_UNIT_SCRIPT_PATTERN = re.compile(r"^ExecStart=(?:\S*+[^\S\n]++)*?(\S+\.sh)\b", re.MULTILINE)
"""The script that a systemd unit starts."""
_SLURM_PATTERN = re.compile(
    r"^[ \t]*(?:#SBATCH|s(?:run|alloc|batch))\b.*?[ \t](?:--gres[= ]gpu:|(?:-G|--gpus[\w-]*)[= ]?)([A-Za-z][\w-]*)",
    re.MULTILINE,
)
"""Kind of the GPUs of a job (slurm.schedmd.com, sbatch: --gres, --gpus)."""
_METRIC_NAME_PATTERN = re.compile(
    r"(?<![\w/.@:-])(?:(?:vllm|sglang):[a-zA-Z]\w*|(?:vllm|sglang)_\w+_(?:total|bucket|sum|count))(?![\w./-])"
)
"""Names of metrics, also with the underscore that other tools make of the colon."""


@dataclass(frozen=True)
class ParsedSource:
    """The servers that a text starts, and the engines' metrics that it names."""

    commands: tuple[ServerCommand, ...]
    metrics: tuple[str, ...]
    unread: tuple[LintFinding, ...] = ()  # what may start a server, and was not judged


def read_source(what: str, engine: str | None = None) -> ParsedSource:
    """Return the servers and metrics of the file `what`, or of the command line `what`.

    Of a plan.json, or the folder that has it, it is what the plan starts. Raises `PlannerError` if
    there are none.
    """
    path = _find_file(what)
    text, name = (read_text(path, MAX_FILE_BYTES), path.name) if path else (what, "")
    if len(text) > MAX_FILE_BYTES:
        raise PlannerError(
            f"a command line has at most {MAX_FILE_BYTES:,} characters, got {len(text):,}"
        )
    nearby = _NearbyFiles(text.replace("\r\n", "\n"), name, path.parent if path else Path())
    source = _read_text(_write_plan_commands(nearby), engine)
    if not (source.commands or source.metrics or source.unread):
        words = re.findall(r"[\w./-]+:[\w.-]+", nearby.text[:MAX_FILE_BYTES])
        if image := next(filter(parse_image_name, words), ""):
            why = f"the image starts a server, and the options that it is given are not in {name}"
            return replace(source, unread=(_make_unread(image, why),))
        location = path.name if path else "this text"
        hint = "" if engine else "; --engine says whose options they are"
        raise PlannerError(
            f"no server starts in {location}: expected `vllm serve`, `python -m sglang.launch_server`"
            f" or `trtllm-serve`, or one of their images{hint}"
        )
    return source


def _write_plan_commands(nearby: "_NearbyFiles") -> "_NearbyFiles":
    """Return a plan.json as a script of its commands, below GPU and version; any other file as it is."""
    plan = next(iter(nearby.documents[0]), None) if nearby.name.endswith(".json") else None
    if not isinstance(plan, Mapping) or not {"verdict", "engine_version"} <= {*plan}:
        return nearby
    saved = validate_entry(PlanFile, plan, f"{nearby.name} is not a plan.json of this planner")
    commands = saved.commands.values() if saved.commands else [saved.command or ()]
    head = f"# plan on {saved.gpu}, {saved.engine} {saved.engine_version}"
    return replace(nearby, text="\n".join([head, *map(shlex.join, commands)]))


def _read_worker_settings(text: str) -> dict[str, object]:
    """Return the environment of RunPod's worker-vllm as what it stands for; nothing for any other text."""
    settings = dict(re.findall(r"^([A-Z][A-Z0-9_]*)=(.*)$", text, re.MULTILINE))
    if "MODEL_NAME" not in settings or re.search(r"^(?![A-Z][A-Z0-9_]*=|#|$)", text, re.MULTILINE):
        return {}
    options = get_cli_options("vllm", load_flag_lists("vllm").versions[-1])
    named = {
        name.removeprefix("OPENAI_").removesuffix("_OVERRIDE").lower(): {"true": True, "false": False}.get(value, value)
        for name, value in settings.items()
    }  # fmt: skip
    known = {name: value for name, value in named.items() if options.find_argument(name)}
    words = split_words(settings.get("VLLM_EXTRA_ARGS", ""))
    return {"model": settings["MODEL_NAME"], "engine": "vllm", "vllmConfig": known, "args": words}


def _read_text(nearby: "_NearbyFiles", engine: str | None) -> ParsedSource:
    """Read a text of one format."""
    text = nearby.text
    metrics = tuple(
        dict.fromkeys(word for word in _METRIC_NAME_PATTERN.findall(text) if "_" in word)
    )
    for format_name, pattern in _UNREAD_FORMATS.items():
        if re.search(pattern, f"{nearby.name}\n{text}", re.MULTILINE):
            unread_text = _make_unread(format_name, f"a {format_name} is not read")
            is_page = "page" in format_name and not SERVER_MENTION_PATTERN.search(text)
            return ParsedSource((), metrics, () if is_page and metrics else (unread_text,))
    started = _UNIT_SCRIPT_PATTERN.search(text)
    if started and (script := nearby.find(started[1])):
        nearby = replace(nearby, text=script, name="")
    found = [*islice(_find_commands_in_text(nearby, engine), MAX_COMMANDS_PER_FILE + 1)]
    unread = [one for one in found if isinstance(one, LintFinding)]
    commands = [one for one in found if isinstance(one, ServerCommand)]
    if len(found) > MAX_COMMANDS_PER_FILE:
        limit = f"more than {MAX_COMMANDS_PER_FILE} commands"
        unread.append(_make_unread(limit, f"it has {limit}, and the others were not read"))
    server_commands = [
        followed
        for command in commands[:MAX_COMMANDS_PER_FILE]
        for followed in _follow_script(command, nearby)
    ]
    if sum(len(command.argv) for command in server_commands) > MAX_WORDS:
        raise PlannerError(f"its commands have more than {MAX_WORDS:,} words")
    is_yaml = PurePath(nearby.name).suffix in (".yaml", ".yml")
    # of a template not all of the text is here
    if is_yaml and "{{" not in text and (problem := nearby.documents[1]):
        unread.append(_make_unread(nearby.name, f"{problem}, so that nothing reads it"))
    job = _SLURM_PATTERN.search(text)
    if job and (found_gpu := resolve_gpu(job[1])):
        server_commands = [
            replace(one, gpu=one.gpu or found_gpu[1].name) for one in server_commands
        ]
    # the GPU, and a missing version, are in the header of a plan's file
    title = re.search(
        r"^# .+ on (?:.+ of )?(.+), (\w+) (\d[\w.+]*|nightly[\w-]*)$",
        nearby.text[:2000],
        re.MULTILINE,
    )
    server_commands = [
        replace(one, version=one.version or title[3], planned_on=title[1])
        if title and title[2] == one.engine
        else one
        for one in server_commands
    ]
    commands = [_apply_config_file(command, nearby) for command in server_commands]
    return ParsedSource(tuple(commands), metrics, tuple(unread))


def _make_unread(written: str, why: str) -> LintFinding:
    """Return a finding about what may start a server and was not judged."""
    instead = "headroom lint of the command that it runs"
    return LintFinding("word", "text", written, "unread", why, instead)


@dataclass(frozen=True)
class _NearbyFiles:
    """The places of configuration files that a text's commands name: in the text, or next to it."""

    text: str
    name: str
    folder: Path

    def find(self, path: str) -> str | None:
        """Return the content of the file at `path`; None if it is unknown."""
        name = PurePath(path).name
        if name in self._files_in_text:
            return self._files_in_text[name]
        for candidate in (self.folder / path, self.folder / name):
            with suppress(OSError, ValueError, PlannerError):
                if candidate.is_file():
                    return read_text(candidate, MAX_FILE_BYTES)
        return None

    @cached_property
    def documents(self) -> tuple[list[Mapping[str, object] | list[object]], str]:
        """The documents of a YAML or JSON text, and why the rest of it does not parse."""
        return load_yaml_documents(self.text, self.name)

    @cached_property
    def _files_in_text(self) -> dict[str, str]:
        """The files that the text itself holds, in ConfigMaps and here-documents, by name."""
        files = dict[str, str]()
        for document in self.documents[0]:
            data = document.get("data") if isinstance(document, Mapping) else None
            if isinstance(data, Mapping):
                files = {str(k): v for k, v in data.items() if isinstance(v, str)} | files
        return files | split_here_documents(self.text)[1]


def _follow_script(command: ServerCommand, nearby: _NearbyFiles) -> Iterator[ServerCommand]:
    """Yield the commands of the script that a container starts; `command` if it is not here."""
    mounts, started = command.setup.mounts if command.setup else {}, list[ServerCommand]()
    for at, word in enumerate(command.unread):
        # sh -c "/start.sh --option" has the path in a text
        path, *parameters = word.split() or [""]
        text = nearby.find(mounts.get(path, path)) if re.search(r"/|\.(ba)?sh$", path) else None
        if text and not started:
            script = fill_in_parameters(text, [path, *parameters, *command.unread[at + 1 :]])
            started += find_commands(script, command.where, None, command.environment)
    for inner in started:
        yield replace(
            inner,
            container=command.container,
            version=inner.version or command.version,
            setup=command.setup,
            findings=(*command.findings, *inner.findings),
        )
    if not started:
        yield command


def _apply_config_file(command: ServerCommand, nearby: _NearbyFiles) -> ServerCommand:
    """Merge a command's configuration file: options in front, or TensorRT-LLM's settings."""
    cli_options = get_cli_options(command.engine, load_flag_lists(command.engine).versions[-1])
    given = [
        option
        for option in cli_options.parse(command.argv).options
        if option.words and option.option and option.option.argument == "config"
    ]
    if not given:
        return command
    path = given[-1].words[0]
    content = None
    with suppress(PlannerError):
        content = parse_yaml(nearby.find(path) or "", path)
    if not isinstance(content, Mapping):
        why = "what it sets is not known: it is not here, or has no options by name"
        written = command.shown.show_option(given[-1])
        finding = LintFinding("flag", given[-1].written, written, "unread", why)
        return replace(command, findings=(*command.findings, finding))
    note = "; ".join(filter(None, (command.note, f"read with {path!r:.80}")))
    if command.engine == "trtllm":
        settings = {str(name).replace("-", "_"): value for name, value in content.items()}
        return replace(command, config={**command.config, **settings}, note=note)
    first = command.argv[: command.subcommand and not command.argv[0].startswith("-")]
    named = ((f"--{name}", value) for name, value in content.items() if is_scalar(value))
    return replace(
        command, argv=(*first, *format_options(named, ()), *command.argv[len(first) :]), note=note
    )


def _find_file(what: str) -> Path | None:
    """Return the path if `what` is a file; None if it is a command line."""
    with suppress(OSError, ValueError):
        if 0 < len(what) < 4096 and "\n" not in what and Path(what).exists():
            return Path(what) / "plan.json" if Path(what).is_dir() else Path(what)
    if re.fullmatch(r"[\w./~-]+\.(service|ya?ml|json|sh|txt|env|conf|md)", what):
        raise PlannerError(f"cannot read {what}: no such file")
    return None


def _find_commands_in_text(
    nearby: _NearbyFiles, engine: str | None
) -> Iterator[ServerCommand | LintFinding]:
    """Yield the commands of a text of any format."""
    text = nearby.text
    if re.search(r"^\[[\w:. -]+\][ \t]*$", text, re.MULTILINE):
        yield from TreeReader([_read_sections(text)], engine, nearby.find).read()
    elif settings := _read_worker_settings(text):
        yield from TreeReader([settings], engine, nearby.find).read()
    elif re.search(
        r"^[ \t]*(- )?[\w./\"-]++[ \t]*:(\s|$)", text, re.MULTILINE
    ) or text.lstrip().startswith("{"):
        if nearby.documents[0]:
            yield from TreeReader(nearby.documents[0], engine, nearby.find).read()
        else:
            items = re.sub(
                r"^([ \t]*)- (?=[\"'-])", r"\1\\\n", replace_expressions(text), flags=re.MULTILINE
            )
            yield from find_commands(items, "", engine)
    else:
        yield from find_commands(text, "", engine)


def _read_sections(text: str) -> dict[str, dict[str, object]]:
    """Return the sections of a unit of systemd, or of what else has NAME=value lines below [SECTION].

    Lines that end in a backslash go on, comments between them aside; the last value holds, and what
    runs before or after the server is left out.
    """
    text = re.sub(r"\\\n(?:[ \t]*[#;].*\n)*\s*", " ", text)
    sections, values = dict[str, dict[str, object]](), dict[str, object]()
    for section, key, value in re.findall(
        r"^\[([^\]\n]+)\][ \t]*$|^[ \t]*(\w+)[ \t]*=[ \t]*(.*)$", text, re.MULTILINE
    ):
        if section:
            values = sections.setdefault(section, {})
        elif key == "EnvironmentFile":
            file = {"path": value.strip().lstrip("-"), "required": not value.startswith("-")}
            values["env_file"] = [*list_items(values.get("env_file")), file]
        elif key.lower() == "environment":
            values["env"] = [*list_items(values.get("env")), *split_words(value)]
        elif not re.match("Exec(?!Start$|$)", key):
            values[key] = value.lstrip("@-:+!") if key == "ExecStart" else value
    return sections
