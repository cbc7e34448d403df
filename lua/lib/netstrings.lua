-- Write several texts as one: each with its length and a colon before it.

local function netstrings(parts)
  local texts = {}
  for i, part in ipairs(parts) do texts[i] = #part .. ':' .. part end
  return table.concat(texts)
end

local function parts_in(text)
  local parts, from = {}, 1
  while from <= #text do
    local _, last, size = string.find(text, '^(%d+):', from)
    if not last then break end
    parts[#parts + 1] = string.sub(text, last + 1, last + size)
    from = last + size + 1
  end
  return parts
end
