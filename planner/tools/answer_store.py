"""Keep answers between runs, in a private folder of the user's cache.

The answers of `predict` are JSON in one SQLite file. Plans, which notebooks open in
processes of their own, are pickled files. Every answer is kept under a digest of all that decides
it, so that no run ever gets the answer to another question.
"""

import hashlib
import json
import os
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from functools import cache
from pathlib import Path
from typing import Any

from planner.core.catalog import compute_build_digest
from planner.core.errors import PlannerError
from planner.core.files import ensure_folder, explain_distrust, find_private_folder

Answer = dict[str, Any]
"""The cells of one output row by column; `status` is always among them."""
NOTHING_KEPT = "everything is computed, nothing kept"
MAX_KEPT_PLANS = 200
"""Pickled plans in the cache; the least recently used are removed."""


def compute_answer_key(kind: str, question: object, folder: Path) -> str:
    """Return a digest of `question`, the files that it names, and the planner's build and catalogs.

    `question` is made of JSON values. Text in it that is the path of a file or of a model's folder,
    relative to `folder` or to the working folder, also stands for the content, and for that of the
    quantization beside it.
    """
    texts = sorted({text for text in _iterate_texts(question) if text})
    places = [os.path.join(base, text) for text in texts for base in (folder, "")]
    digests = [
        hash_file(path)
        for place in places
        for path in (
            place,
            os.path.join(place, "config.json"),
            os.path.join(place, "hf_quant_config.json"),
            os.path.join(os.path.dirname(place), "hf_quant_config.json"),
        )
        if os.path.isfile(path)
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
        self.path, self._report_message = path, report_message
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

    def fetch(self, keys: Sequence[str]) -> dict[str, Answer]:
        """Return the answers that are kept under `keys`."""
        rows = self._execute(
            "select key, answer from answers where key in (select value from json_each(?))"
            " and json_valid(answer)",
            json.dumps(keys),
        )
        return {key: json.loads(text) for key, text in rows}

    def add(self, answers: Mapping[str, Answer]) -> None:
        """Keep `answers`, all or none of them, except those that are errors."""
        kept = {key: json.dumps(a) for key, a in answers.items() if a["status"] != "error"}
        self._execute(
            "insert or replace into answers select key, value from json_each(?)", json.dumps(kept)
        )

    def _execute(self, statement: str, parameter: str) -> list[tuple[str, str]]:
        """Return the rows of `statement`; none if the store fails, which is reported."""
        try:
            return self._run(statement, parameter) if self.path else []
        except sqlite3.Error as error:
            problem = f"cannot use {self.path} as a store of answers: {error}"
            self._report_message(f"{problem}; {NOTHING_KEPT}")
            self.path = None
            return []

    def _run(self, statement: str, *parameters: str) -> list[tuple[str, str]]:
        """Return the rows of `statement`, run in a transaction of its own."""
        assert self.path is not None
        with closing(sqlite3.connect(self.path, timeout=60)) as database, database:
            return database.execute(statement, parameters).fetchall()


def open_default_store(report_message: Callable[[str], object]) -> AnswerStore:
    """Open the user's own store, for all that `predict` answers.

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


def prune_pickles(folder: Path) -> None:
    """Remove the pickles of `folder` that were used least recently, beyond `MAX_KEPT_PLANS`."""
    for path in sorted(folder.glob("*.pickle"), key=os.path.getmtime)[:-MAX_KEPT_PLANS]:
        path.unlink(missing_ok=True)
