"""Decorators that compile the simulator's kernels, and whether compiled code is kept on disk."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Protocol, TypeVar

from numba import njit

FunctionT = TypeVar("FunctionT", bound=Callable[..., object])

CAN_CACHE_COMPILED_CODE = "NUMBA_CACHE_DIR" in os.environ or any(
    os.access(folder, os.W_OK) for folder in (Path(__file__).parent, Path.home())
)
"""Whether compiled code can be kept on disk, beside its source or in the home directory.

Otherwise every process compiles its own.
"""


class KernelDecorator(Protocol):
    """A decorator that compiles a function and keeps its signature."""

    def __call__(self, function: FunctionT, /) -> FunctionT: ...


def _build_decorator(**options: object) -> KernelDecorator:
    """Build a decorator for functions that only compiled code calls.

    They are kept on disk as part of `simulator.router.run_compiled_simulation`.
    """
    decorator: KernelDecorator = njit(  # type: ignore[call-overload]
        error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True, **options
    )
    return decorator


njit_allocating = _build_decorator(_nrt=True)
"""For kernels that create arrays or change the length of a list."""
njit_inline_always = _build_decorator(_nrt=True, inline="always")
"""For kernels near the entry point with one caller, which numba would otherwise compile twice."""
njit_compiled = _build_decorator(_nrt=False)
"""For kernels without allocations: references are not counted, as an outer function owns them."""
njit_force_inline = _build_decorator(_nrt=False, forceinline=True)
"""For kernels without allocations that have one caller or run in every step."""
