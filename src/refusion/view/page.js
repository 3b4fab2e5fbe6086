"use strict";
// Plays the steps of a trace. The data (see html.py) come as what changes from step to step.

const KINDS = ["open", "draft", "accepted", "rejected", "written"];
const SPEEDS = [0.25, 0.5, 1, 2, 4, 8];
const LABELLED = 24; // rounds that get a number in the legend, and a place in the order of the tab key
const OPEN = [0, 0, "", null, null, null, null];

const data = JSON.parse(document.getElementById("trace").textContent);
const byId = (id) => document.getElementById(id);
const response = byId("response");
const frames = data.frames, lastStep = frames.length - 1;

let step = -1; // the step that is shown
let cells = []; // its cells by position: [position, kind, text, token, round, drafted, verified]
let painted = []; // the cells that the page shows
let tokens = [], slots = [], strip = []; // elements by position, and by slot
let picked = null; // position that is looked at
let timer = null;

// --- what is where

const slotOf = (position) => (data.slotSize ? Math.floor(position / data.slotSize) : 0);
// From blue over green to red: neighbours differ, and the order can be seen.
const hue = (round) => 265 - 245 * (data.rounds > 1 ? round / (data.rounds - 1) : 0);

function seek(target) {
  if (target < step) {
    step = -1;
    cells = [];
  }
  while (step < target) {
    const frame = frames[++step];
    for (const change of frame.changes) cells[change[0]] = change;
    cells.length = frame.length;
    for (let i = 0; i < frame.length; i++) cells[i] ??= OPEN;
  }
}

function slotRound(slot) {
  const start = slot * data.slotSize;
  const cell = cells.slice(start, start + data.slotSize).find((c) => c[1] === 4);
  return cell ? cell[4] : null;
}

// --- drawing

function element(name, classes, parent) {
  const made = document.createElement(name);
  made.className = classes;
  parent.append(made);
  return made;
}

function grow(length) {
  while (tokens.length < length) {
    const position = tokens.length, slot = slotOf(position);
    slots[slot] ??= element("span", "slot", response);
    tokens.push(element("span", "token open", slots[slot]));
    tokens[position].dataset.position = position;
  }
}

function write(span, text) {
  const lines = text.split("\n");
  span.replaceChildren(lines[0]);
  for (const line of lines.slice(1)) {
    element("i", "break", span).setAttribute("aria-hidden", "true");
    span.append("\n" + line);
  }
}

function paint(position) {
  const cell = cells[position] ?? null, span = tokens[position];
  span.hidden = cell === null;
  span.classList.remove("new");
  if (cell === null || painted[position] === cell) return;
  const [, kind, text, token, round] = cell;
  span.className = "token " + KINDS[kind];
  if (data.eos.includes(token)) span.classList.add("end");
  if (position === picked) span.classList.add("picked");
  if (round !== null) span.style.setProperty("--h", hue(round));
  write(span, kind === 0 ? "·" : text);
  span.title = kind === 0 ? "" : describe(position);
  painted[position] = cell;
}

const percent = (p) => (p >= 0.9995 && p < 1 ? "over 99.9 %" : (100 * p).toFixed(1) + " %");

function describe(position) {
  const cell = cells[position];
  if (!cell || cell[1] === 0) return `position ${position}: open`;
  const [, kind, text, token, round, drafted, verified] = cell;
  const shown = text === "" ? "rest of the character before it" : JSON.stringify(text);
  const parts = [`${shown}, token ${token}`, `position ${position}`];
  if (data.slotSize) parts.push(`slot ${slotOf(position)}`);
  if (drafted !== null) parts.push(`drafted with ${percent(drafted)}`);
  if (verified !== null) parts.push(`${kind === 3 ? "refused" : "verified"} with ${percent(verified)}`);
  if (kind === 4) parts.push(`written in round ${round}`);
  return parts.join(" · ");
}

function paintSlots(frame) {
  slots.forEach((slot, i) => {
    slot.hidden = data.slotSize ? i * data.slotSize >= cells.length : false;
    slot.classList.toggle("chosen", frame.chosen.includes(i));
    const round = data.slotSize ? slotRound(i) : null;
    if (round === null) delete slot.dataset.round;
    else slot.dataset.round = round;
    if (round !== null) slot.style.setProperty("--h", hue(round));
  });
  if (!data.slotSize) return;
  const count = Math.ceil(cells.length / data.slotSize);
  while (strip.length < count) strip.push(element("span", "", byId("slots")));
  const words = [];
  strip.forEach((box, i) => {
    box.hidden = i >= count;
    if (box.hidden) return;
    const round = slotRound(i), chosen = frame.chosen.includes(i);
    box.className = round !== null ? "written" : chosen ? "chosen" : "";
    box.textContent = round ?? (chosen ? "?" : "·");
    if (round !== null) box.style.setProperty("--h", hue(round));
    words.push(`slot ${i}: ${round !== null ? "round " + round : chosen ? "being written" : "open"}`);
  });
  byId("slots").setAttribute("aria-label", words.join(", ") || "no slots yet");
}

function show(target) {
  target = Math.max(0, Math.min(lastStep, target));
  seek(target);
  const frame = frames[target];
  grow(cells.length);
  for (let i = 0; i < tokens.length; i++) paint(i);
  for (const change of frame.changes) if (change[1] === 4) tokens[change[0]].classList.add("new");
  if (target === lastStep) for (const span of tokens) span.classList.remove("new");
  paintSlots(frame);
  byId("note").textContent = frame.note;
  byId("round").textContent = target ? frame.round : "–";
  byId("forwards").textContent = frame.forwards;
  byId("tokens").textContent = frame.tokens;
  byId("ratio").textContent = frame.forwards ? (frame.tokens / frame.forwards).toFixed(2) : "–";
  byId("scrubber").value = target;
  byId("scrubber").setAttribute("aria-valuetext", `step ${target} of ${lastStep}: ${frame.note}`);
  byId("step").textContent = `${target} / ${lastStep}`;
  legend.forEach((button) => button.classList.toggle("later", target < Number(button.dataset.step)));
  if (picked !== null) inspect(picked);
}

function inspect(position) {
  tokens[picked]?.classList.remove("picked");
  picked = position;
  tokens[picked]?.classList.add("picked");
  byId("inspected").textContent = describe(position);
}

// --- the legend: one button a round that wrote something

const legend = [];

function makeLegend() {
  const box = byId("legend"), found = new Map();
  frames.forEach((frame, i) => {
    const count = frame.changes.filter((c) => c[1] === 4 && c[4] === frame.round).length;
    if (!count) return;
    const entry = found.get(frame.round) ?? { count: 0, step: i };
    entry.count += count;
    found.set(frame.round, entry);
  });
  const many = found.size > LABELLED;
  box.classList.toggle("many", many);
  for (const [round, { count, step: at }] of found) {
    const button = element("button", "", box);
    button.type = "button";
    button.style.setProperty("--h", hue(round));
    button.style.flexGrow = count;
    button.dataset.step = at;
    if (many) button.tabIndex = -1; // the arrow keys go from round to round
    else button.textContent = round;
    button.title = `round ${round}: ${count} token${count === 1 ? "" : "s"}`;
    button.setAttribute("aria-label", button.title);
    button.addEventListener("click", () => { pause(); show(at); });
    button.addEventListener("mouseenter", () => light(round));
    button.addEventListener("mouseleave", () => light(null));
    legend.push(button);
  }
  if (!found.size) box.textContent = "nothing was written";
}

function light(round) {
  response.classList.toggle("faded", round !== null);
  tokens.forEach((span, i) => span.classList.toggle("lit", cells[i]?.[1] === 4 && cells[i][4] === round));
}

// --- playing

function pause() {
  clearTimeout(timer);
  timer = null;
  playing(false);
}

function playing(on) {
  document.body.classList.toggle("playing", on);
  byId("play").setAttribute("aria-label", on ? "Pause" : "Play");
  // Every step is spoken when it is asked for, not while a film runs.
  byId("note").setAttribute("aria-live", on ? "off" : "polite");
}

function tick() {
  if (step >= lastStep) return pause();
  show(step + 1);
  timer = setTimeout(tick, (1000 * data.stepSeconds) / Number(byId("speed").value));
}

function play() {
  if (timer !== null) return pause();
  playing(true);
  if (step >= lastStep) show(0);
  timer = setTimeout(tick, (1000 * data.stepSeconds) / Number(byId("speed").value));
}

function go(target) {
  pause();
  show(target);
}

/** The step at which the next round, or the one before, was written. */
function roundStep(direction) {
  const steps = legend.map((button) => Number(button.dataset.step));
  return direction > 0 ? steps.find((s) => s > step) ?? lastStep : steps.findLast((s) => s < step) ?? 0;
}

function pick(by) {
  if (!cells.length) return;
  const next = picked === null ? (by > 0 ? 0 : cells.length - 1) : picked + by;
  inspect(Math.max(0, Math.min(cells.length - 1, next)));
}

const KEYS = {
  " ": play, ArrowLeft: () => go(step - 1), ArrowRight: () => go(step + 1),
  ArrowUp: () => go(roundStep(-1)), ArrowDown: () => go(roundStep(1)),
  Home: () => go(0), End: () => go(lastStep), "[": () => pick(-1), "]": () => pick(1),
};

function pressed(event) {
  const at = event.target, key = event.key;
  if (event.ctrlKey || event.metaKey || event.altKey || at.tagName === "SELECT") return;
  // Space works the control that has the focus.
  if (key === " " && (["BUTTON", "SUMMARY"].includes(at.tagName) || at.type === "checkbox")) return;
  if (!Object.hasOwn(KEYS, key)) return;
  event.preventDefault();
  KEYS[key]();
}

function start() {
  response.replaceChildren();
  response.classList.add("numbered");
  const speeds = [...new Set([...SPEEDS, data.speed])].sort((a, b) => a - b);
  for (const speed of speeds) byId("speed").add(new Option(`${speed}×`, speed, false, speed === data.speed));
  byId("scrubber").max = lastStep;
  byId("scrubber").addEventListener("input", (event) => go(Number(event.target.value)));
  for (const [id, key] of [["first", "Home"], ["back", "ArrowLeft"], ["play", " "], ["forth", "ArrowRight"], ["last", "End"]]) {
    byId(id).addEventListener("click", KEYS[key]);
  }
  byId("numbers")?.addEventListener("change", (event) => response.classList.toggle("numbered", event.target.checked));
  document.addEventListener("keydown", pressed);
  response.addEventListener("mouseover", (event) => {
    const span = event.target.closest(".token");
    if (span) inspect(Number(span.dataset.position));
  });
  playing(false);
  makeLegend();
  const asked = /^#(\d+)$/.exec(location.hash);
  show(asked ? Number(asked[1]) : lastStep);
}

start();
