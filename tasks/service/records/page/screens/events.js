// What happened in a run, newest first.

import { card, h, table } from "../dom.js";
import { metric, moment, seconds, words } from "../format.js";

const NEWEST = 12; // events that are not folded

export function happenings(run, series) {
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
      .map(([name, value]) => (name === "duration_s" ? `took ${seconds(value).text}` : `${words(name)} ${metric(value).text}`))].join(", ");
    case "checkpoint": return `step ${rest.step} (${rest.path})`;
    case "back": return `back to step ${rest.step}`;
    case "notice": return rest.message;
    default: return JSON.stringify(rest);
  }
}
