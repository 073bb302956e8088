// Line charts drawn by uPlot, where it is part of this installation. charts.js draws the same lines without it.
// A drag along a chart shows that part larger; a double click or Escape shows all of it again.

import { HIGH, labelOf, logTicks, number, reading, smooth, ticks, UNITS, xFormatOf } from "./charts.js";

const LEFT = 62;
const kept = new WeakMap(); // the chart in each holder: new points leave its zoom and its cursor as they are
let tones = null;

export const isThere = () => typeof window.uPlot === "function";

window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { tones = null; });

// The colours of app.css: a canvas knows no style sheet.
function colours() {
  if (tones) return tones;
  const probe = document.createElement("span");
  document.body.append(probe);
  const read = (name) => { probe.className = name; return getComputedStyle(probe).color; };
  tones = { line: [...Array(10).keys()].map((at) => read("c" + at)), dim: read("dim"), bad: read("bad"), grid: read("ruled") };
  probe.remove();
  return tones;
}

const faint = (colour, share) => colour.replace(/^rgb\((.*)\)$/, `rgba($1, ${share})`);

// All lines as columns over one axis. What a log scale cannot show is a gap.
function columns(lines, options) {
  const usable = (value) => (value === null || !Number.isFinite(value) || (options.log && value <= 0) ? null : value);
  const tables = [], series = [{}], bands = [];
  for (const line of lines) {
    const rows = line.xs.map((_, at) => at).filter((at) => line.xs[at] !== null).sort((one, two) => line.xs[one] - line.xs[two]);
    const pick = (values) => rows.map((at) => usable(values[at]));
    const tone = colours().line[line.tone % 10], table = [rows.map((at) => line.xs[at])];
    const isSmooth = options.smoothing > 0 && rows.length > 50; // a few values are shown as they are
    const add = (values, look) => { table.push(values); series.push({ points: { show: rows.length < 2 }, ...look }); };
    if (line.low && line.high) {
      bands.push({ series: [series.length, series.length + 1], fill: faint(tone, 0.2) });
      add(pick(line.high), { stroke: "transparent", points: { show: false } });
      add(pick(line.low), { stroke: "transparent", points: { show: false } });
    } else if (isSmooth) add(pick(line.last), { stroke: faint(tone, 0.35), width: 1 });
    add(isSmooth ? smooth(pick(line.last), options.smoothing) : pick(line.last), { stroke: tone, width: 1.6, dash: line.isDashed ? [5, 3] : undefined });
    tables.push(table);
  }
  return { data: tables.length > 1 ? window.uPlot.join(tables) : tables[0], series, bands };
}

function settings(state, found, width) {
  const { options } = state, format = UNITS[options.unit] || number, { dim, grid } = colours();
  const axis = { stroke: dim, font: "11px system-ui, sans-serif", ticks: { show: false }, filter: (u, places) => places };
  return {
    width, height: HIGH, legend: { show: false }, padding: [8, 14, 0, 0], series: found.series, bands: found.bands,
    cursor: { y: false, points: { show: false }, drag: { x: true, y: false }, sync: { key: "jackline-" + options.x } },
    scales: { x: { time: false }, y: { distr: options.log ? 3 : 1, range: (u, low, high) => range(options, low, high) } },
    axes: [
      { ...axis, grid: { show: false }, size: 26, splits: (u, at, low, high) => ticks(low, high, Math.max(2, Math.floor(u.width / 130)), options.x === "time" ? "s" : ""), values: (u, places) => places.map(xFormatOf(options)) },
      { ...axis, grid: { stroke: grid, width: 1 }, size: LEFT, splits: (u, at, low, high) => (options.log ? logTicks(low, high) : ticks(low, high, 4, options.unit)), values: (u, places) => places.map(format) },
    ],
    hooks: { draw: [(u) => mark(u, state)], setCursor: [(u) => tell(u, state)] },
  };
}

function range(options, low, high) {
  if (low === null || high === null) return options.log ? [0.1, 1] : [0, 1];
  if (options.log) return low === high ? [low / 2, high * 2] : [low, high];
  const pad = low === high ? Math.abs(low) * 0.05 || 1 : (high - low) * 0.03;
  return [options.zero && low >= 0 ? 0 : low - pad, high + pad];
}

// Restarts as dashed lines; where a value was not a number, a tick at the top.
function mark(u, { lines, options }) {
  const { ctx } = u, { left, top, width, height } = u.bbox, dot = devicePixelRatio;
  ctx.save();
  ctx.beginPath(); ctx.rect(left, top, width, height); ctx.clip();
  ctx.strokeStyle = ctx.fillStyle = colours().bad; ctx.lineWidth = dot; ctx.setLineDash([3 * dot, 3 * dot]);
  for (const place of options.breaks || []) {
    const at = Math.round(u.valToPos(place, "x", true));
    ctx.beginPath(); ctx.moveTo(at, top); ctx.lineTo(at, top + height); ctx.stroke();
  }
  for (const line of lines) {
    line.last.forEach((value, at) => {
      if (value === null && line.xs[at] !== null) ctx.fillRect(u.valToPos(line.xs[at], "x", true) - dot, top, 2 * dot, 8 * dot);
    });
  }
  ctx.restore();
}

function tell(u, { lines, options, read }) {
  read(u.cursor.left < 0 || u.cursor.left === undefined ? "" : reading(lines, options, u.posToVal(u.cursor.left, "x")));
}

// As `draw` of charts.js.
export function plot(holder, lines, options, read) {
  const known = lines.filter((line) => line.xs.some((x) => x !== null));
  holder.setAttribute("aria-label", labelOf(known, options));
  let chart = kept.get(holder);
  if (!known.length) {
    if (chart) { chart.u.destroy(); kept.delete(holder); }
    holder.textContent = "nothing to draw yet";
    return null;
  }
  const found = columns(known, options), width = Math.min(1200, Math.max(260, holder.clientWidth || 600));
  const look = JSON.stringify([known.map((line) => [line.tone, line.isDashed]), found.series.length, found.bands.length, options.log, options.x, options.unit, colours().dim]);
  if (!chart || chart.look !== look || !holder.contains(chart.u.root)) {
    if (chart) chart.u.destroy();
    const state = { lines: known, options, read };
    holder.replaceChildren();
    chart = { look, state, u: new window.uPlot(settings(state, found, width), found.data, holder) };
    kept.set(holder, chart);
  } else {
    const { u, state } = chart, { min, max } = u.scales.x, xs = u.data[0], isZoomed = min > xs[0] || max < xs[xs.length - 1];
    Object.assign(state, { lines: known, options, read });
    if (u.width !== width) u.setSize({ width, height: HIGH });
    u.setData(found.data, !isZoomed);
    if (isZoomed) u.setScale("x", { min, max });
  }
  const { u } = chart;
  return {
    hasPointer: true, // uPlot follows the mouse by itself
    move: (share) => u.setCursor({ left: share * u.over.clientWidth, top: u.over.clientHeight / 2 }, true, true),
    hide: () => u.setCursor({ left: -10, top: -10 }, true, true),
    whole: () => u.setScale("x", { min: u.data[0][0], max: u.data[0][u.data[0].length - 1] }),
  };
}
