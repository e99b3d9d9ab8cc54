"""What of a command is shown: what was understood of it. Any other text is `...`, whatever it is called.

Understood are numbers, switches, known choices, models, and texts of known options and variables as the
file has them: what a variable filled in is shown as its reference.
"""

import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache
from typing import Any

from planner.core.catalog import SourcedEntry, load_catalog
from planner.core.errors import PlannerError, find_closest
from planner.core.readers import parse_json
from planner.core.redaction import MASK, is_secret_name, redact_text
from planner.deploy.manifests import EnvVariableEntry
from planner.engines.cli_options import (
    CliOption,
    ParsedOption,
    get_cli_options,
    is_unresolved,
    list_versions_with_spelling,
    load_flag_lists,
    load_recorded_names,
)
from planner.models.registry import list_model_names
from planner.tools.lint.findings import load_engine_changes
from planner.tools.lint.forms import load_forms

_NUMBER = re.compile(
    r"[-+]?\d{1,15}(?:\.\d{1,9})?(?:e-?\d+)?[kKmMgGtT]?i?|true|false|auto|none", re.I
)
_REFERENCE = re.compile(
    r"\$\{?\w+\}?|\$\(\w+\)|\$\(\([\w +*/%-]*\)\)|<[\w -]*>|\{\{[\w .-]*\}\}|\.\.\."
)
"""What stands for a value that is filled in elsewhere."""
_KEY = re.compile(r"[a-z]+(_[a-z0-9]+)*")
"""A key of JSON as engines have them."""
_MODEL = re.compile(r"(?:hf://)?\w[\w.-]*/[\w.-]+|(?:\.{0,2}/|~/|\$\{?\w+\}?/)[\w./${}-]*")
"""A model as on the Hub, or a path."""


class HarmlessEntry(SourcedEntry):
    """One entry of `catalogs/harmless_variables.yaml`, whose head explains every field."""

    names: tuple[str, ...]


@cache
def is_known_variable(engine: str, name: str) -> bool:
    """Return whether a variable of this name is known, and known to hold no secret."""
    known = (
        *(each for entry in load_catalog("harmless_variables.yaml", HarmlessEntry).values()
          for each in entry.names),
        *load_catalog("environment.yaml", EnvVariableEntry),
        *load_engine_changes(engine).environment,
    )  # fmt: skip
    is_recorded = name in load_recorded_names("environment", engine)
    is_known = is_recorded or any(fnmatchcase(name, pattern) for pattern in known)
    return is_known and not is_secret_name(name)


@cache
def _find_known_option(engine: str, written: str) -> CliOption | None:
    """Find the option that one is, in any version, or abbreviated; None for another's."""
    name = written.partition(".")[0] if written.startswith("-") else written
    newest = get_cli_options(engine, load_flag_lists(engine).versions[-1])
    name = name.replace("_", "-") if newest.lists.underscores and name[:2] == "--" else name
    versions = list_versions_with_spelling(engine, name)
    options = get_cli_options(engine, versions[-1]) if versions else newest
    found = options.find_spellings(name)
    return options[found[0]] if found and not is_secret_name(found[0]) else None


@dataclass(frozen=True)
class ShownText:
    """The texts of a command as they are shown, with references for what its variables filled in."""

    engine: str
    variables: Mapping[str, str] = field(default_factory=dict)

    def show_word(self, written: str, word: str) -> str:
        """Return a word that an option is given; without an option the word is the model."""
        if not word or _REFERENCE.fullmatch(word):
            return word
        option = _find_known_option(self.engine, written) if written else None
        if option is None:
            return self._show_text(word) if not written and _MODEL.fullmatch(word) else MASK
        if "json" in option.kind:
            return self._show_json(word, "." in written)
        if _NUMBER.fullmatch(word):
            return word
        if option.choices:
            return word if find_closest(word, option.choices, 0.5) else MASK
        return self._show_text(word) if option.kind == "text" or is_unresolved(word) else MASK

    def show_option(self, option: ParsedOption) -> str:
        """Return an option with its words."""
        words = (shlex.quote(self.show_word(option.written, word)) for word in option.words)
        return " ".join((option.written, *words))

    def list_words(self, words: Sequence[str]) -> Iterator[str]:
        """Yield the words of a command: the model at its start, and options with what they take."""
        name, is_first = "", True
        for word in words:
            written, equals, value = word.partition("=")
            if re.match(r"--?[A-Za-z]", written) and " " not in written:
                name = written
                yield f"{written}={self.show_word(name, value)}" if equals else word
            else:
                yield self.show_word(name, word) if name or is_first else MASK
            is_first = False

    def show_stray(self, word: str) -> str:
        """Return a word that belongs to no option: a model, a number, or the name of an option."""
        if _NUMBER.fullmatch(word) or word in ("#", "serve", *list_model_names()):
            return word
        pattern = r"([-\u2010-\u2014\u2212]+)([a-z][a-z-]*)([= ]?)(.*)"
        if not (match := re.fullmatch(pattern, word, re.DOTALL)):
            return MASK
        dash, name, sign, value = match.groups()
        return f"{dash}{name}{sign}{self.show_word(f'--{name}', value)}"

    def show_variable(self, name: str, value: str) -> str:
        """Return the value of a variable."""
        if not value or _REFERENCE.fullmatch(value):
            return value
        return redact_text(value) if is_known_variable(self.engine, name) else MASK

    def _show_text(self, text: str) -> str:
        text = re.sub(r"\$\((?![\w(]+\)|\().*\)", "$(...)", text, flags=re.DOTALL)
        for name, value in self.variables.items():
            is_understood = _NUMBER.fullmatch(value) or _MODEL.fullmatch(value)
            if len(value) > 3 and not is_understood:
                text = text.replace(value, f"${{{name}}}")
        return redact_text(text)

    def _show_json(self, text: str, is_inner: bool) -> str:
        """Return JSON with its numbers, its switches and the texts of known keys."""
        if is_inner or _NUMBER.fullmatch(text):
            return text if _NUMBER.fullmatch(text) else MASK
        try:
            shown = self._show_value(value := parse_json(text, "the value"), "")
        except PlannerError:
            return text if re.fullmatch(r"[\w-]+=[\d.]+(,[\w-]+=[\d.]+)*", text) else MASK
        return text if shown == value else json.dumps(shown)

    def _show_value(self, value: Any, key: str) -> Any:
        if isinstance(value, Mapping):
            return {
                name if _KEY.fullmatch(name) else MASK: self._show_value(inner, name)
                for name, inner in value.items()
            }
        if isinstance(value, list):
            return [self._show_value(inner, key) for inner in value]
        if not isinstance(value, str):
            return value
        return self._show_text(value) if key in load_forms().names["json_keys"] else MASK
