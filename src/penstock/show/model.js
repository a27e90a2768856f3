// The columns of one timeline, and answers to questions about them. Nothing here draws or touches the page.

class Model {
  constructor(data) {
    this.data = data;
    this.numRanks = data.stages.length;
    const size = data.rows.reduce((sum, row) => sum + row.s.length, 0);
    this.size = size;
    this.start = new Float64Array(size);
    this.end = new Float64Array(size);
    this.key = new Int32Array(size);
    this.microbatch = new Int32Array(size);
    this.row = new Int32Array(size);
    this.rank = new Int32Array(size);
    this.second = new Map(); // box -> [key, microbatch] of the second action of an overlapped pair
    this.first = new Int32Array(data.rows.length + 1); // where the boxes of each row begin: of ranks, then of copy engines
    this.boxes = new Map(); // action -> box
    this.sends = new Map(); // action -> message
    this.receives = new Map();
    let box = 0;
    data.rows.forEach((row, number) => {
      this.first[number] = box;
      for (let i = 0; i < row.s.length; i++, box++) {
        this.start[box] = row.s[i];
        this.end[box] = row.e[i];
        this.key[box] = row.k[i];
        this.microbatch[box] = row.m[i];
        this.row[box] = number;
        this.rank[box] = number % this.numRanks;
        if (row.pair[i]) this.second.set(box, row.pair[i]);
        for (const [key, microbatch] of this.actions(box)) this.boxes.set(this.id(key, microbatch), box);
      }
    });
    this.first[data.rows.length] = box;
    data.messages.s.forEach((_, i) => {
      this.sends.set(this.id(data.messages.a[i], data.messages.m[i]), i);
      this.receives.set(this.id(data.messages.b[i], data.messages.m[i]), i);
    });
    this.feeds = data.keys.map(() => []); // the needs, turned round
    data.needs.forEach((needs, key) => needs.forEach((need) => this.feeds[need].push(key)));
    const lengths = this.end.map((end, i) => end - this.start[i]).filter((length) => length > 0).sort();
    this.typical = lengths.length ? lengths[lengths.length >> 3] : 0; // shorter than nearly all
    this.palette = [...new Set(data.keys.map(({ fill }) => fill))];
    this.colour = data.keys.map(({ fill }) => this.palette.indexOf(fill));
    this.halves = new Map(); // the key of a B -> the key of the I that it holds
    data.keys.forEach((key, number) => key.whole >= 0 && this.halves.set(key.whole, number));
  }

  id(key, microbatch) {
    return key * this.data.microbatches + microbatch;
  }

  // The actions of a box: one, or the two of an overlapped pair.
  actions(box) {
    const one = [[this.key[box], this.microbatch[box]]];
    return this.second.has(box) ? [...one, this.second.get(box)] : one;
  }

  text(key, microbatch) {
    const { stage, op, counted, sends, peer } = this.data.keys[key];
    const arrow = peer < 0 ? "" : (sends ? ">" : "<") + peer;
    return `${stage}${op}${counted ? microbatch : ""}${arrow}`;
  }

  label(box) {
    const texts = this.actions(box).map(([key, microbatch]) => this.text(key, microbatch));
    return texts.length === 1 ? texts[0] : `(${texts.join(";")})OVERLAP_F_B`;
  }

  // The box that holds an action; an I may be there as part of a B.
  find(key, microbatch) {
    const box = this.boxes.get(this.id(key, microbatch));
    if (box !== undefined) return box;
    const whole = this.data.keys[key].whole;
    return whole < 0 ? undefined : this.boxes.get(this.id(whole, microbatch));
  }

  // What a box needs: [{box, message}], where message is the one that brought it, or -1.
  needs(box) {
    const found = new Map();
    for (const [key, microbatch] of this.actions(box)) {
      for (const need of this.data.needs[key]) {
        const message = this.receives.get(this.id(need, microbatch));
        if (message === undefined) this.note(found, box, this.find(need, microbatch), -1);
        else {
          for (const source of this.data.needs[this.data.messages.a[message]]) {
            this.note(found, box, this.find(source, microbatch), message);
          }
        }
      }
    }
    return [...found.values()];
  }

  // What needs a box, likewise.
  neededBy(box) {
    const found = new Map();
    for (const [key, microbatch] of this.actions(box)) {
      const half = this.halves.get(key);
      for (const fed of half === undefined ? this.feeds[key] : [...this.feeds[key], ...this.feeds[half]]) {
        const message = this.sends.get(this.id(fed, microbatch));
        if (message === undefined) this.note(found, box, this.find(fed, microbatch), -1);
        else {
          for (const target of this.feeds[this.data.messages.b[message]]) {
            this.note(found, box, this.find(target, microbatch), message);
          }
        }
      }
    }
    return [...found.values()];
  }

  note(found, self, box, message) {
    if (box !== undefined && box !== self) found.set(box, { box, message });
  }

  // The first box of a row that ends after a time. Boxes of a row follow one another, so their ends are sorted too.
  firstAfter(row, time) {
    let low = this.first[row];
    let high = this.first[row + 1];
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.end[middle] > time) high = middle;
      else low = middle + 1;
    }
    return low;
  }

  boxAt(row, time, slack) {
    for (let box = this.firstAfter(row, time - slack); box < this.first[row + 1]; box++) {
      if (this.start[box] - slack > time) return -1;
      if (this.start[box] <= time && time < this.end[box]) return box;
      if (this.end[box] - this.start[box] < slack) return box;
    }
    return -1;
  }

  // What a rank holds at a time.
  heldAt(rank, time) {
    const curve = this.data.memory[rank];
    if (!curve || !curve.length) return undefined;
    let low = 0;
    let high = curve.length / 2;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (curve[2 * middle] > time) high = middle;
      else low = middle + 1;
    }
    return low ? curve[2 * low - 1] : 0;
  }

  get peak() {
    if (this._peak === undefined) {
      this._peak = 0;
      for (const curve of this.data.memory) for (let i = 1; i < curve.length; i += 2) this._peak = Math.max(this._peak, curve[i]);
    }
    return this._peak;
  }
}

const SECONDS = [[1, "s"], [1e-3, "ms"], [1e-6, "µs"], [1e-9, "ns"]];
const BYTES = [[2 ** 40, "TiB"], [2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"]];

function plain(value) {
  return String(Number(value.toPrecision(7)));
}

function timeText(value, unit) {
  if (unit !== "s") return plain(value) + (unit ? ` ${unit}` : "");
  const [size, name] = SECONDS.find(([least]) => Math.abs(value) >= least) || (value ? SECONDS[3] : SECONDS[0]);
  return `${plain(value / size)} ${name}`;
}

// The mark of an axis at a time: as many decimals as the step has, the prefix that suits the end of the axis.
function tickText(value, step, unit, scale) {
  const [size, name] = unit === "s" ? SECONDS.find(([least]) => scale >= least) || SECONDS[3] : [1, unit];
  const decimals = Math.min(Math.max(-Math.floor(Math.log10(step / size) + 1e-9), 0), 12);
  return (value / size).toFixed(decimals) + (name ? ` ${name}` : "");
}

function memoryText(value) {
  if (Math.abs(value) < 10000) return plain(value);
  const [size, name] = BYTES.find(([least]) => Math.abs(value) >= least);
  return `${Number((value / size).toPrecision(4))} ${name}`;
}

// 1, 2 or 5 times a power of ten, so that about `ticks` of it cover the extent.
function niceStep(extent, ticks) {
  const rough = extent / Math.max(ticks, 1);
  const base = 10 ** Math.floor(Math.log10(rough));
  return base * ([1, 2, 5].find((factor) => base * factor >= rough * 0.999999) || 10);
}
