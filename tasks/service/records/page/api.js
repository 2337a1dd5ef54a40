// Sends requests to the service: with `serve`, with a token kept for this tab; in Airflow, with the browser's login.

export const base = new URL("../", document.baseURI);
const KEY = "trainwright-token";

export class Refused extends Error {
  constructor(status, error) {
    super(error.message);
    this.status = status;
    this.kind = error.kind;
    this.details = error;
  }
}

export const login = document.documentElement.dataset.login;

// Set or clear the token; returns whether there was one before.
export function keep(token) {
  const before = sessionStorage.getItem(KEY) !== null;
  if (token) sessionStorage.setItem(KEY, token);
  else sessionStorage.removeItem(KEY);
  return before;
}

async function ask(path, options = {}) {
  const headers = { ...options.headers };
  const token = login === "token" ? sessionStorage.getItem(KEY) : null;
  if (token) headers.Authorization = `Bearer ${token}`;
  let answer;
  try {
    answer = await fetch(new URL(path, base), { ...options, headers, credentials: "same-origin" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refused(0, { kind: "unreachable", message: "The service does not answer; trying again." });
  }
  if (answer.ok) return answer;
  const body = await answer.json().catch(() => ({}));
  throw new Refused(answer.status, body.error ?? { kind: "failed", message: `The service answered ${answer.status}.` });
}

export async function get(path, signal) {
  return (await ask(path, { signal })).json();
}

export async function post(path, body, signal) {
  const headers = { "Content-Type": "application/json" };
  return (await ask(path, { method: "POST", headers, body: JSON.stringify(body), signal })).json();
}

export async function file(path) {
  return (await ask(path)).blob();
}

export const query = (fields) =>
  new URLSearchParams(Object.entries(fields).filter(([, value]) => value !== null && value !== undefined && value !== "")).toString();

// `job/id`, checked: a name from an address is put into a path only if it looks like a run.
export const RUN = /^[a-z0-9-]{1,63}\/[0-9]{8}T[0-9]{6}Z-[0-9a-f]{6}$/;
