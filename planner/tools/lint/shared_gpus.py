"""Judge servers of one file together that run on the same GPUs of a host."""

from collections.abc import Sequence
from dataclasses import dataclass

from planner.core.errors import PlannerError
from planner.core.number_format import format_number
from planner.tools.lint.deployment_reader import (
    get_share_of_memory,
    read_layout,
)
from planner.tools.lint.findings import LintFinding
from planner.tools.lint.option_checks import CheckedCommand


@dataclass(frozen=True)
class GpuNeighbours:
    """The servers that run beside one on a GPU."""

    gpu: str  # index or UUID of the GPU that they share
    commands: tuple[CheckedCommand, ...]

    @property
    def names(self) -> str:
        """Their places in the file, with the share of the memory that each takes."""
        shares = ((one.command.where, get_share_of_memory(one)) for one in self.commands)
        return " and ".join(f"{where} ({share:g})" for where, share in shares)

    def check_shares(self, checked: CheckedCommand) -> tuple[LintFinding, ...]:
        """Return a finding if the shares of one GPU's memory come to more than all of it.

        vLLM 0.33.0 v1/worker/utils.py, request_memory: the share of the total has to be free.
        """
        shares = [get_share_of_memory(one) for one in (checked, *self.commands)]
        if not self.commands or sum(shares) <= 1:
            return ()
        option = "--gpu-memory-utilization"
        is_given = "gpu_memory_utilization" in checked.argument_values
        why = (
            f"with {self.names} on GPU {self.gpu} it asks for {format_number(sum(shares))} of its"
            " memory: the one that starts last ends with an error"
        )
        instead = "a lower share for one of them"
        written = f"{option} {shares[0]:g}" if is_given else "(not given)"
        return (LintFinding("flag", option, written, "contradicts", why, instead, refused=True),)


def find_neighbours(checked: CheckedCommand, commands: Sequence[CheckedCommand]) -> GpuNeighbours:
    """Find the servers among `commands` that run beside one on the first GPU that they share."""
    ours = _list_used_gpus(checked)
    shared = [
        (gpu, one)
        for one in commands
        if one is not checked and _run_together(checked, one)
        for gpu in _list_used_gpus(one)
        if gpu in ours
    ]
    first = min((gpu for gpu, _ in shared), default="")
    return GpuNeighbours(first, tuple(one for gpu, one in shared if gpu == first))


def _run_together(first: CheckedCommand, second: CheckedCommand) -> bool:
    """Return whether two servers surely run at once, as those of one compose file do."""
    setups = first.command.setup, second.command.setup
    if setups[0] is None or setups[1] is None or setups[0].runtime != setups[1].runtime:
        return False
    profiles = [set(setup.profiles) for setup in setups if setup]
    blocks = {one.command.where.partition(", ")[0] for one in (first, second)}
    in_other_blocks = len(blocks) > 1 and any(block.startswith("line ") for block in blocks)
    return not in_other_blocks and (not all(profiles) or bool(profiles[0] & profiles[1]))


def _list_used_gpus(checked: CheckedCommand) -> tuple[str, ...]:
    """List the host's GPUs that a vLLM server in a container takes; empty if not known."""
    command = checked.command
    if command.engine != "vllm" or command.setup is None or command.setup.is_member:
        return ()
    visible = command.setup.visible_gpus
    chosen = command.environment.get("CUDA_VISIBLE_DEVICES", "")
    if chosen:
        indexes = [int(index) for index in chosen.split(",") if index.isdecimal()]
        visible = tuple(visible[index] for index in indexes if index < len(visible))
    try:
        return visible[: read_layout(command.engine, checked.argument_values).num_gpus]
    except PlannerError:
        return ()
