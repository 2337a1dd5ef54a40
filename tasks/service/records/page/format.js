// Figures with their units, as tasks/units.py writes them, with the exact value in `value`. A test compares both.

export const missing = { text: "–", value: null };
export const known = (value) => typeof value === "number" && Number.isFinite(value);

// 12345.6 as 12,345.6
function grouped(text) {
  const [whole_part, ...rest] = text.split(".");
  return [whole_part.replace(/\B(?=(\d{3})+$)/g, ","), ...rest].join(".");
}

const decimalsFor = (value, count) => Math.min(100, Math.max(0, count - 1 - Math.floor(Math.log10(Math.abs(value)))));

// At least `count` significant digits, never with an exponent: 960, 12,346, 0.00123.
function digits(value, count = 3) {
  if (value === 0) return "0";
  const decimals = decimalsFor(value, count);
  const text = grouped(value.toFixed(decimals));
  return decimals ? text.replace(/\.?0+$/, "") : text;
}

const shown = (text) => (value) => (known(value) ? { text: text(value), value } : missing);

export const plain = shown((value) => digits(value));
export const number = shown((value) => digits(value, 4));
export const whole = shown((value) => grouped(Math.round(value).toString()));
// A validation metric: 0.9877, 23,250.
export const metric = shown((value) => {
  const size = Math.abs(value);
  if (size > 0 && size < 1e-4) return digits(value);
  return grouped(value.toFixed(size < 10 ? 4 : Math.max(0, 4 - Math.floor(Math.log10(size)))));
});
export const percent = shown((value) => `${(100 * value).toFixed(1)} %`);
export const signed = shown((value) => `${value > 0 ? "+" : value < 0 ? "−" : "±"}${Math.abs(100 * value).toFixed(0)} %`);

export const seconds = shown((value) => {
  if (value === 0) return "0 s";
  if (value < 1e-3) return `${(value * 1e6).toFixed(0)} µs`;
  if (value < 1) return `${digits(value * 1e3)} ms`;
  if (value < 60) return `${value.toFixed(1)} s`;
  const whole_s = Math.round(value);
  const [hours, minutes, rest] = [Math.floor(whole_s / 3600), Math.floor(whole_s / 60) % 60, whole_s % 60];
  if (hours) return minutes ? `${hours} h ${minutes} min` : `${hours} h`;
  return rest ? `${minutes} min ${rest} s` : `${minutes} min`;
});

// 20.6 s, 2 min, 1.5 h, 2 days
export const coarse = shown((value) => {
  if (value < 60) return seconds(value).text;
  if (value < 3600) return `${(value / 60).toFixed(0)} min`;
  if (value < 2 * 86400) return `${digits(value / 3600, 2)} h`;
  return `${grouped(Math.floor(value / 86400).toString())} days`;
});

const amount = (unit) => shown((value) => {
  const [scale, prefix] = [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"], [1, ""]].find(([least]) => Math.abs(value) >= least) ?? [1, ""];
  return `${digits(value / scale)} ${prefix}${unit}`;
});

export const joules = amount("J");
export const bytes = shown((value) => {
  const [scale, unit] = [[2 ** 40, "TiB"], [2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"]].find(([least]) => value >= least) ?? [1, "B"];
  return unit === "B" ? `${value.toFixed(0)} B` : `${digits(value / scale)} ${unit}`;
});
export const rate = shown((value) => `${digits(value)} /s`);
// An amount of money; prices have the pool's currency, or none.
export const money = (value, currency = "") => shown((cost) => `${digits(cost)} ${currency}`.trimEnd())(value);
export const priced = (currency) => (value) => money(value, currency ?? "units");

// The interval is so wide that only the order of the value is known (`is_rough` in tasks/units.py).
export const rough = (low, high) => low > 0 && high > 10 * low;
// Not even its order (`is_unknown`).
export const unknown = (low, high) => low > 0 && high > 1e6 * low;

// A predicted value whose interval stands beside it: "25 s", "about 2 min (rough)", as `predicted` in tasks/units.py.
export function predicted(triple, unit) {
  if (!triple || !known(triple.median)) return missing;
  const { median, low, high } = triple;
  if (unknown(low, high)) return { text: "not known", value: median };
  if (!rough(low, high)) return unit(median);
  const near = Number(median.toPrecision(2));
  const order = unit !== seconds || median < 1 ? unit(near).text : median >= 60 ? coarse(median).text : `${digits(near)} s`;
  return { text: `about ${order} (rough)`, value: median };
}

// The ends, with the unit only once if both have the same.
function span(low, high, unit) {
  const [one, other] = [unit(low).text, unit(high).text];
  const at = one.lastIndexOf(" ");
  return at > 0 && other.endsWith(one.slice(at)) && other.split(" ").length === 2 && one.split(" ").length === 2
    ? `${one.slice(0, at)} – ${other}` : `${one} – ${other}`;
}

// A triple as "25 s (20 – 31.3 s)"
export function interval(triple, unit) {
  const median = predicted(triple, unit);
  const narrow = median !== missing && !rough(triple.low, triple.high);
  return narrow ? { text: `${median.text} (${span(triple.low, triple.high, unit)})`, value: triple.median } : median;
}

export const bounds = (low, high, unit) => (!known(low) || !known(high) ? "–" : unknown(low, high) ? "not known" : span(low, high, unit));

// What was predicted, below a measured value; on two lines.
export const range = (triple, unit) => (triple && known(triple.median)
  ? `predicted ${predicted(triple, unit).text}${rough(triple.low, triple.high) ? "" : `\n${span(triple.low, triple.high, unit)}`}` : null);

// The interval of a predicted quantity, below its median.
export const between = (triple, unit) => (triple && known(triple.median) && !rough(triple.low, triple.high) ? span(triple.low, triple.high, unit) : null);

export function moment(text) {
  const at = new Date(text ?? "");
  if (Number.isNaN(at.getTime())) return { text: "–", value: null };
  const two = (value) => String(value).padStart(2, "0");
  return {
    text: `${at.getFullYear()}-${two(at.getMonth() + 1)}-${two(at.getDate())} ${two(at.getHours())}:${two(at.getMinutes())}:${two(at.getSeconds())}`,
    value: text,
  };
}

// The error of a predicted triple; null without a measured value, or if the triple is rough.
export const errorOf = (guess, seen) => (guess && seen && !rough(guess.low, guess.high) ? signed(guess.median / seen - 1) : null);

const UNITS = { s: seconds, J: joules, B: bytes };
export const inUnit = (unit) => UNITS[unit] ?? priced(unit);

export const ENGINES = { slurm: "Slurm", kubernetes: "Kubernetes" };

export const counted = (devices) => Object.entries(devices).map(([kind, count]) => `${count} × ${kind}`).join(", ");

// Metrics that can share an axis, each group with its title. Losses have their own chart.
const SHARES = ["accuracy", "f1", "auc"];
const ERRORS = ["rmse", "mae"];
export function groupsOf(names) {
  const told = names.filter((name) => !["step", "epoch", "loss", "log_loss", "train_loss", "duration_s"].includes(name));
  const together = [["shares", SHARES], ["errors", ERRORS]].map(([title, those]) => [title, told.filter((name) => those.includes(name))]);
  const alone = told.filter((name) => !SHARES.includes(name) && !ERRORS.includes(name)).map((name) => [words(name), [name]]);
  return [...together, ...alone].filter(([, own]) => own.length);
}

export const words = (name) => name.replaceAll("_", " ");

const LESS_IS_BETTER = ["loss", "error", "mae", "mase", "mse", "rmse", "mape", "perplexity"];
// As `better_is` in tasks/spec/metric_names.py.
export const lessIsBetter = (name) => name.toLowerCase().split(/[_-]/).some((word) => LESS_IS_BETTER.includes(word));
