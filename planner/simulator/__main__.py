"""`python -m planner.simulator` compiles the simulator, so that nobody waits for it later."""

from planner.simulator.disaggregated_pools import simulate_tandem_pools
from planner.simulator.prefix_cache_hits import simulate_lru
from planner.simulator.router import run_compiled_simulation

for entry_point in (run_compiled_simulation, simulate_lru, simulate_tandem_pools):
    entry_point.prepare()
