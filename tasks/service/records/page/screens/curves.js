// A run's curves. Metrics of unlike scales have charts of their own.

import { lines } from "../charts.js";
import { groupsOf, words } from "../format.js";
import { merged, throughput } from "./series.js";

// Charts in `room`, which stays hidden until something is recorded. Returns what updates them.
export function curves(room) {
  const loss = lines(room, "Loss", { log: true });
  const quality = validationCharts(room);
  const rateChart = lines(room, "Learning rate");
  const time = lines(room, "Step time by rank", { unit: "s", gaps: true, log: true });
  const batch = lines(room, "Batch size by rank", { unit: "samples", gaps: true });
  const speed = lines(room, "Throughput", { unit: "samples/s" });
  return (run, series) => {
    room.hidden = !series.steps.size;
    if (room.hidden) return;
    const names = series.ranks().map((rank) => `rank ${rank}${named(series.devices(rank), run.plan?.devices[rank])}`);
    const training = series.joint((rows) => rows[0].loss);
    const validation = [series.epochs.map((row) => row.step), series.epochs.map((row) => row.loss ?? null)];
    loss.set(merged(training, validation), ["training", "validation"], null, [1]);
    quality(series);
    rateChart.set(series.joint((rows) => rows[0].learning_rate), ["learning rate"]);
    time.set(series.byRank("step_time_s"), names, run.predicted?.step_time_s ?? null);
    batch.set(series.wholeBatches(), names);
    speed.set(series.joint(throughput), ["all ranks"]);
  };
}

// A chart for each group of metrics that can share an axis, made when the first of them is recorded.
function validationCharts(room) {
  const place = document.createElement("div");
  place.className = "parts";
  room.append(place);
  const charts = new Map();
  return (series) => {
    const recorded = [...new Set(series.epochs.flatMap((row) => Object.keys(row).filter((name) => row[name] !== null)))];
    const x = series.epochs.map((row) => row.epoch + 1);
    for (const [title, names] of groupsOf(recorded)) {
      if (!charts.has(title)) {
        const shown = names.length > 1 ? `Validation ${title} by epoch` : `Validation ${words(names[0])} by epoch`;
        charts.set(title, lines(place, shown, { x: "epoch", points: true, cursor: "epochs" }));
      }
      charts.get(title).set([x, ...names.map((name) => series.epochs.map((row) => row[name] ?? null))], names.map(words),
        null, [], names.includes("accuracy") ? [names.indexOf("f1")] : []); // F1 may cover the accuracy
    }
  };
}

// Rows of earlier versions have no device: they belong to the planned one.
function named(devices, planned) {
  const names = devices.length ? devices : planned ? [planned.id] : [];
  return names.length ? ` (${names.join(", then ")})` : "";
}
