// Line charts, sparklines and the bar of attempts, drawn as SVG, and the words beside them. Text goes in as text only.
// Where uPlot is installed, plots.js draws the charts instead.

export const HIGH = 210;
const LEFT = 58, RIGHT = 10, TOP = 8, BOTTOM = 24;
const SPACE = "http://www.w3.org/2000/svg";

export function shape(name, attributes = {}, text) {
  const made = document.createElementNS(SPACE, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

export function duration(seconds) {
  const s = Math.abs(seconds), sign = seconds < 0 ? "-" : "";
  if (s < 9.95) return sign + s.toFixed(1) + " s";
  if (s < 60) return sign + Math.round(s) + " s";
  const two = (big, name, small, rest) => {
    const part = Math.floor((s % big) / small);
    return sign + Math.floor(s / big) + " " + name + (part ? " " + part + " " + rest : "");
  };
  if (s < 3600) return two(60, "min", 1, "s");
  return s < 172800 ? two(3600, "h", 60, "min") : two(86400, "d", 3600, "h");
}

export function size(bytes) {
  const names = ["B", "KiB", "MiB", "GiB", "TiB"];
  let value = bytes, at = 0;
  while (Math.abs(value) >= 1024 && at < 4) { value /= 1024; at += 1; }
  return (at && value < 100 ? value.toFixed(1) : Math.round(value)) + " " + names[at];
}

export function number(value) {
  if (value === null || !Number.isFinite(value)) return "not a number";
  const s = Math.abs(value);
  if (Number.isInteger(value) && s < 1e15) return value.toLocaleString("en");
  return s !== 0 && (s < 1e-3 || s >= 1e6) ? value.toExponential(2) : Number(value.toPrecision(4)).toString();
}

const short = (seconds) => (Math.abs(seconds) < 1 ? number(Math.round(seconds * 1e4) / 10) + " ms" : duration(seconds));

export const UNITS = { bytes: size, s: short, "": number };

const STEPS = {
  bytes: [1, 2, 4, 8, 16, 32, 64, 128, 256, 512].flatMap((part) => [0, 1, 2, 3, 4, 5].map((power) => part * 1024 ** power)),
  s: [0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400, 28800, 86400, 172800, 604800],
};
for (const steps of Object.values(STEPS)) steps.sort((one, two) => one - two);

export function ticks(low, high, count, unit = "") {
  if (!(high > low)) return [low];
  const raw = (high - low) / count, ten = 10 ** Math.floor(Math.log10(raw));
  const step = (raw >= 0.1 && (STEPS[unit] || []).find((part) => part >= raw)) || [1, 2, 2.5, 5, 10].map((part) => part * ten).find((part) => part >= raw);
  const found = [];
  for (let at = Math.ceil(low / step); at * step <= high + step * 1e-9; at += 1) found.push(at * step || 0);
  return found;
}

// An average that weighs recent points more; `strength` from 0 (none) to 0.99.
export function smooth(values, strength) {
  if (!strength) return values;
  let mean = 0, weight = 0;
  return values.map((value) => {
    if (value === null) return null;
    mean = strength * mean + (1 - strength) * value;
    weight = strength * weight + (1 - strength);
    return mean / weight;
  });
}

export const xFormatOf = (options) => (options.x === "time" ? duration : number);

// The chart in a sentence, for those who cannot see it.
export function labelOf(lines, options) {
  if (!lines.length) return options.title + ": nothing to draw yet";
  const format = UNITS[options.unit] || number, [low, high] = extent(lines, (line) => [line.low || line.last, line.high || line.last], (value) => value !== null);
  const ends = lines.map((line) => `${line.name} ends at ${format(lastOf(line.last))}`).join(", ");
  const from = high >= low ? ` from ${format(low)} to ${format(high)};` : "";
  return `Chart of ${options.title}:${from} ${ends}. Arrow keys read its values.`;
}

// What the lines are at a place of the x axis.
export function reading(lines, options, place) {
  const format = UNITS[options.unit] || number;
  const values = lines.map((line) => {
    const at = nearest(line.xs, place);
    const spread = line.low && line.low[at] !== line.high[at] ? ` (${format(line.low[at])} to ${format(line.high[at])})` : "";
    return `${line.name} ${format(line.last[at])}${spread}`;
  });
  const words = { time: "after", tokens: "token" }[options.x] || "step";
  return `${words} ${xFormatOf(options)(options.x === "time" ? place : Math.round(place))}: ${values.join(", ")}`;
}

function extent(lines, values, usable) {
  let low = Infinity, high = -Infinity;
  for (const line of lines) {
    const [lows, highs] = values(line);
    for (const value of lows) if (usable(value)) low = Math.min(low, value);
    for (const value of highs) if (usable(value)) high = Math.max(high, value);
  }
  return [low, high];
}

// lines: {name, tone (0-9), isDashed, xs, last, low?, high?}; options: {unit, log, smoothing, x, breaks, title}; `read` gets
// what is under the cursor. The answer moves the cursor to a share of the width, hides it, and shows the whole chart again.
export function draw(holder, lines, options, read) {
  const format = UNITS[options.unit] || number;
  const usable = (value) => value !== null && Number.isFinite(value) && (!options.log || value > 0);
  const known = lines.filter((line) => line.xs.some((x) => x !== null));
  for (const line of known) {
    line.isSmooth = options.smoothing > 0 && line.xs.length > 50; // a few values are shown as they are
    line.drawn = line.isSmooth ? smooth(line.last, options.smoothing) : line.last;
  }
  const [left, right] = extent(known, (line) => [line.xs, line.xs], (x) => x !== null);
  let [low, high] = extent(known, (line) => [line.low || line.last, line.high || line.last], usable);
  const WIDE = Math.min(1200, Math.max(260, holder.clientWidth || 600)); // as wide as it is shown, so that text is readable
  const svg = shape("svg", { viewBox: `0 0 ${WIDE} ${HIGH}`, "aria-hidden": "true" });
  holder.replaceChildren(svg);
  holder.setAttribute("aria-label", labelOf(known, options));
  if (!(high >= low) || !(right >= left)) {
    svg.append(shape("text", { x: WIDE / 2, y: HIGH / 2, class: "mid" }, "nothing to draw yet"));
    return null;
  }
  if (options.zero && !options.log) low = Math.min(0, low);
  if (low === high) { const pad = Math.abs(low) * 0.05 || 1; low -= options.log ? 0 : pad; high += pad; }
  const scale = options.log ? Math.log10 : (value) => value;
  const top = scale(high), bottom = scale(low), width = right - left || 1;
  const x = (value) => LEFT + ((WIDE - LEFT - RIGHT) * (value - left)) / width;
  const y = (value) => TOP + ((HIGH - TOP - BOTTOM) * (top - scale(value))) / (top - bottom || 1);
  const marks = options.log ? logTicks(low, high) : ticks(low, high, 4, options.unit);
  for (const value of marks) {
    const at = y(value).toFixed(1);
    svg.append(shape("line", { class: "grid", x1: LEFT, x2: WIDE - RIGHT, y1: at, y2: at }));
    svg.append(shape("text", { x: LEFT - 6, y: Number(at) + 4, class: "end" }, format(value)));
  }
  for (const value of ticks(left, right, Math.max(2, Math.floor(WIDE / 130)), options.x === "time" ? "s" : "")) {
    svg.append(shape("text", { x: x(value).toFixed(1), y: HIGH - 6, class: "mid" }, xFormatOf(options)(value)));
  }
  for (const place of options.breaks || []) {
    if (place <= left || place >= right) continue;
    const at = x(place).toFixed(1);
    svg.append(shape("line", { class: "break", x1: at, x2: at, y1: TOP, y2: HIGH - BOTTOM }));
  }
  for (const line of known) {
    const tone = "c" + (line.tone % 10) + (line.isDashed ? " dash" : "");
    if (line.low && line.high) svg.append(shape("path", { class: tone + " band", d: band(line, x, y, usable) }));
    else if (line.isSmooth) svg.append(shape("path", { class: tone + " raw", d: path(line.xs, line.last, x, y, usable) }));
    svg.append(shape("path", { class: tone, d: path(line.xs, line.drawn, x, y, usable) }));
    const bad = line.xs.filter((place, at) => place !== null && line.last[at] === null).map((place) => `M${x(place).toFixed(1)} ${TOP}v8`);
    if (bad.length) svg.append(shape("path", { class: "nan", d: bad.join("") }));
  }
  const cursor = shape("line", { class: "at", y1: TOP, y2: HIGH - BOTTOM, visibility: "hidden" });
  svg.append(cursor);
  return {
    hasPointer: false,
    move(share) {
      const place = left + share * width;
      cursor.setAttribute("x1", x(place)); cursor.setAttribute("x2", x(place)); cursor.setAttribute("visibility", "visible");
      read(reading(known, options, place));
    },
    hide() { cursor.setAttribute("visibility", "hidden"); read(""); },
    whole() {},
    shareAt: (share) => Math.min(1, Math.max(0, (share * WIDE - LEFT) / (WIDE - LEFT - RIGHT))),
  };
}

export function lastOf(values) {
  for (let at = values.length - 1; at >= 0; at -= 1) if (values[at] !== null) return values[at];
  return null;
}

export function logTicks(low, high) {
  const found = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power += 1) {
    for (const part of [1, 2, 5]) {
      const value = part * 10 ** power;
      if (value >= low && value <= high) found.push(value);
    }
  }
  const whole = found.filter((value) => Math.abs(Math.log10(value) % 1) < 1e-9);
  return found.length > 7 && whole.length > 1 ? whole : found.length ? found : [low, high];
}

function path(xs, values, x, y, usable) {
  const parts = [];
  let isDown = false;
  for (let at = 0; at < xs.length; at += 1) {
    if (xs[at] === null || !usable(values[at])) { isDown = false; continue; }
    parts.push((isDown ? "L" : "M") + x(xs[at]).toFixed(1) + " " + y(values[at]).toFixed(1));
    isDown = true;
  }
  if (parts.length === 1) parts.push("h2");
  return parts.join("");
}

function band(line, x, y, usable) {
  const there = [], back = [];
  for (let at = 0; at < line.xs.length; at += 1) {
    if (line.xs[at] === null || !usable(line.low[at]) || !usable(line.high[at])) continue;
    const place = x(line.xs[at]).toFixed(1);
    there.push(place + " " + y(line.high[at]).toFixed(1));
    back.unshift(place + " " + y(line.low[at]).toFixed(1));
  }
  return there.length ? "M" + there.concat(back).join("L") + "Z" : "";
}

function nearest(xs, place) {
  let low = 0, high = xs.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (xs[middle] < place) low = middle + 1; else high = middle;
  }
  return low > 0 && place - xs[low - 1] < xs[low] - place ? low - 1 : low;
}

export function spark(values, label) {
  const svg = shape("svg", { viewBox: "0 0 140 28", role: "img", "aria-label": label });
  const known = values.filter((value) => value !== null);
  if (known.length < 2) return svg;
  const low = Math.min(...known), high = Math.max(...known);
  const x = (at) => 2 + (136 * at) / (values.length - 1), y = (value) => 26 - (24 * (value - low)) / (high - low || 1);
  svg.append(shape("path", { class: "c0", d: path(values.map((_, at) => at), values, x, y, (value) => value !== null) }));
  return svg;
}

// The bar of attempts and phases. spans: [begin_s, end_s, use, attempt]
export function bar(time, attempts) {
  const svg = shape("svg", { viewBox: "0 0 1000 44", role: "img", preserveAspectRatio: "none" });
  if (!time.spans.length) return svg;
  const begin = time.spans[0][0], length = time.spans[time.spans.length - 1][1] - begin || 1;
  for (const [from, to, use, attempt] of time.spans) {
    const part = shape("rect", {
      class: "u" + use, x: ((1000 * (from - begin)) / length).toFixed(2), y: 2, height: 32,
      width: Math.max(0.4, (1000 * (to - from)) / length).toFixed(2),
    });
    part.append(shape("title", {}, `${attempt === null ? "" : "attempt " + attempt + ": "}${time.uses[use]}, ${duration(to - from)}`));
    svg.append(part);
  }
  for (const attempt of attempts.slice(1)) {
    const at = ((1000 * (attempt.started_at_s - begin)) / length).toFixed(2);
    svg.append(shape("line", { class: "edge", x1: at, x2: at, y1: 0, y2: 36 }));
  }
  const said = Object.entries(time.seconds).map(([use, seconds]) => `${use} ${duration(seconds)}`).join(", ");
  svg.setAttribute("aria-label", `${attempts.length} attempts: ${said}`);
  return svg;
}
