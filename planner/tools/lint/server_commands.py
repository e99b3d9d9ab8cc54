"""Who starts a server: an engine's launcher, `docker run`, another shell, or a program around an engine."""

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import PurePath
from typing import Any, NamedTuple

from planner.engines.engine import get_dynamo_image_version
from planner.tools.lint.shell_parser import ShellStatement, parse_statements
from planner.tools.lint.wrappers import load_wrappers, unwrap_command

_ENGINE_IMAGES = (
    ("vllm", True, re.compile(r"(^|/)(vllm-openai[\w-]*|vllm-tpu)(?=[:@]|$)")),
    ("vllm", False, re.compile(r"(^|/)vllm[\w-]*(?=[:@]|$)")),
    ("sglang", False, re.compile(r"(^|/)sglang[\w-]*(?=[:@]|$)")),
    ("tgi", True, re.compile(r"(^|/)text-generation-inference(?=[:@]|$)")),
    ("trtllm", False, re.compile(r"(^|/)(tensorrt-llm(/release)?|tensorrtllm-runtime)(?=[:@]|$)")),
)  # fmt: skip
"""Engine, whether its image starts the server by itself, and what the image is called."""
_VALUELESS_DOCKER_OPTIONS = {
    "--rm",
    "--detach",
    "--interactive",
    "--tty",
    "--privileged",
    "--init",
    "--read-only",
    "--publish-all",
}
"""Options of `docker run` that take no value."""
_SHELL_PROGRAMS = {"sh", "bash", "dash", "zsh"}
SERVER_MENTION_PATTERN = re.compile(
    r"\bvllm\s+serve\b|vllm\.entrypoints|sglang(_router)?\.launch_server|\bsglang\s+serve\b|trtllm-serve"
    r"|text-generation-launcher|\bdynamo\.(vllm|sglang|trtllm)\b"
)


@dataclass(frozen=True)
class ServerCommand:
    """One server as it is started: what its launcher is given, and in which environment."""

    where: str
    engine: str
    argv: tuple[str, ...]
    environment: Mapping[str, str]
    version: str = ""  # of its image, where the tag says it
    container: bool = False
    subcommand: bool = False  # `vllm serve MODEL`, not `python -m ... --model MODEL`
    config: Mapping[str, Any] = field(default_factory=dict)  # what TensorRT-LLM's own file sets
    note: str = ""
    num_visible_gpus: int | None = None  # GPUs that its container is given
    launched: str = ""  # by another program than the engine's own: this, and its own options
    renamed_options: Mapping[str, str] = field(
        default_factory=dict
    )  # that program's names of options -> the engine's
    planned_on: str = ""  # the GPU, where a plan of ours wrote it

    @property
    def line(self) -> str:
        """The command in one line, as a shell would take it."""
        program = {
            "vllm": "vllm serve" if self.subcommand else "python -m vllm.entrypoints.openai.api_server",
            "sglang": "python -m sglang.launch_server", "trtllm": "trtllm-serve",
            "tgi": "text-generation-launcher",
        }[self.engine]  # fmt: skip
        words, theirs = self.argv, {ours: name for name, ours in self.renamed_options.items()}
        if theirs:  # it names the model in an option of its own
            words = tuple(
                theirs.get(word, word) for word in words if word.startswith("-") or word != words[0]
            )
        return " ".join([self.launched or program, *map(quote_word, words)])

    @property
    def role(self) -> str:
        """Of a worker of pools, "prefill" or "decode"; nothing of a server that does both."""
        pattern = r"--(?:is-|disaggregation-mode[ =])(prefill|decode)|kv_(producer|consumer)"
        match = re.search(pattern, f"{self.launched} {' '.join(self.argv)}")
        return (
            {"producer": "prefill", "consumer": "decode"}.get(match[2], match[1]) if match else ""
        )


def quote_word(word: str) -> str:
    """A word as a shell takes it, whose variables and sums are still filled in there; `$(...)` never runs by itself."""
    parts = re.split(r"(\$\{[A-Za-z_]\w*(?::?[-=?+][^$`\"\\{}]*)?\}|\$\(\([\w +*/%-]*\)\))", word)
    escaped = (
        part if at % 2 else re.sub(r'([\\"`$])', r"\\\1", part) for at, part in enumerate(parts)
    )
    return f'"{"".join(escaped)}"' if parts[1:] else shlex.quote(word)


def find_commands(
    text: str, location: str, engine: str | None, environment: Mapping[str, str] | None = None
) -> Iterator[ServerCommand]:
    """Commands of shell text; with an `engine` also a list of nothing but its options."""
    shell_statements = parse_statements(text, environment)
    for number, statement in enumerate(shell_statements, start=1):
        place = location or (f"command {number}" if len(shell_statements) > 1 else "")
        yield from _parse_statement(
            statement, place, engine if len(shell_statements) == 1 else None
        )


def _parse_statement(
    statement: ShellStatement, location: str, engine: str | None = None, depth: int = 0
) -> Iterator[ServerCommand]:
    """The server that a statement starts: by its launcher, in a container of its image, or in another shell."""
    words, environment = statement.words, statement.environment
    if depth > 3 or not words:
        return
    program = PurePath(words[0]).name
    if program in ("docker", "podman", "nerdctl") and "run" in words[:4]:
        yield from _parse_docker_run(words, environment, location, depth)
        return
    found = match_launcher(words)
    if found:
        name, at, subcommand = found
        set_before = (word.partition("=")[::2] for word in words[:at])
        before = {key: value for key, value in set_before if value and key.isidentifier()}
        pinned = next(
            filter(
                None, (re.search(rf"\b{name}(?:\[\w+\])?==([\d.]+)$", word) for word in words[:at])
            ),
            None,
        )
        version = pinned[1] if pinned else ""
        held = parse_image_name(_find_pyxis_image(words[:at]))
        if held and held.engine == name:
            version = held.version
        command = ServerCommand(
            location,
            name,
            tuple(words[at:]),
            {**environment, **before},
            version,
            subcommand=subcommand,
        )
        if wrapper := load_wrappers().get(words[at - 1]):
            argv, own, settings = unwrap_command(words[at - 1], words[at:])
            launched = shlex.join(["python", "-m", words[at - 1], *own])
            command = replace(
                command,
                argv=argv,
                launched=launched,
                renamed_options=wrapper.renamed,
                config=settings,
            )
        yield command
        return
    script = next(
        (at for at, word in enumerate(words[:-1]) if re.fullmatch(r"-[a-z]*c", word)), None
    )
    sentences = [
        word for word in words if " " in word and SERVER_MENTION_PATTERN.search(word)
    ]  # ssh HOST '...', tmux new '...'
    if script is not None and any(
        PurePath(word).name in _SHELL_PROGRAMS for word in words[:script]
    ):
        sentences = [words[script + 1]]
    if sentences:
        for inner in parse_statements(sentences[-1], environment):
            yield from _parse_statement(inner, location, None, depth + 1)
    elif engine and words[0].startswith("-"):
        yield ServerCommand(location, engine, words, environment)


def _find_pyxis_image(words: Sequence[str]) -> str:
    """The image that Slurm's `srun` is told to start in, "nvcr.io#nvidia/..." or not; empty where it is told none."""
    given = [at for at, word in enumerate(words) if word.partition("=")[0] == "--container-image"]
    if not given:
        return ""
    _, tied, name = words[given[0]].partition("=")
    return (name if tied else " ".join(words[given[0] + 1 : given[0] + 2])).replace("#", "/")


def match_launcher(words: Sequence[str]) -> tuple[str, int, bool] | None:
    """Which engine's launcher is among the words, where its own begin, and whether it takes the model as a word."""
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
        if name == "text-generation-launcher":
            return "tgi", at + 1, False
    return None


def _parse_docker_run(
    words: Sequence[str], environment: Mapping[str, str], location: str, depth: int
) -> Iterator[ServerCommand]:
    """What `docker run` starts in an engine's image."""
    inside, entrypoint, at = dict[str, str](), "", words.index("run") + 1
    while at < len(words) and words[at].startswith("-"):
        key, tied, value = words[at].partition("=")
        alone = (
            bool(tied)
            or key in _VALUELESS_DOCKER_OPTIONS
            or re.fullmatch(r"-[ditP]+", key) is not None
        )
        text = value if tied else words[at + 1] if at + 1 < len(words) else ""
        at += 1 if alone else 2
        if key == "--entrypoint":
            entrypoint = text
        elif key in ("-e", "--env"):
            name, equals, content = text.partition("=")
            inside[name] = content if equals else environment.get(name, f"${{{name}}}")
    if at < len(words):
        rest = ((entrypoint,) if entrypoint else ()) + tuple(words[at + 1 :])
        yield from parse_container(words[at], rest, inside, location, bool(entrypoint), depth)


class EngineImage(NamedTuple):
    """An engine's image."""

    engine: str
    starts: bool  # the server, by itself
    version: str  # of the engine, as far as the tag says it


def parse_image_name(name: str) -> EngineImage | None:
    """What an image is by its name; None for any that is no engine's."""
    for engine, starts, pattern in _ENGINE_IMAGES:
        if match := pattern.search(name):
            found = re.match(r":v?(\d+\.\d+(?:\.\d+)?)", name[match.end() :])
            version = found[1] if found else ""
            if "ai-dynamo/" in name:  # the tag is Dynamo's
                version = get_dynamo_image_version(engine, version)
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
    """What a container of the image `name` starts with these words, unless its entry point is `replaced`."""
    engine_image = parse_image_name(name)
    begun = list(
        _parse_statement(ShellStatement(tuple(words), environment), location, None, depth + 1)
    )
    for command in begun:
        version = (
            engine_image.version if engine_image and engine_image.engine == command.engine else ""
        )
        yield replace(command, container=True, version=version or command.version)
    if (
        not begun
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
