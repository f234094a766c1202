// The last requests, newest first: where each one's time went. Bars are drawn to one scale; a row opens to the spans,
// which sum to the total.

import { byId, count, duration, make, setAttribute, setText } from "/page/dom.js";

const PHASES = {
  route: "router", queue: "queue", prefill: "prefill", pull: "KV pull", decode: "decode", wait: "wait for a worker",
  replay: "replay after a move",
};
const rows = new Map(); // by id

export function startJourneys() {
  const shown = Object.entries(PHASES).filter(([phase]) => phase !== "route");
  shown[0][1] = "router, queue";
  byId("phases").append(...shown.map(([phase, name]) => make("span", {}, make("i", { "data-phase": phase }), name)));
}

export function showJourneys(requests) {
  byId("no-journeys").hidden = requests.length > 0;
  const longest = Math.max(...requests.map((request) => request.total), 0.001);
  const found = requests.map((request) => {
    const row = rows.get(request.id) ?? new Row(request.id);
    rows.set(request.id, row);
    row.show(request, longest);
    return row;
  });
  const list = byId("journeys");
  if (found.some((row, index) => list.children[index] !== row.node) || list.children.length > found.length) {
    list.replaceChildren(...found.map((row) => row.node));
    const kept = new Set(found);
    for (const [id, row] of rows) if (!kept.has(row)) rows.delete(id);
  }
}

class Row {
  constructor(id) {
    this.tokens = make("span.tokens");
    this.track = make("span.track", { role: "img" });
    this.time = make("span.time");
    this.state = make("span.state");
    this.spans = make("tbody");
    this.total = make("td");
    const name = make("span.id", { title: id }, id.replace(/^(chatcmpl|cmpl)-/, "").slice(0, 8));
    this.node = make("li", {}, make("details", {},
      make("summary", {}, name, this.tokens, this.track, this.time, this.state),
      make("table", {}, make("caption.hidden", {}, `Time line of ${id}`), this.spans,
        make("tfoot", {}, make("tr", {}, make("th", { scope: "row" }, "total"), make("td"), this.total)))));
  }

  show(request, longest) {
    const key = `${request.state} ${request.total} ${longest}`;
    if (key === this.key) return;
    this.key = key;
    const { spans, total } = request;
    setText(this.tokens, `${count(request.prompt)} → ${count(request.output)}`);
    setAttribute(this.tokens, "title", `${request.prompt} prompt tokens, ${request.cached} cached; ${request.output} of the answer`);
    setText(this.time, duration(total));
    setText(this.state, request.moves ? `${request.state}, moved` : request.state);
    setAttribute(this.state, "data-state", request.state);
    setText(this.total, duration(total));
    setAttribute(this.track, "aria-label", spans.map(([phase, worker, seconds]) => `${PHASES[phase]} ${worker} ${duration(seconds)}`).join(", "));
    while (this.track.children.length > spans.length) this.track.lastChild.remove();
    while (this.track.children.length < spans.length) this.track.append(make("i"));
    spans.forEach(([phase, , seconds], index) => {
      const bar = this.track.children[index];
      setAttribute(bar, "data-phase", phase);
      bar.style.width = `${((100 * seconds) / longest).toFixed(2)}%`;
    });
    this.spans.replaceChildren(...spans.map(([phase, worker, seconds]) =>
      make("tr", {}, make("th", { scope: "row" }, PHASES[phase]), make("td", {}, worker), make("td", {}, duration(seconds)))));
  }
}
