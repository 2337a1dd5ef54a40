// All runs, newest first: shows the first hundred at once, and loads the others meanwhile. Some can be chosen to compare.

import { get, query } from "../api.js";
import { badge, every, h, place, table } from "../dom.js";
import { errorOf, interval, joules, metric, moment, seconds, whole } from "../format.js";

const COLUMNS = [["compare", null], ["job", "name"], ["state", "name"], ["result", "name"], ["started", "name"], ["duration", "number"],
  ["predicted (90 % interval)", "number", "lesser"], ["prediction error", "number", "lesser"], ["energy", "number", "lesser"], ["devices", "number", "lesser"], ["run", "name"]];

export const NO_RUNS = "There are no runs yet: `trainwright run JOB` makes one.";

// The metric that stands for the run's model.
const result = ({ leading_metric: name, metrics }) => (name ? { text: `${name.replaceAll("_", " ")} ${metric(metrics[name]).text}`, value: metrics[name] } : null);

export async function show(root, { fields }, signal, failed) {
  const dag = fields.get("dag") ?? ""; // a job's own DAG, or `retrain`
  const job = fields.get("job") ?? (/^retrain_[a-z0-9-]{1,63}$/.test(dag) ? dag.slice("retrain_".length) : "");
  const chosen = new Set();
  const count = h("span", { class: "muted" });
  const compare = h("a", { class: "button", href: "#/compare" }, "Compare");
  const filter = h("input", { type: "search", value: job, placeholder: "all jobs", pattern: "[a-z0-9\\-]{1,63}", onchange: (event) => {
    if (event.target.checkValidity()) location.hash = `#/runs?${query({ job: event.target.value })}`;
  } });
  root.append(h("div", { class: "head" }, h("h1", {}, "Runs"), count,
    h("div", { class: "actions row" }, h("label", {}, "Job", filter), compare)));
  const shown = place(root, { class: "card" });
  root.addEventListener("change", (event) => {
    if (event.target.name !== "compare") return;
    if (event.target.checked) chosen.add(event.target.value);
    else chosen.delete(event.target.value);
    compare.href = `#/compare?${query({ runs: [...chosen].join(",") })}`;
    compare.textContent = chosen.size ? `Compare ${chosen.size}` : "Compare";
  }, { signal });

  const pages = new Map(); // by the run before the page
  const draw = () => {
    const rows = [...pages.values()].flat();
    shown(rows.length ? table("Runs", COLUMNS, rows.map((run) => cells(run, chosen))) :
      h("p", { class: "note" }, job ? [`There are no runs of the job ${job}. `, h("a", { href: "#/runs" }, "All runs")]
        : NO_RUNS));
  };
  const read = async (after) => {
    const page = await get(`runs?${query({ limit: after ? 1000 : 100, after, job })}`, signal);
    pages.set(after ?? "", page.runs);
    count.textContent = `${whole(page.total).text} ${job ? "of this job" : "in the store"}`;
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
    moment(run.started_at), seconds(run.duration_s), interval(guess, seconds),
    errorOf(guess, run.duration_s),
    joules(run.energy_j), run.devices === null ? null : whole(run.devices),
    h("a", { href: `#/run/${name}` }, run.id),
  ];
}
