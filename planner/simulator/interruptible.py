"""Run compiled functions so that Ctrl-C does not end the process."""

import os
from collections.abc import Callable
from functools import lru_cache
from queue import SimpleQueue
from threading import Thread, current_thread, main_thread
from typing import Any, TypeVar

ResultT = TypeVar("ResultT")

Job = tuple[Callable[[], Any], SimpleQueue[tuple[Any, BaseException | None]]]
"""A call, and the queue that gets its result or its exception."""


def call_in_worker(call: Callable[[], ResultT]) -> ResultT:
    """Return what `call` returns, which never runs in the main thread, since that handles signals.

    Numba converts results to arrays in Python code of its own (0.68:
    `pythonapi.nrt_adapt_ndarray_to_python` unpickles their class). A signal handler that raises
    there, as for Ctrl-C, causes a segmentation fault. The main thread waits for a worker instead.
    """
    if current_thread() is not main_thread():
        return call()
    jobs = _start_worker(os.getpid())
    results: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()
    jobs.put((call, results))
    try:
        value, error = results.get()
    except BaseException:  # the next call must not wait for the interrupted one
        _start_worker.cache_clear()
        jobs.put(None)
        raise
    if error:
        raise error
    return value


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
