// Requests to the server with the caller's key, and streams of server-sent events.

const KEY = "tenuto-key";

export function key() {
  return sessionStorage.getItem(KEY) ?? "";
}

export function useKey(given) {
  if (given) sessionStorage.setItem(KEY, given);
  else sessionStorage.removeItem(KEY);
}

// An answer that is an error. `status`: 0 if there was no answer.
export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

async function refusal(response) {
  const body = await response.json().catch(() => ({}));
  return new Refused(response.status, body.error?.message ?? `the server answered ${response.status}`);
}

// Makes a request, with `body` as JSON. Throws `Refused`.
export async function ask(method, path, body, options = {}) {
  const headers = { accept: "application/json", ...options.headers };
  if (key()) headers.authorization = `Bearer ${key()}`;
  if (body !== undefined) headers["content-type"] = "application/json";
  let response;
  try {
    response = await fetch(path, {
      method,
      headers,
      body: body === undefined ? undefined : JSON.stringify(body),
      signal: options.signal,
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refused(0, "the server does not answer");
  }
  if (!response.ok) throw await refusal(response);
  return response;
}

export async function json(method, path, body) {
  const response = await ask(method, path, body);
  return response.status === 204 ? null : response.json();
}

// Yields {name, data} for each event of a stream, with data parsed.
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let pending = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      pending += value;
      let end;
      while ((end = pending.indexOf("\n\n")) >= 0) {
        const lines = pending.slice(0, end).split("\n");
        pending = pending.slice(end + 2);
        const field = (name) =>
          lines
            .filter((line) => line.startsWith(`${name}:`))
            .map((line) => line.slice(name.length + 1).trimStart())
            .join("\n");
        const data = field("data");
        if (data) yield { name: field("event") || "message", id: field("id"), data: JSON.parse(data) };
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

// Calls `told` with every event of the map's feed, and connects again when the connection is lost. `state` is called
// with "live", "lost" or "key". Returns a function that ends it.
export function follow(told, state) {
  const ending = new AbortController();
  (async () => {
    let wait = 250;
    while (!ending.signal.aborted) {
      try {
        const response = await ask("GET", "/map/feed", undefined, {
          headers: { accept: "text/event-stream" },
          signal: ending.signal,
        });
        for await (const event of events(response)) {
          if (event.name === "error") throw new Refused(503, event.data.message);
          if (event.name === "map") state("live");
          wait = 250;
          told(event.name, event.data);
        }
        state("lost", "the stream ended");
      } catch (error) {
        if (ending.signal.aborted) return;
        if (error.status === 401 || error.status === 403) {
          state("key", error.message);
          return;
        }
        state("lost", error.message);
      }
      await new Promise((done) => setTimeout(done, wait));
      wait = Math.min(5000, wait * 2);
    }
  })();
  return () => ending.abort();
}
