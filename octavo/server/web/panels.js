// The panels beside the map: numbers, sequences with their block tables, the prefix tree, one block.

import { LOWER_TIER, NOT_PUBLISHED } from "./state.js";

const $ = (id) => document.getElementById(id);
const number = new Intl.NumberFormat("en-US");
const MAX_ROWS = 200;
const MAX_CHIPS = 600;
const MAX_CHILDREN = 100;
const STATES = { r: "running", w: "waiting", s: "swapped out" };

export function bytes(n) {
  const units = ["bytes", "KiB", "MiB", "GiB", "TiB"];
  let at = 0;
  while (n >= 1024 && at < units.length - 1) {
    n /= 1024;
    at++;
  }
  return `${n >= 100 || at === 0 ? Math.round(n) : n.toFixed(1)} ${units[at]}`;
}

function make(tag, className, text) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  if (text !== undefined) element.textContent = text;
  return element;
}

function set(id, text) {
  const element = $(id);
  if (element.textContent !== text) element.textContent = text;
}

const WHY = {
  memory: ["for memory", "--kv-memory"],
  growth: ["for memory", "--kv-memory"],
  headroom: ["for memory", "--kv-memory"],
  places: ["for a place", "--max-num-seqs"],
  budget: ["for its turn", "--max-batched-tokens"],
  prefix: ["for a prompt like its own"],
};

/** What the scheduler says that the first in the queue waits for, and the option that changes it. */
function showWhy(state) {
  const [why, option] = state.counts.waiting ? (WHY[state.why] ?? ["about to start"]) : ["nobody waits"];
  const note = $("waiting-note");
  if (note.dataset.shown === why + option) return;
  note.dataset.shown = why + option;
  note.replaceChildren(why, ...(option ? [": ", make("span", "option", option)] : []));
}

/** Numbers above the map, and in its legend. */
export function showNumbers(state, rate) {
  const c = state.counts;
  const total = state.numBlocks;
  const percent = (n) => `${((100 * n) / total).toFixed(n && n < total / 100 ? 2 : 0)} %`;
  set("use", percent(c.held));
  set("use-note", `${bytes(c.held * state.bytesPerBlock)} of ${bytes(total * state.bytesPerBlock)}`);
  const parts = { held: c.held - state.shared, shared: state.shared, cached: c.cached, free: c.free };
  for (const [kind, n] of Object.entries(parts)) {
    $("bar").querySelector(`.${kind}`).style.width = `${(100 * n) / total}%`;
    set(`n-${kind}`, number.format(n));
  }
  $("bar").setAttribute("aria-label", Object.entries(parts).map(([k, n]) => `${k} ${n}`).join(", "));
  set("running", number.format(c.running));
  set("running-note", `at most ${number.format(state.maxNumSeqs)}`);
  set("waiting", number.format(c.waiting));
  showWhy(state);
  if (!c.running) rate = 0; // no frames come while nothing happens
  set("rate", rate >= 100 ? number.format(Math.round(rate)) : rate.toFixed(rate ? 1 : 0));
  set("hits", c.queried ? `${Math.round((100 * c.hits) / c.queried)} %` : "–");
  set("preemptions", number.format(c.preemptions));
  set("recomputed", `${number.format(c.recomputed)} tokens redone`);
  set("shape", `${number.format(total)} × ${state.blockSize} tokens · ${bytes(state.bytesPerBlock)} each`);
}

/** The list of sequences; keeps rows, open tables and focus between updates. */
export class Sequences {
  constructor(panel, onSelect, onBlock) {
    this.panel = panel;
    this.onSelect = onSelect;
    this.onBlock = onBlock;
    this.rows = new Map();
    this.open = new Set();
    this.selected = null;
    this.empty = make("p", "empty faint", "No sequence runs or waits. Send a request and watch its blocks.");
    this.more = make("p", "faint more");
  }

  update(state) {
    const order = [...state.seqs.values()].slice(0, MAX_ROWS);
    for (const [id, row] of this.rows) {
      if (state.seqs.has(id)) continue;
      row.element.remove();
      this.rows.delete(id);
    }
    let at = this.panel.firstElementChild;
    for (const seq of order) {
      let row = this.rows.get(seq.id);
      if (!row) this.rows.set(seq.id, (row = this.build(seq.id)));
      if (at !== row.element) this.panel.insertBefore(row.element, at);
      else at = at.nextElementSibling;
      this.fill(row, seq, state);
    }
    this.empty.remove();
    if (!order.length) this.panel.append(this.empty);
    const hidden = state.counts.running + state.counts.waiting - order.length;
    this.more.textContent = `and ${number.format(hidden)} more that wait`;
    if (hidden > 0) this.panel.append(this.more);
    else this.more.remove();
    set("n-requests", number.format(state.counts.running + state.counts.waiting));
  }

  build(id) {
    const element = make("div", "seq");
    const button = make("button", "seq-head");
    button.type = "button";
    button.dataset.seq = id;
    button.setAttribute("aria-expanded", "false");
    const name = make("span", "seq-name", `#${id.replace(/\.0$/, "").replace(".", " · ")}`);
    const chip = make("span", "chip");
    const what = make("span", "seq-what faint");
    const bar = make("span", "progress");
    for (const part of ["cached", "prompt", "made"]) bar.append(make("i", part));
    button.append(name, chip, what, bar);
    const table = make("div", "table");
    table.hidden = true;
    element.append(button, table);
    button.addEventListener("click", () => this.toggle(id));
    return { element, button, chip, what, bar, table };
  }

  toggle(id) {
    const opening = !this.open.has(id);
    this.open.clear();
    if (opening) this.open.add(id);
    this.selected = opening ? id : null;
    this.onSelect(this.selected);
  }

  fill(row, seq, state) {
    const whole = seq.prompt + seq.max;
    const [cached, prompt, made] = row.bar.children;
    const computed = Math.min(seq.committed, seq.prompt);
    const found = Math.min(seq.cached, computed);
    cached.style.width = `${(100 * found) / whole}%`;
    prompt.style.width = `${(100 * (computed - found)) / whole}%`;
    made.style.width = `${(100 * (seq.tokens - seq.prompt)) / whole}%`;
    row.chip.textContent = STATES[seq.state];
    row.chip.className = `chip ${STATES[seq.state].split(" ")[0]}`;
    const parts = [`${number.format(seq.tokens - seq.prompt)}/${number.format(seq.max)} tokens`, `prompt ${number.format(seq.prompt)}`];
    if (seq.cached) parts.push(`${number.format(seq.cached)} cached`);
    parts.push(`${number.format(seq.table.length)} blocks`);
    if (seq.preemptions) parts.push(`preempted ${seq.preemptions}×`);
    row.what.textContent = parts.join(" · ");
    const open = this.open.has(seq.id);
    row.button.setAttribute("aria-expanded", String(open));
    row.element.classList.toggle("open", open);
    row.table.hidden = !open;
    if (open) this.fillTable(row.table, seq, state);
  }

  fillTable(table, seq, state) {
    const ids = seq.table.slice(0, MAX_CHIPS);
    const wanted = ids.map((id) => `${id}:${state.kind(id)}:${state.refs[id]}:${state.fill[id]}`).join(" ");
    if (table.dataset.shown === wanted) return;
    table.dataset.shown = wanted;
    const chips = ids.map((id, index) => {
      const chip = make("button", `block ${state.kind(id)}`, String(id));
      chip.type = "button";
      chip.title = `logical ${index} → physical ${id}, ${state.fill[id]} of ${state.blockSize} tokens` + (state.refs[id] > 1 ? `, shared by ${state.refs[id]}` : "");
      chip.addEventListener("click", () => this.onBlock(id));
      return chip;
    });
    if (seq.table.length > MAX_CHIPS) chips.push(make("span", "faint", `and ${seq.table.length - MAX_CHIPS} more`));
    if (!chips.length) chips.push(make("span", "faint", "no blocks while it waits"));
    table.replaceChildren(...chips);
  }
}

/** The prefix tree: chains of blocks without a fork are one line, opened where they fork. */
export class Tree {
  constructor(panel, onBlock) {
    this.panel = panel;
    this.onBlock = onBlock;
    this.open = new Set();
  }

  update(state) {
    const children = new Map();
    let published = 0;
    for (let id = 0; id < state.numBlocks; id++) {
      const parent = state.parent[id];
      if (parent === NOT_PUBLISHED) continue;
      published++;
      if (!children.has(parent)) children.set(parent, []);
      children.get(parent).push(id);
    }
    set("n-tree", number.format(published));
    if (this.panel.hidden) return;
    this.state = state;
    this.children = children;
    const focus = document.activeElement?.dataset?.node;
    const roots = [...children.keys()].filter((parent) => parent < 0);
    const tops = roots.flatMap((root) => children.get(root).map((id) => [id, root === LOWER_TIER]));
    if (!tops.length) {
      this.panel.replaceChildren(make("p", "empty faint", "Nothing is cached yet. What requests compute becomes reusable here."));
      return;
    }
    const items = this.sorted(tops.map(([id]) => id)).map((id) => this.node(id));
    this.panel.replaceChildren(...items);
    if (tops.length > MAX_CHILDREN) this.panel.append(make("p", "faint more", `and ${number.format(tops.length - MAX_CHILDREN)} more beginnings`));
    if (focus !== undefined) this.panel.querySelector(`[data-node="${focus}"]`)?.focus();
  }

  sorted(ids) {
    const weight = (id) => this.state.refs[id] * 1e6 + (this.children.get(id)?.length ?? 0);
    return ids.length > 5000 ? ids.slice(0, MAX_CHILDREN) : ids.sort((a, b) => weight(b) - weight(a) || a - b).slice(0, MAX_CHILDREN);
  }

  node(start) {
    const { state, children } = this;
    const chain = [start];
    let next = children.get(start) ?? [];
    while (next.length === 1) {
      chain.push(next[0]);
      next = children.get(next[0]) ?? [];
    }
    const tokens = chain.reduce((sum, id) => sum + state.fill[id], 0);
    const held = chain.filter((id) => state.refs[id] > 0).length;
    const shown = chain.length > 1 ? `${chain[0]} … ${chain[chain.length - 1]}` : String(chain[0]);
    const text = `${number.format(tokens)} tokens in ${number.format(chain.length)} ${chain.length > 1 ? "blocks" : "block"}`;
    const head = make(next.length ? "summary" : "div", "node");
    head.dataset.node = String(start);
    head.tabIndex = 0;
    const most = chain.reduce((top, id) => Math.max(top, state.refs[id]), 0);
    const dot = make("b", `swatch ${most > 1 ? "shared" : held ? "held" : "cached"}`, most > 1 ? String(most) : "");
    head.append(dot, make("span", "node-ids", shown), make("span", "faint", text));
    if (next.length) head.append(make("span", "count", `${next.length} ways on`));
    head.addEventListener("click", () => this.onBlock(start, chain));
    if (!next.length) return head;
    const details = make("details");
    details.append(head);
    details.open = this.open.has(start);
    const fill = () => {
      const items = this.sorted([...next]).map((id) => this.node(id));
      if (next.length > MAX_CHILDREN) items.push(make("p", "faint more", `and ${next.length - MAX_CHILDREN} more`));
      details.replaceChildren(head, ...items);
    };
    if (details.open) fill();
    details.addEventListener("toggle", () => {
      if (details.open) this.open.add(start);
      else this.open.delete(start);
      if (details.open && details.childElementCount === 1) fill();
    });
    return details;
  }
}

/** One block: who holds it, how full, its way from the root; `contents` is what the server told of it. */
export function showBlock(panel, state, id, contents) {
  if (id < 0) {
    panel.replaceChildren(make("p", "faint", "Point at a block, or move to it with the arrow keys, to see who holds it."));
    return;
  }
  const kind = state.kind(id);
  const title = make("p", "block-title");
  const badge = make("b", `swatch ${kind}`, kind === "shared" ? String(state.refs[id]) : "");
  const words = { free: "free", cached: "cached: held by nobody, reusable, first to go", held: "held by one", shared: `shared by ${state.refs[id]}` };
  title.append(badge, make("strong", "", `Block ${id}`), make("span", "faint", `${words[kind]} · ${state.fill[id]} of ${state.blockSize} tokens`));
  const lines = [title];
  const holders = state.holders(id);
  if (holders.length) {
    const text = holders.slice(0, 12).map(({ seq, index }) => `#${seq.id.replace(/\.0$/, "")} as its block ${index}`);
    if (holders.length > 12) text.push(`${holders.length - 12} more`);
    lines.push(line("in the table of", text.join(", ")));
  }
  const path = state.path(id);
  if (path.length) {
    const shown = path.length > 9 ? [...path.slice(0, 3), "…", ...path.slice(-5)] : path;
    lines.push(line("in the tree", `${path.length === 1 ? "first block" : `depth ${path.length}`}: ${shown.join(" › ")}`));
  } else if (kind !== "free") lines.push(line("in the tree", "not yet: only its sequence knows it"));
  if (contents?.text !== undefined && contents.block === id && contents.tokens.length) lines.push(line("says", JSON.stringify(contents.text)));
  panel.replaceChildren(...lines);
}

function line(label, text) {
  const p = make("p", "block-line");
  p.append(make("span", "label", label), make("span", "", text));
  return p;
}
