-- Change the limits of all tasks of a name, of a key, or of keys that begin with a text.
--
-- @include backlog replay
-- @lazy gates barrier
-- KEYS limits  hash  name, or \3 and a key or a pattern -> limits, JSON; \4 -> the prefixes of patterns
-- KEYS paced   hash  name or key -> when its rate is free of debt, ms
-- ARGV op      text  random id of this operation
-- ARGV field   text  name of the tasks; or \3 and a key, or a prefix and '*'
-- ARGV limits  text  slots, rate, timeout_ms, ordered, through_retries, scope, JSON; empty: no limits
-- ARGV after   text  continue with the limits after this one, or with the places after \1; empty: begin
--
-- Limits of a name take precedence over those that workers declare, until they are removed. The caller repeats
-- the call with the answer as `after` until it is empty: only then all held tasks that may start come back, and have
-- their places at a limit that is ordered from now on.
--
-- Returns where to continue, or '' at the end; or 'patterns', with nothing changed, if there are too many.

local MOST_PATTERNS = 100  -- at most: each task with a key may be compared with all
local LOOKED_AT = 1000   -- limits with held tasks that one call looks at
local PLACED = 2000      -- held tasks, or 20 users, that one call gives their places at an ordered limit

local prefix = string.match(A.field, '^\3(.*)%*$')

-- Add the prefix of a pattern to the list of prefixes, or remove it. Returns false if there are too many.
local function list_prefix(is_set)
  local list, number = '', 0
  for each in string.gmatch(redis.call('HGET', K.limits, '\4') or '', '([^\n]*)\n') do
    if each ~= prefix then list, number = list .. each .. '\n', number + 1 end
  end
  if is_set then list, number = list .. prefix .. '\n', number + 1 end
  if number > MOST_PATTERNS then return false end
  if list == '' then redis.call('HDEL', K.limits, '\4') else redis.call('HSET', K.limits, '\4', list) end
  return true
end

local before = first_answer(A.op)
if before then return before end
gates()
if A.after == '' then
  if string.byte(A.field) == 3 then need_layout_2() end
  if prefix and not list_prefix(A.limits ~= '') then return 'patterns' end
  if A.limits == '' then
    redis.call('HDEL', K.limits, A.field)
    redis.call('HDEL', K.paced, A.field)
  else
    -- In a partition, permits that were given under other limits count no more.
    local is_partition = string.find(K.limits, '^{[^:}]*:[^:}]*:')
    local text = is_partition and string.sub(A.limits, 1, -2) .. ',"op":' .. cjson.encode(A.op) .. '}' or A.limits
    redis.call('HSET', K.limits, A.field, text)
    -- Reduce the debt from a lower rate now, not when the next task is claimed.
    local rate = gates().parse(A.limits).rate
    if rate and not prefix then free_at(K.paced, A.field, rate) end
  end
end
-- The limits that are concerned: of the name, or of the key with and without a tenant, or of all keys.
local first = prefix and '\3' .. prefix or A.field
local beyond = first .. (prefix and '\255' or '\7')
local placed = string.match(A.after, '^\1(.*)$')
-- Without limits of its own, a key has those of a pattern, which may be ordered.
local may_order = A.limits == '' or gates().parse(A.limits).ordered
if placed or (A.after == '' and may_order) then
  local following = gates().place_held(first, beyond, placed or '', PLACED)
  if following ~= '' then return remember(A.op, '\1' .. following) end
end
local last = gates().look_at(not placed and A.after ~= '' and A.after .. '\7' or first, beyond, LOOKED_AT)
wake_all()
mark_layout()
return remember(A.op, last or '')
