"""vLLM V1's scheduler and block pool, step for step, compiled: arrays in, arrays out, no Python object per request.

Follows vLLM 0.20.2 (v1/core/sched/scheduler.py:352, v1/core/block_pool.py, v1/core/kv_cache_manager.py,
v1/core/kv_cache_coordinator.py, v1/core/single_type_kv_cache_manager.py) and, with `Rules.recent`, 0.33.0 where it differs.
"""

from __future__ import annotations

import heapq
from typing import Any, NamedTuple

import numpy as np
from numba import njit

from planner.blocks import fill, leave, longest_hit, missing, needed, new_pool, new_seats, publish, slide, touch

ITL_PER_DECADE = 200
"""Bins of the inter-token latency histogram per factor of ten; the first starts at `ITL_FIRST`."""
ITL_FIRST = 1e-5
ITL_BINS = 8 * ITL_PER_DECADE
USAGE_BINS = 1001


class Rules(NamedTuple):
    """What the engine is told, in its own argument names; tokens, blocks and requests."""

    max_num_seqs: int
    max_num_batched_tokens: int
    num_blocks: int  # including the null block
    max_model_len: int
    enable_prefix_caching: bool
    enable_chunked_prefill: bool
    long_prefill_token_threshold: int
    async_scheduling: bool
    priority: bool  # policy
    recent: bool  # as 0.33.0 does it, else as 0.20.2
    groups: np.ndarray  # [groups, 2]: 0 = full attention, w > 0 = sliding window, -b = b blocks of state; block size
    num_speculative_tokens: int = 0
    acceptance_rate: float = 0.0  # chance that a drafted token is kept, given the ones before it were
    num_lookahead_tokens: int = 0  # slots beyond the drafted ones: k for EAGLE, MTP and draft models
    seed: int = 0


class StepTable(NamedTuple):
    """Seconds of one engine step with T tokens of R sequences:

    fixed_s + tokens_s[T] + rows_s[R] + state_s R + sum over decoding sequences of decode_context_s * context
    + sum over prompt chunks of t tokens after c of prefill_pair_s * t (c + (t + 1) / 2), and for every row (w, d, p) of
    `windows` the same two sums with d and p, where no query sees more than w keys.

    R counts a sequence with drafted tokens once per token that is sampled. Tables shorter than T or R use their last entry.
    """

    tokens_s: np.ndarray
    rows_s: np.ndarray
    fixed_s: float = 0.0
    state_s: float = 0.0
    decode_context_s: float = 0.0
    prefill_pair_s: float = 0.0
    windows: np.ndarray = np.empty((0, 3))


class Traffic(NamedTuple):
    """[n] requests in order of arrival. `content` names full blocks: equal prefixes have equal numbers."""

    arrival: np.ndarray  # [n] float64, seconds (steps when untimed), ascending
    prompt: np.ndarray  # [n] int32
    output: np.ndarray  # [n] int32
    rank: np.ndarray  # [n] int64, place in the order of (priority, arrival); empty under fcfs
    content: np.ndarray  # int32; request i's k-th full block is content[content_start[i] + k]
    content_start: np.ndarray  # [n] int64
    concurrency: int = 0  # requests in flight at most, 0 = no limit
    request_s: float = 0.0  # from being sent to being seen by the scheduler


class Outcome(NamedTuple):
    """What happened. `stuck`: -1, or a request that can never be scheduled; -2: stopped before the first preemption."""

    stuck: int
    sent: np.ndarray  # [n] seconds; NaN where not reached, as in the next three
    scheduled: np.ndarray
    first_token: np.ndarray
    last_token: np.ndarray
    preemptions: np.ndarray
    cached: np.ndarray  # [n] prompt tokens found in the prefix cache when first scheduled
    itl: np.ndarray  # [ITL_BINS] counts
    totals: np.ndarray  # steps, busy seconds, scheduled tokens; decoding sequences summed over steps, and over seconds
    usage: np.ndarray  # [USAGE_BINS] busy seconds by share of blocks in use
    gauges: np.ndarray  # [samples, 5]: seconds, running, waiting, used blocks, scheduled tokens
    steps: np.ndarray  # [steps, 5] log: step, tokens, running, waiting, free blocks
    entries: np.ndarray  # [.., 3] log: row of `steps`, request, its tokens
    preempted: np.ndarray  # [.., 2] log: row, request
    finished: np.ndarray  # [.., 2] log: row, request


@njit(cache=True)
def _push(rows: Any, used: int, values: Any) -> Any:
    """`rows` with `values` written to row `used`, twice as long if that was full."""
    if used == len(rows):
        rows = np.concatenate((rows, np.empty_like(rows)))
    for column, value in enumerate(values):
        rows[used, column] = value
    return rows


@njit(cache=True)
def _withdraw(waiting: Any, request: int) -> None:
    """Take a request out of the heap of waiting ones."""
    for k in range(len(waiting)):
        if waiting[k][1] == request:
            waiting[k] = waiting[-1]
            waiting.pop()
            heapq.heapify(waiting)
            return


@njit(cache=True)
def _accepted(rules: Any, request: int, position: int, drafted: int) -> int:
    """Drafted tokens kept: a chain of draws that depend on seed, request and position only (SplitMix64)."""
    for k in range(drafted):
        z = np.uint64(rules.seed) + np.uint64(request) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(position + k + 1)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        if (z ^ (z >> np.uint64(31))) / 18446744073709551616.0 >= rules.acceptance_rate:
            return k
    return drafted


@njit(cache=True)
def _attended(context: int, tokens: int, window: int) -> float:
    """(query, key) pairs of `tokens` queries after `context` keys, each seeing `window` keys at most (0 = all)."""
    full = tokens if window == 0 else min(tokens, max(0, window - context))
    return full * (context + (full + 1) / 2) + (tokens - full) * float(window)


@njit(cache=True)
def _cost(table: Any, taken: int, tokens_of: Any, context_of: Any, drafted_of: Any) -> tuple[int, int, float]:
    """Tokens, decoding sequences and seconds of a step."""
    total, sampled, decoding, contexts, pairs, windows_s = 0, taken, 0, 0, 0.0, 0.0
    for j in range(taken):
        tokens, context = tokens_of[j], context_of[j]
        total += tokens
        sampled += drafted_of[j]
        decodes = tokens == 1 + drafted_of[j] and context > 0
        if decodes:
            decoding += 1
            contexts += context
        else:
            pairs += _attended(context, tokens, 0)
        for k in range(len(table.windows)):
            window, decode_s, pair_s = table.windows[k]
            windows_s += decode_s * min(context, window) if decodes else pair_s * _attended(context, tokens, int(window))
    seconds = table.fixed_s + table.state_s * taken + windows_s
    seconds += table.tokens_s[min(total, table.tokens_s.size - 1)] + table.rows_s[min(sampled, table.rows_s.size - 1)]
    return total, decoding, seconds + table.decode_context_s * contexts + table.prefill_pair_s * pairs


@njit(cache=True, nogil=True)
def simulate(
    rules: Rules, table: StepTable, traffic: Traffic, timed: bool, log: bool, gauge_s: float, halt: bool
) -> Outcome:
    """Run all requests to their end.

    `timed`: steps last what `table` says, else 1. `log` keeps the step log, `gauge_s` > 0 samples the gauges that often.
    `halt`: stop before the first preemption; up to there prompts that share no prefix never hit the prefix cache, so
    block counts suffice.
    """
    prompt, output, n = traffic.prompt, traffic.output, traffic.prompt.size
    groups, count, seqs, overlap = rules.groups, len(rules.groups), rules.max_num_seqs, rules.async_scheduling
    model_len, usable, size = rules.max_model_len, rules.num_blocks - 1, rules.groups[0, 1]
    caching = rules.enable_prefix_caching and traffic.content.size > 0
    windowed = groups[:, 0].max() > 0
    cap = np.full(count, 1 << 40)  # blocks that admission asks for at most
    for g in range(count):
        if groups[g, 0] > 0:
            in_flight = rules.max_num_batched_tokens * (2 if rules.recent and overlap else 1)
            cap[g] = needed(min(groups[g, 0] - 1 + in_flight, model_len), 0, groups[g, 1]) + 1

    longest = 0
    for i in range(n):
        longest = max(longest, prompt[i] + output[i])
    longest = min(longest + rules.num_lookahead_tokens, model_len)
    pool = new_pool(rules.num_blocks, (traffic.content.max() + 1) * count if caching else 0)
    seats = new_seats(seqs, count)
    tables = np.empty((seqs if caching else 0, count, needed(longest, 0, groups[:, 1].min())), np.int32)
    running, num_running, spare = np.zeros(seqs, np.int64), 0, list(range(seqs))
    waiting = [(0, 0)]  # a heap of (order, request)
    waiting.clear()
    front = 0  # order of the last request put back to the front of the queue

    sent, scheduled = np.full(n, np.nan), np.full(n, np.nan)
    first_token, last_token = np.full(n, np.nan), np.full(n, np.nan)
    preemptions, cached_tokens, made = np.zeros(n, np.int32), np.zeros(n, np.int32), np.zeros(n, np.int32)
    released = np.empty(n if traffic.concurrency else 0)  # when the k-th request ended
    itl, totals, usage = np.zeros(ITL_BINS, np.int64), np.zeros(5), np.zeros(USAGE_BINS)
    gauges, num_gauges = np.empty((64, 5)), 0
    steps, num_steps = np.empty((64, 5), np.int64), 0
    entries, num_entries = np.empty((64, 3), np.int64), 0
    dropped, num_dropped = np.empty((64, 2), np.int64), 0
    ended, num_ended = np.empty((64, 2), np.int64), 0
    # the step being scheduled and, with async scheduling, the one before: who takes part, with what
    batch = np.zeros((2, 6, seqs), np.int64)
    sizes, ends, rows = np.zeros(2, np.int64), np.zeros(2), np.zeros(2, np.int64)

    now, arrived, done, turn, last_gap, last_bin, stuck = 0.0, 0, 0, 0, -1.0, 0, -1
    while done < n:
        # requests that have arrived by now
        while arrived < n:
            at = traffic.arrival[arrived]
            if traffic.concurrency and arrived >= traffic.concurrency:
                if arrived - traffic.concurrency >= done:
                    break
                at = max(at, released[arrived - traffic.concurrency])
            if at + traffic.request_s > now:
                if num_running or len(waiting) or sizes[1 - turn]:
                    break
                now = at + traffic.request_s
            sent[arrived] = at
            heapq.heappush(waiting, (traffic.rank[arrived] if rules.priority else np.int64(arrived), np.int64(arrived)))
            arrived += 1

        budget, taken, victims, k = rules.max_num_batched_tokens, 0, 0, 0
        who, seat_of, tokens_of = batch[turn, 0], batch[turn, 1], batch[turn, 2]
        context_of, drafted_of, yields = batch[turn, 3], batch[turn, 4], batch[turn, 5]
        threshold = rules.long_prefill_token_threshold
        if threshold == 0 or (rules.recent and num_running + len(waiting) <= 1):
            threshold = model_len

        # running requests first, in the order in which they were admitted
        while k < num_running and budget > 0:
            s = running[k]
            i, computed, placeholders = seats.request[s], seats.computed[s], seats.placeholders[s]
            if placeholders > 0 and computed + 2 - placeholders >= prompt[i] + output[i]:
                k += 1
                continue
            want = seats.known[s] + seats.drafts[s] + placeholders - computed
            want = min(want, threshold, budget, model_len - 1 - computed)
            if want == 0:
                k += 1
                continue
            if windowed:
                slide(rules, pool, seats, tables, s, computed - (seats.in_flight[s] if rules.recent else 0))
            slots = min(computed + want + rules.num_lookahead_tokens, model_len)
            lacking = missing(rules, seats, s, slots)
            while lacking > pool.free[0]:
                if halt:
                    stuck = -2
                    break
                last = num_running - 1
                if rules.priority:
                    for j in range(num_running):
                        if traffic.rank[seats.request[running[j]]] > traffic.rank[seats.request[running[last]]]:
                            last = j
                victim = running[last]
                v = seats.request[victim]
                running[last : num_running - 1] = running[last + 1 : num_running]
                num_running -= 1
                gave_back = False
                for j in range(taken):
                    if seat_of[j] == victim:
                        budget += tokens_of[j]
                        for row in batch[turn]:
                            row[j : taken - 1] = row[j + 1 : taken]
                        taken -= 1
                        gave_back = True
                        break
                if gave_back or (rules.recent and last < k):
                    k -= 1
                made[v] = seats.known[victim] - prompt[v]
                preemptions[v] += 1
                leave(rules, pool, seats, tables, victim)
                spare.append(victim)
                front -= 1
                heapq.heappush(waiting, (traffic.rank[v] if rules.priority else np.int64(front), v))
                victims += 1
                if log:
                    dropped = _push(dropped, num_dropped, (num_steps, v))
                    num_dropped += 1
                if victim == s:
                    break
            if stuck == -2:
                break
            if seats.request[s] < 0:
                if rules.recent and rules.priority:
                    continue
                break
            if lacking:
                fill(rules, pool, seats, tables, s, slots)
            if caching:
                content = traffic.content[traffic.content_start[i] :]
                publish(rules, pool, seats, tables, s, content, min(computed + want, seats.known[s]))
            drafted = max(0, min(seats.drafts[s], want + computed - seats.known[s] - placeholders))
            seats.drafts[s] = 0
            who[taken], seat_of[taken], tokens_of[taken], context_of[taken], drafted_of[taken] = i, s, want, computed, drafted
            taken += 1
            budget -= want
            k += 1
        if stuck == -2:
            break

        # then waiting ones, unless somebody had to leave; the first that does not fit stops the queue
        while victims == 0 and len(waiting) and budget > 0 and num_running < seqs:
            i = waiting[0][1]
            known, hit = np.int64(prompt[i] + made[i]), 0
            content = traffic.content[traffic.content_start[i] if caching else 0 :]
            if caching:
                hit = longest_hit(pool, content, (known - 1) // size, groups)
            computed = hit * size
            want = min(known - computed, threshold)
            if not rules.enable_chunked_prefill and want > budget:
                break
            want = min(want, budget)
            slots = min(computed + want + (rules.num_lookahead_tokens if rules.recent else 0), model_len)
            whole = part = 0
            for g in range(count):
                have, window = (hit, groups[g, 0]) if groups[g, 0] >= 0 else (0, groups[g, 0])
                idle = 0
                for j in range(max(0, computed - window + 1) // size if window > 0 else 0, have):
                    idle += pool.refs[pool.cached[content[j] * count + g]] == 0
                whole += max(0, min(needed(min(known, model_len), window, groups[g, 1]), cap[g]) - have) + idle
                part += max(0, needed(slots, window, groups[g, 1]) - have) + idle
            if max(whole, part) > pool.free[0]:
                break
            heapq.heappop(waiting)
            s = spare.pop()
            running[num_running] = s
            num_running += 1
            seats.request[s], seats.known[s], seats.computed[s] = i, known, computed
            seats.placeholders[s] = seats.drafts[s] = seats.in_flight[s] = 0
            seats.published[s] = hit
            for g in range(count):
                window = groups[g, 0]
                if hit and window >= 0:
                    seats.passed[s, g] = max(0, computed - window + 1) // size if window > 0 else 0
                    seats.held[s, g] = hit
                    for j in range(seats.passed[s, g], hit):
                        tables[s, g, j] = pool.cached[content[j] * count + g]
                        touch(pool, tables[s, g, j])
            fill(rules, pool, seats, tables, s, slots)
            if caching:
                publish(rules, pool, seats, tables, s, content, min(computed + want, known))
            if np.isnan(scheduled[i]):
                scheduled[i], cached_tokens[i] = now, computed
            who[taken], seat_of[taken], tokens_of[taken], context_of[taken], drafted_of[taken] = i, s, want, computed, 0
            taken += 1
            budget -= want

        # the step runs
        for j in range(taken):
            s = seat_of[j]
            seats.computed[s] += tokens_of[j]
            seats.in_flight[s] += tokens_of[j]
            if seats.computed[s] < seats.known[s] + seats.placeholders[s]:
                yields[j] = 0  # a chunk before the last
            else:
                yields[j] = 1
                if overlap:
                    seats.placeholders[s] += 1 + drafted_of[j]
                    seats.drafts[s] = rules.num_speculative_tokens
        sizes[turn], rows[turn] = taken, num_steps
        if taken:
            total, decoding, spent = _cost(table, taken, tokens_of, context_of, drafted_of)
            if not timed:
                spent = 1.0
            start = max(now, ends[1 - turn]) if overlap else now
            ends[turn] = start + spent
            used = usable - pool.free[0]
            totals[0] += 1
            totals[1] += spent
            totals[2] += total
            totals[3] += decoding
            totals[4] += decoding * spent
            usage[used * (USAGE_BINS - 1) // usable] += spent
            while gauge_s > 0 and num_gauges * gauge_s < ends[turn]:
                at = num_gauges * gauge_s
                on = 1.0 if at >= start else 0.0
                state = (at, on * num_running, on * len(waiting), on * used, on * total)
                gauges = _push(gauges, num_gauges, state)
                num_gauges += 1
            if log:
                steps = _push(steps, num_steps, (np.int64(now), total, num_running, len(waiting), pool.free[0]))
                for j in range(taken):
                    entries = _push(entries, num_entries, (num_steps, who[j], tokens_of[j]))
                    num_entries += 1
                num_steps += 1
        elif victims == 0 and sizes[1 - turn] == 0 and (num_running or len(waiting)):
            stuck = waiting[0][1] if len(waiting) else seats.request[running[0]]
            break

        # outputs: of this step, or with async scheduling of the one before
        apply = 1 - turn if overlap else turn
        gone = 0
        for j in range(sizes[apply]):
            i, s, drafted = batch[apply, 0, j], batch[apply, 1, j], batch[apply, 4, j]
            seated_still = seats.request[s] == i
            if seated_still:
                seats.in_flight[s] -= batch[apply, 2, j]
                made[i] = seats.known[s] - prompt[i]
            if not batch[apply, 5, j]:
                continue
            kept = _accepted(rules, i, made[i], drafted)
            room = min(output[i], model_len - prompt[i]) - made[i]
            if made[i] == 0:
                first_token[i] = ends[apply]
            else:
                gap = ends[apply] - last_token[i]
                if gap != last_gap:
                    last_gap = gap
                    last_bin = min(max(int(np.log10(max(gap, ITL_FIRST) / ITL_FIRST) * ITL_PER_DECADE), 0), ITL_BINS - 1)
                itl[last_bin] += 1
            last_token[i] = ends[apply]
            made[i] += min(1 + kept, room)
            if seated_still:
                seats.known[s] = prompt[i] + made[i]
                seats.computed[s] -= drafted - kept
                if overlap:
                    seats.placeholders[s] -= 1 + drafted
                    if caching:
                        content = traffic.content[traffic.content_start[i] :]
                        settled = min(seats.computed[s] - seats.placeholders[s], seats.known[s])
                        publish(rules, pool, seats, tables, s, content, settled)
                else:
                    seats.drafts[s] = rules.num_speculative_tokens
            if 1 + kept >= room:
                if traffic.concurrency:
                    released[done] = ends[apply]
                done += 1
                if log:
                    ended = _push(ended, num_ended, (rows[apply], i))
                    num_ended += 1
                if seated_still:
                    leave(rules, pool, seats, tables, s)
                    spare.append(s)
                    gone += 1
                else:
                    _withdraw(waiting, i)
        if gone:
            left = 0
            for j in range(num_running):
                if seats.request[running[j]] >= 0:
                    running[left] = running[j]
                    left += 1
            num_running = left
        if not timed:
            now += 1
        elif sizes[apply]:
            now = ends[apply]
        sizes[apply] = 0
        if overlap:
            turn = 1 - turn
    return Outcome(
        stuck, sent, scheduled, first_token, last_token, preemptions, cached_tokens, itl, totals, usage,
        gauges[:num_gauges], steps[:num_steps], entries[:num_entries], dropped[:num_dropped], ended[:num_ended],
    )  # fmt: skip
