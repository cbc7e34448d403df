-- Compare strings in the order of members with the same score.

-- By bytes: the operator < of Lua depends on the locale.
local function is_before(a, b)
  for i = 1, math.min(#a, #b) do
    local x, y = string.byte(a, i), string.byte(b, i)
    if x ~= y then return x < y end
  end
  return #a < #b
end
