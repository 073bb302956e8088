// The page of `jackline dash`: asks the server for JSON every two seconds and shows it. Everything that comes from a run
// is put into the page as text. Nothing here changes a run.

import { bar, draw, duration, number, shape, spark, UNITS } from "./charts.js";
import { isThere, plot } from "./plots.js";

const EVERY_MS = 2000, HIDDEN_MS = 30000, MOST_MS = 30000, COMPARED = 10, LOG_LINES = 1500;
const SIGNS = { good: "●", warn: "▲", bad: "■", "": "◦" };
const SHAPES = {
  good: ["circle", { cx: 8, cy: 8, r: 6, fill: "#2e9e4f" }],
  warn: ["path", { d: "M8 2L15 14H1Z", fill: "#d98a2b" }],
  bad: ["rect", { x: 2, y: 2, width: 12, height: 12, fill: "#d0443a" }],
  "": ["circle", { cx: 8, cy: 8, r: 5, fill: "none", stroke: "#808890", "stroke-width": 2 }],
};
const main = document.getElementById("main"), lost = document.getElementById("lost");
const news = document.getElementById("news"), place = document.getElementById("place");

let token = "", page = null, asking = null, timer = 0, wait = EVERY_MS, heardAt = 0, isLost = false;

// -- small parts -------------------------------------------------------------------------------------------------------

function make(name, { text, kind, ...attributes } = {}, ...inside) {
  const made = document.createElement(name);
  if (kind) made.className = kind;
  for (const [key, value] of Object.entries(attributes)) if (value !== undefined) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  made.append(...inside.filter((part) => part !== null && part !== undefined && part !== ""));
  return made;
}

const say = (text, kind) => make("p", { text, kind });

// Replaces the children only when they differ, so that a selection or the focus survives an update.
function show(holder, ...parts) {
  const fresh = make("div", {}, ...parts);
  if (holder.dataset.shown === fresh.innerHTML) return;
  const shown = fresh.innerHTML;
  holder.replaceChildren(...fresh.childNodes);
  holder.dataset.shown = shown;
}

const stores = {
  read: (store, key) => { try { return store().getItem(key); } catch { return null; } },
  write: (store, key, value) => { try { store().setItem(key, value); } catch { /* private mode: forgotten at the end */ } },
};
const session = () => window.sessionStorage, local = () => window.localStorage;

function clock(seconds) {
  const at = new Date(seconds * 1000), today = new Date().toDateString() === at.toDateString();
  return (today ? "" : at.toLocaleDateString() + " ") + at.toLocaleTimeString();
}

function copyButton(text) {
  const button = make("button", { type: "button", text: "Copy" });
  button.addEventListener("click", async () => {
    try { await navigator.clipboard.writeText(text()); button.textContent = "Copied"; } catch { button.textContent = "Select it by hand"; }
  });
  return button;
}

// -- asking ------------------------------------------------------------------------------------------------------------

async function ask(path) {
  const stop = new AbortController(), late = setTimeout(() => stop.abort(), 20000);
  try {
    const answer = await fetch("api/" + path, {
      headers: { "X-Jackline-Token": token }, credentials: "same-origin", cache: "no-store", signal: stop.signal,
    });
    if (answer.status === 401) throw Object.assign(new Error("token"), { isToken: true });
    if (answer.status === 404) throw Object.assign(new Error("gone"), { isGone: true });
    if (!answer.ok) throw new Error("status " + answer.status);
    return await answer.json();
  } finally { clearTimeout(late); }
}

async function poll() {
  const asked = page;
  if (asking === asked) return; // its answer is on the way, and asks again
  asking = asked;
  let isMore = false;
  try {
    isMore = await asked.update();
    if (asked === page) heard();
  } catch (error) {
    if (asked !== page) return;
    if (error.isToken) { askForToken(); return; }
    if (error.isGone) { heard(); show(main, say("This run is not there any more."), make("a", { href: "#/", text: "All runs" })); return; }
    unheard();
  } finally { if (asking === asked) asking = null; }
  if (asked !== page) return;
  const calm = document.hidden ? HIDDEN_MS : EVERY_MS;
  wait = isLost ? Math.min(MOST_MS, wait * 2) : calm;
  timer = setTimeout(poll, isMore && !isLost ? 50 : wait);
}

function heard() {
  heardAt = Date.now(); isLost = false; wait = EVERY_MS;
  document.body.classList.remove("lost"); lost.hidden = true;
}

function unheard() {
  if (!isLost) { isLost = true; wait = EVERY_MS / 2; }
  document.body.classList.add("lost"); lost.hidden = false;
  tellTime();
}

function tellTime() {
  if (isLost) {
    const ago = heardAt ? ` since ${clock(heardAt / 1000)} (${duration((Date.now() - heardAt) / 1000)})` : "";
    const text = `No news${ago}. This page shows the past: the server of \`jackline dash\` does not answer.`;
    if (lost.textContent !== text) lost.textContent = text;
    news.textContent = "";
    document.title = "? " + document.title.replace(/^\? /, "");
  } else if (heardAt) news.textContent = "as of " + clock(heardAt / 1000);
}

function askForToken() {
  clearTimeout(timer);
  show(main, make("section", {}, make("h1", { text: "This page needs its token" }),
    say("Open the address that `jackline dash` printed, with everything behind the #.")));
}

function icon(tone) {
  const [name, attributes] = SHAPES[tone] || SHAPES[""];
  const svg = shape("svg", { xmlns: "http://www.w3.org/2000/svg", viewBox: "0 0 16 16" });
  svg.append(shape(name, attributes));
  const address = "data:image/svg+xml," + encodeURIComponent(svg.outerHTML);
  const link = document.getElementById("icon");
  if (link.getAttribute("href") !== address) link.setAttribute("href", address);
}

// -- all runs ----------------------------------------------------------------------------------------------------------

function runsPage() {
  const holder = make("div"), word = make("input", { type: "search", placeholder: "Find a run", "aria-label": "Find a run by name or state" });
  const sum = make("p", { kind: "dim", role: "status" });
  let found = null;
  word.addEventListener("input", fill);
  place.textContent = "All runs";
  main.replaceChildren(make("section", {}, make("h1", { text: "Runs" }), make("div", { kind: "tools" }, word, sum), holder));

  function fill() {
    if (!found) return;
    const wanted = word.value.trim().toLowerCase();
    const rows = found.runs.filter((run) => !wanted || (run.name + " " + run.word).toLowerCase().includes(wanted));
    const live = found.runs.filter((run) => run.is_live).length;
    const text = `${found.runs.length} runs, ${live} alive, in ${found.folder}`;
    if (sum.textContent !== text) sum.textContent = text;
    if (!rows.length) { show(holder, say(found.runs.length ? "No run fits." : "There is no run yet. Start one: jackline run -- python train.py")); return; }
    const head = ["Run", "State", "Progress", "Loss", "Goodput", "Age"];
    const table = make("table", { kind: "runs" },
      make("thead", {}, make("tr", {}, ...head.map((text) => make("th", { scope: "col", text })))),
      make("tbody", {}, ...rows.map((run) => row(run, found.now_s))));
    show(holder, table);
  }

  return {
    async update() {
      found = await ask("runs");
      fill();
      const bad = found.runs.filter((run) => run.is_live && run.tone === "bad").length;
      icon(bad ? "bad" : found.runs.some((run) => run.is_live) ? "good" : "");
      document.title = (bad ? `■ ${bad} need you - ` : "") + "Jackline: all runs";
      return !found.is_whole;
    },
    leave() {},
  };
}

const runLink = (run) => make("a", { href: "#/run/" + run.key, text: run.name });

function row(run, now) {
  const values = run.spark ? run.spark.values : [];
  const last = values.length ? values[values.length - 1] : null;
  const said = last === null ? "" : `${run.spark.name} ${number(last)}`;
  const share = run.share === null ? "" : make("progress", { max: 1, value: run.share, "aria-label": "progress of " + run.name });
  const fork = run.fork_of ? make("span", { kind: "dim", text: "fork of " + run.fork_of }) : "";
  const branch = run.depth ? make("span", { kind: "branch", "aria-hidden": "true", text: "\u2514 " }) : "";
  return make("tr", {},
    make("td", { kind: "d" + Math.min(run.depth, 4) }, branch, runLink(run), fork),
    make("td", { kind: run.tone }, make("span", { "aria-hidden": "true", text: SIGNS[run.tone] + " " }), run.word),
    make("td", {}, run.progress || "", share, run.left ? make("span", { kind: "dim", text: run.left }) : ""),
    make("td", { kind: "spark" }, values.length > 1 ? spark(values, said) : "", make("span", { kind: "dim", text: said })),
    make("td", { kind: "num", "data-label": "goodput", text: run.goodput === null ? "-" : Math.round(run.goodput * 100) + " %" }),
    make("td", { "data-label": "age", text: run.created_at_s === null ? "-" : duration(now - run.created_at_s) }));
}

// -- one run -----------------------------------------------------------------------------------------------------------

function runPage(key) {
  const part = (title, ...inside) => make("section", {}, make("h2", { text: title }), ...inside);
  const holders = Object.fromEntries(["cards", "charts", "time", "told", "facts"].map((name) => [name, make("div")]));
  holders.verdict = verdictPart();
  holders.cards.className = "cards"; holders.charts.className = "charts";
  const chartState = { curves: new Map(), cursor: "", others: new Map(), x: "step", log: false, smoothing: 0.6, machine: [], attempts: [], share: 1 };
  const tools = chartTools(chartState, () => drawCharts(holders.charts, chartState, key), key);
  const timeline = timelinePart(key, holders.told), stacks = stacksPart(key), log = logPart(key);
  main.replaceChildren(holders.verdict.element, holders.cards,
    part("Charts", tools.element, holders.charts),
    part("Where the time went", holders.time),
    part("What happened", timeline.tools, holders.told),
    stacks.element, log.element, laterPart("Checkpoints", () => showCheckpoints(key)), laterPart("Config", () => showConfig(key)),
    part("About this run", holders.facts));
  let round = 0;
  return {
    async update() {
      const found = await ask("runs/" + key);
      showVerdict(holders, found);
      showTime(holders.time, found);
      chartState.machine = found.machine; chartState.attempts = found.attempts; chartState.name = found.told.name; chartState.tokens = found.tokens_per_step;
      await timeline.update();
      const isMore = await updateCurves(key, chartState);
      await tools.update(round);
      drawCharts(holders.charts, chartState, key);
      await log.update();
      round += 1;
      return isMore;
    },
    leave: timeline.leave,
  };
}

// The sentence stays the same element, so that a screen reader says it when it changes and only then.
function verdictPart() {
  const name = make("h1"), sign = make("span", { kind: "sign", "aria-hidden": "true" }), words = make("span"), more = make("div");
  const box = make("section", { kind: "verdict" }, name, make("p", { kind: "say", role: "status" }, sign, words), more);
  const put = (element, text) => { if (element.textContent !== text) element.textContent = text; };
  return {
    element: box,
    fill(told, ...parts) {
      if (box.className !== "verdict " + told.tone) box.className = "verdict " + told.tone;
      put(name, told.name); put(sign, SIGNS[told.tone] + " "); put(words, told.sentence);
      show(more, ...parts);
    },
  };
}

function showVerdict(holders, found) {
  const told = found.told, share = told.share === null ? "" : make("progress", { max: 1, value: told.share, "aria-label": "progress" });
  place.textContent = told.name;
  icon(told.tone);
  const far = told.share === null ? told.word : Math.round(told.share * 100) + " %";
  document.title = `${SIGNS[told.tone]} ${far} - ${told.name}`;
  holders.verdict.fill(told, share, ...told.details.map((line) => say(line)), told.hint ? say("What to do: " + told.hint, "dim") : "");
  const cards = told.cards.map((card) => {
    const meter = card.share === null ? "" : make("meter", { min: 0, max: 1, high: 0.85, value: card.share, "aria-label": card.title + ": share in use" });
    return make("div", { kind: "box " + card.tone }, make("h2", { text: card.title }), ...card.lines.map((line) => say(line)), meter);
  });
  const usual = found.usual_steps_per_s, card = cards[3];
  if (usual && !told.is_live) card.append(say(usual >= 1 ? `usually ${number(usual)} steps/s` : `usually ${duration(1 / usual)} a step`));
  if (found.time.goodput !== null) card.append(say(`${Math.round(found.time.goodput * 100)} % of the time was productive`));
  if (found.time.cost) card.append(say(found.time.cost));
  show(holders.cards, ...cards);
  const list = make("dl");
  const rows = [...told.facts, ["command", told.command], ["run folder", told.path], [told.is_live ? "to end it" : "to resume", told.resume]];
  const { parent, forks } = found.family;
  for (const [label, text] of rows) if (text && !(parent && label === "fork of")) list.append(make("dt", { text: label }), make("dd", {}, /^(command|to |run f)/.test(label) ? make("code", { text }) : text));
  const at = (run) => make("li", {}, runLink(run), ` at step ${run.step}`);
  for (const [label, runs] of [["fork of", parent ? [parent] : []], ["its forks", forks]]) {
    if (runs.length) list.append(make("dt", { text: label }), make("dd", {}, make("ul", { kind: "kin" }, ...runs.map(at))));
  }
  show(holders.facts, list);
}

function showTime(holder, found) {
  const time = found.time;
  if (!time.spans.length) { show(holder, say("No attempt has begun.")); return; }
  const keys = make("ul", { kind: "keys" });
  for (const [use, seconds] of Object.entries(time.seconds)) {
    const square = shape("svg", { viewBox: "0 0 10 10", "aria-hidden": "true" });
    square.append(shape("rect", { class: "u" + time.uses.indexOf(use), width: 10, height: 10 }));
    keys.append(make("li", {}, square, `${use} ${duration(seconds)} (${Math.round((100 * seconds) / (time.wall_s || 1))} %)`));
  }
  const rows = found.attempts.slice().reverse().map((attempt) => make("tr", {},
    make("td", { kind: "num", text: String(attempt.number) }), make("td", { text: clock(attempt.started_at_s) }),
    make("td", { text: attempt.is_open ? "running" : duration(attempt.ended_at_s - attempt.started_at_s) }), make("td", { text: attempt.is_open ? "" : attempt.ended || "end not seen" })));
  const table = make("table", {}, make("tr", {}, ...["Attempt", "Started", "Lasted", "How it ended"].map((text) => make("th", { scope: "col", text }))), ...rows);
  const isOpen = holder.querySelector("details")?.open;
  const details = make("details", { kind: "small" }, make("summary", { text: "attempts as a table" }), make("div", { kind: "scroll" }, table));
  if (isOpen) details.setAttribute("open", "");
  show(holder, bar(time, found.attempts), keys, time.best_saving ? say("Largest loss: " + time.best_saving, "dim") : "", details);
}

// -- charts ------------------------------------------------------------------------------------------------------------

// Adds what is new; `from` is the place in the curve from which the server sent it again.
function take(curves, found) {
  if (found.is_new) curves.clear();
  for (const curve of found.curves) {
    const known = curves.get(curve.name);
    if (!known || curve.from === 0) { curves.set(curve.name, curve); continue; }
    for (const name of ["steps", "times", "last", "low", "high"]) {
      if (curve[name]) known[name] = (known[name] || known.last).slice(0, curve.from).concat(curve[name]);
    }
  }
}

async function updateCurves(key, state) {
  const found = await ask(`runs/${key}/curves?since=${encodeURIComponent(state.cursor)}`);
  take(state.curves, found);
  state.cursor = found.cursor;
  state.share = found.is_whole ? 1 : found.read_share;
  return !found.is_whole;
}

function chartTools(state, redraw, key) {
  const xs = make("select", { "aria-label": "Horizontal axis" }, ...["step", "time", "tokens"].map((text) => make("option", { value: text, text: "by " + text })));
  const log = make("input", { type: "checkbox" }), soft = make("input", { type: "range", min: 0, max: 0.99, step: 0.01, value: state.smoothing });
  const others = make("details", { kind: "small" }, make("summary", { text: "compare with other runs" })), list = make("div", { kind: "tools" });
  others.append(list);
  const note = make("span", { kind: "dim", role: "status" });
  xs.addEventListener("change", () => { state.x = xs.value; redraw(); });
  log.addEventListener("change", () => { state.log = log.checked; redraw(); });
  soft.addEventListener("input", () => { state.smoothing = Number(soft.value); redraw(); });
  others.addEventListener("toggle", async () => {
    if (!others.open || list.childElementCount) return;
    const found = await ask("runs");
    for (const run of found.runs.filter((run) => run.key !== key).slice(0, 100)) {
      const box = make("input", { type: "checkbox" });
      box.addEventListener("change", async () => {
        if (!box.checked) state.others.delete(run.key);
        else if (state.others.size >= COMPARED - 1) { box.checked = false; note.textContent = `at most ${COMPARED} runs`; return; }
        else { const other = { name: run.name, curves: new Map(), cursor: "", tokens: (await ask("runs/" + run.key)).tokens_per_step }; state.others.set(run.key, other); while (await updateCurves(run.key, other)); }
        redraw();
      });
      list.append(make("label", {}, box, run.name));
    }
    if (!list.childElementCount) list.append("There is no other run.");
  });
  const element = make("div", {}, make("div", { kind: "tools" }, make("label", {}, "x axis", xs), make("label", {}, log, "log scale"),
    make("label", {}, "smoothing", soft), note), others);
  return {
    element,
    async update(round) {
      const byTokens = xs.lastElementChild; // offered only where tokens are known
      byTokens.hidden = byTokens.disabled = !state.tokens;
      if (!state.tokens && state.x === "tokens") { state.x = xs.value = "step"; redraw(); }
      const text = state.share < 1 ? `samples; ${Math.round(state.share * 100)} % of the file is read` : "";
      if (!note.textContent.startsWith("at most") && note.textContent !== text) note.textContent = text;
      if (round % 5 === 4) for (const [other, kept] of state.others) await updateCurves(other, kept);
    },
  };
}

function drawCharts(holder, state, key) {
  const groups = new Map();
  for (const name of state.curves.keys()) {
    const title = /loss/i.test(name) ? "loss" : name;
    groups.set(title, (groups.get(title) || []).concat(name));
  }
  const wanted = [...groups].slice(0, 12).map(([title, names]) => ({ title, unit: "", lines: lines(state, names.slice(0, 6)), x: state.x, breaks: breaks(state) }));
  const memory = state.machine.filter((series) => series.unit === "bytes"), rest = state.machine.filter((series) => series.unit !== "bytes");
  for (const [title, found] of [["memory", memory], ["time of a step", rest]]) {
    if (!found.length) continue;
    const begin = state.attempts.length ? state.attempts[0].started_at_s : found[0].times[0];
    wanted.push({
      title, unit: found[0].unit, x: "time", zero: true,
      lines: found.map((series, tone) => ({ name: series.name, tone, xs: series.times.map((at) => at - begin), last: series.last })),
      breaks: state.attempts.slice(1).map((attempt) => attempt.started_at_s - begin),
    });
  }
  if (!wanted.length) { show(holder, say("No numbers yet. A loss that the command prints, or logs through `run.log`, appears here.", "dim")); return; }
  delete holder.dataset.shown;
  while (holder.childElementCount > wanted.length) holder.lastElementChild.remove();
  wanted.forEach((chart, at) => {
    let figure = holder.children[at];
    if (!figure || figure.tagName !== "FIGURE") { figure = newFigure(); if (holder.children[at]) holder.children[at].replaceWith(figure); else holder.append(figure); }
    fillFigure(figure, chart, state);
  });
}

function lines(state, names) {
  const runs = [{ name: "", curves: state.curves }, ...state.others.values()], found = [];
  runs.forEach((run, at) => names.forEach((name, inside) => {
    const curve = run.curves.get(name);
    if (!curve) return;
    const begin = curve.times.find((value) => value !== null) || 0;
    const hasSteps = curve.steps.some((value) => value !== null);
    const perStep = state.x !== "tokens" ? 1 : at ? run.tokens : state.tokens;
    if (!perStep) return; // how many tokens a step of that run has is not known
    const xs = state.x === "time" ? curve.times.map((value) => (value === null ? null : value - begin)) : hasSteps ? curve.steps.map((value) => (value === null ? null : value * perStep)) : curve.steps.map((_, number) => number);
    const label = state.others.size ? `${run.name || state.name} ${name}` : name + (curve.is_guessed ? " (guessed from its output)" : "");
    found.push({ name: label, tone: state.others.size ? at : inside, isDashed: state.others.size > 0 && inside > 0, xs, last: curve.last, low: curve.low, high: curve.high });
  }));
  return found;
}

function breaks(state) {
  const begin = state.attempts.length ? state.attempts[0].started_at_s : 0;
  return state.attempts.slice(1).map((attempt) => (state.x === "time" ? attempt.started_at_s - begin : attempt.first_step === null ? null : attempt.first_step * (state.x === "tokens" ? state.tokens : 1))).filter((value) => value !== null);
}

// Where the reader looks in a chart: the mouse, a finger, or the arrow keys.
function newFigure() {
  const table = make("details", { kind: "small" }, make("summary", { text: "as numbers" }), make("div", { kind: "scroll" }));
  const holder = make("div", { kind: "drawn", role: "img", tabindex: "0" }), read = make("div", { kind: "read" });
  const figure = make("figure", {}, make("figcaption"), holder, read, table);
  let share = 1;
  const look = (at) => { share = Math.min(1, Math.max(0, at)); figure.dataset.held = "yes"; figure.drawn?.move(share); };
  const away = () => { figure.dataset.held = ""; figure.drawn?.hide(); };
  const follow = (event) => {
    const drawn = figure.drawn, box = (holder.querySelector(".u-over") || holder).getBoundingClientRect();
    if (!drawn || (drawn.hasPointer && event.pointerType === "mouse")) return;
    const at = (event.clientX - box.left) / box.width;
    look(drawn.shareAt ? drawn.shareAt(at) : at);
  };
  holder.addEventListener("pointermove", follow);
  holder.addEventListener("pointerdown", follow);
  holder.addEventListener("pointerleave", away);
  holder.addEventListener("focus", () => read.setAttribute("aria-live", "polite"));
  holder.addEventListener("blur", () => { read.removeAttribute("aria-live"); away(); });
  holder.addEventListener("keydown", (event) => {
    const to = { ArrowLeft: share - 0.02, ArrowRight: share + 0.02, Home: 0, End: 1 }[event.key];
    if (event.key === "Escape") { figure.drawn?.whole(); away(); } else if (to === undefined) return; else look(to);
    event.preventDefault();
  });
  return figure;
}

function fillFigure(figure, chart, state) {
  const [caption, holder, read, details] = figure.children;
  const keys = chart.lines.length > 1 || chart.lines[0]?.name !== chart.title ? chart.lines.map((line) => {
    const square = shape("svg", { viewBox: "0 0 10 10", "aria-hidden": "true" });
    square.append(shape("path", { class: "c" + (line.tone % 10), d: "M0 5H10", "stroke-width": 3 }));
    return make("span", { kind: "key" }, square, line.name);
  }) : [];
  show(caption, chart.title, ...keys);
  const hasPlots = isThere();
  if (figure.dataset.held === "yes" && !hasPlots) return; // the reader looks at values: the next update redraws it
  const tell = (text) => { if (read.textContent !== text) read.textContent = text; };
  figure.drawn = (hasPlots ? plot : draw)(holder, chart.lines, { ...chart, log: state.log, smoothing: chart.unit ? 0 : state.smoothing }, tell);
  if (details.open) details.lastElementChild.replaceChildren(numbers(chart));
  details.ontoggle = () => { if (details.open) details.lastElementChild.replaceChildren(numbers(chart)); };
}

// A chart for those who cannot see it: about twelve rows, the last point among them.
function numbers(chart) {
  const format = UNITS[chart.unit] || number, first = chart.lines[0], rows = [];
  const every = Math.max(1, Math.floor(first.xs.length / 12)), x = chart.x === "time" ? duration : number;
  for (let at = 0; at < first.xs.length; at += every) rows.push(at);
  if (rows[rows.length - 1] !== first.xs.length - 1) rows.push(first.xs.length - 1);
  const body = rows.map((at) => make("tr", {}, make("td", { kind: "num", text: first.xs[at] === null ? "" : x(first.xs[at]) }), ...chart.lines.map((line) => {
    let near = -1;
    for (let other = 0; other < line.xs.length && line.xs[other] <= first.xs[at]; other += 1) near = other;
    return make("td", { kind: "num", text: near < 0 ? "" : format(line.last[near]) });
  })));
  return make("table", {}, make("caption", { kind: "dim", text: chart.title }), make("tr", {}, ...[chart.x, ...chart.lines.map((line) => line.name)].map((text) => make("th", { scope: "col", kind: "num", text }))), ...body);
}

// -- what happened, stacks, log, config, checkpoints -----------------------------------------------------------------------

function timelinePart(key, holder) {
  const mark = "jackline-seen-" + key, seen = Number(stores.read(local, mark)) || 0;
  const only = make("input", { type: "checkbox" });
  let events = [], cursor = "", newest = 0;
  only.addEventListener("change", fill);

  function fill() {
    const shown = events.filter((event) => !only.checked || event.is_warning).slice(-300).reverse();
    const list = make("ol", { kind: "told" });
    const fresh = shown.filter((event) => event.at_s > seen).length;
    shown.forEach((event, at) => {
      if (seen && at === fresh && fresh > 0) list.append(make("li", { kind: "since", text: `since you last looked (${clock(seen)}): ${fresh} new above` }));
      const more = event.more.length ? make("details", { kind: "small" }, make("summary", { text: "more" }), ...event.more.map((line) => say(line))) : "";
      list.append(make("li", {}, make("time", { datetime: new Date(event.at_s * 1000).toISOString(), text: clock(event.at_s) }), make("span", { kind: event.is_warning ? "warn" : "" }, event.text, more)));
    });
    show(holder, shown.length ? list : say("Nothing was recorded.", "dim"));
  }

  const leave = () => { if (newest) stores.write(local, mark, String(newest)); };
  return {
    tools: make("div", { kind: "tools" }, make("label", {}, only, "only warnings")),
    leave,
    async update() {
      const found = await ask(`runs/${key}/events?since=${cursor}`);
      cursor = found.cursor;
      if (found.is_new) events = [];
      if (!found.events.length && !found.is_new) return;
      events = events.concat(found.events);
      newest = events.reduce((most, event) => Math.max(most, event.at_s), newest);
      fill();
    },
  };
}

function stacksPart(key) {
  const tree = make("div", { kind: "tree" }), older = make("div");
  const button = make("button", { type: "button", text: "Look now" });
  let raw = "";
  button.addEventListener("click", async () => {
    button.disabled = true; button.textContent = "Looking ...";
    try {
      const found = await ask(`runs/${key}/stacks`);
      raw = found.lines.join("\n");
      tree.replaceChildren(...(found.lines.length ? stackTree(found.lines) : [say("No process of it is running on this machine.")]));
      older.replaceChildren(...found.incidents.map((one) => make("details", { kind: "small" }, make("summary", { text: one.name }), make("pre", { text: one.lines.join("\n") }))));
    } catch { tree.replaceChildren(say("The server did not answer.")); }
    button.disabled = false; button.textContent = "Look again";
  });
  const element = make("section", {}, make("h2", { text: "Stacks: where every thread is" }),
    make("div", { kind: "tools" }, button, copyButton(() => raw), make("span", { kind: "dim", text: "Reads the processes without stopping them. Lines of your own code are bold." })), tree, older);
  return { element };
}

// Processes hold threads, threads hold frames, as the indentation of the lines says. What waits in a library is closed.
function stackTree(lines) {
  const found = [];
  let process = null, thread = null;
  const isMine = (line) => /^\s+>/.test(line);
  for (const line of lines) {
    if (/^\S/.test(line)) {
      process = make("details", { open: "" }, make("summary", { text: line }));
      thread = null;
      found.push(process);
    } else if (process && /^ {2}(main thread|thread) /.test(line)) {
      thread = make("pre", { tabindex: "0", "aria-label": "Frames of " + line.trim() });
      const isMain = /^ {2}main/.test(line);
      process.append(make("details", isMain ? { open: "" } : {}, make("summary", { text: line.trim() }), thread));
    } else if (thread) {
      thread.append(make("span", { kind: isMine(line) ? "mine" : "", text: line.trim().replace(/^> /, "") + "\n" }));
      if (isMine(line)) thread.parentElement.open = true;
    } else (process || found[found.push(make("div")) - 1]).append(say(line.trim()));
  }
  return found;
}

function logPart(key) {
  const text = make("pre", { tabindex: "0", "aria-label": "Last lines of the log" });
  const word = make("input", { type: "search", placeholder: "Search the log", "aria-label": "Search the log" }), note = make("span", { kind: "dim", role: "status" });
  let cursor = null, late = 0;

  const line = (content) => make("span", { kind: /^\S+ \[jackline\]/.test(content) ? "own" : "", text: content + "\n" });
  async function search() {
    const wanted = word.value.trim();
    if (!wanted) { cursor = null; note.textContent = ""; await update(); return; }
    try {
      const found = await ask(`runs/${key}/log?find=${encodeURIComponent(wanted)}`);
      text.replaceChildren(...found.lines.map(line));
      note.textContent = `${found.num_found} lines${found.num_found > found.lines.length ? `, the last ${found.lines.length} shown` : ""}${found.is_cut ? ", in the last part of the log" : ""}`;
    } catch { note.textContent = "The search failed."; }
  }
  word.addEventListener("input", () => { clearTimeout(late); late = setTimeout(search, 300); });

  async function update() {
    if (word.value.trim()) return;
    const found = await ask(`runs/${key}/log` + (cursor === null ? "" : "?since=" + cursor));
    cursor = found.cursor;
    const isAtEnd = text.scrollTop + text.clientHeight >= text.scrollHeight - 40;
    if (found.is_new) text.replaceChildren(...(found.is_cut ? [line("... (older lines: jackline logs)")] : []), ...found.lines.map(line));
    else text.append(...found.lines.map(line));
    while (text.childElementCount > LOG_LINES) text.firstElementChild.remove();
    if (isAtEnd && found.lines.length) text.scrollTop = text.scrollHeight;
  }
  return { element: make("section", {}, make("h2", { text: "Log" }), make("div", { kind: "tools" }, word, note), text), update };
}

function laterPart(title, fill) {
  const holder = make("div"), details = make("details", {}, make("summary", { text: title }), holder);
  details.addEventListener("toggle", async () => {
    if (!details.open) return;
    try { holder.replaceChildren(await fill()); } catch { holder.textContent = "The server did not answer."; }
  });
  return make("section", {}, details);
}

async function showConfig(key) {
  const [found, { runs }] = [await ask(`runs/${key}/config`), await ask("runs")];
  const others = runs.filter((run) => run.key !== key).slice(0, 200);
  const which = make("select", { "aria-label": "Compare with another run" }, make("option", { value: "", text: "no other run" }), ...others.map((run) => make("option", { value: run.key, text: run.name })));
  const result = make("div", { role: "status" });
  which.addEventListener("change", async () => {
    try { result.replaceChildren(...(which.value ? await showDiff(key, which.value) : [])); } catch { result.textContent = "The server did not answer."; }
  });
  const config = found.lines.length ? make("pre", { tabindex: "0", "aria-label": "Config", text: found.lines.join("\n") }) : say("This run has no config.yaml: it is not a recipe's. Its command is below.", "dim");
  return make("div", {}, make("div", { kind: "tools" }, make("label", {}, "what differs from", which)), result, config);
}

async function showDiff(key, other) {
  const found = await ask(`runs/${key}/diff?with=${other}`);
  if (!found.rows.length) return [say(`Nothing that was recorded differs from ${found.with}: command, settings, code, data, packages, machine.`)];
  const body = found.rows.map(([section, name, one, two]) => make("tr", {}, make("td", { kind: "dim", text: section }), make("td", { text: name }), make("td", { text: one || "-" }), make("td", { text: two || "-" })));
  const head = ["", "What", "This run", found.with].map((text) => make(text ? "th" : "td", { scope: text ? "col" : undefined, text }));
  const more = found.num_rows > found.rows.length ? [say(`${found.num_rows - found.rows.length} more: jackline diff`, "dim")] : [];
  return [make("div", { kind: "scroll" }, make("table", {}, make("caption", { kind: "dim", text: "What differs" }), make("tr", {}, ...head), ...body)), ...more];
}

async function showCheckpoints(key) {
  const { checkpoints } = await ask(`runs/${key}/checkpoints`);
  if (!checkpoints.length) return say("Jackline has no checkpoint of this run. A script's own checkpoints: jackline status.", "dim");
  const head = ["Step", "Saved", "Size", "Verified", "Mirror", "", "Resume from it"];
  const rows = checkpoints.map((one) => make("tr", {},
    make("td", { kind: "num", text: number(one.step) }), make("td", { text: one.saved_at_s === null ? "?" : clock(one.saved_at_s) }), make("td", { text: one.size }),
    make("td", { kind: one.problem ? "bad" : "" }, one.problem || (one.verified_at_s === null ? "not read back yet" : clock(one.verified_at_s))),
    make("td", { text: one.mirror }), make("td", { text: one.marks.join(", ") }), make("td", {}, make("code", { text: one.resume }))));
  return make("div", { kind: "scroll" }, make("table", {}, make("tr", {}, ...head.map((text) => make("th", { scope: "col", text }))), ...rows));
}

// -- where we are ------------------------------------------------------------------------------------------------------

function readToken() {
  const given = /^#token=([A-Za-z0-9_-]{20,100})(.*)$/.exec(location.hash);
  if (given) {
    token = given[1];
    stores.write(session, "jackline-token", token);
    history.replaceState(null, "", location.pathname + location.search + (given[2].startsWith("/") ? "#" + given[2] : "#/")); // not in the history
  } else token = token || stores.read(session, "jackline-token") || "";
}

function go() {
  readToken();
  clearTimeout(timer);
  if (page) page.leave();
  const run = /^#\/run\/([0-9a-f]{12})$/.exec(location.hash);
  main.replaceChildren(say("Loading ...", "dim"));
  delete main.dataset.shown;
  page = run ? runPage(run[1]) : runsPage();
  window.scrollTo(0, 0);
  poll();
}

window.addEventListener("hashchange", go);
window.addEventListener("pagehide", () => page.leave());
document.addEventListener("visibilitychange", () => {
  if (document.hidden) page.leave(); else { clearTimeout(timer); poll(); }
});
document.querySelector(".skip").addEventListener("click", (event) => { event.preventDefault(); main.focus(); });
setInterval(tellTime, 1000);
go();
