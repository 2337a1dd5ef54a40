// Charts: uPlot in the page's colours, with a fixed height, so that nothing moves when data arrives.

import { h } from "./dom.js";
import { number, rough } from "./format.js";

const { uPlot } = window;
const HEIGHT = 200;
const MOST_DOTS = 60; // of a line; more would cover it
const drawn = new Set();
const probe = h("span", { hidden: true });
document.body.append(probe);

// A custom property's value in this theme, in a form that a canvas accepts.
const resolved = new Map();
export function colour(name) {
  if (!resolved.has(name)) {
    probe.style.color = `var(--${name})`;
    resolved.set(name, getComputedStyle(probe).color);
  }
  return resolved.get(name);
}

export function repaint() {
  resolved.clear();
  for (const chart of drawn) if (chart.root.isConnected) chart.redraw(false);
}

const hue = (index) => () => colour(`hue-${index % 8}`);
const short = (value) => number(value).text;

function axis(title, side) {
  return {
    stroke: () => colour("muted"), grid: { stroke: () => colour("line"), width: 1 }, ticks: { stroke: () => colour("line"), width: 1 },
    label: side ? undefined : title, labelSize: 20, labelFont: "12px system-ui, sans-serif", font: "12px system-ui, sans-serif",
    size: side ? (_, values) => 24 + 7 * Math.max(4, ...(values ?? []).map((value) => value.length)) : 34, values: (_, splits) => splits.map((value) => (value === null ? "" : short(value))),
  };
}

function room(title, unit) {
  const plot = h("div", { class: "plot" });
  const figure = h("figure", { class: "card", "data-keep": true, role: "group", "aria-label": title },
    h("figcaption", {}, title, unit ? h("span", { class: "unit" }, `  ${unit}`) : null), plot);
  return { plot, figure };
}

function mount(options, data, plot, figure) {
  const chart = new uPlot({ width: Math.max(280, plot.clientWidth || 480), height: HEIGHT, ...options }, data, plot);
  drawn.add(chart);
  const sized = new ResizeObserver(() => {
    if (!figure.isConnected) {
      sized.disconnect();
      drawn.delete(chart);
      chart.destroy();
    } else if (plot.clientWidth && plot.clientWidth !== chart.width) chart.setSize({ width: plot.clientWidth, height: HEIGHT });
  });
  sized.observe(plot);
  return chart;
}

// The range of an axis: the values, and what was predicted as far as it does not flatten them.
function reach(low, high, ends = []) {
  const spread = high - low || Math.abs(high) / 2 || 1;
  const near = ends.filter((end) => end >= low - spread && end <= high + spread);
  const [least, most] = [Math.min(low, ...near), Math.max(high, ...near)];
  const pad = 0.08 * (most - least || Math.abs(most) || 1);
  return [least >= 0 ? Math.max(0, least - pad) : least - pad, most + pad];
}

function farApart(values) {
  const known = values.filter((value) => value !== null && value !== undefined);
  return known.length > 1 && Math.min(...known) > 0 && Math.max(...known) > 100 * Math.min(...known);
}

const powers = (_, splits) => splits.map((value) => (Number.isInteger(Math.log10(value)) ? value : null));
const decades = (one) => ({ ...one, filter: powers, grid: { ...one.grid, filter: powers }, ticks: { ...one.ticks, filter: powers } });

// Lines over a shared x. `set(data, names)`: data in uPlot's form, a name for each line; `band`: predicted {low, median, high},
// of which a rough one is a line without a band.
// `dots`, `dashed`: places of lines.
// `log`: a logarithmic scale if the values are positive and wide apart.
// `gaps`: missing values interrupt a line; otherwise the known values are joined.
export function lines(root, title, { unit = "", x = "step", points = false, log = false, cursor = "run", gaps = false } = {}) {
  const { plot, figure } = room(title, unit);
  root.append(figure);
  let chart = null;
  let shape = "";
  return {
    set(data, names, band = null, dots = [], dashed = []) {
      const rows = [...data];
      const labels = [...names];
      const ends = band ? (rough(band.low, band.high) ? [band.median] : [band.median, band.low, band.high]) : [];
      for (const value of ends) rows.push(data[0].map(() => value));
      if (band) labels.push(...(ends.length === 1 ? ["predicted (rough)"] : ["predicted", "predicted, low", "predicted, high"]));
      const newest = names.map((name, index) => {
        const own = data[index + 1].filter((value) => value !== null && value !== undefined);
        return `${name} ${own.length ? short(own[own.length - 1]) : "–"}`;
      });
      const end = data[0].length ? ` at ${x} ${data[0][data[0].length - 1]}` : "";
      figure.setAttribute("aria-label", `${title}${unit ? `, ${unit}` : ""}: ${newest.slice(0, 8).join(", ")}${end}`);
      figure.dataset.points = String(data[0].length);
      figure.dataset.last = data[0].length ? String(data[0][data[0].length - 1]) : "";
      const wide = log && farApart(data.slice(1).flat());
      const dotted = points && data[0].length <= MOST_DOTS;
      const named = `${wide}|${dotted}|${labels.join("|")}|${ends.join("|")}`;
      if (!chart || shape !== named) {
        if (chart) {
          drawn.delete(chart);
          chart.destroy();
        }
        shape = named;
        const count = names.length;
        const series = labels.map((label, index) => {
          const guess = index >= count;
          return {
            label, stroke: guess ? () => colour("muted") : hue(index), width: guess ? 1 : 1.5, spanGaps: !gaps,
            dash: guess ? [4, 4] : dashed.includes(index) ? [8, 5] : undefined, value: (_, value) => (value === null ? "" : short(value)),
            auto: !guess, class: guess && index !== count ? "bound" : undefined,
            points: { show: !guess && (dotted || dots.includes(index)), size: 6, fill: guess ? undefined : hue(index) },
          };
        });
        chart = mount({
          scales: { x: { time: false }, y: wide ? { distr: 3 } : { range: (_, low, high) => (low === null ? [0, 1] : reach(low, high, ends)) } },
          axes: [{ ...axis(x), ...(x === "step" ? {} : { incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000] }) }, wide ? decades(axis("", true)) : axis("", true)],
          legend: { markers: { width: 0, fill: (_, index) => colour(index > count ? "muted" : `hue-${(index - 1) % 8}`) } },
          series: [{ label: x, value: (_, value) => (value === null ? "" : short(value)) }, ...series],
          bands: ends.length > 1 ? [{ series: [count + 3, count + 2], fill: () => colour("band") }] : [],
          cursor: { sync: { key: cursor }, drag: { x: true, y: false } },
        }, rows, plot, figure);
      } else chart.setData(rows);
    },
  };
}

// Points {x, y, name, group, low, high (of x), lowY, highY}: groups 0 chosen, 1 on the front, 2 other feasible ones, 3 not feasible.
export function front(root, title, { xTitle, yTitle, show, showY }, points) {
  const { plot, figure } = room(title, `${yTitle} over ${xTitle}`);
  root.append(figure);
  const sorted = [...points].sort((one, other) => one.x - other.x);
  const labels = ["chosen", "best in time, energy or cost", "not chosen", "not feasible"];
  const colours = ["hue-1", "hue-0", "muted", "bad"];
  figure.setAttribute("aria-label", `${title}: ${points.length} configurations, ${points.filter((one) => one.group === 3).length} not feasible`);
  figure.dataset.points = String(points.length);
  const bars = (chart) => {
    const { ctx } = chart;
    const at = (value, scale) => chart.valToPos(value, scale, true);
    ctx.save();
    ctx.beginPath();
    ctx.rect(chart.bbox.left, chart.bbox.top, chart.bbox.width, chart.bbox.height);
    ctx.clip();
    ctx.lineWidth = devicePixelRatio;
    for (const point of sorted) {
      ctx.strokeStyle = colour(colours[point.group]);
      ctx.globalAlpha = point.group === 0 ? 1 : 0.5;
      ctx.beginPath();
      if (point.low !== undefined) {
        ctx.moveTo(at(point.low, "x"), at(point.y, "y"));
        ctx.lineTo(at(point.high, "x"), at(point.y, "y"));
      }
      if (point.lowY !== undefined) {
        ctx.moveTo(at(point.x, "x"), at(point.lowY, "y"));
        ctx.lineTo(at(point.x, "x"), at(point.highY, "y"));
      }
      ctx.stroke();
    }
    ctx.restore();
  };
  const range = (value, low, high) => {
    const values = sorted.map((point) => point[value]);
    const ends = sorted.flatMap((point) => [point[low], point[high]]).filter((end) => end !== undefined);
    return reach(Math.min(...values), Math.max(...values), ends);
  };
  const data = [sorted.map((one) => one.x), ...labels.map((_, group) => sorted.map((one) => (one.group === group ? one.y : null)))];
  const x = axis(xTitle);
  x.values = (_, splits) => splits.map((value) => show(value));
  x.space = 90; // as wide as "12 min 30 s"
  const y = axis("", true);
  y.values = (_, splits) => splits.map((value) => showY(value));
  mount({
    scales: {
      x: { time: false, range: () => range("x", "low", "high") },
      y: { range: () => range("y", "lowY", "highY") },
    },
    axes: [x, y],
    series: [
      { label: xTitle, value: (_, value) => (value === null ? "–" : show(value)) },
      ...labels.map((label, group) => ({
        label, stroke: () => colour(colours[group]), paths: () => null, value: (_, value) => (value === null ? "–" : showY(value)),
        points: { show: true, size: group === 0 ? 10 : 7, fill: group > 1 ? () => colour("card") : () => colour(colours[group]) },
      })),
    ],
    hooks: { draw: [bars] },
    cursor: { drag: { x: false, y: false } },
  }, data, plot, figure);
}
