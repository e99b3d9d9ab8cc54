"""GPUs and the links between them, from `catalogs/gpus.yaml` and `catalogs/links.yaml`."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Literal, Self

from pydantic import PositiveFloat, PositiveInt, model_validator

from planner.core.catalog import SourcedEntry, StrictEntry, load_catalog
from planner.core.errors import PlannerError, make_unknown_name_error
from planner.core.units import GB, GIB
from planner.core.versions import Version

ComputeDtype = Literal["fp32", "fp16", "bf16", "int8", "fp8", "fp4"]


class _GpuChip(StrictEntry):
    vendor: Literal["nvidia", "amd", "intel"]
    architecture: str
    compute_capability: float | None = None
    power_w: PositiveFloat
    multiprocessors: PositiveInt | None = None
    clock_ghz: PositiveFloat | None = None


class _GpuMemory(StrictEntry):
    gib: PositiveFloat
    basis: Literal["reported", "estimated"]
    marketed_gb: PositiveFloat
    gbs: PositiveFloat
    source: str

    @model_validator(mode="after")
    def _less_than_on_the_box(self) -> Self:
        if self.gib >= self.marketed_gb:
            raise ValueError(
                f"gib {self.gib:g} is not below the {self.marketed_gb:g} GB on the box: what does"
                " the driver report?"
            )
        return self


class _GpuLinks(StrictEntry):
    node: str
    bridge: str | None = None
    pcie: str
    host: str | None = None
    internode_gbs: PositiveFloat
    gpus_per_node: PositiveInt


class GpuEntry(SourcedEntry):
    """One GPU as people write it; the head of `catalogs/gpus.yaml` explains every field."""

    aliases: tuple[str, ...] = ()
    chip: _GpuChip
    memory: _GpuMemory
    tflops: dict[ComputeDtype, PositiveFloat]
    links: _GpuLinks
    supported: dict[str, tuple[Version, Version | None]]
    sold_in: tuple[PositiveInt, ...] = ()

    @model_validator(mode="after")
    def _every_peak(self) -> Self:
        known = self.chip.compute_capability or 0.0
        wanted = {"fp32": 0.0, "fp16": 0.0, "bf16": 8.0, "fp8": 8.9, "fp4": 10.0}
        least = {name for name, first in wanted.items() if known >= first}
        if missing := sorted(least - set(self.tflops)):
            raise ValueError(f"field tflops lacks {', '.join(missing)}")
        return self


class LinkEntry(SourcedEntry):
    """One kind of link: what a GPU sends over it, GB/s per direction."""

    gbs: PositiveFloat


@dataclass(frozen=True)
class Gpu:
    """A GPU's published peaks, and its memory as the driver reports it."""

    name: str
    aliases: tuple[str, ...]
    vendor: str
    architecture: str
    compute_capability: float | None
    memory_bytes: int  # bytes
    memory_basis: str  # "reported" by somebody's driver, or "estimated" from siblings
    marketed_gb: float
    memory_bandwidth: float  # bytes/s
    peak_flops: Mapping[str, float] = field(
        hash=False
    )  # dense FLOP/s by dtype; one that the matrix units lack is absent
    link: str
    link_bandwidth: float  # bytes/s per direction per GPU inside the node
    bridge: str | None  # the NVLink bridge that this PCIe card can take
    pcie_bandwidth: float  # bytes/s per direction
    host_bandwidth: float  # bytes/s per direction to the CPU's memory
    internode_bandwidth: float  # bytes/s per direction per GPU
    gpus_per_node: int
    board_limit_w: float  # W
    multiprocessors: int | None  # None: not known
    boost_clock_hz: float | None  # Hz, boosted; None: not known
    supported: Mapping[str, tuple[Version, Version | None]] = field(
        hash=False
    )  # engine -> first version, last or None
    sold_in: tuple[int, ...]  # GPUs of the machines that are let; none: any number

    @property
    def kernel_generation(self) -> str:
        """Of GPUs whose kernels are alike: the architecture, data-centre and desktop Blackwell apart."""
        family = self.architecture.removesuffix("-ultra")
        return (
            f"{family}-desktop"
            if family == "blackwell" and (self.compute_capability or 0) >= 12
            else family
        )

    def __str__(self) -> str:
        return (
            f"{self.name} ({self.memory_bytes / GIB:.1f} GiB, {self.memory_bandwidth / GB:,.0f}"
            " GB/s)"
        )


def normalize_gpu_name(name: str) -> str:
    """`name` without what people write differently: case, separators, vendor and memory words, notes in brackets."""
    name = re.sub(
        r"\(.*?\)|nvidia|geforce|tesla|amd|instinct|intel|virtualized|hbm\d+e?|gddr\d",
        "",
        name.casefold(),
    )
    return re.sub(r"[\s_-]+", "", re.sub(r"sxm\d", "sxm", name))


@cache
def load_links() -> Mapping[str, float]:
    """Every named link -> bytes/s per direction per GPU."""
    return {name: entry.gbs * GB for name, entry in load_catalog("links.yaml", LinkEntry).items()}


def _build_gpu(name: str, entry: GpuEntry) -> Gpu:
    for place in ("node", "pcie", "bridge", "host"):
        link = getattr(entry.links, place)
        if link is not None and link not in load_links():
            raise PlannerError(
                f"gpus.yaml, entry {name}, field links.{place}:"
                f" {make_unknown_name_error(link, load_links(), 'link')}"
            )
    chip, memory, wires = entry.chip, entry.memory, entry.links
    return Gpu(
        name=name,
        aliases=entry.aliases,
        **chip.model_dump(exclude={"power_w", "clock_ghz"}),
        boost_clock_hz=chip.clock_ghz and chip.clock_ghz * 1e9,
        memory_bytes=round(memory.gib * GIB),
        memory_basis=memory.basis,
        marketed_gb=memory.marketed_gb,
        memory_bandwidth=memory.gbs * GB,
        peak_flops={dtype: tera * 1e12 for dtype, tera in entry.tflops.items()},
        link=wires.node,
        link_bandwidth=load_links()[wires.node],
        bridge=wires.bridge,
        pcie_bandwidth=load_links()[wires.pcie],
        host_bandwidth=load_links()[wires.host or wires.pcie],
        internode_bandwidth=wires.internode_gbs * GB,
        gpus_per_node=wires.gpus_per_node,
        board_limit_w=chip.power_w,
        supported=entry.supported,
        sold_in=tuple(sorted(entry.sold_in)),
    )


@cache
def _load_gpu_catalog() -> tuple[tuple[Gpu, ...], Mapping[str, Gpu]]:
    """The GPUs in the catalog's order, and by folded name."""
    gpus = tuple(
        _build_gpu(name, entry) for name, entry in load_catalog("gpus.yaml", GpuEntry).items()
    )
    names: dict[str, Gpu] = {}
    called = [(alias, gpu) for gpu in gpus for alias in (gpu.name, *gpu.aliases)]
    for alias, known in called:
        if (other := names.setdefault(normalize_gpu_name(alias), known)) is not known:
            raise PlannerError(
                f"gpus.yaml, entry {known.name}, field aliases: {alias} already names {other.name}"
            )
    for alias, known in called:
        names.setdefault(f"{normalize_gpu_name(alias)}{known.marketed_gb:g}gb", known)
    return gpus, names


def list_gpus() -> tuple[Gpu, ...]:
    return _load_gpu_catalog()[0]


def get_gpu(name: str) -> Gpu:
    """The GPU called `name` or known by it (see `aliases` in the catalog); `PlannerError` with the nearest if none."""
    gpus, names = _load_gpu_catalog()
    if normalize_gpu_name(name) not in names:
        raise make_unknown_name_error(
            name, {alias for gpu in gpus for alias in (gpu.name, *gpu.aliases)}, "GPU"
        )
    return names[normalize_gpu_name(name)]


def resolve_link_bandwidth(gpu: Gpu, name: str) -> float:
    """Bytes/s per direction that `gpu` gets inside a node from the named link.

    "nvlink", "nvswitch", "infinity-fabric" and "pcie" mean the card's own. `PlannerError` for a
    link that it lacks.
    """
    wanted = name.casefold().replace("_", "-").replace(" ", "-")
    if wanted in load_links():
        return load_links()[wanted]
    if wanted == "pcie":
        return gpu.pcie_bandwidth
    family = {"nvlink": "nvlink", "nvswitch": "nvlink", "infinity-fabric": "infinity-fabric"}.get(
        wanted
    )
    if family is None:
        raise make_unknown_name_error(
            name, (*load_links(), "nvlink", "nvswitch", "infinity-fabric", "pcie"), "interconnect"
        )
    own = next((link for link in (gpu.link, gpu.bridge) if link and link.startswith(family)), None)
    if own is None:
        raise PlannerError(f"{gpu.name} has no {name}; its GPUs talk over {gpu.link}")
    return load_links()[own]
