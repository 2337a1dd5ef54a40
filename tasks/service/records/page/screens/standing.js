// Where a run stands, before all figures: its verdicts, why it ended and the way out, its place in the queue, its progress.

import { base, login, query } from "../api.js";
import { card, h, runLink, table } from "../dom.js";
import { coarse, money, percent, seconds, whole } from "../format.js";

const KINDS = { true: "good", false: "bad", null: "open" };

export const verdicts = (run) => (run.verdicts.length
  ? h("section", { class: "card verdicts", "aria-label": "Verdicts" }, run.verdicts.map((one) => h("p", { class: `verdict ${KINDS[one.good]}`, "data-verdict": one.kind }, one.words))) : null);

const TITLES = { infeasible: "Not feasible", data_rejected: "The data was rejected", interrupted: "Interrupted" };

// Why a run ended, what can be done, and what of the data failed.
export function failure(run, name) {
  const { error } = run;
  if (!error) return null;
  const title = TITLES[error.kind] ?? `Failed in the step ${run.step ?? "before the first"}`;
  return h("section", { class: "card error", role: "alert" }, h("h2", {}, title), h("p", {}, error.message ?? "The run failed."),
    waysOut(error, run, name), failed(run.failures));
}

function waysOut(error, run, name) {
  const ways = [];
  const ask = (fields, text) => h("a", { class: "button", href: `#/what-if?${query({ run: name, ...fields })}` }, text);
  if (typeof error.nearest_deadline_s === "number") {
    ways.push(ask({ deadline: `${Math.ceil(error.nearest_deadline_s)}s` }, `What if the deadline were ${seconds(error.nearest_deadline_s).text}`));
  }
  if (typeof error.nearest_budget === "number") ways.push(ask({ budget: error.nearest_budget }, `What if the budget were ${money(error.nearest_budget, run.currency ?? "").text}`));
  if (error.kind === "data_rejected") ways.push(...opened(`runs/${name}/rejection`, "rejection", "page of the rejected data"));
  return ways.length ? h("p", { class: "ways" }, ways) : null;
}

// A document of the service: a link if the browser has a login there, and a button that saves it.
export const opened = (path, button, words, there = true) => [
  ...(login === "token" || !there ? [] : [h("a", { class: "button", href: new URL(path, base).href }, `Open ${words}`)]),
  h("button", { type: "button", name: button, disabled: !there }, `Save ${words}`)];

function failed(failures) {
  if (!failures.length) return null;
  const rows = failures.map((one) => [one.column ?? "the table", one.words, Object.entries(one.expected).map(([key, value]) => `${key}: ${value}`).join(", "),
    one.observed, one.rows === null ? null : whole(one.rows), one.first_rows.join(", ")]);
  return table("Expectations that failed", [["column", "name"], ["expectation", "long"], ["expected", "long"], ["observed", "long"], ["rows", "number"], ["first rows", "name"]], rows);
}

// The place in the queue, and the runs that hold the devices.
export function waiting(run) {
  const place = run.waiting;
  if (!place) return null;
  const holders = place.held_by.map(({ holder, run: held }) => h("li", {}, runLink(held), h("span", { class: "muted" }, `  ${holder}`)));
  return card("Waits for devices", h("p", { "data-place": String(place.place) },
    `Place ${place.place} of ${place.waiting} for ${seconds(place.waited_s).text}; needs ${place.needed} of ${place.of} devices, ${place.free} free.`),
  holders.length ? [h("p", {}, "Held by"), h("ul", {}, holders)] : null);
}

// How far the training is; before it, which step works.
export function progress(run, series) {
  if (run.state !== "running") return null;
  const now = series.progress;
  if (!now || run.step !== "train") {
    return run.waiting || series.steps.size ? null : h("p", { class: "note" }, `${run.step ? `The step ${run.step} works` : "The next step begins"}; curves appear when the training begins.`);
  }
  const left = now.left_s === null ? null : `about ${coarse(now.left_s).text} left`;
  const parts = [`epoch ${now.epoch} of ${now.epochs}`, `step ${whole(now.step).text} of ${whole(now.steps).text}`, percent(now.share).text, left];
  return card("Progress", h("progress", { max: 1, value: now.share, "aria-label": "Progress of the training" }), h("p", { role: "status" }, parts.filter(Boolean).join(" · ")));
}
