"""Why an engine did not start, by what its log says: the phrases of `catalogs/startup_errors.yaml`."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from planner.core.catalog import StrictEntry, load_catalog
from planner.core.text import escape_to_one_line

MAX_LINE_CHARS = 2000
"""Letters of a line that are searched."""


class ErrorPhrase(StrictEntry):
    """One kind of error; the head of the catalog explains every field."""

    pattern: str
    title: str
    cause: str
    remedy: str
    like: str
    source: str
    mode: str | None = None


@dataclass(frozen=True)
class StartupError:
    """One error of a log: what it is, the figures that it names, and its line."""

    key: str
    phrase: ErrorPhrase
    figures: Mapping[str, str]
    line: str

    @property
    def remedy(self) -> str:
        """What helps, with the log's own figures."""
        return self.phrase.remedy.format_map(self.figures)


def find_startup_errors(text: str) -> list[StartupError]:
    """Every kind of error that a log names, in the order of the log, each once."""
    known = load_catalog("startup_errors.yaml", ErrorPhrase)
    phrases = {key: (phrase, re.compile(phrase.pattern)) for key, phrase in known.items()}
    found: dict[str, StartupError] = {}
    for line in text.splitlines():
        for key, (phrase, pattern) in phrases.items():
            if match := pattern.search(line[:MAX_LINE_CHARS]):
                figures = {
                    name: value for name, value in match.groupdict().items() if value is not None
                }
                found.setdefault(
                    key, StartupError(key, phrase, figures, escape_to_one_line(line)[:300])
                )
                break
    return list(found.values())
