// Conversations as this browser remembers them: branches, each a session of the server with the turns that it has.

const STORE = "tenuto-talks";
const MOST = 60;

let last = 0;
const unique = () => `${Date.now().toString(36)}${(last++).toString(36)}${Math.random().toString(36).slice(2, 6)}`;

export function load() {
  try {
    return JSON.parse(localStorage.getItem(STORE)) ?? [];
  } catch {
    return [];
  }
}

export function save(talks) {
  const kept = talks.filter((talk) => talk.branches.some((branch) => branch.turns.length)).slice(0, MOST);
  try {
    localStorage.setItem(STORE, JSON.stringify(kept));
  } catch {
    localStorage.setItem(STORE, JSON.stringify(kept.slice(0, 8))); // the browser's store is full
  }
}

export function newTalk() {
  return { id: unique(), at: Date.now(), current: 0, branches: [{ session: null, turns: [] }] };
}

export function newTurn(text) {
  return { id: unique(), user: text, text: "", reasoning: "", calls: [], state: "waiting" };
}

export function titleOf(talk) {
  return talk.branches[talk.current].turns[0]?.user.slice(0, 60) ?? "New conversation";
}

const agree = (one, two, count) => one.turns.slice(0, count).every((turn, i) => turn.id === two.turns[i]?.id);

// Returns the branches that one can switch to at turn `at`: one for each turn that follows the same beginning.
export function alternatives(talk, at) {
  const mine = talk.branches[talk.current];
  const found = new Map();
  talk.branches.forEach((branch, index) => {
    const turn = branch.turns[at];
    if (!turn || !agree(branch, mine, at)) return;
    if (!found.has(turn.id) || index === talk.current) found.set(turn.id, index);
  });
  return [...found.values()];
}
