"""vLLM V1's scheduler, step for step, compiled: arrays in, arrays out, no Python object per request or token.

Follows vLLM 0.20.2 (v1/core/sched/scheduler.py:352, v1/core/sched/async_scheduler.py, v1/engine/core.py:443) and, with
`Rules.recent`, 0.33.0 where it differs. The KV blocks are in `planner.blocks`.
"""

from __future__ import annotations

import heapq
from typing import Any

import numpy as np
from numba import njit

from planner.blocks import fill, leave, longest_hit, missing, needed, new_pool, new_seats, publish, slide, touch
from planner.rules import ITL_BINS, ITL_FIRST, ITL_PER_DECADE, USAGE_BINS, Outcome, Rules, StepTable, Traffic


@njit(cache=True)
def _push(rows: Any, used: int, values: Any) -> Any:
    """`rows` with `values` written to row `used`, twice as long if it was full."""
    if used == len(rows):
        rows = np.concatenate((rows, np.empty_like(rows)))
    for column, value in enumerate(values):
        rows[used, column] = value
    return rows


@njit(cache=True)
def _accepted(rules: Any, request: int, position: int, drafted: int) -> int:
    """Drafted tokens kept: draws that depend on seed, request and position only (SplitMix64)."""
    for k in range(drafted):
        z = np.uint64(rules.seed) + np.uint64(request) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(position + k + 1)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        if (z ^ (z >> np.uint64(31))) / 18446744073709551616.0 >= rules.acceptance_rate:
            return k
    return drafted


@njit(cache=True)
def _pairs(tokens: int, context: int, window: float) -> float:
    """(query, key) pairs of a chunk of `tokens` after `context`, each query seeing `window` keys at most."""
    growing = min(tokens, max(0.0, window - context))
    return growing * (context + (growing + 1) / 2) + (tokens - growing) * window


@njit(cache=True)
def _cost(table: Any, taken: int, tokens_of: Any, context_of: Any, drafted_of: Any) -> tuple[int, int, float]:
    """Tokens, decoding sequences and seconds of a step."""
    total, sampled, decoding, contexts, pairs, windows_s = 0, taken, 0, 0, 0.0, 0.0
    for j in range(taken):
        tokens, context = tokens_of[j], context_of[j]
        total += tokens
        sampled += drafted_of[j]
        if tokens == 1 + drafted_of[j] and context > 0:
            decoding += 1
            contexts += context
            for k in range(len(table.decode_windows)):
                windows_s += table.decode_windows[k, 1] * min(context, table.decode_windows[k, 0])
        else:
            pairs += tokens * (context + (tokens + 1) / 2)
            for k in range(len(table.prefill_windows)):
                windows_s += table.prefill_windows[k, 1] * _pairs(tokens, context, table.prefill_windows[k, 0])
    seconds = table.fixed_s + table.state_s * taken + windows_s + (table.prefill_step_s if pairs else 0.0)
    seconds += table.tokens_s[min(total, table.tokens_s.size - 1)] + table.rows_s[min(sampled, table.rows_s.size - 1)]
    return total, decoding, seconds + table.decode_context_s * contexts + table.prefill_pair_s * pairs


@njit(cache=True)
def _victim(running: Any, seated: Any, rank: Any) -> int:
    """Place in `running` of the one to preempt: the last, or with priorities the least urgent."""
    last = len(running) - 1
    for j in range(len(running) if len(rank) else 0):
        if rank[seated[running[j]]] > rank[seated[running[last]]]:
            last = j
    return last


@njit(cache=True)
def _unschedule(batch: Any, taken: int, seat: int) -> int:
    """Take a seat out of the step being scheduled; its tokens, 0 if it had no part."""
    for j in range(taken):
        if batch[1, j] == seat:
            tokens = batch[2, j]
            for row in batch:
                row[j : taken - 1] = row[j + 1 : taken]
            return tokens
    return 0


@njit(cache=True)
def _withdraw(waiting: Any, request: int) -> None:
    """Take a request out of the heap of waiting ones."""
    for k in range(len(waiting)):
        if waiting[k][1] == request:
            waiting[k] = waiting[-1]
            waiting.pop()
            heapq.heapify(waiting)
            return


@njit(cache=True, nogil=True)
def simulate(
    rules: Rules, table: StepTable, traffic: Traffic, timed: bool, log: bool, gauge_s: float, halt: bool
) -> Outcome:
    """Run all requests to their end.

    `timed`: steps last what `table` says, else 1. `log` keeps the step log, `gauge_s` > 0 is how often to sample gauges.
    `halt`: stop before the first preemption; up to there prompts that share no prefix never hit the prefix cache, so
    block counts suffice.
    """
    # no comprehensions in here: numba 0.68 then drops writes to fields of named tuples as dead code
    prompt, output, rank, n = traffic.prompt, traffic.output, traffic.rank, traffic.prompt.size
    groups, count, seqs, model_len = rules.groups, len(rules.groups), rules.max_num_seqs, rules.max_model_len
    usable, size, windowed = rules.num_blocks - 1, rules.groups[0, 1], groups[:, 0].max() > 0
    caching = rules.enable_prefix_caching and traffic.content.size > 0
    overlap = rules.async_scheduling and table.stages == 1
    depth = 2 if overlap else table.stages  # steps under way at once
    cap = np.full(count, 1 << 40)  # blocks that admission asks for at most
    for g in range(count):
        if groups[g, 0] > 0:
            in_flight = rules.max_num_batched_tokens * (depth if rules.recent else 1)
            cap[g] = needed(min(groups[g, 0] - 1 + in_flight, model_len), 0, groups[g, 1]) + 1

    longest = 0
    for i in range(n):
        longest = max(longest, prompt[i] + output[i])
    longest = min(longest + rules.num_lookahead_tokens, model_len)
    pool = new_pool(rules.num_blocks, (traffic.content.max() + 1) * count if caching else 0)
    seats = new_seats(seqs, count)
    tables = np.empty((seqs if caching else 0, count, needed(longest, 0, groups[:, 1].min())), np.int32)
    running, num_running, spare = np.zeros(seqs, np.int64), 0, list(range(seqs))
    coming, waiting = [(0.0, 0)], [(0, 0)]  # heaps of (time, request) and (order, request)
    coming.clear()
    waiting.clear()
    queued = front = 0  # order of the last request that joined the queue, and that was put back to its front

    sent, scheduled = np.full(n, np.nan), np.full(n, np.nan)
    first_token, last_token = np.full(n, np.nan), np.full(n, np.nan)
    preemptions, cached_tokens, made = np.zeros(n, np.int32), np.zeros(n, np.int32), np.zeros(n, np.int32)
    released = np.empty(n if traffic.concurrency else 0)  # when the k-th request ended
    itl, usage, totals = np.zeros(ITL_BINS, np.int64), np.zeros(USAGE_BINS), np.zeros(5)
    gauges, num_gauges = np.empty((64, 5)), 0
    steps, num_steps, entries, num_entries = np.empty((64, 5), np.int64), 0, np.empty((64, 3), np.int64), 0
    dropped, num_dropped, finished, num_finished = np.empty((64, 2), np.int64), 0, np.empty((64, 2), np.int64), 0
    # steps under way, oldest at `first`: request, seat, tokens, context, drafts, yields a token, past preemptions
    batches, first, flying = np.zeros((depth, 7, seqs), np.int64), 0, 0
    sizes, ends, rows = np.zeros(depth, np.int64), np.zeros(depth), np.zeros(depth, np.int64)

    now, entry, end, arrived, done, last_gap, last_bin, stuck = 0.0, 0.0, 0.0, 0, 0, -1.0, 0, -1
    while done < n:
        # requests are sent, and reach the queue
        while True:
            at = np.inf
            while arrived < n:
                at = traffic.arrival[arrived]
                if traffic.concurrency and arrived >= traffic.concurrency:
                    ended = arrived - traffic.concurrency
                    at = max(at, released[ended]) if ended < done else np.inf
                if at > now:
                    break
                sent[arrived] = at
                heapq.heappush(coming, (at + traffic.request_s + traffic.prompt_token_s * prompt[arrived], arrived))
                arrived += 1
                at = np.inf
            while len(coming) and coming[0][0] <= now:
                i = heapq.heappop(coming)[1]
                queued += 1
                heapq.heappush(waiting, (rank[i] if rules.priority else queued, i))
            if num_running or len(waiting) or flying:
                break
            now = min(at, coming[0][0]) if len(coming) else at

        budget, taken, victims, k = rules.max_num_batched_tokens, 0, 0, 0
        turn = (first + flying) % depth
        batch = batches[turn]
        threshold = rules.long_prefill_token_threshold
        if threshold == 0 or (rules.recent and num_running + len(waiting) <= 1):
            threshold = model_len

        # running requests first, in the order in which they were admitted
        while k < num_running and budget > 0:
            s = running[k]
            i, computed, placeholders = seats.request[s], seats.computed[s], seats.placeholders[s]
            if placeholders > 0 and computed + 2 - placeholders >= prompt[i] + output[i]:
                k += 1  # the step under way yields its last token
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
                place = _victim(running[:num_running], seats.request, rank)
                seat = running[place]
                victim = seats.request[seat]
                running[place : num_running - 1] = running[place + 1 : num_running]
                num_running -= 1
                given_back = _unschedule(batch, taken, seat)
                if given_back:
                    budget += given_back
                    taken -= 1
                if given_back or (rules.recent and place < k):  # 0.20.2 skips a request where it should not
                    k -= 1
                made[victim] = seats.known[seat] - prompt[victim]
                preemptions[victim] += 1
                leave(rules, pool, seats, tables, seat)
                spare.append(seat)
                front -= 1
                heapq.heappush(waiting, (rank[victim] if rules.priority else front, victim))
                victims += 1
                if log:
                    dropped = _push(dropped, num_dropped, (num_steps, victim))
                    num_dropped += 1
                if seat == s:
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
            batch[0, taken], batch[1, taken], batch[2, taken], batch[3, taken] = i, s, want, computed
            batch[4, taken] = max(0, min(seats.drafts[s], want + computed - seats.known[s] - placeholders))
            seats.drafts[s] = 0
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
            if want > budget and not rules.enable_chunked_prefill:
                break
            want = min(want, budget)
            slots = min(computed + want + (rules.num_lookahead_tokens if rules.recent else 0), model_len)
            whole = part = 0  # blocks for all of its tokens, which must be free, and for those of this step
            for g in range(count):
                window, have, idle = groups[g, 0], hit if groups[g, 0] >= 0 else 0, 0
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
            seats.request[s], seats.known[s], seats.computed[s], seats.published[s] = i, known, computed, hit
            seats.placeholders[s] = seats.drafts[s] = seats.in_flight[s] = 0
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
            batch[0, taken], batch[1, taken], batch[2, taken], batch[3, taken] = i, s, want, computed
            batch[4, taken] = 0
            taken += 1
            budget -= want

        if taken:
            for j in range(taken):
                s = batch[1, j]
                seats.computed[s] += batch[2, j]
                seats.in_flight[s] += batch[2, j]
                batch[5, j] = seats.computed[s] >= seats.known[s] + seats.placeholders[s]  # not a chunk before the last
                batch[6, j] = preemptions[batch[0, j]]
                if overlap and batch[5, j]:
                    seats.placeholders[s] += 1 + batch[4, j]
                    seats.drafts[s] = rules.num_speculative_tokens
            total, decoding, spent = _cost(table, taken, batch[2], batch[3], batch[4])
            if not timed:
                spent = 1.0
            start = max(now, entry)
            entry = start + spent / table.stages
            end = max(start + spent, end + spent / table.stages)
            sizes[turn], ends[turn], rows[turn] = taken, end, num_steps
            flying += 1
            used = usable - pool.free[0]
            busy = entry - start
            totals += np.array([1.0, busy, float(total), float(decoding), decoding * busy])
            usage[used * (USAGE_BINS - 1) // usable] += busy
            while gauge_s > 0 and num_gauges * gauge_s < entry:
                on = 1.0 if num_gauges * gauge_s >= start else 0.0
                values = (num_gauges * gauge_s, on * num_running, on * len(waiting), on * used, on * total)
                gauges = _push(gauges, num_gauges, values)
                num_gauges += 1
            if log:
                steps = _push(steps, num_steps, (np.int64(now), total, num_running, len(waiting), pool.free[0]))
                for j in range(taken):
                    entries = _push(entries, num_entries, (num_steps, batch[0, j], batch[2, j]))
                    num_entries += 1
                num_steps += 1
        elif victims:
            num_dropped -= victims if log else 0  # no step, no line in the log
        elif flying == 0:
            stuck = waiting[0][1] if len(waiting) else seats.request[running[0]]
            break
        if not timed:
            now += 1
        if taken and flying < depth:
            continue

        # outputs of the oldest step under way
        batch, gone = batches[first], 0
        for j in range(sizes[first] if flying else 0):
            i, s, drafted = batch[0, j], batch[1, j], batch[4, j]
            current = seats.request[s] == i and batch[6, j] == preemptions[i]
            if current:
                seats.in_flight[s] -= batch[2, j]
                made[i] = seats.known[s] - prompt[i]
            if not batch[5, j] or (depth > 2 and not current):
                continue
            kept = _accepted(rules, i, made[i], drafted)
            room = min(output[i], model_len - prompt[i]) - made[i]
            if made[i] == 0:
                first_token[i] = ends[first]
            else:
                gap = ends[first] - last_token[i]
                if gap != last_gap:
                    last_gap = gap
                    last_bin = min(int(np.log10(max(gap, ITL_FIRST) / ITL_FIRST) * ITL_PER_DECADE), ITL_BINS - 1)
                itl[last_bin] += 1
            last_token[i] = ends[first]
            made[i] += min(1 + kept, room)
            if current:
                seats.known[s] = prompt[i] + made[i]
                seats.computed[s] -= drafted - kept
                if not overlap:
                    seats.drafts[s] = rules.num_speculative_tokens
                else:
                    seats.placeholders[s] -= 1 + drafted
                    if caching:
                        content = traffic.content[traffic.content_start[i] :]
                        settled = min(seats.computed[s] - seats.placeholders[s], seats.known[s])
                        publish(rules, pool, seats, tables, s, content, settled)
            if 1 + kept >= room:
                if traffic.concurrency:
                    released[done] = ends[first]
                done += 1
                if log:
                    finished = _push(finished, num_finished, (rows[first], i))
                    num_finished += 1
                if current:
                    leave(rules, pool, seats, tables, s)
                    spare.append(s)
                    gone += 1
                else:
                    _withdraw(waiting, i)
        if gone:
            stay = 0
            for j in range(num_running):
                if seats.request[running[j]] >= 0:
                    running[stay] = running[j]
                    stay += 1
            num_running = stay
        if flying:
            now = ends[first] if timed else now
            first, flying = (first + 1) % depth, flying - 1
    return Outcome(
        stuck, sent, scheduled, first_token, last_token, preemptions, cached_tokens, itl, usage, totals,
        gauges[:num_gauges], steps[:num_steps], entries[:num_entries], dropped[:num_dropped], finished[:num_finished],
    )  # fmt: skip
