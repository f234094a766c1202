// The playground: one conversation, streamed from /v1/chat/completions.

import { ApiError, ask, events } from "/page/api.js";
import { byId, count, duration, make, setText } from "/page/dom.js";
import { Markdown } from "/page/markdown.js";

const NUMBERS = ["temperature", "top_p", "top_k", "max_tokens", "seed"];
const log = byId("messages");
const text = byId("text");
let messages = [];
let pending = []; // tool calls that wait for their results
let running = null; // AbortController of the answer that streams

export async function startChat() {
  byId("ask").addEventListener("submit", (submitted) => {
    submitted.preventDefault();
    send();
  });
  text.addEventListener("keydown", (pressed) => {
    if (pressed.key === "Enter" && !pressed.shiftKey && !pressed.isComposing) {
      pressed.preventDefault();
      send();
    }
  });
  byId("stop").addEventListener("click", () => running?.abort());
  byId("clear").addEventListener("click", clear);
  await listModels();
}

export async function listModels() {
  const { data } = await (await ask("/v1/models")).json();
  byId("model").replaceChildren(...data.map(({ id }) => make("option", { value: id }, id)));
}

function clear() {
  running?.abort();
  messages = [];
  pending = [];
  log.replaceChildren();
  label();
  text.focus();
}

function label() {
  setText(byId("text-label"), pending.length ? `Result of ${pending[0].function.name}` : "Message");
}

function body() {
  const field = (name) => document.querySelector(`#options [name=${name}]`).value.trim();
  const told = { model: byId("model").value, messages, stream: true, stream_options: { include_usage: true } };
  for (const name of NUMBERS) if (field(name)) told[name] = Number(field(name));
  if (field("system")) told.messages = [{ role: "system", content: field("system") }, ...messages];
  if (field("tools")) told.tools = JSON.parse(field("tools"));
  return told;
}

async function send() {
  const content = text.value.trim();
  if (!content || running) return;
  text.value = "";
  const call = pending.shift();
  messages.push(call ? { role: "tool", tool_call_id: call.id, content } : { role: "user", content });
  log.append(make(`div.message.${call ? "tool" : "user"}`, {}, content));
  label();
  if (!pending.length) await answer();
}

async function answer() {
  const shown = new Answer();
  running = new AbortController();
  byId("stop").hidden = false;
  byId("send").disabled = true;
  log.setAttribute("aria-busy", "true"); // read out when it is complete, not by the token
  try {
    await shown.read(await ask("/v1/chat/completions", { method: "POST", body: body(), signal: running.signal }));
  } catch (error) {
    if (error.name === "AbortError") shown.finish("stopped");
    else shown.fail(error instanceof SyntaxError ? `The tools are not JSON: ${error.message}` : error.message);
    if (error instanceof ApiError && error.status === 401) document.dispatchEvent(new Event("key-needed"));
  } finally {
    running = null;
    byId("stop").hidden = true;
    byId("send").disabled = false;
    log.removeAttribute("aria-busy");
    if (shown.content || shown.calls.length) messages.push(shown.message());
    pending = [...shown.calls];
    label();
    text.focus();
  }
}

// One answer of the model, while it comes and after.
class Answer {
  constructor() {
    this.content = "";
    this.calls = [];
    this.numTokens = 0;
    this.started = performance.now();
    this.first = 0;
    this.told = make("p.told", {}, "waiting for the first token");
    this.text = make("div.text");
    this.node = log.appendChild(make("div.message.assistant", {}, this.text, this.told));
    this.markdown = new Markdown(this.text);
    this.follow(true);
  }

  async read(response) {
    this.id = response.headers.get("x-mini-infer-id") ?? "";
    let reason = "";
    for await (const { data } of events(response)) {
      if (data === "[DONE]") break;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Error(chunk.error.message);
      if (chunk.usage) this.usage = chunk.usage;
      const choice = chunk.choices?.[0];
      if (!choice) continue;
      this.take(choice.delta ?? {});
      reason = choice.finish_reason ?? reason;
    }
    this.finish(reason);
  }

  take(delta) {
    const thought = delta.reasoning ?? delta.reasoning_content;
    if (!thought && !delta.content && !delta.tool_calls) return;
    const isFollowed = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
    this.first ||= performance.now();
    if (thought) this.think(thought);
    if (delta.content) {
      this.endThought();
      this.content += delta.content;
      this.markdown.push(delta.content);
    }
    for (const piece of delta.tool_calls ?? []) this.call(piece);
    this.numTokens++;
    const seconds = (performance.now() - this.first) / 1e3;
    const rate = seconds > 0.2 ? ` · ${(this.numTokens / seconds).toFixed(1)} tokens/s` : "";
    setText(this.told, `first token ${duration((this.first - this.started) / 1e3)}${rate}`);
    this.follow(isFollowed);
  }

  think(thought) {
    if (!this.thought) {
      this.thought = make("div");
      this.summary = make("summary", {}, "Thinking");
      this.text.before(make("details.think", {}, this.summary, this.thought));
    }
    this.thought.append(thought);
  }

  endThought() {
    if (!this.thought || this.isThought) return;
    this.isThought = true;
    setText(this.summary, `Thought for ${duration((performance.now() - this.first) / 1e3)}`);
  }

  call({ index, id, function: called }) {
    this.endThought();
    let call = this.calls[index];
    if (!call) {
      call = this.calls[index] = { id, type: "function", function: { name: "", arguments: "" } };
      call.nodes = [make("b"), make("pre")];
      this.told.before(make("div.call", {}, ...call.nodes));
    }
    call.function.name += called?.name ?? "";
    call.function.arguments += called?.arguments ?? "";
    setText(call.nodes[0], call.function.name);
    setText(call.nodes[1], call.function.arguments);
  }

  finish(reason) {
    this.endThought();
    this.markdown.show();
    const now = performance.now();
    const tokens = this.usage?.completion_tokens ?? this.numTokens;
    const cached = this.usage?.prompt_tokens_details?.cached_tokens ?? 0;
    const pieces = [`${count(tokens)} token${tokens === 1 ? "" : "s"}`];
    if (this.first) pieces.unshift(`first token ${duration((this.first - this.started) / 1e3)}`);
    if (tokens > 1 && now - this.first > 50) pieces.push(`${((tokens - 1) / ((now - this.first) / 1e3)).toFixed(1)} tokens/s`);
    if (this.usage) pieces.push(`prompt ${count(this.usage.prompt_tokens)}, ${count(cached)} cached`);
    if (reason && reason !== "stop") pieces.push(reason);
    setText(this.told, pieces.join(" · "));
    if (this.id) this.told.title = this.id;
  }

  fail(message) {
    this.markdown.show();
    this.told.replaceChildren(make("span.error", { role: "alert" }, message));
  }

  message() {
    const calls = this.calls.map(({ nodes, ...call }) => call);
    return { role: "assistant", content: this.content || null, ...(calls.length ? { tool_calls: calls } : {}) };
  }

  follow(isFollowed) {
    if (isFollowed) requestAnimationFrame(() => (log.scrollTop = log.scrollHeight));
  }
}
