// One section of the page: its timelines share one time axis, which the user zooms, pans and points at.

class View {
  constructor(root) {
    this.root = root;
    const data = JSON.parse(root.querySelector("script.ps-data").textContent);
    this.blocks = [...root.querySelectorAll(".ps-block")].map((element, i) => ({
      element,
      model: new Model(data[i]),
      rows: element.querySelector("canvas.ps-rows"),
      memory: element.querySelector("canvas.ps-memory"),
      line: element.querySelector(".ps-line"),
      geometry: null,
    }));
    this.full = Math.max(...this.blocks.map(({ model }) => model.data.length)) || 1;
    [this.from, this.to] = [0, this.full];
    this.tip = root.querySelector(".ps-tip");
    this.thumbs = root.querySelectorAll(".ps-thumb");
    this.focus = null; // {block, box, needs, neededBy}
    this.pinned = false;
    this.pointers = new Map();
    this.queued = false;
    const messages = root.querySelector(".ps-messages");
    if (messages) messages.checked = this.blocks.every(({ model }) => model.data.messages.s.length <= 300);
    this.options = { messages: Boolean(messages && messages.checked) };
    if (messages) messages.addEventListener("change", () => this.redraw((this.options.messages = messages.checked)));
    this.listen();
    this.retheme();
    this.draw();
  }

  listen() {
    for (const button of this.root.querySelectorAll("[data-ps-do]")) {
      button.addEventListener("click", () => this.command(button.dataset.psDo));
    }
    for (const block of this.blocks) {
      const area = block.element.querySelector(".ps-plots");
      area.addEventListener("wheel", (event) => this.wheel(event, area), { passive: false });
      area.addEventListener("pointerdown", (event) => this.press(event, area));
      area.addEventListener("pointermove", (event) => this.move(event, block, area));
      for (const name of ["pointerup", "pointercancel"]) area.addEventListener(name, (event) => this.release(event, block));
      area.addEventListener("pointerleave", () => this.leave());
      area.addEventListener("dblclick", () => this.command("fit"));
      area.addEventListener("keydown", (event) => this.type(event));
    }
    const [resized, themed, ended] = [new ResizeObserver(() => this.redraw()), new MutationObserver(() => retheme()), new AbortController()];
    const retheme = () => this.redraw(this.retheme());
    resized.observe(this.root);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", retheme, { signal: ended.signal });
    themed.observe(document.documentElement, { attributes: true, attributeFilter: ["data-theme"] });
    this.close = () => [resized.disconnect(), themed.disconnect(), ended.abort()]; // for a section that leaves the page
  }

  retheme() {
    this.theme = readTheme(this.root);
  }

  redraw() {
    if (this.queued) return;
    this.queued = true;
    requestAnimationFrame(() => {
      this.queued = false;
      this.draw();
    });
  }

  draw() {
    for (const block of this.blocks) {
      const width = block.rows.parentElement.clientWidth;
      if (!width) continue;
      block.geometry = new Geometry(block.model, width, this.from, this.to);
      const focus = this.focus && this.focus.block === block ? this.focus : null;
      drawRows(block.rows, block.model, block.geometry, this.theme, focus, this.options);
      const rank = focus ? block.model.rank[focus.box] : -1;
      if (block.memory) drawMemory(block.memory, block.model, block.geometry, this.theme, rank);
    }
    const whole = this.to - this.from >= this.full * 0.999999;
    for (const thumb of this.thumbs) {
      thumb.parentElement.style.visibility = whole ? "hidden" : "visible";
      thumb.style.left = `${(this.from / this.full) * 100}%`;
      thumb.style.width = `${((this.to - this.from) / this.full) * 100}%`;
    }
  }

  // The window of time, kept within the whole.
  setWindow(from, to) {
    const length = Math.min(Math.max(to - from, this.full * 1e-5), this.full);
    this.from = Math.min(Math.max(from, 0), this.full - length);
    this.to = this.from + length;
    this.redraw();
  }

  zoom(factor, time = (this.from + this.to) / 2) {
    this.setWindow(time - (time - this.from) / factor, time + (this.to - time) / factor);
  }

  pan(share) {
    const shift = (this.to - this.from) * share;
    this.setWindow(this.from + shift, this.to + shift);
  }

  command(name) {
    if (name === "in") this.zoom(1.5);
    if (name === "out") this.zoom(1 / 1.5);
    if (name === "left") this.pan(-0.2);
    if (name === "right") this.pan(0.2);
    if (name === "fit") this.setWindow(0, this.full);
    if (name === "release") {
      this.pinned = false;
      this.point(null);
    }
  }

  type(event) {
    const keys = { "+": "in", "=": "in", w: "in", "-": "out", s: "out", a: "left", ArrowLeft: "left", d: "right", ArrowRight: "right" };
    const name = { ...keys, 0: "fit", f: "fit", Home: "fit", Escape: "release" }[event.key];
    if (!name || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    this.command(name);
  }

  timeAt(clientX, area) {
    const geometry = this.blocks[0].geometry;
    return geometry.time(clientX - area.getBoundingClientRect().left);
  }

  wheel(event, area) {
    const over = event.clientX - area.getBoundingClientRect().left > GUTTER;
    const whole = this.to - this.from >= this.full * 0.999999;
    const sideways = Math.abs(event.deltaX) > Math.abs(event.deltaY) || event.shiftKey;
    if (!over || (whole && (sideways || event.deltaY > 0))) return; // let the page scroll
    event.preventDefault();
    const pixels = event.deltaMode === 1 ? 16 : 1;
    if (sideways) this.pan(((event.deltaX || event.deltaY) * pixels) / this.blocks[0].geometry.plot);
    else this.zoom(Math.exp(-event.deltaY * pixels * 0.002), this.timeAt(event.clientX, area));
  }

  press(event, area) {
    this.pointers.set(event.pointerId, { x: event.clientX, from: event.clientX, moved: false });
    area.setPointerCapture(event.pointerId);
  }

  move(event, block, area) {
    const pointer = this.pointers.get(event.pointerId);
    if (!pointer) return this.hover(event, block, area);
    const before = [...this.pointers.values()].map(({ x }) => x);
    const shift = event.clientX - pointer.x;
    pointer.x = event.clientX;
    pointer.moved ||= Math.abs(event.clientX - pointer.from) > 3;
    if (!pointer.moved) return undefined;
    area.classList.add("ps-dragging");
    if (before.length === 1) return this.pan(-shift / this.blocks[0].geometry.plot);
    const after = [...this.pointers.values()].map(({ x }) => x);
    const spread = (xs) => Math.max(Math.abs(xs[0] - xs[1]), 8);
    return this.zoom(spread(after) / spread(before), this.timeAt((after[0] + after[1]) / 2, area));
  }

  release(event, block) {
    const pointer = this.pointers.get(event.pointerId);
    this.pointers.delete(event.pointerId);
    block.element.querySelector(".ps-plots").classList.remove("ps-dragging");
    if (!pointer || pointer.moved || event.type === "pointercancel") return;
    const found = this.hit(event.clientX, event.clientY);
    this.pinned = Boolean(found) && !(this.pinned && this.focus && found.box === this.focus.box);
    this.point(found, event);
  }

  hover(event, block, area) {
    const x = event.clientX - area.getBoundingClientRect().left;
    for (const { line } of this.blocks) {
      line.style.display = x >= GUTTER && x <= GUTTER + block.geometry.plot ? "block" : "none";
      line.style.transform = `translateX(${x}px)`;
    }
    if (!this.pinned) this.point(this.hit(event.clientX, event.clientY), event);
  }

  leave() {
    for (const { line } of this.blocks) line.style.display = "none";
    if (!this.pinned) this.point(null);
  }

  // The box under a point of the window, or null.
  hit(clientX, clientY) {
    for (const block of this.blocks) {
      const area = block.rows.getBoundingClientRect();
      const [x, y] = [clientX - area.left, clientY - area.top];
      if (x < GUTTER || x > area.width || y < 0 || y > area.height) continue;
      const row = block.geometry.rowAt(y);
      const slack = (block.geometry.to - block.geometry.from) / block.geometry.plot;
      const box = row < 0 ? -1 : block.model.boxAt(row, block.geometry.time(x), slack);
      if (box >= 0) return { block, box };
    }
    return null;
  }

  // Focus on a box: show what it needs, what needs it, and its times.
  point(found, event) {
    const same = found ? this.focus && this.focus.box === found.box && this.focus.block === found.block : !this.focus;
    if (!same) {
      this.focus = found && { ...found, needs: found.block.model.needs(found.box), neededBy: found.block.model.neededBy(found.box) };
      this.redraw();
      this.tip.hidden = !found;
      if (found) this.tip.replaceChildren(...this.tipLines());
    }
    if (found && event) this.placeTip(event.clientX, event.clientY, found.block.rows.getBoundingClientRect());
  }

  tipLines() {
    const { block, box, needs, neededBy } = this.focus;
    const { model } = block;
    const { unit } = model.data;
    const line = (name, text) => {
      const element = document.createElement("div");
      element.className = name;
      element.textContent = text;
      return element;
    };
    const at = (time) => timeText(time, unit);
    const others = (name, word, list, when) =>
      list.slice(0, 6).map((other) => {
        const sent = other.message < 0 ? "" : `, message ${at(model.data.messages.s[other.message])} to ${at(model.data.messages.e[other.message])}`;
        return line(name, `${word} ${model.label(other.box)} on rank ${model.rank[other.box]}, ${when(other.box)}${sent}`);
      });
    const more = (list) => (list.length > 6 ? [line("ps-times", `and ${list.length - 6} more`)] : []);
    const lines = [line("ps-name", model.label(box))];
    for (const [key, microbatch] of model.actions(box)) {
      const { word, stage, counted } = model.data.keys[key];
      lines.push(line("ps-what", `${word}, stage ${stage}${counted ? `, microbatch ${microbatch}` : ""}`));
    }
    const [start, end] = [model.start[box], model.end[box]];
    lines.push(line("ps-times", `rank ${model.rank[box]}, ${at(start)} to ${at(end)}, takes ${at(end - start)}`));
    const held = model.heldAt(model.rank[box], start);
    if (held !== undefined) lines.push(line("ps-times", `the rank holds ${memoryText(held)} from its start`));
    lines.push(...others("ps-needs", "needs", needs, (other) => `done at ${at(model.end[other])}`), ...more(needs));
    lines.push(...others("ps-feeds", "needed by", neededBy, (other) => `starts at ${at(model.start[other])}`), ...more(neededBy));
    return lines;
  }

  // Below or above the rows, so that it hides none of them; if there is no room, beside the pointer.
  placeTip(x, y, rows) {
    const { offsetWidth: width, offsetHeight: height } = this.tip;
    const below = rows.bottom + 4 + height <= innerHeight;
    const above = !below && rows.top - height >= 0;
    const beside = x + 16 + width > innerWidth ? x - 16 - width : x + 16;
    const left = below || above ? Math.min(x - width / 2, innerWidth - width - 8) : beside;
    const top = below ? rows.bottom + 4 : above ? rows.top - height : Math.min(y + 18, innerHeight - height - 4);
    this.tip.style.transform = `translate(${Math.round(Math.max(left, 4))}px, ${Math.round(Math.max(top, 4))}px)`;
  }

  // Every box with its place on the screen: for tests, and for those who script the page.
  spans() {
    return this.blocks.flatMap((block) => {
      const area = block.rows.getBoundingClientRect();
      const geometry = new Geometry(block.model, block.rows.parentElement.clientWidth, this.from, this.to);
      return Array.from({ length: block.model.size }, (_, box) => {
        const { x, y, width, height } = geometry.box(block.model, box);
        const { model } = block;
        const place = { x: area.left + x, y: area.top + y, width, height };
        return { timeline: model.data.name, rank: model.rank[box], action: model.label(box), start: model.start[box], end: model.end[box], ...place };
      });
    });
  }

  spanAt(clientX, clientY) {
    const found = this.hit(clientX, clientY);
    if (!found) return null;
    const { model } = found.block;
    const names = (list) => list.map(({ box }) => model.label(box));
    return {
      timeline: model.data.name,
      rank: model.rank[found.box],
      action: model.label(found.box),
      start: model.start[found.box],
      end: model.end[found.box],
      needs: names(model.needs(found.box)),
      neededBy: names(model.neededBy(found.box)),
    };
  }
}

for (const button of document.querySelectorAll("[data-ps-theme]")) {
  button.addEventListener("click", () => {
    const root = document.documentElement;
    const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
  });
}

const views = [...document.querySelectorAll("section.ps-section")].map((root) => new View(root));
window.penstock = {
  views,
  open: (root) => views.push(new View(root)), // a section that came later
  spans: () => views.flatMap((view) => view.spans()),
  spanAt: (x, y) => views.map((view) => view.spanAt(x, y)).find(Boolean) || null,
};
