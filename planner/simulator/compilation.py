"""How the simulator's kernels are compiled: into machine code that is kept on disk.

Kernels, which only compiled code calls, have the decorators `njit_...`. Python calls an
`EntryPoint`. `python -m planner.simulator` compiles all of them ahead.
"""

import hashlib
import os
import pickle
import shutil
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import cached_property
from pathlib import Path
from queue import SimpleQueue
from threading import Thread, current_thread, main_thread
from types import ModuleType
from typing import Any, Generic, ParamSpec, Protocol, TypeVar

import llvmlite
import numba
from llvmlite import binding
from numba import njit, types
from numba.core.compiler import CompileResult
from numba.core.registry import cpu_target
from numba.core.serialize import dumps

from planner.core.errors import PlannerError
from planner.core.files import (
    ensure_folder,
    find_private_folder,
    lock_folder,
    read_pickle,
    write_pickle,
)
from planner.simulator import borrowed

FunctionT = TypeVar("FunctionT", bound=Callable[..., object])
ParamsT = ParamSpec("ParamsT")
ResultT = TypeVar("ResultT")

SHIPPED_CODE_DIR = Path(__file__).parent / "compiled"
"""Machine code that a wheel carries."""
SHIPPED_CPU_FEATURES = {
    "x86-64-v3": (
        "avx", "avx2", "bmi", "bmi2", "cx16", "f16c", "fma", "lzcnt", "movbe", "popcnt", "sse4.2",
    ),
    "generic": (),
}  # fmt: skip
"""Processors that a wheel's code may be for, and what another one needs to run it.

Source: the x86-64 psABI, micro-architecture levels, as LLVM names their features.
"""
MAX_KEPT_BUILDS = 8
"""Folders of machine code in the user's cache, one for each state of the sources."""


class KernelDecorator(Protocol):
    """A decorator that compiles a function and keeps its signature."""

    def __call__(self, function: FunctionT, /) -> FunctionT: ...


def _build_decorator(**options: object) -> KernelDecorator:
    """Build a decorator for functions that only compiled code calls."""

    def decorate(function: FunctionT) -> FunctionT:
        kernel: Any = njit(  # type: ignore[call-overload]
            error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True, **options
        )(function)
        get_call_template = kernel.get_call_template

        def get_general_template(arguments: Sequence[types.Type], named: Any) -> Any:
            """Compile for a type, not once more for every literal of it that a caller passes."""
            return get_call_template(tuple(map(types.unliteral, arguments)), named)

        kernel.get_call_template = get_general_template
        return kernel

    return decorate


njit_allocating = _build_decorator(_nrt=True)
"""For kernels that create arrays or change the length of a list."""
njit_inline_always = _build_decorator(_nrt=True, inline="always")
"""For kernels near the entry point with one caller, which numba would otherwise compile twice."""
njit_compiled = _build_decorator(_nrt=False)
"""For kernels without allocations: references are not counted, as an outer function owns them."""
njit_force_inline = _build_decorator(_nrt=False, forceinline=True)
"""For kernels without allocations that have one caller or run in every step."""


def call_in_worker(call: Callable[[], ResultT]) -> ResultT:
    """Return what `call` returns, which never runs in the main thread, since that handles signals.

    Numba converts results to arrays in Python code of its own (0.68:
    `pythonapi.nrt_adapt_ndarray_to_python` unpickles their class). A signal handler that raises
    there, as for Ctrl-C, causes a segmentation fault. The main thread waits for a worker instead.
    """
    if current_thread() is not main_thread():
        return call()
    results: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()

    def run() -> None:
        try:
            results.put((call(), None))
        except BaseException as error:
            results.put((None, error))

    Thread(target=run, daemon=True).start()
    value, error = results.get()
    if error:
        raise error
    result: ResultT = value
    return result


class EntryPoint(Generic[ParamsT, ResultT]):
    """A compiled function that Python calls, which finds its machine code on disk.

    The code is kept for the contents of its own module and those of its `kernels`, in the user's
    cache or in the wheel. Ctrl-C interrupts a call (`call_in_worker`).
    """

    def __init__(
        self,
        function: Callable[ParamsT, ResultT],
        build_example: Callable[[], Sequence[object]],
        kernels: Sequence[ModuleType] = (),
    ) -> None:
        """Take arguments of the types that `build_example` returns."""
        self._build_example = build_example
        compile_lazily: Any = njit(nogil=True, error_model="numpy")
        self._compiled = compile_lazily(function)
        own = sys.modules[function.__module__]
        self._code = _MachineCode(
            function.__name__, (own, sys.modules[__name__], borrowed, *kernels)
        )
        self._compiled._cache = self._code

    def __call__(self, *args: ParamsT.args, **kwargs: ParamsT.kwargs) -> ResultT:
        """Call the function; compile it before, if its code is not on disk."""
        if not self._compiled.signatures:
            call_in_worker(lambda: self._compile(args))
        return call_in_worker(lambda: self._compiled(*args, **kwargs))

    def prepare(self) -> None:
        """Load the machine code, or compile it and keep it on disk if possible."""
        call_in_worker(lambda: self._compile(self._build_example()))

    def _compile(self, arguments: Sequence[object]) -> None:
        signature = tuple(map(numba.typeof, arguments))
        with ExitStack() as stack:
            if self._code.find(signature) is None and (folder := find_code_folder()):
                with suppress(PlannerError):  # of processes, one compiles, and the others wait
                    stack.enter_context(lock_folder(ensure_folder(folder)))
            self._compiled.compile(signature)


class _MachineCode:
    """Files with the machine code of one function, in the place of numba's own cache.

    They do not depend on where the sources lie, and every signature has a file of its own, so that
    processes that compile at the same time do not mix theirs up.
    """

    def __init__(self, name: str, modules: Sequence[ModuleType]) -> None:
        self._name, self._modules = name, modules

    @cached_property
    def _build(self) -> str:
        digest = hashlib.sha256(
            f"{numba.__version__} {llvmlite.__version__} {sys.implementation.cache_tag}".encode()
        )
        for module in self._modules:
            digest.update(hashlib.sha256(Path(str(module.__file__)).read_bytes()).digest())
        return digest.hexdigest()[:16]

    def _get_path(self, folder: Path, signature: object, cpu: Sequence[str]) -> Path:
        key = hashlib.sha256(f"{signature} {binding.get_process_triple()} {cpu}".encode())
        return folder / self._build / f"{self._name}-{key.hexdigest()[:16]}.bin"

    def find(self, signature: object) -> bytes | None:
        """Return the stored code for `signature`; None if there is none that can be trusted."""
        cpus, features = [_get_target_cpu()], binding.get_host_cpu_features()
        cpus += [
            (level, "")
            for level, needed in SHIPPED_CPU_FEATURES.items()
            if all(features.get(name) for name in needed)
        ]
        for cpu in cpus:
            with suppress(Exception):  # unpickling a damaged file raises anything
                if folder := find_code_folder():
                    return read_pickle(self._get_path(folder, signature, cpu), bytes)
            with suppress(Exception):
                shipped = self._get_path(SHIPPED_CODE_DIR, signature, cpu).read_bytes()
                return bytes(pickle.loads(shipped))
        return None

    def load_overload(self, signature: object, target_context: Any) -> CompileResult | None:
        """Return the stored function; None makes numba, which calls this, compile it."""
        target_context.refresh()
        code = self.find(signature)
        return CompileResult._rebuild(target_context, *pickle.loads(code)) if code else None

    def save_overload(self, signature: object, result: CompileResult) -> None:
        """Keep what numba, which calls this, has compiled; without a private cache nothing is."""
        if folder := find_code_folder():
            path = self._get_path(folder, signature, _get_target_cpu())
            with suppress(PlannerError, OSError):  # such as a full disk: it is compiled again
                write_pickle(ensure_folder(path.parent) / path.name, dumps(result._reduce()))
                _remove_old_builds(folder)


def _get_target_cpu() -> tuple[str, str]:
    """Return name and features of the processor that numba compiles for in this process."""
    _, name, features = cpu_target.target_context.codegen().magic_tuple()
    return name, features


def find_code_folder() -> Path | None:
    """Return the folder of compiled code in the user's cache; None if there is none."""
    if folder := os.environ.get("NUMBA_CACHE_DIR"):
        return Path(folder)
    cache = find_private_folder()
    return cache / "simulator" if cache else None


def _remove_old_builds(folder: Path) -> None:
    for build in sorted(folder.iterdir(), key=os.path.getmtime)[:-MAX_KEPT_BUILDS]:
        shutil.rmtree(build, ignore_errors=True)
