// The page asks, draws what comes back, and keeps its question in the address, so that it can be sent to somebody.
"use strict";
{
  const form = document.getElementById("question");
  const place = document.getElementById("timeline");
  const usual = { schedule: "zbv", ranks: 4, microbatches: 8, forward: 1, backward_input: 1, backward_weight: 1, latency: 0, transfer: 0, kept_for_weights: 1 };
  const numbers = ["ranks", "microbatches", "stages_per_rank", "forward", "backward_input", "backward_weight", "latency", "transfer", "kept_for_weights", "memory"];

  const complain = (text) => {
    const box = document.getElementById("problem");
    box.textContent = text || "";
    box.hidden = !text;
  };

  // -- who answers: the server that handed out the token, or Python in a worker of this page

  const server = (token) => async (asked) => {
    const reply = await fetch("ask", { method: "POST", body: JSON.stringify(asked), headers: { "Content-Type": "application/json", "X-Penstock-Token": token } });
    if (!reply.ok) throw new Error(`the server answered ${reply.status}: ${await reply.text()}`);
    return reply.json();
  };

  const inPage = () => {
    const waiting = new Map();
    let count = 0;
    const started = new Promise((done, fail) => {
      const script = document.createElement("script");
      script.src = "python.js";
      script.addEventListener("load", done);
      script.addEventListener("error", () => fail(new Error("python.js, which lay beside this page, is not there")));
      document.head.append(script);
    }).then(() => {
      const { worker: source, files } = globalThis.penstockPython;
      // Of the workers that Pyodide takes, a page from a folder may start only those whose source is their address.
      const worker = new Worker(`data:text/javascript,${encodeURIComponent(source)}`, { type: "module" });
      worker.addEventListener("message", ({ data }) => {
        if (data.status) document.getElementById("status").textContent = data.status;
        if (data.problem) complain(data.problem);
        if (!waiting.has(data.number)) return;
        waiting.get(data.number)(JSON.parse(data.text));
        waiting.delete(data.number);
      });
      worker.addEventListener("error", (event) => complain(`Python could not be started in this page: ${event.message}`));
      worker.postMessage({ files });
      delete globalThis.penstockPython;
      return worker;
    });
    return async (asked) => {
      const worker = await started;
      return new Promise((done) => {
        waiting.set(++count, done);
        worker.postMessage({ number: count, text: JSON.stringify(asked) });
      });
    };
  };

  const { token } = document.body.dataset;
  const ask = token === undefined ? inPage() : server(token);

  // -- the question, in the form and in the address

  const read = () => {
    const question = { schedule: form.elements.schedule.value, messages: form.elements.messages.checked };
    for (const name of numbers) {
      const text = form.elements[name].value.trim();
      if (text !== "") question[name] = Number(text);
    }
    const speeds = form.elements.speeds.value.split(/[\s,;]+/).filter(Boolean).map(Number);
    if (speeds.length) question.speeds = speeds;
    const links = form.elements.links.value.split(/[\s,;]+/).filter(Boolean);
    if (links.length) question.links = links;
    return question;
  };

  const fill = (question) => {
    for (const name of ["schedule", ...numbers]) form.elements[name].value = question[name] ?? "";
    for (const name of ["speeds", "links"]) form.elements[name].value = (question[name] || []).join(", ");
    form.elements.messages.checked = Boolean(question.messages);
    follow();
  };

  const follow = () => {
    for (const slider of form.querySelectorAll("[data-for]")) slider.value = form.elements[slider.dataset.for].value;
  };

  const fromAddress = () => {
    const given = Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
    for (const name of numbers) if (name in given) given[name] = Number(given[name]);
    if (given.speeds) given.speeds = given.speeds.split(",").map(Number);
    if (given.links) given.links = given.links.split(",");
    given.messages = given.messages === "true";
    return { ...usual, ...given };
  };

  const toAddress = (question) => {
    const kept = Object.entries(question).filter(([name, value]) => value !== usual[name] && value !== false);
    history.replaceState(null, "", `#${new URLSearchParams(kept.map(([name, value]) => [name, String(value)]))}`);
  };

  // -- asking: one question at a time, and only the newest waits

  let running = false;
  let again = false;
  let asked = null;

  const update = async () => {
    follow();
    if (!form.checkValidity()) return;
    again = true;
    if (running) return;
    running = true;
    while (again) {
      again = false;
      asked = read();
      toAddress(asked);
      try {
        await show(asked);
        if (!again) await compare(asked);
      } catch (error) {
        complain(String(error.message || error));
      }
    }
    running = false;
  };

  const show = async (question) => {
    const found = await ask({ kind: "show", question });
    complain(found.error);
    if (found.error) return;
    for (const view of penstock.views.splice(0)) view.close();
    place.innerHTML = found.html;
    place.classList.toggle("st-over", !found.fits);
    if (!found.fits) {
      const told = `A rank holds ${found.figures["peak memory"]} at its peak, more than the limit of ${question.memory}.`;
      place.prepend(Object.assign(document.createElement("p"), { className: "st-note", textContent: told }));
    }
    penstock.open(place.querySelector("section"));
    const command = document.getElementById("command");  // a line may break between words, not after the dashes of an option
    command.replaceChildren(...(found.command || "").split(/( )/).map((word) => {
      const part = document.createElement("span");
      part.textContent = word;
      return part;
    }));
    document.body.dataset.shown = JSON.stringify({ ...question, ...found.figures });
  };

  // -- the comparison: rows with bars, and memory against makespan

  const compare = async (question) => {
    const { rows, error } = await ask({ kind: "compare", question });
    if (error) return;
    const longest = Math.max(...rows.map((row) => row.makespan));
    const body = document.getElementById("rows");
    body.replaceChildren(...rows.map((row) => rowOf(row, longest, question)));
    scatter(rows, question);
  };

  const pick = (name) => {
    form.elements.schedule.value = name;
    update();
  };

  const text = (value) => Number(value.toPrecision(4)).toString();

  const rowOf = (row, longest, question) => {
    const line = document.createElement("tr");
    const button = Object.assign(document.createElement("button"), { type: "button", textContent: row.schedule, title: row.title });
    const bar = document.createElement("i");
    bar.style.width = `${(100 * row.makespan) / longest}%`;
    bar.style.setProperty("--busy", `${100 * (1 - row.bubble)}%`);
    const cells = [button, row.stages_per_rank, text(row.makespan), bar, `${(100 * row.bubble).toFixed(1)}%`, text(row.peak)];
    line.append(...cells.map((content) => {
      const cell = document.createElement("td");
      cell.append(content);
      return cell;
    }));
    line.children[3].className = "st-bar";
    line.setAttribute("aria-selected", row.schedule === question.schedule);
    line.classList.toggle("st-too-large", !row.fits);
    line.addEventListener("click", () => pick(row.schedule));
    return line;
  };

  const scatter = (rows, question) => {
    const svg = document.getElementById("scatter");
    const draw = (kind, attributes, words) => {
      const made = document.createElementNS("http://www.w3.org/2000/svg", kind);
      for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
      if (words !== undefined) made.textContent = words;
      svg.append(made);
      return made;
    };
    const [left, right, top, bottom] = [44, 408, 14, 262];
    const span = (values) => [Math.min(...values), Math.max(...values)];
    const [fast, slow] = span(rows.map((row) => row.makespan));
    const [, most] = span(rows.map((row) => row.peak));
    const x = (time) => left + ((time - fast * 0.98) / (slow * 1.02 - fast * 0.98)) * (right - left);
    const y = (held) => bottom - (held / (most * 1.08)) * (bottom - top);
    svg.replaceChildren();
    draw("path", { class: "axis", d: `M${left} ${top}V${bottom}H${right}`, fill: "none" });
    for (const share of [0, 0.5, 1]) {
      draw("text", { x: left - 6, y: y(most * share) + 4, "text-anchor": "end" }, text(most * share));
      const time = fast + (slow - fast) * share;
      draw("text", { x: x(time), y: bottom + 16, "text-anchor": "middle" }, text(time));
    }
    draw("text", { x: right, y: bottom + 32, "text-anchor": "end" }, "makespan →");
    draw("text", { x: left, y: top - 4 }, "↑ peak memory of a rank");
    if (question.memory !== undefined && question.memory <= most * 1.08) {
      draw("line", { class: "limit", x1: left, x2: right, y1: y(question.memory), y2: y(question.memory) });
    }
    const named = new Map();  // those that no other beats, by their place: schedules that are equal share it
    for (const row of rows) {
      const best = rows.every((other) => other === row || other.makespan > row.makespan || other.peak > row.peak || (other.makespan === row.makespan && other.peak === row.peak));
      const names = [best && row.fits && "best", !row.fits && "st-too-large", row.schedule === question.schedule && "chosen"];
      const dot = draw("circle", { cx: x(row.makespan), cy: y(row.peak), r: 5.5, class: names.filter(Boolean).join(" "), "data-schedule": row.schedule });
      const hint = document.createElementNS("http://www.w3.org/2000/svg", "title");
      hint.textContent = `${row.schedule}: makespan ${text(row.makespan)}, peak ${text(row.peak)}`;
      dot.append(hint);
      dot.addEventListener("click", () => pick(row.schedule));
      const place = `${x(row.makespan)} ${y(row.peak)}`;
      if (best && row.fits) named.set(place, [...(named.get(place) || []), row.schedule]);
    }
    const taken = rows.map((row) => ({ x: x(row.makespan) - 6, y: y(row.peak) - 6, width: 12, height: 12 }));
    for (const [place, schedules] of named) {
      const [at, height] = place.split(" ").map(Number);
      const label = draw("text", {}, schedules.join(", "));
      const width = label.getComputedTextLength();
      const free = (box) => box.x > left && box.x + box.width < right + 6 && taken.every((other) =>
        box.x + box.width < other.x || other.x + other.width < box.x || box.y + box.height < other.y || other.y + other.height < box.y);
      const places = [[9, -5], [9, 20], [-9 - width, -5], [-9 - width, 20], [9, -26], [9, 32]].map(([right_by, down_by]) =>
        ({ x: at + right_by, y: height + down_by - 10, width, height: 12 }));
      const box = places.find(free) || places[0];
      taken.push(box);
      label.setAttribute("x", box.x);
      label.setAttribute("y", box.y + 10);
    }
  };

  // -- files

  for (const button of document.querySelectorAll("[data-save]")) {
    button.addEventListener("click", async () => {
      const found = await ask({ kind: button.dataset.save, question: read() });
      if (found.error) return complain(found.error);
      const link = document.createElement("a");
      link.href = URL.createObjectURL(new Blob([found.text], { type: "text/plain" }));
      link.download = found.name;
      link.click();
      URL.revokeObjectURL(link.href);
      return undefined;
    });
  }

  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("input", ({ target }) => {
    if (target.dataset.for) form.elements[target.dataset.for].value = target.value;
    update();
  });
  addEventListener("hashchange", () => update(fill(fromAddress())));
  fill(fromAddress());
  update();
}
