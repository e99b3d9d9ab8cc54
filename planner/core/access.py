"""What may be read on behalf of somebody else: files below given folders, and addresses or none."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path

from planner.core.errors import PlannerError


@dataclass(frozen=True)
class ReadAccess:
    """The folders below which files may be read, the asker's first, and whether addresses may."""

    folders: tuple[Path, ...]
    allows_addresses: bool


_ACCESS: ContextVar[ReadAccess | None] = ContextVar("access", default=None)
"""None: everything, as for who runs a command on files of their own."""


@contextmanager
def limit_reading(folders: Sequence[Path], *, allows_addresses: bool) -> Iterator[None]:
    """Let the block read nothing but files below these folders, links resolved; nor addresses."""
    token = _ACCESS.set(ReadAccess(tuple(map(Path.resolve, folders)), allows_addresses))
    try:
        yield
    finally:
        _ACCESS.reset(token)


def may_fetch() -> bool:
    """Return whether addresses may be read."""
    access = _ACCESS.get()
    return access is None or access.allows_addresses


def check_may_read(path: Path) -> None:
    """Raise `PlannerError`, which tells nothing of the file, if it may not be read."""
    access = _ACCESS.get()
    if access and not any(map(path.resolve().is_relative_to, access.folders)):
        raise PlannerError(
            f"{path} is not read: only files below {access.folders[0]} are, also where a file"
            " names another"
        )
