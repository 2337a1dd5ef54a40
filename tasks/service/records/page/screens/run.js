// A run: where it stands, live curves, predicted and measured values, events, its plan.

import { base, failedTasks, file, get, post, query, RUN } from "../api.js";
import { alertOf, badge, every, h, place, tiles } from "../dom.js";
import { moment } from "../format.js";
import { curves } from "./curves.js";
import { happenings } from "./events.js";
import { devices, driftOf, exportsOf, facts, predictions, steps, trainedWith } from "./figures.js";
import { planView } from "./plan.js";
import { recommendedModel } from "./recommendation.js";
import { Series } from "./series.js";
import { failure, opened, progress, verdicts, waiting } from "./standing.js";

export async function airflow(root, { fields }, signal, failed) {
  const holder = `Airflow ${fields.get("dag") ?? ""} ${fields.get("run") ?? ""}`;
  root.append(h("h1", {}, `${fields.get("dag") ?? ""} / ${fields.get("run") ?? ""}`));
  const shown = place(root, { class: "card" });
  await every(3000, async () => {
    const { runs } = await get(`runs?${query({ holder })}`, signal);
    if (!runs.length) {
      const failures = await failedTasks(fields.get("dag") ?? "", fields.get("run") ?? "", signal);
      shown(
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
  const standing = place(root, { class: "stack" });
  const top = place(root);
  const room = h("div", { class: "charts", hidden: true });
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
    head(h("h1", {}, `${job} / ${id}`), h("span", { role: "status" }, badge(run.state, run.measured === null || run.manifest !== null)), h("span", { class: "muted" }, run.step && run.error === null ? `step ${run.step}` : ""),
      h("span", { class: "muted" }, `${run.state === "running" ? "since" : "begun"} ${moment(run.started_at).text}, by ${run.holder}`),
      h("div", { class: "actions" },
        opened(`runs/${name}/report`, "report", "report", run.report !== null),
        h("button", { type: "button", name: "tensorboard", disabled: denied !== null }, "TensorBoard"),
        denied && h("span", { class: "muted" }, denied),
        h("a", { class: "button", href: `#/compare?${query({ runs: name })}` }, "Compare"),
        h("a", { class: "button", href: `#/what-if?${query({ run: name })}` }, "What if")));
    standing(verdicts(run), failure(run, name), waiting(run), progress(run, series));
    charts(run, series);
    top(room.hidden && run.result === null ? null : tiles(facts(run, series)));
    below(run.result === null ? null : predictions(run), trainedWith(run), devices(run), exportsOf(run));
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
    const kind = event.target.name;
    if (!["report", "rejection", "exported"].includes(kind)) return;
    try {
      const exported = event.target.value; // kind/file
      const path = kind === "exported" ? `exports/${exported}` : kind;
      const address = URL.createObjectURL(await file(`runs/${name}/${path}`));
      const saved = kind === "exported" ? exported.replace("/", "-") : `${kind}.html`;
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

