-- Keep track of the kinds of workers that claim only some names, and wake workers.
--
-- LAZY UNLESS fair.mixed or fair.pools
-- @include wake owners fair
-- KEYS fair    hash  mixed: when a kind was last seen, ms
-- KEYS kinds   hash  <place>.names -> '+' or '-' and names, one per line, then the pools if they are not only
--                    the default one, each between two \3; <place>.state -> five numbers: seen, from, till,
--                    pause, clean; <place>.news -> seats, one per line; <list>.passes -> how often the token
--                    of a list was passed on
-- KEYS wake_1  list  at most one token, for a blocked worker of a kind at place 1, 9 or 17
-- KEYS wake_2  list  the same for places 2, 10 and 18
-- KEYS wake_3  list  the same for places 3, 11 and 19
-- KEYS wake_4  list  the same for places 4, 12 and 20
-- KEYS wake_5  list  the same for places 5, 13 and 21
-- KEYS wake_6  list  the same for places 6, 14 and 22
-- KEYS wake_7  list  the same for places 7, 15 and 23
-- KEYS wake_8  list  the same for places 8, 16 and 24
--
-- A kind is the set of names and pools that a claim asks for; workers with the same handlers are of one kind. A
-- kind is known from its first claim on, and forgotten when no claim has come for a while. Without kinds, a
-- script spends nothing on this. `from`: where the next claim continues in ready. `till`: after a round that
-- found nothing, when to look again unless the kind is told about a task. `pause`: how long that is. `clean`: 1
-- if nothing was found since the head of ready.
--
-- Workers that take all names wait at `wake`, or at the list of their pool. Pools get lists from the last one on,
-- by their number in `pools` of `fair`; kinds from the first one on.

local KINDS = 24       -- places for kinds
local KIND_MS = 60000  -- a kind without a claim for this long is forgotten
local NEWS = 50        -- seats that a kind is told about by name; beyond that it has to look for itself

local kinds = {}

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

-- The number of the wake list of a pool.
function kinds.list_of_pool(pool)
  local number = 0
  for each in string.gmatch(fair.pools or '', '[^\n]+') do
    number = number + 1
    if each == pool then return #LISTS - (number - 1) % #LISTS end
  end
  return 0
end

-- Wake a worker of a pool that takes all names.
function kinds.wake_pool(pool)
  local number = kinds.list_of_pool(pool)
  if number == 0 then return end
  if leave_token(LISTS[number]) then redis.call('HDEL', K.kinds, number .. '.passes') end
end

-- Wake a worker of each pool but the default one.
function kinds.wake_pools()
  for pool in string.gmatch(fair.pools or '', '[^\n]+') do kinds.wake_pool(pool) end
end

-- Wake a worker of a kind that has a place.
function kinds.call(kind)
  local number = kinds.list_of(kind)
  if leave_token(LISTS[number]) and (fair.pools or #kinds.beside(kind) > 0) then
    redis.call('HDEL', K.kinds, number .. '.passes')
  end
end

-- Whether another kind or another pool with the same wake list may have tasks.
local function is_for_other(number, kind, pools)
  for _, other in ipairs(kinds.all()) do
    if other ~= kind and kinds.list_of(other) == number and other.news ~= '' then return true end
  end
  for pool in string.gmatch(fair.pools or '', '[^\n]+') do
    if not pools[pool] and kinds.list_of_pool(pool) == number
      and not rings().is_empty(K.ready, '\3' .. pool) then return true end
  end
  return false
end

-- A worker that waits at a list was woken for nothing. If the token may have been meant for another kind or
-- pool with the same list, pass it on. `kind`: nil for a worker that takes all names; `pools`: its pools.
function kinds.pass_on(number, kind, pools)
  if number == 0 or not is_for_other(number, kind, pools) then return end
  local field = number .. '.passes'
  local passes = tonumber(redis.call('HGET', K.kinds, field) or nil) or 0
  if passes >= PASSES then return end
  redis.call('HSET', K.kinds, field, passes + 1)
  leave_token(LISTS[number])
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
    if fair.mixed and math.abs(now - fair.mixed) < KIND_MS then kinds.read() end
  end
  return kinds.known
end

-- Whether a kind takes tasks of a name in a pool; nil: the default pool.
function kinds.wants(kind, name, pool)
  local is_of_pool = not pool
  if string.find(kind.names, '\3', 1, true) then
    is_of_pool = string.find(kind.names, '\3' .. (pool or 'default') .. '\3', 1, true) ~= nil
  end
  local is_listed = string.find(kind.names, '\n' .. name .. '\n', 1, true) ~= nil
  return is_of_pool and is_listed == (string.byte(kind.names) == 43)
end

-- Replace the news of a kind, in memory.
function kinds.set_news(kind, news)
  kind.news, kind.told, kind.lines = news, nil, 0
end

-- Add seats that have tasks for a kind to its news.
function kinds.hear(kind, seats)
  if not kind.told then
    kind.told, kind.lines = {}, 0
    for line in string.gmatch(kind.news, '[^\n]+') do
      kind.told[line], kind.lines = true, kind.lines + 1
    end
  end
  local new = {}
  for _, seat in ipairs(seats) do
    if kind.lines > NEWS then break end
    if not kind.told[seat] then
      new[#new + 1] = kind.lines == NEWS and '*' or seat
      kind.told[seat], kind.lines = true, kind.lines + 1
    end
  end
  if #new == 0 then return end
  kind.news = (kind.news == '' and '\n' or kind.news) .. table.concat(new, '\n') .. '\n'
  redis.call('HSET', K.kinds, kind.place .. '.news', kind.news)
end

-- Tell the kinds about tasks that can be claimed now, each with its seat and label. `and_more`: a seat that may
-- have more tasks after these.
function kinds.tell(list, and_more)
  for _, kind in ipairs(kinds.all()) do
    local wants, seats = {}, {}
    for _, task in ipairs(list) do
      local name, pool = name_in_label(task.label or ''), string.match(task.seat, '\3(.*)$')
      local what = pool and name .. '\3' .. pool or name
      if wants[what] == nil then wants[what] = kinds.wants(kind, name, pool) end
      if wants[what] then seats[#seats + 1] = task.seat end
    end
    -- The kind that is claiming now needs no token: it reads its news.
    if #seats > 0 and kind ~= kinds.own then kinds.call(kind) end
    seats[#seats + 1] = and_more or nil
    kinds.hear(kind, seats)
  end
end

-- Wake a worker of each kind that takes tasks of a name in a pool; without a name: of every kind.
function kinds.wake(name, pool)
  for _, kind in ipairs(kinds.all()) do
    if not name or kinds.wants(kind, name, pool) then kinds.call(kind) end
  end
end

-- Register the kind that claims now, and return it. If all places are taken, the other kinds share place 0,
-- which gets no news: they look for themselves, in turns.
function kinds.enter(names, pools)
  local text = string.sub(names, 1, 1) .. '\n' .. string.sub(names, 2) .. '\n'
  if pools ~= '' then text = text .. '\3' .. string.gsub(pools, '\n', '\3') .. '\3' end
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
  if not fair.mixed or math.abs(now - fair.mixed) > KIND_MS / 6 then
    redis.call('HSET', K.fair, 'mixed', now)
  end
end

return kinds
