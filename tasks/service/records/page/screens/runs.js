// All runs, newest first: shows the first hundred at once, and loads the others meanwhile. They can be sorted, filtered, and chosen to compare.

import { get, query } from "../api.js";
import { badge, every, h, place, table } from "../dom.js";
import { errorOf, interval, joules, metric, moment, seconds, whole, words } from "../format.js";

// [title, kind, rank, what rows are sorted by]
const COLUMNS = [["compare", "tick"], ["job", "name", null, (run) => run.job], ["state", "name", null, (run) => run.state],
  ["result", "name", null, (run) => run.metrics[run.leading_metric] ?? null], ["started", "name", null, (run) => run.started_at],
  ["duration", "number", null, (run) => run.duration_s], ["run", "name", null, (run) => run.id],
  ["predicted", "number", "lesser", (run) => run.predicted_duration_s?.median ?? null],
  ["error", "number", "lesser", (run) => errorOf(run.predicted_duration_s, run.duration_s)?.value ?? null],
  ["energy", "number", "lesser", (run) => run.energy_j], ["devices", "number", "lesser", (run) => run.devices]];

export const NO_RUNS = "There are no runs yet: `trainwright run JOB` makes one.";

// The metric that stands for the run's model.
const result = ({ leading_metric: name, metrics }) => (name ? { text: `${words(name)} ${metric(metrics[name]).text}`, value: metrics[name] } : null);

// Whether a run has all words of the filter in its job, state, step, result, holder or name.
function has(run, filter) {
  const text = [run.job, run.state, run.step, result(run)?.text, run.holder, run.id].filter(Boolean).join(" ").toLowerCase();
  return filter.toLowerCase().split(/\s+/).every((word) => text.includes(word));
}

// Values in order, those that are not known last.
function sorted(runs, { column, down }) {
  if (column === null) return runs;
  const of = COLUMNS[column][3];
  const order = (one, other) => (one < other ? -1 : one > other ? 1 : 0) * (down ? -1 : 1);
  const known = runs.filter((run) => of(run) !== null && of(run) !== undefined);
  return [...known.sort((one, other) => order(of(one), of(other))), ...runs.filter((run) => !known.includes(run))];
}

export async function show(root, { fields }, signal, failed) {
  const dag = fields.get("dag") ?? ""; // a job's own DAG, or `retrain`
  const job = fields.get("job") ?? (/^retrain_[a-z0-9-]{1,63}$/.test(dag) ? dag.slice("retrain_".length) : "");
  const chosen = new Set();
  const order = { column: null, down: true };
  const count = h("span", { class: "muted", role: "status" });
  const compare = h("a", { class: "button", href: "#/compare" }, "Compare");
  const filter = h("input", { type: "search", name: "filter", placeholder: "job, state, result, run …", maxlength: 200, oninput: () => draw() });
  root.append(h("div", { class: "head" }, h("h1", {}, job ? `Runs of ${job}` : "Runs"), count,
    h("div", { class: "actions row" }, job && h("a", { class: "button", href: "#/runs" }, "All jobs"), h("label", {}, "Filter", filter), compare)));
  const shown = place(root, { class: "card" });
  root.addEventListener("change", (event) => {
    if (event.target.name !== "compare") return;
    if (event.target.checked) chosen.add(event.target.value);
    else chosen.delete(event.target.value);
    compare.href = `#/compare?${query({ runs: [...chosen].join(",") })}`;
    compare.textContent = chosen.size ? `Compare ${chosen.size}` : "Compare";
  }, { signal });
  root.addEventListener("click", (event) => {
    const column = event.target.closest("button[name=sort]")?.value;
    if (column === undefined) return;
    const again = order.column === Number(column);
    Object.assign(order, again && !order.down ? { column: null, down: true } : { column: Number(column), down: again ? false : true });
    draw();
  }, { signal });

  const pages = new Map(); // by the run before the page
  let total = 0;
  function draw() {
    const all = [...pages.values()].flat();
    const rows = sorted(all.filter((run) => has(run, filter.value.trim())), order);
    count.textContent = `${rows.length < all.length ? `${whole(rows.length).text} of ` : ""}${whole(total).text} ${job ? "of this job" : "in the store"}`;
    shown(rows.length ? table("Runs", COLUMNS.map(heading), rows.map((run) => cells(run, chosen))) :
      h("p", { class: "note" }, all.length ? "No run has these words." : job ? [`There are no runs of the job ${job}. `, h("a", { href: "#/runs" }, "All runs")]
        : NO_RUNS));
  }
  // A column's title as a button that sorts by it: downwards, upwards, then by age again.
  const heading = ([title, kind, rank, of], index) => [title, kind, rank, of && {
    direction: order.column !== index ? "none" : order.down ? "descending" : "ascending",
    button: () => h("button", { type: "button", name: "sort", value: index, class: "sort" }, title, h("span", { "aria-hidden": "true" }, order.column !== index ? "" : order.down ? " ↓" : " ↑")),
  }];
  const read = async (after) => {
    const page = await get(`runs?${query({ limit: after ? 1000 : 100, after, job })}`, signal);
    pages.set(after ?? "", page.runs);
    total = page.total;
    return page.next;
  };
  await every(4000, async () => {
    const first = pages.get("")?.map((run) => run.id).join();
    let next = await read(null);
    const moved = first !== pages.get("").map((run) => run.id).join();
    draw();
    if (!moved) return;
    for (const name of [...pages.keys()]) if (name) pages.delete(name);
    while (next && !signal.aborted) next = await read(next);
    draw();
  }, signal, failed);
}

function cells(run, chosen) {
  const name = `${run.job}/${run.id}`;
  const guess = run.predicted_duration_s;
  return [
    h("input", { type: "checkbox", name: "compare", value: name, "aria-label": `Compare ${name}`, checked: chosen.has(name) }),
    h("a", { href: `#/run/${name}` }, run.job),
    h("span", {}, badge(run.state, run.stored ?? true), run.step ? h("span", { class: "muted" }, `  ${run.step}`) : null), result(run),
    moment(run.started_at), seconds(run.duration_s), h("a", { href: `#/run/${name}` }, run.id),
    interval(guess, seconds), errorOf(guess, run.duration_s), joules(run.energy_j), run.devices === null ? null : whole(run.devices),
  ];
}
