// Compares the chosen runs; without any, shows each job's history.

import { get, query, RUN } from "../api.js";
import { lines } from "../charts.js";
import { alertOf, badge, card, h, table } from "../dom.js";
import { errorOf, joules, metric, moment, percent, plain, seconds, signed, whole } from "../format.js";
import { NO_RUNS } from "./runs.js";
import { Series, throughput } from "./series.js";

const MOST = 8;

export async function show(root, { fields }, signal) {
  const names = (fields.get("runs") ?? "").split(",").filter((name) => RUN.test(name));
  if (names.length) await sideBySide(root, names, signal);
  else await history(root, fields.get("job"), signal);
}

const best = (one) => (one.best === null ? null : { text: `${one.best_metric.replaceAll("_", " ")} ${metric(one.best).text}`, value: one.best });

async function history(root, job, signal) {
  const found = await get(`history?${query({ job })}`, signal);
  root.append(h("h1", {}, job ? `History of ${job}` : "History"));
  if (!found.jobs.length) {
    root.append(h("p", { class: "note" }, NO_RUNS));
    return;
  }
  root.append(card("Jobs", table("Jobs", [["job", "name"], ["runs", "number"], ["succeeded", "number"], ["failed", "number"], ["running", "number"],
    ["median duration", "number"], ["prediction error", "number"], ["median energy", "number"], ["best result", "number"], ["newest", "name"]],
  found.jobs.map((one) => [h("a", { href: `#/compare?${query({ job: one.job })}` }, one.job), whole(one.runs), whole(one.succeeded), whole(one.failed),
    whole(one.running), seconds(one.median_duration_s), signed(one.median_duration_error), joules(one.median_energy_j), best(one),
    h("a", { href: `#/run/${one.job}/${one.newest}` }, one.newest)]))));
  const of = (name) => found.runs.filter((run) => run.job === name);
  const own = of(job ?? found.jobs.map((one) => one.job).find((name) => of(name).length > 1));
  if (own.length < 2) return;
  const name = own[0].job;
  const x = own.map((_, index) => index + 1);
  const charts = h("div", { class: "charts" });
  root.append(charts);
  const duration = lines(charts, `${name}: duration`, { unit: "s", x: "run", points: true, cursor: "history" });
  duration.set([x, own.map((run) => run.duration_s), own.map((run) => run.predicted_duration_s?.median ?? null)], ["measured", "predicted"]);
  const energy = lines(charts, `${name}: energy`, { unit: "J", x: "run", points: true, cursor: "history" });
  energy.set([x, own.map((run) => run.energy_j), own.map((run) => run.predicted_energy_j?.median ?? null)], ["measured", "predicted"]);
  const metrics = [...new Set(own.flatMap((run) => Object.keys(run.metrics)))].filter((one) => one !== "loss").slice(0, 4);
  const quality = lines(charts, `${name}: result`, { x: "run", points: true, cursor: "history" });
  quality.set([x, ...metrics.map((one) => own.map((run) => run.metrics[one] ?? null))], metrics);
}

async function sideBySide(root, chosen, signal) {
  const names = chosen.slice(0, MOST);
  root.append(h("div", { class: "head" }, h("h1", {}, names.length > 1 ? `Compare ${names.length} runs` : "Compare"),
    h("span", { class: "muted" }, names.length === 1 ? "choose more runs on the Runs screen" : chosen.length > MOST ? `the first ${MOST} of ${chosen.length}` : "")));
  const found = await Promise.all(names.map(async (name) => {
    try {
      const [run, series] = await Promise.all([get(`runs/${name}`, signal), new Series(name).read(signal)]);
      return { name, run, series };
    } catch (error) {
      if (error.status !== 404) throw error;
      return { name, missing: error };
    }
  }));
  for (const { missing } of found) if (missing) root.append(alertOf(missing));
  const runs = found.filter((one) => one.run);
  if (!runs.length) return;
  root.append(card("Figures", table("Figures of the runs",
    [["", "name"], ...runs.map(({ name }) => [heading(name), "number"])], figures(runs))));
  const charts = h("div", { class: "charts" });
  root.append(charts);
  overlay(charts, "Loss", "step", runs, ({ series }) => series.joint((rows) => rows[0].loss));
  overlay(charts, "Throughput", "step", runs, ({ series }) => series.joint(throughput), "samples/s");
  overlay(charts, "Learning rate", "step", runs, ({ series }) => series.joint((rows) => rows[0].learning_rate));
  const name = [...new Set(runs.flatMap(({ run }) => Object.keys(run.metrics)))].find((one) => one !== "loss") ?? "loss";
  overlay(charts, `Validation ${name}`, "epoch", runs,
    ({ series }) => [series.epochs.map((row) => row.epoch + 1), series.epochs.map((row) => row[name] ?? null)], "", true);
}

// Job and run on two lines, so that a column is only as wide as its figures.
const heading = (name) => h("a", { class: "run", href: `#/run/${name}` }, name.split("/")[0], h("br"), name.split("/")[1]);

function overlay(charts, title, x, runs, column, unit = "", points = false) {
  const columns = runs.map(column);
  const steps = [...new Set(columns.flatMap(([own]) => own))].sort((one, other) => one - other);
  const data = columns.map(([own, values]) => {
    const by = new Map(own.map((at, index) => [at, values[index]]));
    return steps.map((at) => by.get(at) ?? null);
  });
  lines(charts, title, { x, unit, points, cursor: `compare ${x}` }).set([steps, ...data], runs.map(({ name }) => name));
}

function figures(runs) {
  const row = (title, value) => [title, ...runs.map(({ run, series }) => value(run, series))];
  const metrics = [...new Set(runs.flatMap(({ run }) => Object.keys(run.metrics)))];
  return [
    row("state", (run) => badge(run.state, run.measured === null || run.manifest !== null)),
    row("started", (run) => moment(run.started_at)),
    ...metrics.map((name) => row(name, (run) => metric(run.metrics[name]))),
    row("duration", (run) => seconds(run.measured?.duration_s)),
    row("duration predicted", (run) => seconds(run.predicted?.duration_s.median)),
    row("prediction error", (run) => errorOf(run.predicted?.duration_s, run.measured?.duration_s)),
    row("step time", (run) => seconds(run.measured?.step_time_s?.median)),
    row("energy", (run) => joules(run.measured?.energy_j)),
    row("energy predicted", (run) => joules(run.predicted?.energy_j?.median)),
    row("learning rate", (run) => plain(run.learning_rate)),
    row("global batch size", (run) => whole(run.global_batch_size)),
    row("devices", (run) => whole((run.devices.length || run.planned.length))),
    row("steps", (run, series) => whole(run.result?.steps ?? series.last + 1)),
    row("time spent waiting", (run) => percent(waited(run))),
  ];
}

// The share of waiting in the ranks' own work plus waiting.
function waited(run) {
  const steps = run.result?.steps;
  if (!steps) return null;
  const wait = run.devices.reduce((sum, one) => sum + one.wait_s, 0);
  const own = run.devices.reduce((sum, one) => sum + steps * (one.step_time_s?.median ?? 0), 0);
  return wait + own > 0 ? wait / (wait + own) : null;
}
