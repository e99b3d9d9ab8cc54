"""The one error type of the package, and messages that suggest the nearest known name."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TypeVar
from unicodedata import category

from planner.core.redaction import redact_text
from planner.core.text import escape_to_one_line

ValueT = TypeVar("ValueT")
MAX_PROBLEM_LETTERS = 4000
"""Letters of one of several problems, at most."""


class PlannerError(ValueError):
    """Bad input, described in one sentence: what is wrong, where, and what is accepted.

    The message is one line of at most 400 printable characters, whatever it quotes. An input with
    several mistakes has one of the `problems` for each, uncut, and the first one as its message.
    """

    def __init__(self, message: object, problems: Sequence[str] = ()) -> None:
        shown = redact_text(escape_to_one_line(" ".join(str(message)[:10_000].split())))
        super().__init__(shown if len(shown) <= 400 else f"{shown[:250]} ... {shown[-140:]}")
        self.problems = tuple(
            redact_text(escape_to_one_line(" ".join(problem[:MAX_PROBLEM_LETTERS].split())))
            for problem in problems
        ) or (str(self),)


@contextmanager
def add_error_context(location: str) -> Iterator[None]:
    """Prefix the message of every `PlannerError` in the block with `location`."""
    try:
        yield
    except PlannerError as error:
        problems = [f"{location}: {problem}" for problem in error.problems]
        raise PlannerError(f"{location}: {error}", problems) from None


def find_closest(name: str, known_names: Iterable[str], min_similarity: float) -> str:
    """Return the nearest known name of at least this similarity (0 to 1), or an empty string."""
    return next(iter(difflib.get_close_matches(name, known_names, n=1, cutoff=min_similarity)), "")


def make_unknown_name_error(
    name: str, known_names: Iterable[str], kind: str, min_similarity: float = 0.5
) -> PlannerError:
    """Build the error for an unknown name, with the nearest known names or, if few, all of them."""
    known_names = sorted(known_names)
    folded = {k.casefold(): k for k in known_names}
    close = [
        folded[match]
        for match in difflib.get_close_matches(name.casefold(), folded, n=3, cutoff=min_similarity)
    ]
    listed = (
        f"known: {', '.join(known_names)}" if len(known_names) <= 12 else "nothing like it is known"
    )
    hint = f"did you mean {' or '.join(close)}?" if close else listed
    return PlannerError(f"unknown {kind} {name!r}; {hint}")


def check_known_names(
    values: Mapping[str, ValueT], known_names: Iterable[str], kind: str
) -> Mapping[str, ValueT]:
    """Return `values` if all keys are known, else raise `PlannerError` with the nearest name."""
    for key in values:
        if key not in known_names:
            raise make_unknown_name_error(key, known_names, kind)
    return values


def validate_unicode_text(value: object, kind: str) -> str:
    """Return `value` as text, or raise `PlannerError` for lone surrogates, which UTF-8 lacks."""
    text = str(value)
    if any(category(letter) == "Cs" for letter in text):
        raise PlannerError(f"{kind} {text!r:.80} is no Unicode text")
    return text
