// A run: progress, live curves, predicted and measured values, events, its plan.

import { base, failedTasks, file, get, post, query, RUN } from "../api.js";
import { lines } from "../charts.js";
import { alertOf, badge, card, every, h, place, table, tiles } from "../dom.js";
import { bounds, bytes, inUnit, joules, metric, missing, moment, money, number, percent, plain, priced, range, rate, seconds, signed, vague, whole } from "../format.js";
import { planView } from "./plan.js";
import { recommendedModel } from "./recommendation.js";
import { merged, Series, throughput } from "./series.js";

export async function airflow(root, { fields }, signal, failed) {
  const holder = `Airflow ${fields.get("dag") ?? ""} ${fields.get("run") ?? ""}`;
  root.append(h("h1", {}, `${fields.get("dag") ?? ""} / ${fields.get("run") ?? ""}`));
  const waiting = place(root, { class: "card" });
  await every(3000, async () => {
    const { runs } = await get(`runs?${query({ holder })}`, signal);
    if (!runs.length) {
      const failures = await failedTasks(fields.get("dag") ?? "", fields.get("run") ?? "", signal);
      waiting(
        ...failures.map(({ task, line }) =>
          h("p", { class: "failed", role: "alert" }, h("strong", {}, `Task ${task} failed`), line ? `: ${line}` : "; its log says why.")),
        h("p", { class: "note" }, failures.length
          ? "No run was opened. Correct what the line names (a field of the job, or of the form), then trigger the DAG again."
          : "This DAG run has opened no run of trainwright yet; one that it opens appears here."));
      return true;
    }
    location.replace(`#/run/${runs[0].job}/${runs[0].id}`);
    return false;
  }, signal, failed);
}

export async function show(root, { path: name, fields }, signal, failed) {
  if (!RUN.test(name)) {
    root.append(alertOf({ message: "There is no such run." }));
    return;
  }
  const [job, id] = name.split("/");
  let run = await get(`runs/${name}`, signal);
  const head = place(root, { class: "head" });
  const failure = place(root);
  const top = place(root);
  const room = h("div", { class: "charts" });
  root.append(room);
  const below = place(root, { class: "stack" });
  const planRoom = h("div", { class: "stack" });
  root.append(planRoom);
  const last = place(root, { class: "stack" });
  const series = new Series(name);
  const charts = curves(room);
  let planned = null;
  let denied = null; // why this client may not start TensorBoard
  let part = fields.get("part"); // the part that a link names: "plan" or "tensorboard"

  const draw = () => {
    head(h("h1", {}, `${job} / ${id}`), h("span", { role: "status" }, badge(run.state, run.measured === null || run.manifest !== null)), h("span", { class: "muted" }, run.step ? `step ${run.step}` : ""),
      h("span", { class: "muted" }, `${run.state === "running" ? "since" : "begun"} ${moment(run.started_at).text}, by ${run.holder}`),
      h("div", { class: "actions" },
        h("button", { type: "button", name: "report", disabled: run.report === null }, "Save report"),
        h("button", { type: "button", name: "tensorboard", disabled: denied !== null }, "TensorBoard"),
        denied && h("span", { class: "muted" }, denied),
        h("a", { class: "button", href: `#/compare?${query({ runs: name })}` }, "Compare"),
        h("a", { class: "button", href: `#/what-if?${query({ run: name })}` }, "What if")));
    failure(run.error ? alertOf({ message: run.error.message ?? "The run failed." }) : null);
    room.hidden = run.plan === null && run.state !== "running"; // it ended before training
    top(room.hidden ? null : tiles(facts(run, series)));
    charts(run, series);
    below(predictions(run), devices(run), exportsOf(run));
    last(recommendedModel(run.recommended), driftOf(run.drift), steps(run), happenings(run, series));
    const key = JSON.stringify(run.plan);
    if (run.plan && key !== planned) {
      planned = key;
      planRoom.replaceChildren();
      planView(planRoom, run.plan, "Plan", () => picture(`runs/${name}/timeline`));
      if (part === "plan") planRoom.scrollIntoView();
      part = null;
    }
  };
  root.addEventListener("click", async (event) => {
    if (event.target.name === "tensorboard") {
      const button = event.target;
      button.disabled = true;
      try {
        location.assign(new URL((await post(`runs/${name}/tensorboard`, {})).path, base)); // a frame in Airflow can't open a window
      } catch (error) {
        if (error.status === 403) denied = error.message;
        failed([403, 404, 422].includes(error.status) ? { kind: "unreachable", message: error.message } : error);
      } finally {
        button.disabled = denied !== null; // `draw` says why
      }
    }
    const exported = event.target.name === "exported" ? event.target.value : null; // kind/file
    if (event.target.name !== "report" && exported === null) return;
    try {
      const path = exported === null ? "report" : `exports/${exported}`;
      const address = URL.createObjectURL(await file(`runs/${name}/${path}`));
      const saved = exported === null ? "report.html" : exported.replace("/", "-");
      h("a", { href: address, download: `${job}-${id}-${saved}` }).click();
      setTimeout(() => URL.revokeObjectURL(address), 10000);
    } catch (error) {
      failed(error);
    }
  }, { signal });

  draw();
  if (part === "tensorboard") root.querySelector("button[name=tensorboard]").click();
  let round = 0;
  await every(1500, async () => {
    if (round > 0 && round % 2 === 0) run = await get(`runs/${name}`, signal);
    round += 1;
    await series.read(signal);
    draw();
    if (run.state === "running") return true;
    const again = await get(`runs/${name}`, signal); // includes what the last step wrote
    const goesOn = again.state === "running";
    if (JSON.stringify(again) !== JSON.stringify(run)) {
      run = again;
      await series.read(signal);
      draw();
    }
    return goesOn;
  }, signal, failed);
}

// A picture of the service as an image's address.
async function picture(path) {
  return `data:image/svg+xml,${encodeURIComponent(await (await file(path)).text())}`;
}

// Columns whose values differ from the reference's. A picture is shown as an image, never as markup of the page.
function driftOf(drift) {
  if (!drift) return null;
  const count = drift.columns.length;
  const drifted = count ? `${count} of ${drift.compared} columns drifted from ${drift.reference}. Blue: this data; grey: the reference.` : `No column drifted from ${drift.reference}.`;
  return card("Drift", h("p", {}, drifted), drift.columns.map((one) => [h("p", {}, one.line), one.picture &&
    h("img", { src: `data:image/svg+xml,${encodeURIComponent(one.picture)}`, alt: `shares of ${one.line}` })]).flat());
}

const median = (values) => {
  const sorted = values.filter((value) => value !== null).sort((one, other) => one - other);
  return sorted.length ? sorted[Math.floor(sorted.length / 2)] : null;
};

function facts(run, series) {
  const { plan, result } = run;
  const rows = series.newest.filter((row) => row.step === series.last);
  const recent = series.sorted().slice(-20).map((step) => [...series.steps.get(step).values()]);
  const taken = median(recent.map((step) => Math.max(...step.map((row) => row.step_time_s))));
  const total = plan && plan.steps_per_epoch ? plan.steps_per_epoch * plan.epochs : null;
  const predicted = run.predicted;
  const measured = result?.measured;
  const running = run.state === "running" && run.started_at ? (Date.now() - Date.parse(run.started_at)) / 1000 : null;
  const done = series.last >= 0 ? series.last + 1 : result?.steps;
  const step = ["step", whole(done), total ? `of ${whole(total).text} planned` : null];
  const speed = [
    ["throughput", rate(median(recent.map(throughput))), "samples, median of 20 steps"],
    ["step time", seconds(measured?.step_time_s?.median ?? taken), range(predicted?.step_time_s, seconds)],
    ["duration", seconds(measured?.duration_s ?? running), running !== null && !measured ? "since the run began" : range(predicted?.duration_s, seconds)],
  ];
  const results = qualities(run).map(([name, value]) => [name, metric(value), run.model_of ?? "validation"]);
  if (!result) return [step, ["loss", number(rows[0]?.loss), rows.length ? "training, this step" : null],
    ["learning rate", plain(rows[0]?.learning_rate ?? run.learning_rate), run.learning_rate ? `peak ${plain(run.learning_rate).text}` : null],
    ...speed, ["energy", missing, range(predicted?.energy_j, joules)], ...results];
  return [...results, ...speed, [`energy${byDatasheet(run)}`, joules(measured.energy_j), range(predicted?.energy_j, joules)],
    ...(predicted?.cost ? [["cost", priced(plan?.currency)(measured.cost), range(predicted.cost, money)]] : []),
    ["learning rate", plain(run.learning_rate), `peak, ${run.job_file.train.schedule} schedule`], step];
}

// What the validation found, the target's metric first. The log loss of a classification is its loss.
function qualities(run) {
  const target = run.job_file.train.target?.metric;
  const told = Object.entries(run.metrics).filter(([name, value]) => name !== "train_loss" && !(name === "log_loss" && Math.abs(value - run.metrics.loss) < 1e-3 * value));
  const rank = ([name]) => (name === target ? 0 : name === "loss" ? 2 : 1);
  return told.sort((one, other) => rank(one) - rank(other)).slice(0, 5);
}

function curves(room) {
  const loss = lines(room, "Loss", { log: true });
  const rateChart = lines(room, "Learning rate");
  const time = lines(room, "Step time by rank", { unit: "s", gaps: true });
  const batch = lines(room, "Batch size by rank", { unit: "samples", gaps: true });
  const speed = lines(room, "Throughput", { unit: "samples/s" });
  const quality = lines(room, "Validation by epoch", { x: "epoch", points: true, cursor: "epochs" });
  return (run, series) => {
    const names = series.ranks().map((rank) => `rank ${rank}${named(series.devices(rank), run.plan?.devices[rank])}`);
    const training = series.joint((rows) => rows[0].loss);
    const validation = [series.epochs.map((row) => row.step), series.epochs.map((row) => row.loss ?? null)];
    loss.set(merged(training, validation), ["training", "validation"], null, [1]);
    rateChart.set(series.joint((rows) => rows[0].learning_rate), ["learning rate"]);
    time.set(series.byRank("step_time_s"), names, run.predicted?.step_time_s ?? null);
    batch.set(series.byRank("batch_size"), names);
    speed.set(series.joint(throughput), ["all ranks"]);
    const metrics = [...new Set(series.epochs.flatMap((row) => Object.keys(row)))].filter(
      (name) => !["step", "epoch", "loss", "log_loss", "train_loss", "duration_s"].includes(name));
    quality.set([series.epochs.map((row) => row.epoch + 1), ...metrics.map((name) => series.epochs.map((row) => row[name] ?? null))], metrics.map((name) => name.replaceAll("_", " ")),
      null, [], metrics.includes("accuracy") ? [metrics.indexOf("f1")] : []); // F1 may cover the accuracy
  };
}

// Rows of earlier versions have no device: they belong to the planned one.
function named(devices, planned) {
  const names = devices.length ? devices : planned ? [planned.id] : [];
  return names.length ? ` (${names.join(", then ")})` : "";
}

// Datasheet power times the measured time is no measured energy.
const byDatasheet = (run) => (run.measured?.energy_source === "datasheet" ? ", by datasheet" : "");

function predictions(run) {
  if (!run.predicted_and_measured.length) return card("Predicted and measured", h("p", { class: "note" },
    run.state === "running" ? "Measured when training ends." : "Nothing was measured."));
  return card("Predicted and measured", table("Predicted and measured",
    [["quantity", "name"], ["predicted", "number"], ["90 % interval", "number"], ["measured", "number"], ["error", "number"], ["", "name"]],
    run.predicted_and_measured.map((row) => {
      const unit = inUnit(row.unit);
      const nothing = vague(row.low, row.high);
      const within = row.unit === "B" ? `at most ${unit(row.high).text}` : bounds(row.low, row.high, unit); // memory has no lower bound
      return [row.quantity === "energy" ? `energy${byDatasheet(run)}` : row.quantity, nothing ? { text: "not known", value: row.predicted } : unit(row.predicted),
        within, unit(row.measured), nothing ? null : signed(row.error),
        row.inside === null ? null : h("span", { class: row.inside ? "success" : "failed" }, row.inside ? "inside" : "outside")];
    })));
}

function exportsOf(run) {
  if (!run.exports.length) return null;
  return card("Exports", ...run.exports.map((one) => h("p", {}, `${one.kind}: ${one.metric} ${metric(one.metrics.exported).text}, trained ${metric(one.metrics.trained).text} `,
    ...one.files.map((saved) => h("button", { type: "button", name: "exported", value: `${one.kind}/${saved}` }, saved)))));
}

function devices(run) {
  if (!run.devices.length) return null;
  return card("Devices", table("Devices", [["rank", "number"], ["device", "name"], ["type", "name"], ["batch size", "number"], ["samples", "number"],
    ["own step time", "number"], ["waited", "number"], ["peak memory", "number"], ["CPU time", "number"]],
  run.devices.map((one) => [whole(one.rank), one.id, one.type, whole(one.batch_size), whole(one.samples), seconds(one.step_time_s?.median),
    seconds(one.wait_s), bytes(one.peak_memory_bytes), seconds(one.cpu_s)])));
}

function steps(run) {
  const rows = Object.entries(run.steps);
  const whole_s = rows.reduce((sum, [, taken]) => sum + taken, 0);
  return rows.length ? card("Steps of the chain", table("Steps of the chain",
    [["step", "name"], ["took", "number"], ["of all steps", "number"], ["", "long"]],
    rows.map(([name, taken]) => [name, seconds(taken), whole_s > 0 ? percent(taken / whole_s) : null, " "]))) : null;
}

const NEWEST = 12; // events that are not folded

function happenings(run, series) {
  const events = run.events.length ? run.events.map((event) => [moment(event.at), event.event, said(event)]).reverse()
    : (run.split_events.length ? run.split_events : series.splits).map((one) => [{ text: `step ${one.step}`, value: one.step }, "split", split(one)]).reverse();
  if (!events.length) return card("Events", h("p", { class: "note" }, run.state === "running" ? "Nothing has happened yet." : "None were recorded."));
  const told = (label, rows) => table(label, [["when", "name"], ["event", "name"], ["what", "long"]], rows);
  const earlier = events.slice(NEWEST, 200);
  return card("Events", told("Events, newest first", events.slice(0, NEWEST)),
    earlier.length ? h("details", {}, h("summary", {}, `${earlier.length} earlier`), told("Earlier events, newest first", earlier)) : null);
}

const split = (event) => `${event.batch_sizes.join(" : ")} samples from step ${event.step} on; ${event.reason}`;

function said(event) {
  const { at, event: kind, ...rest } = event;
  switch (kind) {
    case "ranks": return `${rest.devices.join(", ")} with ${rest.backend}`;
    case "rank": return `rank ${rest.rank} (${rest.device}) ${rest.state}`;
    case "world": return rest.reason;
    case "split": return split(rest);
    case "epoch": return [`epoch ${rest.epoch + 1}`, ...Object.entries(rest).filter(([name]) => !["epoch", "epochs", "step"].includes(name))
      .map(([name, value]) => (name === "duration_s" ? `took ${seconds(value).text}` : `${name.replaceAll("_", " ")} ${plain(value).text}`))].join(", ");
    case "checkpoint": return `step ${rest.step} (${rest.path})`;
    case "back": return `back to step ${rest.step}`;
    case "notice": return rest.message;
    default: return JSON.stringify(rest);
  }
}
