// Building nodes and changing only what differs. Text always goes in as text: nothing here parses HTML.

const SVG = "http://www.w3.org/2000/svg";

export const byId = (id) => document.getElementById(id);

// make("li.worker", {title: "..."}, child, "text", ...)
export function make(kind, attributes = {}, ...children) {
  const [tag, ...classes] = kind.split(".");
  const node = document.createElement(tag);
  if (classes.length) node.className = classes.join(" ");
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

export function makeSvg(tag, attributes = {}) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  return node;
}

export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

export function setAttribute(node, name, value) {
  if (node.getAttribute(name) !== value) node.setAttribute(name, value);
}

export const count = (value) => Math.round(value).toLocaleString("en");

export function duration(seconds) {
  if (seconds < 0.0995) return `${(seconds * 1e3).toFixed(1)} ms`;
  return seconds < 0.9995 ? `${Math.round(seconds * 1e3)} ms` : `${seconds.toFixed(2)} s`;
}

// A line of the last values in an <svg>, with the area below it.
export class Sparkline {
  static LENGTH = 60;

  constructor(svg) {
    this.values = [];
    this.area = svg.appendChild(makeSvg("path", { class: "area" }));
    this.line = svg.appendChild(makeSvg("path"));
    svg.setAttribute("viewBox", `0 0 ${Sparkline.LENGTH - 1} 20`);
    svg.setAttribute("preserveAspectRatio", "none");
  }

  add(value) {
    const { values } = this;
    values.push(value);
    if (values.length > Sparkline.LENGTH) values.shift();
    const top = Math.max(...values, 1e-9);
    const left = Sparkline.LENGTH - values.length;
    let points = "";
    for (let index = 0; index < values.length; index++) {
      points += `${index ? "L" : "M"}${left + index} ${(19 - (18 * values[index]) / top).toFixed(1)}`;
    }
    if (points === this.shown) return;
    this.shown = points;
    this.line.setAttribute("d", points);
    this.area.setAttribute("d", `${points}V20H${left}Z`);
  }
}
