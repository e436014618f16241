#!lua name=dilaserve
-- Every change of a request, atomic on the server. The record, its stream, the active set and the
-- term of one shard share a hash tag, so that one function may touch all four in a cluster.
-- Canvas and prompt are int32, little endian; -1 stands for a masked position.

-- Keys that others have damaged count as missing: one bad record must not stop the rest.

local MASKED = '\255\255\255\255'
local TERMINAL = { done = true, cancelled = true, failed = true }

-- The number in a string; 0 for false, nil and whatever is none.
local function number(text)
  return tonumber(text or '0') or 0
end

-- Fields of a record; none where the key holds no hash.
local function read(record, ...)
  local stored = redis.pcall('HMGET', record, ...)
  return stored.err and {} or stored
end

-- Refuse a scheduler that has been replaced; remember the highest term seen.
local function is_stale(term_key, term)
  local stored = number(redis.call('GET', term_key))
  if tonumber(term) < stored then return true end
  if tonumber(term) > stored then redis.call('SET', term_key, term) end
  return false
end

local function new(keys, args)
  local record, expire_ms, n_output = keys[1], args[1], tonumber(args[2])
  if redis.call('EXISTS', record) == 1 then return 0 end
  redis.call('HSET', record, 'state', 'new', 'epoch', 0, 'term', 0, 'owner', '', 'attempts', 0,
    'step', 0, 'canvas', string.rep(MASKED, n_output), unpack(args, 3))
  redis.call('PEXPIRE', record, expire_ms)
  return 1
end

local function placement(record)
  local stored = read(record, 'state', 'epoch', 'step', 'owner', 'attempts')
  return {
    state = stored[1],
    epoch = number(stored[2]),
    step = number(stored[3]),
    owner = stored[4] or '',
    attempts = number(stored[5]),
  }
end

local function answer(outcome, at)
  return { outcome, at.epoch, at.step, at.owner, at.attempts }
end

local function admit(keys, args)
  local record, active, term_key = keys[1], keys[2], keys[3]
  local id, term, owner, epoch = args[1], args[2], args[3], tonumber(args[4])
  local stale, at = is_stale(term_key, term), placement(record)
  if stale then return answer('stale_term', at) end
  if not at.state then return answer('missing', at) end
  if TERMINAL[at.state] then return answer('terminal', at) end
  if at.state ~= 'new' then return answer('already', at) end
  at.epoch, at.owner = epoch, owner
  redis.call('HSET', record, 'state', 'active', 'epoch', epoch, 'term', term, 'owner', owner)
  redis.call('PERSIST', record)
  redis.call('SADD', active, id)
  return answer('admitted', at)
end

local function reassign(keys, args)
  local record, term_key = keys[1], keys[2]
  local term, owner, expected_epoch = args[1], args[2], tonumber(args[3])
  local min_epoch, died = tonumber(args[4]), tonumber(args[5])
  local stale, at = is_stale(term_key, term), placement(record)
  if stale then return answer('stale_term', at) end
  if not at.state then return answer('missing', at) end
  if TERMINAL[at.state] then return answer('terminal', at) end
  if at.state == 'new' or at.epoch ~= expected_epoch then return answer('conflict', at) end
  at.epoch, at.owner = math.max(at.epoch, min_epoch - 1) + 1, owner
  at.attempts = at.attempts + died
  redis.call('HSET', record, 'epoch', at.epoch, 'term', term, 'owner', owner,
    'attempts', at.attempts)
  return answer('reassigned', at)
end

-- Wall-clock seconds since the epoch, by the server's clock.
local function wall_clock()
  local time = redis.call('TIME')
  return string.format('%s.%06d', time[1], tonumber(time[2]))
end

local function finish(record, stream, active, id, retention_ms, ...)
  redis.call('HSET', record, 'ended_s', wall_clock(), ...)
  redis.call('SREM', active, id)
  redis.call('PEXPIRE', record, retention_ms)
  redis.call('PEXPIRE', stream, retention_ms)
end

-- The state of a record. One that is missing is struck off the active set, too.
local function state_of(record, active, id)
  local state = read(record, 'state')[1]
  if not state then redis.call('SREM', active, id) end
  return state
end

local function fail(keys, args)
  local record, stream, active, term_key = keys[1], keys[2], keys[3], keys[4]
  local id, retention_ms, term, why = args[1], args[2], args[3], args[4]
  if is_stale(term_key, term) then return 'stale_term' end
  local state = state_of(record, active, id)
  if not state then return 'missing' end
  if TERMINAL[state] then return 'terminal' end
  finish(record, stream, active, id, retention_ms, 'state', 'failed', 'term', term, 'error', why)
  return 'failed'
end

local function cancel(keys, args)
  local record, stream, active = keys[1], keys[2], keys[3]
  local id, retention_ms, why = args[1], args[2], args[3]
  local state = state_of(record, active, id)
  if not state then return 'missing' end
  if TERMINAL[state] then return 'terminal' end
  finish(record, stream, active, id, retention_ms, 'state', 'cancelled', 'error', why)
  return 'cancelled'
end

local function unpack_int32(bytes, index)
  return (struct.unpack('<i4', bytes, 4 * index + 1))
end

-- The stored canvas with this step's tokens in it; or nil and the answer: 'fenced' if one of the
-- positions is committed, 'outside' (a bug of the worker) if the canvas does not reach so far.
local function add_tokens(stored, positions, tokens)
  local parts, at = {}, 1
  for index = 0, #positions / 4 - 1 do
    local from = 4 * unpack_int32(positions, index) + 1
    if from > #stored then return nil, 'outside' end
    if string.sub(stored, from, from + 3) ~= MASKED then return nil, 'fenced' end
    parts[#parts + 1] = string.sub(stored, at, from - 1)
    parts[#parts + 1] = string.sub(tokens, 4 * index + 1, 4 * index + 4)
    at = from + 4
  end
  parts[#parts + 1] = string.sub(stored, at)
  return table.concat(parts)
end

-- What the whole canvas has and the stored one lacks, as three JSON lists; or nil and the answer.
-- A lost step's confidences are lost with it: 0.0.
local function missing_tokens(stored, canvas, step_positions, step_confidences)
  if #canvas ~= #stored then return nil, 'outside' end
  local known, index = {}, 0
  for confidence in string.gmatch(step_confidences, '[^%[%],]+') do
    known[unpack_int32(step_positions, index)] = confidence
    index = index + 1
  end
  local positions, tokens, confidences = {}, {}, {}
  for position = 0, #stored / 4 - 1 do
    local was = string.sub(stored, 4 * position + 1, 4 * position + 4)
    local now = string.sub(canvas, 4 * position + 1, 4 * position + 4)
    if was ~= now then
      if was ~= MASKED then return nil, 'fenced' end
      positions[#positions + 1] = position
      tokens[#tokens + 1] = unpack_int32(canvas, position)
      confidences[#confidences + 1] = known[position] or '0.0'
    end
  end
  local function list(items) return '[' .. table.concat(items, ',') .. ']' end
  return list(positions), list(tokens), list(confidences)
end

-- A stream that takes no further entry is not this record's: the record is the truth.
local function append(stream, ...)
  if redis.pcall('XADD', stream, ...).err then
    redis.call('DEL', stream)
    redis.call('XADD', stream, ...)
  end
end

local function commit(keys, args)
  local record, stream, active = keys[1], keys[2], keys[3]
  local id, retention_ms, epoch, step = args[1], args[2], args[3], tonumber(args[4])
  local block, kind, threshold, worker, latency_ms = args[5], args[6], args[7], args[8], args[9]
  local positions, tokens, confidences = args[10], args[11], args[12]
  local finish_reason, stats = args[13], args[14]
  local packed_positions, packed_tokens, canvas = args[15], args[16], args[17]
  local cache_mode, rebuilt, weights_hash = args[18], args[19], args[20]

  local stored = read(record, 'state', 'epoch', 'step', 'canvas', 'weights_hash')
  local state, stored_step, stored_canvas = stored[1], number(stored[3]), stored[4]
  local stored_hash = stored[5] or ''
  if not state or not stored_canvas or state == 'cancelled' or state == 'failed' then return 'terminal' end
  if stored[2] ~= epoch then return 'fenced' end
  if step <= stored_step then return 'duplicate' end
  if state == 'done' then return 'terminal' end
  if stored_hash ~= '' and stored_hash ~= weights_hash then return 'fenced' end

  if canvas == '' then
    local refusal
    if step > stored_step + 1 then return 'gap' end
    canvas, refusal = add_tokens(stored_canvas, packed_positions, packed_tokens)
    if not canvas then return refusal end
  else
    local missing, second, third =
      missing_tokens(stored_canvas, canvas, packed_positions, confidences)
    if not missing then return second end
    positions, tokens, confidences = missing, second, third
  end

  redis.call('HSET', record, 'step', step, 'canvas', canvas, 'stats', stats,
    'weights_hash', weights_hash)
  append(stream, step .. '-1', 'step', step, 'epoch', epoch, 'block', block,
    'kind', kind, 'threshold', threshold, 'worker', worker, 'latency_ms', latency_ms,
    'positions', positions, 'tokens', tokens, 'confidences', confidences,
    'cache_mode', cache_mode, 'rebuilt', rebuilt, 'finish_reason', finish_reason)
  if finish_reason ~= '' then
    finish(record, stream, active, id, retention_ms, 'state', 'done',
      'finish_reason', finish_reason)
  end
  return 'committed'
end

-- The lease is '<term> <holder>', so that only the very one who took it can extend it.
local function lease_of(term, holder)
  return string.format('%.0f %s', term, holder)  -- not `..`, which rounds terms above 10^14
end

local function take_lease(keys, args)
  local lease, term_key = keys[1], keys[2]
  local holder, ttl_ms, min_term = args[1], args[2], tonumber(args[3])
  local holds = string.match(redis.call('GET', lease) or '', '^%d+ (.*)$')
  if holds and holds ~= holder then return false end
  local term = math.max(number(redis.call('GET', term_key)) + 1, min_term)
  redis.call('SET', term_key, term)
  redis.call('SET', lease, lease_of(term, holder), 'PX', ttl_ms)
  return term
end

local function renew_lease(keys, args)
  local lease, mine, ttl_ms = keys[1], args[1], args[2]
  if redis.call('GET', lease) ~= mine then return 0 end
  return redis.call('PEXPIRE', lease, ttl_ms)
end

local function release_lease(keys, args)
  local lease, mine = keys[1], args[1]
  if redis.call('GET', lease) ~= mine then return 0 end
  return redis.call('DEL', lease)
end

local function raise_term(keys, args)
  return is_stale(keys[1], args[1]) and 0 or 1
end

-- A full server refuses new requests and commits, but never what moves requests or ends them.
local function register_always(name, callback)
  redis.register_function({ function_name = name, callback = callback, flags = { 'allow-oom' } })
end

redis.register_function('dls_new', new)
redis.register_function('dls_commit', commit)
register_always('dls_admit', admit)
register_always('dls_reassign', reassign)
register_always('dls_fail', fail)
register_always('dls_cancel', cancel)
register_always('dls_take_lease', take_lease)
register_always('dls_renew_lease', renew_lease)
register_always('dls_release_lease', release_lease)
register_always('dls_raise_term', raise_term)
