// Markdown that streams: finished blocks are built once, only the last one is built again. Builds nodes; never HTML.

import { make } from "/page/dom.js";

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([^\s`]*)/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])\s+(.*)$/;
const RULE = /^ {0,3}([-*_])(?:\s*\1){2,}\s*$/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*?)\s*#*$/;
const CELLS = /^\s*\|?(.*?)\|?\s*$/;
const SEPARATOR = /^\s*\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$/;
const INLINE = new RegExp(
  [
    "(?<code>(?<tick>`+)(?<coded>.+?)\\k<tick>(?!`))", "\\\\(?<escaped>[!-/:-@\\[-`{-~])",
    "!?\\[(?<label>[^\\]]*)\\]\\((?<target>[^()\\s]*(?:\\([^()\\s]*\\)[^()\\s]*)*)[^)]*\\)",
    "\\*\\*(?<strong>(?=\\S).+?(?<=\\S))\\*\\*", "\\*(?<em>(?=[^\\s*]).+?(?<=[^\\s*]))\\*(?!\\*)",
    "(?<![\\w_])_(?<under>(?=[^\\s_]).+?(?<=[^\\s_]))_(?![\\w_])", "~~(?<gone>.+?)~~", "(?<url>https?://[^\\s<>\"')\\]]+)",
  ].join("|"),
  "gs",
);

export class Markdown {
  constructor(node) {
    this.node = node;
    this.tail = node.appendChild(make("div"));
    this.open = "";
    this.isQueued = false;
  }

  push(text) {
    this.open += text;
    if (this.isQueued) return;
    this.isQueued = true;
    requestAnimationFrame(() => this.show());
  }

  show() {
    this.isQueued = false;
    const end = lastBoundary(this.open);
    if (end) {
      this.tail.before(...blocks(this.open.slice(0, end).split("\n")));
      this.open = this.open.slice(end);
    }
    this.tail.replaceChildren(...blocks(this.open.split("\n")));
  }
}

// Where the last block begins that may still change: behind a blank line outside of fences, before a line that is not
// indented.
function lastBoundary(text) {
  let fence = "", offset = 0, boundary = 0, isBlank = false;
  for (const line of text.split("\n")) {
    const mark = FENCE.exec(line)?.[1];
    if (isBlank && !fence && /^\S/.test(line)) boundary = offset;
    if (fence ? mark?.startsWith(fence) : mark) fence = fence ? "" : mark;
    isBlank = !line.trim();
    offset += line.length + 1;
  }
  return boundary;
}

function blocks(lines) {
  const found = [];
  let at = 0;
  const take = (more) => {
    const start = at;
    while (at < lines.length && more(lines[at])) at++;
    return lines.slice(start, at);
  };
  while (at < lines.length) {
    const line = lines[at];
    let match;
    if (!line.trim()) at++;
    else if ((match = FENCE.exec(line))) {
      at++;
      const code = take((next) => !(next.trim().startsWith(match[1]) && !next.trim().replaceAll(match[1][0], "")));
      at++;
      found.push(make("pre", { tabindex: "0" }, make("code", {}, code.join("\n"))));
    } else if ((match = HEADING.exec(line))) {
      at++;
      found.push(make(`h${Math.min(match[1].length + 2, 6)}`, {}, ...inline(match[2])));
    } else if (RULE.test(line)) {
      at++;
      found.push(make("hr"));
    } else if (line.startsWith(">")) {
      found.push(make("blockquote", {}, ...blocks(take((next) => next.startsWith(">")).map((next) => next.replace(/^> ?/, "")))));
    } else if (ITEM.test(line)) {
      found.push(list(take((next) => ITEM.test(next) || /^\s+\S/.test(next))));
    } else if (line.includes("|") && SEPARATOR.test(lines[at + 1] ?? "")) {
      found.push(table(take((next) => next.includes("|"))));
    } else {
      const first = at;
      const text = take((next) => next.trim() && (at === first || !startsBlock(next)));
      found.push(make("p", {}, ...inline(text.map((next) => next.trim()).join("\n"))));
    }
  }
  return found;
}

const startsBlock = (line) => FENCE.test(line) || HEADING.test(line) || ITEM.test(line) || line.startsWith(">");

function list(lines) {
  const [, indent, marker] = ITEM.exec(lines[0]);
  const isOrdered = /\d/.test(marker);
  const node = make(isOrdered ? "ol" : "ul", isOrdered ? { start: parseInt(marker, 10) } : {});
  let item = null;
  const close = () => item && node.append(make("li", {}, ...unwrapped(blocks(item))));
  for (const line of lines) {
    const match = ITEM.exec(line);
    if (match && match[1].length <= indent.length + 1) {
      close();
      item = [match[3]];
    } else item.push(line.slice(Math.min(indent.length + 2, line.search(/\S/))));
  }
  close();
  return node;
}

// A list's item whose text is one paragraph has no <p>.
const unwrapped = (nodes) => (nodes[0]?.tagName === "P" ? [...nodes[0].childNodes, ...nodes.slice(1)] : nodes);

function table([head, , ...rows]) {
  const row = (line, tag) => make("tr", {}, ...CELLS.exec(line)[1].split("|").map((cell) => make(tag, {}, ...inline(cell.trim()))));
  return make("table", {}, make("thead", {}, row(head, "th")), make("tbody", {}, ...rows.map((line) => row(line, "td"))));
}

function inline(text) {
  const nodes = [];
  let end = 0;
  for (const match of text.matchAll(INLINE)) {
    const { code, coded, escaped, label, target, strong, em, under, gone, url } = match.groups;
    nodes.push(text.slice(end, match.index));
    end = match.index + match[0].length;
    if (code) nodes.push(make("code", {}, coded));
    else if (escaped) nodes.push(escaped);
    else if (strong) nodes.push(make("strong", {}, ...inline(strong)));
    else if (em || under) nodes.push(make("em", {}, ...inline(em || under)));
    else if (gone) nodes.push(make("s", {}, ...inline(gone)));
    else nodes.push(link(url ?? target, url ?? label));
  }
  nodes.push(text.slice(end));
  return nodes.filter((node) => node !== "");
}

// Only to where a click cannot run a script.
function link(target, label) {
  if (!/^(https?:\/\/|mailto:)/i.test(target)) return label;
  return make("a", { href: target, target: "_blank", rel: "noopener noreferrer" }, label);
}
