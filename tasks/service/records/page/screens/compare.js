// Compares the chosen runs; without any, shows each job's history.

import { get, query, RUN } from "../api.js";
import { lines } from "../charts.js";
import { alertOf, badge, card, h, table } from "../dom.js";
import { errorOf, groupsOf, joules, lessIsBetter, metric, missing, moment, percent, predicted, seconds, signed, whole, words } from "../format.js";
import { NO_RUNS } from "./runs.js";
import { Series, throughput } from "./series.js";

const MOST = 8;

export async function show(root, { fields }, signal) {
  const names = (fields.get("runs") ?? "").split(",").filter((name) => RUN.test(name));
  if (names.length) await sideBySide(root, names, signal);
  else await history(root, fields.get("job"), signal);
}

const best = (one) => (one.best === null ? null : { text: `${words(one.best_metric)} ${metric(one.best).text}`, value: one.best });

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
  for (const [title, metrics] of groupsOf([...new Set(own.flatMap((run) => Object.keys(run.metrics)))])) {
    const quality = lines(charts, `${name}: ${metrics.length > 1 ? title : words(metrics[0])}`, { x: "run", points: true, cursor: "history" });
    quality.set([x, ...metrics.map((one) => own.map((run) => run.metrics[one] ?? null))], metrics.map(words));
  }
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
  const columns = (kind) => [["", "name"], ...runs.map(({ name }) => [heading(name), kind])];
  root.append(card("Figures", table("Figures of the runs", columns("number"), figures(runs)),
    runs.length > 1 && h("p", { class: "note" }, h("span", { class: "best" }, "Bold"), " is the best of its row; metrics of unlike data are not compared.")));
  const fields = jobFields(runs);
  root.append(card("Jobs", table("Fields of the jobs", columns("number breaks"), fields.rows, (index) => (fields.differs[index] ? "differs" : null)),
    runs.length > 1 && h("p", { class: "note" }, fields.differs.some(Boolean) ? "Marked fields differ; they come first." : "The jobs do not differ in these fields.")));
  const charts = h("div", { class: "charts" });
  root.append(charts);
  overlay(charts, "Loss", "step", runs, ({ series }) => series.joint((rows) => rows[0].loss), { log: true });
  overlay(charts, "Throughput", "step", runs, ({ series }) => series.joint(throughput), { unit: "samples/s" });
  overlay(charts, "Learning rate", "step", runs, ({ series }) => series.joint((rows) => rows[0].learning_rate));
  for (const name of measuredByMost(runs)) {
    overlay(charts, `Validation ${words(name)}`, "epoch", runs,
      ({ series }) => [series.epochs.map((row) => row.epoch + 1), series.epochs.map((row) => row[name] ?? null)], { points: true });
  }
}

const MOST_METRICS = 2;

// The metrics to draw: those that most runs have, in the order in which people ask for them; the loss if there is no other.
function measuredByMost(runs) {
  const have = (name) => runs.filter(({ run }) => name in run.metrics).length;
  const names = groupsOf([...new Set(runs.flatMap(({ run }) => Object.keys(run.metrics)))]).flatMap(([, own]) => own);
  const most = Math.max(0, ...names.map(have));
  return most ? names.filter((name) => have(name) === most).slice(0, MOST_METRICS) : ["loss"];
}

// Job and run on two lines, so that a column is only as wide as its figures.
const heading = (name) => h("a", { class: "run", title: name, href: `#/run/${name}` }, name.split("/")[0], h("br"), name.split("/")[1]);

function overlay(charts, title, x, runs, column, options = {}) {
  const columns = runs.map(column);
  const steps = [...new Set(columns.flatMap(([own]) => own))].sort((one, other) => one - other);
  const data = columns.map(([own, values]) => {
    const by = new Map(own.map((at, index) => [at, values[index]]));
    return steps.map((at) => by.get(at) ?? null);
  });
  lines(charts, title, { x, cursor: `compare ${x}`, ...options }).set([steps, ...data], runs.map(({ name }) => name));
}

// Rows of figures; the best value of a row that has one is marked.
function figures(runs) {
  const row = (title, value, better = null) => {
    const cells = runs.map(({ run, series }) => value(run, series));
    return [title, ...(better === null || runs.length < 2 ? cells : withBest(cells, better))];
  };
  const metrics = [...new Set(runs.flatMap(({ run }) => Object.keys(run.metrics)))];
  const comparable = new Set(runs.map(({ run }) => run.trained_with.find((one) => one.field === "data.uri").used)).size === 1;
  return [
    row("state", (run) => badge(run.state, run.measured === null || run.manifest !== null)),
    row("started", (run) => moment(run.started_at)),
    ...metrics.map((name) => row(words(name), (run) => metric(run.metrics[name]), comparable ? (lessIsBetter(name) ? Math.min : Math.max) : null)),
    row("duration", (run) => seconds(run.measured?.duration_s), Math.min),
    row("duration predicted", (run) => predicted(run.predicted?.duration_s, seconds)),
    row("prediction error", (run) => errorOf(run.predicted?.duration_s, run.measured?.duration_s)),
    row("step time", (run) => seconds(run.measured?.step_time_s?.median), Math.min),
    row("energy", (run) => joules(run.measured?.energy_j), Math.min),
    row("energy predicted", (run) => predicted(run.predicted?.energy_j, joules)),
    row("devices", (run) => whole((run.devices.length || run.planned.length))),
    row("steps", (run, series) => whole(run.result?.steps ?? series.last + 1)),
    row("time spent waiting", (run) => percent(waited(run)), Math.min),
  ];
}

// The cells, the best marked; none if all known values are alike.
function withBest(cells, better) {
  const values = cells.map((cell) => cell?.value).filter((value) => typeof value === "number");
  const best = better(...values);
  if (values.length < 2 || values.every((value) => value === best)) return cells;
  return cells.map((cell) => (cell?.value === best ? { ...cell, mark: "best", said: "best" } : cell));
}

// What each job used, field by field; fields that differ come first.
function jobFields(runs) {
  const names = new Map(runs.flatMap(({ run }) => run.trained_with.map((one) => [one.field, one.name])));
  const all = [...names].map(([field, name]) => {
    const used = runs.map(({ run }) => run.trained_with.find((one) => one.field === field)?.used ?? missing.text);
    return { row: [name, ...used], differs: new Set(used).size > 1 };
  });
  const ordered = [...all.filter((one) => one.differs), ...all.filter((one) => !one.differs)];
  return { rows: ordered.map((one) => one.row), differs: ordered.map((one) => one.differs) };
}

// The share of waiting in the ranks' own work plus waiting.
function waited(run) {
  const steps = run.result?.steps;
  if (!steps) return null;
  const wait = run.devices.reduce((sum, one) => sum + one.wait_s, 0);
  const own = run.devices.reduce((sum, one) => sum + steps * (one.step_time_s?.median ?? 0), 0);
  return wait + own > 0 ? wait / (wait + own) : null;
}
