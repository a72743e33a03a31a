// The state of the map: pools, sessions and turns, from the feed's events; and what it was in the last ten minutes.

export const KINDS = ["turn", "session", "closed session", "checkpoint", "cached checkpoint"];
export const MEMORY = 600; // seconds of history
const KEYFRAME = 20; // seconds between two whole pictures in the history

// One pool. For every unit: `count` sessions have it, `mix` is the exclusive or of their numbers, `last` is one of them
// or 0, `kind` is that of `last`, and `place` is 1 in limbo, 2 if others hold it.
class Pool {
  constructor(described, index) {
    Object.assign(this, described, { index, free: described.capacity, limbo: [], other: [] });
    const { capacity } = this;
    this.count = new Uint16Array(capacity);
    this.mix = new Int32Array(capacity);
    this.last = new Int32Array(capacity);
    this.kind = new Uint8Array(capacity);
    this.place = new Uint8Array(capacity);
    this.dirty = null; // units to draw again; null: all
  }

  touch(unit) {
    if (this.dirty === null) return;
    if (this.dirty.length > this.capacity / 4) this.dirty = null;
    else this.dirty.push(unit);
  }

  mark(ranges, place) {
    for (let i = 0; i < ranges.length; i += 2)
      for (let unit = ranges[i]; unit < ranges[i] + ranges[i + 1]; unit++) {
        this.place[unit] = place;
        this.touch(unit);
      }
  }

  take(head) {
    for (const [name, place] of [["limbo", 1], ["other", 2]]) {
      if (same(this[name], head[name])) continue;
      this.mark(this[name], 0);
      this[name] = head[name];
      this.mark(this[name], place);
    }
    this.free = head.free;
  }

  // Returns the number of units by what they are; they add up to the capacity unless sessions are still to be described.
  sum(head) {
    if (this.summed === head) return this.lastSum;
    const sum = { free: 0, limbo: 0, shared: 0, other: 0, kinds: [0, 0, 0, 0, 0] };
    for (let unit = 0; unit < this.capacity; unit++) {
      if (this.place[unit] === 1) sum.limbo++;
      else if (this.count[unit] > 1) sum.shared++;
      else if (this.count[unit] === 1) sum.kinds[this.kind[unit]]++;
      else if (this.place[unit] === 2) sum.other++;
      else sum.free++;
    }
    this.summed = head;
    this.lastSum = sum;
    return sum;
  }
}

export function same(one, two) {
  return one.length === two.length && one.every((value, i) => value === two[i]);
}

function sameHeld(one, two) {
  return (
    one.length === two.length &&
    one.every(([pool, kind, ranges], i) => pool === two[i][0] && kind === two[i][1] && same(ranges, two[i][2]))
  );
}

export function countOf(ranges) {
  let count = 0;
  for (let i = 1; i < ranges.length; i += 2) count += ranges[i];
  return count;
}

// Returns a session's number of units in each pool, and of units in all.
export function unitsOf(session) {
  return session.held.reduce((sum, [, , ranges]) => sum + countOf(ranges), 0);
}

function has(ranges, unit) {
  for (let i = 0; i < ranges.length; i += 2) if (unit >= ranges[i] && unit < ranges[i] + ranges[i + 1]) return true;
  return false;
}

export class World {
  constructor(about, head) {
    this.about = about;
    this.head = head;
    this.sessions = new Map();
    this.facts = null; // made when they are wanted
    this.pools = about.pools.map((pool, index) => new Pool(pool, index));
  }

  apply({ head, sessions, gone = [] }) {
    this.facts = null;
    for (const number of gone) {
      const session = this.sessions.get(number);
      if (session) this.#release(session);
      this.sessions.delete(number);
    }
    for (const session of sessions) {
      const before = this.sessions.get(session.n);
      this.sessions.set(session.n, session);
      if (before && sameHeld(before.held, session.held)) {
        if (before.arriving !== session.arriving) this.#touch(session);
        continue;
      }
      if (before) this.#release(before);
      this.#claim(session);
    }
    this.head = head;
    head.pools?.forEach((pool, index) => this.pools[index].take(pool));
  }

  *#units(session) {
    for (const [pool, kind, ranges] of session.held)
      for (let i = 0; i < ranges.length; i += 2)
        for (let unit = ranges[i]; unit < ranges[i] + ranges[i + 1]; unit++) yield [this.pools[pool], unit, kind];
  }

  #touch(session) {
    for (const [pool, unit] of this.#units(session)) pool.touch(unit);
  }

  #claim(session) {
    for (const [pool, unit, kind] of this.#units(session)) {
      pool.count[unit]++;
      pool.mix[unit] ^= session.n;
      pool.last[unit] = session.n;
      pool.kind[unit] = kind;
      pool.touch(unit);
    }
  }

  #release(session) {
    for (const [pool, unit] of this.#units(session)) {
      pool.count[unit]--;
      pool.mix[unit] ^= session.n;
      if (pool.last[unit] === session.n) {
        const only = pool.count[unit] === 1 ? this.sessions.get(pool.mix[unit]) : undefined;
        pool.last[unit] = only?.n ?? 0;
        const held = only?.held.find(([index, , ranges]) => index === pool.index && has(ranges, unit));
        if (held) pool.kind[unit] = held[1];
      }
      pool.touch(unit);
    }
  }

  // Returns counts of sessions.
  counts() {
    if (this.facts) return this.facts;
    const facts = { open: 0, running: 0, queued: 0, turns: 0, onDevice: 0, host: 0, disk: 0, saved: 0 };
    for (const session of this.sessions.values()) {
      if (session.state !== "closed") facts.open++;
      if (session.held.length) facts.onDevice++;
      if (session.parked) facts[session.tier]++;
      if (session.saved) facts.saved++;
      const phase = session.turn?.phase;
      if (!phase) continue;
      facts.turns++;
      if (phase === "queued") facts.queued++;
      else if (phase !== "drafting" && phase !== "paused" && phase !== "preempted") facts.running++;
    }
    this.facts = facts;
    return facts;
  }

  // Returns the sessions that hold a unit, each with the kind of its lease.
  holders(index, unit) {
    const pool = this.pools[index];
    if (!pool.count[unit]) return [];
    if (pool.count[unit] === 1 && pool.last[unit]) {
      const session = this.sessions.get(pool.last[unit]);
      return session ? [{ session, kind: pool.kind[unit] }] : [];
    }
    const found = [];
    for (const session of this.sessions.values())
      for (const [of, kind, ranges] of session.held)
        if (of === index && has(ranges, unit)) found.push({ session, kind });
    return found;
  }
}

// What the map showed in the last ten minutes: whole pictures now and then, and all changes.
export class History {
  constructor() {
    this.events = [];
    this.keyframes = [];
  }

  begin(message) {
    this.keyframes.push({ t: message.head.t, message });
  }

  add(world, message) {
    const { t } = message.head;
    this.events.push({ t, message });
    if (t - this.keyframes.at(-1).t >= KEYFRAME)
      this.keyframes.push({ t, message: { head: world.head, sessions: [...world.sessions.values()] } });
    while (this.keyframes.length > 1 && this.keyframes[1].t < t - MEMORY) this.keyframes.shift();
    const first = this.events.findIndex((event) => event.t > this.keyframes[0].t);
    if (first > 64) this.events.splice(0, first);
  }

  get start() {
    return this.keyframes[0]?.t ?? 0;
  }

  // Returns the world as it was at `t`.
  at(about, t) {
    const keyframe = this.keyframes.findLast((frame) => frame.t <= t) ?? this.keyframes[0];
    const world = new World(about, keyframe.message.head);
    world.apply(keyframe.message);
    for (const event of this.events) if (event.t > keyframe.t && event.t <= t) world.apply(event.message);
    return world;
  }
}
