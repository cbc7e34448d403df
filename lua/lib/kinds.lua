-- Know the kinds of workers that claim only some names, and tell them of what they may take.
--
-- @include time
-- KEYS fair    hash  mixed: when one of these was heard of, ms
-- KEYS kinds   hash  <place>.names -> '+' or '-' and names, each in a line; <place>.state -> five
--                    numbers: seen, from, till, pause, clean; <place>.news -> users, each in a line;
--                    <list>.passes -> how often the token of a list was passed on
-- KEYS wake    list  at most one token, for a worker that is blocked: one that takes all names, or
--                    is of a kind without a place
-- KEYS wake_1  list  at most one token, for a worker of a kind at this place, or at a place 8, 16, ...
--                    behind it
-- KEYS wake_2  list  the same
-- KEYS wake_3  list  the same
-- KEYS wake_4  list  the same
-- KEYS wake_5  list  the same
-- KEYS wake_6  list  the same
-- KEYS wake_7  list  the same
-- KEYS wake_8  list  the same
--
-- A kind is what a claim says of names: workers with the same handlers are of one. It is known from
-- its first claim on, and forgotten when none has come for a while. While there is none, a script
-- spends nothing on this. `from` is where its next claim goes on in ready; `till`, when it has looked
-- at all users in vain, the moment to look again if it is told of nothing before, and `pause` how long
-- that is; `clean` is 1 if nothing was found since it began at the head.

local KINDS = 24       -- kinds that are known
local KIND_MS = 60000  -- one of which nothing is heard for so long is forgotten
local NEWS = 50        -- users of whom a kind is told by name; of more it has to go and look
local PASSES = 16      -- so many workers in a row pass on a token that was for another

-- A table, and not functions of their own: a script has room for 200 local variables.
local kinds = {}

local function leave_token(list)
  return redis.call('LLEN', list) == 0 and redis.call('LPUSH', list, '1')
end

local LISTS = { K.wake_1, K.wake_2, K.wake_3, K.wake_4, K.wake_5, K.wake_6, K.wake_7, K.wake_8 }

-- The number of the list at which the workers of a kind wait; 0: `wake`.
function kinds.list_of(kind)
  return kind.place > 0 and (kind.place - 1) % #LISTS + 1 or 0
end

-- The other kinds whose workers wait at the same list.
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

-- A worker of a kind was woken in vain. If another kind at its list has heard of something, the token
-- was for that one.
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

-- Read the kinds that were heard of lately; where those that have no place here go on.
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

-- The kinds that are about; none of them costs nothing.
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

-- Replace what a kind has heard of; not yet written.
function kinds.set_news(kind, news)
  kind.news, kind.told, kind.lines = news, nil, 0
end

-- A kind hears of users who have something for it.
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

-- Tell of tasks that can be claimed from now on, each with its user and name. `and_more`: a user who
-- may have others behind them.
function kinds.tell(list, and_more)
  for _, kind in ipairs(kinds.all()) do
    local wants, users = {}, {}
    for _, task in ipairs(list) do
      local name = task.name or ''
      if wants[name] == nil then wants[name] = kinds.wants(kind, name) end
      if wants[name] then users[#users + 1] = task.user end
    end
    -- The one that claims just now needs no token: it looks at what it has heard of.
    if #users > 0 and kind ~= kinds.own then kinds.call(kind) end
    users[#users + 1] = and_more or nil
    kinds.hear(kind, users)
  end
end

-- Wake a worker of each kind that may take tasks of a name; nil: of each kind.
function kinds.wake(name)
  for _, kind in ipairs(kinds.all()) do
    if not name or kinds.wants(kind, name) then kinds.call(kind) end
  end
end

-- The kind that claims now, from now on among those that are about. Where these are too many, the
-- others share a place at which nobody is told of anything: they look for themselves, in turns.
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

-- Write what a claim has learnt.
function kinds.save(kind)
  redis.call('HSET', K.kinds, kind.place .. '.state', string.format('%.0f %d %.0f %d %d',
    now, kind.from, kind.till, kind.pause, kind.clean and 1 or 0))
  if not kinds.mixed or math.abs(now - kinds.mixed) > KIND_MS / 6 then
    redis.call('HSET', K.fair, 'mixed', now)
  end
end
