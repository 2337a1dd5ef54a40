// A run's figures: tiles, predictions beside measurements, devices, steps, exports, drift.

import { card, h, table } from "../dom.js";
import { bounds, bytes, inUnit, joules, metric, missing, number, percent, plain, predicted, priced, range, rate, rough, seconds, signed, whole, words } from "../format.js";
import { throughput } from "./series.js";

const median = (values) => {
  const sorted = values.filter((value) => value !== null).sort((one, other) => one - other);
  return sorted.length ? sorted[Math.floor(sorted.length / 2)] : null;
};

export function facts(run, series) {
  const { plan, result } = run;
  const rows = series.newest.filter((row) => row.step === series.last);
  const recent = series.sorted().slice(-20).map((step) => [...series.steps.get(step).values()]);
  const taken = median(recent.map((step) => Math.max(...step.map((row) => row.step_time_s))));
  const total = plan && plan.steps_per_epoch ? plan.steps_per_epoch * plan.epochs : null;
  const guess = run.predicted;
  const measured = result?.measured;
  const running = run.state === "running" && run.started_at ? (Date.now() - Date.parse(run.started_at)) / 1000 : null;
  const done = series.last >= 0 ? series.last + 1 : result?.steps;
  const epochs = result ? `${whole(result.epochs).text} epochs` : null;
  const step = ["step", whole(done), [total ? `of ${whole(total).text} planned` : null, epochs].filter(Boolean).join(", ") || null];
  const speed = [
    ["throughput", rate(median(recent.map(throughput))), "samples, median of 20 steps"],
    ["step time", seconds(measured?.step_time_s?.median ?? taken), range(guess?.step_time_s, seconds)],
    ["duration", seconds(measured?.duration_s ?? running), running !== null && !measured ? "since the run began" : range(guess?.duration_s, seconds)],
  ];
  const results = qualities(run).map(([name, value]) => [name, metric(value), run.model_of ?? "validation"]);
  if (!result) return [step, ["loss", number(rows[0]?.loss), rows.length ? "training, this step" : null],
    ["learning rate", plain(rows[0]?.learning_rate ?? run.learning_rate), run.learning_rate ? `peak ${plain(run.learning_rate).text}` : null],
    ...speed, ["energy", missing, range(guess?.energy_j, joules)], ...results];
  return [...results, ...speed, [`energy${byDatasheet(run)}`, joules(measured.energy_j), range(guess?.energy_j, joules)],
    ...(guess?.cost ? [["cost", priced(plan?.currency)(measured.cost), range(guess.cost, priced(plan?.currency))]] : []),
    ["learning rate", plain(run.learning_rate), `peak, ${run.job_used.train.schedule} schedule`], step];
}

// What the validation found, the target's metric first. The log loss of a classification is its loss.
function qualities(run) {
  const target = run.job_used.train.target?.metric;
  const told = Object.entries(run.metrics).filter(([name, value]) => name !== "train_loss" && !(name === "log_loss" && Math.abs(value - run.metrics.loss) < 1e-3 * value));
  const rank = ([name]) => (name === target ? 0 : name === "loss" ? 2 : 1);
  return told.sort((one, other) => rank(one) - rank(other)).slice(0, 5);
}

// Datasheet power times the measured time is no measured energy.
const byDatasheet = (run) => (run.measured?.energy_source === "datasheet" ? ", by datasheet" : "");

export function predictions(run) {
  if (!run.predicted_and_measured.length) return card("Predicted and measured", h("p", { class: "note" },
    run.state === "running" ? "Measured when training ends." : "Nothing was measured."));
  return card("Predicted and measured", table("Predicted and measured",
    [["quantity", "name"], ["predicted", "number"], ["90 % interval", "number"], ["measured", "number"], ["error", "number"], ["", "name"]],
    run.predicted_and_measured.map((row) => {
      const unit = inUnit(row.unit);
      const triple = { median: row.predicted, low: row.low, high: row.high };
      const within = row.unit === "B" ? `at most ${unit(row.high).text}` : bounds(row.low, row.high, unit); // memory has no lower bound
      return [row.quantity === "energy" ? `energy${byDatasheet(run)}` : row.quantity, predicted(triple, unit),
        within, unit(row.measured), rough(row.low, row.high) ? null : signed(row.error),
        row.inside === null ? null : h("span", { class: row.inside ? "success" : "failed" }, row.inside ? "inside" : "outside")];
    })));
}

export function exportsOf(run) {
  if (!run.exports.length) return null;
  return card("Exports", ...run.exports.map((one) => h("p", {}, `${one.kind}: ${one.metric} ${metric(one.metrics.exported).text}, trained ${metric(one.metrics.trained).text} `,
    ...one.files.map((saved) => h("button", { type: "button", name: "exported", value: `${one.kind}/${saved}` }, saved)))));
}

export function devices(run) {
  if (!run.devices.length) return null;
  return card("Devices", table("Devices", [["rank", "number"], ["device", "name"], ["type", "name"], ["batch size", "number"], ["samples", "number"],
    ["own step time", "number"], ["waited", "number"], ["peak memory", "number"], ["CPU time", "number"]],
  run.devices.map((one) => [whole(one.rank), one.id, one.type, whole(one.batch_size), whole(one.samples), seconds(one.step_time_s?.median),
    seconds(one.wait_s), bytes(one.peak_memory_bytes), seconds(one.cpu_s)])));
}

export function steps(run) {
  const rows = Object.entries(run.steps);
  const whole_s = rows.reduce((sum, [, taken]) => sum + taken, 0);
  return rows.length ? card("Steps of the chain", table("Steps of the chain",
    [["step", "name"], ["took", "number"], ["of all steps", "number"], ["", "long"]],
    rows.map(([name, taken]) => [name, seconds(taken), whole_s > 0 ? percent(taken / whole_s) : null, " "]))) : null;
}

// Columns whose values differ from the reference's. A picture is shown as an image, never as markup of the page.
export function driftOf(drift) {
  if (!drift) return null;
  const count = drift.columns.length;
  const drifted = count ? `${count} of ${drift.compared} columns drifted from ${drift.reference}. Blue: this data; grey: the reference.` : `No column drifted from ${drift.reference}.`;
  return card("Drift", h("p", {}, drifted), drift.columns.map((one) => [h("p", {}, one.line), one.picture &&
    h("img", { src: `data:image/svg+xml,${encodeURIComponent(one.picture)}`, alt: `shares of ${one.line}` })]).flat());
}


// What ran, and beside it what the job says if that differs.
export function trainedWith(run) {
  const differs = run.trained_with.some((field) => field.given !== null);
  return card(run.measured ? "Trained with" : "The job", table("Fields of the job", [["field", "name"], ["used", "long"], ...(differs ? [["the job says", "long"]] : [])],
    run.trained_with.map((field) => [field.name, field.used, ...(differs ? [field.given ?? ""] : [])])));
}
