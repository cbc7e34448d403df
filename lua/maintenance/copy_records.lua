-- Copy settings, credentials and similar records from another queue.
--
-- @include backlog repartition
-- @lazy barrier
-- KEYS settings         hash  name -> value
-- KEYS limits           hash  name, or \3 and a key or a pattern -> limits, JSON; \4 -> the prefixes of patterns
-- KEYS uniques          hash  owner or tenant NUL key -> who has it; here those that no task has, only a window
-- KEYS expiring         zset  \1 and a field of uniques -> end of its window, ms
-- KEYS credentials      hash  id -> credential, JSON
-- KEYS replies          hash  SHA-256 of an idempotency key -> reply
-- KEYS user_names       zset  owners and tenants with settings, all scores 0
-- KEYS tenant_users     zset  tenant NUL user, all scores 0
-- KEYS user_tenants     zset  user NUL tenant, all scores 0
-- KEYS credential_ends  zset  id -> when it expires
-- KEYS api_keys         zset  id of a key -> when it was created
-- KEYS sessions         zset  id of a session or login -> when it was created
-- KEYS audit            zset  time-number-id NUL JSON NUL JSON, all scores 0
-- KEYS notices          zset  messages for people -> when to return them
-- ARGV old_layout  int  the layout of the other queue
-- ARGV ...         records, a few hundred at most
-- ROW key    text  the name of the key
-- ROW field  text  field of a hash, or member of a sorted set
-- ROW value  text  value, or score
--
-- What this queue has already stays as it is, so a repeated call changes nothing.
--
-- Returns 'copied', or 'taken over' with nothing changed, if another process moves the queue.

local HASHES = { settings = K.settings, limits = K.limits, users = K.users, throttle = K.throttle,
  averages = K.averages, credentials = K.credentials, replies = K.replies, uniques = K.uniques }
local SETS = { user_names = K.user_names, tenant_users = K.tenant_users, user_tenants = K.user_tenants,
  credential_ends = K.credential_ends, api_keys = K.api_keys, sessions = K.sessions, audit = K.audit,
  notices = K.notices, expiring = K.expiring }

if not is_mover('to') then return 'taken over' end
if tonumber(A.old_layout) > 1 then need_layout_2() end
local is_ready = false
for i = FIRST, #ARGV, ROW do
  local hash, set = HASHES[R.key[i]], SETS[R.key[i]]
  if hash then
    if redis.call('HEXISTS', hash, R.field[i]) == 0 then redis.call('HSET', hash, R.field[i], R.value[i]) end
  elseif set then
    redis.call('ZADD', set, 'NX', R.value[i], R.field[i])
  end
  if hash == K.users then
    user_cache[R.field[i]] = nil
    is_ready = review(R.field[i]) or is_ready
  end
end
if is_ready then wake_worker() end
save_fair()
mark_layout()
return 'copied'
