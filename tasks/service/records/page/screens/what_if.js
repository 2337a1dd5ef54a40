// What if: the plan for a run's question, or a model's, with other limits; nothing is leased or started.

import { get, post, query, RUN } from "../api.js";
import { alertOf, card, h } from "../dom.js";
import { money, seconds } from "../format.js";
import { planView } from "./plan.js";
import { recommendationView } from "./recommendation.js";

export async function show(root, { fields }, signal) {
  let away = null; // set if the store is unreachable; a model's code can still be planned
  const [{ runs }, served] = await Promise.all([get("runs?limit=300", signal).catch((error) => {
    if (error.status !== 503) throw error;
    away = error;
    return { runs: [] };
  }), get("pools", signal)]);
  const given = fields.get("run");
  const newest = new Map();
  for (const run of runs) if (!newest.has(run.job) && run.state !== "damaged") newest.set(run.job, `${run.job}/${run.id}`);
  const choices = [...new Set([...(RUN.test(given ?? "") ? [given] : []), ...newest.values()])];
  const option = (value, text, selected = false) => h("option", { value, selected }, text);
  const model = h("select", { name: "model", onchange: () => fill() },
    h("optgroup", { label: "as in the run" }, choices.map((name) => option(`run:${name}`, name.replace("/", "  "), name === given))),
    h("optgroup", { label: "a model's code (needs the right to start runs)" }, served.models.map((name) => option(`file:${name}`, name))),
    h("optgroup", { label: "none yet (needs the right to start runs)" }, option("recommend:", "recommended for the data")));
  const text = (name, placeholder, pattern = null) => h("input", { name, placeholder, pattern, maxlength: 40, autocomplete: "off" });
  const field = (label, control, hint = "", double = false) => h("label", { class: double ? "double" : null }, label, control, h("span", { class: "hint" }, hint));
  const answer = h("div", { class: "stack", "aria-live": "polite" });
  const submit = h("button", { class: "first", type: "submit" }, "Plan");
  const said = h("span", { class: "muted", role: "status" });
  const unlike = h("p", { class: "note wide", role: "status" });
  let asked = null;
  let question = null; // the run's own, which the fields show; null without a run
  const form = h("form", { class: "fields", onsubmit: async (event) => {
    event.preventDefault();
    asked?.abort();
    asked = new AbortController();
    signal.addEventListener("abort", () => asked.abort());
    submit.disabled = true;
    said.textContent = "planning …";
    try {
      const body = request(new FormData(form), question);
      const wanted = model.value === "recommend:" ? "recommendations" : "plans";
      const found = await post(wanted, body, asked.signal);
      answer.replaceChildren();
      tell(answer, found);
    } catch (error) {
      if (asked.signal.aborted) return;
      if (!error.kind) console.error(error);
      answer.replaceChildren(alertOf(error));
    } finally {
      submit.disabled = false;
      said.textContent = "";
    }
  } },
  field("Model", model, "a run's structure and data, or a file", true),
  field("Data", h("input", { name: "data", placeholder: "as in the run", maxlength: 500 }), "without a run: builtin:NAME, s3://…, a path"),
  field("Target", h("input", { name: "target", placeholder: "label", maxlength: 200, autocomplete: "off" }), "the column to predict, with Data"),
  field("Pool", h("select", { name: "pool" }, option("", "as in the run"), option("machine:", "this machine"), served.pools.map((name) => option(name, name))), "without a run: this machine"),
  field("Minimize", h("select", { name: "minimize" }, option("energy", "energy"), option("time", "time"), option("cost", "cost"))),
  field("Deadline", text("deadline", "none"), "such as 30m or 2h"),
  field("Budget", text("budget", "none", "[0-9]+([.][0-9]+)?"), "in the pool's currency"),
  field("Limits hold with", text("confidence", "0.9", "0?[.][0-9]+"), "this probability; the plan says: at most (90 %)"),
  field("Epochs", text("epochs", "the model's own", "[0-9]+")),
  field("Global batch size", text("global_batch_size", "auto", "[0-9]+|auto"), "samples, or auto"),
  field("Layout", h("select", { name: "layout" }, option("", "as in the run"), served.layouts.map((name) => option(name, name)))),
  field("Devices at most", text("max_count", "all", "[0-9]+")),
  h("div", { class: "wide" }, submit, said), unlike);
  root.append(h("h1", {}, "What if"), h("p", { class: "note" },
    "A model, data and limits: what would it take? Predicted only; no device is leased and nothing is started."),
  away ? alertOf({ message: `No runs to choose from: ${away.message}` }) : "", card("Question", form), answer);

  // Show the chosen run's question, so that every field says what is asked.
  async function fill() {
    question = null;
    unlike.textContent = "";
    const chosen = model.value;
    const name = chosen.startsWith("run:") ? chosen.slice("run:".length) : null;
    submit.disabled = name !== null;
    try {
      const own = name === null ? null : await ofRun(name, signal);
      if (model.value !== chosen) return; // another model was chosen meanwhile
      question = own;
    } catch (error) {
      if (signal.aborted || model.value !== chosen) return;
      answer.replaceChildren(alertOf(error));
      return;
    }
    submit.disabled = false;
    const shown = question ? fieldsOf(question) : {};
    for (const control of form.elements) {
      if (!control.name || control === model) continue;
      if (["data", "target"].includes(control.name)) control.readOnly = question !== null; // a run brings its own
      control.value = fields.get(control.name) ?? shown[control.name] ?? (control.name === "minimize" ? "energy" : "");
    }
    if (question) unlike.textContent = `As in the run: ${inWords(question)}.`;
  }
  await fill();
}

// The run's question as a request for a plan: its job as it ran, with its structure, data and estimate, which the service reads.
async function ofRun(name, signal) {
  if (!RUN.test(name)) throw Object.assign(new Error("Choose a run whose model was extracted."), { kind: "bad_input" });
  const { job_used: job } = await get(`runs/${name}`, signal);
  const { uri, target, task, validation_fraction } = job.data;
  return { run: name, name: job.name, data: { uri, target, task, validation_fraction }, train: job.train, objective: job.objective, devices: job.devices, pool_file: job.pool };
}

const inWords = ({ train, pool_file: pool }) => [`${train.optimizer.name}, ${train.precision}`,
  train.global_batch_size === "auto" ? `batch from ${train.batch_bounds.join(" to ")}` : null,
  typeof train.layout === "string" ? null : `layout ${JSON.stringify(train.layout)}`, `pool ${pool ? pool.split("/").pop() : "of this machine"}`].filter(Boolean).join(", ");

// "1800.0s" as "30m"
function duration(value) {
  const seconds_ = Number.parseFloat(value);
  const [size, unit] = [[3600, "h"], [60, "m"]].find(([one]) => seconds_ % one === 0) ?? [1, "s"];
  return `${seconds_ / size}${unit}`;
}

const filled = (value) => (value === null || value === undefined ? "" : String(value));

// What the form's fields show of a question.
const fieldsOf = ({ train, objective, devices }) => ({
  minimize: objective.minimize,
  deadline: objective.deadline === null ? "" : duration(objective.deadline),
  budget: filled(objective.budget),
  confidence: filled(objective.confidence),
  epochs: filled(train.epochs),
  global_batch_size: filled(train.global_batch_size),
  layout: typeof train.layout === "string" ? train.layout : "",
  max_count: filled(devices.max_count),
});

const numbered = (text) => (text === "auto" ? text : Number(text));

// The request: the run's question with the fields that were changed, or one of the fields alone.
function request(form, question) {
  const [kind, name] = [form.get("model").slice(0, form.get("model").indexOf(":")), form.get("model").slice(form.get("model").indexOf(":") + 1)];
  const value = (field) => (form.get(field) ?? "").trim();
  const own = question ? fieldsOf(question) : {};
  const changed = (field) => value(field) !== (own[field] ?? "");
  if (kind !== "run" && !value("data")) throw Object.assign(new Error("Data: name the data, such as builtin:digits or a path."), { kind: "bad_input" });
  const { pool_file: file, ...body } = structuredClone(question ?? { name: "what-if", data: { uri: value("data") }, train: {}, objective: {} });
  if (kind === "file") body.model = { source: name };
  if (kind !== "run" && value("target")) body.data.target = value("target");
  if (value("pool")) {
    body.pool = value("pool") === "machine:" ? null : value("pool");
    body.devices = {}; // what the run demands of devices is about its own pool
  }
  body.objective.minimize = value("minimize");
  if (changed("deadline")) body.objective.deadline = value("deadline") || null;
  if (changed("budget")) body.objective.budget = value("budget") ? Number(value("budget")) : null;
  if (changed("confidence") && value("confidence")) body.objective.confidence = Number(value("confidence"));
  if (changed("epochs") && value("epochs")) body.train.epochs = Number(value("epochs"));
  if (changed("global_batch_size")) body.train.global_batch_size = numbered(value("global_batch_size") || "auto");
  if (changed("layout") && value("layout")) body.train.layout = value("layout");
  body.devices = { ...body.devices, max_count: value("max_count") ? Number(value("max_count")) : null };
  return body;
}

function tell(root, plan) {
  if (plan.candidates) {
    recommendationView(root, plan);
    return;
  }
  if (plan.feasible) {
    planView(root, plan, "It would take");
    return;
  }
  const { error } = plan;
  const nearest = [["nearest_deadline_s", "deadline", seconds], ["nearest_budget", "budget", money]]
    .filter(([name]) => typeof error[name] === "number").map(([name, what, unit]) => `nearest ${what} that is feasible: ${unit(error[name]).text}`);
  root.append(h("section", { class: "card error", role: "alert", "data-binding": error.binding }, h("h2", {}, "Not feasible"),
    h("p", {}, error.message), nearest.map((line) => h("p", {}, line))));
}
