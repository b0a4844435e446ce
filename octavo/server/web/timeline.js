// The timeline: memory, sequences, tokens per second and events over the frames of a History.
//
//   area   held, and cached above it, as shares of all blocks
//   lines  running, waiting, tokens per second, each to its own maximum
//   ticks  one row each: copies, evictions, preemptions, swaps; higher where there are more
//
// Drawn from at most one sample per two pixels, so its cost does not grow with the history.

const TICKS = [
  ["copies", "copy"],
  ["evictions", "evict"],
  ["preemptions", "preempt"],
  ["demotions", "swap"],
];
const ROW = 16;
const TOP = 16;
const LABELS = 86;
const NARROW_LABELS = 70; // the same as the slider's margin in map.css

export class Timeline {
  constructor(canvas) {
    this.canvas = canvas;
    this.context = canvas.getContext("2d");
    this.readColours();
  }

  readColours() {
    const style = getComputedStyle(document.documentElement);
    this.colours = {};
    for (const name of ["held", "cached", "running", "waiting", "rate", "copy", "evict", "preempt", "swap", "line", "faint", "ink", "mark", "well"])
      this.colours[name] = style.getPropertyValue(`--${name}`).trim();
  }

  layout() {
    const ratio = window.devicePixelRatio || 1;
    this.ratio = ratio;
    this.width = this.canvas.clientWidth;
    this.height = this.canvas.clientHeight;
    this.canvas.width = Math.floor(this.width * ratio);
    this.canvas.height = Math.floor(this.height * ratio);
    this.left = this.width < 560 ? NARROW_LABELS : LABELS;
    this.font = `${this.width < 560 ? 10 : 11}px system-ui, sans-serif`;
  }

  /** The frame under a point, in CSS pixels. */
  frameAt(x, history) {
    const t0 = history.frames[0].t;
    const span = Math.max(history.frames[history.last].t - t0, 1);
    return history.indexOf(t0 + (Math.max(0, x - this.left) / (this.width - this.left)) * span);
  }

  draw(history, shown) {
    const { context, colours, width, left } = this;
    const plot = this.height - ROW * TICKS.length - 8;
    context.setTransform(this.ratio, 0, 0, this.ratio, 0, 0);
    context.clearRect(0, 0, width, this.height);
    const { frames } = history;
    const t0 = frames[0].t;
    const span = Math.max(frames[history.last].t - t0, 1);
    const samples = [];
    const columns = Math.max(2, Math.floor((width - left) / 2));
    for (let c = 0; c <= columns; c++) {
      const i = history.indexOf(t0 + (c / columns) * span);
      samples.push({ x: left + (c / columns) * (width - left), i, counts: frames[i].counts });
    }
    this.grid(plot, span);
    const total = (s) => s.counts.free + s.counts.held + s.counts.cached;
    this.area(samples, plot, (s) => (s.counts.held + s.counts.cached) / total(s), colours.cached, 0.25);
    this.area(samples, plot, (s) => s.counts.held / total(s), colours.held, 0.55);
    const most = Math.max(1, ...samples.map((s) => Math.max(s.counts.running, s.counts.waiting)));
    this.line(samples, plot, (s) => s.counts.running / most, colours.running, []);
    this.line(samples, plot, (s) => s.counts.waiting / most, colours.waiting, [4, 3]);
    const rates = samples.map((s) => history.rate(s.i));
    const top = Math.max(1, ...rates);
    this.line(samples, plot, (s, n) => rates[n] / top, colours.rate, [2, 2]);
    this.ticks(samples, plot);
    this.captions(plot, most, top);
    const x = left + ((frames[shown].t - t0) / span) * (width - left);
    context.fillStyle = colours.mark;
    context.fillRect(Math.min(x, width - 2), TOP, 2, this.height - TOP);
  }

  grid(plot, span) {
    const { context, colours, width, left } = this;
    context.strokeStyle = colours.line;
    context.fillStyle = colours.faint;
    context.lineWidth = 1;
    context.font = this.font;
    context.textAlign = "left";
    context.textBaseline = "top";
    const step = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 1800].find((s) => (span / s) * 64 <= width - left) ?? 3600;
    for (let t = step; t < span; t += step) {
      const x = Math.round(left + (t / span) * (width - left)) + 0.5;
      if (x > width - 24) continue; // its label would be cut off
      context.beginPath();
      context.moveTo(x, TOP);
      context.lineTo(x, plot);
      context.stroke();
      context.fillText(t >= 60 ? `${Math.floor(t / 60)}:${String(t % 60).padStart(2, "0")}` : `${t} s`, x - 2, 2);
    }
    context.strokeRect(left + 0.5, TOP + 0.5, width - left - 1, plot - TOP);
  }

  path(samples, plot, value) {
    this.context.beginPath();
    samples.forEach((s, n) => {
      const y = plot - value(s, n) * (plot - TOP - 3);
      if (n) this.context.lineTo(s.x, y);
      else this.context.moveTo(s.x, y);
    });
  }

  area(samples, plot, value, colour, alpha) {
    const { context } = this;
    this.path(samples, plot, value);
    context.lineTo(samples[samples.length - 1].x, plot);
    context.lineTo(samples[0].x, plot);
    context.globalAlpha = alpha;
    context.fillStyle = colour;
    context.fill();
    context.globalAlpha = 1;
  }

  line(samples, plot, value, colour, dash) {
    const { context } = this;
    this.path(samples, plot, value);
    context.setLineDash(dash);
    context.lineWidth = 1.8;
    context.strokeStyle = colour;
    context.stroke();
    context.setLineDash([]);
  }

  ticks(samples, plot) {
    const { context, colours } = this;
    TICKS.forEach(([key, colour], row) => {
      const base = plot + 8 + (row + 1) * ROW - 2;
      context.fillStyle = colours.line;
      context.fillRect(this.left, base, this.width - this.left, 1);
      const counts = samples.map((s, n) => (n ? s.counts[key] - samples[n - 1].counts[key] : 0));
      const most = Math.max(1, ...counts);
      context.fillStyle = colours[colour];
      counts.forEach((count, n) => {
        if (count <= 0) return;
        const height = 3 + (count / most) * (ROW - 5);
        context.fillRect(samples[n].x - 1, base - height, 2, height);
      });
    });
  }

  captions(plot, most, top) {
    const { context, colours, left } = this;
    context.font = this.font;
    context.textAlign = "right";
    context.textBaseline = "middle";
    // What the upper edge stands for, in each line's colour.
    for (const [text, colour, y] of [
      ["100 %", "faint", 6],
      [`${most} seq.`, "running", 21],
      [`${Math.round(top)} tok/s`, "rate", 36],
    ]) {
      context.fillStyle = colours[colour];
      context.fillText(text, left - 8, TOP + y);
    }
    context.fillStyle = colours.faint;
    context.fillText("0", left - 8, plot - 6);
    ["copies", "evictions", "preemptions", "swaps"].forEach((name, row) =>
      context.fillText(name, left - 8, plot + 8 + (row + 1) * ROW - 8),
    );
  }
}
