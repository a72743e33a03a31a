// Sessions as a graph of forks: a line for each, on a scale of tokens, that leaves its parent's where it was forked.

import { cssOf } from "./colour.js";
import { html } from "./vendor/htm-preact.js";

export const MOST = 120; // sessions shown at once
const ROW = 26;
const LEFT = 10;

// Returns sessions in the order of the graph, each with its depth: children follow their parent, the last fork first,
// so that lines do not cross. Those used last come first.
export function ordered(sessions, wanted) {
  const shown = new Map();
  const add = (session) => {
    if (!session || shown.has(session.n)) return;
    shown.set(session.n, session);
    if (session.parent) add(sessions.get(session.parent));
  };
  const recent = [...sessions.values()]
    .filter((session) => wanted(session))
    .sort((a, b) => !!b.turn - !!a.turn || b.since - a.since);
  for (const session of recent) {
    if (shown.size >= MOST) break;
    add(session);
  }
  const children = new Map();
  for (const session of shown.values()) {
    const parent = shown.has(session.parent) ? session.parent : 0;
    if (!children.has(parent)) children.set(parent, []);
    children.get(parent).push(session);
  }
  const rows = [];
  const place = (session, depth) => {
    rows.push({ session, depth });
    const forks = (children.get(session.n) ?? []).sort((a, b) => b.forked - a.forked || a.n - b.n);
    for (const child of forks) place(child, depth + 1);
  };
  for (const root of children.get(0) ?? []) place(root, 0);
  return { rows, hidden: recent.length - rows.length };
}

export function Forks({ rows, width, chosen, choose, label }) {
  const most = Math.max(64, ...rows.map(({ session }) => session.tokens + (session.turn?.output ?? 0)));
  const scale = (width - 2 * LEFT) / most;
  const x = (tokens) => LEFT + tokens * scale;
  const place = new Map(rows.map(({ session }, i) => [session.n, i]));
  const y = (i) => i * ROW + ROW / 2;
  const lines = rows.map(({ session }, i) => {
    const parent = place.get(session.parent);
    const start = parent !== undefined ? session.forked : 0;
    const colour = cssOf(session.n);
    const marks = [];
    const counted = session.recent.reduce((sum, [input, output]) => sum + input + output, 0);
    let at = session.tokens - counted;
    if (at > start)
      marks.push(html`<line key="old" x1=${x(start)} x2=${x(at)} y1=${y(i)} y2=${y(i)} stroke=${colour} class="old" />`);
    session.recent.forEach(([input, output], turn) => {
      const end = at + input + output;
      if (end > start) {
        const from = Math.max(at, start), middle = Math.max(start, at + input);
        marks.push(html`
          <line key=${`i${turn}`} x1=${x(from)} x2=${x(middle)} y1=${y(i)} y2=${y(i)} stroke=${colour} class="input" />
          <line key=${`o${turn}`} x1=${x(middle)} x2=${x(end)} y1=${y(i)} y2=${y(i)} stroke=${colour} class="output" />
          <circle key=${`c${turn}`} cx=${x(end)} cy=${y(i)} r="2.6" stroke=${colour} />
        `);
      }
      at = end;
    });
    if (session.turn) {
      const end = session.turn.prompt + session.turn.output;
      marks.push(html`
        <line key="open" x1=${x(session.tokens)} x2=${x(Math.max(end, session.tokens))} y1=${y(i)} y2=${y(i)} stroke=${colour} class="open" />
        <circle key="head" cx=${x(end)} cy=${y(i)} r="3.6" fill=${colour} class="head" />
      `);
    }
    const branch =
      parent !== undefined &&
      html`<path
        d=${`M${x(session.forked)} ${y(parent)} C${x(session.forked) + 10} ${y(parent) + ROW * 0.6}, ${x(session.forked) - 2} ${y(i)}, ${x(session.forked) + 12} ${y(i)}`}
        stroke=${colour}
        class="branch"
      />`;
    const dim = chosen && chosen !== session.n;
    return html`<g key=${session.n} class=${dim ? "dim" : ""} onClick=${() => choose(session.n)}>
      <rect x="0" y=${i * ROW} width=${width} height=${ROW} class=${chosen === session.n ? "row chosen" : "row"} />
      ${branch}${marks}
    </g>`;
  });
  return html`<svg class="forks" width=${width} height=${rows.length * ROW} role="img" aria-label=${label}>${lines}</svg>`;
}
