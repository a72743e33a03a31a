// The chat page: a conversation is a session, an edited message a fork, and an interrupted answer keeps what was shown.

import { ask, events, json } from "./feed.js";
import { Header, KeyDialog, number, restoreTheme } from "./parts.js";
import { alternatives, load, newTalk, newTurn, save, titleOf } from "./talks.js";
import { html, render, useEffect, useLayoutEffect, useRef, useState } from "./vendor/htm-preact.js";

restoreTheme();

const SETTINGS = "tenuto-settings";
const store = {
  model: null,
  talks: load(),
  open: null, // the conversation that is shown
  settings: { system: "", temperature: 0.7, most: 1024, ...JSON.parse(localStorage.getItem(SETTINGS) ?? "{}") },
  running: null, // the turn that is being answered, with the means to end it
  error: "",
  key: "",
};
store.open = store.talks[0] ?? newTalk();
let again = () => {};
const changed = () => again((count) => count + 1);

function keep() {
  if (!store.talks.includes(store.open)) store.talks.unshift(store.open);
  save(store.talks);
}

async function start() {
  try {
    const [engine, models] = await Promise.all([json("GET", "/v1/engine"), json("GET", "/v1/models")]);
    store.model = { name: models.data[0].id, ...engine };
    store.key = "";
  } catch (error) {
    if (error.status === 401) store.key = error.message;
    else store.error = error.message;
  }
  changed();
}

// -- turns

const branch = () => store.open.branches[store.open.current];
const path = (session) => `/v1/sessions/${encodeURIComponent(session)}`;

async function session(mine) {
  if (mine.session) return mine.session;
  const { system } = store.settings;
  const opened = await json("POST", "/v1/sessions", { ...(system ? { system } : {}), metadata: { page: "chat" } });
  mine.session = opened.id;
  return opened.id;
}

async function say(text) {
  const mine = branch(), turn = newTurn(text);
  mine.turns.push(turn);
  await answer(mine, turn, "turns", [{ role: "user", content: text }]);
}

async function answer(mine, turn, place, input) {
  const { temperature, most } = store.settings;
  const asked = performance.now();
  store.running = { turn, session: null, stop: false };
  store.error = "";
  changed();
  try {
    const id = await session(mine);
    store.running.session = id;
    const body = { input, temperature, max_new_tokens: most, tools: [], on_disconnect: "continue" };
    const response = await ask("POST", `${path(id)}/${place}`, body, { headers: { accept: "text/event-stream" } });
    for await (const event of events(response)) take(turn, event, asked);
    if (turn.state !== "committed" && turn.state !== "aborted") turn.state = "broken";
  } catch (error) {
    if (error.status === 401) store.key = error.message;
    if (error.status === 404) turn.gone = true;
    turn.state = "broken";
    store.error = error.status === 404 ? "This conversation is no longer on the server. It can be read here, but not continued." : error.message;
  }
  store.running = null;
  if (turn.state === "aborted" || (turn.state === "broken" && !turn.text)) mine.turns = mine.turns.filter((each) => each !== turn);
  keep();
  changed();
}

function take(turn, { name, data }, asked) {
  if (name === "started") {
    turn.state = "prefill";
    turn.prompt = data.prompt_tokens;
  } else if (name === "delta") {
    turn.first ??= performance.now() - asked;
    turn.state = "answering";
    turn.text += data.content ?? "";
    turn.reasoning += data.reasoning ?? "";
  } else if (name === "call") turn.calls.push({ name: data.name ?? data.function?.name, arguments: data.arguments ?? data.function?.arguments });
  else if (name === "error") throw new Error(data.message ?? data.error?.message ?? "the turn failed");
  else {
    turn.state = name;
    turn.seconds = (performance.now() - asked) / 1000;
    turn.reason = data.reason;
    turn.usage = data.usage;
    if (data.message?.content !== undefined) turn.text = data.message.content ?? "";
  }
  changed();
}

async function interrupt() {
  const { running } = store;
  if (!running?.session || running.stop) return;
  running.stop = true;
  changed();
  try {
    await json("POST", `${path(running.session)}/abort`, { keep: "delivered" });
  } catch (error) {
    if (error.status !== 409) store.error = error.message; // it may have ended meanwhile
  }
}

// Asks turn `at` again with another text, on a fork that shares everything before it.
async function edit(at, text) {
  const from = branch();
  const turn = newTurn(text);
  const mine = { session: null, turns: from.turns.slice(0, at) };
  try {
    if (at) mine.session = (await json("POST", `${path(from.session)}/fork`, { turn: at })).id;
  } catch (error) {
    store.error = error.status === 404 ? "This conversation is no longer on the server." : error.message;
    changed();
    return;
  }
  mine.turns.push(turn);
  store.open.branches.push(mine);
  store.open.current = store.open.branches.length - 1;
  await answer(mine, turn, "turns", [{ role: "user", content: text }]);
  if (!mine.turns.includes(turn)) {
    store.open.branches = store.open.branches.filter((each) => each !== mine);
    store.open.current = Math.max(0, store.open.branches.indexOf(from));
    changed();
  }
}

function show(talk) {
  if (store.running) return;
  store.open = talk;
  store.error = "";
  changed();
}

async function forget(talk) {
  store.talks = store.talks.filter((each) => each !== talk);
  if (store.open === talk) store.open = store.talks[0] ?? newTalk();
  save(store.talks);
  changed();
  for (const each of talk.branches) if (each.session) await json("DELETE", path(each.session)).catch(() => {});
}

// -- text

const INLINE = /(`[^`\n]+`|\*\*[^*\n]+\*\*)/;

function inline(text) {
  return text.split(INLINE).map((part) => {
    if (part.startsWith("`") && part.length > 2) return html`<code>${part.slice(1, -1)}</code>`;
    if (part.startsWith("**") && part.length > 4) return html`<strong>${part.slice(2, -2)}</strong>`;
    return part;
  });
}

function Prose({ text }) {
  return text.split(/^```/m).map((part, i) => {
    if (i % 2 === 0) return part.trim() && html`<p key=${i}>${inline(part.trim())}</p>`;
    const [language, ...lines] = part.split("\n");
    return html`<pre key=${i} tabindex="0" aria-label=${`Code ${language}`}><code>${lines.join("\n").trimEnd()}</code></pre>`;
  });
}

// -- parts of the page

function Facts({ turn }) {
  const { usage } = turn;
  const facts = [];
  if (usage) {
    const share = usage.prompt_tokens ? usage.cached_tokens / usage.prompt_tokens : 0;
    facts.push(html`<span class="cached" title="Tokens of the prompt that were in memory already, of all">
      <i style=${{ "--share": `${Math.round(share * 100)}%` }} aria-hidden="true"></i>${number(usage.cached_tokens)} of ${number(usage.prompt_tokens)} cached</span>`);
  }
  if (turn.first !== undefined) facts.push(html`<span title="From the question to the first token">first token ${Math.round(turn.first)} ms</span>`);
  if (usage?.completion_tokens && turn.seconds) {
    const rate = usage.completion_tokens / Math.max(0.001, turn.seconds - (turn.first ?? 0) / 1000);
    facts.push(html`<span>${number(usage.completion_tokens)} tokens, ${rate < 10 ? rate.toFixed(1) : Math.round(rate)} a second</span>`);
  }
  if (turn.reason === "abort") facts.push(html`<span class="mark-note">interrupted; this much is kept</span>`);
  if (turn.reason === "length") facts.push(html`<span class="mark-note">cut off at the limit</span>`);
  return html`<div class="facts">${facts}</div>`;
}

function Turn({ turn, at }) {
  const [editing, setEditing] = useState(null);
  const busy = store.running !== null;
  const others = alternatives(store.open, at);
  const place = others.findIndex((index) => store.open.branches[index].turns[at] === turn || store.open.branches[index].turns[at].id === turn.id);
  const go = (step) => {
    store.open.current = others[(place + step + others.length) % others.length];
    keep();
    changed();
  };
  const submit = (event) => {
    event.preventDefault();
    const text = editing.trim();
    setEditing(null);
    if (text) edit(at, text);
  };
  const onKey = (event) => {
    if (event.key === "Escape") setEditing(null);
    if (event.key === "Enter" && !event.shiftKey) submit(event);
  };
  const writing = turn.state === "waiting" || turn.state === "prefill" || turn.state === "answering";
  return html`<article class="turn" aria-label=${`Turn ${at + 1}`}>
    <div class="user">
      ${editing === null
        ? html`<div class="bubble">${turn.user}</div>
            <div class="tools">
              ${others.length > 1 &&
              html`<span class="switch" role="group" aria-label="Branches">
                <button class="plain" disabled=${busy} onClick=${() => go(-1)} aria-label="Previous branch">‹</button>
                <span>${place + 1} of ${others.length}</span>
                <button class="plain" disabled=${busy} onClick=${() => go(1)} aria-label="Next branch">›</button>
              </span>`}
              <button class="plain" disabled=${busy} onClick=${() => setEditing(turn.user)}>Edit</button>
            </div>`
        : html`<form class="editing" onSubmit=${submit}>
            <textarea rows="3" aria-label="The message" value=${editing} ref=${(node) => node && !node.dataset.seen && ((node.dataset.seen = 1), node.focus())} onInput=${(event) => setEditing(event.target.value)} onKeyDown=${onKey}></textarea>
            <div class="buttons"><button type="button" onClick=${() => setEditing(null)}>Cancel</button><button class="primary">Ask on a fork</button></div>
          </form>`}
    </div>
    <div class="answer" aria-live=${writing ? "polite" : "off"} aria-busy=${writing}>
      ${turn.reasoning && html`<details><summary>Thoughts</summary><div class="thoughts">${turn.reasoning}</div></details>`}
      ${turn.calls.map((call, i) => html`<details key=${i}><summary>Calls <code>${call.name}</code></summary><pre tabindex="0"><code>${call.arguments}</code></pre></details>`)}
      <${Prose} text=${turn.text} />
      ${writing && !turn.text && html`<p class="quiet">${turn.reasoning ? "thinking" : turn.state === "prefill" ? "reading" : "waiting"}<span class="dots">…</span></p>`}
      ${!writing && html`<${Facts} turn=${turn} />`}
    </div>
  </article>`;
}

function Ask() {
  const [text, setText] = useState("");
  const field = useRef();
  const busy = store.running !== null;
  const dead = !store.model?.has_chat;
  useLayoutEffect(() => {
    field.current.style.height = "auto";
    field.current.style.height = `${Math.min(220, field.current.scrollHeight)}px`;
  }, [text]);
  useEffect(() => {
    if (!busy) field.current.focus({ preventScroll: true });
  }, [busy, store.open.id]);
  const submit = (event) => {
    event.preventDefault();
    const asked = text.trim();
    if (!asked || busy || dead) return;
    setText("");
    say(asked);
  };
  const onKey = (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) submit(event);
    if (event.key === "Escape" && busy) interrupt();
  };
  return html`<form class="ask" onSubmit=${submit}>
    <label class="hidden-text" for="ask">Your message</label>
    <textarea id="ask" ref=${field} rows="1" placeholder=${dead ? "This model has no chat template" : "Say something"} disabled=${dead} value=${text} onInput=${(event) => setText(event.target.value)} onKeyDown=${onKey}></textarea>
    ${busy
      ? html`<button type="button" class="primary" onClick=${interrupt} disabled=${store.running.stop} title="Esc">Interrupt</button>`
      : html`<button class="primary" disabled=${dead || !text.trim()}>Send</button>`}
  </form>`;
}

function Settings({ done }) {
  const dialog = useRef();
  useEffect(() => dialog.current.showModal(), []);
  const submit = (event) => {
    event.preventDefault();
    const form = new FormData(event.target);
    store.settings = { system: form.get("system").trim(), temperature: Number(form.get("temperature")), most: Number(form.get("most")) };
    localStorage.setItem(SETTINGS, JSON.stringify(store.settings));
    dialog.current.close();
  };
  const { system, temperature, most } = store.settings;
  return html`<dialog ref=${dialog} aria-labelledby="settings-title" onClose=${done}>
    <form onSubmit=${submit} class="settings">
      <h2 id="settings-title">Settings</h2>
      <label>System message of new conversations<textarea name="system" rows="3">${system}</textarea></label>
      <label>Temperature<input name="temperature" type="number" min="0" max="2" step="0.1" value=${temperature} /></label>
      <label>Most tokens of an answer<input name="most" type="number" min="1" max="100000" value=${most} /></label>
      <div class="buttons"><button type="button" onClick=${() => dialog.current.close()}>Cancel</button><button class="primary">Save</button></div>
    </form>
  </dialog>`;
}

function Talks() {
  const busy = store.running !== null;
  return html`<nav class="talks" aria-label="Conversations">
    <button class="new" disabled=${busy} onClick=${() => show(newTalk())}>New conversation</button>
    <ul>
      ${store.talks.map(
        (talk) => html`<li key=${talk.id}>
          <button class="plain name" disabled=${busy} aria-current=${talk === store.open ? "true" : undefined} onClick=${() => show(talk)}>${titleOf(talk)}</button>
          <button class="plain" disabled=${busy} aria-label=${`Close ${titleOf(talk)}`} title="Close its sessions and forget it" onClick=${() => forget(talk)}>×</button>
        </li>`,
      )}
    </ul>
  </nav>`;
}

function App() {
  const [, update] = useState(0);
  const [settings, setSettings] = useState(false);
  const end = useRef(), stuck = useRef(true);
  again = update;
  useEffect(() => {
    start();
    const scrolled = () => (stuck.current = innerHeight + scrollY > document.body.scrollHeight - 80);
    addEventListener("scroll", scrolled, { passive: true });
    return () => removeEventListener("scroll", scrolled);
  }, []);
  useEffect(() => {
    if (branch().turns.length && (stuck.current || store.running?.turn.state === "waiting")) end.current?.scrollIntoView({ block: "end" });
  });
  const { turns } = branch();
  const { model } = store;
  return html`<${Header} page="chat" about=${model?.name ?? ""}>
      <button class="plain" onClick=${() => setSettings(true)}>Settings</button>
    <//>
    ${store.key && html`<${KeyDialog} message=${store.key} done=${() => { store.key = ""; start(); }} />`}
    ${settings && html`<${Settings} done=${() => setSettings(false)} />`}
    <div class="columns">
      <${Talks} />
      <main>
        <h1 class="hidden-text">Chat</h1>
        ${turns.length === 0 &&
        html`<div class="welcome"><p class="big">A note, held.</p>
          <p>Every conversation is a session: its state stays in memory, so a turn costs only its new words. Interrupt an answer and keep what you saw. Edit a message, and both futures stay.</p></div>`}
        ${turns.map((turn, at) => html`<${Turn} key=${turn.id} turn=${turn} at=${at} />`)}
        ${store.error && html`<p class="error" role="alert">${store.error}</p>`}
        <div class="end" ref=${end}></div>
        <div class="bottom"><${Ask} />
          <p class="hint">Enter sends · Shift+Enter breaks the line · Esc interrupts · <a href="/map">see its memory</a></p></div>
      </main>
    </div>`;
}

render(html`<${App} />`, document.getElementById("app"));
