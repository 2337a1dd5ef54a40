// The pool: devices, their holders, the queue; of a cluster, its nodes and the hosts that runs wait for.

import { get, query } from "../api.js";
import { alertOf, card, every, h, place, runLink, table, tiles } from "../dom.js";
import { counted, ENGINES, moment, seconds, whole } from "../format.js";

const NAMES_SHOWN = 8; // of alike nodes

export async function show(root, { fields }, signal, failed) {
  const name = fields.get("pool") ?? "";
  const { pools } = await get("pools", signal);
  const choice = h("select", { onchange: (event) => { location.hash = `#/pool?${query({ pool: event.target.value })}`; } },
    h("option", { value: "" }, "this machine"), pools.map((one) => h("option", { value: one, selected: one === name }, one)));
  root.append(h("div", { class: "head" }, h("h1", {}, "Pool"), h("div", { class: "actions" }, h("label", {}, "Pool", choice))));
  const shown = place(root, { style: null, class: "stack" });
  await every(3000, async () => {
    let state;
    try {
      state = await get(`pool?${query({ name })}`, signal);
    } catch (error) {
      if (error.status !== 404 && error.status !== 422) throw error;
      shown(alertOf(error)); // another pool can still be chosen above
      return false;
    }
    const closed = state.devices.filter((one) => one.holder === null && !one.available_now);
    const windows = state.devices.some((one) => one.available !== null);
    const held = state.devices.filter((one) => one.holder !== null);
    if (state.engine !== "ssh") {
      shown(...cluster(state, windows));
      return true;
    }
    shown(
      tiles([
        ["devices", whole(state.devices.length), state.pool],
        ["leased", whole(held.length)],
        ["free", whole(state.devices.length - held.length - closed.length), closed.length === 0 ? null : `${closed.length} closed now`],
        ["waiting runs", whole(state.queue.length)],
      ]),
      card("Devices", table("Devices and their leases",
        [["device", "name"], ["type", "name"], ["host", "name"], ["cores", "number"], ["speed", "number"],
          ...(windows ? [["available, UTC", "name"]] : []), ["leased to", "long"], ["run", "name"],
          ["lease ends in", "number"]],
        state.devices.map((one) => [
          one.id, one.type, one.host, one.cores === null ? null : { text: String(one.cores), value: one.cores },
          one.speed === null || one.speed === undefined ? null : { text: `${one.speed} × (emulated)`, value: one.speed },
          ...(windows ? [one.available ?? "always"] : []), leased(one),
          runLink(one.run), one.expires_in_s === null ? null : seconds(Math.max(0, one.expires_in_s)),
        ]))),
      card("Queue", state.queue.length === 0 ? h("p", { class: "note" }, "No run is waiting.") : table("Runs that wait for devices",
        [["place", "number"], ["run", "name"], ["holder", "long"], ["priority", "number"], ["waited", "number"], ["needs", "number"], ["of", "long"]],
        state.queue.map((one) => [whole(one.place), runLink(one.run), one.holder, { text: String(one.priority), value: one.priority },
          seconds(one.waited_s), whole(one.needed), kinds(one.wanted)]))),
    );
    return true;
  }, signal, failed);
}

// A pool whose devices a cluster's queue gives out: no lease names one of them.
function cluster(state, windows) {
  const engine = ENGINES[state.engine];
  const waiting = state.waiting_hosts;
  return [
    tiles([
      ["devices", whole(state.devices.length), state.pool],
      ["given out by", { text: engine, value: state.engine }],
      ["waiting hosts", whole(waiting.length), `in ${engine}'s queue`],
    ]),
    card("Devices", table("Devices that a run may ask for",
      [["device", "name"], ["type", "name"], ["host", "name"], ["cores", "number"], ...(windows ? [["available, UTC", "name"]] : []), ["given", "long"]],
      state.devices.map((one) => [one.id, one.type, one.host, one.cores === null ? null : { text: String(one.cores), value: one.cores },
        ...(windows ? [one.available ?? "always"] : []),
        h("span", { class: "muted" }, one.available_now ? `asked of ${engine} when a run trains` : "closed now")]))),
    card(`${engine}'s nodes`, state.cluster.nodes === null ? h("p", { class: "note" }, `Unknown: ${state.cluster.unknown}`)
      : table(`${engine}'s nodes`, [["state", "name"], ["nodes", "number"], ["CPUs in use", "number"], ["partitions", "name"], ["names", "long"]],
        alike(state.cluster.nodes))),
    card("Queue", waiting.length === 0 ? h("p", { class: "note" }, `No run is known to wait in ${engine}'s queue.`)
      : table("Hosts that runs wait for", [["host", "name"], ["run", "name"], ["holder", "long"], ["reported", "name"], ["what", "long"]],
        waiting.map((one) => [one.host, runLink(one.run), one.holder, moment(one.reported_at), one.message]))),
  ];
}

// Nodes by state and partitions, as `trainwright pool` lists them.
function alike(nodes) {
  const found = new Map();
  for (const one of nodes) {
    const key = `${one.state.toLowerCase()}|${one.partitions.join(", ")}`;
    found.set(key, [...(found.get(key) ?? []), one]);
  }
  const sum = (those, name) => those.reduce((total, one) => total + one[name], 0);
  return [...found].sort(([one], [other]) => (one < other ? -1 : 1)).map(([key, those]) => {
    const [state, partitions] = key.split("|");
    const rest = those.length - NAMES_SHOWN;
    return [state, whole(those.length), { text: `${whole(sum(those, "cpus_allocated")).text} of ${whole(sum(those, "cpus")).text}`, value: sum(those, "cpus_allocated") },
      partitions, those.slice(0, NAMES_SHOWN).map((one) => one.name).join(", ") + (rest > 0 ? ` and ${whole(rest).text} more` : "")];
  });
}

// The holder of a device, or whether it is available.
function leased(one) {
  if (one.holder) return h("span", {}, one.holder, one.revoked_by ? [", to be given to ", runLink(one.revoked_by)] : null);
  return one.available_now ? h("span", { class: "success" }, "free") : h("span", { class: "muted" }, "closed now");
}

// Devices, "device ADDRESS HOST/TYPE-NUMBER" each, by host and type.
function kinds(devices) {
  const found = {};
  for (const device of devices) {
    const kind = device.replace(/^device \S+ /, "").replace(/-\d+$/, "");
    found[kind] = (found[kind] ?? 0) + 1;
  }
  return counted(found);
}
