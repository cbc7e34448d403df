-- Keep users and tenants in the order of a ring: by their virtual tags, then by their seats.
--
-- A unit is a user or a tenant; see lib/serving. A claim reads units in this order, and puts back those that it has
-- served with a later tag. What was read
-- stays a sorted list; what comes back goes into a binary heap. More units are read when the list is used up.

-- A table, because a script has room for only 200 local variables.
local turns = {}

-- `read` adds more entries to the list that it gets, and returns false if there are none.
function turns.new(read)
  return { sorted = {}, at = 1, heap = {}, read = read }
end

turns.NONE = turns.new(nil)  -- for rings without units in the CRITICAL lane

function turns.before(a, b)
  if a.tag ~= b.tag then return a.tag < b.tag end
  return a.unit.seat < b.unit.seat
end

function turns.push(list, tag, unit)
  local entries, entry = list.heap, { tag = tag, unit = unit }
  local i = #entries + 1
  while i > 1 do
    local parent = math.floor(i / 2)
    if not turns.before(entry, entries[parent]) then break end
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
    if child < size and turns.before(entries[child + 1], entries[child]) then child = child + 1 end
    if not turns.before(entries[child], last) then break end
    entries[i] = entries[child]
    i = child
  end
  entries[i] = last
  return top
end

-- The next entry that was read and is not taken out yet; nil past the end.
local function next_read(list)
  while list.at > #list.sorted and list.read do
    if not list.read(list) then list.read = nil end
  end
  return list.sorted[list.at]
end

-- Take out the first entry: { tag =, unit = }, or nil.
function turns.pop(list)
  local first, back = next_read(list), list.heap[1]
  if first and not (back and turns.before(back, first)) then
    list.at = list.at + 1
    return first
  end
  return back and pop_top(list.heap)
end

-- The first entry that is still valid, which stays where it is; nil if there is none.
function turns.peek(list, is_valid)
  while true do
    local first, back = next_read(list), list.heap[1]
    local from_heap = back and not (first and turns.before(first, back))
    local entry = from_heap and back or first
    if not entry or is_valid(entry) then return entry end
    if from_heap then pop_top(list.heap) else list.at = list.at + 1 end
  end
end
