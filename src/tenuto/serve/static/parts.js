// What both pages are made of: the header, and the question for a key.

import { useKey } from "./feed.js";
import { html, useEffect, useRef } from "./vendor/htm-preact.js";

const THEMES = { "": "dark", dark: "light", light: "" };

export function restoreTheme() {
  const chosen = localStorage.getItem("tenuto-theme");
  if (chosen) document.documentElement.dataset.theme = chosen;
}

function nextTheme() {
  const root = document.documentElement;
  const next = THEMES[root.dataset.theme ?? ""];
  if (next) {
    root.dataset.theme = next;
    localStorage.setItem("tenuto-theme", next);
  } else {
    delete root.dataset.theme;
    localStorage.removeItem("tenuto-theme");
  }
  dispatchEvent(new Event("themed"));
}

export function Header({ page, state, about, children }) {
  const here = (name) => (name === page ? "page" : undefined);
  return html`<header class="top">
    <a class="mark" href="/" aria-label="Tenuto">tenuto</a>
    <nav aria-label="Pages">
      <a href="/" aria-current=${here("chat")}>Chat</a>
      <a href="/map" aria-current=${here("map")}>Map</a>
      <a href="/docs">API</a>
    </nav>
    <span class="about">${about}</span>
    ${state && html`<span class=${`state ${state.name}`} role="status">${state.text}</span>`}
    ${children}
    <button class="plain" onClick=${nextTheme} title="Dark, light, or as the system is">Theme</button>
  </header>`;
}

export function KeyDialog({ message, done }) {
  const dialog = useRef();
  const input = useRef();
  useEffect(() => dialog.current.showModal(), []);
  const submit = (event) => {
    event.preventDefault();
    useKey(input.current.value.trim());
    dialog.current.close();
    done();
  };
  return html`<dialog ref=${dialog} aria-labelledby="key-title" onCancel=${(event) => event.preventDefault()}>
    <form onSubmit=${submit}>
      <h2 id="key-title">A key, please</h2>
      <p>This server has keys: ${message}. It is kept in this tab only.</p>
      <label class="hidden-text" for="key-input">API key</label>
      <input id="key-input" ref=${input} type="password" autocomplete="off" placeholder="API key" required />
      <div class="buttons"><button class="primary">Continue</button></div>
    </form>
  </dialog>`;
}

export function amount(bytes) {
  if (bytes < 1024) return `${bytes} B`;
  const units = ["KiB", "MiB", "GiB", "TiB"];
  let value = bytes / 1024, unit = 0;
  while (value >= 1000 && unit < units.length - 1) [value, unit] = [value / 1024, unit + 1];
  return `${value < 10 ? value.toFixed(1) : Math.round(value)} ${units[unit]}`;
}

export const number = (value) => Math.round(value).toLocaleString("en");

export function ago(seconds) {
  if (seconds < 1.5) return "now";
  if (seconds < 90) return `${Math.round(seconds)} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  if (seconds < 172800) return `${Math.round(seconds / 3600)} h`;
  return `${Math.round(seconds / 86400)} days`;
}
