// What if: the plan for a model and limits; nothing is leased or started.

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
  const model = h("select", { name: "model" },
    h("optgroup", { label: "as in the run" }, choices.map((name) => option(`run:${name}`, name.replace("/", "  "), name === given))),
    h("optgroup", { label: "a model's code (needs the right to start runs)" }, served.models.map((name) => option(`file:${name}`, name))),
    h("optgroup", { label: "none yet (needs the right to start runs)" }, option("recommend:", "recommended for the data")));
  const data = h("input", { name: "data", placeholder: "as in the run", maxlength: 500 });
  const text = (name, placeholder, pattern = null) => h("input", { name, placeholder, pattern, maxlength: 40, autocomplete: "off" });
  const field = (label, control, hint = "", double = false) => h("label", { class: double ? "double" : null }, label, control, h("span", { class: "hint" }, hint));
  const answer = h("div", { class: "stack", "aria-live": "polite" });
  const submit = h("button", { class: "first", type: "submit" }, "Plan");
  const said = h("span", { class: "muted", role: "status" });
  let asked = null;
  const form = h("form", { class: "fields", onsubmit: async (event) => {
    event.preventDefault();
    asked?.abort();
    asked = new AbortController();
    signal.addEventListener("abort", () => asked.abort());
    submit.disabled = true;
    said.textContent = "planning …";
    try {
      const body = await request(new FormData(form), served.pools, asked.signal);
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
  field("Model", model, "a run's structure and data, or a file", true), field("Data", data, "unless as in the run: builtin:NAME, s3://…, a path"),
  field("Target", h("input", { name: "target", placeholder: "label", maxlength: 200, autocomplete: "off" }), "the column to predict, with Data"),
  field("Pool", h("select", { name: "pool" }, option("", "as in the run"), option("machine:", "this machine"), served.pools.map((name) => option(name, name))),
    "without a run, or if its pool is none of these: this machine"),
  field("Minimize", h("select", { name: "minimize" }, option("energy", "energy"), option("time", "time"), option("cost", "cost"))),
  field("Deadline", text("deadline", "none"), "such as 30m or 2h"),
  field("Budget", text("budget", "none", "[0-9]+([.][0-9]+)?"), "in the pool's currency"),
  field("Limits hold with", text("confidence", "0.9", "0?[.][0-9]+"), "this probability; the plan says: at most (90 %)"),
  field("Epochs", text("epochs", "as in the run", "[0-9]+")),
  field("Global batch size", text("global_batch_size", "as in the run", "[0-9]+|auto"), "samples, or auto"),
  field("Layout", h("select", { name: "layout" }, option("", "as in the run"), served.layouts.map((name) => option(name, name)))),
  field("Devices at most", text("max_count", "all", "[0-9]+")),
  h("div", { class: "wide" }, submit, said));
  root.append(h("h1", {}, "What if"), h("p", { class: "note" },
    "A model, data and limits: what would it take? Predicted only; no device is leased and nothing is started."),
  away ? alertOf({ message: `No runs to choose from: ${away.message}` }) : "", card("Question", form), answer);
}

async function request(form, pools, signal) {
  const [kind, name] = [form.get("model").slice(0, form.get("model").indexOf(":")), form.get("model").slice(form.get("model").indexOf(":") + 1)];
  const value = (field) => (form.get(field) ?? "").trim();
  if (kind !== "run" && !value("data")) throw Object.assign(new Error("Data: name the data, such as builtin:digits or a path."), { kind: "bad_input" });
  const body = kind === "run" ? await ofRun(name, value("pool"), pools, signal) : { name: "what-if", data: { uri: value("data") }, train: {} };
  if (kind === "file") body.model = { source: name };
  if (kind !== "run" && value("target")) body.data.target = value("target");
  if (value("pool") && value("pool") !== "machine:") body.pool = value("pool");
  body.objective = { minimize: value("minimize") };
  if (value("deadline")) body.objective.deadline = value("deadline");
  if (value("budget")) body.objective.budget = Number(value("budget"));
  if (value("confidence")) body.objective.confidence = Number(value("confidence"));
  if (value("epochs")) body.train.epochs = Number(value("epochs"));
  if (value("global_batch_size")) body.train.global_batch_size = value("global_batch_size") === "auto" ? "auto" : Number(value("global_batch_size"));
  if (value("layout")) body.train.layout = value("layout");
  if (value("max_count")) body.devices = { ...body.devices, max_count: Number(value("max_count")) };
  return body;
}

// The run's job, with its model's structure and its data's schema, so that neither code nor data is read.
// What it demands of devices is about its own pool, so it is left out for another one.
async function ofRun(name, chosen, pools, signal) {
  if (!RUN.test(name)) throw Object.assign(new Error("Choose a run whose model was extracted."), { kind: "bad_input" });
  const [run, structure] = await Promise.all([get(`runs/${name}`, signal), get(`runs/${name}/structure`, signal)]);
  const { job_file: job } = run;
  const { uri, target, task, validation_fraction } = job.data;
  const body = { name: job.name, structure, train: job.train, data: { uri, target, task, validation_fraction } };
  const known = job.pool && pools.includes(job.pool.split("/").pop().replace(/[.]yaml$/, ""));
  if (!chosen && known) body.pool = job.pool;
  if (!chosen && (known || !job.pool)) body.devices = job.devices;
  if (run.data) body.data_schema = run.data;
  else throw Object.assign(new Error("The run's data were not validated, so their size is not known."), { kind: "bad_input" });
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
