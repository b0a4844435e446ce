// The memory map: connects, keeps the history, and draws what the clock and the hand ask for.
//
//   /memory/info --> live:   EventSource /memory/events --> History.push --> shown at once, unless paused
//                    replay: /memory/recording, whole   --> History      --> played by its own clock

import { Cells } from "./cells.js";
import { Sequences, Tree, showBlock, showNumbers } from "./panels.js";
import { History } from "./state.js";
import { Timeline } from "./timeline.js";

const $ = (id) => document.getElementById(id);
const PANELS_MS = 200;
const TREE_MS = 1500;

const app = {
  mode: "live",
  showText: false,
  history: null,
  fresh: null, // one that began while an older one was looked at
  state: null, // what is shown: history.head while live, else a copy
  shown: 0, // its frame
  following: true,
  playing: false,
  speed: 1,
  clock: 0,
  stale: true, // panels
  drawn: 0,
};

const cells = new Cells($("cells"), $("scroller"), $("spacer"));
const timeline = new Timeline($("timeline"));
const sequences = new Sequences($("requests"), selectSequence, pin);
const tree = new Tree($("tree"), (id, chain) => {
  pin(id);
  cells.select(new Set(chain));
});

// -- time ------------------------------------------------------------------------------------------

function status(text, kind = "") {
  $("status").textContent = text;
  $("status").className = `pill ${kind}`;
}

function showStatus() {
  if (app.mode === "replay") status(app.playing ? "replaying" : "replay paused", app.playing ? "live" : "paused");
  else if (app.lost) status("connection lost, trying again", "lost");
  else status(app.following ? "live" : "paused", app.following ? "live" : "paused");
  const going = app.mode === "replay" ? app.playing : app.following;
  $("pause").textContent = going ? "Pause" : app.mode === "replay" ? "Play" : "Go on";
}

function begin(history) {
  app.history = history;
  app.fresh = null;
  app.shown = history.last;
  app.state = app.history.head;
  $("model").textContent = app.state.model;
  document.title = `${app.state.model} · Octavo`;
  cells.layout(app.state);
  timeline.layout();
  app.stale = true;
}

function receive(frame, now) {
  const before = app.history.dropped;
  const changed = app.history.push(frame);
  app.shown -= app.history.dropped - before;
  if (!app.following) {
    if (app.shown < 0) show(0);
    return;
  }
  app.shown = app.history.last;
  animate(frame, changed, now);
}

/** Show what a frame changed, with a flash for what happened to whom. */
function animate(frame, changed, now) {
  cells.touch(changed);
  const events = frame.events ?? {};
  cells.flash((events.copy ?? []).map((pair) => pair[1]), "copy", now);
  cells.flash(events.evict ?? [], "evict", now);
  cells.flash(events.in ?? [], "fresh", now);
  app.stale = true;
  if (app.selected) selectSequence(app.selected);
}

/** Show frame i of the history. */
function show(i, now = performance.now()) {
  const next = Math.max(0, Math.min(i, app.history.last));
  if (next === app.shown + 1 && !app.following) {
    app.shown = next;
    const frame = app.history.frames[next];
    animate(frame, app.state.apply(frame), now);
    return;
  }
  app.shown = next;
  app.state = app.following ? app.history.head : app.history.at(next);
  cells.touch(null);
  app.stale = true;
}

function pause() {
  app.following = app.playing = false;
  app.state = app.history.at(app.shown);
  showStatus();
}

function resume() {
  if (app.mode === "replay") {
    if (app.shown >= app.history.last) show(0);
    app.playing = true;
    app.clock = app.history.frames[app.shown].t;
  } else {
    if (app.fresh) begin(app.fresh);
    app.following = true;
    show(app.history.last);
  }
  showStatus();
}

function toggle() {
  if (!app.history) return;
  if (app.mode === "replay" ? app.playing : app.following) pause();
  else resume();
}

function step(by) {
  if (!app.history) return;
  if (app.following || app.playing) pause();
  show(app.shown + by);
}

function advance(elapsed, now) {
  app.clock += (elapsed / 1000) * app.speed;
  const { frames, last } = app.history;
  for (let n = 0; n < 500 && app.shown < last && frames[app.shown + 1].t <= app.clock; n++) show(app.shown + 1, now);
  if (app.shown >= last) {
    app.playing = false;
    showStatus();
  }
}

// -- drawing ---------------------------------------------------------------------------------------

let lastTick = 0;
let lastPanels = 0;
let lastTree = 0;

function tick(now) {
  requestAnimationFrame(tick);
  app.drawn++;
  if (!app.history) return;
  if (app.playing) advance(now - lastTick, now);
  lastTick = now;
  cells.draw(app.state, now);
  if (app.stale && now - lastPanels > PANELS_MS) {
    app.stale = false;
    lastPanels = now;
    showPanels();
  }
  if (now - lastTree > TREE_MS) {
    lastTree = now;
    if (app.treeShown !== app.state.t || app.treeTab !== $("tree").hidden) tree.update(app.state);
    app.treeShown = app.state.t;
    app.treeTab = $("tree").hidden;
  }
}

function showPanels() {
  showNumbers(app.state, app.history.rate(app.shown));
  sequences.update(app.state);
  inspect();
  timeline.draw(app.history, app.shown);
  const scrub = $("scrub");
  scrub.max = String(app.history.last);
  scrub.value = String(app.shown);
  const { frames, last } = app.history;
  const clock = new Date(frames[app.shown].t * 1000).toLocaleTimeString("en-GB");
  const behind = frames[last].t - frames[app.shown].t;
  const since = frames[app.shown].t - frames[0].t;
  $("moment").textContent = app.mode === "replay" ? `${since.toFixed(1)} s of ${(frames[last].t - frames[0].t).toFixed(1)} s` : behind > 0.05 ? `${clock} · ${behind.toFixed(1)} s ago` : clock;
  const c = app.state.counts;
  $("cells").setAttribute("aria-label", `Map of ${app.state.numBlocks} blocks: ${c.held} held, ${app.state.shared} of them shared, ${c.cached} cached, ${c.free} free`);
}

function inspect() {
  const id = cells.cursor >= 0 ? cells.cursor : cells.pinned;
  if (id >= 0 && app.showText && app.following && app.asked !== `${id}@${app.shown}`) ask(id);
  showBlock($("inspector"), app.state, id, app.contents);
}

/** Ask the server what a block says. It answers for now, so only while the map is live. */
async function ask(id) {
  const asked = (app.asked = `${id}@${app.shown}`);
  let contents = null;
  try {
    const answer = await fetch(`/memory/block/${id}`);
    if (answer.ok) contents = await answer.json();
  } catch {
    // The connection is lost, and the status says so.
  }
  if (app.asked !== asked) return; // the hand has moved on
  app.contents = contents;
  app.stale = true;
}

// -- the hand --------------------------------------------------------------------------------------

function selectSequence(id) {
  app.selected = id;
  const seq = id ? app.state.seqs.get(id) : null;
  cells.select(seq ? new Set(seq.table) : null);
  app.stale = true;
}

function pin(id) {
  cells.pinned = id;
  if (id >= 0) cells.reveal(id);
  cells.touch(null);
  app.stale = true;
}

function move(id) {
  cells.cursor = id;
  cells.touch(null);
  inspect();
}

function release() {
  pin(-1);
  move(-1);
  sequences.open.clear();
  selectSequence(null);
}

function zoom(by) {
  const now = cells.zoom || cells.fitted / cells.ratio;
  cells.zoom = by === 0 ? 0 : Math.max(1, Math.min(40, Math.round(now * (by > 0 ? 1.4 : 1 / 1.4) + by * 0.5)));
  if (app.state) cells.layout(app.state);
}

function theme(name) {
  document.documentElement.dataset.theme = name;
  localStorage.setItem("octavo-theme", name);
  $("theme").textContent = name === "dark" ? "Light" : "Dark";
  cells.readColours();
  timeline.readColours();
  app.stale = true;
}

function tab(name) {
  for (const [button, panel] of [["tab-requests", "requests"], ["tab-tree", "tree"]]) {
    const on = panel === name;
    $(button).setAttribute("aria-selected", String(on));
    $(button).tabIndex = on ? 0 : -1;
    $(panel).hidden = !on;
  }
  lastTree = 0;
}

const onMap = {
  ArrowRight: 1,
  ArrowLeft: -1,
  ArrowDown: () => cells.columns,
  ArrowUp: () => -cells.columns,
};

function mapKey(event) {
  if (!app.state) return;
  if (event.key in onMap) {
    const by = onMap[event.key];
    const from = cells.cursor >= 0 ? cells.cursor : Math.max(cells.pinned, 0) - (cells.pinned < 0 ? 1 : 0);
    const to = Math.max(0, Math.min(app.state.numBlocks - 1, from + (typeof by === "function" ? by() : by)));
    cells.reveal(to);
    move(to);
  } else if (event.key === "Home" || event.key === "End") move(event.key === "Home" ? 0 : app.state.numBlocks - 1);
  else if (event.key === "Enter" && cells.cursor >= 0) keep(cells.cursor);
  else return;
  event.preventDefault();
}

/** Keep a block, and follow the sequence that holds it alone. */
function keep(id) {
  pin(id);
  const holders = app.state.holders(id);
  sequences.open.clear();
  if (holders.length === 1) sequences.open.add(holders[0].seq.id);
  selectSequence(holders.length === 1 ? holders[0].seq.id : null);
}

function globalKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || $("help").open) return;
  const inControl = /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName);
  const keys = {
    " ": () => event.target.tagName !== "BUTTON" && event.target.tagName !== "SUMMARY" && toggle(),
    ",": () => step(-1),
    ".": () => step(1),
    l: () => !app.following && app.mode === "live" && resume(),
    t: () => theme(document.documentElement.dataset.theme === "dark" ? "light" : "dark"),
    "?": () => $("help").showModal(),
    Escape: release,
    "+": () => zoom(1),
    "-": () => zoom(-1),
    0: () => zoom(0),
  };
  const action = keys[event.key.length === 1 ? event.key.toLowerCase() : event.key];
  if (!action || inControl) return;
  if (action() !== false) event.preventDefault();
}

function listen() {
  const canvas = $("cells");
  canvas.addEventListener("pointermove", (e) => app.state && move(cells.hit(e.offsetX, e.offsetY, app.state)));
  canvas.addEventListener("pointerleave", () => app.state && move(-1));
  canvas.addEventListener("click", (e) => {
    const id = app.state ? cells.hit(e.offsetX, e.offsetY, app.state) : -1;
    if (id >= 0) keep(id);
  });
  canvas.addEventListener("keydown", mapKey);
  canvas.addEventListener("blur", () => app.state && move(-1));
  document.addEventListener("keydown", globalKey);
  $("pause").addEventListener("click", toggle);
  $("back").addEventListener("click", () => step(-1));
  $("forward").addEventListener("click", () => step(1));
  $("live").addEventListener("click", () => app.history && !app.following && resume());
  $("scrub").addEventListener("input", (e) => {
    if (!app.history) return;
    if (app.following || app.playing) pause();
    show(Number(e.target.value));
  });
  $("timeline").addEventListener("pointerdown", (e) => {
    if (!app.history) return;
    if (app.following || app.playing) pause();
    show(timeline.frameAt(e.offsetX, app.history));
  });
  $("speed").addEventListener("change", (e) => (app.speed = Number(e.target.value)));
  $("theme").addEventListener("click", () => theme(document.documentElement.dataset.theme === "dark" ? "light" : "dark"));
  $("help-open").addEventListener("click", () => $("help").showModal());
  $("larger").addEventListener("click", () => zoom(1));
  $("smaller").addEventListener("click", () => zoom(-1));
  $("fit").addEventListener("click", () => zoom(0));
  for (const name of ["requests", "tree"]) $(`tab-${name}`).addEventListener("click", () => tab(name));
  document.querySelector(".tabs").addEventListener("keydown", (e) => {
    if (e.key !== "ArrowLeft" && e.key !== "ArrowRight") return;
    const other = $("tree").hidden ? "tree" : "requests";
    tab(other);
    $(`tab-${other}`).focus();
  });
  new ResizeObserver(() => {
    if (app.state) cells.layout(app.state);
    timeline.layout();
    app.stale = true;
  }).observe(document.querySelector("main"));
}

// -- where frames come from ------------------------------------------------------------------------

function connect() {
  const source = new EventSource("/memory/events");
  source.onmessage = (message) => {
    const frame = JSON.parse(message.data);
    if (frame.kind === "snapshot") {
      app.lost = false;
      const history = new History(frame);
      if (!app.history || app.following) begin(history);
      else app.fresh = history; // paused: keep what is looked at; going on starts anew
      showStatus();
    } else if (app.fresh) app.fresh.push(frame);
    else if (app.history) receive(frame, performance.now());
  };
  source.onerror = () => {
    app.lost = true;
    if (app.history) showStatus();
    else status("waiting for the model", "lost");
    if (source.readyState === EventSource.CLOSED) setTimeout(connect, 2000);
  };
}

async function load() {
  const lines = (await (await fetch("/memory/recording")).text()).split("\n").filter(Boolean);
  const frames = lines.map((text) => JSON.parse(text));
  begin(new History(frames.find((frame) => frame.kind === "snapshot")));
  for (const frame of frames) if (frame.kind === "frame") app.history.push(frame);
  app.following = false;
  app.state = app.history.at(0);
  app.shown = 0;
  resume();
}

async function start() {
  const light = matchMedia("(prefers-color-scheme: light)").matches;
  theme(localStorage.getItem("octavo-theme") ?? (light ? "light" : "dark"));
  listen();
  requestAnimationFrame(tick);
  const info = await (await fetch("/memory/info")).json();
  app.mode = info.mode;
  app.showText = Boolean(info.show_text);
  $("live").hidden = app.mode === "replay";
  $("speed-label").hidden = app.mode !== "replay";
  if (app.mode === "replay") await load();
  else connect();
}

window.octavoMap = { app, cells, show };
start().catch((error) => status(`cannot start: ${error.message}`, "lost"));
