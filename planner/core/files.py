"""What goes out: files that are whole or not there, and the date."""

import errno
import os
import secrets
import shutil
import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, date, datetime
from pathlib import Path

from planner.core.errors import PlannerError


def check_not_overwriting(read: Iterable[Path], written: Iterable[Path]) -> None:
    """`PlannerError` where a file that is `read` would be written over."""
    places = {os.path.realpath(path) for path in written}
    if over := next((path for path in read if os.path.realpath(path) in places), None):
        raise PlannerError(
            f"{over} is read, and would be written over: name another place to write to"
        )


@contextmanager
def replace_atomically(
    *paths: Path, stale: Iterable[Path] = (), new: bool = False
) -> Iterator[list[Path]]:
    """Paths to write instead of `paths`, which take their places together when the block ends well.

    A write that fails, or a process that is killed in it, leaves what was there before. Processes
    take turns in the folder that holds them all, so that files of one are never mixed with those of
    another; `stale` files are removed in the same turn. A pipe or a device is written as it is.
    Raises `PlannerError` when a file cannot be written, or is there where it must be `new`.
    """
    parts: dict[Path, Path] = {}
    try:
        yield [_make_temp_path(path, parts) for path in paths]
        with _lock_folder(
            Path(
                os.path.commonpath([place.parent for place in parts.values()] or [paths[0].parent])
            )
        ):
            for part, place in parts.items():
                if new:
                    os.link(part, place)
                    continue
                if place.exists():
                    shutil.copymode(place, part)
                part.replace(place)
            for path in stale:
                path.unlink(missing_ok=True)
    except OSError as error:
        where = paths[0] if len(paths) == 1 else paths[0].parent
        raise PlannerError(f"cannot write {where}: {error.strerror or error}") from None
    finally:
        for part in parts:
            with suppress(OSError):
                part.unlink(missing_ok=True)


def _make_temp_path(path: Path, parts: dict[Path, Path]) -> Path:
    """What to write instead of `path`, remembered in `parts`; the path itself where it is no file."""
    if path.exists() and not path.is_file():
        return path
    place = Path(os.path.realpath(path))
    if place.exists() and not os.access(place, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    parts[part := place.with_name(f".{secrets.token_hex(8)}.part")] = place
    return part


@contextmanager
def _lock_folder(folder: Path) -> Iterator[None]:
    """One process at a time, where the system has such locks: Windows and some network folders have not."""
    with ExitStack() as held:
        if sys.platform != "win32":
            import fcntl

            handle = os.open(folder, os.O_RDONLY)
            held.callback(os.close, handle)
            with suppress(OSError):
                fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def ensure_folder(path: Path) -> Path:
    """`path` as a folder that can be written into, made where there is none; `PlannerError` where that fails."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        if not os.access(path, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise PlannerError(f"cannot write into {path}: {error.strerror or error}") from None
    return path


def get_report_date() -> date:
    """The date to print: today's, or that of `SOURCE_DATE_EPOCH` (seconds, UTC), so that output can be reproduced."""
    epoch = os.environ.get("SOURCE_DATE_EPOCH")
    if not epoch:
        return date.today()
    try:
        return datetime.fromtimestamp(int(epoch), UTC).date()
    except (ValueError, OverflowError, OSError):
        raise PlannerError(
            f"SOURCE_DATE_EPOCH: expected whole seconds since 1970, got {epoch!r:.40}"
        ) from None
