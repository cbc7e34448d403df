-- Keep the starts that this partition may make of limits whose rate all partitions share.
--
-- LAZY
-- @include backlog
-- KEYS paced       hash  \6 gate -> units of cost that may start, until when, when to ask for more, when that was asked
--                        last, number of the last question and of the last answer, cost of the task that was asked for,
--                        what attempts have cost more than they declared and the home was not told, the operation that
--                        had set the limits
-- KEYS gate_times  zset  gate -> when to look at it, ms
--
-- The rate itself is kept by the home of the gate, as in a queue without partitions; see settings/share_starts. It
-- gives some starts to whoever asks, and they lapse soon after they were asked for, by the clock of this partition. So
-- those that are not used are lost, and none is used much later than it was counted.

local starts = {}

local ASKED = 20        -- gates that one answer lists
local ASK_AGAIN = 250   -- ms until a partition asks again, if nobody has answered
local KEPT = 1000       -- ms after the question in which starts can be used

local own = {}
local asked, names = {}, {}

function starts.of(gate)
  if own[gate] then return own[gate] end
  local text = redis.call('HGET', K.paced, '\6' .. gate) or ''
  local units, ends, later, since, number, answered, need, more, set_by =
    string.match(text, '^(%S+) (%d+) (%d+) (%d+) (%d+) (%d+) (%S+) (%S+) (%S*)$')
  local mine = { units = tonumber(units) or 0, ends = tonumber(ends) or 0, later = tonumber(later) or 0,
    since = tonumber(since) or 0, number = tonumber(number) or 0, answered = tonumber(answered) or 0,
    need = tonumber(need) or 1, more = tonumber(more) or 0, set_by = set_by or '' }
  if mine.ends <= now or mine.since > now then mine.units = 0 end
  own[gate] = mine
  return mine
end

local function save(gate, mine)
  redis.call('HSET', K.paced, '\6' .. gate, string.format('%s %.0f %.0f %.0f %.0f %.0f %s %s %s', text_of(mine.units),
    mine.ends, mine.later, mine.since, mine.number, mine.answered, text_of(mine.need), text_of(mine.more), mine.set_by))
end

-- Whether a task of some cost may start now.
function starts.allow(gate, cost)
  return starts.of(gate).units + 0.001 >= cost
end

-- How many held tasks may start, roughly.
function starts.room(gate)
  local mine = starts.of(gate)
  if mine.units + 0.001 < mine.need then return 0 end
  return math.max(1, math.floor(mine.units / mine.need + 0.001))
end

-- A task starts.
function starts.spend(gate, cost)
  local mine = starts.of(gate)
  mine.units = math.max(0, mine.units - cost)
  save(gate, mine)
end

-- An attempt has cost more than it declared, or less.
function starts.charge(gate, more)
  local mine = starts.of(gate)
  mine.more = mine.more + more
  save(gate, mine)
end

local function ask(gate, cost)
  if not asked[gate] then names[#names + 1] = gate end
  asked[gate] = (asked[gate] or 0) + cost
end

-- Whether to ask: not before the time that the home has said, unless the limits or the clock have changed.
local function is_time(mine, limits)
  return mine.later <= now or mine.since > now or mine.set_by ~= limits.set_by
end

-- A task is held because its rate allows no more: ask the home.
function starts.want(gate, limits, cost)
  local mine = starts.of(gate)
  local is_more = mine.need < cost
  if not asked[gate] then mine.need = cost end
  if is_time(mine, limits) or is_more then ask(gate, cost) end
end

-- When to look at a gate again: ms, or nil. `is_short`: tasks are held that the rate does not allow.
function starts.look(gate, limits, is_short)
  local mine = starts.of(gate)
  if mine.more ~= 0 or (is_short and is_time(mine, limits)) then
    ask(gate, is_short and mine.need or 0)
    return now
  end
  return is_short and mine.later or nil
end

-- Add what clients have to carry to the homes of gates to a list: gate, the cost of the next task, that of all that
-- wait (about), what attempts have cost more, number of the question, the time here, the operation that has set the
-- limits. `limits_of`: the limits of a gate; nil if it is not shared any more.
function starts.answer(list, limits_of)
  for _, gate in ipairs(names) do
    local limits = limits_of(gate)
    if limits and #list >= ASKED then
      redis.call('ZADD', K.gate_times, now, gate)
    elseif limits then
      local mine, most = starts.of(gate), asked[gate]
      local first = most > 0 and mine.need or 0
      mine.number, mine.since, mine.later, mine.set_by = mine.number + 1, now, now + ASK_AGAIN, limits.set_by
      list[#list + 1] = { gate, first, math.max(most, first > 0 and redis.call('ZCARD', K.held) or 0), mine.more,
        mine.number, now, limits.set_by }
      mine.more = 0
      save(gate, mine)
      if first > 0 then
        redis.call('ZADD', K.gate_times, mine.later, gate)
      else
        redis.call('ZREM', K.gate_times, gate)
      end
    end
  end
end

-- Take starts that the home has given as the answer to a question. `wait`: ms until it gives more.
function starts.take(gate, given)
  local mine = starts.of(gate)
  if given.number <= mine.answered then return end
  mine.answered = given.number
  local ends = given.asked + KEPT
  if ends > now and given.asked <= now then
    mine.units, mine.ends = mine.units + given.units, ends
  end
  mine.later = now + given.wait
  save(gate, mine)
end

-- Forget a gate with nothing to start.
function starts.drop_idle(gate)
  local mine = starts.of(gate)
  if mine.more == 0 and mine.ends <= now then redis.call('HDEL', K.paced, '\6' .. gate) end
end

return starts
