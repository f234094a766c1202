// Puts the page together: the stream of the cluster's events, the dialogs, the theme.

import { ApiError, ask, events, key } from "/page/api.js";
import { listModels, startChat } from "/page/chat.js";
import { byId, count, setText, Sparkline } from "/page/dom.js";
import { showJourneys, startJourneys } from "/page/journeys.js";
import { Workers } from "/page/workers.js";

const RETRY_MS = 2000;
const workers = new Workers(changeDrain, changeRole);
const totals = new Map(
  [...document.querySelectorAll("[data-total]")].map((node) => [
    node.dataset.total, { node, spark: new Sparkline(node.nextElementSibling) },
  ]),
);

// -- the cluster's events -------------------------------------------------------------------------------------------

let stream = new AbortController();

async function watch() {
  for (;;) {
    try {
      setLink("connecting", "connecting");
      for await (const { event, data } of events(await ask("/cluster/events", { signal: stream.signal }))) {
        if (event === "facts") takeFacts(JSON.parse(data));
        else if (event === "now") show(JSON.parse(data));
      }
      setLink("lost", "router has gone");
    } catch (error) {
      if (error instanceof ApiError && error.status === 401) {
        setLink("lost", "API key needed");
        if (!(await askForKey())) await new Promise((done) => document.addEventListener("key-given", done, { once: true }));
      } else setLink("lost", "no connection");
    }
    if (stream.signal.aborted) stream = new AbortController();
    else await new Promise((done) => setTimeout(done, RETRY_MS));
  }
}

function setLink(state, told) {
  byId("link").firstElementChild.dataset.state = state;
  setText(byId("link").lastElementChild, told);
}

function takeFacts(facts) {
  const { router } = facts;
  setText(byId("router"), `${facts.models.join(", ")} · router ${router.host}, process ${router.pid} · policy ${router.policy} · ${router.version}`);
  workers.take(facts);
}

function show(now) {
  setLink("live", "live");
  const sums = workers.show(now);
  const counts = Object.values(now.models);
  const values = {
    ...sums,
    running: counts.reduce((sum, [running]) => sum + running, 0),
    waiting: counts.reduce((sum, [, waiting]) => sum + waiting, 0),
    kv: sums.blocks ? (100 * sums.used) / sums.blocks : 0,
  };
  for (const [name, { node, spark }] of totals) {
    setText(node, name === "kv" ? `${values.kv.toFixed(values.kv < 10 ? 1 : 0)}%` : count(values[name]));
    spark.add(values[name]);
  }
  showJourneys(now.requests);
}

// -- dialogs --------------------------------------------------------------------------------------------------------

function opened(dialog) {
  dialog.returnValue = "";
  dialog.showModal();
  return new Promise((done) => dialog.addEventListener("close", () => done(dialog.returnValue === "ok"), { once: true }));
}

let keyAsked = null; // one dialog, however many requests ask for a key

// Whether there is another key now.
function askForKey() {
  keyAsked ??= (async () => {
    byId("key-value").value = key.get();
    const isGiven = await opened(byId("key-dialog"));
    keyAsked = null;
    if (!isGiven) return false;
    key.set(byId("key-value").value.trim());
    stream.abort();
    document.dispatchEvent(new Event("key-given"));
    await listModels().catch(() => {}); // a wrong key: the stream asks for another
    return true;
  })();
  return keyAsked;
}

function isConfirmed(title, told, ok) {
  setText(byId("confirm-title"), title);
  setText(byId("confirm-told"), told);
  setText(byId("confirm-ok"), ok);
  return opened(byId("confirm-dialog"));
}

async function changeDrain(id, isDrain, force = false, told = "") {
  const meaning = "It takes no new requests, and its process ends when the open ones have, after 30 seconds at the latest.";
  if (isDrain && !(await isConfirmed(`Drain ${id}?`, told || meaning, force ? "Drain anyway" : "Drain"))) return;
  try {
    const query = force ? "?force=true" : "";
    await ask(`/v1/workers/${encodeURIComponent(id)}/${isDrain ? "drain" : "undrain"}${query}`, { method: "POST" });
    setText(byId("news"), isDrain ? `${id} drains` : `${id} is taken back`);
  } catch (error) {
    if (error.status === 409) await changeDrain(id, true, true, error.message.replace(/: add .*/, "."));
    else if (error.status === 401) await askForKey();
    else setText(byId("news"), error.message);
  }
}

async function changeRole(id, role, told = "") {
  const meaning = "This router sends it other requests from now on, until it is told otherwise or ends. Open ones stay where they are.";
  if (!(await isConfirmed(`Use ${id} for ${role}?`, told || meaning, told ? "Try again" : "Change role"))) return;
  try {
    await ask(`/v1/workers/${encodeURIComponent(id)}/role`, { method: "POST", body: { role } });
    setText(byId("news"), `${id} is a ${role} worker`);
  } catch (error) {
    if (error.status === 401) await askForKey();
    else await changeRole(id, role, error.message);
  }
}

// -- the frame ------------------------------------------------------------------------------------------------------

const THEMES = ["auto", "light", "dark"];

function setTheme(theme) {
  if (theme === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  setText(byId("theme"), `Theme: ${theme}`);
  localStorage.setItem("mini-infer-theme", theme);
}

setTheme(THEMES.find((theme) => theme === localStorage.getItem("mini-infer-theme")) ?? "auto");
byId("theme").addEventListener("click", () => {
  const theme = document.documentElement.dataset.theme ?? "auto";
  setTheme(THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length]);
});
byId("key").addEventListener("click", askForKey);
document.addEventListener("key-needed", askForKey);
for (const button of document.querySelectorAll("[data-show]")) {
  button.addEventListener("click", () => {
    document.documentElement.dataset.view = button.dataset.show;
    for (const other of document.querySelectorAll("[data-show]")) other.setAttribute("aria-pressed", String(other === button));
  });
}
startJourneys();
startChat().catch(() => {}); // without a key there is no list of models yet; `watch` asks for one
watch();
