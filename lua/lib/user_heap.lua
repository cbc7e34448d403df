-- Users in the order of their virtual tags, then of their names: the order of a sorted set.
--
-- A claim reads users in this order, and puts back those that it has served with a later tag. What was
-- read stays a sorted list; what comes back goes into a binary heap.

-- A table, because a script has room for only 200 local variables.
local heap = {}

function heap.new()
  return { sorted = {}, at = 1, heap = {} }
end

function heap.before(a, b)
  if a.tag ~= b.tag then return a.tag < b.tag end
  return a.user.name < b.user.name
end

function heap.push(users, tag, user)
  local entries, entry = users.heap, { tag = tag, user = user }
  local i = #entries + 1
  while i > 1 do
    local parent = math.floor(i / 2)
    if not heap.before(entry, entries[parent]) then break end
    entries[i] = entries[parent]
    i = parent
  end
  entries[i] = entry
end

local function pop_top(entries)
  local top, last = entries[1], table.remove(entries)
  local size, i = #entries, 1
  if size == 0 then return top end
  while 2 * i <= size do
    local child = 2 * i
    if child < size and heap.before(entries[child + 1], entries[child]) then child = child + 1 end
    if not heap.before(entries[child], last) then break end
    entries[i] = entries[child]
    i = child
  end
  entries[i] = last
  return top
end

-- Take out the first entry: { tag =, user = }, or nil.
function heap.pop(users)
  local first, back = users.sorted[users.at], users.heap[1]
  if first and not (back and heap.before(back, first)) then
    users.at = users.at + 1
    return first
  end
  return back and pop_top(users.heap)
end

-- Remember the last user that was read, if as many were read as were asked for: there may be more.
function heap.cut(users, want)
  if #users.sorted >= want then users.cut = users.sorted[#users.sorted] end
end

-- True if a user who was not read may come before this entry.
function heap.is_beyond(users, entry)
  return users.cut ~= nil and heap.before(users.cut, entry)
end
