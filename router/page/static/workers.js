// The table of workers, built when the facts change and then updated in place; and the KV that moves between them.

import { byId, count, duration, make, makeSvg, setAttribute, setText, Sparkline } from "/page/dom.js";

const DENSE = 24; // from so many workers on, one line each
const MOVING_MS = 1400;
const WARM_MS = 10_000; // how long an edge stays to be seen
const MAX_MOVING = 24;

export class Workers {
  constructor(onDrain, onRole) {
    this.actions = { onDrain, onRole };
    this.rows = new Map(); // by address, in the order of the figures
    this.edges = new Map(); // by "from to"
    this.positions = null; // of rows in the drawing; null: to be measured
    new ResizeObserver(() => (this.positions = null)).observe(byId("flow"));
  }

  // Rows of workers that stay are kept, with their history.
  take({ workers, columns, router }) {
    this.columns = Object.fromEntries(columns.map((name, index) => [name, index]));
    const rows = workers.map((worker) => this.rows.get(worker.address)?.fits(worker) ?? new Row(worker, this.actions));
    this.rows = new Map(rows.map((row) => [row.address, row]));
    for (const role of ["prefill", "decode"]) {
      const sorted = rows.filter((row) => row.role === role).sort((one, other) => one.id.localeCompare(other.id, "en", { numeric: true }));
      const hosts = Map.groupBy(sorted, (row) => row.host);
      byId(role).replaceChildren(
        ...[...hosts].map(([host, found]) =>
          make("div.host", {}, make("h3", {}, host), make("ul", { role: "list" }, ...found.map((row) => row.node))),
        ),
      );
      setText(document.querySelector(`#${role}-title span`), count(sorted.length));
    }
    byId("flow").classList.toggle("dense", rows.length >= DENSE);
    for (const row of rows) row.node.classList.toggle("operable", router.can_operate);
    this.positions = null;
  }

  // Sums over all workers, for the totals.
  show(now) {
    const sums = { output: 0, prompt: 0, blocks: 0, used: 0 };
    const c = this.columns;
    let index = 0;
    for (const row of this.rows.values()) {
      const figures = now.workers[index++];
      row.show(figures, c);
      sums.output += figures[c.decode_rate];
      sums.prompt += figures[c.prefill_rate];
      sums.blocks += figures[c.blocks];
      sums.used += figures[c.blocks] - figures[c.free] - figures[c.cached];
    }
    this.showPulls(now.pulls);
    return sums;
  }

  showPulls(pulls) {
    const tokens = pulls.reduce((sum, pull) => sum + pull.tokens, 0);
    setText(byId("pulls"), pulls.length ? `${count(pulls.length)} KV transfer${pulls.length > 1 ? "s" : ""}, ${count(tokens)} tokens` : "no KV transfers");
    const at = performance.now();
    for (const pull of pulls.slice(-MAX_MOVING)) {
      const name = `${pull.from} ${pull.to}`;
      const edge = this.edges.get(name) ?? { path: byId("edges").appendChild(makeSvg("path")), ...pull };
      edge.time = at;
      this.edges.set(name, edge);
    }
    if (!this.edges.size) return;
    this.positions ??= this.measure();
    for (const [name, edge] of this.edges) {
      const from = this.positions.get(edge.from);
      const to = this.positions.get(edge.to);
      if (at - edge.time > WARM_MS || !from || !to) {
        edge.path.remove();
        this.edges.delete(name);
        continue;
      }
      setAttribute(edge.path, "class", at - edge.time < MOVING_MS ? "moving" : "warm");
      const middle = from.x === to.x ? this.width * 0.4 : this.width / 2;
      setAttribute(edge.path, "d", `M${from.x} ${from.y}C${middle} ${from.y} ${middle} ${to.y} ${to.x} ${to.y}`);
    }
  }

  measure() {
    const drawing = byId("edges").getBoundingClientRect();
    this.width = drawing.width;
    return new Map(
      [...this.rows.values()].map((row) => {
        const box = row.node.getBoundingClientRect();
        return [row.id, { x: row.role === "prefill" ? 0 : drawing.width, y: box.top + box.height / 2 - drawing.top }];
      }),
    );
  }
}

class Row {
  constructor(worker, { onDrain, onRole }) {
    Object.assign(this, { role: worker.role, host: worker.host, address: worker.address });
    this.name = make("b");
    this.dot = make("i.dot");
    this.state = make("span.state");
    this.kv = make("div.kv", { role: "meter", "aria-label": "KV blocks in use", "aria-valuemin": "0" });
    this.cached = this.kv.appendChild(make("i.cached"));
    this.used = this.kv.appendChild(make("i.used"));
    this.running = make("b", {}, "0");
    this.waiting = make("b", {}, "0");
    this.step = make("b", {}, "–");
    this.leases = make("b", {}, "0");
    this.rate = make("span", {}, "0");
    this.button = make("button.plain", { type: "button" }, "Drain");
    this.button.addEventListener("click", () => onDrain(this.id, this.button.textContent === "Drain"));
    this.otherRole = this.role === "prefill" ? "decode" : "prefill";
    this.change = make("button.plain", { type: "button" }, `To ${this.otherRole}`);
    this.change.addEventListener("click", () => onRole(this.id, this.otherRole));
    const spark = makeSvg("svg", { class: "spark", "aria-hidden": "true" });
    this.spark = new Sparkline(spark);
    this.node = make(
      "li.worker", {},
      make("div.name", {}, this.dot, this.name, this.state, make("span.actions", {}, this.change, this.button)),
      make("div.rate", {}, this.rate, make("small", {}, " tok/s")),
      this.kv, spark,
      make("div.counts", {}, make("span", {}, this.running, " run"), make("span", {}, this.waiting, " wait"),
        make("span", {}, this.step, " step"), make("span", {}, this.leases, " leases")),
    );
    this.fits(worker);
  }

  // The row with these facts; null when another role is at the address now. One that is lost has no name: it keeps its.
  fits(worker) {
    if (worker.role !== this.role) return null;
    if (worker.id !== worker.address || !this.id) this.id = worker.id;
    setText(this.name, this.id);
    setAttribute(this.change, "aria-label", `Use ${this.id} for ${this.otherRole}`);
    this.device = worker.device ?? "";
    this.refused = worker.refused;
    const details = [worker.model, worker.quantization, worker.attention, worker.transports?.join(", "), worker.version];
    this.node.title = details.filter(Boolean).join(" · ");
    return this;
  }

  show(figures, c) {
    const state = figures[c.state];
    if (this.known && this.known !== state) setText(byId("news"), `${this.id} is ${state.replace("_", " ")}`);
    this.known = state;
    setAttribute(this.dot, "data-state", state);
    setAttribute(this.node, "data-state", state);
    setText(this.state, state === "ready" ? this.device : this.refused || state.replace("_", " "));
    const [blocks, free, cached] = [figures[c.blocks], figures[c.free], figures[c.cached]];
    const used = blocks - free - cached;
    setAttribute(this.kv, "aria-valuemax", String(blocks));
    setAttribute(this.kv, "aria-valuenow", String(used));
    scale(this.used, blocks ? used / blocks : 0);
    scale(this.cached, blocks ? (used + cached) / blocks : 0);
    setText(this.running, count(figures[c.running]));
    setText(this.waiting, count(figures[c.waiting] + figures[c.loading]));
    setText(this.leases, count(figures[c.leases]));
    setText(this.step, figures[c.step_ms] ? duration(figures[c.step_ms] / 1e3) : "–");
    const rate = figures[this.role === "prefill" ? c.prefill_rate : c.decode_rate];
    setText(this.rate, count(rate));
    this.spark.add(rate);
    setText(this.button, state === "draining" ? "Undrain" : "Drain");
    setAttribute(this.button, "aria-label", `${this.button.textContent} ${this.id}`);
  }
}

function scale(node, share) {
  const value = `scaleX(${share.toFixed(4)})`;
  if (node.style.transform !== value) node.style.transform = value;
}
