// Requests to the router: the API key, and streams of server-sent events. EventSource cannot send a key, so streams are
// read with fetch.

const KEY = "mini-infer-key";

export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export const key = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  set: (value) => (value ? sessionStorage.setItem(KEY, value) : sessionStorage.removeItem(KEY)),
};

// The response, or an ApiError with the server's own message.
export async function ask(path, { method = "GET", body, signal } = {}) {
  const headers = { accept: "application/json" };
  if (key.get()) headers.authorization = `Bearer ${key.get()}`;
  if (body !== undefined) headers["content-type"] = "application/json";
  const response = await fetch(path, {
    method, headers, signal, cache: "no-store", body: body === undefined ? undefined : JSON.stringify(body),
  });
  if (response.ok) return response;
  let message = `${response.status} ${response.statusText}`;
  try {
    message = (await response.json()).error.message;
  } catch {
    // not an error of the router's: a proxy's page, say
  }
  throw new ApiError(response.status, message);
}

// Yields {event, data} of a response's body.
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let kept = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const pieces = (kept + value).split("\n\n");
      kept = pieces.pop();
      for (const piece of pieces) {
        let event = "message";
        let data = "";
        for (const line of piece.split("\n")) {
          if (line.startsWith("event:")) event = line.slice(6).trim();
          else if (line.startsWith("data:")) data += line.slice(5).trimStart();
        }
        if (data) yield { event, data };
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
