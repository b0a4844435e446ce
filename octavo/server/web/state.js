// What snapshot and frames say, put together; and the history, so that any moment can be shown again.
//
//   snapshot --> MapState.apply(frame) --> apply(frame) ...      format: docs/memory-map.md
//   History    frames[0..n), a copy of the state every KEY_EVERY frames; seek(i) = nearest copy + frames
//
// A moment costs at most KEY_EVERY frames to rebuild, each O(what changed).

export const NOT_PUBLISHED = -1;
export const LOWER_TIER = -(2 ** 31);
const KEY_EVERY = 200;
const MAX_FRAMES = 12000;

function unpack(text, Kind) {
  const bytes = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
  return new Kind(bytes.buffer);
}

export class MapState {
  constructor(snapshot) {
    this.model = snapshot.model;
    this.blockSize = snapshot.block_size;
    this.numBlocks = snapshot.num_blocks;
    this.bytesPerBlock = snapshot.bytes_per_block;
    this.maxNumSeqs = snapshot.max_num_seqs;
    this.refs = unpack(snapshot.refs, Uint16Array);
    this.fill = unpack(snapshot.fill, Uint16Array);
    this.parent = unpack(snapshot.parent, Int32Array);
    this.seqs = new Map();
    this.counts = {};
    this.shared = 0;
    for (let i = 0; i < this.numBlocks; i++) if (this.refs[i] > 1) this.shared++;
    this.apply(snapshot);
  }

  clone() {
    const copy = Object.create(MapState.prototype);
    Object.assign(copy, this);
    copy.refs = this.refs.slice();
    copy.fill = this.fill.slice();
    copy.parent = this.parent.slice();
    copy.seqs = new Map(this.seqs); // rows are replaced, never changed in place
    return copy;
  }

  /** Apply one frame; returns the ids of the blocks that changed. */
  apply(frame) {
    const flat = frame.blocks ?? [];
    const changed = [];
    for (let i = 0; i < flat.length; i += 4) {
      const id = flat[i];
      this.shared += (flat[i + 1] > 1) - (this.refs[id] > 1);
      this.refs[id] = flat[i + 1];
      this.fill[id] = flat[i + 2];
      this.parent[id] = flat[i + 3];
      changed.push(id);
    }
    for (const row of frame.seqs ?? []) {
      const [id, state, prompt, cached, tokens, committed, max, preemptions, suffix] = row;
      let table = this.seqs.get(id)?.table ?? [];
      if (suffix) table = table.slice(0, suffix[0]).concat(suffix.slice(1));
      this.seqs.set(id, { id, state, prompt, cached, tokens, committed, max, preemptions, table });
    }
    for (const id of frame.gone ?? []) this.seqs.delete(id);
    if (frame.counts) this.counts = frame.counts;
    this.why = frame.why ?? this.why ?? "";
    this.t = frame.t ?? this.t;
    return changed;
  }

  kind(id) {
    if (this.refs[id] > 1) return "shared";
    if (this.refs[id] === 1) return "held";
    return this.parent[id] === NOT_PUBLISHED ? "free" : "cached";
  }

  /** Sequences whose table names the block: [{seq, index}]. */
  holders(id) {
    const found = [];
    for (const seq of this.seqs.values()) {
      const index = seq.table.indexOf(id);
      if (index >= 0) found.push({ seq, index });
    }
    return found;
  }

  /** The blocks from the root of the prefix tree to this one; none for an unpublished block. */
  path(id) {
    const ids = [];
    if (this.parent[id] === NOT_PUBLISHED) return ids;
    for (let at = id; at >= 0 && ids.length <= this.numBlocks; at = this.parent[at]) ids.unshift(at);
    return ids;
  }
}

export class History {
  constructor(snapshot) {
    this.head = new MapState(snapshot);
    this.frames = [{ t: snapshot.t, counts: snapshot.counts }];
    this.keys = new Map([[0, this.head.clone()]]);
    this.dropped = 0;
  }

  get last() {
    return this.frames.length - 1;
  }

  /** Add a frame at the end; returns the changed block ids. */
  push(frame) {
    const changed = this.head.apply(frame);
    this.frames.push(frame);
    if (this.last % KEY_EVERY === 0) this.keys.set(this.last, this.head.clone());
    if (this.frames.length > MAX_FRAMES) this.forget();
    return changed;
  }

  /** Drop the oldest frames, up to a kept copy; the number of those dropped is added to `dropped`. */
  forget() {
    const cut = [...this.keys.keys()].find((at) => at >= MAX_FRAMES / 10);
    this.frames.splice(0, cut);
    this.keys = new Map([...this.keys].filter(([at]) => at >= cut).map(([at, key]) => [at - cut, key]));
    this.dropped += cut;
  }

  /** The state after frame i, a copy of its own. */
  at(i) {
    let from = i - (i % KEY_EVERY);
    while (!this.keys.has(from)) from -= KEY_EVERY;
    const state = this.keys.get(from).clone();
    for (let j = from + 1; j <= i; j++) state.apply(this.frames[j]);
    return state;
  }

  /** The last frame at or before a time. */
  indexOf(t) {
    let low = 0;
    let high = this.last;
    while (low < high) {
      const mid = (low + high + 1) >> 1;
      if (this.frames[mid].t <= t) low = mid;
      else high = mid - 1;
    }
    return low;
  }

  /** Generated tokens per second over the three seconds before frame i: a long prompt's step may take one. */
  rate(i) {
    const now = this.frames[i];
    let j = i;
    while (j > 0 && now.t - this.frames[j - 1].t <= 3.05) j--;
    const span = now.t - this.frames[j].t;
    if (j === i || span <= 0) return 0;
    return (now.counts.generated - this.frames[j].counts.generated) / span;
  }
}
