// The page's frame: chooses the screen by the address, handles login and the theme.

import { keep, login, query } from "./api.js";
import { repaint } from "./charts.js";
import { alertOf, h } from "./dom.js";
import { show as compare } from "./screens/compare.js";
import { show as pool } from "./screens/pool.js";
import { airflow, show as run } from "./screens/run.js";
import { show as runs } from "./screens/runs.js";
import { show as whatIf } from "./screens/what_if.js";

const SCREENS = { pool, runs, run, compare, "what-if": whatIf, airflow };
const PART_OF = { run: "runs", airflow: "runs" };
const main = document.getElementById("main");
const state = document.getElementById("state");
let leaving = new AbortController();

function report(error) {
  if (error === null) {
    state.textContent = "";
    return;
  }
  if (error.status === 401) {
    askToken();
    return;
  }
  if (error.kind === "unreachable" || error.status === 503) state.textContent = error.message;
  else main.replaceChildren(alertOf(error));
}

function askToken() {
  leaving.abort();
  if (login !== "token") {
    main.replaceChildren(alertOf({ message: "Airflow's login has ended; log in to Airflow again." }));
    return;
  }
  const refused = keep(null);
  const given = h("input", { type: "password", name: "token", autocomplete: "off", required: true });
  const form = h("form", { class: "fields", onsubmit: (event) => {
    event.preventDefault();
    keep(given.value.trim());
    open();
  } },
  h("label", {}, "Token", given, h("span", { class: "hint" }, "What trainwright serve prints says which file holds it")),
  refused ? h("p", { class: "wide", role: "alert" }, "This token is not the service's.") : null,
  h("div", { class: "wide" }, h("button", { class: "first", type: "submit" }, "Log in")));
  main.replaceChildren(h("section", { class: "card", "aria-label": "Log in" }, h("h1", {}, "Log in"), form));
  given.focus();
}

async function open() {
  leaving.abort();
  leaving = new AbortController();
  const { signal } = leaving;
  const [path, search] = location.hash.replace(/^#\/?/, "").split("?");
  const [name, ...rest] = (path || "pool").split("/");
  const screen = Object.hasOwn(SCREENS, name) ? name : "pool";
  for (const link of document.querySelectorAll("nav a")) {
    if (link.hash === `#/${PART_OF[screen] ?? screen}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  document.title = `${screen === "run" && rest.length ? rest.join("/") : screen} – trainwright`;
  main.replaceChildren();
  try {
    await SCREENS[screen](main, { path: rest.join("/"), fields: new URLSearchParams(search ?? "") }, signal, report);
  } catch (error) {
    if (signal.aborted) return;
    if (!error.kind) console.error(error);
    report(error);
  }
}

// The theme: Airflow's, if this page is in a frame of Airflow's; else the browser's.
function follow() {
  const root = document.documentElement;
  if (window.parent === window) return;
  root.dataset.framed = "";
  try {
    const theirs = window.parent.document.documentElement;
    const take = () => {
      root.dataset.theme = theirs.classList.contains("dark") ? "dark" : "light";
      repaint();
    };
    new MutationObserver(take).observe(theirs, { attributes: true, attributeFilter: ["class"] });
    take();
  } catch {
    return; // a frame of another origin: keep the browser's theme
  }
}

// Airflow puts its values into the query: `?screen=airflow&dag=…&run=…`
function entry() {
  const fields = new URLSearchParams(location.search);
  if (fields.has("screen") && !location.hash) {
    const { screen, ...others } = Object.fromEntries(fields);
    history.replaceState(null, "", `#/${screen}${Object.keys(others).length ? "?" : ""}${query(others)}`);
  }
}

follow();
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", repaint);
window.addEventListener("hashchange", () => {
  open();
  main.focus({ preventScroll: true });
  window.scrollTo(0, 0);
});
entry();
open();
