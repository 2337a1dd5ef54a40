// Figures with their units: three or four significant digits, with the exact value in `value`.

export const missing = { text: "–", value: null };
export const known = (value) => typeof value === "number" && Number.isFinite(value);

function digits(value, count = 3) {
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e6 || size < 1e-4) return value.toExponential(2).replace("e+", "e");
  const decimals = Math.max(0, Math.min(6, count - 1 - Math.floor(Math.log10(size))));
  return grouped(value.toFixed(decimals));
}

// 12345.6 as 12,345.6
export function grouped(text) {
  const [whole_part, ...rest] = text.split(".");
  return [whole_part.replace(/\B(?=(\d{3})+$)/g, ","), ...rest].join(".");
}

const shown = (text) => (value) => (known(value) ? { text: text(value), value } : missing);

export const number = shown((value) => digits(value, 4));
export const plain = shown((value) => (Math.abs(value) >= 1e-4 ? grouped(String(Number(value.toPrecision(4)))) : value.toExponential(2)));
export const whole = shown((value) => grouped(Math.round(value).toString()));
// A validation metric, as `metric` in tasks/units.py: 0.9877, 23,250.
export const metric = shown((value) => {
  const size = Math.abs(value);
  if ((size > 0 && size < 1e-4) || size >= 1e6) return digits(value);
  return grouped(value.toFixed(size < 10 ? 4 : Math.max(0, 4 - Math.floor(Math.log10(size)))));
});
export const percent = shown((value) => `${(100 * value).toFixed(1)} %`);
export const signed = shown((value) => `${value > 0 ? "+" : value < 0 ? "−" : "±"}${Math.abs(100 * value).toFixed(0)} %`);

export const seconds = shown((value) => {
  const size = Math.abs(value);
  if (size === 0) return "0 s";
  if (size < 0.001) return `${digits(value * 1e6)} µs`;
  if (size < 1) return `${digits(value * 1e3)} ms`;
  if (size < 99.95) return `${digits(value)} s`;
  const whole_s = Math.round(size);
  if (whole_s < 3600) return `${Math.floor(whole_s / 60)} min ${String(whole_s % 60).padStart(2, "0")} s`;
  const minutes = Math.round(whole_s / 60);
  if (minutes < 48 * 60) return `${Math.floor(minutes / 60)} h ${String(minutes % 60).padStart(2, "0")} min`;
  return `${digits(size / 86400)} days`;
});

function scaled(unit, steps, factor) {
  return shown((value) => {
    let rest = value;
    let index = 0;
    while (Math.abs(rest) >= factor * 0.9995 && index < steps.length - 1) {
      rest /= factor;
      index += 1;
    }
    return `${digits(rest)} ${steps[index]}${unit}`;
  });
}

export const joules = scaled("J", ["", "k", "M", "G"], 1000);
export const bytes = scaled("B", ["", "Ki", "Mi", "Gi", "Ti"], 1024);
export const watts = scaled("W", ["", "k", "M"], 1000);
export const rate = shown((value) => `${digits(value)} /s`);
// An amount of money, never with an exponent; prices have the pool's currency, or none.
export const money = (value, currency = "") => shown((known) => {
  const small = known !== 0 && Math.abs(known) < 1e-4;
  return `${small ? known.toFixed(2 - Math.floor(Math.log10(Math.abs(known)))) : digits(known)} ${currency}`.trimEnd();
})(value);
export const priced = (currency) => (value) => money(value, currency ?? "units");

// The ends are so far apart that the value is not known (as `says_nothing` in tasks/units.py).
export const vague = (low, high) => low > 0 && high > 1000 * low;

// An interval, with the unit only once if both ends have the same.
function span(low, high, unit) {
  if (vague(low, high)) return "not known";
  const [one, other] = [unit(low).text, unit(high).text];
  const at = one.lastIndexOf(" ");
  return at > 0 && other.endsWith(one.slice(at)) && other.split(" ").length === 2 && one.split(" ").length === 2
    ? `${one.slice(0, at)} – ${other}` : `${one} – ${other}`;
}

// A triple as "25.0 s (20.0 – 31.3 s)"
export function interval(triple, unit) {
  if (!triple || !known(triple.median)) return missing;
  const { median, low, high } = triple;
  return { text: vague(low, high) ? "not known" : `${unit(median).text} (${span(low, high, unit)})`, value: median };
}

export const bounds = (low, high, unit) => (known(low) && known(high) ? span(low, high, unit) : "–");

export const range = (triple, unit) =>
  triple && known(triple.median) ? `predicted${vague(triple.low, triple.high) ? ":" : ` ${unit(triple.median).text}`}\n${span(triple.low, triple.high, unit)}` : null;

// The interval of a predicted quantity.
export const between = (triple, unit) => (triple && known(triple.median) ? span(triple.low, triple.high, unit) : null);

export function moment(text) {
  const at = new Date(text ?? "");
  if (Number.isNaN(at.getTime())) return { text: "–", value: null };
  const two = (value) => String(value).padStart(2, "0");
  return {
    text: `${at.getFullYear()}-${two(at.getMonth() + 1)}-${two(at.getDate())} ${two(at.getHours())}:${two(at.getMinutes())}:${two(at.getSeconds())}`,
    value: text,
  };
}

// The error of a predicted triple; null without a measured value, or if nothing follows from the triple.
export const errorOf = (guess, seen) => (guess && seen && !vague(guess.low, guess.high) ? signed(guess.median / seen - 1) : null);

const UNITS = { s: seconds, J: joules, B: bytes };
export const inUnit = (unit) => UNITS[unit] ?? priced(unit);

export const ENGINES = { slurm: "Slurm", kubernetes: "Kubernetes" };

export const counted = (devices) => Object.entries(devices).map(([kind, count]) => `${count} × ${kind}`).join(", ");
