"""Facts about GPUs and links: published peaks, what drivers report, and the errors of a wrong catalog."""

from pathlib import Path

import pytest
import yaml

from planner.core.catalog import CATALOG_DIR, load_catalog
from planner.core.errors import PlannerError
from planner.core.units import GB, GIB
from planner.engines.engine import explain_unsupported_gpu, get_engine
from planner.hardware import gpus as hardware
from planner.hardware.gpus import (
    GpuEntry,
    get_gpu,
    list_gpus,
    load_links,
    resolve_link_bandwidth,
)

REQUIRED = """T4, V100 16GB, V100 32GB, A10, A10G, A30, A40, A100 40GB PCIe, A100 40GB, A100 80GB PCIe, A100 80GB, L4,
L40, L40S, H100 PCIe, H100 SXM, H100 NVL, H200, H20, GH200, B200, B300, GB200, GB300, RTX 3090, RTX 4090, RTX 5090,
RTX A6000, RTX 6000 Ada, RTX PRO 6000 Blackwell, GB10, MI250, MI300X, MI325X, MI355X, R9700, Gaudi 3, RTX PRO 5000,
RTX 5070, RTX 4000 Ada, RTX 4500 Ada, RX 9070 XT, H20 141GB, Jetson Thor, Rubin"""


def test_the_gpus_people_ask_for_are_there() -> None:
    found = {get_gpu(name.strip()).name for name in REQUIRED.split(",")}
    assert len(found) == 45
    assert len(list_gpus()) >= 45


@pytest.mark.parametrize(
    ("name", "gbs", "dtype", "tflops"),
    [
        ("H100 SXM", 3350, "bf16", 989.4),  # NVIDIA H100 architecture white paper, table 3: dense
        ("H100 SXM", 3350, "fp8", 1978.9),
        ("H100 PCIe", 2000, "bf16", 756.4),
        ("H200", 4800, "bf16", 989.4),
        ("A100 80GB", 2039, "bf16", 312),  # A100 data sheet
        ("A100 PCIe 40GB", 1555, "int8", 624),
        ("L40S", 864, "bf16", 362.05),  # L40S data sheet: 733 is the sparse figure
        ("L4", 300, "fp16", 121),
        ("B200", 7700, "fp4", 9000),  # Blackwell technical brief, HGX B200
        ("MI300X", 5300, "bf16", 1307.4),  # MI300X data sheet
        ("RTX 4090", 1008, "bf16", 165.2),  # Ada white paper: FP32 accumulation
        ("RTX 5090", 1792, "fp4", 1676),
        ("T4", 320, "fp16", 65),
        ("RTX 3080", 760, "bf16", 59.5),  # GA102 white paper: FP32 accumulation
        ("RTX 3070", 448, "int8", 162.6),
        ("RTX 4070 Ti", 504.2, "bf16", 80.2),  # Ada white paper, then called RTX 4080 12 GB
        ("RTX A4000", 448, "bf16", 76.7),  # data sheets from here on: 153.4 is the sparse figure
        ("A2", 200, "bf16", 18),
        ("A16", 200, "int8", 35.9),
        ("RTX 8000", 672, "fp16", 130.5),
        ("A800 PCIe", 1935, "bf16", 312),
    ],
)
def test_published_dense_peaks(name: str, gbs: float, dtype: str, tflops: float) -> None:
    assert get_gpu(name).memory_bandwidth == gbs * GB
    assert get_gpu(name).peak_flops[dtype] == pytest.approx(tflops * 1e12)


@pytest.mark.parametrize(
    ("name", "gib"),
    [
        ("H100", 79.19),  # 28 vLLM 0.19.0 start-ups of llm-d-planner
        ("A100 80GB", 79.15),
        ("A100 40GB", 39.39),
        ("L40S", 44.4),
        ("T4", 14.56),  # torch out-of-memory messages, as the rest
        ("H200", 139.8),
        ("B200", 178.35),
        ("B300", 267.69),
        ("GB200", 184.31),
        ("MI300X", 191.98),
        ("MI355X", 287.98),
        ("RTX PRO 6000", 94.97),
        ("GB10", 121.69),
        ("RTX 3060", 11.63),
        ("RTX 3080", 9.64),
        ("RTX 3080 Ti", 11.63),
        ("RTX 4060 Ti", 7.62),  # 7806 MiB
        ("RTX 4090 48GB", 47.37),
        ("RTX 8000", 47.46),
    ],
)
def test_memory_is_what_drivers_report(name: str, gib: float) -> None:
    assert get_gpu(name).memory_bytes / GIB == pytest.approx(gib, abs=0.02)
    assert get_gpu(name).memory_basis == "reported"


@pytest.mark.parametrize("card", list_gpus(), ids=lambda card: card.name)
def test_every_gpu_obeys_what_holds_for_all(card: hardware.Gpu) -> None:
    assert (
        0.85 * card.marketed_gb * GB < card.memory_bytes < 1.075 * card.marketed_gb * GB
    )  # a box never understates by more
    peaks = card.peak_flops
    assert peaks["fp32"] < peaks["fp16"]
    assert peaks.get("bf16", peaks["fp16"]) <= peaks["fp16"]
    assert peaks.get("fp8", peaks["fp16"]) >= peaks["fp16"]
    assert peaks.get("fp4", 0) == 0 or peaks["fp4"] >= 2 * peaks["bf16"]
    assert card.link_bandwidth >= min(card.pcie_bandwidth, 25 * GB)
    assert card.vendor != "nvidia" or ("fp8" in peaks) == ((card.compute_capability or 0) >= 8.9)
    assert ("fp4" in peaks) == (
        (card.compute_capability or 0) >= 10 or card.architecture == "cdna4"
    )


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("h100", "H100-SXM"),
        ("h100_sxm", "H100-SXM"),
        ("NVIDIA H100 80GB HBM3", "H100-SXM"),
        ("H100 NVL 94GB", "H100-NVL"),
        ("NVIDIA A100-SXM4-80GB", "A100-SXM-80GB"),
        ("A100-PCIE-40GB", "A100-PCIE-40GB"),
        ("Tesla V100-SXM2-32GB", "V100-SXM-32GB"),
        ("b200_sxm", "B200"),
        ("GB10 (DGX Spark)", "GB10"),
        ("NVIDIA GeForce RTX 4090", "RTX-4090"),
        ("rtx_pro_6000_server", "RTX-PRO-6000-Server"),
        ("AMD Instinct MI325X 256GB HBM3e", "MI325X"),
        ("Radeon AI PRO R9700 32GB", "R9700"),
        ("NVIDIA B300 SXM6 AC", "B300"),
        ("AMD Instinct MI300X OAM", "MI300X"),
        ("AMD Instinct MI300X VF", "MI300X"),
        ("AMD Instinct MI250X/MI250", "MI250X"),
        ("AMD Radeon RX 7900 XTX", "RX-7900-XTX"),
        ("Intel(R) Arc(TM) Pro B60 Graphics", "Arc-Pro-B60"),
        ("NVIDIA GeForce RTX 4090 D", "RTX-4090-D"),
        ("NVIDIA GeForce RTX 4060 Ti", "RTX-4060-Ti-8GB"),
        ("NVIDIA GeForce RTX 4070 Ti SUPER", "RTX-4070-Ti-Super"),
        ("NVIDIA RTX 5880 Ada Generation", "RTX-5880-Ada"),
        ("Quadro RTX 8000", "Quadro-RTX-8000"),
        ("NVIDIA A800 80GB PCIe", "A800-PCIE-80GB"),
        ("Tesla V100-PCIE-16GB", "V100-PCIE-16GB"),
    ],
)
def test_names_that_drivers_and_benchmarks_use(written: str, name: str) -> None:
    assert get_gpu(written).name == name


def test_links_are_per_direction() -> None:
    assert load_links()["nvlink4"] == 450 * GB  # 900 GB/s on the data sheet adds both directions
    assert load_links()["pcie5"] == 64 * GB
    assert resolve_link_bandwidth(get_gpu("H100"), "nvswitch") == 450 * GB
    assert resolve_link_bandwidth(get_gpu("RTX 3090"), "nvlink") == 56.25 * GB  # the bridge
    assert resolve_link_bandwidth(get_gpu("MI300X"), "infinity-fabric") == 448 * GB
    assert resolve_link_bandwidth(get_gpu("H100"), "pcie4") == 32 * GB
    with pytest.raises(PlannerError, match="L40S has no nvlink; its GPUs talk over pcie4"):
        resolve_link_bandwidth(get_gpu("L40S"), "nvlink")
    with pytest.raises(PlannerError, match="did you mean"):
        resolve_link_bandwidth(get_gpu("L40S"), "nvlnk")


@pytest.mark.parametrize(
    ("name", "gbs"),
    [
        ("GH200", 450),  # NVIDIA's data sheets: NVLink-C2C 900 GB/s, both directions
        ("GB200", 450),
        ("GB300", 450),
        ("B200", 64),  # an x86 host: PCIe 5
        ("H100", 64),
        ("A100", 32),
    ],
)
def test_the_link_to_the_host(name: str, gbs: float) -> None:
    assert get_gpu(name).host_bandwidth == gbs * GB


@pytest.mark.parametrize(
    ("name", "watts"),
    [
        ("GH200", 1000),
        ("GH200 144GB", 1000),
        ("RTX PRO 5000", 300),
        ("RTX 5070", 250),
        ("RX 9070 XT", 304),
        ("Thor", 130),
    ],
)
def test_boards_draw_up_to(name: str, watts: float) -> None:
    assert get_gpu(name).board_limit_w == watts


@pytest.mark.parametrize(
    ("name", "fp4_sparse"),
    [
        ("RTX PRO 5000", 2064),
        ("RTX 5070", 988),
        ("Jetson Thor", 2070),
    ],  # TOPS as NVIDIA advertises them
)
def test_advertised_fp4_is_twice_the_dense_peak(name: str, fp4_sparse: float) -> None:
    assert get_gpu(name).peak_flops["fp4"] == pytest.approx(fp4_sparse / 2 * 1e12, rel=0.001)


@pytest.mark.parametrize(
    ("name", "engines"),
    [
        ("MI100", set()),
        ("Rubin", set()),
        ("MI300X", {"vllm", "sglang", "tgi"}),
        ("Arc Pro B60", {"vllm", "sglang"}),
        ("Gaudi 2", {"vllm", "sglang", "tgi"}),
        ("Gaudi 3", {"vllm", "sglang", "tgi"}),
    ],
)  # fmt: skip
def test_what_runs_where(name: str, engines: set[str]) -> None:
    assert set(get_gpu(name).supported) == engines
    if not engines:
        assert "no engine that is known here does" in (
            explain_unsupported_gpu(get_gpu(name), get_engine("vllm")) or ""
        )


MEMORY = {"basis": "reported", "marketed_gb": 24, "gbs": 300, "source": "a log"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tflops": {"bf17": 1}}, "gpus.yaml, entry L4, field tflops.bf17"),
        ({"tflops": {"bf16": 121}}, "entry L4: field tflops lacks fp16, fp32, fp8"),
        ({"memory": {"gib": -1}}, "gpus.yaml, entry L4, field memory"),
        ({"memory": MEMORY | {"gib": 24}}, "gpus.yaml, entry L4, field memory.*24 GB on the box"),
        ({"sauce": "?"}, "gpus.yaml, entry L4, field sauce: unknown field"),
        ({"source": None}, "gpus.yaml, entry L4, field source"),
    ],
)
def test_errors_name_file_entry_and_field(
    tmp_path: Path, change: dict[str, object], message: str
) -> None:
    entry = yaml.safe_load((CATALOG_DIR / "gpus.yaml").read_text())["L4"]
    (tmp_path / "gpus.yaml").write_text(yaml.safe_dump({"L4": entry | change}))
    with pytest.raises(PlannerError, match=message):
        load_catalog("gpus.yaml", GpuEntry, tmp_path)


def test_cards_for_games_are_told_from_those_for_workstations() -> None:
    """NVIDIA's names: GeForce RTX 20 to 50 are sold for games; RTX A, Ada and PRO are not."""
    geforce = {gpu.name for gpu in list_gpus() if gpu.is_geforce}
    assert {"RTX-2080-Ti", "RTX-3090", "RTX-4090", "RTX-5090"} <= geforce
    assert not {"RTX-A6000", "RTX-6000-Ada", "RTX-4000-Ada", "RTX-PRO-6000", "L40S"} & geforce
