"""For nbval: notebooks one after the other in one kernel, which imports everything once; each begins without names."""

import sys

sys.modules.setdefault("rfc3987_syntax", None)  # type: ignore[arg-type]  # as in conftest.py

import nbval.plugin  # noqa: E402
from nbval.kernel import RunningKernel  # noqa: E402


class Kept(RunningKernel):  # type: ignore[misc]
    """A kernel that stays when a notebook is done."""

    def begin(self, folder: str) -> None:
        """Forget all names, in the folder of the next notebook."""
        asked = self.execute_cell_input(f"%reset -f\n%cd -q {folder}")
        self.await_reply(asked, 60)
        self.await_idle(asked, 60)

    def stop(self) -> None:
        """It is stopped once, at the end."""


_KEPT: list[Kept] = []


def _kernel(name: str, cwd: str, startup_timeout: int) -> Kept:
    if not _KEPT:
        _KEPT.append(Kept(name, cwd, startup_timeout))
    _KEPT[0].begin(cwd)
    return _KEPT[0]


def pytest_configure() -> None:
    nbval.plugin.RunningKernel = _kernel


def pytest_unconfigure() -> None:
    for kernel in _KEPT:
        super(Kept, kernel).stop()
