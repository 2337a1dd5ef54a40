// Recommended models: candidates in order, why each has its place, the code of the first.

import { card, h, table } from "../dom.js";
import { joules, number, predicted, seconds, whole } from "../format.js";

export function recommendationView(root, found) {
  root.append(card("Recommended models", h("p", {}, found.reason), table("Recommended models",
    [["model", "name"], ["parameters", "number"], [`${found.metric ?? "metric"}, 80 % interval`, "number"], ["time", "number"], ["energy", "number"], ["why", "long"]],
    found.candidates.map((one) => [one.name, whole(one.parameters), metric(one.predicted_metric), predicted(one.duration_s, seconds),
      predicted(one.energy_j, joules), one.why])), notes(found.notes), recipe(found.recipe)));
  root.append(card("Code of the first", h("details", {}, h("summary", {}, "model.py"), h("pre", { tabindex: "0" }, found.source_text))));
}

// The model that a run's step `recommend` chose; null if the job names its model.
export const recommendedModel = (found) => found && card("Recommended model", h("p", {}, `${found.name}: ${found.why}`), notes(found.notes), recipe(found.recipe));

const notes = (lines) => lines.map((line) => h("p", { class: "note" }, line));

const recipe = (fields) => h("p", { class: "note" }, `Recipe: ${Object.entries(fields).map(([name, value]) => `${name} ${JSON.stringify(value)}`).join(", ")}`);

function metric(one) {
  if (!one) return "unknown";
  return { text: `${number(one.median).text} (${number(one.low).text} to ${number(one.high).text})`, value: one.median };
}
