"""The guards of queues with partitions; see mutants.py.

Each is the name of the guard, its file, its text, what takes its place, and the test that must
fail.
"""

_CLAIMS = "tests/queue/test_partition_claims.py::"
_MODEL = "tests/proof/test_partition_model.py::"
_STORM = "tests/proof/test_cluster_storm.py::"
_ALL = "test_a_queue_with_partitions_does_what_the_model_says"

PARTITIONS: tuple[tuple[str, ...], ...] = (
    (
        "partitions: one that wakes has nothing stored up",
        "lua/task/claim.lua",
        "      if floor and at < floor then clocks.offset = clocks.offset + floor - at end\n",
        "",
        _CLAIMS + "test_partitions_that_wake_begin_where_the_others_are",
    ),
    (
        "partitions: one that rests is no floor",
        "fairqueue/queue/balance.py",
        "            self.at[number] = self.far[number] = float(text[1:])\n"
        "            self.busy[number] = math.inf\n",
        "            self.at[number] = self.busy[number] = self.far[number] = float(text[1:])\n",
        _CLAIMS + "test_partitions_that_wake_begin_where_the_others_are",
    ),
    (
        "partitions: a pause is a rest",
        "lua/lib/fair.lua",
        "  if fair.shift and in_root(seat) then level().note_start(K.ready) end\n",
        "",
        _CLAIMS + "test_a_partition_whose_tenants_were_paused_begins_where_the_others_are",
    ),
    (
        "partitions: what somebody owes is not forgotten",
        "lua/lib/fair.lua",
        "  if fair.shift and not of_all then return end\n",
        "",
        _CLAIMS + "test_a_tenant_that_is_alone_and_comes_again_and_again_gets_its_share",
    ),
    (
        "partitions: who owes something does not owe more",
        "lua/task/claim.lua",
        "      local at = math.max(ring.first, clocks.clock) + clocks.offset\n",
        "      local at = clocks.clock + clocks.offset\n",
        _CLAIMS + "test_a_tenant_that_is_alone_and_comes_again_and_again_gets_its_share",
    ),
    (
        "partitions: how far those are that rest",
        "fairqueue/queue/balance.py",
        '            mark, floor = "~", self._turns.farthest()\n',
        '            mark = "~"\n',
        _CLAIMS + "test_without_others_that_serve_the_floor_is_how_far_they_were",
    ),
    (
        "partitions: a lane draws no ordinary turns",
        "lua/lib/serving.lua",
        "      if entry and entry.tag + ring.clocks.offset > this.floor then return nil end\n",
        "",
        _CLAIMS + "test_ordinary_tasks_gain_nothing_from_critical_ones_beside_them",
    ),
    (
        "partitions: what nobody wants is no level",
        "lua/lib/level.lua",
        "    local at = math.max(tag or 0, clocks.clock) + shift\n",
        "    local at = (tag or clocks.clock) + shift\n",
        _CLAIMS + "test_tasks_that_no_worker_takes_do_not_hold_their_partition_back",
    ),
    (
        "partitions: what nobody wants keeps no clock",
        "lua/task/claim.lua",
        "    if floor and (is_empty or #this.taken.ids == 0) and floor",
        "    if floor and is_empty and floor",
        _CLAIMS + "test_tasks_that_no_worker_takes_do_not_hold_their_partition_back",
    ),
    (
        "partitions: one that was away rests",
        "fairqueue/queue/balance.py",
        '            mark = "!"\n',
        '            mark = ""\n',
        _CLAIMS + "test_a_partition_that_was_out_of_reach_begins_where_the_others_are",
    ),
    (
        "partitions: what is due comes first",
        "fairqueue/queue/balance.py",
        "                if known.due_at <= now and known.down_until <= now and i not in tried:\n",
        "                if False and i not in tried and known:\n",
        _CLAIMS + "test_what_becomes_due_in_an_idle_partition_is_offered_though_others_are_busy",
    ),
    (
        "partitions: more that waits is not due",
        "fairqueue/queue/balance.py",
        "math.inf if has_more and hint <= 0 else time",
        "math.inf if False and hint <= 0 else time",
        _CLAIMS + "test_where_something_is_due_comes_first",
    ),
    (
        "partitions: claims that come too late take less",
        "lua/task/claim.lua",
        "    this.limit = math.ceil(this.limit / LATE)\n",
        "",
        _CLAIMS + "test_a_claim_that_comes_too_late_for_its_turn_takes_less",
    ),
    (
        "partitions: an id that two have is not guessed",
        "fairqueue/link/partitions.py",
        "    if len(found) > 1:\n        raise ambiguous(",
        "    if len(found) > 99:\n        raise ambiguous(",
        _CLAIMS + "test_an_id_of_two_tenants_is_not_guessed",
    ),
    (
        "partitions: a claim that finds nothing has asked all",
        "fairqueue/queue/whole_claims.py",
        "            elif claim.claims or has_entered:\n",
        "            elif True:\n",
        _MODEL + _ALL,
    ),
    (
        "partitions: another number is refused",
        "fairqueue/link/whole.py",
        "    if stored != partitions:\n",
        "    if stored > 256:\n",
        _MODEL + _ALL,
    ),
    (
        "partitions: the checker counts what is gone",
        "faults/cluster.py",
        "    verdict.lost = len(told.pushed.keys() - finished)\n",
        "    verdict.lost = 0\n",
        _STORM + "test_what_is_lost_doubled_or_misplaced_is_noticed",
    ),
)
