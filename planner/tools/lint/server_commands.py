"""Find the commands that start a server: launchers, `docker run` and nested shells."""

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import PurePath
from typing import Any, NamedTuple

from planner.engines.argument_names import load_argument_names
from planner.engines.cli_options import list_versions_with_spelling
from planner.engines.engine import get_monthly_image_version
from planner.tools.lint.container_setup import (
    ContainerSetup,
    read_docker_options,
    read_service_setup,
)
from planner.tools.lint.findings import LintFinding
from planner.tools.lint.forms import load_forms
from planner.tools.lint.shell_parser import ShellStatement, check_expanded_size, parse_statements
from planner.tools.lint.shown_values import ShownText

_ENGINE_IMAGES = (
    ("vllm", True, re.compile(r"(^|/)(vllm-openai[\w-]*|vllm-tpu)(?=[:@]|$)")),
    ("vllm", False, re.compile(r"(^|/)vllm[\w-]*(?=[:@]|$)")),
    ("sglang", False, re.compile(r"(^|/)sglang[\w-]*(?=[:@]|$)")),
    ("trtllm", False, re.compile(r"(^|/)(tensorrt-llm(/release)?|tensorrtllm-runtime)(?=[:@]|$)")),
)  # fmt: skip
"""Engine, whether its image starts the server by itself, and the pattern of the image's name."""
ENGINES = ("vllm", "sglang", "trtllm")
_CONTAINER_PROGRAMS = {"docker", "podman", "nerdctl"}
_LAUNCHERS = (
    ("vllm", re.compile(r"(\S*/)?vllm serve(?!\S)"), 2, True),
    ("vllm", re.compile(r"(\S*/)?vllm[./]entrypoints[./](openai[./])?api_server(\.py)?(?!\S)"), 1, False),
    ("sglang", re.compile(r"sglang\.(launch_server|srt\.server)(?!\S)"), 1, False),
    ("sglang", re.compile(r"(\S*/)?sglang serve(?!\S)"), 2, False),
    ("trtllm", re.compile(r"(\S*/)?trtllm-serve serve(?!\S)"), 2, True),
    ("trtllm", re.compile(r"(\S*/)?trtllm-serve(?!\S)"), 1, True),
)  # fmt: skip
"""Engine, how it is started, in so many words, and whether the model is then an argument without an option."""
_SHELL_PROGRAMS = {"sh", "bash", "dash", "zsh"}
SERVER_MENTION_PATTERN = re.compile(
    r"\bvllm\s+serve\b|vllm\.entrypoints|sglang(_router)?\.launch_server"
    r"|\bsglang\s+serve\b|trtllm-serve|\bdynamo\.(vllm|sglang|trtllm)\b"
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
    planned_on: str = ""  # the GPU of the plan that wrote the command
    beside: bool = False  # of other servers of its text, which runs them in the background
    gpu: str = ""  # that its file names, with a number if it names one
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
        return " ".join([program, *map(quote_word, self.argv)])

    @property
    def shown(self) -> ShownText:
        """How its texts are shown."""
        return ShownText(self.engine, {**self.filled, **self.environment})

    @property
    def role(self) -> str:
        """ "prefill" or "decode" for a worker of a pool; empty for a server that does both."""
        pattern = r"--disaggregation-mode[ =](prefill|decode)|kv_(producer|consumer)"
        match = re.search(pattern, " ".join(self.argv))
        roles = {"producer": "prefill", "consumer": "decode"}
        return (match[1] or roles[match[2]]) if match else ""


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
    shell_statements, beside = _rejoin_options(parse_statements(text, environment)), False
    for number, (statement, findings) in enumerate(shell_statements, start=1):
        place = location or (f"command {number}" if len(shell_statements) > 1 else "")
        for command in _parse_statement(
            statement, place, engine if len(shell_statements) == 1 else None
        ):
            known = (*findings, *command.findings)
            # ssh, srun and docker start it elsewhere, or on what they give it
            is_here = re.fullmatch(r"(\S*/)?(vllm|python[\d.]*)", statement.words[0])
            beside |= bool(is_here) and statement.is_background
            is_beside = bool(is_here) and beside
            yield replace(command, findings=known, filled=statement.variables, beside=is_beside)


def _rejoin_options(
    statements: Sequence[ShellStatement],
) -> list[tuple[ShellStatement, tuple[LintFinding, ...]]]:
    """Return the statements, with lines of options joined to the command that they are cut off."""
    joined = list[tuple[ShellStatement, tuple[LintFinding, ...]]]()
    for statement in statements:
        if not joined or not re.match("--?[A-Za-z]", statement.words[0]):
            joined.append((statement, ()))
            continue
        before, findings = joined[-1]
        # a guide leaves out what stands elsewhere
        if not {"...", "\u2026"} & {*before.words}:
            why = "the line before ends without a backslash, or with a blank after it, so that the shell takes"
            name, why = statement.words[0].partition("=")[0], f"{why} these options for a command"
            cut = LintFinding("setting", name, name, "contradicts", why, "one command")
            findings = (*findings, cut)
        words = tuple(word for word in before.words if word.strip())
        joined[-1] = replace(before, words=(*words, *statement.words)), findings
    return joined


def _parse_statement(
    statement: ShellStatement, location: str, engine: str | None = None, depth: int = 0
) -> Iterator[ServerCommand]:
    """Yield the server that a statement starts, also in a container or in another shell."""
    words, environment = statement.words, statement.environment
    if depth > 3 or not words:
        return
    if PurePath(words[0]).name in _CONTAINER_PROGRAMS and "run" in words[:4]:
        yield from _parse_docker_run(words, environment, location, depth)
        return
    # ssh HOST '...', tmux new '...'
    scripts = [word for word in words if " " in word and SERVER_MENTION_PATTERN.search(word)]
    is_server = SERVER_MENTION_PATTERN.search(" ".join(words)) or match_launcher(words)
    shells = [at for at, word in enumerate(words) if PurePath(word).name in _SHELL_PROGRAMS]
    for at in [
        n
        for n in range(1, len(words))
        if re.fullmatch("-[a-z]*c", words[n]) and shells and shells[0] < n
    ][:1]:
        # the words after the script are its $0, $1, ...; -- ends the shell's own options
        script, *parameters = words[at + 1 + (words[at + 1 : at + 2] == ("--",)) :] or [""]
        scripts = [fill_in_parameters(script, parameters)]
    wrapper = next(
        (word for word in words if is_server and word in load_forms().spellings["wrappers"]), ""
    )
    if wrapper:
        engine = load_forms().spellings["wrappers"][wrapper]
        yield ServerCommand(location, engine, (), environment, unread=(wrapper,))
    elif scripts:
        why = "it is one word, and no program has that name"
        own = (_refuse_word(why, "a word each"),) if scripts[-1] == words[0] else ()
        for inner, findings in _rejoin_options(parse_statements(scripts[-1], environment)):
            for command in _parse_statement(inner, location, None, depth + 1):
                yield replace(command, findings=(*own, *findings, *command.findings))
    elif launcher := match_launcher(words):
        name, start, subcommand = launcher
        assignments = (word.partition("=")[::2] for word in words[:start])
        assigned = {key: value for key, value in assignments if value and key.isidentifier()}
        pinned = re.search(rf"\b{name}(?:\[\w+\])?==([\d.]+)(?!\S)", " ".join(words[:start]))
        yield ServerCommand(
            location,
            name,
            tuple(words[start:]),
            {**environment, **assigned},
            pinned[1] if pinned else "",
            subcommand=subcommand,
        )
    elif engine and words[0].startswith("-"):
        yield ServerCommand(location, engine, words, environment)


def _refuse_word(why: str, instead: str) -> LintFinding:
    """Return a finding about words for which nothing starts."""
    return LintFinding(
        "setting", "vllm serve", "vllm serve", "contradicts", why, instead, refused=True
    )


def fill_in_parameters(script: str, parameters: Sequence[str]) -> str:
    """Return a script with `$0`, `$1`, ..., `$@` and `$*` replaced by the words that it is given."""
    quoted = [shlex.quote(word) for word in parameters]
    every, pattern = " ".join(quoted[1:]), r"\"?\$(?:\{([@*]|\d\d?)\}|([@*]|\d))\"?"
    check_expanded_size(len(re.findall(pattern, script)) * len(every))

    def fill_in(match: re.Match[str]) -> str:
        name = match[1] or match[2]
        return every if name in ("@", "*") else "".join(quoted[int(name) : int(name) + 1])

    return re.sub(pattern, fill_in, script)


def match_launcher(words: Sequence[str]) -> tuple[str, int, bool] | None:
    """Find an engine's launcher among the words.

    Returns the engine, the index of the launcher's first argument, and whether the model is an
    argument without an option; None if there is no launcher.
    """
    for at in range(len(words)):
        pair = " ".join(words[at : at + 2])
        for engine, pattern, num_words, is_positional in _LAUNCHERS:
            if pattern.match(pair):
                return engine, at + num_words, is_positional
    return None


def guess_engine(words: Sequence[str]) -> str | None:
    """Return the engine that has most of a list's options; None for another program's."""
    names = {word.partition("=")[0] for word in words if word.startswith("--")}
    counts = {
        engine: sum(
            bool(list_versions_with_spelling(engine, name.replace("_", "-") if engine != "trtllm" else name))
            for name in names
        )
        for engine in ENGINES
    }  # fmt: skip
    best = max(counts, key=lambda engine: counts[engine])
    known = set(load_argument_names(best).arguments)
    specific = {name.removeprefix("--").replace("-", "_") for name in names} & known
    return best if counts[best] >= max(1 if specific else 2, len(names) / 2) else None


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
            version = tag[1] if tag and "ai-dynamo/" not in name else ""
            if re.match(r"\d\d\.\d\d", version):  # a year and a month
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
    if engine_image is None and not replaced and words and words[0].startswith("-"):
        guessed = guess_engine(words)  # an image of somebody's own, whose tag says no version
        engine_image = EngineImage(guessed, True, "") if guessed else None
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
            known = (*known, _refuse_word(why, "the model and its options alone"))
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
