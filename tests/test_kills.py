"""A replay that is interrupted is as if it had not been."""

import subprocess
import sys

INTERRUPTED = """
import random, signal
from planner import deploy_on, load_scenario
from planner.planning.simulation_runs import simulate_once

class Stop(Exception): pass

def stop(*_): raise Stop

deployment = deploy_on("meta-llama/Llama-3.1-8B", "H100", max_model_len=8192, max_num_seqs=64)
simulate_once(deployment, load := load_scenario("chat-70b").workload, 300)
signal.signal(signal.SIGALRM, stop)
for _ in range(30):
    signal.setitimer(signal.ITIMER_REAL, 0.004 + 0.02 * random.random())
    try:
        while True:
            simulate_once(deployment, load, 300)
    except Stop:
        pass
print("well")
"""


def test_a_replay_is_interrupted_at_any_moment() -> None:
    """Numba 0.68 hands results over in Python code that an exception leaves with a segmentation fault."""
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "well\n"), done.stderr[-300:]
