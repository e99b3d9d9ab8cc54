"""Units, intervals and the one error type: what every other module counts in."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TypeVar
from unicodedata import category

from planner.core.text import escape_to_one_line

ValueT = TypeVar("ValueT")


class PlannerError(ValueError):
    """Bad input, told in one sentence: what is wrong, where, and what would be accepted.

    It is one line of at most 400 printable characters, whatever it quotes.
    """

    def __init__(self, message: object) -> None:
        shown = escape_to_one_line(" ".join(str(message)[:10_000].split()))
        super().__init__(shown if len(shown) <= 400 else f"{shown[:250]} ... {shown[-140:]}")


@contextmanager
def add_error_context(location: str) -> Iterator[None]:
    """Every `PlannerError` of the block says first that it is about `where`."""
    try:
        yield
    except PlannerError as error:
        raise PlannerError(f"{location}: {error}") from None


def find_closest(name: str, known_names: Iterable[str], min_similarity: float) -> str:
    """The nearest of the `known` names, at least so much `alike`; empty where none is."""
    return next(iter(difflib.get_close_matches(name, known_names, n=1, cutoff=min_similarity)), "")


def make_unknown_name_error(
    name: str, known_names: Iterable[str], what: str, alike: float = 0.5
) -> PlannerError:
    """The error for an unknown `name`: the nearest known ones, at least so much `alike`, or all of them when few."""
    known_names = sorted(known_names)
    folded = {k.casefold(): k for k in known_names}
    close = [
        folded[match]
        for match in difflib.get_close_matches(name.casefold(), folded, n=3, cutoff=alike)
    ]
    listed = (
        f"known: {', '.join(known_names)}" if len(known_names) <= 12 else "nothing like it is known"
    )
    hint = f"did you mean {' or '.join(close)}?" if close else listed
    return PlannerError(f"unknown {what} {name!r}; {hint}")


def check_known_names(
    given: Mapping[str, ValueT], names: Iterable[str], what: str
) -> Mapping[str, ValueT]:
    """What was `given`, if `names` has all its keys; `PlannerError` with the nearest where one is not."""
    for key in given:
        if key not in names:
            raise make_unknown_name_error(key, names, what)
    return given


def validate_unicode_text(name: object, what: str) -> str:
    """`name` as text; `PlannerError` where it has half characters, which no file and no terminal takes."""
    if any(category(letter) == "Cs" for letter in str(name)):
        raise PlannerError(f"{what} {str(name)!r:.80} is no Unicode text")
    return str(name)
