"""Reproduce vLLM's block pool and block tables, compiled: allocation, free queue, prefix caching.

It follows vLLM 0.20.2 (v1/core/block_pool.py, kv_cache_coordinator.py,
single_type_kv_cache_manager.py) and, with `EngineRules.uses_v033_scheduler`, 0.33.0. Without prefix
caching blocks are only counted and have no identity.
"""

from typing import NamedTuple

import numpy as np

from planner.latency.shared_prefix_reads import MAX_BLOCK_SHARERS
from planner.simulator.compilation import njit_allocating, njit_compiled, njit_force_inline
from planner.simulator.kernel_types import EngineRules, RequestBatch


class BlockPool(NamedTuple):
    """Free blocks as a ring through the last index, next to be taken first.

    Cached blocks with equal content form rings too. A key is content * groups + group.
    """

    free: np.ndarray  # [1] number of free blocks
    next: np.ndarray
    prev: np.ndarray
    refs: np.ndarray
    key: np.ndarray  # key of a cached block, else -1
    after: np.ndarray
    before: np.ndarray
    cached: np.ndarray  # [contents * groups] oldest block with that key, else -1
    # [2, contents + 1] contents in host memory as a ring through the last index, oldest first;
    # -1 for others
    host: np.ndarray
    host_count: np.ndarray  # [2] contents in host memory, and their maximum
    # [MAX_BLOCK_SHARERS] blocks by number of sequences that have them, from 2 on; the last entry
    # includes those with more
    shared: np.ndarray


class BlockTables(NamedTuple):
    """Block tables of the running requests, by slot."""

    # [slots, groups, longest] block numbers; no slots if blocks have no identity
    blocks: np.ndarray
    held: np.ndarray  # [slots, groups] length of the table
    passed: np.ndarray  # [slots, groups] blocks at its start that have left the window
    published: np.ndarray  # [slots] full blocks that the prefix cache knows
    capacity: np.ndarray  # [slots] tokens that fit
    slides: np.ndarray  # [slots] computed tokens at which the next block leaves a window


@njit_force_inline
def insert_before(ring: np.ndarray, node: int, end: int) -> None:
    """Insert a node before `end` into a ring of (next, previous)."""
    before = ring[1, end]
    ring[0, before] = ring[1, end] = node
    ring[0, node], ring[1, node] = end, before


@njit_force_inline
def remove_from_ring(ring: np.ndarray, node: int) -> None:
    """Remove a node from its ring."""
    ring[0, ring[1, node]], ring[1, ring[0, node]] = ring[0, node], ring[1, node]


@njit_allocating
def create_pool(blocks: int, contents: int, host_blocks: int) -> BlockPool:
    """Create a pool of so many free `blocks`, after the null block 0.

    With `contents` = 0 blocks have no identity.
    """
    host = np.full((2, contents + 1 if host_blocks else 0), -1, np.int32)
    host_count = np.zeros(2, np.int64)
    host[:, -1:] = contents
    host_count[1] = host_blocks
    ring = blocks + 1 if contents else 0
    pool = BlockPool(
        np.full(1, blocks),
        np.arange(1, ring + 2),
        np.arange(-1, ring),
        np.zeros(ring + 1, np.int32),
        np.full(ring + 1, -1),
        np.empty(ring + 1, np.int32),
        np.empty(ring + 1, np.int32),
        np.full(contents, -1, np.int32),
        host,
        host_count,
        np.zeros(MAX_BLOCK_SHARERS, np.int64),
    )
    if ring:
        pool.next[ring], pool.prev[1] = 1, ring
    return pool


@njit_allocating
def create_tables(num_slots: int, groups: int, longest: int) -> BlockTables:
    """Create empty tables of up to `longest` blocks; 0 if blocks have no identity."""
    sizes = np.zeros((2, num_slots, groups), np.int64)
    return BlockTables(
        np.empty((num_slots if longest else 0, groups, longest), np.int32),
        sizes[0],
        sizes[1],
        np.zeros(num_slots, np.int64),
        np.zeros(num_slots, np.int64),
        np.zeros(num_slots, np.int64),
    )


@njit_force_inline
def take_free_block(pool: BlockPool) -> int:
    """Take the block at the front of the free ring, and drop its content from the cache."""
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
    """Record that the number of sequences with a block changes from `before` to `after`."""
    pool.shared[min(before, MAX_BLOCK_SHARERS - 1)] -= 1
    pool.shared[min(after, MAX_BLOCK_SHARERS - 1)] += 1


@njit_compiled
def _free_blocks(pool: BlockPool, table: np.ndarray, first: int, end: int, recent: bool) -> None:
    """Free blocks table[first:end], the last one first.

    0.33 puts blocks without content at the front of the ring.
    """
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
    """Add a full block to the prefix cache, after older blocks with equal content."""
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
    """Store a content in host memory as the most recently used; if full, evict the oldest."""
    ring, end = pool.host, pool.host.shape[1] - 1
    if ring[0, content] >= 0:
        remove_from_ring(ring, content)
    elif pool.host_count[0] == pool.host_count[1]:
        oldest = ring[0, end]
        remove_from_ring(ring, oldest)
        ring[0, oldest] = -1
    else:
        pool.host_count[0] += 1
    insert_before(ring, content, end)


@njit_compiled
def count_host_hits(pool: BlockPool, content: np.ndarray, hit: int, limit: int) -> int:
    """Count the blocks, up to `limit`, that only host memory has, beyond the pool's `hit`."""
    end = hit
    while end < limit and pool.host[0, content[end]] >= 0:
        end += 1
    return end - hit


@njit_compiled
def touch_host_hits(pool: BlockPool, content: np.ndarray, hit: int, limit: int) -> int:
    """Return `count_host_hits`, and mark the request's blocks in host memory as just used."""
    more = count_host_hits(pool, content, hit, limit)
    for k in range(hit + more):
        if pool.host[0, content[k]] >= 0:
            store_in_host(pool, content[k])
    return more


@njit_compiled
def find_longest_cached_prefix(
    pool: BlockPool, content: np.ndarray, limit: int, groups: np.ndarray
) -> int:
    """Return the blocks of the longest cached prefix, up to `limit`.

    A group needs all of the prefix, or the window before its end. Contents and the result count
    blocks of group 0, the smallest; `wide` of them make one block of group g.
    """
    hit, count, settled = limit, len(groups), False
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
    """Return the length of a group's block table that holds `tokens`."""
    return -window if window < 0 else (tokens + size - 1) // size


@njit_compiled
def free_outside_window(
    rules: EngineRules, pool: BlockPool, tables: BlockTables, s: int, settled: int
) -> None:
    """Free blocks of slot `s` that no token after `settled` computed ones will attend to."""
    tables.slides[s] = 1 << 60
    for g in range(len(rules.groups)):
        window, size = rules.groups[g]
        first = tables.passed[s, g]
        end = min(max(0, settled - window + 1) // size, tables.held[s, g])
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
    """Count the blocks that a slot lacks to hold `tokens`."""
    lacking = 0
    for g in range(len(rules.groups)):
        window, size = rules.groups[g]
        lacking += max(0, count_table_blocks(tokens, window, size) - tables.held[s, g])
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
    """Count the free blocks needed to admit a request with `hit` cached blocks.

    They hold all of its `whole` tokens (at most `cap` blocks per group), and the `part` up to the
    end of this step. Cached blocks that no sequence uses are taken from the free ones too.
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
    """Start the tables of a slot with `hit` cached blocks, without those outside windows."""
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
    """Allocate the blocks that a slot lacks to hold `tokens`."""
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
    """Free a slot's blocks, group by group, the last block first."""
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
    requests: RequestBatch,
    pool: BlockPool,
    tables: BlockTables,
    s: int,
    i: int,
    tokens: int,
) -> None:
    """Add full blocks among the first `tokens` of request `i` in slot `s` to the prefix cache."""
    content = requests.content[requests.content_start[i] :]
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
        if pool.host_count[1]:
            store_in_host(pool, content[j])
    tables.published[s] = max(full, tables.published[s])
