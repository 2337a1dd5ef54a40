// Elements. Text is always a text node: stored or received content is never parsed as markup.

export function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false).map(
    (child) => (child instanceof Node ? child : document.createTextNode(String(child)))));
  return element;
}

// Update `old` to the content of `fresh`, changing only the differences: no flicker; scroll, focus and selection stay.
export function update(old, fresh) {
  if (old.nodeType !== Node.TEXT_NODE && old.isEqualNode(fresh) && !fresh.querySelector("input")) return;
  if (old.nodeType === Node.TEXT_NODE) {
    if (old.data !== fresh.data) old.data = fresh.data;
    return;
  }
  if (old.hasAttribute("data-keep")) return;
  for (const { name, value } of [...fresh.attributes]) if (old.getAttribute(name) !== value) old.setAttribute(name, value);
  for (const { name } of [...old.attributes]) if (!fresh.hasAttribute(name)) old.removeAttribute(name);
  const before = [...old.childNodes];
  const after = [...fresh.childNodes];
  after.forEach((child, index) => {
    const own = before[index];
    if (!own) old.append(child);
    else if (own.nodeType === child.nodeType && own.nodeName === child.nodeName) update(own, child);
    else own.replaceWith(child);
  });
  before.slice(after.length).forEach((child) => child.remove());
  if (old.type === "checkbox") old.checked = fresh.checked; // a click changes the property, not the attribute
}

// A part of a screen that is updated when its data changes.
export function place(root, attributes = {}) {
  const own = h("div", attributes);
  root.append(own);
  return (...children) => update(own, h("div", attributes, ...children));
}

export const card = (title, ...children) => h("section", { class: "card", "aria-label": title }, h("h2", {}, title), ...children);

const LONG_NAME = 32; // characters; longer names would push other columns off the screen

// `columns`: [title, kind, rank, sorting] with the kinds number, name, long, or none, the rank `lesser`: not in a narrow window, and a sorting
// {direction, button} if rows can be sorted by it; `rows`: cells, each text, a node, or {text, value, mark, said}.
export function table(label, columns, rows, marked = () => null) {
  const cell = (value, [title, kind, rank]) => {
    const plain = value !== null && typeof value === "object" && !(value instanceof Node);
    const text = plain ? value.text : value?.textContent ?? value;
    const shape = kind === "name" && String(text).length > LONG_NAME ? "name wraps" : kind;
    const attributes = { class: [shape, rank, plain && value.mark].filter(Boolean).join(" ") || null, "data-title": (title instanceof Node ? title.getAttribute("title") : title) || null };
    if (plain) Object.assign(attributes, { "data-value": value.value === null || value.value === undefined ? null : String(value.value) });
    return h("td", attributes, plain ? value.text : value ?? "–", plain && value.said ? h("span", { class: "unseen" }, `, ${value.said}`) : null);
  };
  return h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": label },
    h("table", { class: "figures", "aria-label": label },
      h("thead", {}, h("tr", {}, columns.map(([title, kind, rank, sorting]) => h("th", { scope: "col", class: [kind, rank].filter(Boolean).join(" ") || null, "aria-sort": sorting?.direction }, sorting ? sorting.button() : title)))),
      h("tbody", {}, rows.map((row, index) =>
        h("tr", { class: marked(index) }, row.map((value, number) => cell(value, columns[number])))))));
}

const LONG_VALUE = 11; // characters in a tile

// `entries`: [name, {text, value}, note below]
export const tiles = (entries) =>
  h("dl", { class: "tiles" }, entries.map(([name, shown, beside]) =>
    h("div", { class: "tile", "data-tile": name },
      h("dt", {}, name.replaceAll("_", " ")),
      h("dd", { class: shown.text.length > LONG_VALUE ? "value small" : "value", "data-value": shown.value === null || shown.value === undefined ? null : String(shown.value) }, shown.text),
      h("dd", { class: "beside" }, beside ?? "\u00a0"))));

export const badge = (state, stored = true) => h("span", { class: `badge ${/^[a-z]+$/.test(state) ? state : ""}` },
  state === "success" && !stored ? "trained, not stored" : state);

// A run's URI as a link to its screen; plain text if it is not a run of the store.
export function runLink(uri) {
  const found = /\/runs\/([a-z0-9-]{1,63}\/[0-9]{8}T[0-9]{6}Z-[0-9a-f]{6})$/.exec(uri ?? "");
  return found ? h("a", { href: `#/run/${found[1]}` }, found[1]) : uri;
}

export function alertOf(error) {
  return h("section", { class: "card error", role: "alert" }, h("p", {}, error.message));
}

// Calls `work` now and at intervals until `signal` aborts; not while the page is hidden. Reports failures and continues.
export function every(milliseconds, work, signal, failed) {
  const round = async () => {
    if (signal.aborted) return;
    let wait = milliseconds;
    if (!document.hidden) {
      try {
        const more = await work();
        failed(null);
        if (more === false) return;
      } catch (error) {
        if (signal.aborted) return;
        if (!error.status && error.kind !== "unreachable") console.error(error);
        failed(error);
        if (error.status && error.status !== 503 && error.status !== 500) return;
        wait = Math.max(wait, 3000);
      }
    }
    setTimeout(round, wait);
  };
  return round();
}
