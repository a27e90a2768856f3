// Drawing on canvases. Only what is in the window is visited, and what is thinner than a pixel is drawn summed up.

const GUTTER = 74;
const RIGHT = 10;
const AXIS = 24;
const MEMORY_HEIGHT = 104;
const FONT = 'system-ui, "Segoe UI", Helvetica, Arial, "DejaVu Sans", sans-serif';
const MOST_ARROWS = 1500;
const COLUMN = 2; // the width of a column of shares

// Where things are: rows of ranks under a time axis, in a window [from, to] of time. A plan that copies has a second, lower
// row for each rank, the copy engine's; these are numbered after those of the ranks.
class Geometry {
  constructor(model, width, from, to) {
    const { numRanks } = model;
    const [row, gap] = [[8, 32, 5], [16, 25, 4], [32, 19, 3], [64, 14, 2], [128, 8, 1], [Infinity, 4, 1]].find(([most]) => numRanks <= most).slice(1);
    Object.assign(this, { numRanks, width, from, to, row, gap, plot: Math.max(width - GUTTER - RIGHT, 10) });
    this.numRows = model.data.rows.length;
    this.upper = this.numRows > numRanks ? Math.ceil(row * 0.66) : row;
    const typical = (model.typical / (to - from)) * this.plot;
    this.roomy = typical >= 34; // most boxes have room for their whole action
    this.crowded = typical < 1.5; // most boxes cannot be told apart
    this.height = AXIS + numRanks * (row + gap) + 4;
  }
  x(time) {
    return GUTTER + ((time - this.from) / (this.to - this.from)) * this.plot;
  }
  time(x) {
    return this.from + ((x - GUTTER) / this.plot) * (this.to - this.from);
  }
  y(row) {
    return AXIS + (row % this.numRanks) * (this.row + this.gap) + (row < this.numRanks ? 0 : this.upper + 1);
  }
  tall(row) {
    return row < this.numRanks ? this.upper : Math.max(this.row - this.upper - 1, 1);
  }
  rowAt(y) {
    for (let row = 0; row < this.numRows; row++) if (y >= this.y(row) && y <= this.y(row) + this.tall(row)) return row;
    return -1;
  }
  box(model, box) {
    const x = this.x(model.start[box]);
    const row = model.row[box];
    return { x, y: this.y(row), width: Math.max(this.x(model.end[box]) - x, 1), height: this.tall(row) };
  }
}

function readTheme(element) {
  const style = getComputedStyle(element);
  const theme = {};
  for (const name of ["ink", "soft", "faint", "line", "track", "hatch", "needs", "feeds", "paper"]) {
    theme[name] = style.getPropertyValue(`--ps-${name}`).trim();
  }
  const tile = document.createElement("canvas");
  tile.width = tile.height = 8;
  const pen = tile.getContext("2d");
  pen.fillStyle = theme.track;
  pen.fillRect(0, 0, 8, 8);
  pen.strokeStyle = theme.hatch;
  pen.lineWidth = 1.4;
  pen.beginPath();
  for (const shift of [-8, 0, 8]) {
    pen.moveTo(shift - 1, 9);
    pen.lineTo(shift + 9, -1);
  }
  pen.stroke();
  theme.tile = tile;
  return theme;
}

// A canvas as large as asked, cleared, in CSS pixels.
function prepare(canvas, width, height) {
  const ratio = window.devicePixelRatio || 1;
  const [w, h] = [Math.round(width * ratio), Math.round(height * ratio)];
  if (canvas.width !== w || canvas.height !== h) {
    canvas.width = w;
    canvas.height = h;
    canvas.style.height = `${height}px`;
  }
  const pen = canvas.getContext("2d");
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  pen.clearRect(0, 0, width, height);
  return pen;
}

function clipToPlot(pen, geometry, height) {
  pen.beginPath();
  pen.rect(GUTTER - 1, 0, geometry.plot + 2, height);
  pen.clip();
}

function drawRows(canvas, model, geometry, theme, focus, options) {
  const pen = prepare(canvas, geometry.width, geometry.height);
  drawAxis(pen, geometry, theme, model.data.unit);
  drawRanks(pen, model, geometry, theme);
  pen.save();
  clipToPlot(pen, geometry, geometry.height);
  pen.fillStyle = pen.createPattern(theme.tile, "repeat");
  const [left, right] = [geometry.x(0), geometry.x(model.data.length)];
  for (let row = 0; row < geometry.numRows; row++) pen.fillRect(left, geometry.y(row), right - left, geometry.tall(row));
  pen.globalAlpha = focus ? 0.3 : 1;
  const drawOne = geometry.crowded ? drawShares : drawRow;
  for (let row = 0; row < geometry.numRows; row++) drawOne(pen, model, geometry, row);
  if (options.messages && !focus) drawMessages(pen, model, geometry, theme);
  pen.globalAlpha = 1;
  if (focus) drawFocus(pen, model, geometry, theme, focus);
  pen.restore();
}

function drawAxis(pen, geometry, theme, unit) {
  const step = niceStep(geometry.to - geometry.from, geometry.plot / 90);
  pen.font = `11px ${FONT}`;
  pen.textAlign = "center";
  pen.textBaseline = "alphabetic";
  for (let number = Math.ceil(geometry.from / step - 1e-9); number * step <= geometry.to + step * 1e-9; number++) {
    const x = Math.round(geometry.x(number * step)) + 0.5;
    pen.strokeStyle = theme.line;
    pen.lineWidth = 1;
    pen.beginPath();
    pen.moveTo(x, AXIS - 6);
    pen.lineTo(x, geometry.height);
    pen.stroke();
    pen.fillStyle = theme.soft;
    const text = tickText(number * step, step, unit, geometry.to);
    pen.fillText(text, Math.min(Math.max(x, GUTTER), geometry.width - pen.measureText(text).width / 2 - 2), 12);
  }
}

function drawRanks(pen, model, geometry, theme) {
  const every = Math.ceil(13 / (geometry.row + geometry.gap));
  pen.textBaseline = "middle";
  for (let rank = 0; rank < model.numRanks; rank++) {
    const y = geometry.y(rank) + geometry.row / 2;
    if (model.data.memory.length) {
      pen.fillStyle = model.data.curves[rank];
      pen.fillRect(0, geometry.y(rank) + geometry.row * 0.15, 3, geometry.row * 0.7);
    }
    if (rank % every) continue;
    pen.textAlign = "left";
    pen.fillStyle = theme.ink;
    pen.font = `600 ${Math.min(12, geometry.row + 3)}px ${FONT}`;
    const stages = model.data.stages[rank];
    pen.fillText(`rank ${rank}`, 9, geometry.row >= 25 ? y - 6 : y);
    if (geometry.row >= 25) {
      pen.fillStyle = theme.soft;
      pen.font = `10px ${FONT}`;
      const words = `stage ${stages.join(", ")}`;
      pen.fillText(pen.measureText(words).width < GUTTER - 12 ? words : `${stages.length} stages`, 9, y + 7);
    }
  }
}

function drawRow(pen, model, geometry, row) {
  const last = model.first[row + 1];
  for (let box = model.firstAfter(row, geometry.from); box < last && model.start[box] <= geometry.to; box++) {
    drawBox(pen, model, geometry, box);
  }
}

// Where boxes are thinner than pixels: each column shows how its time was shared out, one colour above the other, idle
// time below them. Columns that look alike are drawn as one.
function drawShares(pen, model, geometry, row) {
  const columns = Math.ceil(geometry.plot / COLUMN);
  const each = (geometry.to - geometry.from) / (geometry.plot / COLUMN);
  const colours = model.palette.length;
  const shares = new Float64Array(columns * colours);
  const last = model.first[row + 1];
  const add = (colour, start, end) => {
    const low = Math.max((start - geometry.from) / each, 0);
    const high = Math.min((end - geometry.from) / each, columns);
    for (let column = Math.floor(low); column < high; column++) {
      shares[column * colours + colour] += Math.min(high, column + 1) - Math.max(low, column);
    }
  };
  for (let box = model.firstAfter(row, geometry.from); box < last && model.start[box] <= geometry.to; box++) {
    const second = model.second.get(box);
    const middle = second ? (model.start[box] + model.end[box]) / 2 : model.end[box];
    add(model.colour[model.key[box]], model.start[box], middle);
    if (second) add(model.colour[second[0]], middle, model.end[box]);
  }
  const bound = (column, colour) => {
    let sum = 0;
    for (let i = 0; i <= colour; i++) sum += shares[column * colours + i];
    return Math.round(sum * geometry.tall(row));
  };
  const y = geometry.y(row);
  for (let colour = 0; colour < colours; colour++) {
    pen.fillStyle = model.palette[colour];
    let [begin, top, bottom] = [0, 0, 0];
    for (let column = 0; column <= columns; column++) {
      const [newTop, newBottom] = column < columns ? [colour ? bound(column, colour - 1) : 0, bound(column, colour)] : [-1, -1];
      if (newTop === top && newBottom === bottom) continue;
      if (bottom > top) pen.fillRect(GUTTER + begin * COLUMN, y + top, (column - begin) * COLUMN, bottom - top);
      [begin, top, bottom] = [column, newTop, newBottom];
    }
  }
}

function drawBox(pen, model, geometry, box) {
  const area = geometry.box(model, box);
  const left = Math.max(area.x, GUTTER - 6);
  const right = Math.min(area.x + area.width, geometry.width);
  const wide = right - left;
  const actions = model.actions(box);
  const height = area.height / actions.length;
  actions.forEach(([key, microbatch], number) => {
    const { fill, ink, counted, letter } = model.data.keys[key];
    const y = area.y + number * height;
    pen.fillStyle = fill;
    if (wide > 9 && actions.length === 1) {
      pen.beginPath();
      pen.roundRect(left + 0.5, y, wide - 1, height, 3);
      pen.fill();
    } else pen.fillRect(left, y, wide > 4 ? wide - 1 : Math.max(wide, 0.8), height);
    if (wide < 9 || height < 8) return;
    const size = Math.min(12, height - 1);
    pen.font = `600 ${size}px ${FONT}`;
    pen.fillStyle = ink;
    pen.textAlign = "center";
    pen.textBaseline = "middle";
    const whole = model.text(key, microbatch);
    const brief = counted ? String(microbatch) : letter;
    const text = (wide > 64 || geometry.roomy) && pen.measureText(whole).width + 6 <= wide ? whole : brief;
    if (text === whole || pen.measureText(brief).width + 3 <= wide) pen.fillText(text, (left + right) / 2, y + height / 2 + 0.5);
  });
}

function curve(pen, geometry, from, to, message, data) {
  const [x0, y0, x1, y1] = [
    message < 0 ? from.x + from.width : geometry.x(data.messages.s[message]),
    from.y + from.height / 2,
    message < 0 ? to.x : Math.max(geometry.x(data.messages.e[message]), from.x + from.width),
    to.y + to.height / 2,
  ];
  const bend = Math.max(10, Math.abs(x1 - x0) / 2);
  pen.beginPath();
  pen.moveTo(x0, y0);
  pen.bezierCurveTo(x0 + bend, y0, x1 - bend, y1, x1, y1);
  pen.stroke();
  pen.beginPath();
  pen.arc(x1, y1, 3, 0, 7);
  pen.fill();
}

function drawMessages(pen, model, geometry, theme) {
  const { f, t, s, e } = model.data.messages;
  const visible = [];
  for (let i = 0; i < s.length && visible.length <= MOST_ARROWS; i++) {
    if (e[i] >= geometry.from && s[i] <= geometry.to) visible.push(i);
  }
  if (visible.length > MOST_ARROWS) return;
  pen.strokeStyle = theme.ink;
  pen.globalAlpha = 0.5;
  pen.lineWidth = 1;
  for (const i of visible) {
    const down = t[i] > f[i];
    const y0 = geometry.y(f[i]) + (down ? geometry.row - 3 : 3);
    const y1 = geometry.y(t[i]) + (down ? 0 : geometry.row);
    const x1 = geometry.x(e[i]);
    pen.beginPath();
    pen.moveTo(geometry.x(s[i]), y0);
    pen.lineTo(x1, y1);
    pen.lineTo(x1 - 3, y1 + (down ? -4 : 4));
    pen.moveTo(x1, y1);
    pen.lineTo(x1 + 3, y1 + (down ? -4 : 4));
    pen.stroke();
  }
  pen.globalAlpha = 1;
}

function drawFocus(pen, model, geometry, theme, focus) {
  const frame = (box, colour, width) => {
    drawBox(pen, model, geometry, box);
    const area = geometry.box(model, box);
    pen.strokeStyle = colour;
    pen.lineWidth = width;
    pen.beginPath();
    pen.roundRect(area.x, area.y - 1, Math.max(area.width, 3), area.height + 2, 4);
    pen.stroke();
  };
  const self = geometry.box(model, focus.box);
  focus.needs.forEach(({ box }) => frame(box, theme.needs, 2.5));
  focus.neededBy.forEach(({ box }) => frame(box, theme.feeds, 2.5));
  frame(focus.box, theme.ink, 2.5);
  pen.lineWidth = 2;
  pen.strokeStyle = pen.fillStyle = theme.needs;
  focus.needs.forEach(({ box, message }) => curve(pen, geometry, geometry.box(model, box), self, message, model.data));
  pen.strokeStyle = pen.fillStyle = theme.feeds;
  focus.neededBy.forEach(({ box, message }) => curve(pen, geometry, self, geometry.box(model, box), message, model.data));
}

function drawMemory(canvas, model, geometry, theme, focusRank) {
  const pen = prepare(canvas, geometry.width, MEMORY_HEIGHT);
  const [top, bottom, peak] = [20, MEMORY_HEIGHT - 8, model.peak || 1];
  const y = (held) => bottom - (held / peak) * (bottom - top);
  pen.strokeStyle = theme.line;
  pen.fillStyle = theme.soft;
  pen.font = `11px ${FONT}`;
  pen.textAlign = "right";
  pen.textBaseline = "middle";
  for (const held of [0, peak / 2, peak]) {
    const at = Math.round(y(held)) + 0.5;
    pen.beginPath();
    pen.moveTo(GUTTER, at);
    pen.lineTo(geometry.width - RIGHT, at);
    pen.stroke();
    pen.fillText(memoryText(held), GUTTER - 8, at);
  }
  pen.textAlign = "left";
  pen.fillText("memory held, a line a rank", GUTTER, 8);
  pen.save();
  clipToPlot(pen, geometry, MEMORY_HEIGHT);
  const alpha = model.numRanks > 16 ? 0.55 : 0.9;
  for (let rank = 0; rank < model.numRanks; rank++) {
    if (rank !== focusRank) drawCurve(pen, model, geometry, y, rank, focusRank < 0 ? alpha : 0.18, 1.6);
  }
  if (focusRank >= 0) drawCurve(pen, model, geometry, y, focusRank, 1, 2.6);
  pen.restore();
}

// A curve of steps. Many steps within a pixel become one stroke from the lowest to the highest.
function drawCurve(pen, model, geometry, y, rank, alpha, width) {
  const steps = model.data.memory[rank];
  if (!steps || !steps.length) return;
  pen.strokeStyle = model.data.curves[rank];
  pen.globalAlpha = alpha;
  pen.lineWidth = width;
  pen.lineJoin = "round";
  pen.beginPath();
  let held = model.heldAt(rank, geometry.from);
  pen.moveTo(GUTTER - 2, y(held));
  let [pixel, at, low, high] = [-1, 0, held, held];
  const flush = () => [low, high, held].forEach((value) => pen.lineTo(at, y(value)));
  for (let i = 0; i < steps.length && steps[i] <= geometry.to; i += 2) {
    if (steps[i] <= geometry.from) continue;
    const x = geometry.x(steps[i]);
    if (Math.floor(x * 2) !== pixel) {
      if (pixel >= 0) flush();
      pen.lineTo(x, y(held));
      [pixel, at, low, high] = [Math.floor(x * 2), x, held, held];
    }
    held = steps[i + 1];
    [low, high] = [Math.min(low, held), Math.max(high, held)];
  }
  if (pixel >= 0) flush();
  pen.lineTo(Math.min(geometry.x(Math.max(model.data.length, geometry.from)), geometry.width), y(held));
  pen.stroke();
  pen.globalAlpha = 1;
}
