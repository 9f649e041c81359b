// The server's endpoints: its models, its state, and streamed chats. The key lives in this tab's session storage only.

/** Address of the server; the page may be served below a prefix. */
export const ROOT = new URL("..", import.meta.url).href.replace(/\/$/, "");

const KEY = "manta-key";
export const key = () => sessionStorage.getItem(KEY) ?? "";
export const setKey = (value) => (value ? sessionStorage.setItem(KEY, value) : sessionStorage.removeItem(KEY));

/** An answer that is an error, in OpenAI's shape. `status` is 0 if there was no answer. */
export class ApiError extends Error {
  constructor(status, error) {
    super(error?.message ?? `the server answered ${status}`);
    this.status = status;
    this.param = error?.param ?? null;
  }
}

async function ask(path, options = {}) {
  const headers = { ...options.headers, ...(key() ? { authorization: `Bearer ${key()}` } : {}) };
  let response;
  try {
    response = await fetch(ROOT + path, { ...options, headers });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, { message: "The server does not answer. Is it still running?" });
  }
  if (response.ok) return response;
  const body = await response.json().catch(() => null);
  throw new ApiError(response.status, body?.error);
}

export async function models() {
  return (await (await ask("/v1/models")).json()).data;
}

export async function status() {
  return (await ask("/status")).json();
}

/**
 * Streams a chat. Calls `onStart` with the response once it has begun, and `onChunk` with each chunk.
 * Throws `ApiError`, also for an error within the stream, and the AbortError of `signal`.
 */
export async function streamChat(body, signal, onStart, onChunk) {
  const response = await ask("/v1/chat/completions", {
    method: "POST",
    headers: { "content-type": "application/json" },
    body: JSON.stringify(body),
    signal,
  });
  onStart(response);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) throw new ApiError(0, { message: "The stream ended before the answer did." });
    const events = (buffer + value).split("\n\n");
    buffer = events.pop();
    for (const event of events) {
      const data = dataOf(event);
      if (data === "[DONE]") return;
      if (!data) continue;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new ApiError(response.status, chunk.error);
      onChunk(chunk);
    }
  }
}

/** Returns the data of a server-sent event, whose other fields do not matter here. */
function dataOf(event) {
  const lines = event.split("\n").filter((line) => line.startsWith("data:"));
  return lines.map((line) => line.slice(5).trimStart()).join("\n");
}
