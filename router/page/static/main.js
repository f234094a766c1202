import { ask, events } from "/page/api.js";

document.getElementById("ask").addEventListener("submit", async (submitted) => {
  submitted.preventDefault();
  const answer = document.getElementById("answer");
  answer.textContent = "";
  const body = { messages: [{ role: "user", content: document.getElementById("text").value }], stream: true };
  for await (const { data } of events(await ask("/v1/chat/completions", { method: "POST", body }))) {
    if (data !== "[DONE]") answer.textContent += JSON.parse(data).choices[0]?.delta.content ?? "";
  }
});

let facts;
for await (const { event, data } of events(await ask("/cluster/events"))) {
  if (event === "facts") facts = JSON.parse(data);
  else {
    const rows = JSON.parse(data).workers.map((row, index) => {
      const item = document.createElement("li");
      item.textContent = `${facts.workers[index].id}: ${row.join(" ")}`;
      return item;
    });
    document.getElementById("workers").replaceChildren(...rows);
  }
}
