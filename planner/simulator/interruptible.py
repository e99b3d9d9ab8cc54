"""Run compiled functions so that neither Ctrl-C nor a damaged cache of theirs ends the process."""

import os
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache, wraps
from queue import SimpleQueue
from threading import Thread, current_thread, main_thread
from typing import Any, ParamSpec, TypeVar

ParamsT = ParamSpec("ParamsT")
ResultT = TypeVar("ResultT")

Job = tuple[Callable[[], Any], SimpleQueue[tuple[Any, BaseException | None]]]
"""A call, and the queue that gets its result or its exception."""


def make_interruptible(compiled: Callable[ParamsT, ResultT]) -> Callable[ParamsT, ResultT]:
    """Return `compiled` such that it never runs in the main thread, which handles signals.

    Numba converts results to arrays in Python code of its own (0.68:
    `pythonapi.nrt_adapt_ndarray_to_python` unpickles their class). A signal handler that raises
    there, as for Ctrl-C, causes a segmentation fault. The main thread waits for a worker instead.
    """
    _survive_damaged_cache(getattr(compiled, "_cache", None))

    @wraps(compiled)
    def run_in_worker(*args: ParamsT.args, **kwargs: ParamsT.kwargs) -> ResultT:
        if current_thread() is not main_thread():
            return compiled(*args, **kwargs)
        jobs = _start_worker(os.getpid())
        results: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()
        jobs.put((lambda: compiled(*args, **kwargs), results))
        try:
            value, error = results.get()
        except BaseException:  # the next call must not wait for the interrupted one
            _start_worker.cache_clear()
            jobs.put(None)
            raise
        if error:
            raise error
        return value

    return run_in_worker


def _survive_damaged_cache(cache: Any) -> None:
    """Make numba compile again what it cannot load from its files, such as one cut by a full disk.

    Code that cannot be saved is used all the same.
    """
    if cache is None:
        return
    load, save = cache.load_overload, cache.save_overload

    def load_or_discard(signature: object, context: object) -> object:
        try:
            return load(signature, context)
        except Exception:  # unpickling a damaged file raises anything
            with suppress(OSError):
                cache.flush()
            return None

    def save_if_possible(signature: object, compiled: object) -> None:
        with suppress(OSError):
            save(signature, compiled)

    cache.load_overload, cache.save_overload = load_or_discard, save_if_possible


@lru_cache(maxsize=1)
def _start_worker(_process: int) -> SimpleQueue[Job | None]:
    """Start a thread of this process and return its queue of jobs; None ends it."""
    jobs: SimpleQueue[Job | None] = SimpleQueue()
    Thread(target=_run_jobs, args=(jobs,), daemon=True).start()
    return jobs


def _run_jobs(jobs: SimpleQueue[Job | None]) -> None:
    while job := jobs.get():
        call, results = job
        try:
            results.put((call(), None))
        except BaseException as error:
            results.put((None, error))
        del job, call, results  # requests take memory, and the next job may be far off
