// The turns of the last minute, a lane for each session, drawn on one canvas.

import { isDark, oklch } from "./colour.js";

export const WINDOW = 60; // seconds
export const LANE = 26; // CSS pixels
export const MOST = 24;
const LINGER = WINDOW;

export const PHASES = {
  drafting: "draft",
  queued: "queued",
  restoring: "restoring",
  sharing: "sharing",
  prefill: "prefill",
  decode: "decode",
  paused: "paused",
  preempted: "preempted",
};

// Remembers what turns did: for each session, segments {phase, from, to, turn}.
export class Lanes {
  constructor() {
    this.lanes = new Map();
    this.rates = new Map(); // session -> tokens a second, of its open turn
  }

  take(world, sessions, gone = []) {
    const now = world.head.t;
    for (const session of sessions) {
      const turn = session.turn;
      const lane = this.lanes.get(session.n);
      if (!turn) {
        if (lane) lane.open = false;
        this.rates.delete(session.n);
        continue;
      }
      const mine = lane ?? { n: session.n, id: session.id, segments: [], open: true, output: 0, at: now, turn: 0 };
      this.lanes.set(session.n, mine);
      const last = mine.segments.at(-1);
      if (last && mine.open && last.turn === turn.n && last.phase === turn.phase) last.to = now;
      else {
        const from = last && mine.open && last.turn === turn.n ? last.to : Math.max(turn.arrived, last?.to ?? -Infinity, now - 0.5);
        mine.segments.push({ phase: turn.phase, from, to: now, turn: turn.n });
      }
      if (mine.turn === turn.n && now > mine.at) {
        const rate = (turn.output - mine.output) / (now - mine.at);
        const before = this.rates.get(session.n);
        this.rates.set(session.n, before === undefined ? rate : before + 0.35 * (rate - before));
      }
      Object.assign(mine, { open: true, output: turn.output, at: now, turn: turn.n });
    }
    for (const number of gone) if (this.lanes.has(number)) this.lanes.get(number).open = false;
    for (const [number, lane] of this.lanes) {
      if (lane.open) lane.segments.at(-1).to = now;
      lane.segments = lane.segments.filter((segment) => segment.to > now - LINGER);
      if (!lane.segments.length) this.lanes.delete(number);
    }
  }

  // Returns the lanes to show: open turns first, in the order of their beginnings.
  shown() {
    return [...this.lanes.values()]
      .sort((a, b) => b.open - a.open || (a.open ? a.n - b.n : b.segments.at(-1).to - a.segments.at(-1).to))
      .slice(0, MOST);
  }
}

function palette() {
  const dark = isDark();
  const css = ([r, g, b]) => `rgb(${r} ${g} ${b})`;
  const [low, high] = dark ? [0.42, 0.76] : [0.82, 0.62];
  return {
    drafting: css(oklch(low, 0.05, 285)),
    queued: css(oklch(dark ? 0.36 : 0.88, 0.008, 80)),
    restoring: css(oklch(high, 0.1, 235)),
    sharing: css(oklch(low, 0.07, 235)),
    prefill: css(oklch(high, 0.155, 42)),
    decode: css(oklch(dark ? 0.68 : 0.72, 0.1, 165)),
    paused: css(oklch(dark ? 0.5 : 0.74, 0.012, 80)),
    preempted: css(oklch(dark ? 0.55 : 0.62, 0.09, 18)),
    line: dark ? "rgb(255 255 255 / .07)" : "rgb(0 0 0 / .07)",
    text: dark ? "rgb(255 255 255 / .45)" : "rgb(0 0 0 / .45)",
  };
}

// Draws lanes up to the moment `now` on the engine's clock.
export function drawLanes(canvas, lanes, now) {
  const scale = devicePixelRatio || 1;
  const width = canvas.clientWidth, height = canvas.clientHeight;
  if (!width || !height) return;
  if (canvas.width !== Math.round(width * scale) || canvas.height !== Math.round(height * scale)) {
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
  }
  const context = canvas.getContext("2d");
  context.setTransform(scale, 0, 0, scale, 0, 0);
  context.clearRect(0, 0, width, height);
  const colours = palette();
  const x = (t) => width - ((now - t) / WINDOW) * width;
  context.fillStyle = colours.line;
  for (let back = 10; back < WINDOW; back += 10) context.fillRect(Math.round(x(now - back)), 0, 1, height);
  lanes.forEach((lane, i) => {
    context.fillStyle = colours.line;
    context.fillRect(0, (i + 1) * LANE - 1, width, 1);
    for (const segment of lane.segments) {
      const to = lane.open && segment === lane.segments.at(-1) ? now : segment.to;
      const from = x(segment.from), end = x(to);
      if (end < 0) continue;
      context.fillStyle = colours[segment.phase];
      const thin = segment.phase === "queued" || segment.phase === "paused" || segment.phase === "preempted";
      const tall = thin ? 4 : 12;
      context.beginPath();
      context.roundRect(from, i * LANE + (LANE - tall) / 2 - 0.5, Math.max(2, end - from), tall, thin ? 2 : 3);
      context.fill();
    }
  });
}
