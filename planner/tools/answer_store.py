"""Keep answers between runs, in a private folder of the user's cache.

Rows of `predict` and points of `sweep` are JSON in one SQLite file. Plans, which notebooks open in
processes of their own, are pickled files. Every answer is kept under a digest of all that decides
it, so that no run ever gets the answer to another question.
"""

import hashlib
import json
import math
import os
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import closing
from functools import cache
from pathlib import Path

from planner.core.catalog import compute_build_digest
from planner.core.errors import PlannerError
from planner.core.files import ensure_folder, explain_distrust, find_private_folder

Answer = dict[str, str | int | float | bool | None]
"""The cells of one output row by column; `status` is always among them."""
ANSWER_STATUSES = ("ok", "does_not_fit", "nothing_meets")
"""Statuses of answers that are kept; an error may have passed by the next run."""
NOTHING_KEPT = "everything is computed, nothing kept"
MAX_KEPT_PLANS = 200
"""Pickled plans in the cache; the least recently used are removed."""


def compute_answer_key(kind: str, question: object, folder: Path) -> str:
    """Return a digest of `question`, the files that it names, and the planner's build and catalogs.

    `question` is made of JSON values. Text in it that is the path of a file, relative to `folder`
    or to the working folder, also stands for the content of that file.
    """
    names = sorted({text for text in _iterate_texts(question) if text})
    digests = [
        digest
        for name in names
        for path in (os.path.join(folder, name), name)
        for digest in _hash_named_files(path)
    ]
    whole = json.dumps(
        [compute_build_digest(), kind, question, digests], sort_keys=True, default=str
    )
    return hashlib.sha256(whole.encode()).hexdigest()


def _iterate_texts(value: object) -> Iterator[str]:
    """Yield every text in nested lists and mappings."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _iterate_texts(item)


def _hash_named_files(path: str) -> Iterator[str]:
    """Yield a digest of the file at `path`, and of the quantization that belongs to a model's."""
    paths = [path]
    if os.path.isdir(path):
        paths = [os.path.join(path, "config.json")]
    if paths[0].endswith(".json"):
        paths.append(os.path.join(os.path.dirname(paths[0]), "hf_quant_config.json"))
    yield from map(hash_file, filter(os.path.isfile, paths))


def hash_file(path: str | Path) -> str:
    """Return a digest of a file, computed once for each version of it.

    A file that cannot be read has one too: who needs its content reports the error.
    """
    try:
        status = os.stat(path)
        return _hash_version(os.path.abspath(path), status.st_mtime_ns, status.st_size)
    except OSError:
        return "unreadable"


@cache
def _hash_version(path: str, _mtime_ns: int, _size: int) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class AnswerStore:
    """Answers by key in one SQLite file, which several processes may use at once.

    A store that fails later is reported once, in one sentence. Then it keeps nothing and has no
    answers, so that everything is computed again.
    """

    def __init__(
        self, path: Path | None, report_message: Callable[[str], object] = lambda text: None
    ) -> None:
        """Open the store at `path`, which is created; raise `PlannerError` if it cannot be used.

        Without a path the store keeps nothing.
        """
        self.path, self._report_message, self._usable = path, report_message, path is not None
        if path is None:
            return
        ensure_folder(path.parent)
        try:
            # SQLite would let the umask decide who may write it
            os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
            self._run(
                "create table if not exists answers (key text primary key, answer text not null)"
            )
        except (OSError, sqlite3.Error) as error:
            raise PlannerError(f"cannot use {path} as a store of answers: {error}") from None

    def fetch(self, keys: Sequence[str], columns: Set[str]) -> dict[str, Answer]:
        """Return the answers that are kept under `keys`; all their cells are in `columns`."""
        rows = self._execute(
            "select key, answer from answers where key in (select value from json_each(?))",
            json.dumps(keys),
        )
        answers = {key: _parse_answer(text, columns) for key, text in rows}
        valid = {key: answer for key, answer in answers.items() if answer is not None}
        if damaged := len(answers) - len(valid):
            self._report_message(f"{damaged:,} answers in {self.path} are damaged: computed again")
        return valid

    def add(self, answers: Mapping[str, Answer]) -> None:
        """Keep `answers`, all or none of them, except those that are errors."""
        texts = {
            key: json.dumps(answer)
            for key, answer in answers.items()
            if answer["status"] in ANSWER_STATUSES
        }
        self._execute(
            "insert or replace into answers select key, value from json_each(?)", json.dumps(texts)
        )

    def _execute(self, statement: str, *parameters: str) -> list[tuple[str, str]]:
        """Return the rows of `statement`; none if the store fails, which is reported."""
        if self._usable:
            try:
                return self._run(statement, *parameters)
            except sqlite3.Error as error:
                self._usable = False
                problem = f"cannot use {self.path} as a store of answers: {error}"
                self._report_message(f"{problem}; {NOTHING_KEPT}")
        return []

    def _run(self, statement: str, *parameters: str) -> list[tuple[str, str]]:
        """Return the rows of `statement`, run in a transaction of its own."""
        assert self.path is not None
        with closing(sqlite3.connect(self.path, timeout=60)) as database, database:
            return database.execute(statement, parameters).fetchall()


def open_default_store(report_message: Callable[[str], object]) -> AnswerStore:
    """Open the user's own store, which `predict` and `sweep` share.

    One that cannot be used or trusted is reported, and a store that keeps nothing is returned.
    """
    folder = find_private_folder()
    try:
        if folder is None:
            raise PlannerError("cannot use a store of answers: you have no private cache folder")
        path = folder / "answers.sqlite"
        if path.exists() and (reason := explain_distrust(path.stat())):
            raise PlannerError(f"cannot use {path} as a store of answers: {reason}")
        return AnswerStore(path, report_message)
    except PlannerError as error:
        report_message(f"{error}; {NOTHING_KEPT}")
        return AnswerStore(None)


def _parse_answer(text: str, columns: Set[str]) -> Answer | None:
    """Return the answer in a row of the store; None for anything that the planner never wrote."""
    try:
        answer = json.loads(text)
    except (ValueError, TypeError, RecursionError):
        return None
    is_valid = (
        isinstance(answer, dict)
        and answer.get("status") in ANSWER_STATUSES
        and answer.keys() <= columns
        and all(
            value is None
            or isinstance(value, str | int)
            or (isinstance(value, float) and math.isfinite(value))
            for value in answer.values()
        )
    )
    return answer if is_valid else None


def prune_pickles(folder: Path) -> None:
    """Remove the pickles of `folder` that were used least recently, beyond `MAX_KEPT_PLANS`."""
    for path in sorted(folder.glob("*.pickle"), key=os.path.getmtime)[:-MAX_KEPT_PLANS]:
        path.unlink(missing_ok=True)
