"""The one error type of the package, and messages that suggest the nearest known name."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from unicodedata import category

from planner.core.redaction import quote_name, redact_text
from planner.core.text import escape_to_one_line

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
        raise PlannerError(
            f"{location}: {error}", [f"{location}: {problem}" for problem in error.problems]
        ) from None


@contextmanager
def require_extra(extra: str, subject: str) -> Iterator[None]:
    """Report a package that the block lacks as the `extra` of this distribution that brings it."""
    try:
        yield
    except ModuleNotFoundError as error:
        if not extra or (error.name or "planner").partition(".")[0] == "planner":
            raise
        raise PlannerError(
            f"{subject} needs the extra \"{extra}\": pip install 'headroom-planner[{extra}]'"
        ) from None


def find_closest(name: str, known_names: Iterable[str], min_similarity: float) -> str:
    """Return the nearest known name of at least this similarity (0 to 1), or an empty string."""
    return next(iter(difflib.get_close_matches(name, known_names, n=1, cutoff=min_similarity)), "")


MAX_NEAR_NAMES = 4
"""Names that a message suggests."""


def find_near_names(
    name: str, known_names: Iterable[str], min_similarity: float = 0.5
) -> tuple[str, ...]:
    """Return up to `MAX_NEAR_NAMES` known names that are like `name`, nearest first.

    Names with all the words of `name`, such as "llama 4", come before those spelled alike (by a
    similarity of 0 to 1, with and without the maker before the last slash).
    """
    known = sorted(known_names)
    words = set(_split_words(name))
    containing = [each for each in known if words and words <= set(_split_words(each))]
    if len(containing) > MAX_NEAR_NAMES:
        containing.sort(key=lambda each: (len(_split_words(each)), len(each), each))
    folded: dict[str, str] = {}
    for each in known:
        folded.setdefault(each.casefold(), each)
        folded.setdefault(each.casefold().rpartition("/")[2], each)
    close = difflib.get_close_matches(
        name.casefold(), folded, n=2 * MAX_NEAR_NAMES, cutoff=min_similarity
    )
    near = dict.fromkeys((*containing, *(folded[match] for match in close)))
    return tuple(near)[:MAX_NEAR_NAMES]


def _split_words(name: str) -> list[str]:
    """Split a name into its runs of letters and of digits, in lower case."""
    return re.findall(r"[a-z]+|\d+", name.casefold())


def make_unknown_name_error(
    name: str, known_names: Iterable[str], kind: str, min_similarity: float = 0.5
) -> PlannerError:
    """Build the error for an unknown name, with the nearest known names or, if few, all of them."""
    known_names = sorted(known_names)
    near = find_near_names(name, known_names, min_similarity)
    hint = (
        f"did you mean {', '.join(near[:-1])}{' or ' * (len(near) > 1)}{near[-1]}?"
        if near
        else f"known: {', '.join(known_names)}"
        if len(known_names) <= 12
        else "nothing like it is known"
    )
    return PlannerError(f"unknown {kind} {name if near else quote_name(name)!r}; {hint}")


def validate_unicode_text(value: object, kind: str) -> str:
    """Return `value` as text, or raise `PlannerError` for lone surrogates, which UTF-8 lacks."""
    text = str(value)
    if any(category(letter) == "Cs" for letter in text):
        raise PlannerError(f"{kind} {text!r:.80} is no Unicode text")
    return text
