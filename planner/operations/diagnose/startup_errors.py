"""Why an engine did not start, by what its log says: the phrases of `catalogs/startup_errors.yaml`."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from planner.core.catalog import Entry, entries
from planner.core.quantities import one_line

LONGEST = 2000
"""Letters of a line that are searched."""


class Phrase(Entry):
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
    phrase: Phrase
    figures: Mapping[str, str]
    line: str

    @property
    def remedy(self) -> str:
        """What helps, with the log's own figures."""
        return self.phrase.remedy.format_map(self.figures)


def startup_errors(text: str) -> list[StartupError]:
    """Every kind of error that a log names, in the order of the log, each once."""
    known = entries("startup_errors.yaml", Phrase)
    phrases = {key: (phrase, re.compile(phrase.pattern)) for key, phrase in known.items()}
    found: dict[str, StartupError] = {}
    for line in text.splitlines():
        for key, (phrase, pattern) in phrases.items():
            if match := pattern.search(line[:LONGEST]):
                figures = {name: value for name, value in match.groupdict().items() if value is not None}
                found.setdefault(key, StartupError(key, phrase, figures, one_line(line)[:300]))
                break
    return list(found.values())
