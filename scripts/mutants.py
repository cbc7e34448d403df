"""Remove each guard in turn, in a copy of the tree, and check that a test fails.

A check that cannot fail proves nothing. Each mutation names the guard, the text that it replaces
and the quickest test that must fail; the working tree is never changed.

    python scripts/mutants.py                all of them, with the tests that they name
    python scripts/mutants.py fence lease    those whose names contain one of the words
    python scripts/mutants.py --model        with the state machine of the model instead
    python scripts/mutants.py --random 100     changes at random places; see random_mutants.py

Exits with status 1 if a mutation survives, breaks the script instead of its guard, or does not
apply because its text is not in its file exactly once.
"""

import compileall
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from flow_mutants import FLOW
from partition_mutants import PARTITIONS

ROOT = Path(__file__).resolve().parent.parent
COPIED = ("fairqueue", "faults", "lua", "tests", "setup.cfg", "pyproject.toml")
AT_ONCE = 2
TIMEOUT_S = 120
MODEL = "tests/proof/test_model.py"

FAILED = re.compile(r"^FAILED \S*?::(\S+)", re.MULTILINE)
# The families of guards that the guarantees under faults depend on.
FENCE, COMPARE, DUPLICATE = "fence", "comparison", "duplicate check"
LEASE, OWNER, REPLAY = "lease token", "owner check on release", "replay answers"

# The mutation is not valid Lua or does not run: a failure unrelated to the guard.
BROKEN = re.compile(r"compiling script|user_script:\d+|SyntaxError|NameError|ImportError")


@dataclass(frozen=True)
class Mutation:
    """One removed guard: in `file`, `old` becomes `new`, and `test` must fail.

    The test is one of tests/proof/test_guards.py, or of the file before its `::`.

    The guarantees under faults depend on guards with a `family`: for these `scripts/proof.py` also
    checks that the storms or the model fail.
    """

    name: str
    file: str
    old: str
    new: str
    test: str
    family: str = ""


MUTATIONS = (
    # --- leadership and firing
    Mutation(
        "fence: whose term it is",
        "lua/lib/fence.lua",
        "if leader and leader.token == A.token then return leader end",
        "if leader then return leader end",
        "test_a_leader_whose_place_is_taken_fires_nothing",
        FENCE,
    ),
    Mutation(
        "fence: that the term is not over",
        "lua/lib/fence.lua",
        "and leader.ends > now then return leader end",
        "then return leader end",
        "test_a_leader_whose_term_is_over_fires_nothing",
        FENCE,
    ),
    Mutation(
        "fence: a term of a clock that was set back",
        "lua/lib/fence.lua",
        "and not is_from_later(leader)\n",
        "",
        "test_a_term_of_a_clock_that_was_set_back_keeps_nobody_waiting",
    ),
    Mutation(
        "fence: that fire asks for it",
        "lua/schedule/fire.lua",
        "local leader = leads()",
        "local leader = leads() or { token = A.token, scheduler = '?', epoch = 0 }",
        "test_a_leader_whose_term_is_over_fires_nothing",
        FENCE,
    ),
    Mutation(
        "election: only when nobody leads",
        "lua/leader/lead.lua",
        "if leader and leader.token ~= A.token then",
        "if false then",
        "test_a_follower_does_not_take_a_term_that_runs",
        FENCE,
    ),
    Mutation(
        "resign: owner check",
        "lua/leader/resign.lua",
        "if not leads() then return remember(A.op, 'stale') end",
        "",
        "test_a_stale_leader_ends_no_term",
        OWNER,
    ),
    Mutation(
        "fire: comparison of the plan",
        "lua/schedule/fire.lua",
        "if plans[i] ~= fire.plan or done[fire.id] then",
        "if done[fire.id] then",
        "test_a_fire_of_a_replaced_plan_is_left_alone",
        COMPARE,
    ),
    Mutation(
        "fire: comparison after a fire",
        "lua/schedule/fire.lua",
        "if plans[i] ~= fire.plan or done[fire.id] then",
        "if done[fire.id] then",
        "test_a_fire_that_was_made_already_is_left_alone",
    ),
    Mutation(
        "update: new revision with each save",
        "lua/schedule/update_schedule.lua",
        "write_plan(A.id, A.revision, moment)",
        "write_plan(A.id, revision_of(A.id), moment)",
        "test_a_fire_of_a_replaced_plan_is_left_alone",
        COMPARE,
    ),
    Mutation(
        "fire: advance of the plan",
        "lua/schedule/fire.lua",
        "if #new_plans > 0 then redis.call('HSET', K.plan, unpack(new_plans)) end",
        "",
        "test_a_fire_advances_the_plan_with_the_task",
    ),
    Mutation(
        "fire: advance of what is due",
        "lua/schedule/fire.lua",
        "if #new_due > 0 then redis.call('ZADD', K.due, unpack(new_due)) end",
        "",
        "test_a_fire_advances_the_plan_with_the_task",
    ),
    Mutation(
        "fire: no moment before the last run",
        "lua/schedule/fire.lua",
        "if fire.moment and fire.moment <= (tonumber(state.last_run) or -1) then",
        "if false then",
        "test_a_clock_set_back_fires_no_moment_again",
    ),
    Mutation(
        "fire: a moment is one task",
        "lua/schedule/fire.lua",
        "local is_new = fire.moment and tasks[i] == 'new'",
        "local is_new = fire.moment",
        "test_a_moment_that_comes_again_is_the_same_task",
        DUPLICATE,
    ),
    Mutation(
        "fire: limits of the queue",
        "lua/schedule/fire.lua",
        " or is_full(task, owner, #new + 1, own, of_group)) then",
        ") then",
        "test_a_refused_fire_keeps_its_plan",
    ),
    Mutation(
        "update: comparison of the text",
        "lua/schedule/update_schedule.lua",
        "if text ~= A.expected or revision_of(A.id) ~= A.base then",
        "if revision_of(A.id) ~= A.base then",
        "test_an_update_from_an_old_text_changes_nothing",
        COMPARE,
    ),
    Mutation(
        "update: comparison of the revision",
        "lua/schedule/update_schedule.lua",
        "if text ~= A.expected or revision_of(A.id) ~= A.base then",
        "if text ~= A.expected then",
        "test_an_update_from_an_old_revision_changes_nothing",
        COMPARE,
    ),
    Mutation(
        "add: the client's idea of the time",
        "lua/schedule/add_schedules.lua",
        "if is_skewed(A.client_now) then return { 'skewed', now } end",
        "",
        "test_a_moment_of_a_wrong_clock_is_not_stored",
    ),
    # --- repeated operations
    Mutation(
        "push: duplicate check",
        "lua/lib/enqueue.lua",
        "answer[i] = before == documents[i] and 'same' or 'other'",
        "answer[i] = 'new'",
        "test_the_same_task_pushed_again_is_one_task",
        DUPLICATE,
    ),
    Mutation(
        "tombstones: of tasks that are trimmed",
        "lua/lib/ending.lua",
        "redis.call('HSET', K.ops, unpack(tombstones))",
        "",
        "test_a_task_that_is_gone_is_still_known",
        DUPLICATE,
    ),
    Mutation(
        "tombstones: that a push looks for them",
        "lua/lib/enqueue.lua",
        "elseif ended[i] or ended_before[i] then",
        "elseif false then",
        "test_a_task_that_is_gone_is_still_known",
        DUPLICATE,
    ),
    Mutation(
        "replay: first answers",
        "lua/lib/replay.lua",
        "return found[1] or redis.call('HGET', K.ops_before, op)",
        "return nil",
        "test_a_repeated_operation_gets_its_first_answer",
        REPLAY,
    ),
    Mutation(
        "replay: the generation before",
        "lua/lib/replay.lua",
        "return found[1] or redis.call('HGET', K.ops_before, op)",
        "return found[1]",
        "test_an_answer_outlives_the_turn_of_the_generations",
        REPLAY,
    ),
    Mutation(
        "replay: of a finish",
        "lua/task/finish.lua",
        "word = ended_before(id, token) or 'lost_lease'",
        "word = 'lost_lease'",
        "test_a_task_that_is_gone_is_still_known",
        REPLAY,
    ),
    Mutation(
        "claim: what a repeated one holds",
        "lua/task/claim.lua",
        "this.taken.ids, this.taken.records = still_held()",
        "this.taken.ids, this.taken.records = {}, {}",
        "test_a_repeated_claim_gets_the_tasks_that_it_holds",
        REPLAY,
    ),
    # --- leases
    Mutation(
        "lease: token of whoever ends it",
        "lua/lib/ending.lua",
        "return record and record.state == 'running' and record.token == token",
        "return record and record.state == 'running'",
        "test_a_worker_that_lost_its_lease_ends_nothing",
        LEASE,
    ),
    Mutation(
        "lease: token of whoever extends it",
        "lua/task/extend.lua",
        "return record and record.state == 'running' and record.token == token",
        "return record and record.state == 'running'",
        "test_a_worker_that_lost_its_lease_extends_nothing",
        LEASE,
    ),
    Mutation(
        "lease: token of a finish",
        "lua/task/finish.lua",
        "if is_held(record, token) then",
        "if is_held(record, record and record.token) then",
        "test_a_worker_that_lost_its_lease_ends_nothing",
        LEASE,
    ),
    Mutation(
        "lease: token of a retry",
        "lua/task/retry.lua",
        "begin_ending(A.op, A.id, A.token, tonumber(A.cost))",
        "begin_ending(A.op, A.id, (read_status(A.id) or {}).token, tonumber(A.cost))",
        "test_a_worker_that_lost_its_lease_ends_nothing",
        LEASE,
    ),
    Mutation(
        "lease: token of a bury",
        "lua/task/bury.lua",
        "begin_ending(A.op, A.id, A.token, tonumber(A.cost))",
        "begin_ending(A.op, A.id, (read_status(A.id) or {}).token, tonumber(A.cost))",
        "test_a_worker_that_lost_its_lease_ends_nothing",
        LEASE,
    ),
    Mutation(
        "release: owner check",
        "lua/task/release.lua",
        "begin_ending(A.op, A.id, A.token)",
        "begin_ending(A.op, A.id, (read_status(A.id) or {}).token)",
        "test_a_worker_that_lost_its_lease_ends_nothing",
        OWNER,
    ),
    Mutation(
        "take back: the token goes with the lease",
        "lua/lib/upkeep.lua",
        "record.timed_out, record.token = fate.outcome == 'timed_out' or nil, nil",
        "record.timed_out = fate.outcome == 'timed_out' or nil",
        "test_a_lease_taken_back_is_lost_however_it_ended",
    ),
    Mutation(
        "take back: bound on attempts",
        "lua/lib/upkeep.lua",
        "or record.attempts >= (record.max_attempts or SETTINGS.max_attempts) then",
        "then",
        "test_a_task_whose_leases_expire_is_not_offered_for_ever",
    ),
    # --- runs that do not answer
    Mutation(
        "overdue: a time-out of the task's own",
        "lua/lib/serving.lua",
        "local timeout_ms = record.timeout_ms or limits.timeout_ms",
        "local timeout_ms = limits.timeout_ms",
        "test_a_run_that_does_not_answer_is_ended_and_not_offered_again",
    ),
    Mutation(
        "overdue: it is not offered again",
        "lua/lib/upkeep.lua",
        "elseif fate.is_stale or record.attempts >=",
        "elseif record.attempts >=",
        "test_a_run_that_does_not_answer_is_ended_and_not_offered_again",
    ),
    Mutation(
        "overdue: whoever does not claim ends it too",
        "lua/lib/stale_runs.lua",
        "  lost.end_overdue()\n  lost.take_back(due_in(K.leases))\n",
        "",
        "test_a_run_that_does_not_answer_is_ended_and_not_offered_again",
    ),
    Mutation(
        "overdue: not one whose worker died",
        "lua/lib/upkeep.lua",
        "or record.deadline > now or ends < record.deadline then",
        "or record.deadline > now then",
        "test_a_run_whose_worker_died_before_its_deadline_is_offered_again",
    ),
    Mutation(
        "extend: no lease beyond the deadline",
        "lua/task/extend.lua",
        "return math.min(longest, record.deadline or longest)",
        "return longest",
        "test_no_lease_is_kept_beyond_the_deadline_of_its_run",
    ),
    Mutation(
        "extend: a run beyond its deadline has lost its lease",
        "lua/task/extend.lua",
        "    and not (record.deadline and record.deadline <= now)\n",
        "",
        "test_no_lease_is_kept_beyond_the_deadline_of_its_run",
    ),
    Mutation(
        "extend: how long a run may go on that is to be cancelled",
        "lua/task/extend.lua",
        "if record.cancel and not record.heard then",
        "if false then",
        "test_a_run_that_is_to_be_cancelled_does_not_go_on_for_ever",
    ),
    Mutation(
        "notices: of what ended without a word",
        "lua/lib/upkeep.lua",
        "if record.state == 'buried' or fate.is_stale then notices().leave",
        "if false then notices().leave",
        "test_what_ended_without_a_word_is_told_until_somebody_has_heard",
    ),
    Mutation(
        "notices: kept until they were heard",
        "lua/lib/notices.lua",
        "if #again > 0 then redis.call('ZADD', K.notices, unpack(again)) end",
        "if #told > 0 then redis.call('ZREM', K.notices, unpack(told)) end",
        "test_what_ended_without_a_word_is_told_until_somebody_has_heard",
    ),
    Mutation(
        "notices: told no more when they were heard",
        "lua/worker/find_stale.lua",
        "forget_notices()\n",
        "",
        "test_what_ended_without_a_word_is_told_until_somebody_has_heard",
    ),
    Mutation(
        "retry: not what is to be cancelled",
        "lua/task/retry.lua",
        "if record.cancel then",
        "if false then",
        "test_a_task_that_is_to_be_cancelled_is_not_offered_again",
    ),
    # --- fairness and limits
    Mutation(
        "fairness: debit of newcomers",
        "lua/lib/fair.lua",
        "start = start + (cost or cost_of(owner)) / settings_of(owner).weight",
        "start = start + 0",
        "test_a_stream_of_newcomers_does_not_starve_a_user",
    ),
    Mutation(
        "fairness: weight in the stride",
        "lua/lib/serving.lua",
        "local stride, clocks = cost / settings_of(unit.owner).weight, ring.clocks",
        "local stride, clocks = cost, ring.clocks",
        "test_service_goes_by_weight",
    ),
    Mutation(
        "fairness: new weight and old debt",
        "lua/settings/set_user.lua",
        "if weight ~= old_weight then",
        "if false then",
        "test_a_raised_weight_acts_on_what_is_owed_already",
    ),
    Mutation(
        "fairness: new weight and the turn for a slot",
        "lua/settings/set_user.lua",
        "  rescale_turns(old_weight / weight)\n",
        "",
        "test_a_raised_weight_acts_on_the_turn_for_a_slot",
    ),
    Mutation(
        "fairness: charge of a release",
        "lua/task/release.lua",
        "charge_more(record, -(record.charge or 1))\n",
        "",
        "test_a_release_gives_the_charge_back",
    ),
    Mutation(
        "CRITICAL: bound on the lane",
        "lua/lib/serving.lua",
        "return this.share >= 1 or (ring.clocks.credit or CRITICAL_CREDIT) >= 1",
        "return true",
        "test_critical_tasks_do_not_take_more_than_their_share",
    ),
    Mutation(
        "CRITICAL: leaving the lane",
        "lua/lib/serving.lua",
        "if jumps and not is_critical(user.seat, first) then",
        "if false then",
        "test_a_critical_task_for_others_lets_no_other_task_go_first",
    ),
    Mutation(
        "CRITICAL: gone from the lane",
        "lua/lib/serving.lua",
        " and unit.is_critical ~= false\n",
        "\n",
        "test_a_user_whose_critical_tasks_are_gone_is_not_looked_at_in_the_lane",
    ),
    Mutation(
        "parking: cap",
        "lua/lib/fair.lua",
        "if s.max_running and running_of(owner) >= s.max_running then return '+inf' end",
        "",
        "test_a_capped_user_gets_no_more_until_one_has_ended",
    ),
    Mutation(
        "parking: cap that is free again",
        "lua/lib/ending.lua",
        "if (s.max_running or (cost and s.rate)) and review(owner) then wake_worker() end",
        "",
        "test_a_capped_user_gets_no_more_until_one_has_ended",
    ),
    Mutation(
        "parking: that a pause is over",
        "lua/lib/fair.lua",
        "if usable.paused_until and usable.paused_until <= now then",
        "if false then",
        "test_a_pause_with_an_end_is_over_then",
    ),
    Mutation(
        "parking: when a pause ends",
        "lua/lib/fair.lua",
        "if s.paused then return s.paused_until or '+inf' end",
        "if s.paused then return '+inf' end",
        "test_a_pause_with_an_end_is_over_then",
    ),
    Mutation(
        "delays: that what is taken out leaves the index",
        "lua/lib/delays.lua",
        "  redis.call('ZREM', K.delayed_index, delays.member(owner, due, id))\n",
        "",
        "test_a_purge_takes_delayed_tasks_and_leaves_nothing_of_them",
    ),
    Mutation(
        "purge: delayed tasks",
        "lua/task/purge.lua",
        "purged = purged + purge(K.delayed_index,",
        "purged = purged + 0 * purge(K.held,",
        "test_a_purge_takes_delayed_tasks_and_leaves_nothing_of_them",
    ),
    Mutation(
        "parking: pause",
        "lua/lib/fair.lua",
        "if s.paused then return s.paused_until or '+inf' end",
        "",
        "test_a_paused_user_gets_nothing",
    ),
    Mutation(
        "parking: rate",
        "lua/lib/fair.lua",
        "if free > now then return math.ceil(free) end",
        "",
        "test_a_rate_limit_limits_and_passes",
    ),
    Mutation(
        "parking: debt of a lower rate",
        "lua/lib/fair.lua",
        "if debt_until > most + 0.001 then",
        "if false then",
        "test_what_is_owed_from_a_lower_rate_is_cut_down",
    ),
    Mutation(
        "parking: a clock that was set back",
        "lua/lib/upkeep.lua",
        "if fair.seen and now < fair.seen then",
        "if false then",
        "test_a_clock_that_is_set_back_lets_a_rate_go_on",
    ),
    Mutation(
        "claim: bytes of an answer",
        "lua/lib/serving.lua",
        "while #members < this.limit and this.bytes < CLAIM_BYTES and this.vain < this.work do",
        "while #members < this.limit and this.vain < this.work do",
        "test_an_answer_has_no_more_than_a_megabyte",
    ),
    Mutation(
        "repartition: who moves",
        "lua/maintenance/put_tasks.lua",
        "if not is_mover(is_back and 'from' or 'to') then return { 'taken over' } end\n",
        "",
        "tests/repartition/test_repartition_drain.py::test_a_process_that_was_overtaken_stores_nothing",
    ),
    Mutation(
        "repartition: tasks that have arrived",
        "lua/maintenance/put_tasks.lua",
        "redis.call('HGET', K.repartition, HAS_ARRIVED .. task.moved) or ",
        "",
        "tests/repartition/test_repartition_drain.py::"
        "test_what_has_arrived_is_not_stored_again_when_it_is_gone",
    ),
    Mutation(
        "repartition: schedules that have arrived",
        "lua/maintenance/put_schedules.lua",
        "K.repartition, HAS_ARRIVED .. moved) == 1 then",
        "K.repartition, HAS_ARRIVED .. moved) == 2 then",
        "tests/repartition/test_repartition_drain.py::"
        "test_what_has_arrived_is_not_stored_again_when_it_is_gone",
    ),
    Mutation(
        "repartition: a schedule that runs",
        "lua/maintenance/take_schedules.lua",
        "    if not is_unfinished(records[each]) or records[each].behind then return nil end\n",
        "",
        "tests/repartition/test_repartition_drain.py::"
        "test_a_schedule_whose_run_is_unfinished_moves_with_it_or_after_it",
    ),
    Mutation(
        "repartition: tasks of a schedule that stays",
        "lua/maintenance/take_tasks.lua",
        "redis.call('HEXISTS', K.schedules, record.schedule) == 1 then return false",
        "redis.call('HEXISTS', K.schedules, record.schedule) == 2 then return false",
        "tests/repartition/test_repartition_drain.py::"
        "test_a_schedule_whose_run_is_unfinished_moves_with_it_or_after_it",
    ),
    Mutation(
        "move: tasks that have arrived",
        "lua/task/move_user_in.lua",
        "if last and tonumber(last) >= seq then",
        "if false then",
        "tests/queue/test_move_user.py::test_steps_that_arrive_twice_and_late_change_nothing",
    ),
    Mutation(
        "move: arrival numbers that a replica forgot",
        "lua/task/move_user_out.lua",
        "math.max(fair.seq, tonumber(A.after)) + 1",
        "fair.seq + 1",
        "tests/queue/test_move_user.py::"
        "test_a_replica_that_has_forgotten_the_last_moves_loses_no_later_ones",
    ),
    Mutation(
        "parking: looking again",
        "lua/lib/upkeep.lua",
        "for _, seat in ipairs(due_in(K.parked)) do",
        "for _, seat in ipairs({}) do",
        "test_a_rate_limit_limits_and_passes",
    ),
    Mutation(
        "push: limits of the queue",
        "lua/task/push.lua",
        "  if full then\n",
        "  if false then\n",
        "test_a_full_queue_takes_no_more",
    ),
    # --- names and their limits
    Mutation(
        "slots: the limit",
        "lua/lib/gates.lua",
        "  return limits.is_shared and permits().slots(gate, limits) or limits.slots\n",
        "  return limits.slots and 1000\n",
        "test_no_more_than_its_slots_run_at_a_time",
    ),
    Mutation(
        "slots: freed with the lease",
        "lua/lib/ending.lua",
        "  end_limits(id, record)\n",
        "",
        "test_the_end_of_a_lease_frees_its_slot",
    ),
    Mutation(
        "slots: freed by a release",
        "lua/task/release.lua",
        "end_limits(A.id, record)\n",
        "",
        "test_a_release_frees_its_slot",
    ),
    Mutation(
        "slots: of leases that are gone",
        "lua/lib/gates.lua",
        "if not redis.call('ZSCORE', K.leases, string.sub(member, #gate + 2)) then",
        "if false then",
        "test_a_slot_without_a_lease_is_free",
    ),
    Mutation(
        "slots: that held tasks come back",
        "lua/lib/gates.lua",
        "if (return_all(list, RETURNED) or has_given) and not is_claiming then wake_worker() end",
        "",
        "test_tasks_that_wait_for_a_slot_get_it",
    ),
    Mutation(
        "slots: another turn for more tasks",
        "lua/lib/gates.lua",
        "    if has_more then\n",
        "    if false then\n",
        "test_tasks_that_wait_for_a_slot_get_it",
    ),
    Mutation(
        "slots: weights of users",
        "lua/lib/gates.lua",
        "math.floor(TURN * cost_of(owner) / settings_of(owner).weight)",
        "TURN",
        "test_weights_act_on_turns_for_a_slot",
    ),
    Mutation(
        "slots: one turn for a user",
        "lua/lib/gates.lua",
        "gates.turn_mark(line, seat)) == 1 then gates.take_turn",
        "gates.turn_mark(line, seat)) then gates.take_turn",
        "test_users_who_wait_for_slots_take_turns",
    ),
    Mutation(
        "rates of names",
        "lua/lib/gates.lua",
        "if free > now then return gate, 'rate', free end",
        "",
        "test_a_rate_of_a_name_limits_and_passes",
    ),
    Mutation(
        "names: what a claim avoids",
        "lua/lib/serving.lua",
        "return (this.listed[name] or false) == this.only_listed",
        "return true",
        "test_a_claim_takes_nothing_that_it_avoids",
    ),
    Mutation(
        "names: users behind those who are passed over",
        "lua/lib/serving.lua",
        "  if unit.in_ready then ring.passed = ring.passed + 1 end\n",
        "",
        "test_repeated_claims_come_to_users_far_behind",
    ),
    Mutation(
        "names: users far behind the head",
        "lua/lib/kind_claims.lua",
        "skip_to(ring, kind.from)",
        "skip_to(ring, 0)",
        "test_repeated_claims_come_to_users_far_behind",
    ),
    Mutation(
        "names: users of whom a kind was told",
        "lua/lib/kind_claims.lua",
        "if told ~= '' and has_room() then serve_told(kind, open) end",
        "",
        "test_a_claim_looks_at_users_of_whom_its_kind_was_told",
    ),
    Mutation(
        "names: a kind hears of a user again",
        "lua/lib/fair.lua",
        "    tell_of(seat)\n",
        "",
        "test_a_kind_hears_of_a_user_who_may_be_served_again",
    ),
    Mutation(
        "names: work in vain",
        "lua/lib/serving.lua",
        "    this.vain = this.vain + WORK_OF_USER\n    if look_ahead(user) then pass_over",
        "    if look_ahead(user) then pass_over",
        "test_a_claim_in_vain_does_not_look_at_everybody",
    ),
    Mutation(
        "names: a token for another is passed on",
        "lua/task/claim.lua",
        "    pass_on(kind, lists)\n",
        "",
        "test_a_token_is_passed_on_some_times_and_no_more",
    ),
    Mutation(
        "names: bound on passing on",
        "lua/task/claim.lua",
        "if passes >= PASSES then return end",
        "",
        "test_a_token_is_passed_on_some_times_and_no_more",
    ),
    Mutation(
        "names: a token for another kind at the same list is passed on",
        "lua/task/claim.lua",
        "if number > 0 then kinds().pass_on(number, kind, this.pools) end",
        "",
        "test_kinds_that_share_a_list_pass_on_what_is_for_the_other",
    ),
    Mutation(
        "names: bound on passing on between kinds",
        "lua/lib/kinds.lua",
        "if passes >= PASSES then return end",
        "",
        "test_kinds_that_share_a_list_pass_on_what_is_for_the_other",
    ),
    Mutation(
        "names: what a filtered claim makes ready is for others too",
        "lua/task/claim.lua",
        "    if (kind or not this.pools.default) and lost.found then wake_worker() end\n",
        "",
        "test_what_a_claim_of_some_names_promotes_wakes_those_that_take_all",
    ),
    Mutation(
        "extend: the worker's own time-out",
        "lua/task/extend.lua",
        "    set_deadline(id, record, tonumber(R.timeout_ms[i]))\n",
        "",
        "test_a_run_has_the_time_that_its_own_worker_gives_it",
    ),
    Mutation(
        "extend: a time-out of an operator",
        "lua/task/extend.lua",
        "or record.ruled or",
        "or",
        "test_a_time_out_of_an_operator_wins_over_the_handlers",
    ),
    Mutation(
        "beat: limits of an operator",
        "lua/worker/heartbeat.lua",
        "if stored and stored.by ~= 'worker' then return end",
        "",
        "test_limits_of_an_operator_stand_over_those_of_workers",
    ),
    Mutation(
        "beat: workers that are gone",
        "lua/worker/heartbeat.lua",
        "redis.call('HDEL', K.workers, unpack(gone))",
        "",
        "test_a_worker_that_beats_no_more_is_forgotten",
    ),
    # --- unique keys, pools and batches of schedules and workers
    Mutation(
        "fire: another task has the key",
        "lua/schedule/fire.lua",
        "return word ~= 'new'",
        "return false",
        "tests/schedules/test_schedule_flow.py::test_a_slow_task_is_never_queued_twice",
    ),
    Mutation(
        "fire: two fires of one call with a key",
        "lua/schedule/fire.lua",
        "waits_for_key(task) and 'later' or overlap_of(fire)",
        "overlap_of(fire)",
        "tests/schedules/test_schedule_flow.py::test_schedules_with_one_key_that_are_due_together_keep_their_tasks_apart",
    ),
    Mutation(
        "fire: that a duplicate is noted",
        "lua/schedule/fire.lua",
        "overlap == 'skip' and 'overlap' or 'duplicate'",
        "'overlap'",
        "tests/schedules/test_schedule_flow.py::test_a_slow_task_is_never_queued_twice",
    ),
    Mutation(
        "backfill: room for a pool",
        "lua/schedule/backfill.lua",
        "not rings().has_room_for(new[1].pool)",
        "false",
        "tests/schedules/test_schedule_flow.py::test_a_queue_without_room_for_a_pool_refuses_its_tasks",
    ),
    Mutation(
        "beat: names of other pools",
        "lua/worker/heartbeat.lua",
        "if wanted[pool] then",
        "if true then",
        "tests/worker/test_worker_pools.py::test_names_are_those_of_workers_that_share_a_pool",
    ),
    Mutation(
        "beat: that pools were changed",
        "lua/worker/heartbeat.lua",
        "pooled_of(earlier) == own_pooled",
        "true",
        "tests/worker/test_worker_pools.py::test_names_are_those_of_workers_that_share_a_pool",
    ),
    Mutation(
        "worker: that it takes its pools",
        "fairqueue/worker/heartbeat.py",
        "return ClaimFilter(pools=pools)",
        "return ClaimFilter()",
        "tests/worker/test_worker_pools.py::test_a_worker_takes_the_tasks_of_its_pools",
    ),
    Mutation(
        "batch: that a stop gives back what is gathered",
        "fairqueue/worker/pool.py",
        " + self._batches.take_all()",
        "",
        "tests/worker/test_batches.py::test_a_worker_that_stops_gives_back_what_it_gathers_and_waits_for_what_runs",
    ),
    Mutation(
        "batch: that leases of all are kept",
        "fairqueue/worker/pool.py",
        "self._keeper.add(runs)",
        "self._keeper.add(runs[:1])",
        "tests/worker/test_batches.py::test_the_leases_of_a_whole_batch_are_kept",
    ),
    Mutation(
        "batch: a time-out ends all of it",
        "fairqueue/worker/executor.py",
        "first.mates = runs[1:]",
        "first.mates = ()",
        "tests/worker/test_batches.py::test_a_timeout_ends_the_call_and_fails_all_its_tasks",
    ),
    # --- runs of a schedule that overlap
    Mutation(
        "overlap: skip",
        "lua/schedule/fire.lua",
        "return let_buffered_begin(fire.id) and 'skip' or 'fire'",
        "return 'fire'",
        "test_a_run_that_goes_on_is_not_overlapped",
    ),
    Mutation(
        "overlap: that a buffered run waits",
        "lua/lib/enqueue.lua",
        "if task.buffered then",
        "if false then",
        "test_a_buffered_run_waits_for_the_one_before",
    ),
    Mutation(
        "overlap: that a buffered run waits for all",
        "lua/lib/ending.lua",
        "if not records[id].buffered then",
        "if false then",
        "test_a_buffered_run_waits_for_the_end_of_all_others",
    ),
    Mutation(
        "overlap: that a buffered run begins",
        "lua/lib/ending.lua",
        "  for schedule in pairs(schedules) do let_buffered_begin(schedule) end\n",
        "",
        "test_a_buffered_run_waits_for_the_one_before",
    ),
    Mutation(
        "overlap: what is cancelled",
        "lua/schedule/fire.lua",
        "fire.overlap == 'cancel_previous' and not cancel_previous(fire, state) then",
        "false then",
        "test_a_run_that_is_replaced_is_cancelled",
    ),
    # --- tenants
    Mutation(
        "tenants: that a user is one of a tenant",
        "lua/lib/owners.lua",
        "if record.group then return",
        "if false then return",
        "test_a_user_id_of_two_tenants_is_two_users",
    ),
    Mutation(
        "tenants: that a schedule leaves its old one",
        "lua/schedule/update_schedule.lua",
        "leave_tenant(A.id, state)\n",
        "",
        "test_a_schedule_is_listed_under_one_tenant",
    ),
    # --- schedules: what they may, and when they stop
    Mutation(
        "jitter: after a fire",
        "lua/schedule/fire.lua",
        "new_due[#new_due + 1] = fire.due_ms",
        "new_due[#new_due + 1] = fire.next_ms",
        "test_a_fire_is_put_off_by_its_jitter",
    ),
    Mutation(
        "jitter: of a new schedule",
        "lua/schedule/add_schedules.lua",
        "due[#due + 1] = due_ms",
        "due[#due + 1] = ARGV[i + 5]",
        "test_a_fire_is_put_off_by_its_jitter",
    ),
    Mutation(
        "jitter: of a changed schedule",
        "lua/schedule/update_schedule.lua",
        "redis.call('ZADD', K.due, A.due_ms, A.id)",
        "redis.call('ZADD', K.due, A.next_ms, A.id)",
        "test_a_fire_is_put_off_by_its_jitter",
    ),
    Mutation(
        "max_runs: the last run",
        "lua/schedule/fire.lua",
        "if fire.max_runs and state.runs >= fire.max_runs then",
        "if false then",
        "test_a_schedule_has_no_more_runs_than_it_may",
    ),
    Mutation(
        "max_runs: those that were had before",
        "lua/schedule/fire.lua",
        "if fire.moment and fire.max_runs and (state.runs or 0) >= fire.max_runs then",
        "if false then",
        "test_a_schedule_that_has_had_its_runs_gets_no_other",
    ),
    Mutation(
        "failures: the limit",
        "lua/lib/failure_streaks.lua",
        "if schedule.failures >= limit and schedule.active then",
        "if false then",
        "test_a_schedule_that_fails_too_often_is_paused",
    ),
    Mutation(
        "failures: only those in a row",
        "lua/lib/failure_streaks.lua",
        "    schedule.failures = nil\n",
        "",
        "test_a_success_ends_a_row_of_failures",
    ),
    Mutation(
        "failures: the plan goes too",
        "lua/lib/failure_streaks.lua",
        "write_plan(record.schedule, revision_of(record.schedule))",
        "",
        "test_a_late_fire_does_not_undo_a_pause_for_failures",
    ),
    Mutation(
        "resume: comparison of the plan",
        "lua/schedule/resume.lua",
        "if redis.call('HGET', K.plan, A.id) ~= A.plan or not state['until'] then",
        "if not state['until'] then",
        "test_the_end_of_a_changed_pause_is_ignored",
        COMPARE,
    ),
    Mutation(
        "resume: fence",
        "lua/schedule/resume.lua",
        "if not leads() then return remember(A.op, 'stale') end",
        "",
        "test_a_leader_whose_term_is_over_resumes_nothing",
        FENCE,
    ),
    Mutation(
        "set aside: fence",
        "lua/schedule/set_aside.lua",
        "if not leads() then return remember(A.op, 'stale') end",
        "",
        "test_a_leader_whose_term_is_over_sets_nothing_aside",
        FENCE,
    ),
    Mutation(
        "set aside: comparison of the plan",
        "lua/schedule/set_aside.lua",
        "or (redis.call('HGET', K.plan, A.id) or '') ~= A.plan then",
        "then",
        "test_a_resaved_schedule_is_kept",
        COMPARE,
    ),
    Mutation(
        "set aside: comparison of the text",
        "lua/schedule/set_aside.lua",
        "(redis.call('HGET', K.schedules, A.id) or '') ~= A.definition\n  or ",
        "",
        "test_a_resaved_schedule_is_kept",
        COMPARE,
    ),
    Mutation(
        "remove: comparison of the revision",
        "lua/schedule/remove_schedule.lua",
        "if A.revision ~= '' and revision_of(A.id) ~= A.revision then",
        "if false then",
        "test_a_schedule_that_was_saved_anew_is_not_removed",
        COMPARE,
    ),
    Mutation(
        "backfill: a moment is one task",
        "lua/schedule/backfill.lua",
        "if word == 'new' then",
        "if true then",
        "test_a_moment_is_filled_once",
        DUPLICATE,
    ),
    Mutation(
        "backfill: comparison of the revision",
        "lua/schedule/backfill.lua",
        "if revision == '' or revision ~= A.base then",
        "if revision == '' then",
        "test_a_backfill_from_an_old_plan_changes_nothing",
        COMPARE,
    ),
    Mutation(
        "quota: of new schedules",
        "lua/schedule/add_schedules.lua",
        "if schedules_of(user) + added > SETTINGS.max_schedules then",
        "if false then",
        "test_a_user_has_no_more_schedules_than_allowed",
    ),
    Mutation(
        "quota: of a schedule that changes hands",
        "lua/schedule/update_schedule.lua",
        "and schedules_of(A.user) >= SETTINGS.max_schedules then",
        "and false then",
        "test_a_user_is_given_no_more_schedules_than_allowed",
    ),
    # --- history
    Mutation(
        "history: listing of what is closed",
        "lua/lib/ending.lua",
        "  list_runs({ id }, { [id] = record })\n",
        "",
        "test_runs_are_listed_from_their_end_until_they_are_dropped",
    ),
    Mutation(
        "history: listing of what is finished",
        "lua/task/finish.lua",
        "list_runs(closed, records)",
        "",
        "test_runs_are_listed_from_their_end_until_they_are_dropped",
    ),
    Mutation(
        "history: what is dropped",
        "lua/lib/ending.lua",
        "  unlist_runs(dropped, records)\n",
        "",
        "test_runs_are_listed_from_their_end_until_they_are_dropped",
    ),
    Mutation(
        "revive: only once",
        "lua/task/revive.lua",
        "if type(record.retried_as) == 'string' then",
        "if false then",
        "test_a_dead_letter_is_run_again_once",
    ),
    # --- keys that somebody else has written to
    Mutation(
        "types: probes before the first write",
        "fairqueue/link/scripts.py",
        'lines.append("probe_all()")',
        "pass",
        "test_a_key_of_a_wrong_type_stops_a_script_before_its_first_write",
    ),
    Mutation(
        "types: probes of a push",
        "lua/task/push.lua",
        "else\n  probe_all()\nend",
        "end",
        "test_a_push_looks_at_its_keys_before_its_first_write",
    ),
    # --- schedules: who made them, and how
    Mutation(
        "making: it is noted",
        "lua/schedule/add_schedules.lua",
        "if #made > 0 then redis.call('ZADD', K.changes, unpack(made)) end",
        "",
        "test_the_making_of_a_schedule_is_its_first_change",
    ),
    Mutation(
        "making: one that is paused is not due",
        "lua/schedule/add_schedules.lua",
        "elseif old then\n      redis.call('ZREM', K.due, id)\n    end",
        "end",
        "test_a_schedule_replaced_by_a_paused_one_is_not_due",
    ),
    Mutation(
        "making: an HTTP task is looked at",
        "fairqueue/http_tasks/checks.py",
        "yield Blocking(check_made, payload, policies or (), self._addresses)",
        "pass",
        "test_an_http_task_to_the_inside_is_not_stored",
    ),
    Mutation(
        "making: a schedule of HTTP tasks is looked at",
        "fairqueue/schedules/store.py",
        'yield from self.check_task(fields["name"], fields["payload"])',
        "pass",
        "test_an_http_task_to_the_inside_is_not_stored",
    ),
    # --- tenants: what one learns of others
    Mutation(
        "tenants: runs that are asked for by id",
        "fairqueue/inspection/runs.py",
        "for run in found if self._guard.actor.sees(run.tenant)]",
        "for run in found]",
        "test_runs_that_are_asked_for_by_id_are_those_of_the_own_tenant",
    ),
    Mutation(
        "tenants: an id that one gives is its own",
        "fairqueue/inspection/context.py",
        "return given if sees(check(given)) else with_tenant_prefix(tenant, given)",
        "return given",
        "test_an_id_that_a_tenant_gives_is_not_compared_with_those_of_others",
    ),
    # --- connections and processes
    Mutation(
        "connection: a server that was there may come back",
        "fairqueue/link/driver.py",
        "if isinstance(failure, NobodyThere) and not self._driver.is_known:",
        "if isinstance(failure, NobodyThere):",
        "test_a_server_that_was_there_before_is_given_time_to_come_back",
    ),
    Mutation(
        "metrics: what a process before had counted",
        "fairqueue/metrics/processes.py",
        "self._place.write(pid, _added(families, self._before))",
        "self._place.write(pid, families)",
        "test_counters_go_on_when_a_process_is_replaced",
    ),
    Mutation(
        "web: the time of a request that is half sent",
        "fairqueue/web/server.py",
        "            self._look_in(self._allowed())",
        "            pass",
        "test_a_half_sent_request_has_its_time",
    ),
    Mutation(
        "web: streams end with the server",
        "fairqueue/web/live_updates.py",
        "            if self._is_ending():\n                for viewer",
        "            if False:\n                for viewer",
        "test_streams_end_when_the_server_wants_to_end",
    ),
    Mutation(
        "web: a session alone, from nobody knows where",
        "fairqueue/web/auth.py",
        "return has_key or SESSION_COOKIE not in request.cookies",
        "return True",
        "test_a_session_alone_changes_nothing_for_who_does_not_say_where_it_comes_from",
    ),
    *(Mutation(*each) for each in (*FLOW, *PARTITIONS)),
)


def copy_tree(folder: Path) -> None:
    """Copy the files that the tests need, and compile them once for all further copies."""
    ignore = shutil.ignore_patterns("__pycache__")
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=ignore)
        else:
            shutil.copy(source, folder / name)
    compileall.compile_dir(folder, quiet=1)


def run(
    folder: Path, *arguments: str, timeout: float = TIMEOUT_S, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run Python in a copy, with the copy's own package: `-m` puts the folder first."""
    environment = {
        **os.environ,
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONPATH": str(folder),
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # there are many, most of them not needed here
        "FAIRQUEUE_MODEL_SHRINK": "0",
        **variables,
    }
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def run_tests(
    folder: Path,
    selection: Iterable[str],
    *,
    traceback: str = "line",
    timeout: float = TIMEOUT_S,
    **variables: str,
) -> subprocess.CompletedProcess[str]:
    """Run tests in a copy until the first failure."""
    options = ["-x", "-p", "xdist", "-n", "0", "-p", "pytest_timeout"]
    return run(
        folder,
        "-m",
        "pytest",
        *options,
        f"--tb={traceback}",
        *selection,
        timeout=timeout,
        **variables,
    )


def select(mutation: Mutation, with_model: bool) -> str:
    """Return the arguments of pytest for a mutation."""
    if with_model:
        return MODEL
    return (
        mutation.test if "::" in mutation.test else f"tests/proof/test_guards.py::{mutation.test}"
    )


def check_copy(folder: Path, selection: set[str]) -> None:
    """Check that the copy is imported, and that all tests pass without a mutation."""
    program = (
        "import fairqueue; from fairqueue.link.scripts import lua_folder;"
        "print(fairqueue.__file__, lua_folder(), sep='\\n')"
    )
    found = [Path(line).resolve() for line in run(folder, "-c", program).stdout.splitlines()]
    expected = [folder / "fairqueue" / "__init__.py", folder / "lua"]
    if found != [path.resolve() for path in expected]:
        sys.exit(f"the copy imports {found} instead of {expected}: nothing would be shown")
    result = run_tests(folder, sorted(selection))
    if result.returncode != 0:
        sys.exit(f"the tests fail without any mutation:\n{result.stdout}{result.stderr}")


class DoesNotApply(Exception):
    """The text of a mutation is not in its file exactly once."""


@contextmanager
def mutated(pristine: Path, mutation: Mutation) -> Iterator[Path]:
    """Create a copy without the guard. Raises DoesNotApply."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as name:
        folder = Path(name) / "tree"
        shutil.copytree(pristine, folder)
        file = folder / mutation.file
        text = file.read_text(encoding="utf-8")
        times = text.count(mutation.old)
        if times != 1:
            raise DoesNotApply(f"DOES NOT APPLY: its text is in {mutation.file} {times} times")
        file.write_text(text.replace(mutation.old, mutation.new), encoding="utf-8")
        yield folder


def try_mutation(pristine: Path, mutation: Mutation, with_model: bool) -> tuple[bool, str]:
    """Apply a mutation in a copy and run its test; return whether it was caught, and by what."""
    try:
        with mutated(pristine, mutation) as folder:
            result = run_tests(folder, [select(mutation, with_model)])
    except DoesNotApply as error:
        return False, str(error)
    except subprocess.TimeoutExpired:
        return True, "no end within the time-out"
    return judge(result)


def judge(result: subprocess.CompletedProcess[str]) -> tuple[bool, str]:
    """Whether tests have failed because of the mutation, and which."""
    failed = FAILED.search(result.stdout)
    if result.returncode == 0:
        return False, "SURVIVED"
    if result.returncode != 1 or failed is None or BROKEN.search(result.stdout):
        return False, "BREAKS THE SCRIPT: " + result.stdout.strip()[-300:]
    return True, failed.group(1)


def main() -> None:
    """Try the mutations, two at a time, and print the results."""
    if "--random" in sys.argv:
        from random_mutants import try_at_random  # it needs more than the listed ones do

        sys.exit(try_at_random(sys.argv[1:]))
    with_model = "--model" in sys.argv
    words = [word for word in sys.argv[1:] if not word.startswith("--")]
    chosen = [m for m in MUTATIONS if not words or any(word in m.name for word in words)]
    if not chosen:
        sys.exit(f"no mutation has one of {words} in its name")
    started = time.monotonic()
    with (
        tempfile.TemporaryDirectory(prefix="mutants-") as name,
        ThreadPoolExecutor(AT_ONCE) as pool,
    ):
        pristine = Path(name)
        copy_tree(pristine)
        check_copy(pristine, {select(mutation, with_model) for mutation in chosen})
        outcomes = pool.map(lambda m: try_mutation(pristine, m, with_model), chosen)
        width = max(len(mutation.name) for mutation in chosen)
        print(f"{'guard':{width}}  {'removed from':22}  caught by")
        found: list[bool] = []
        for mutation, (caught, how) in zip(chosen, outcomes, strict=True):
            found.append(caught)
            where = mutation.file.removeprefix("lua/")
            print(f"{mutation.name:{width}}  {where:22}  {how}", flush=True)
    print(f"{len(chosen)} mutations in {time.monotonic() - started:.0f} s")
    missed = found.count(False)
    print(f"mutants: {len(chosen) - missed} passed, {missed} failed")
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main()
