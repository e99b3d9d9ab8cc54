"""vLLM's block pool and block tables, compiled: allocation, the free queue and its order, prefix caching, windows.

Follows vLLM 0.20.2 (v1/core/block_pool.py, kv_cache_coordinator.py,
single_type_kv_cache_manager.py) and, where `recent`, 0.33.0. Without prefix caching blocks are only
counted, not told apart.
"""

from typing import NamedTuple

import numpy as np

from planner.latency.shared_prefix_reads import MAX_BLOCK_SHARERS
from planner.simulator.compilation import njit_allocating, njit_compiled, njit_force_inline
from planner.simulator.kernel_types import EngineRules


class BlockPool(NamedTuple):
    """Free blocks as a ring through the last index, next to be taken first; cached blocks of equal content as rings."""

    free: np.ndarray  # [1]
    next: np.ndarray
    prev: np.ndarray
    refs: np.ndarray
    key: np.ndarray  # content * groups + group of a cached block, else -1
    after: np.ndarray
    before: np.ndarray
    cached: np.ndarray  # [contents * groups] oldest block with that key, else -1
    # [2, contents + 1] contents in host memory as a ring through the last index, oldest first, else
    # -1
    host: np.ndarray
    kept: np.ndarray  # [2] how many these are, and may be
    # [SHARERS] blocks that so many sequences have, from 2 on; the last counts those with more too
    shared: np.ndarray


class BlockTables(NamedTuple):
    """Block tables of the running requests, one seat each."""

    blocks: (
        np.ndarray
    )  # [seats, groups, longest] block numbers; no seats where only their number matters
    held: np.ndarray  # [seats, groups] length of the table
    passed: np.ndarray  # [seats, groups] blocks at its start that left the window
    published: np.ndarray  # [seats] full blocks whose content is known to the cache
    capacity: np.ndarray  # [seats] tokens that fit
    slides: np.ndarray  # [seats] computed tokens at which the next block leaves a window


@njit_allocating
def create_pool(num_blocks: int, contents: int, host_blocks: int) -> BlockPool:
    """All blocks free but the null block 0; with `contents` = 0 only their number matters."""
    host, kept = (
        np.full((2, contents + 1 if host_blocks else 0), -1, np.int32),
        np.zeros(2, np.int64),
    )
    host[:, -1:] = contents
    kept[1] = host_blocks
    ring = num_blocks if contents else 0
    pool = BlockPool(
        np.full(1, num_blocks - 1), np.arange(1, ring + 2), np.arange(-1, ring),
        np.zeros(ring + 1, np.int32),
        np.full(ring + 1, -1), np.empty(ring + 1, np.int32), np.empty(ring + 1, np.int32),
        np.full(contents, -1, np.int32), host, kept, np.zeros(MAX_BLOCK_SHARERS, np.int64),
    )  # fmt: skip
    if ring:
        pool.next[ring], pool.prev[1] = 1, ring
    return pool


@njit_allocating
def create_tables(seats: int, groups: int, longest: int) -> BlockTables:
    """Empty tables; `longest` = 0 where only the number of blocks matters."""
    sizes = np.zeros((2, seats, groups), np.int64)
    blocks = np.empty((seats if longest else 0, groups, longest), np.int32)
    return BlockTables(
        blocks,
        sizes[0],
        sizes[1],
        np.zeros(seats, np.int64),
        np.zeros(seats, np.int64),
        np.zeros(seats, np.int64),
    )


@njit_force_inline
def take_free_block(pool: BlockPool) -> int:
    """The block at the front of the free ring, its cached content forgotten."""
    ring = pool.next.size - 1
    block = pool.next[ring]
    pool.next[ring] = pool.next[block]
    pool.prev[pool.next[block]] = ring
    pool.free[0] -= 1
    pool.refs[block] = 1
    key = pool.key[block]
    if key >= 0:
        other = pool.after[block]
        pool.key[block] = -1
        if other == block:
            pool.cached[key] = -1
        else:
            pool.after[pool.before[block]] = other
            pool.before[other] = pool.before[block]
            if pool.cached[key] == block:
                pool.cached[key] = other
    return block


@njit_force_inline
def _update_sharers(pool: BlockPool, before: int, after: int) -> None:
    """A block that `before` sequences had is now had by `after`."""
    pool.shared[min(before, MAX_BLOCK_SHARERS - 1)] -= 1
    pool.shared[min(after, MAX_BLOCK_SHARERS - 1)] += 1


@njit_compiled
def _free_blocks(pool: BlockPool, table: np.ndarray, first: int, end: int, recent: bool) -> None:
    """Give back blocks table[first:end], the last one first; 0.33 puts blocks without content to the front."""
    ring = pool.next.size - 1
    front = ring
    for j in range(end - 1, first - 1, -1):
        block = table[j]
        pool.refs[block] -= 1
        _update_sharers(pool, pool.refs[block] + 1, pool.refs[block])
        if pool.refs[block] == 0:
            left = pool.prev[ring]
            if recent and pool.key[block] < 0:
                left, front = front, block
            right = pool.next[left]
            pool.next[left], pool.prev[right] = block, block
            pool.prev[block], pool.next[block] = left, right
            pool.free[0] += 1


@njit_force_inline
def _cache_block(pool: BlockPool, block: int, key: int) -> None:
    """Make a full block's content known, behind older blocks of equal content."""
    pool.key[block] = key
    oldest = pool.cached[key]
    if oldest < 0:
        pool.cached[key] = pool.after[block] = pool.before[block] = block
    else:
        newest = pool.before[oldest]
        pool.after[newest] = pool.before[oldest] = block
        pool.before[block], pool.after[block] = newest, oldest


@njit_compiled
def store_in_host(pool: BlockPool, content: int) -> None:
    """Have a content in host memory as the one used last; the one that was not used longest goes where it is full."""
    after, before = pool.host[0], pool.host[1]
    ring = after.size - 1
    if after[content] >= 0:
        before[after[content]], after[before[content]] = before[content], after[content]
    elif pool.kept[0] == pool.kept[1]:
        oldest = after[ring]
        before[after[oldest]], after[ring] = ring, after[oldest]
        after[oldest] = -1
    else:
        pool.kept[0] += 1
    newest = before[ring]
    after[newest] = before[ring] = content
    before[content], after[content] = newest, ring


@njit_compiled
def count_host_hits(pool: BlockPool, content: np.ndarray, hit: int, most: int) -> int:
    """Blocks that host memory has of a request, up to `most`, beyond the `hit` that the pool has."""
    end = hit
    while end < most and pool.host[0, content[end]] >= 0:
        end += 1
    return end - hit


@njit_compiled
def touch_host_hits(pool: BlockPool, content: np.ndarray, hit: int, most: int) -> int:
    """`in_host`; all that it has of the request up to there is used now."""
    more = count_host_hits(pool, content, hit, most)
    for k in range(hit + more):
        if pool.host[0, content[k]] >= 0:
            store_in_host(pool, content[k])
    return more


@njit_compiled
def find_longest_cached_prefix(
    pool: BlockPool, content: np.ndarray, most: int, groups: np.ndarray
) -> int:
    """Blocks of the longest cached prefix, up to `most`: each group needs all of it, or the window before its end.

    Contents, and what is returned, are of blocks as group 0 has them, the smallest; `wide` of them
    make one of group g.
    """
    hit, count, settled = most, len(groups), False
    while not settled:
        settled = True
        for g in range(count):
            window, size = groups[g]
            wide = size // groups[0, 1]
            need = max(1, (window + size - 2) // size)
            if window == 0:
                run = 0
                while (run + 1) * wide <= hit and pool.cached[
                    content[(run + 1) * wide - 1] * count + g
                ] >= 0:
                    run += 1
            elif window > 0:
                run = end = 0
                for j in range(hit // wide - 1, -1, -1):
                    if pool.cached[content[(j + 1) * wide - 1] * count + g] < 0:
                        run = 0
                        continue
                    if run == 0:
                        end = j + 1
                    run += 1
                    if run >= need:
                        break
                run = end if run else 0
            else:
                continue
            settled &= run * wide == hit
            hit = run * wide
    return hit


@njit_compiled
def count_table_blocks(tokens: int, window: int, size: int) -> int:
    """Length of a group's block table that holds `tokens`."""
    return -window if window < 0 else (tokens + size - 1) // size


@njit_compiled
def free_outside_window(
    rules: EngineRules, pool: BlockPool, tables: BlockTables, s: int, settled: int
) -> None:
    """Free blocks of seat `s` that no token after `settled` computed ones will look back at."""
    tables.slides[s] = 1 << 60
    for g in range(len(rules.groups)):
        window, size = rules.groups[g]
        first, end = (
            tables.passed[s, g],
            min(max(0, settled - window + 1) // size, tables.held[s, g]),
        )
        if window > 0 and end > first:
            if len(tables.blocks):
                _free_blocks(pool, tables.blocks[s, g], first, end, rules.uses_v033_scheduler)
            else:
                pool.free[0] += end - first
            tables.passed[s, g] = end
        if window > 0:
            tables.slides[s] = min(tables.slides[s], (tables.passed[s, g] + 1) * size + window - 1)


@njit_force_inline
def count_missing_blocks(rules: EngineRules, tables: BlockTables, s: int, tokens: int) -> int:
    """Blocks that a seat lacks to hold `tokens`."""
    lacking = 0
    for g in range(len(rules.groups)):
        lacking += max(
            0,
            count_table_blocks(tokens, rules.groups[g, 0], rules.groups[g, 1]) - tables.held[s, g],
        )
    return lacking


@njit_compiled
def count_blocks_to_admit(
    rules: EngineRules,
    pool: BlockPool,
    content: np.ndarray,
    hit: int,
    whole: int,
    part: int,
    cap: np.ndarray,
) -> int:
    """Free blocks that must be there to admit a request with `hit` cached ones per group.

    For all of its `whole` tokens (no group counts more than `cap`), and for the `part` up to the
    end of this step; cached blocks that nobody uses are taken from the free ones too.
    """
    for_all = for_part = 0
    for g in range(len(rules.groups)):
        window, size = rules.groups[g]
        wide = size // rules.groups[0, 1]
        have = hit // wide if hit and window >= 0 else 0
        idle = 0
        for j in range(max(0, have * size - window + 1) // size if window > 0 else 0, have):
            idle += pool.refs[pool.cached[content[(j + 1) * wide - 1] * len(rules.groups) + g]] == 0
        for_all += max(0, min(count_table_blocks(whole, window, size), cap[g]) - have) + idle
        for_part += max(0, count_table_blocks(part, window, size) - have) + idle
    return max(for_all, for_part)


@njit_compiled
def reuse_cached_prefix(
    rules: EngineRules, pool: BlockPool, tables: BlockTables, s: int, content: np.ndarray, hit: int
) -> None:
    """Start the tables of a seat with `hit` cached blocks per group, without those that already left the window."""
    tables.published[s], tables.capacity[s], tables.slides[s] = hit, 0, 0
    for g in range(len(rules.groups)):
        window, size = rules.groups[g]
        if hit and window >= 0:
            wide = size // rules.groups[0, 1]
            have = hit // wide
            tables.held[s, g] = have
            tables.passed[s, g] = max(0, have * size - window + 1) // size if window > 0 else 0
            for j in range(tables.passed[s, g], have):
                block = pool.cached[content[(j + 1) * wide - 1] * len(rules.groups) + g]
                tables.blocks[s, g, j] = block
                if pool.refs[block] == 0:
                    pool.next[pool.prev[block]] = pool.next[block]
                    pool.prev[pool.next[block]] = pool.prev[block]
                    pool.free[0] -= 1
                pool.refs[block] += 1
                _update_sharers(pool, pool.refs[block] - 1, pool.refs[block])


@njit_force_inline
def allocate_slots(
    rules: EngineRules, pool: BlockPool, tables: BlockTables, s: int, tokens: int
) -> None:
    """Give a seat the blocks that it lacks to hold `tokens`."""
    capacity = 1 << 60
    for g in range(len(rules.groups)):
        window, size = rules.groups[g]
        held = tables.held[s, g]
        end = max(held, count_table_blocks(tokens, window, size))
        if len(tables.blocks):
            for j in range(held, end):
                tables.blocks[s, g, j] = take_free_block(pool)
        else:
            pool.free[0] -= end - held
        tables.held[s, g] = end
        if window >= 0:
            capacity = min(capacity, end * size)
    tables.capacity[s] = capacity


@njit_compiled
def free_sequence(rules: EngineRules, pool: BlockPool, tables: BlockTables, s: int) -> None:
    """Free a seat's blocks, group by group, the last block first."""
    for g in range(len(rules.groups)):
        if len(tables.blocks):
            _free_blocks(
                pool,
                tables.blocks[s, g],
                tables.passed[s, g],
                tables.held[s, g],
                rules.uses_v033_scheduler,
            )
        else:
            pool.free[0] += tables.held[s, g] - tables.passed[s, g]
        tables.held[s, g] = tables.passed[s, g] = 0


@njit_compiled
def cache_full_blocks(
    rules: EngineRules,
    pool: BlockPool,
    tables: BlockTables,
    s: int,
    content: np.ndarray,
    tokens: int,
) -> None:
    """Make a seat's full blocks among its first `tokens` known to the cache."""
    count, full = len(rules.groups), tokens // rules.groups[0, 1]
    for j in range(tables.published[s], full):
        for g in range(count):
            wide = rules.groups[g, 1] // rules.groups[0, 1]
            if (
                rules.groups[g, 0] >= 0
                and (j + 1) % wide == 0
                and (j + 1) // wide > tables.passed[s, g]
            ):
                _cache_block(pool, tables.blocks[s, g, (j + 1) // wide - 1], content[j] * count + g)
        if pool.kept[1]:
            store_in_host(pool, content[j])
    tables.published[s] = max(full, tables.published[s])
