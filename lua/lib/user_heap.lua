-- A line of users by virtual tag, then by name: the order that a sorted set has.
--
-- Those who were read from one stand sorted; those who come back after a serve go into a heap.

local function new_line()
  return { sorted = {}, at = 1, heap = {} }
end

local function before(a, b)
  if a.tag ~= b.tag then return a.tag < b.tag end
  return a.user.name < b.user.name
end

local function join_line(line, tag, user)
  local heap, entry = line.heap, { tag = tag, user = user }
  local i = #heap + 1
  while i > 1 do
    local parent = math.floor(i / 2)
    if not before(entry, heap[parent]) then break end
    heap[i] = heap[parent]
    i = parent
  end
  heap[i] = entry
end

local function pop_heap(heap)
  local top, last = heap[1], table.remove(heap)
  local size, i = #heap, 1
  if size == 0 then return top end
  while 2 * i <= size do
    local child = 2 * i
    if child < size and before(heap[child + 1], heap[child]) then child = child + 1 end
    if not before(heap[child], last) then break end
    heap[i] = heap[child]
    i = child
  end
  heap[i] = last
  return top
end

-- Take the first out of the line: { tag, user }, or nil.
local function next_in_line(line)
  local first, back = line.sorted[line.at], line.heap[1]
  if first and not (back and before(back, first)) then
    line.at = line.at + 1
    return first
  end
  return back and pop_heap(line.heap)
end

-- Those who were read are as many as were asked for: behind the last there may be others.
local function cut_line(line, want)
  if #line.sorted >= want then line.cut = line.sorted[#line.sorted] end
end

-- True if somebody who was not read may come before this one.
local function is_beyond(line, entry)
  return line.cut ~= nil and before(line.cut, entry)
end
