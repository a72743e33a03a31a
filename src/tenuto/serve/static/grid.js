// A pool as a grid of units, drawn on a canvas pixel by pixel, so that 100,000 units cost little.

import { isDark, mix, oklch, pack, rgbOf } from "./colour.js";
import { KINDS } from "./world.js";

const SIZES = [22, 18, 16, 14, 12, 10, 8, 7, 6, 5, 4, 3, 2]; // of a cell with its gap, in CSS pixels
const CHECKPOINT = 3; // the first of the kinds that are hatched

export class Grid {
  constructor(canvas, { height = 380 } = {}) {
    this.canvas = canvas;
    this.context = canvas.getContext("2d", { alpha: false });
    this.most = height;
    this.colours = new Map();
    this.chosen = 0; // the number of the session that stands out; 0: none
    this.cursor = -1; // the unit under the pointer or the keyboard's cursor
    this.pulsing = [];
  }

  // Lays the pool out in `width` CSS pixels; everything is drawn anew.
  layout(pool, width) {
    this.pool = pool;
    const scale = Math.max(1, Math.min(3, Math.round(devicePixelRatio || 1)));
    const size = SIZES.find((each) => Math.ceil(pool.capacity / Math.floor(width / each)) * each <= this.most) ?? 2;
    const columns = Math.max(1, Math.floor(width / size));
    const rows = Math.ceil(pool.capacity / columns);
    Object.assign(this, { scale, size, columns, rows });
    this.cell = size * scale;
    this.gap = size >= 10 ? 2 * scale : size >= 4 ? scale : 0;
    this.canvas.width = columns * this.cell;
    this.canvas.height = rows * this.cell;
    this.canvas.dataset.size = size;
    this.canvas.style.width = `${columns * size}px`;
    this.canvas.style.height = `${rows * size}px`;
    this.image = this.context.createImageData(this.canvas.width, this.canvas.height);
    this.pixels = new Uint32Array(this.image.data.buffer);
    this.themed();
  }

  themed() {
    this.dark = isDark();
    this.colours.clear();
    const [page, free, limbo, other] = this.dark
      ? [oklch(0.205, 0.006, 285), oklch(0.265, 0.006, 285), oklch(0.5, 0.005, 285), oklch(0.42, 0.02, 260)]
      : [oklch(0.995, 0.003, 90), oklch(0.945, 0.006, 90), oklch(0.7, 0.004, 90), oklch(0.78, 0.02, 260)];
    Object.assign(this, { page, free, limbo, other });
    this.ink = this.dark ? [255, 255, 255] : [20, 20, 24];
    this.pool.dirty = null;
  }

  rgb(number, kind) {
    const key = number * 8 + kind;
    let found = this.colours.get(key);
    if (!found) {
      const own = rgbOf(number, this.dark);
      found = kind === 2 ? mix(own, this.limbo, 0.6) : kind === 0 ? mix(own, this.ink, 0.12) : own;
      this.colours.set(key, found);
    }
    return found;
  }

  // Draws what has changed since the last call. `world`: for sessions whose state is arriving.
  draw(world, now) {
    const { pool, cell } = this;
    if (!pool) return 0;
    const all = pool.dirty === null;
    let drawn = 0, top = this.rows, bottom = -1;
    const paint = (unit) => {
      this.#paint(unit, world, now);
      const row = (unit / this.columns) | 0;
      if (row < top) top = row;
      if (row > bottom) bottom = row;
      drawn++;
    };
    if (all) {
      this.pixels.fill(pack(this.page));
      this.pulsing = [];
      for (let unit = 0; unit < pool.capacity; unit++) paint(unit);
    } else {
      const pulsing = this.pulsing;
      this.pulsing = [];
      for (const unit of pulsing) paint(unit);
      for (const unit of pool.dirty) paint(unit);
    }
    pool.dirty = [];
    if (drawn)
      this.context.putImageData(this.image, 0, 0, 0, top * cell, this.canvas.width, (bottom - top + 1) * cell);
    return drawn;
  }

  #paint(unit, world, now) {
    const { pool, cell, gap, scale } = this;
    let one = this.free, two = null, hatched = false, belongs = false;
    const count = pool.count[unit], last = pool.last[unit];
    if (pool.place[unit] === 1) one = this.limbo;
    else if (count > 1) {
      const second = count === 2 && last ? pool.mix[unit] ^ last : 0;
      one = last ? this.rgb(last, 1) : this.limbo;
      two = second ? this.rgb(second, 1) : mix(one, this.page, 0.55);
      belongs = this.chosen !== 0 && this.#isChosens(unit, world);
    } else if (count === 1) {
      const kind = pool.kind[unit];
      one = this.rgb(last, kind);
      hatched = kind >= CHECKPOINT;
      belongs = last === this.chosen;
      if (world.sessions.get(last)?.arriving) {
        one = mix(one, this.page, 0.3 + 0.3 * Math.sin(now / 160 + unit * 0.4));
        this.pulsing.push(unit);
      }
    } else if (pool.place[unit] === 2) one = this.other;
    if (this.chosen && !belongs && one !== this.free) {
      one = mix(one, this.page, 0.8);
      if (two) two = mix(two, this.page, 0.8);
    }
    const first = pack(one);
    const behind = pack(mix(one, this.page, hatched ? 0.62 : 0));
    const second = two ? pack(two) : first;
    const side = cell - gap;
    const x = (unit % this.columns) * cell, y = ((unit / this.columns) | 0) * cell;
    const period = side >= 8 * scale ? 4 * scale : 2 * scale;
    const lit = unit === this.cursor ? pack(this.ink) : 0;
    for (let dy = 0; dy < side; dy++) {
      let at = (y + dy) * this.canvas.width + x;
      for (let dx = 0; dx < side; dx++, at++) {
        let colour = first;
        if (two) colour = dx + dy < side - 1 ? first : second;
        else if (hatched) colour = (dx + dy) % period < period / 2 ? first : behind;
        if (lit && (dx < scale || dy < scale || dx >= side - scale || dy >= side - scale)) colour = lit;
        this.pixels[at] = colour;
      }
    }
  }

  #isChosens(unit, world) {
    const held = world.sessions.get(this.chosen)?.held ?? [];
    for (const [index, , ranges] of held) {
      if (index !== this.pool.index) continue;
      for (let i = 0; i < ranges.length; i += 2)
        if (unit >= ranges[i] && unit < ranges[i] + ranges[i + 1]) return true;
    }
    return false;
  }

  choose(number) {
    if (number !== this.chosen) this.pool.dirty = null;
    this.chosen = number;
  }

  point(unit) {
    for (const each of [this.cursor, unit]) if (each >= 0) this.pool.touch(each);
    this.cursor = unit;
  }

  // Returns the unit at a place in CSS pixels, or -1.
  at(x, y) {
    const column = Math.floor(x / this.size), row = Math.floor(y / this.size);
    if (column < 0 || column >= this.columns || row < 0) return -1;
    const unit = row * this.columns + column;
    return unit < this.pool.capacity ? unit : -1;
  }

  // Returns the middle of a unit in CSS pixels.
  place(unit) {
    return [((unit % this.columns) + 0.5) * this.size, (Math.floor(unit / this.columns) + 0.5) * this.size];
  }
}

// Returns what a unit is, in words.
export function describe(world, index, unit) {
  const pool = world.pools[index];
  const holders = world.holders(index, unit);
  const name = `${pool.slots > 1 ? "page" : "slot"} ${unit}`;
  if (pool.place[unit] === 1) return { name, text: "in limbo, until the step in flight has settled", holders };
  if (holders.length > 1) return { name, text: `shared by ${holders.length} sessions`, holders };
  if (holders.length === 1) {
    const [{ session, kind }] = holders;
    const of = { 0: "the open turn of", 1: "", 2: "the closed session", 3: "a checkpoint of", 4: "a cached checkpoint of" };
    return { name, text: `${of[kind]} ${session.id}`.trim(), holders, kind: KINDS[kind] };
  }
  return { name, text: pool.place[unit] === 2 ? "held by others" : "free", holders };
}
