"""How GPUs share a model, and how drafts are verified: what a deployment is laid out by."""

from dataclasses import dataclass, replace
from typing import Self

from planner.core.errors import PlannerError
from planner.models.registry import Model

MAX_TP_GPUS = 256
"""GPUs of the largest NVLink domain that was built, of H100 (NVIDIA's Hopper architecture white
paper, 2022); GB200's and GB300's have 72."""
MAX_DP_RANKS = 512
"""Above the widest that was published: 320 GPUs decode DeepSeek-V3 (arXiv 2412.19437, 3.4.2)."""


@dataclass(frozen=True)
class ParallelLayout:
    """How GPUs share a model; `ep` > 1 spreads whole experts over tp x dp ranks."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    ep: int = 1
    dcp: int = 1  # decode-context parallel ranks within tp
    replicas: int = 1

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if type(value) is not int or not 1 <= value <= 2**20:
                raise PlannerError(
                    f"layout, field {name}: expected a whole number from 1 to 1,048,576, got {value!r}"
                )
        for size, most in ((self.tp, MAX_TP_GPUS), (self.dp, MAX_DP_RANKS)):
            if size > most:
                kind = "tensor" if size == self.tp else "data"
                raise PlannerError(f"{kind} parallel size {size}: at most {most} are planned")
        if self.dcp > self.tp:
            raise PlannerError(f"dcp {self.dcp}: decode contexts are shared within tp {self.tp}")
        if self.ep not in (1, self.tp * self.dp):
            raise PlannerError(
                f"ep {self.ep}: expert parallelism spans tp x dp = {self.tp * self.dp} ranks, or"
                " is 1"
            )

    @property
    def gpus_per_replica(self) -> int:
        """GPUs of one replica."""
        return self.tp * self.pp * self.dp

    @property
    def num_gpus(self) -> int:
        """GPUs of all replicas."""
        return self.gpus_per_replica * self.replicas

    def with_tp(self, tp: int) -> Self:
        """Copy the layout with another tensor parallel size; expert parallelism spans all ranks."""
        return replace(self, tp=tp, ep=tp * self.dp if self.ep > 1 else 1)

    def __str__(self) -> str:
        parts = [f"TP{self.tp}"] + [f"{name.upper()}{size}" for name in ("pp", "dp", "ep", "dcp")
                                    if (size := getattr(self, name)) > 1]  # fmt: skip
        return " x ".join(parts) + (f" x {self.replicas} replicas" if self.replicas > 1 else "")


@dataclass(frozen=True)
class SpeculationConfig:
    """Speculative decoding with k = `num_speculative_tokens` drafted tokens per step.

    Each is accepted with probability a = `acceptance_rate` if the one before was. A step yields
    1 + a + ... + a^k tokens on average, bonus token included: engines' mean acceptance length.
    """

    method: str  # mtp, eagle, eagle3, draft_model, ngram, ...
    num_speculative_tokens: int
    acceptance_rate: float = 0.7
    draft: Model | None = None
    head: str | None = None  # repository or path of draft weights that are no model of their own
    any_vocabulary: bool = False  # whether drafts are translated between vocabularies

    def __post_init__(self) -> None:
        if (
            not isinstance(self.num_speculative_tokens, int)
            or not 1 <= self.num_speculative_tokens <= 64
        ):
            raise PlannerError(
                f"num_speculative_tokens: expected 1 to 64, got {self.num_speculative_tokens!r}"
            )
        if not 0 <= self.acceptance_rate <= 1:
            raise PlannerError(f"acceptance_rate: expected 0 to 1, got {self.acceptance_rate!r}")
