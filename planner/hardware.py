"""GPUs and the links between them, from `catalogs/gpus.yaml` and `catalogs/links.yaml`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Literal

from pydantic import PositiveFloat, PositiveInt

from planner.catalog import CATALOGS, Entry, entries
from planner.quantities import GB, GIB, PlannerError, did_you_mean

Dtype = Literal["fp32", "fp16", "bf16", "int8", "fp8", "fp4"]


class GpuEntry(Entry):
    """One GPU as people write it; the head of `catalogs/gpus.yaml` explains every field."""

    vendor: Literal["nvidia", "amd", "intel"]
    architecture: str
    compute_capability: float | None = None
    aliases: tuple[str, ...] = ()
    memory_gib: PositiveFloat
    memory_basis: Literal["reported", "estimated"]
    memory_source: str
    marketed_gb: PositiveFloat
    bandwidth_gbs: PositiveFloat
    tflops: dict[Dtype, PositiveFloat]
    link: str
    bridge: str | None = None
    pcie: str
    internode_gbs: PositiveFloat
    gpus_per_node: PositiveInt
    power_w: PositiveFloat
    supported: dict[str, tuple[str, str | None]]
    source: str
    date: str


class LinkEntry(Entry):
    """One kind of link: what a GPU sends over it, GB/s per direction."""

    gbs: PositiveFloat
    source: str
    date: str


@dataclass(frozen=True)
class Gpu:
    """A GPU's published peaks, and its memory as the driver reports it."""

    name: str
    aliases: tuple[str, ...]
    vendor: str
    architecture: str
    compute_capability: float | None
    memory: int  # bytes
    memory_basis: str  # "reported" by a driver somewhere, or "estimated" from siblings
    marketed_gb: float
    bandwidth: float  # bytes/s
    flops: Mapping[str, float]  # dense FLOP/s by dtype; one that the matrix units lack is absent
    link: str
    link_bandwidth: float  # bytes/s per direction per GPU inside the node
    bridge: str | None  # the NVLink bridge that this PCIe card takes, if any
    pcie_bandwidth: float  # bytes/s per direction
    internode_bandwidth: float  # bytes/s per direction per GPU
    gpus_per_node: int
    power: float  # W
    supported: Mapping[str, tuple[str, str | None]]  # engine -> first version, last version (None: still supported)

    def __hash__(self) -> int:
        return hash(self.name)

    def __str__(self) -> str:
        return f"{self.name} ({self.memory / GIB:.1f} GiB, {self.bandwidth / GB:,.0f} GB/s)"


@cache
def links() -> Mapping[str, float]:
    """Every named link -> bytes/s per direction per GPU."""
    return {name: entry.gbs * GB for name, entry in entries("links.yaml", LinkEntry).items()}


def _fold(name: str) -> str:
    return re.sub(r"[\s_/-]+", "", name.casefold())


@cache
def _catalog() -> tuple[dict[str, Gpu], dict[str, str]]:
    """GPUs by name, and names by folded alias."""
    found: dict[str, Gpu] = {}
    names: dict[str, str] = {}
    for name, entry in entries("gpus.yaml", GpuEntry).items():
        for used, where in ((entry.link, "link"), (entry.pcie, "pcie"), (entry.bridge or entry.link, "bridge")):
            if used not in links():
                raise PlannerError(f"gpus.yaml, entry {name}, field {where}: {did_you_mean(used, links(), 'link')}")
        for alias in (name, *entry.aliases):
            if names.setdefault(_fold(alias), name) != name:
                raise PlannerError(f"gpus.yaml, entry {name}, field aliases: {alias!r} already names {names[_fold(alias)]}")
        found[name] = Gpu(
            name=name,
            memory=round(entry.memory_gib * GIB),
            bandwidth=entry.bandwidth_gbs * GB,
            flops={dtype: tera * 1e12 for dtype, tera in entry.tflops.items()},
            link_bandwidth=links()[entry.link],
            pcie_bandwidth=links()[entry.pcie],
            internode_bandwidth=entry.internode_gbs * GB,
            power=entry.power_w,
            **{
                same: getattr(entry, same)
                for same in ("aliases", "vendor", "architecture", "compute_capability", "memory_basis", "marketed_gb")
                + ("link", "bridge", "gpus_per_node", "supported")
            },
        )
    return found, names


def gpus() -> tuple[Gpu, ...]:
    """Every GPU of the catalog, in its order."""
    return tuple(_catalog()[0].values())


def gpu(name: str) -> Gpu:
    """The GPU called `name` (or one of its aliases; case, spaces, `_` and `-` don't matter); `PlannerError` if none."""
    found, names = _catalog()
    folded = _fold(re.sub(r"\(.*?\)|\b(nvidia|amd|intel|geforce|instinct|tesla)\b", "", name, flags=re.IGNORECASE))
    if folded not in names:
        raise did_you_mean(name, {*found, *(alias for known in found.values() for alias in known.aliases)}, "GPU")
    return found[names[folded]]


def interconnect(gpu: Gpu, name: str) -> float:
    """Bytes/s per direction that `gpu` gets from the named link inside a node; "nvlink" is the card's own generation.

    Raises `PlannerError` for an unknown link, and for NVLink on a card that has none.
    """
    folded = _fold(name)
    if folded in ("nvlink", "nvswitch"):
        own = gpu.link if gpu.link.startswith("nvlink") else gpu.bridge
        if own is None:
            raise PlannerError(f"{gpu.name} has no NVLink; its GPUs talk over {gpu.link}")
        return links()[own]
    known = {_fold(link): link for link in (*links(), "pcie")}
    if folded not in known:
        raise did_you_mean(name, (*links(), "nvlink", "nvswitch", "pcie"), "interconnect")
    return gpu.pcie_bandwidth if folded == "pcie" else links()[known[folded]]
