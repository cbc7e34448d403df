-- Compare texts as Redis orders members of one score.

-- By bytes; Lua's own < goes by the locale.
local function is_before(a, b)
  for i = 1, math.min(#a, #b) do
    local x, y = string.byte(a, i), string.byte(b, i)
    if x ~= y then return x < y end
  end
  return #a < #b
end
