// The page of the memory map.

import { cssOf } from "./colour.js";
import { ask, follow, json } from "./feed.js";
import { Forks, ordered } from "./forks.js";
import { describe, Grid } from "./grid.js";
import { drawLanes, LANE, Lanes, PHASES, WINDOW } from "./lanes.js";
import { ago, amount, Header, KeyDialog, number, restoreTheme } from "./parts.js";
import { html, render, useEffect, useLayoutEffect, useRef, useState } from "./vendor/htm-preact.js";
import { countOf, History, MEMORY, unitsOf, World } from "./world.js";

restoreTheme();

// -- what the page knows

const store = {
  world: null, // now
  past: null, // as it was at `when`; null: the page shows what is now
  when: 0,
  history: new History(),
  lanes: new Lanes(),
  series: [[], [], []], // seconds, tokens a second, share of memory in use
  chosen: 0,
  state: { name: "lost", text: "connecting" },
  message: "",
  clock: 0, // the difference between this page's clock and the engine's
  rates: { tokens: 0, step: 0 },
};
const listeners = new Set();
const changed = () => listeners.forEach((listener) => listener());
const shown = () => store.past ?? store.world;
const now = () => (store.past ? store.when : performance.now() / 1000 - store.clock);

function useStore() {
  const [, again] = useState(0);
  useEffect(() => {
    const listener = () => again((count) => count + 1);
    listeners.add(listener);
    return () => listeners.delete(listener);
  }, []);
  return store;
}

function take(name, message) {
  const before = store.world?.head;
  if (name === "map") {
    store.world = new World(message.about, message.head);
    store.world.apply(message);
    store.history.begin(message);
    store.lanes = new Lanes();
  } else {
    store.world.apply(message);
    store.history.add(store.world, message);
  }
  const { head } = store.world;
  store.lanes.take(store.world, message.sessions, message.gone);
  store.clock = performance.now() / 1000 - head.t;
  measure(name === "map" ? null : before, head);
  changed();
}

function measure(before, head) {
  const seconds = before ? head.t - before.t : 0;
  const share = inUse();
  let rate = 0;
  if (seconds > 0 && head.generated !== undefined) {
    rate = (head.generated - before.generated) / seconds;
    const steps = head.steps - before.steps, busy = head.busy - before.busy;
    if (busy > 0 && steps > 0) store.rates.step = busy / steps;
  } else for (const each of store.lanes.rates.values()) rate += each;
  store.rates.tokens += (seconds > 0 ? 0.4 : 0) * (rate - store.rates.tokens);
  if (store.rates.tokens < 0.05) store.rates.tokens = 0;
  const [times, tokens, shares] = store.series;
  times.push(head.t);
  tokens.push(store.rates.tokens);
  shares.push(share * 100);
  while (times.length && times[0] < head.t - MEMORY) store.series.forEach((each) => each.shift());
}

function inUse(world = store.world) {
  const pools = world.pools.filter((pool) => pool.free !== undefined);
  let capacity = 0, used = 0;
  for (const pool of pools) {
    const weight = pool.unit_bytes || 1;
    capacity += pool.capacity * weight;
    used += (pool.capacity - pool.free - countOf(pool.limbo)) * weight;
  }
  return capacity ? used / capacity : 0;
}

function look(t) {
  store.when = t;
  store.past = t === null ? null : store.history.at(store.world.about, t);
  changed();
}

function choose(session) {
  store.chosen = store.chosen === session ? 0 : session;
  changed();
}

let ended = null;
function connect() {
  ended?.();
  store.state = { name: "lost", text: "connecting" };
  changed();
  ended = follow(take, (name, message) => {
    store.state = { name, text: { live: "live", lost: "no connection", key: "key needed" }[name] };
    store.message = message ?? "";
    changed();
  });
}

// -- figures

function Figures() {
  const world = shown();
  const { head } = world;
  const facts = world.counts();
  const whole = head.pools !== undefined;
  const figure = (name, value, unit = "") =>
    html`<div><dt>${name}</dt><dd>${value}${unit && html`<small>${unit}</small>`}</dd></div>`;
  const at = store.past ? store.series[1][store.series[0].findLastIndex((t) => t <= store.when)] ?? 0 : store.rates.tokens;
  return html`<dl class="figures" aria-label="Figures">
    ${whole && figure("memory in use", (inUse(world) * 100).toFixed(inUse(world) < 0.1 ? 1 : 0), "%")}
    ${figure("open sessions", number(facts.open))}
    ${figure("running turns", number(facts.running), whole ? `of ${head.rows}` : "")}
    ${figure("waiting", number(whole ? head.queued : facts.queued))}
    ${figure("output", at < 100 ? at.toFixed(1) : number(at), "tokens/s")}
    ${whole && figure("step", store.rates.step ? (store.rates.step * 1000).toFixed(store.rates.step < 0.01 ? 1 : 0) : "–", "ms")}
  </dl>`;
}

// -- memory

const SUM = [
  ["turns", "turn", (sum) => sum.kinds[0]],
  ["sessions", "session", (sum) => sum.kinds[1]],
  ["shared", "split", (sum) => sum.shared],
  ["checkpoints", "hatch", (sum) => sum.kinds[3] + sum.kinds[4]],
  ["closed", "closed", (sum) => sum.kinds[2]],
  ["other holders", "other", (sum) => sum.other],
  ["in limbo", "limbo", (sum) => sum.limbo],
  ["free", "free", (sum) => sum.free],
];
const BAR = { turn: "#5b7fae", session: "var(--accent)", split: "#5ca2b0", hatch: "#8d9c58", closed: "#a39a8e", other: "#78849a", limbo: "#8d8a86", free: "transparent" };

function Sum({ pool }) {
  const sum = pool.sum(shown().head);
  const parts = SUM.map(([name, kind, of]) => [name, kind, of(sum)]).filter(([name, , count]) => count || name === "free");
  return html`
    <div class="bar" aria-hidden="true">
      ${parts.map(([name, kind, count]) => html`<i key=${name} style=${{ flexGrow: count, background: BAR[kind] }}></i>`)}
    </div>`;
}

function Equation({ pool }) {
  const sum = pool.sum(shown().head);
  const parts = SUM.map(([name, , of]) => [name, of(sum)]).filter(([name, count]) => count || name === "free");
  return html`<p class="sum">
    <span class="equals"><b>${number(pool.capacity)}</b> units</span>
    ${parts.map(([name, count]) => html`<span key=${name}><b>${number(count)}</b> ${name}</span>`)}
  </p>`;
}

function PoolView({ index }) {
  const world = shown();
  const pool = world.pools[index];
  const canvas = useRef(), box = useRef(), grid = useRef(null), drawn = useRef(null);
  const [hover, setHover] = useState(null);
  if (drawn.current !== pool && grid.current) {
    grid.current.pool = pool;
    pool.dirty = null;
  }
  drawn.current = pool;
  useLayoutEffect(() => {
    grid.current = new Grid(canvas.current);
    const lay = () => grid.current.layout(drawn.current, box.current.clientWidth);
    lay();
    const resized = new ResizeObserver(lay);
    resized.observe(box.current);
    const themed = () => grid.current.themed();
    addEventListener("themed", themed);
    const dark = matchMedia("(prefers-color-scheme: dark)");
    dark.addEventListener("change", themed);
    let frame;
    const draw = (time) => {
      grid.current.choose(shown().sessions.get(store.chosen)?.held.length ? store.chosen : 0);
      grid.current.draw(shown(), time);
      frame = requestAnimationFrame(draw);
    };
    draw(0);
    return () => {
      cancelAnimationFrame(frame);
      resized.disconnect();
      removeEventListener("themed", themed);
      dark.removeEventListener("change", themed);
    };
  }, []);
  const point = (unit) => {
    grid.current.point(unit);
    setHover(unit < 0 ? null : unit);
  };
  const pick = (unit) => {
    const [first, ...more] = world.holders(index, unit);
    if (!first) return choose(store.chosen);
    const every = [first, ...more].map(({ session }) => session.n);
    const place = every.indexOf(store.chosen);
    choose(place >= 0 && place + 1 < every.length ? every[place + 1] : every[0]);
  };
  const onKey = (event) => {
    const moves = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: grid.current.columns, ArrowUp: -grid.current.columns };
    if (event.key in moves) {
      event.preventDefault();
      point(Math.max(0, Math.min(pool.capacity - 1, (hover ?? -1) + moves[event.key])));
    } else if ((event.key === "Enter" || event.key === " ") && hover !== null) {
      event.preventDefault();
      pick(hover);
    } else if (event.key === "Escape") point(-1);
  };
  const under = (event) => {
    const frame = canvas.current.getBoundingClientRect();
    return grid.current.at(event.clientX - frame.left, event.clientY - frame.top);
  };
  const told = hover !== null && describe(world, index, hover);
  const unit = pool.slots > 1 ? `pages of ${pool.slots} tokens` : "state slots";
  const size = pool.unit_bytes ? ` · ${amount(pool.unit_bytes * pool.capacity)}` : "";
  const label = `${pool.name}: ${number(pool.capacity)} ${unit}. Arrow keys move between units, Enter chooses a holder.`;
  return html`<section class="pool" aria-label=${`Pool ${pool.name}`}>
    <div class="line"><h3>${pool.name}</h3><span class="quiet">${number(pool.capacity)} ${unit}${size}</span></div>
    <${Sum} pool=${pool} />
    <div ref=${box}>
      <div class="field">
        <canvas
          ref=${canvas}
          class="grid"
          role="application"
          tabindex="0"
          aria-label=${label}
          onPointerMove=${(event) => point(under(event))}
          onPointerLeave=${() => point(-1)}
          onClick=${(event) => under(event) >= 0 && pick(under(event))}
          onKeyDown=${onKey}
          onBlur=${() => point(-1)}
        ></canvas>
        ${told && html`<${Tip} grid=${grid.current} unit=${hover} told=${told} />`}
      </div>
    </div>
    <p class="hidden-text" aria-live="polite">${told ? `${told.name}: ${told.text}` : ""}</p>
    <${Equation} pool=${pool} />
  </section>`;
}

function Tip({ grid, unit, told }) {
  const [x, y] = grid.place(unit);
  const width = grid.columns * grid.size;
  const at = Math.max(120, Math.min(width - 120, x));
  const low = y < 110;
  const style = { left: `${at}px`, top: `${y}px`, transform: low ? "translate(-50%, 16px)" : undefined };
  return html`<div class="tip" style=${style} aria-hidden="true">
    <b>${told.name}</b> <span class="quiet">${told.text}</span>
    ${told.holders.length > 1 &&
    html`<ul>
      ${told.holders.slice(0, 6).map(
        ({ session }) => html`<li key=${session.n}><i class="dot" style=${{ background: cssOf(session.n) }}></i>${session.id}</li>`,
      )}
      ${told.holders.length > 6 && html`<li class="quiet">and ${told.holders.length - 6} more</li>`}
    </ul>`}
  </div>`;
}

function Memory() {
  const world = shown();
  return html`<section aria-labelledby="memory">
    <div class="heading"><h2 id="memory">Memory</h2><span class="quiet">a square is a unit, a colour is a session</span></div>
    ${world.pools.map((pool, index) => html`<${PoolView} key=${pool.name} index=${index} />`)}
    <ul class="key" aria-label="Key">
      <li><i class="swatch"></i>held by a session</li>
      <li><i class="swatch split"></i>shared by forks</li>
      <li><i class="swatch hatch"></i>checkpoint</li>
      <li><i class="swatch pulse"></i>arriving from a tier</li>
      <li><i class="swatch closed"></i>of a closed session, kept for its prefix</li>
      <li><i class="swatch limbo"></i>in limbo</li>
      <li><i class="swatch free"></i>free${world.about.admin ? "" : ", or of others"}</li>
    </ul>
  </section>`;
}

// -- turns

function said(turn, rate) {
  const phase = PHASES[turn.phase];
  if (turn.phase === "decode") return [phase, rate === undefined ? `${turn.output} tokens` : `${rate.toFixed(rate < 10 ? 1 : 0)} tokens/s`];
  if (turn.phase === "prefill") return [phase, turn.why || `${number(turn.computed)} of ${number(turn.prompt)}`];
  return [phase, turn.why];
}

function Turns() {
  const world = shown();
  const canvas = useRef();
  const rows = store.lanes.shown();
  useEffect(() => {
    let frame;
    const draw = () => {
      if (canvas.current && document.visibilityState === "visible") drawLanes(canvas.current, store.lanes.shown(), now());
      frame = requestAnimationFrame(draw);
    };
    draw();
    return () => cancelAnimationFrame(frame);
  }, []);
  const open = world.counts().turns;
  const title = html`<div class="heading"><h2 id="turns">Turns</h2>
    <span class="quiet">the last minute · ${open ? `${open} open` : "none is open"}${rows.length < open ? `, ${rows.length} shown` : ""}</span>
  </div>`;
  const empty = html`<p class="nothing">No turn has run since you opened this page.</p>`;
  return html`<section aria-labelledby="turns">
    ${title}
    ${!rows.length && empty}
    <div class="turns" hidden=${!rows.length}>
      <ol aria-label="Sessions with turns">
        ${rows.map(
          (lane) => html`<li key=${lane.n} class=${lane.open ? "" : "over"}>
            <i class="dot" style=${{ background: cssOf(lane.n) }}></i><button onClick=${() => choose(lane.n)}>${lane.id}</button>
          </li>`,
        )}
      </ol>
      <div class="strip" style=${{ height: `${rows.length * LANE}px` }}>
        <canvas ref=${canvas} role="img" aria-label="What each turn did in the last minute"></canvas>
      </div>
      <ol class="told" aria-label="What the turns do now">
        ${rows.map((lane) => {
          const turn = world.sessions.get(lane.n)?.turn;
          const [what, more] = turn ? said(turn, store.lanes.rates.get(lane.n)) : ["", ""];
          return html`<li key=${lane.n} class="say" title=${more}>${turn ? html`<b>${what}</b>${more}` : "ended"}</li>`;
        })}
      </ol>
    </div>
    ${rows.length > 0 && html`<div class="axis" aria-hidden="true"><span>${WINDOW} s ago</span><span>now</span></div>`}
  </section>`;
}

// -- forks

function Graph() {
  const world = shown();
  const [search, setSearch] = useState("");
  const [every, setEvery] = useState(false);
  const box = useRef();
  const [width, setWidth] = useState(500);
  useLayoutEffect(() => {
    const measured = () => setWidth(Math.max(120, box.current.clientWidth));
    measured();
    const resized = new ResizeObserver(measured);
    resized.observe(box.current);
    return () => resized.disconnect();
  }, []);
  const wanted = (session) =>
    (every || session.listed || session.turn) && session.state !== "closed" && session.id.includes(search);
  const memo = useRef({});
  const key = `${search}|${every}|${store.past ? store.when : "now"}`;
  const pause = Math.min(2000, world.sessions.size / 4); // milliseconds: ordering thousands of sessions takes a while
  if (memo.current.key !== key || memo.current.world !== world || performance.now() > memo.current.at + pause)
    memo.current = { key, world, at: performance.now(), ...ordered(world.sessions, wanted) };
  const rows = memo.current.rows
    .map(({ session, depth }) => ({ session: world.sessions.get(session.n), depth }))
    .filter(({ session }) => session);
  const { hidden } = memo.current;
  const label = `${rows.length} sessions as lines on a scale of tokens; forks leave their parents' lines`;
  return html`<section aria-labelledby="forks">
    <div class="heading"><h2 id="forks">Sessions and forks</h2>
      <span class="quiet">turns on a scale of tokens: thin is input, thick is output</span>
      <span class="right">
        <label class="quiet"><input type="checkbox" checked=${every} onChange=${() => setEvery(!every)} /> unlisted</label>${" "}
        <input type="search" placeholder="Find a session" aria-label="Find a session" value=${search} onInput=${(event) => setSearch(event.target.value)} />
      </span>
    </div>
    <div class="graph">
      <ul aria-label="Sessions">
        ${rows.map(
          ({ session, depth }) => html`<li key=${session.n} style=${{ paddingLeft: `${Math.min(5, depth) * 14}px` }}>
            <button aria-pressed=${store.chosen === session.n} onClick=${() => choose(session.n)}>
              <i class="dot" style=${{ background: cssOf(session.n) }}></i><span class="name">${session.id}</span>
              <small>${number(session.tokens)}</small>
            </button>
          </li>`,
        )}
      </ul>
      <div ref=${box}><${Forks} rows=${rows} width=${width} chosen=${store.chosen} choose=${choose} label=${label} /></div>
    </div>
    ${!rows.length && html`<p class="nothing">${search ? "No session has such an id." : "No session is open."}</p>`}
    ${hidden > 0 && html`<p class="quiet">and ${number(hidden)} more</p>`}
  </section>`;
}

// -- tiers

function Tiers() {
  const world = shown();
  const { tiers = {}, moves = {}, restored = 0 } = world.head;
  const facts = world.counts();
  const used = world.pools.reduce((sum, pool) => sum + (pool.capacity - (pool.free ?? pool.capacity)) * pool.unit_bytes, 0);
  const exists = "host" in tiers;
  const { saved } = facts;
  const tier = (name, big, more, off) =>
    html`<div class=${off ? "tier off" : "tier"}><h3>${name}</h3><p class="big">${big}</p><p class="quiet">${more}</p></div>`;
  const flow = (out, back) => html`<div class="flow" aria-hidden="true"><span>${out}</span><i></i><i class="back"></i><span>${back}</span></div>`;
  return html`<section aria-labelledby="tiers">
    <div class="heading"><h2 id="tiers">Tiers</h2><span class="quiet">${
      exists ? "where the state of sessions is" : "none is configured: sessions that make room are computed again"
    }</span></div>
    <div class="tiers">
      ${tier("Device", amount(used), `${number(facts.onDevice)} sessions`)}
      ${flow(`${number(moves.host ?? 0)} units`, `${number(restored)} sessions`)}
      ${tier("Host memory", exists ? amount(tiers.host) : "–", `${number(facts.host)} sessions`, !exists)}
      ${flow(`${number(moves.disk ?? 0)} units`, `${number(moves.device ?? 0)} units`)}
      ${tier("Disk", exists ? amount(tiers.disk) : "–", saved ? `${number(facts.disk)} parked, ${number(saved)} saved` : `${number(facts.disk)} sessions`, !exists || (!tiers.disk && !saved))}
    </div>
  </section>`;
}

// -- the inspector

function Inspector() {
  const world = shown();
  const session = world.sessions.get(store.chosen);
  const [answer, setAnswer] = useState(null);
  const [closing, setClosing] = useState(false);
  useEffect(() => setAnswer(null), [store.chosen]);
  if (!session)
    return html`<section class="card" aria-label="The chosen session"><h2>Who holds what</h2>
      <p>Choose a unit, a lane or a session to see all that it holds. No text of a conversation is shown here.</p></section>`;
  const act = async (action, done) => {
    try {
      await json("POST", "/map/action", { action, session: session.id, tenant: session.tenant });
      setAnswer({ good: true, text: done });
    } catch (error) {
      setAnswer({ good: false, text: error.message });
    }
  };
  const save = async () => {
    try {
      const query = new URLSearchParams({ session: session.id, of: session.tenant });
      const file = await (await ask("GET", `/map/export?${query}`)).blob();
      const link = Object.assign(document.createElement("a"), { href: URL.createObjectURL(file), download: `${session.id}.json` });
      link.click();
      setTimeout(() => URL.revokeObjectURL(link.href), 1000);
      setAnswer({ good: true, text: "Exported." });
    } catch (error) {
      setAnswer({ good: false, text: error.message });
    }
  };
  const { turn } = session;
  const parent = world.sessions.get(session.parent);
  const units = world.pools
    .map((pool) => [pool.name, session.held.filter(([index]) => index === pool.index).reduce((sum, [, , r]) => sum + countOf(r), 0)])
    .filter(([, count]) => count);
  const alone = session.held.reduce((sum, [index, , ranges]) => {
    for (let i = 0; i < ranges.length; i += 2)
      for (let u = ranges[i]; u < ranges[i] + ranges[i + 1]; u++) sum += world.pools[index].count[u] === 1;
    return sum;
  }, 0);
  const total = unitsOf(session);
  const facts = [
    ["tenant", world.about.tenant !== null && session.tenant],
    ["tokens", `${number(session.tokens)} in ${number(session.turns)} turns`],
    ["in memory", session.computed ? `${number(session.computed)} tokens` : "nothing"],
    ...units.map(([name, count]) => [name, `${number(count)} units`]),
    ["shared", total > alone && `${number(total - alone)} of ${number(total)} units`],
    ["parked", session.parked > 0 && `${number(session.parked)} tokens, ${session.tier}`],
    ["saved", session.saved > 0 && `${number(session.saved)} tokens on disk`],
    ["forked", parent && html`${parent.id} at ${number(session.forked)}`],
    ["turn", turn && `${PHASES[turn.phase]}${turn.why ? `: ${turn.why}` : ""}`],
    ["output", turn && `${number(turn.output)} of at most ${number(turn.limit)} tokens`],
    ["cached", turn && turn.cached >= 0 && `${number(turn.cached)} of ${number(turn.prompt)} tokens`],
    ["idle for", !turn && ago(now() - session.since)],
    ["version", session.version],
  ].filter(([, value]) => value || value === 0);
  const live = !store.past && session.state === "open";
  return html`<section class="card" aria-label="The chosen session">
    <h2><i class="dot" style=${{ background: cssOf(session.n) }}></i>${session.id}</h2>
    ${session.state !== "open" && html`<p>${session.state === "closed" ? "closed; its memory is kept for its prefix" : session.state}</p>`}
    ${session.pinned && html`<p>pinned</p>`}
    <dl>${facts.map(([name, value]) => html`<dt key=${`t${name}`}>${name}</dt><dd key=${`d${name}`}>${value}</dd>`)}</dl>
    <div class="buttons">
      <button disabled=${!live || !turn} onClick=${() => act("abort", "The turn was rolled back.")}>Abort turn</button>
      <button disabled=${!live || !!turn || !session.computed || session.pinned} onClick=${() => act("park", "The session was parked.")}>Park</button>
      <button disabled=${!live} onClick=${save}>Export</button>
      <button class="danger" disabled=${!live} onClick=${() => setClosing(true)}>Close</button>
    </div>
    <p class=${answer?.good ? "said good" : "said"} role="status">${answer?.text ?? ""}</p>
    ${closing && html`<${Confirm} session=${session} no=${() => setClosing(false)} yes=${() => { setClosing(false); act("close", "The session was closed."); }} />`}
  </section>`;
}

function Confirm({ session, yes, no }) {
  const dialog = useRef();
  useEffect(() => dialog.current.showModal(), []);
  return html`<dialog ref=${dialog} aria-labelledby="confirm" onClose=${no}>
    <h2 id="confirm">Close ${session.id}?</h2>
    <p>Its ${number(session.turns)} turns are gone then. An open turn is aborted.</p>
    <div class="buttons"><button onClick=${no}>Keep it</button><button class="primary" onClick=${yes}>Close it</button></div>
  </dialog>`;
}

function Auditor() {
  const world = shown();
  const { audit } = world.head;
  const [told, setTold] = useState("");
  const recount = async () => {
    setTold("counting …");
    try {
      const report = await json("GET", "/audit");
      setTold(`just now: ${number(report.holders)} holders, ${number(report.leases)} leases`);
    } catch (error) {
      setTold(error.message);
    }
  };
  if (world.head.pools === undefined) return null;
  const free = world.pools.reduce((sum, pool) => sum + pool.free, 0);
  const limbo = world.pools.reduce((sum, pool) => sum + countOf(pool.limbo), 0);
  const capacity = world.pools.reduce((sum, pool) => sum + pool.capacity, 0);
  return html`<section class="card sealed" aria-label="The auditor">
    <b>Every unit accounted for</b>
    <p>${number(capacity - free - limbo)} leased + ${number(limbo)} in limbo + ${number(free)} free = ${number(capacity)}, checked after every step.</p>
    <p>${told || (audit ? `Recounted ${ago(audit.age)} ago: ${number(audit.holders)} holders, ${number(audit.leases)} leases.` : "Not recounted since the start.")}</p>
    ${!store.past && html`<p><button onClick=${recount}>Recount now</button></p>`}
  </section>`;
}

// -- the last ten minutes

function Past() {
  const plot = useRef(), box = useRef();
  useEffect(() => {
    const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
    const make = () => {
      plot.current?.destroy();
      plot.current = new uPlot(
        {
          width: box.current.clientWidth,
          height: 46,
          padding: [4, 0, 2, 0],
          cursor: { show: false },
          legend: { show: false },
          axes: [{ show: false }, { show: false }, { show: false }],
          scales: { x: { time: false, range: () => span() }, y: { range: (_, low, high) => [0, Math.max(1, high * 1.1)] }, share: { range: [0, 100] } },
          series: [
            {},
            { stroke: colour("--accent"), width: 1.5, fill: colour("--accent-wash"), points: { show: false } },
            { stroke: colour("--faint"), width: 1, dash: [2, 3], scale: "share", points: { show: false } },
          ],
        },
        store.series,
        box.current,
      );
    };
    make();
    const resized = new ResizeObserver(() => plot.current.setSize({ width: box.current.clientWidth, height: 46 }));
    resized.observe(box.current);
    addEventListener("themed", make);
    const update = () => plot.current.setData(store.series);
    listeners.add(update);
    return () => {
      listeners.delete(update);
      removeEventListener("themed", make);
      resized.disconnect();
      plot.current.destroy();
    };
  }, []);
  const [start, end] = span();
  const value = store.past ? store.when : end;
  const back = end - value;
  const move = (event) => {
    const t = Number(event.target.value);
    look(t > end - 0.3 ? null : t);
  };
  const text = store.past ? `${ago(back)} ago` : "now";
  return html`<section class="past" aria-label="The last ten minutes">
    <div class="when"><b>${text}</b><span class="quiet">${store.past ? "the map as it was" : "tokens/s, memory"}</span></div>
    <div class="plot" ref=${box} aria-hidden="true"></div>
    <input type="range" min=${start} max=${end} step="0.5" value=${value} onInput=${move} aria-label="Moment to show" aria-valuetext=${text} />
    <div class="end"><button disabled=${!store.past} onClick=${() => look(null)}>Live</button></div>
  </section>`;
}

function span() {
  const end = store.world.head.t;
  return [Math.min(end - 30, Math.max(store.history.start, end - MEMORY)), end];
}

// -- the page

function App() {
  const { world, state, message } = useStore();
  useEffect(() => {
    const onKey = (event) => {
      if (event.key !== "Escape" || event.target.closest?.("dialog, input")) return;
      if (store.chosen) choose(store.chosen);
    };
    addEventListener("keydown", onKey);
    return () => removeEventListener("keydown", onKey);
  }, []);
  const about = world ? `${world.about.model}${world.about.tenant ? ` · ${world.about.tenant}` : ""}` : "";
  const header = html`<${Header} page="map" about=${about} state=${state} />`;
  const dialog = state.name === "key" && html`<${KeyDialog} message=${message} done=${connect} />`;
  if (!world)
    return html`${header}${dialog}<p class="waiting">${state.name === "lost" && message ? message : "Waiting for the server\u200a…"}</p>`;
  return html`${header}${dialog}
    <h1 class="hidden-text">Memory map</h1>
    <${Figures} />
    <main>
      <div class="views"><${Memory} /><${Turns} /><${Graph} />${world.head.pools !== undefined && html`<${Tiers} />`}</div>
      <aside aria-label="Details"><${Inspector} /><${Auditor} /></aside>
    </main>
    <${Past} />`;
}

render(html`<${App} />`, document.getElementById("app"));
connect();
