"""How much two Dask workers do in the time of one: `python tests/maintenance/benchmarks/bench_sweep.py [POINTS]`.

Wall time counts on a machine that has two cores to spare. CPU time of all processes says what the
second worker costs: with twice the cores the sweep cannot be faster than 2 x (CPU of one worker) /
(CPU of two), its start apart.
"""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SWEEP = """
answer: predict
scenario: chat-70b
deployment: {gpu: H100-SXM, tp: 4, replicas: 2, quantization: fp8}
sample: {points: %d, fields: {workload.rate: {low: 0.5, high: 6}, engine_args.max_num_seqs: [32, 64, 128, 256]}}
"""


def spent(points: int, workers: int) -> tuple[float, float]:
    """Wall and CPU seconds of a sweep, its processes' starts included."""
    with tempfile.TemporaryDirectory() as made:
        place = Path(made)
        (place / "sweep.yaml").write_text(SWEEP % points)
        command = [
            sys.executable,
            "-m",
            "planner",
            "sweep",
            str(place / "sweep.yaml"),
            "--out",
            str(place / "out.csv"),
        ]
        command += ["--store", str(place / "answers.sqlite"), "--workers", str(workers)]
        began = time.perf_counter()
        running = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        _, status, used = os.wait4(running.pid, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        return time.perf_counter() - began, used.ru_utime + used.ru_stime


if __name__ == "__main__":
    points = int(sys.argv[1]) if len(sys.argv) > 1 else 4000
    for workers in (1, 2):
        idle, many = spent(8, workers), spent(points, workers)
        wall, cpu = (after - before for before, after in zip(idle, many, strict=True))
        print(
            f"{workers} workers, {points:,} points: {wall:.1f} s, {cpu:.1f} s of CPU, starts apart"
            f" ({idle[0]:.1f} s)"
        )
    assert many[0] < points * 0.06, "10,000 points in 10 minutes on two cores are asked"
