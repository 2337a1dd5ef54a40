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

// Airflow's own API, if Airflow serves this page: null if it does not answer, or not to this user.
async function airflowApi(path, signal) {
  if (!base.pathname.endsWith("/trainwright/")) return null; // `trainwright serve`
  const headers = { Accept: "application/json" };
  const answer = await fetch(new URL(`../api/v2/${path}`, base), { headers, credentials: "same-origin", signal });
  return answer.ok ? answer.json() : null;
}

const ERROR_LINE = /^[a-z_]+: \S/; // as operators log it: `kind: what is wrong; what is allowed`

const errorLines = new Map(); // by the path of a log; a log is read until it has one

// The failed tasks of a DAG run: each with the error's line from its log, or null if the log has none.
export async function failedTasks(dag, run, signal) {
  const path = `dags/${encodeURIComponent(dag)}/dagRuns/${encodeURIComponent(run)}/taskInstances`;
  const failed = (await airflowApi(`${path}?state=failed`, signal))?.task_instances ?? [];
  return Promise.all(failed.map(async ({ task_id: task, try_number: attempt, map_index: index }) => {
    const of = `${path}/${encodeURIComponent(task)}/logs/${attempt}?map_index=${index}&full_content=true`;
    if (!errorLines.has(of)) {
      const lines = (await airflowApi(of, signal))?.content ?? [];
      const line = lines.find(({ level, event }) => level === "error" && ERROR_LINE.test(event))?.event;
      if (line !== undefined) errorLines.set(of, line);
    }
    return { task, line: errorLines.get(of) ?? null };
  }));
}

export const query = (fields) =>
  new URLSearchParams(Object.entries(fields).filter(([, value]) => value !== null && value !== undefined && value !== "")).toString();

// `job/id`, checked: a name from an address is put into a path only if it looks like a run.
export const RUN = /^[a-z0-9-]{1,63}\/[0-9]{8}T[0-9]{6}Z-[0-9a-f]{6}$/;
