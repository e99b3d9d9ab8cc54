"""vLLM's block pool and block tables, compiled: allocation, the free queue and its order, prefix caching, windows.

Follows vLLM 0.20.2 (v1/core/block_pool.py, kv_cache_coordinator.py, single_type_kv_cache_manager.py) and, where
`recent`, 0.33.0. Blocks are counted, and only with prefix caching told apart: `tables` is empty without it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import njit


class Pool(NamedTuple):
    """Free blocks as a ring through the last index, next to be taken first; cached blocks of equal content as rings."""

    free: np.ndarray  # [1]
    next: np.ndarray
    prev: np.ndarray
    refs: np.ndarray
    key: np.ndarray  # content * groups + group of a cached block, else -1
    after: np.ndarray
    before: np.ndarray
    cached: np.ndarray  # [contents * groups] oldest block with that key, else -1


class Seats(NamedTuple):
    """Running requests, one seat each: request, tokens known and computed, and what async scheduling and drafts add."""

    request: np.ndarray  # -1: empty
    known: np.ndarray
    computed: np.ndarray
    placeholders: np.ndarray
    drafts: np.ndarray
    in_flight: np.ndarray
    published: np.ndarray  # full blocks whose content is known to the cache
    held: np.ndarray  # [seats, groups] length of the block table
    passed: np.ndarray  # [seats, groups] blocks at its start that left the window


@njit(cache=True)
def new_pool(num_blocks: int, contents: int) -> Any:
    """All blocks free but the null block 0; with `contents` = 0 only their number matters."""
    ring = num_blocks if contents else 0
    pool = Pool(
        np.full(1, num_blocks - 1), np.arange(1, ring + 2), np.arange(-1, ring), np.zeros(ring + 1, np.int32),
        np.full(ring + 1, -1), np.empty(ring + 1, np.int32), np.empty(ring + 1, np.int32),
        np.full(contents, -1, np.int32),
    )  # fmt: skip
    if ring:
        pool.next[ring], pool.prev[1] = 1, ring
    return pool


@njit(cache=True)
def new_seats(seats: int, groups: int) -> Any:
    """`seats` empty ones."""
    one, table = np.zeros((6, seats), np.int64), np.zeros((2, seats, groups), np.int64)
    return Seats(np.full(seats, -1), one[0], one[1], one[2], one[3], one[4], one[5], table[0], table[1])


@njit(cache=True)
def _take(pool: Any) -> int:
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


@njit(cache=True)
def _release(pool: Any, table: Any, first: int, end: int, recent: bool) -> None:
    """Give back blocks table[first:end], the last one first; 0.33 puts blocks without content to the front."""
    ring = pool.next.size - 1
    front = ring
    for j in range(end - 1, first - 1, -1):
        block = table[j]
        pool.refs[block] -= 1
        if pool.refs[block] == 0:
            left = pool.prev[ring]
            if recent and pool.key[block] < 0:
                left, front = front, block
            right = pool.next[left]
            pool.next[left], pool.prev[right] = block, block
            pool.prev[block], pool.next[block] = left, right
            pool.free[0] += 1


@njit(cache=True)
def touch(pool: Any, block: int) -> None:
    """One more request uses a cached block."""
    if pool.refs[block] == 0:
        pool.next[pool.prev[block]] = pool.next[block]
        pool.prev[pool.next[block]] = pool.prev[block]
        pool.free[0] -= 1
    pool.refs[block] += 1


@njit(cache=True)
def _publish(pool: Any, block: int, key: int) -> None:
    """Make a full block's content known, behind older blocks of equal content."""
    pool.key[block] = key
    oldest = pool.cached[key]
    if oldest < 0:
        pool.cached[key] = pool.after[block] = pool.before[block] = block
    else:
        newest = pool.before[oldest]
        pool.after[newest] = pool.before[oldest] = block
        pool.before[block], pool.after[block] = newest, oldest


@njit(cache=True)
def longest_hit(pool: Any, content: Any, most: int, groups: Any) -> int:
    """Blocks of the longest cached prefix, up to `most`: each group needs all of it, or the window before its end."""
    hit, count, settled = most, len(groups), False
    while not settled:
        settled = True
        for g in range(count):
            window, size = groups[g]
            need = hit if window == 0 else max(1, (window + size - 2) // size)
            if window == 0:
                run = 0
                while run < hit and pool.cached[content[run] * count + g] >= 0:
                    run += 1
            elif window > 0:
                run = end = 0
                for j in range(hit - 1, -1, -1):
                    if pool.cached[content[j] * count + g] < 0:
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
            settled &= run == hit
            hit = run
    return hit


@njit(cache=True)
def needed(tokens: int, window: int, size: int) -> int:
    """Length of a group's block table that holds `tokens`."""
    return -window if window < 0 else (tokens + size - 1) // size


@njit(cache=True)
def slide(rules: Any, pool: Any, seats: Any, tables: Any, s: int, settled: int) -> None:
    """Free blocks that no token after `settled` computed ones will look back at."""
    for g in range(len(rules.groups)):
        window, size = rules.groups[g]
        first, end = seats.passed[s, g], min(max(0, settled - window + 1) // size, seats.held[s, g])
        if window > 0 and end > first:
            if len(tables):
                _release(pool, tables[s, g], first, end, rules.recent)
            else:
                pool.free[0] += end - first
            seats.passed[s, g] = end


@njit(cache=True)
def missing(rules: Any, seats: Any, s: int, tokens: int) -> int:
    """Blocks that a seat lacks to hold `tokens`."""
    lacking = 0
    for g in range(len(rules.groups)):
        lacking += max(0, needed(tokens, rules.groups[g, 0], rules.groups[g, 1]) - seats.held[s, g])
    return lacking


@njit(cache=True)
def fill(rules: Any, pool: Any, seats: Any, tables: Any, s: int, tokens: int) -> None:
    """Give a seat the blocks that it lacks."""
    for g in range(len(rules.groups)):
        held = seats.held[s, g]
        end = max(held, needed(tokens, rules.groups[g, 0], rules.groups[g, 1]))
        if len(tables):
            for j in range(held, end):
                tables[s, g, j] = _take(pool)
        else:
            pool.free[0] -= end - held
        seats.held[s, g] = end


@njit(cache=True)
def leave(rules: Any, pool: Any, seats: Any, tables: Any, s: int) -> None:
    """Empty a seat: free its blocks, group by group, the last block first."""
    for g in range(len(rules.groups)):
        if len(tables):
            _release(pool, tables[s, g], seats.passed[s, g], seats.held[s, g], rules.recent)
        else:
            pool.free[0] += seats.held[s, g] - seats.passed[s, g]
        seats.held[s, g] = seats.passed[s, g] = 0
    seats.request[s] = -1


@njit(cache=True)
def publish(rules: Any, pool: Any, seats: Any, tables: Any, s: int, content: Any, tokens: int) -> None:
    """Make a seat's full blocks among its first `tokens` known to the cache."""
    count, full = len(rules.groups), tokens // rules.groups[0, 1]
    for j in range(seats.published[s], full):
        for g in range(count):
            if rules.groups[g, 0] >= 0 and j >= seats.passed[s, g]:
                _publish(pool, tables[s, g, j], content[j] * count + g)
    seats.published[s] = max(full, seats.published[s])
