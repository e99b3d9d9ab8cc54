"""GPUs and the links between them, from `catalogs/gpus.yaml` and `links.yaml`."""

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
    die: str = ""
    compute_capability: float | None = None
    power_w: PositiveFloat
    multiprocessors: PositiveInt | None = None
    clock_ghz: PositiveFloat | None = None
    geforce: bool = False


class _GpuMemory(StrictEntry):
    gib: PositiveFloat
    basis: Literal["reported", "estimated"]
    marketed_gb: PositiveFloat
    gbs: PositiveFloat
    source: str

    @model_validator(mode="after")
    def _check_reported_memory(self) -> Self:
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
    """One entry of `catalogs/gpus.yaml`, whose head explains every field."""

    aliases: tuple[str, ...] = ()
    chip: _GpuChip
    memory: _GpuMemory
    tflops: dict[ComputeDtype, PositiveFloat]
    links: _GpuLinks
    supported: dict[str, tuple[Version, Version | None]]
    sold_in: tuple[PositiveInt, ...] = ()

    @model_validator(mode="after")
    def _check_peaks(self) -> Self:
        capability = self.chip.compute_capability or 0.0
        first_capability = {"fp32": 0.0, "fp16": 0.0, "bf16": 8.0, "fp8": 8.9, "fp4": 10.0}
        required = {name for name, first in first_capability.items() if capability >= first}
        if missing := sorted(required - set(self.tflops)):
            raise ValueError(f"field tflops lacks {', '.join(missing)}")
        return self


class LinkEntry(SourcedEntry):
    """One kind of link: GB/s per GPU and direction."""

    gbs: PositiveFloat


@dataclass(frozen=True)
class Gpu:
    """A GPU's published peaks, and its memory as the driver reports it."""

    name: str
    aliases: tuple[str, ...]
    vendor: str
    architecture: str
    die: str  # GPUs of the same silicon have it in common
    compute_capability: float | None
    memory_bytes: int
    memory_basis: str  # "reported" by a driver, or "estimated" from similar GPUs
    marketed_gb: float
    memory_bandwidth: float  # bytes/s
    # dense FLOP/s by dtype, without those that the matrix units lack
    peak_flops: Mapping[str, float] = field(hash=False)
    link: str
    link_bandwidth: float  # bytes/s per direction per GPU inside the node
    bridge: str | None  # the NVLink bridge that fits this PCIe card
    pcie_bandwidth: float  # bytes/s per direction
    host_bandwidth: float  # bytes/s per direction to the CPU's memory
    internode_bandwidth: float  # bytes/s per direction per GPU
    gpus_per_node: int
    board_limit_w: float
    multiprocessors: int | None  # None: not known
    boost_clock_hz: float | None  # boost; None: not known
    # engine -> first and last version (None: still supported)
    supported: Mapping[str, tuple[Version, Version | None]] = field(hash=False)
    sold_in: tuple[int, ...]  # GPUs of rentable machines; empty: any number
    is_geforce: bool = False  # a card for games

    @property
    def kernel_generation(self) -> str:
        """The architecture, with desktop Blackwell apart, whose kernels differ."""
        family = self.architecture.removesuffix("-ultra")
        is_desktop = family == "blackwell" and (self.compute_capability or 0) >= 12
        return f"{family}-desktop" if is_desktop else family

    @property
    def is_hopper(self) -> bool:
        """Whether it runs FlashAttention 3 and FlashMLA, and NCCL's buffers of NVLink switches."""
        return self.architecture == "hopper"

    def __str__(self) -> str:
        return (
            f"{self.name} ({self.memory_bytes / GIB:.1f} GiB, {self.memory_bandwidth / GB:,.0f}"
            " GB/s)"
        )


def normalize_gpu_name(name: str) -> str:
    """Normalize a GPU name: drop case, separators, vendor, memory type and text in brackets."""
    name = re.sub(
        r"\([^()]*\)|nvidia|geforce|radeon|tesla|amd|instinct|intel|virtualized|hbm\d+e?|gddr\d"
        r"|\b(oam|vf|graphics)\b",
        "",
        name.casefold(),
    )
    return re.sub(r"[\s_-]+", "", re.sub(r"sxm\d( ac)?", "sxm", name))


@cache
def load_links() -> Mapping[str, float]:
    """Load name of link -> bytes/s per direction and GPU."""
    return {name: entry.gbs * GB for name, entry in load_catalog("links.yaml", LinkEntry).items()}


def _build_gpu(name: str, entry: GpuEntry) -> Gpu:
    for place in ("node", "pcie", "bridge", "host"):
        link = getattr(entry.links, place)
        if link is not None and link not in load_links():
            raise PlannerError(
                f"gpus.yaml, entry {name}, field links.{place}:"
                f" {make_unknown_name_error(link, load_links(), 'link')}"
            )
    chip, memory, links = entry.chip, entry.memory, entry.links
    return Gpu(
        name=name,
        aliases=entry.aliases,
        **chip.model_dump(exclude={"power_w", "clock_ghz", "geforce", "die"}),
        die=chip.die or name,
        is_geforce=chip.geforce,
        boost_clock_hz=chip.clock_ghz and chip.clock_ghz * 1e9,
        memory_bytes=round(memory.gib * GIB),
        memory_basis=memory.basis,
        marketed_gb=memory.marketed_gb,
        memory_bandwidth=memory.gbs * GB,
        peak_flops={dtype: tera * 1e12 for dtype, tera in entry.tflops.items()},
        link=links.node,
        link_bandwidth=load_links()[links.node],
        bridge=links.bridge,
        pcie_bandwidth=load_links()[links.pcie],
        host_bandwidth=load_links()[links.host or links.pcie],
        internode_bandwidth=links.internode_gbs * GB,
        gpus_per_node=links.gpus_per_node,
        board_limit_w=chip.power_w,
        supported=entry.supported,
        sold_in=tuple(sorted(entry.sold_in)),
    )


@cache
def _load_gpu_catalog() -> tuple[tuple[Gpu, ...], Mapping[str, Gpu]]:
    """Load the GPUs in the catalog's order, and by normalized name."""
    gpus = tuple(
        _build_gpu(name, entry) for name, entry in load_catalog("gpus.yaml", GpuEntry).items()
    )
    names: dict[str, Gpu] = {}
    aliases = [(alias, gpu) for gpu in gpus for alias in (gpu.name, *gpu.aliases)]
    for alias, gpu in aliases:
        if (other := names.setdefault(normalize_gpu_name(alias), gpu)) is not gpu:
            raise PlannerError(
                f"gpus.yaml, entry {gpu.name}, field aliases: {alias} already names {other.name}"
            )
    for alias, gpu in aliases:
        names.setdefault(f"{normalize_gpu_name(alias)}{gpu.marketed_gb:g}gb", gpu)
    return gpus, names


def list_gpus() -> tuple[Gpu, ...]:
    """List the GPUs in the catalog's order."""
    return _load_gpu_catalog()[0]


def get_gpu(name: str) -> Gpu:
    """Get a GPU by name or alias; `PlannerError` with the nearest names if unknown."""
    gpus, names = _load_gpu_catalog()
    if normalize_gpu_name(name) not in names:
        raise make_unknown_name_error(
            name, {alias for gpu in gpus for alias in (gpu.name, *gpu.aliases)}, "GPU"
        )
    return names[normalize_gpu_name(name)]


def parse_gpu_count(gpu: str) -> tuple[int | None, Gpu]:
    """Return number, if given, and GPU of "H100", "4xH100", "4x H100-SXM" or "H100:4"."""
    pattern = r"(?:(\d{1,4})\s*x\s*)?([^:]+?)(?::(\d{1,4}))?"
    match = re.fullmatch(pattern, gpu.strip(), re.IGNORECASE)
    if match is None or (match[1] and match[3]) or (count := match[1] or match[3]) == "0":
        raise PlannerError(
            "--gpu takes the name of a GPU, as in `headroom list gpus`, or 4xH100 for four; got"
            f" {gpu!r:.60}"
        )
    return int(count) if count else None, get_gpu(match[2])


def resolve_link_bandwidth(gpu: Gpu, name: str) -> float:
    """Return the bytes/s per direction of a GPU inside a node over the named link.

    "nvlink", "nvswitch", "infinity-fabric" and "pcie" mean the GPU's own; `PlannerError` if it
    lacks that link.
    """
    link_name = name.casefold().replace("_", "-").replace(" ", "-")
    if link_name in load_links():
        return load_links()[link_name]
    if link_name == "pcie":
        return gpu.pcie_bandwidth
    families = {"nvlink": "nvlink", "nvswitch": "nvlink", "infinity-fabric": "infinity-fabric"}
    if (family := families.get(link_name)) is None:
        raise make_unknown_name_error(
            name, (*load_links(), "nvlink", "nvswitch", "infinity-fabric", "pcie"), "interconnect"
        )
    own = next((link for link in (gpu.link, gpu.bridge) if link and link.startswith(family)), None)
    if own is None:
        raise PlannerError(f"{gpu.name} has no {name}; its GPUs talk over {gpu.link}")
    return load_links()[own]
