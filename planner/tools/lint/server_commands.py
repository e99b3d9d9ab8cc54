"""Find the commands that start a server: launchers, `docker run`, nested shells and wrappers."""

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cache
from pathlib import PurePath
from typing import Any, NamedTuple

from pydantic import Field

from planner.core.catalog import SourcedEntry, load_catalog
from planner.engines.engine import get_dynamo_image_version, get_monthly_image_version
from planner.tools.lint.container_setup import (
    ContainerSetup,
    read_docker_options,
    read_service_setup,
)
from planner.tools.lint.findings import LintFinding
from planner.tools.lint.shell_parser import ShellStatement, check_expanded_size, parse_statements
from planner.tools.lint.shown_values import ShownText

_ENGINE_IMAGES = (
    ("vllm", True, re.compile(r"(^|/)(vllm-openai[\w-]*|vllm-tpu)(?=[:@]|$)")),
    ("vllm", False, re.compile(r"(^|/)vllm[\w-]*(?=[:@]|$)")),
    ("sglang", False, re.compile(r"(^|/)sglang[\w-]*(?=[:@]|$)")),
    ("trtllm", False, re.compile(r"(^|/)(tensorrt-llm(/release)?|tensorrtllm-runtime)(?=[:@]|$)")),
)  # fmt: skip
"""Engine, whether its image starts the server by itself, and the pattern of the image's name."""
IMAGE_OPTION = "--container-image"
"""Slurm's option (`srun` with pyxis) for the image in which a command runs."""
OMNI_OPTION = "--omni"
"""Option by which vLLM-Omni, installed beside vLLM, takes `vllm serve` over."""
_CONTAINER_PROGRAMS = {"docker", "podman", "nerdctl"}
_SHELL_PROGRAMS = {"sh", "bash", "dash", "zsh"}
SERVER_MENTION_PATTERN = re.compile(
    r"\bvllm\s+serve\b|vllm\.entrypoints|sglang(_router)?\.launch_server"
    r"|\bsglang\s+serve\b|trtllm-serve|\bdynamo\.(vllm|sglang|trtllm)\b"
)


class EngineWrapper(SourcedEntry):
    """One entry of `catalogs/flags/wrappers.yaml`, whose head explains every field."""

    engine: str = ""
    own: str = ""
    model: str = ""
    renamed: dict[str, str] = Field(default_factory=dict)
    settings: dict[str, str] = Field(default_factory=dict)


@cache
def load_wrappers() -> Mapping[str, EngineWrapper]:
    """Return the wrappers by the module that `python -m` runs.

    Entries without an engine hold the options that several wrappers share.
    """
    return load_catalog("flags/wrappers.yaml", EngineWrapper)


def unwrap_command(
    name: str, words: Sequence[str]
) -> tuple[tuple[str, ...], tuple[str, ...], Mapping[str, Any]]:
    """Split the words after module `name` into the engine's words, the wrapper's and settings."""
    wrapper, shared = load_wrappers()[name], load_wrappers().get(name.partition(".")[0])
    patterns = f"{wrapper.own} {shared.own if shared else ''}".split()
    engine_words, wrapper_words, model, settings = (
        list[str](),
        list[str](),
        list[str](),
        dict[str, Any](),
    )
    target = engine_words
    for word in words:
        option, equals, value = word.partition("=")
        if not word.startswith("--"):
            target.append(word)
        elif option in wrapper.model.split():
            target = model
            model += [value] if equals else []
        elif option in wrapper.settings or any(
            fnmatchcase(option, pattern) for pattern in patterns
        ):
            target = wrapper_words
            wrapper_words.append(word)
            settings |= {wrapper.settings[option]: True} if option in wrapper.settings else {}
        else:
            target = engine_words
            engine_words.append(f"{wrapper.renamed.get(option, option)}{equals}{value}")
    return (
        (*model[:1], *engine_words),
        (*(("--model", *model[:1]) if model else ()), *wrapper_words),
        settings,
    )


@dataclass(frozen=True)
class ServerCommand:
    """One command that starts a server: the launcher's arguments, and their environment."""

    where: str
    engine: str
    argv: tuple[str, ...]
    environment: Mapping[str, str]
    version: str = ""  # from the tag of its image
    container: bool = False
    subcommand: bool = False  # `vllm serve MODEL`, not `python -m ... --model MODEL`
    config: Mapping[str, Any] = field(default_factory=dict)  # TensorRT-LLM's configuration file
    note: str = ""
    unread: tuple[str, ...] = ()  # words that were not understood, so that they may do anything
    findings: tuple[LintFinding, ...] = ()  # about how it is written down
    setup: ContainerSetup | None = None
    launched: str = ""  # the wrapper and its own options, if there is one
    # the wrapper's names of options -> the engine's
    renamed_options: Mapping[str, str] = field(default_factory=dict)
    planned_on: str = ""  # the GPU of the plan that wrote the command
    gpu: str = ""  # that its file names, with a number if it names one
    num_gpus: int | None = None  # of its job
    filled: Mapping[str, str] = field(default_factory=dict)  # variables of its text

    @property
    def line(self) -> str:
        """The command in one line, quoted for a shell."""
        program = {
            "vllm": "vllm serve"
            if self.subcommand
            else "python -m vllm.entrypoints.openai.api_server",
            "sglang": "python -m sglang.launch_server", "trtllm": "trtllm-serve",
        }[self.engine]  # fmt: skip
        words, wrapper_names = (
            self.argv,
            {engine_name: name for name, engine_name in self.renamed_options.items()},
        )
        if wrapper_names:  # the wrapper has its own option for the model
            words = tuple(
                wrapper_names.get(word, word)
                for word in words
                if word.startswith("-") or word != words[0]
            )
        return " ".join([self.launched or program, *map(quote_word, words)])

    @property
    def shown(self) -> ShownText:
        """How its texts are shown."""
        return ShownText(self.engine, {**self.filled, **self.environment})

    @property
    def is_pasteable(self) -> bool:
        """Whether the command means the same outside its file, whose shell computes nothing."""
        return not any("$(" in word for word in (*self.argv, *self.environment.values()))

    @property
    def role(self) -> str:
        """ "prefill" or "decode" for a worker of a pool; empty for a server that does both."""
        pattern = r"--(?:is-|disaggregation-mode[ =])(prefill|decode)|kv_(producer|consumer)"
        match = re.search(pattern, f"{self.launched} {' '.join(self.argv)}")
        return (
            {"producer": "prefill", "consumer": "decode"}.get(match[2], match[1]) if match else ""
        )


def is_hub_name(name: str) -> bool:
    """Return whether a model is named as on the Hub: owner/name, and no path."""
    return re.fullmatch(r"\w[\w.-]*/[\w.-]+", name) is not None


def quote_word(word: str) -> str:
    """Quote a word for a shell that still expands its variables and sums.

    `$(...)` is escaped, so that it never runs.
    """
    parts = re.split(r"(\$\{[A-Za-z_]\w*(?::?[-=?+][^$`\"\\{}]*)?\}|\$\(\([\w +*/%-]*\)\))", word)
    escaped = (
        part if at % 2 else re.sub(r'([\\"`$])', r"\\\1", part) for at, part in enumerate(parts)
    )
    return f'"{"".join(escaped)}"' if parts[1:] else shlex.quote(word)


def find_commands(
    text: str, location: str, engine: str | None, environment: Mapping[str, str] | None = None
) -> Iterator[ServerCommand]:
    """Yield the server commands of shell text; with an `engine` also a bare list of its options."""
    shell_statements = _rejoin_options(parse_statements(text, environment))
    for number, (statement, findings) in enumerate(shell_statements, start=1):
        images = [word for word in statement.words if word.startswith(IMAGE_OPTION)]
        if images:
            why = "not judged: the image that Slurm starts, and so its version"
            finding = LintFinding(
                "word", IMAGE_OPTION, f"{IMAGE_OPTION} ...", "unread", why, "--engine-version V"
            )
            findings = (*findings, finding)
        place = location or (f"command {number}" if len(shell_statements) > 1 else "")
        names = ", ".join(statement.branched)[:200]
        note = f"a branch changes {names}: judged with the value before it" if names else ""
        for command in _parse_statement(
            statement, place, engine if len(shell_statements) == 1 else None
        ):
            noted = "; ".join(filter(None, (command.note, note)))
            known = (*findings, *command.findings)
            yield replace(command, findings=known, note=noted, filled=statement.variables)


def _rejoin_options(
    statements: Sequence[ShellStatement],
) -> list[tuple[ShellStatement, tuple[LintFinding, ...]]]:
    """Return the statements, with lines of options joined to the command that they are cut off."""
    joined = list[tuple[ShellStatement, tuple[LintFinding, ...]]]()
    for statement in statements:
        first = statement.words[0]
        is_option = re.match("--?[A-Za-z]", first)
        started = joined[-1][0].words[:4] if joined else ()
        is_run = bool(_CONTAINER_PROGRAMS & {*started}) and "run" in started
        lacks_image = is_run and read_docker_options(joined[-1][0].words)[1] is None
        is_image = lacks_image and not match_launcher(statement.words) and parse_image_name(first)
        if not joined or not (is_option or is_image):
            joined.append((statement, ()))
            continue
        before, findings = joined[-1]
        if {"...", "\u2026"} & {*before.words}:  # a guide leaves out what stands elsewhere
            joined[-1] = replace(before, words=(*before.words, *statement.words)), findings
            continue
        is_blank = not before.words[-1].strip()
        why = "the line before ends " + (
            "with a blank after its backslash" if is_blank else "without a backslash"
        )
        cut = LintFinding(
            "setting",
            statement.words[0].partition("=")[0],
            _show_line(statement.words),
            "contradicts",
            f"{why}, so that the shell takes these options for a command of their own",
            "one command",
        )
        words = before.words[:-1] if is_blank else before.words
        joined[-1] = replace(before, words=(*words, *statement.words)), (*findings, cut)
    return joined


def _parse_statement(
    statement: ShellStatement, location: str, engine: str | None = None, depth: int = 0
) -> Iterator[ServerCommand]:
    """Yield the server that a statement starts, also in a container or in another shell."""
    words, environment = statement.words, statement.environment
    if depth > 3 or not words:
        return
    program = PurePath(words[0]).name
    if program in _CONTAINER_PROGRAMS and "run" in words[:4]:
        yield from _parse_docker_run(words, environment, location, depth)
        return
    shell_option = next(
        (
            at
            for at, word in enumerate(words[:-1])
            if re.fullmatch(r"-[a-z]*c", word)
            and any(PurePath(before).name in _SHELL_PROGRAMS for before in words[:at])
        ),
        None,
    )
    if launcher := match_launcher(words):
        name, start, subcommand = launcher
        assignments = (word.partition("=")[::2] for word in words[:start])
        assigned = {key: value for key, value in assignments if value and key.isidentifier()}
        pinned = next(
            filter(
                None,
                (re.search(rf"\b{name}(?:\[\w+\])?==([\d.]+)$", word) for word in words[:start]),
            ),
            None,
        )
        version = pinned[1] if pinned else ""
        command = ServerCommand(
            location,
            name,
            tuple(words[start:]),
            {**environment, **assigned},
            version,
            subcommand=subcommand,
        )
        module = OMNI_OPTION if OMNI_OPTION in words[start:] else words[start - 1]
        if wrapper := load_wrappers().get(module):
            argv, wrapper_words, settings = unwrap_command(module, words[start:])
            starter = ["vllm", "serve"] if module == OMNI_OPTION else ["python", "-m", module]
            launched = shlex.join([*starter, *wrapper_words])
            command = replace(
                command,
                argv=argv,
                launched=launched,
                renamed_options=wrapper.renamed,
                config=settings,
            )
        if program == "torchrun":
            why = (
                "it starts the server several times, on the same port and the same GPUs: not judged"
            )
            once = LintFinding("word", program, program, "unread", why, "the server alone")
            command = replace(command, findings=(once,))
        if shell_option is not None and shell_option < start:
            why = f"{program} {words[shell_option]} runs its first word; the others are $0, $1, ..."
            finding = _refuse_word(words[shell_option + 1], why, "the command in quotes")
            command = replace(command, findings=(finding,))
        yield command
        return
    # ssh HOST '...', tmux new '...'
    scripts = [word for word in words if " " in word and SERVER_MENTION_PATTERN.search(word)]
    if shell_option is not None:
        # the words after the script are its $0, $1, ...; -- ends the shell's own options
        script, *parameters = words[shell_option + 1 + (words[shell_option + 1] == "--") :] or [""]
        scripts = [fill_in_parameters(script, parameters)]
    if scripts:
        is_program = scripts[-1] == words[0]
        why = "it is one word, and no program has that name"
        own = (_refuse_word(words[0], why, "a word each"),) if is_program else ()
        for inner, findings in _rejoin_options(parse_statements(scripts[-1], environment)):
            for command in _parse_statement(inner, location, None, depth + 1):
                yield replace(command, findings=(*own, *findings, *command.findings))
    elif engine and words[0].startswith("-"):
        yield ServerCommand(location, engine, words, environment)


def _refuse_word(word: str, why: str, instead: str) -> LintFinding:
    """Return a finding about a word for which nothing starts."""
    shown = _show_line(word.split())
    return LintFinding("setting", shown, shown, "contradicts", why, instead, refused=True)


def _show_line(words: Sequence[str]) -> str:
    """Return a line of a script as it is shown: from its launcher on, or else its options."""
    name, start, _ = match_launcher(words) or ("vllm", 0, False)
    return " ".join([*words[max(start - 2, 0) : start], *ShownText(name).list_words(words[start:])])


def fill_in_parameters(script: str, parameters: Sequence[str]) -> str:
    """Return a script with `$0`, `$1`, ..., `$@` and `$*` replaced by the words that it is given."""
    quoted, num_chars = [shlex.quote(word) for word in parameters], 0
    every = " ".join(quoted[1:])

    def fill_in(match: re.Match[str]) -> str:
        nonlocal num_chars
        name = match[1] or match[2]
        value = every if name in ("@", "*") else "".join(quoted[int(name) : int(name) + 1])
        num_chars += len(value)
        check_expanded_size(num_chars)
        return value

    pattern = r"\"?\$(?:\{([@*]|\d\d?)\}|([@*]|\d))\"?"
    return re.sub(pattern, fill_in, script)


def match_launcher(words: Sequence[str]) -> tuple[str, int, bool] | None:
    """Find an engine's launcher among the words.

    Returns the engine, the index of the launcher's first argument, and whether the model is an
    argument without an option; None if there is no launcher.
    """
    for at, word in enumerate(words):
        name, after = PurePath(word).name, words[at + 1] if at + 1 < len(words) else ""
        if name == "vllm" and after == "serve":
            return "vllm", at + 2, True
        if re.search(r"(^|/)vllm[./]entrypoints[./](openai[./])?api_server(\.py)?$", word):
            return "vllm", at + 1, False
        if (wrapper := load_wrappers().get(word)) and wrapper.engine:
            return wrapper.engine, at + 1, False
        if word in ("sglang.launch_server", "sglang.srt.server"):
            return "sglang", at + 1, False
        if name == "sglang" and after == "serve":
            return "sglang", at + 2, False
        if name == "trtllm-serve":
            return "trtllm", at + 1 + (after == "serve"), True
    return None


def _parse_docker_run(
    words: Sequence[str], environment: Mapping[str, str], location: str, depth: int
) -> Iterator[ServerCommand]:
    """Yield the server that `docker run` starts in an engine's image."""
    service, at = read_docker_options(words)
    if at is None:
        return
    given = (one.partition("=") for one in service.get("environment", ()))
    container_environment = {
        name: content if equals else environment.get(name, f"${{{name}}}")
        for name, equals, content in given
    }
    entrypoint = service.get("entrypoint", "")
    rest, setup = (
        [entrypoint] * bool(entrypoint) + [*words[at + 1 :]],
        read_service_setup(service, "docker"),
    )
    for command in parse_container(
        words[at], rest, container_environment, location, bool(entrypoint), depth
    ):
        yield replace(command, setup=replace(setup, image=words[at]))


class EngineImage(NamedTuple):
    """A container image of an engine."""

    engine: str
    starts: bool  # whether it starts the server by itself
    version: str  # of the engine; empty if the tag does not name it


def parse_image_name(name: str) -> EngineImage | None:
    """Return the engine of an image by the image's name; None if it is no engine's."""
    for engine, starts, pattern in _ENGINE_IMAGES:
        if match := pattern.search(name):
            tag = re.match(r":v?(\d+\.\d+(?:\.\d+)?)", name[match.end() :])
            version = tag[1] if tag else ""
            if "ai-dynamo/" in name:  # the tag is Dynamo's
                version = get_dynamo_image_version(engine, version)
            elif re.match(r"\d\d\.\d\d", version):  # a year and a month
                version = get_monthly_image_version(engine, version)
            return EngineImage(engine, starts, version)
    return None


def parse_container(
    name: str,
    words: Sequence[str],
    environment: Mapping[str, str],
    location: str,
    replaced: bool = False,
    depth: int = 0,
) -> Iterator[ServerCommand]:
    """Yield the server that a container starts with these words.

    `replaced` says that the image's entry point is not used.
    """
    engine_image = parse_image_name(name)
    commands = list(
        _parse_statement(ShellStatement(tuple(words), environment), location, None, depth + 1)
    )
    for command in commands:
        version = (
            engine_image.version if engine_image and engine_image.engine == command.engine else ""
        )
        known = command.findings
        is_shell = PurePath(words[0]).name in _SHELL_PROGRAMS
        if engine_image and engine_image.starts and not (replaced or is_shell):
            why = "the image starts the server itself, and takes these words for its options"
            known = (*known, _refuse_word(words[0], why, "the model and its options alone"))
        yield replace(command, container=True, version=version or command.version, findings=known)
    is_typed = [PurePath(word).name for word in words[:2]] in ([name] for name in _SHELL_PROGRAMS)
    # a script of the image, or one mounted; a shell alone is for somebody who types
    if not commands and engine_image and replaced and not is_typed:
        yield ServerCommand(
            location,
            engine_image.engine,
            (),
            environment,
            engine_image.version,
            container=True,
            unread=tuple(words) or ("its entrypoint",),
        )
    if (
        not commands
        and engine_image
        and engine_image.starts
        and not replaced
        and (words or environment)
    ):
        serves = engine_image.engine == "vllm"
        yield ServerCommand(
            location,
            engine_image.engine,
            tuple(words),
            environment,
            engine_image.version,
            container=True,
            subcommand=serves,
        )
