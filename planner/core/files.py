"""Output files, written completely or not at all; private files; and the date of reports."""

import csv
import errno
import math
import os
import pickle
import secrets
import shutil
import stat
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, date, datetime
from pathlib import Path
from typing import TypeVar

from platformdirs import user_cache_path

from planner.core.errors import PlannerError

ValueT = TypeVar("ValueT")


def check_not_overwriting(read: Iterable[Path], written: Iterable[Path]) -> None:
    """Raise `PlannerError` if a file that is `read` would be overwritten."""
    places = {os.path.realpath(path) for path in written}
    if over := next((path for path in read if os.path.realpath(path) in places), None):
        raise PlannerError(
            f"{over} is read, and would be written over: name another place to write to"
        )


OWN_PDF = ("%PDF", "Headroom capacity planner")
"""The beginning of a PDF, and the keyword of the document properties of all that Headroom typesets."""


def check_replaceable(path: Path, beginning: str, mark: str = "", *, force: bool) -> None:
    """Raise `PlannerError` unless a file may be written: new, empty, known as own, or by `force`.

    The folder has to exist. Every file that the same command writes has this `beginning`, and
    holds `mark`.
    """
    if not path.parent.is_dir():
        raise PlannerError(f"cannot write {path}: there is no folder {path.parent}")
    if force or not path.is_file():
        return
    with path.open("rb") as file:
        start = file.read(len(beginning.encode()))
        is_own = start == beginning.encode() and (not mark or mark.encode() in file.read())
    if start and not is_own:
        raise PlannerError(
            f"{path} is there, and no file that this command wrote: --force replaces it"
        )


MACHINE_ERRORS = (
    errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EMFILE, errno.ENFILE, errno.ENOMEM
)  # fmt: skip
"""What fails because of the machine, whatever was asked."""
UNFINISHED = ".headroom-unfinished"
"""In a folder whose files are being replaced, or were when their writer was killed: their names."""


def make_file_error(error: OSError | ValueError, doing: str) -> Exception:
    """Return the machine's failure as an `OSError`, and any other as a `PlannerError`."""
    problem = f"{doing}: {getattr(error, 'strerror', None) or error}"
    if isinstance(error, OSError) and error.errno in MACHINE_ERRORS:
        return OSError(error.errno, problem)
    return PlannerError(problem)


@contextmanager
def replace_atomically(
    *paths: Path,
    find_stale: Callable[[], Iterable[Path]] = tuple,
    new: bool = False,
    updating: bool = False,
) -> Iterator[list[Path]]:
    """Yield temporary paths that replace `paths` together when the block ends without an error.

    A failed write leaves the earlier files. The folders are locked while files are replaced, so
    that those of two processes never mix; those that `find_stale` finds then are removed. A process
    that is killed in the middle of it leaves a list of the files that may be of two writers, which
    `list_unfinished` reads. A block that is `updating` has the locks from its beginning, so that
    what it reads of `paths` is what it replaces. A pipe or a device is written directly. Raises
    `PlannerError` if a file cannot be written, or exists although it must be `new`.
    """
    parts: dict[Path, Path] = {}
    try:
        with ExitStack() as stack:
            made = [_make_temp_path(path, parts) for path in paths]
            folders = sorted({place.parent for place in parts.values()})
            for folder in folders * updating:
                stack.enter_context(lock_folder(folder))
            yield made
            for folder in folders * (not updating):
                stack.enter_context(lock_folder(folder))
            stale = [path for path in find_stale() if path.exists()]
            with _list_replaced([*parts.values(), *stale]):
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
        raise make_file_error(error, f"cannot write {where}") from None
    finally:
        for part in parts:
            with suppress(OSError):
                part.unlink(missing_ok=True)


@contextmanager
def _list_replaced(places: Sequence[Path]) -> Iterator[None]:
    """Have the names of several files listed in their folders while the block replaces them."""
    replaced: dict[Path, set[str]] = {}
    for place in places:
        replaced.setdefault(place.parent, set()).add(place.name)
    before = {folder: list_unfinished(folder) for folder in replaced}
    if len(places) > 1:
        for folder, names in replaced.items():
            (folder / UNFINISHED).write_text("\n".join(before[folder] | names), encoding="utf-8")
    yield
    for folder, names in before.items():
        if left := names - replaced[folder]:
            (folder / UNFINISHED).write_text("\n".join(left), encoding="utf-8")
        else:
            (folder / UNFINISHED).unlink(missing_ok=True)


def list_unfinished(folder: Path) -> set[str]:
    """List the files of a folder that may be of two writers, because one was killed."""
    with suppress(OSError):
        if (kept := folder / UNFINISHED).is_file():
            with kept.open(encoding="utf-8", errors="replace") as file:
                return set(file.read(2**16).splitlines())
    return set()


def check_finished(path: Path) -> None:
    """Raise `PlannerError` for a file whose writer was killed while it replaced several."""
    folder = Path(os.path.realpath(path)).parent
    if path.name in list_unfinished(folder):
        with lock_folder(folder):  # until a writer that goes on has finished
            names = list_unfinished(folder)
        if path.name in names:
            raise PlannerError(
                f"{path} may not belong to the files beside it: the command that replaced"
                f" {len(names)} of them was killed; run it again"
            )


def _make_temp_path(path: Path, parts: dict[Path, Path]) -> Path:
    """Return a temporary path for `path` and add it to `parts`; a pipe or device stays as it is."""
    if path.exists() and not path.is_file():
        return path
    place = Path(os.path.realpath(path))
    if place.exists() and not os.access(place, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    parts[part := place.with_name(f".{secrets.token_hex(8)}.part")] = place
    return part


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Lock a folder against other processes; Windows and some network folders lack these."""
    with ExitStack() as stack:
        if sys.platform != "win32":
            import fcntl

            handle = os.open(folder, os.O_RDONLY)
            stack.callback(os.close, handle)
            with suppress(OSError):
                fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def write_csv(
    path: Path,
    rows: Sequence[Mapping[str, object]],
    columns: Iterable[str] = (),
    line_end: str = "\n",
) -> None:
    """Write rows as CSV, `columns` first; cells that a row lacks are empty."""
    names = list_columns([dict.fromkeys(columns), *rows])
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, names, restval="", lineterminator=line_end)
        writer.writeheader()
        # integers in full, others to seven digits, empty if unknown or infinite
        writer.writerows(
            {
                name: (f"{v:.7g}" if math.isfinite(v) else "") if isinstance(v, float) else v
                for name, v in row.items()
            }
            for row in rows
        )


def list_columns(rows: Iterable[Mapping[str, object]]) -> list[str]:
    """List the names in rows, in the order in which they first occur."""
    return list(dict.fromkeys(name for row in rows for name in row))


def ensure_folder(path: Path) -> Path:
    """Return `path` as a writable folder, created if missing; `PlannerError` if that fails."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        if not os.access(path, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise make_file_error(error, f"cannot write into {path}") from None
    return path


def check_output_folder(path: Path) -> None:
    """Raise `PlannerError` if `ensure_folder` would fail, before there is anything to write."""
    place = path.absolute()
    there = next(folder for folder in (place, *place.parents) if os.path.lexists(folder))
    if not (there.is_dir() and os.access(there, os.W_OK)):
        raise PlannerError(f"cannot write into {path}: {there} is no folder that you may write to")


def get_report_date() -> date:
    """Return the date to print: today, or that of `SOURCE_DATE_EPOCH` (s, UTC) for equal output."""
    epoch = os.environ.get("SOURCE_DATE_EPOCH")
    if not epoch:
        return date.today()
    try:
        return datetime.fromtimestamp(int(epoch), UTC).date()
    except (ValueError, OverflowError, OSError):
        raise PlannerError(
            f"SOURCE_DATE_EPOCH: expected whole seconds since 1970, got {epoch!r:.40}"
        ) from None


def find_user_cache() -> Path | None:
    """Return the planner's folder in the user's cache, there or not; None without a home folder."""
    with suppress(RuntimeError):  # by which platformdirs says so
        if (folder := user_cache_path("headroom")).is_absolute():
            return folder
    return None


def find_private_folder() -> Path | None:
    """Return the planner's folder in the user's cache, closed to others; None where there is none.

    There is none without a home folder, and where it cannot be created or belongs to another user.
    """
    if not (folder := find_user_cache()):
        return None
    with suppress(OSError):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not explain_distrust(folder.stat(), may_be_written=True):
            folder.chmod(0o700)
            return folder
    return None


def explain_distrust(status: os.stat_result, *, may_be_written: bool = False) -> str:
    """Return why a file cannot be believed: another user owns it or may write it; else nothing."""
    if sys.platform == "win32":
        return ""  # there, permissions are no part of a file's mode
    if status.st_uid != os.geteuid():
        return "it belongs to another user"
    return "other users may write it" if status.st_mode & 0o022 and not may_be_written else ""


def write_pickle(path: Path, value: object) -> None:
    """Pickle `value` into a file that only its owner may read; `PlannerError` if that fails."""
    with replace_atomically(path) as (part,):
        path.unlink(missing_ok=True)  # the new file would take over its mode
        part.touch(0o600)
        part.write_bytes(pickle.dumps(value))


def read_pickle(path: Path, kind: type[ValueT]) -> ValueT:
    """Return the value of type `kind` that `write_pickle` wrote.

    Loading a pickle can run any code, so raise `PlannerError` for a file that another user owns or
    may write; and `OSError` if it cannot be read.
    """
    with path.open("rb") as file:
        status = os.fstat(file.fileno())
        if reason := explain_distrust(status):
            raise PlannerError(f"{path} is not opened: {reason}")
        if not stat.S_ISREG(status.st_mode):
            raise PlannerError(f"{path} is not opened: it is no regular file")
        value = pickle.load(file)
    if not isinstance(value, kind):
        raise PlannerError(f"{path} is not opened: it holds no {kind.__name__}")
    return value
