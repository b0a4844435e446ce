// Draws the blocks as cells on a canvas: 100,000 of them at any frame rate a screen has.
//
//   framebuffer (Uint32, device pixels) <-- paint(cell) for cells that changed or flash
//   canvas <-- putImageData, then counts as text and outlines, where cells are large enough
//
// Pixels are written directly; a fill call per cell would be ten times slower. Only cells in view are
// painted: the canvas stays as large as the window onto it, and scrolling moves its first row.

const FLASH_MS = 700;
const MAX_CELL = 26;
const TEXT_CELL = 15;
const LEVELS = 16;

function rgb(css) {
  const value = css.trim().replace("#", "");
  const n = parseInt(value, 16);
  return [(n >> 16) & 255, (n >> 8) & 255, n & 255];
}

const mix = (a, b, k) => [0, 1, 2].map((i) => Math.round(a[i] + (b[i] - a[i]) * k));
const word = ([r, g, b]) => ((255 << 24) | (b << 16) | (g << 8) | r) >>> 0;

export class Cells {
  constructor(canvas, scroller, spacer) {
    this.canvas = canvas;
    this.scroller = scroller;
    this.spacer = spacer;
    this.context = canvas.getContext("2d", { alpha: false });
    this.zoom = 0; // 0: as large as fits
    this.flashes = new Map(); // id -> [start, kind]
    this.dirty = new Set();
    this.all = true;
    this.cursor = -1;
    this.pinned = -1;
    this.selected = null; // Set of ids, or null
    this.painted = 0;
    this.calm = matchMedia("(prefers-reduced-motion: reduce)");
    this.readColours();
    scroller.addEventListener("scroll", () => (this.all = true), { passive: true });
  }

  readColours() {
    const style = getComputedStyle(document.documentElement);
    const get = (name) => rgb(style.getPropertyValue(`--${name}`));
    const back = get("well");
    this.colours = { back: word(back), ink: style.getPropertyValue("--ink"), mark: style.getPropertyValue("--mark") };
    this.on = { held: style.getPropertyValue("--on-held"), shared: style.getPropertyValue("--on-shared") };
    this.flashColours = { copy: get("copy"), evict: get("evict"), fresh: get("fresh") };
    // Per kind, in plain and dimmed: [empty part, filled part, border, and one tone per fill for tiny cells].
    this.tones = {};
    for (const kind of ["free", "cached", "held", "shared"]) {
      const full = get(kind);
      const empty = kind === "free" ? full : mix(back, full, kind === "cached" ? 0.16 : 0.3);
      const filled = kind === "cached" ? mix(back, full, 0.42) : full;
      const border = kind === "cached" ? full : null;
      this.tones[kind] = [this.tone(empty, filled, border, back, 1), this.tone(empty, filled, border, back, 0.3)];
    }
    this.all = true;
  }

  tone(empty, filled, border, back, k) {
    const at = (c) => word(mix(back, c, k));
    const levels = Array.from({ length: LEVELS + 1 }, (_, i) => at(mix(empty, filled, 0.35 + (0.65 * i) / LEVELS)));
    return { empty: at(empty), filled: at(filled), border: border ? at(border) : 0, levels };
  }

  /** Fit the canvas to its place and choose the size of a cell, in whole device pixels. */
  layout(state) {
    const ratio = window.devicePixelRatio || 1;
    const width = Math.max(1, Math.floor(this.scroller.clientWidth * ratio));
    const most = Math.max(1, Math.floor(this.scroller.clientHeight * ratio));
    const count = state ? state.numBlocks : 1;
    let size = Math.floor(MAX_CELL * ratio);
    while (size > 1 && Math.floor(width / size) * Math.floor(most / size) < count) size--;
    this.fitted = size;
    if (this.zoom) size = Math.max(1, Math.round(this.zoom * ratio));
    this.size = size;
    this.columns = Math.max(1, Math.floor(width / size));
    this.rows = Math.ceil(count / this.columns);
    this.canvas.width = Math.min(width, this.columns * size);
    this.canvas.height = Math.min(most, this.rows * size);
    this.canvas.style.width = `${this.canvas.width / ratio}px`;
    this.canvas.style.height = `${this.canvas.height / ratio}px`;
    this.spacer.style.height = `${Math.max(0, (this.rows * size - this.canvas.height) / ratio)}px`;
    this.ratio = ratio;
    this.image = this.context.createImageData(this.canvas.width, this.canvas.height);
    this.pixels = new Uint32Array(this.image.data.buffer);
    this.all = true;
  }

  get firstRow() {
    return Math.floor((this.scroller.scrollTop * this.ratio) / this.size);
  }

  /** The block under a point of the canvas, in CSS pixels; -1 for none. */
  hit(x, y, state) {
    const column = Math.floor((x * this.ratio) / this.size);
    const row = this.firstRow + Math.floor((y * this.ratio) / this.size);
    const id = row * this.columns + column;
    return column < this.columns && column >= 0 && id >= 0 && id < state.numBlocks ? id : -1;
  }

  flash(ids, kind, now) {
    if (this.calm.matches) return;
    for (const id of ids) this.flashes.set(id, [now, kind]);
  }

  touch(ids) {
    if (ids === null || ids.length > 20000) this.all = true;
    else for (const id of ids) this.dirty.add(id);
  }

  select(ids) {
    this.selected = ids;
    this.all = true;
  }

  /** Bring a block into view. */
  reveal(id) {
    const top = (Math.floor(id / this.columns) * this.size) / this.ratio;
    const view = this.scroller.clientHeight;
    if (top < this.scroller.scrollTop || top + this.size > this.scroller.scrollTop + view)
      this.scroller.scrollTop = Math.max(0, top - view / 2);
  }

  /** Paint what changed since the last call; returns whether anything did. */
  draw(state, now) {
    for (const [id, [start]] of this.flashes) {
      this.dirty.add(id);
      if (now - start > FLASH_MS) this.flashes.delete(id);
    }
    if (!this.all && !this.dirty.size) return false;
    const first = this.firstRow * this.columns;
    const visible = Math.ceil(this.canvas.height / this.size) * this.columns;
    if (this.all) {
      this.pixels.fill(this.colours.back);
      const end = Math.min(state.numBlocks, first + visible);
      for (let id = first; id < end; id++) this.paint(state, id, first, now);
    } else {
      for (const id of this.dirty) if (id >= first && id < first + visible) this.paint(state, id, first, now);
    }
    this.all = false;
    this.dirty.clear();
    this.context.putImageData(this.image, 0, 0);
    if (this.size >= TEXT_CELL * this.ratio) this.drawCounts(state, first, visible);
    this.outline(this.pinned, first, this.colours.mark, 2);
    this.outline(this.cursor, first, this.colours.ink, 1);
    this.painted++;
    return true;
  }

  paint(state, id, first, now) {
    const { size, pixels } = this;
    const width = this.canvas.width;
    const gap = size >= 4 ? Math.max(1, Math.floor(size / 12)) : 0;
    const inner = size - gap;
    const x = (id % this.columns) * size;
    const y = Math.floor((id - first) / this.columns) * size;
    const bottom = Math.min(y + inner, this.canvas.height);
    const dim = this.selected !== null && !this.selected.has(id) ? 1 : 0;
    const tone = this.tones[state.kind(id)][dim];
    const share = state.fill[id] / state.blockSize;
    if (inner < 5) {
      const colour = this.flashed(id, tone.levels[Math.round(share * LEVELS)], now);
      for (let row = y; row < bottom; row++) pixels.fill(colour, row * width + x, row * width + x + inner);
      return;
    }
    const level = y + inner - Math.round(share * inner);
    for (let row = y; row < bottom; row++)
      pixels.fill(row < level ? tone.empty : tone.filled, row * width + x, row * width + x + inner);
    if (tone.border) this.frame(x, y, inner, bottom, 1, () => tone.border);
    // A flash is a frame, so that the state within stays legible.
    if (this.flashes.has(id))
      this.frame(x, y, inner, bottom, Math.max(2, Math.round(inner / 7)), (at) => this.flashed(id, pixels[at], now));
  }

  /** Draw a frame of so many pixels inside a cell; colour(at) gives that of a pixel. */
  frame(x, y, inner, bottom, weight, colour) {
    const { pixels } = this;
    const width = this.canvas.width;
    for (let row = y; row < bottom; row++) {
      const edge = row < y + weight || row >= y + inner - weight;
      for (let i = 0; i < inner; i++) {
        if (!edge && i === weight) i = inner - weight;
        const at = row * width + x + i;
        pixels[at] = colour(at);
      }
    }
  }

  flashed(id, colour, now) {
    const flash = this.flashes.get(id);
    if (!flash) return colour;
    const k = Math.max(0, 1 - (now - flash[0]) / FLASH_MS);
    const base = [colour & 255, (colour >> 8) & 255, (colour >> 16) & 255];
    return word(mix(base, this.flashColours[flash[1]], k * 0.9));
  }

  drawCounts(state, first, visible) {
    const { context, size } = this;
    const inner = size - Math.max(1, Math.floor(size / 12));
    context.font = `600 ${Math.floor(size * 0.5)}px system-ui, sans-serif`;
    context.textAlign = "center";
    context.textBaseline = "middle";
    context.fillStyle = this.on.shared;
    const end = Math.min(state.numBlocks, first + visible);
    for (let id = first; id < end; id++) {
      if (state.refs[id] < 2 || (this.selected !== null && !this.selected.has(id))) continue;
      const x = (id % this.columns) * size + inner / 2;
      const y = Math.floor((id - first) / this.columns) * size + inner / 2 + 1;
      context.fillText(state.refs[id] > 99 ? "99" : state.refs[id], x, y);
    }
  }

  outline(id, first, colour, weight) {
    if (id < first) return;
    const { context, size } = this;
    const line = weight * this.ratio;
    context.strokeStyle = colour;
    context.lineWidth = line;
    const x = (id % this.columns) * size;
    const y = Math.floor((id - first) / this.columns) * size;
    context.strokeRect(x - line / 2, y - line / 2, size + line / 2, size + line / 2);
  }
}
