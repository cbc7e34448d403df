-- Keep track of the kinds of workers that claim only some names, and tell them about their tasks.
--
-- @include time
-- KEYS fair    hash  mixed: when a kind was last seen, ms
-- KEYS kinds   hash  <place>.names -> '+' or '-' and names, one per line; <place>.state -> five numbers:
--                    seen, from, till, pause, clean; <place>.news -> users, one per line;
--                    <list>.passes -> how often the token of a list was passed on
-- KEYS wake    list  at most one token, for a blocked worker that takes all names, or whose kind has no
--                    place
-- KEYS wake_1  list  at most one token, for a blocked worker of a kind at place 1, 9 or 17
-- KEYS wake_2  list  the same for places 2, 10 and 18
-- KEYS wake_3  list  the same for places 3, 11 and 19
-- KEYS wake_4  list  the same for places 4, 12 and 20
-- KEYS wake_5  list  the same for places 5, 13 and 21
-- KEYS wake_6  list  the same for places 6, 14 and 22
-- KEYS wake_7  list  the same for places 7, 15 and 23
-- KEYS wake_8  list  the same for places 8, 16 and 24
--
-- A kind is the set of names that a claim asks for; workers with the same handlers are of one kind. A kind is
-- known from its first claim on, and forgotten when no claim has come for a while. Without kinds, a script
-- spends nothing on this. `from`: where the next claim continues in ready. `till`: after a round that found
-- nothing, when to look again unless the kind is told about a task. `pause`: how long that is. `clean`: 1 if
-- nothing was found since the head of ready.

local KINDS = 24       -- places for kinds
local KIND_MS = 60000  -- a kind without a claim for this long is forgotten
local NEWS = 50        -- users that a kind is told about by name; beyond that it has to look for itself
local PASSES = 16      -- times that a token which was meant for another worker is passed on

-- A table, because a script has room for only 200 local variables.
local kinds = {}

local function leave_token(list)
  return redis.call('LLEN', list) == 0 and redis.call('LPUSH', list, '1')
end

local LISTS = { K.wake_1, K.wake_2, K.wake_3, K.wake_4, K.wake_5, K.wake_6, K.wake_7, K.wake_8 }

-- The number of the wake list of a kind; 0: `wake`.
function kinds.list_of(kind)
  return kind.place > 0 and (kind.place - 1) % #LISTS + 1 or 0
end

-- The other kinds with the same wake list.
function kinds.beside(kind)
  local found = {}
  for _, other in ipairs(kinds.all()) do
    if other ~= kind and kinds.list_of(other) == kinds.list_of(kind) then found[#found + 1] = other end
  end
  return found
end

-- Wake a worker of a kind that has a place.
function kinds.call(kind)
  local number = kinds.list_of(kind)
  if leave_token(LISTS[number]) and #kinds.beside(kind) > 0 then
    redis.call('HDEL', K.kinds, number .. '.passes')
  end
end

-- A worker of a kind was woken for nothing. If another kind with the same list has news, the token was meant
-- for that kind: pass it on.
function kinds.pass_on(kind)
  local is_for_other = false
  for _, other in ipairs(kind.place > 0 and kinds.beside(kind) or {}) do
    is_for_other = is_for_other or other.news ~= ''
  end
  if not is_for_other then return end
  local field = kinds.list_of(kind) .. '.passes'
  local passes = tonumber(redis.call('HGET', K.kinds, field) or nil) or 0
  if passes >= PASSES then return end
  redis.call('HSET', K.kinds, field, passes + 1)
  leave_token(LISTS[kinds.list_of(kind)])
end

-- Read the kinds that claimed recently. Returns where kinds without a place continue in ready.
function kinds.read()
  local fields, flat = {}, redis.call('HGETALL', K.kinds)
  for i = 1, #flat, 2 do fields[flat[i]] = flat[i + 1] end
  kinds.known = {}
  for place = 1, KINDS do
    local names = fields[place .. '.names']
    local seen, from, till, pause, clean =
      string.match(fields[place .. '.state'] or '', '^(%d+) (%d+) (%d+) (%d+) (%d)$')
    if names and seen and math.abs(now - tonumber(seen)) < KIND_MS then
      kinds.known[#kinds.known + 1] = { place = place, names = names, from = tonumber(from),
        till = tonumber(till), pause = tonumber(pause), clean = clean == '1',
        news = fields[place .. '.news'] or '' }
    end
  end
  return tonumber(string.match(fields['0.state'] or '', '^%d+ (%d+)') or nil) or 0
end

-- The kinds that claimed recently. Costs nothing if there are none.
function kinds.all()
  if not kinds.known then
    kinds.known = {}
    if kinds.mixed and math.abs(now - kinds.mixed) < KIND_MS then kinds.read() end
  end
  return kinds.known
end

function kinds.wants(kind, name)
  local is_listed = string.find(kind.names, '\n' .. name .. '\n', 1, true) ~= nil
  return is_listed == (string.byte(kind.names) == 43)
end

-- Replace the news of a kind, in memory.
function kinds.set_news(kind, news)
  kind.news, kind.told, kind.lines = news, nil, 0
end

-- Add users who have tasks for a kind to its news.
function kinds.hear(kind, users)
  if not kind.told then
    kind.told, kind.lines = {}, 0
    for line in string.gmatch(kind.news, '[^\n]+') do
      kind.told[line], kind.lines = true, kind.lines + 1
    end
  end
  local new = {}
  for _, user in ipairs(users) do
    if kind.lines > NEWS then break end
    if not kind.told[user] then
      new[#new + 1] = kind.lines == NEWS and '*' or user
      kind.told[user], kind.lines = true, kind.lines + 1
    end
  end
  if #new == 0 then return end
  kind.news = (kind.news == '' and '\n' or kind.news) .. table.concat(new, '\n') .. '\n'
  redis.call('HSET', K.kinds, kind.place .. '.news', kind.news)
end

-- Tell the kinds about tasks that can be claimed now, each with its user and name. `and_more`: a user who may
-- have more tasks after these.
function kinds.tell(list, and_more)
  for _, kind in ipairs(kinds.all()) do
    local wants, users = {}, {}
    for _, task in ipairs(list) do
      local name = task.name or ''
      if wants[name] == nil then wants[name] = kinds.wants(kind, name) end
      if wants[name] then users[#users + 1] = task.user end
    end
    -- The kind that is claiming now needs no token: it reads its news.
    if #users > 0 and kind ~= kinds.own then kinds.call(kind) end
    users[#users + 1] = and_more or nil
    kinds.hear(kind, users)
  end
end

-- Wake a worker of each kind that takes tasks of a name; nil: of every kind.
function kinds.wake(name)
  for _, kind in ipairs(kinds.all()) do
    if not name or kinds.wants(kind, name) then kinds.call(kind) end
  end
end

-- Register the kind that claims now, and return it. If all places are taken, the other kinds share place 0,
-- which gets no news: they look for themselves, in turns.
function kinds.enter(names)
  local text = string.sub(names, 1, 1) .. '\n' .. string.sub(names, 2) .. '\n'
  local shared_from = kinds.read()
  local taken = {}
  for _, kind in ipairs(kinds.known) do
    taken[kind.place] = true
    if kind.names == text then kinds.own = kind end
  end
  for place = 1, KINDS do
    if not kinds.own and not taken[place] then
      kinds.own = { place = place, names = text, from = 0, till = 0, pause = 0, clean = true,
        news = '' }
      kinds.known[#kinds.known + 1] = kinds.own
      redis.call('HSET', K.kinds, place .. '.names', text)
      redis.call('HDEL', K.kinds, place .. '.news', place .. '.passes')
    end
  end
  kinds.own = kinds.own
    or { place = 0, names = text, from = shared_from, till = 0, pause = 0, clean = false, news = '' }
  return kinds.own
end

-- Write the state of a kind after a claim.
function kinds.save(kind)
  redis.call('HSET', K.kinds, kind.place .. '.state', string.format('%.0f %d %.0f %d %d',
    now, kind.from, kind.till, kind.pause, kind.clean and 1 or 0))
  if not kinds.mixed or math.abs(now - kinds.mixed) > KIND_MS / 6 then
    redis.call('HSET', K.fair, 'mixed', now)
  end
end
