// A plan: the chosen configuration, the rejected ones with reasons, and time against energy (or cost) with error bars.

import { front } from "../charts.js";
import { card, h, table, tiles } from "../dom.js";
import { between, bytes, counted, ENGINES, interval, joules, known, money, number, percent, predicted as said, priced, rough, seconds, whole } from "../format.js";

const kinds = (devices) => {
  const found = {};
  for (const one of devices) {
    const kind = one.cores ? `${one.type} (${one.cores} core${one.cores === 1 ? "" : "s"})` : one.speed ? `${one.type} (${one.speed} ×)` : one.type;
    found[kind] = (found[kind] ?? 0) + 1;
  }
  return counted(found);
};

// `timeline` returns the address of a picture of a step; null if there is none to ask for.
export function planView(root, plan, title, timeline = null) {
  const { predicted } = plan;
  root.append(h("div", { class: "head" }, h("h2", {}, title), h("span", { class: "muted" },
    `least ${plan.objective}, ${plan.strategy?.name ?? ""}; search: ${plan.search}${plan.gap && plan.gap < 1 ? ` (within ${(100 * plan.gap).toFixed(1)} %)` : ""}`)));
  root.append(tiles([
    ["devices", whole(plan.devices.length), kinds(plan.devices)],
    ["global batch size", whole(plan.global_batch_size), plan.accumulation > 1 ? `in ${plan.accumulation} micro-batches` : null],
    ["time", said(predicted?.duration_s, seconds), between(predicted?.duration_s, seconds)],
    ["step time", said(predicted?.step_time_s, seconds), between(predicted?.step_time_s, seconds)],
    ["energy", said(predicted?.energy_j, joules), between(predicted?.energy_j, joules)],
    ["cost", said(predicted?.cost, priced(plan.currency)), predicted?.cost ? costParts(plan) : "the pool has no prices"],
    ...limits(plan),
  ]));
  if (plan.batch_rule) root.append(h("p", { class: "note" }, `Global batch size: ${plan.batch_rule}.`));
  root.append(layoutOf(plan, timeline));
  const points = pointsOf(plan);
  if (points.found.length > 1) {
    const charts = h("div", { class: "charts" });
    root.append(charts);
    front(charts, points.energy ? "Time and energy" : "Time and cost",
      { xTitle: "time", yTitle: points.energy ? "energy" : "cost", show: (value) => seconds(value).text,
        showY: (value) => (points.energy ? joules : priced(plan.currency))(value).text }, points.found);
  }
  root.append(shares(plan.devices, plan.currency));
  root.append(configurations(plan));
}

// What the limits are compared with, the wait in a cluster's queue, and the limits.
function limits({ not_exceeded: most, queue_wait: wait, deadline_s: deadline, budget, currency }) {
  const cost = priced(currency);
  const engine = wait && ENGINES[wait.engine];
  return [
    ...(most ? [[`at most (${number(100 * most.confidence).text} %)`, seconds(most.duration_s), known(most.cost) ? `cost ${cost(most.cost).text}` : null]] : []),
    ...(wait ? [["wait in the queue", known(wait.expected_s) ? seconds(wait.expected_s) : { text: "unknown", value: null },
      known(wait.expected_s) ? `until ${engine} grants its hosts` : wait.unknown]] : []),
    ...(known(deadline) ? [["deadline", seconds(deadline), known(wait?.expected_s) ? "of the wait and the training" : null]] : []),
    ...(known(budget) ? [["budget", cost(budget)]] : []),
  ];
}

const WAYS = { sum: "data parallel", factors: "late-multiply", rows: "sharded by rows", average: "averaged" };
const OPEN_ROWS = 8; // a longer table of layers is folded
const NAMED = 4; // layers; of more, only their number

function layoutOf(plan, timeline) {
  if (!plan.layout) return "";
  const why = plan.layout_rule ? ` (${plan.layout_rule})` : "";
  return card("Layout", h("p", {}, `${plan.layout_in_words || plan.layout.name}${why}`), byLayer(plan.by_layer), others(plan.alternatives),
    timeline && stepOf(timeline));
}

function others(alternatives) {
  const laid = alternatives.filter((one) => one.layout_in_words);
  return laid.length ? table("Other layouts", [["other layouts", "long"], ["step time", "number"], ["why not chosen", "long"]],
    laid.map((one) => [one.layout_in_words, interval(one.predicted?.step_time_s, seconds), one.reason])) : null;
}

function byLayer(groups) {
  if (!groups?.length) return null;
  const names = ({ layers, kinds }) => `${layers.length > NAMED ? `${layers[0]} and ${layers.length - 1} more` : layers.join(", ")} (${kinds.join(", ")})`;
  const shown = table("How each layer's copies are kept equal",
    [["layers", "long"], ["how", "name"], ["a device sends in a step", "number"], ["why", "long"]],
    groups.map((one) => [names(one), WAYS[one.sync] ?? one.sync, bytes(one.sent_bytes), one.why]));
  return groups.length > OPEN_ROWS ? h("details", {}, h("summary", {}, `by layer, ${groups.length} groups`), shown) : shown;
}

// The picture is fetched when it is unfolded, and shown as an image, never as markup of the page.
function stepOf(timeline) {
  const room = h("div", { class: "scroll" });
  const open = async ({ target }) => {
    if (!target.open || room.hasChildNodes()) return;
    try {
      room.append(h("img", { src: await timeline(), alt: "one step as predicted, rank by rank" }));
    } catch (error) {
      room.append(h("p", { class: "note" }, error.message));
    }
  };
  return h("details", { name: "timeline", ontoggle: open }, h("summary", {}, "one step as predicted, rank by rank"), room);
}

// The interval, and which part of the cost is rent and which energy.
const costParts = ({ predicted, currency }) => [
  ...(rough(predicted.cost.low, predicted.cost.high) ? [] : [`${between(predicted.cost, money)} ${currency ?? "units"}`]),
  ...(predicted.rent && predicted.energy_cost
    ? [`rent ${money(predicted.rent.median).text}, energy ${money(predicted.energy_cost.median).text}`] : []),
].join("; ");

function shares(devices, currency) {
  const steps = devices.every((one) => one.step_shares);
  const prices = devices.some((one) => one.price_per_hour !== null && one.price_per_hour !== undefined);
  const columns = [["device", "name"], ["type", "name"], ["host", "name"], ["batch size", "number"], ["own step time", "number"],
    ...(steps ? [["computes", "number"], ["waits", "number"], ["communicates", "number"]] : []),
    ...(prices ? [[`price, ${currency ?? "units"}/h`, "number"]] : []),
    ["peak memory", "number"], ["prediction", "name"]];
  const row = (one) => [one.id, one.type, one.host, whole(one.batch_size), interval(one.step_time_s, seconds),
    ...(steps ? ["compute", "wait", "communicate"].map((part) => percent(one.step_shares[part])) : []),
    ...(prices ? [money(one.price_per_hour)] : []),
    bytes(one.peak_memory_bytes), one.mode];
  return card("Shares", table("Shares of a step", columns, devices.map(row)));
}

const sharp = ({ low, high }) => !rough(low, high);

function pointsOf(plan) {
  const energy = Boolean(plan.predicted?.energy_j) || plan.front.some((one) => one.energy !== null);
  const y = energy ? "energy" : "cost";
  const triple = energy ? "energy_j" : "cost";
  const found = [];
  const bars = (predicted) => ({
    x: predicted.duration_s.median, ...(sharp(predicted.duration_s) && { low: predicted.duration_s.low, high: predicted.duration_s.high }),
    y: predicted[triple].median, ...(sharp(predicted[triple]) && { lowY: predicted[triple].low, highY: predicted[triple].high }),
  });
  if (plan.predicted?.[triple]) found.push({ ...bars(plan.predicted), group: 0 });
  for (const one of plan.front) {
    if (!one.chosen && one[y] !== null) found.push({ x: one.time, y: one[y], group: one.feasible ? 1 : 3 });
  }
  for (const one of plan.alternatives) {
    if (one.predicted?.[triple] && !found.some((other) => other.x === one.predicted.duration_s.median && other.group === 1)) {
      found.push({ ...bars(one.predicted), group: one.feasible ? 2 : 3 });
    }
  }
  return { found, energy };
}

function configurations(plan) {
  const laid = plan.alternatives.some((one) => one.layout_in_words);
  const row = (devices, layout, batch, accumulation, predicted, feasible, reason) => [
    devices, ...(laid ? [layout] : []), accumulation > 1 ? { text: `${whole(batch).text} (${accumulation} ×)`, value: batch } : whole(batch),
    interval(predicted?.duration_s, seconds), interval(predicted?.energy_j, joules), interval(predicted?.cost, money),
    feasible ? "yes" : h("span", { class: "infeasible" }, "no"), reason,
  ];
  return card("Configurations", table("The chosen configuration, and those that were not",
    [["devices", "name"], ...(laid ? [["layout", "name"]] : []), ["global batch", "number"], ["time", "number"], ["energy", "number"], [`cost, ${plan.currency ?? "units"}`, "number"], ["feasible", "name"], ["why", "long"]],
    [row(kinds(plan.devices), plan.layout?.name, plan.global_batch_size, plan.accumulation, plan.predicted, plan.feasible, "chosen"),
      ...plan.alternatives.map((one) => row(counted(one.devices), one.layout, one.global_batch_size, one.accumulation, one.predicted, one.feasible, one.reason))],
    (index) => (index === 0 ? "chosen" : null)));
}
