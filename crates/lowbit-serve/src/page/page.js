// The chat of the page: one request to /v1/chat/completions at a time, streamed.
"use strict";

const at = (id) => document.getElementById(id);
const messages = [];
let running = null;

function element(name, kind, parent) {
  const made = document.createElement(name);
  if (kind) made.className = kind;
  parent.append(made);
  return made;
}

function show(role, text) {
  const message = element("div", "message " + role, at("chat"));
  if (text !== undefined) element("div", "text", message).textContent = text;
  return message;
}

function headers() {
  const key = at("key").value.trim();
  return { "content-type": "application/json", ...(key && { authorization: "Bearer " + key }) };
}

function request() {
  const system = at("system").value.trim();
  const body = {
    messages: system ? [{ role: "system", content: system }, ...messages] : messages,
    stream: true,
    stream_options: { include_usage: true },
  };
  if (at("temperature").value !== "") body.temperature = Number(at("temperature").value);
  if (at("tokens").value !== "") body.max_tokens = Number(at("tokens").value);
  return body;
}

// The data of a stream's events, one by one.
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    held += value;
    const lines = held.split("\n");
    held = lines.pop();
    for (const line of lines) {
      if (line.startsWith("data: ") && line !== "data: [DONE]") yield JSON.parse(line.slice(6));
    }
  }
}

// A reply on the page while it is written.
class Reply {
  constructor() {
    this.box = show("assistant");
    this.said = { role: "assistant", content: "" };
    this.tokens = 0;
    this.first = null;
  }

  thought(text) {
    if (!this.thinking) {
      this.fold = element("details", "thought", this.box);
      element("summary", "", this.fold).textContent = "Reasoning";
      this.thinking = element("div", "", this.fold);
    }
    this.thinking.append(text);
    this.said.reasoning_content = (this.said.reasoning_content || "") + text;
  }

  content(text) {
    this.text ??= element("div", "text", this.box);
    this.text.append(text);
    this.said.content += text;
  }

  call(call) {
    const { name, arguments: given } = call.function;
    element("div", "call", this.box).textContent = `${name}(${given})`;
  }

  event(event) {
    if (event.error) throw new Error(event.error.message);
    const delta = event.choices?.[0]?.delta;
    if (delta) {
      const near = at("chat").scrollHeight - at("chat").scrollTop - at("chat").clientHeight < 80;
      if (delta.reasoning_content) this.thought(delta.reasoning_content);
      if (delta.content) this.content(delta.content);
      (delta.tool_calls || []).forEach((call) => this.call(call));
      if (delta.reasoning_content || delta.content) this.first ??= performance.now();
      if (near) at("chat").scrollTop = at("chat").scrollHeight;
    }
    if (event.usage) this.figures(event.usage);
  }

  figures(usage) {
    const seconds = (performance.now() - (this.first ?? performance.now())) / 1000;
    const rate = seconds > 0.05 ? `, ${(usage.completion_tokens / seconds).toFixed(1)} tokens/s` : "";
    const cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
    element("div", "figures", this.box).textContent =
      `${usage.completion_tokens} tokens${rate}; prompt of ${usage.prompt_tokens}, ${cached} cached`;
  }
}

async function answer() {
  running = new AbortController();
  at("send").textContent = "Stop";
  const reply = new Reply();
  try {
    const response = await fetch("v1/chat/completions", {
      method: "POST",
      headers: headers(),
      body: JSON.stringify(request()),
      signal: running.signal,
    });
    if (!response.ok) throw new Error((await response.json()).error.message);
    for await (const event of events(response)) reply.event(event);
  } catch (error) {
    if (error.name !== "AbortError") element("div", "error", reply.box).textContent = error.message;
  }
  if (reply.said.content || reply.said.reasoning_content) messages.push(reply.said);
  else messages.pop();
  running = null;
  at("send").textContent = "Send";
}

at("form").addEventListener("submit", (event) => {
  event.preventDefault();
  if (running) return running.abort();
  const text = at("text").value;
  if (!text.trim()) return;
  at("text").value = "";
  messages.push({ role: "user", content: text });
  show("user", text);
  answer();
});

at("text").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing && !running) {
    event.preventDefault();
    at("form").requestSubmit();
  }
});

at("clear").addEventListener("click", () => {
  running?.abort();
  messages.length = 0;
  at("chat").replaceChildren();
});

fetch("v1/models", { headers: headers() })
  .then((response) => response.json())
  .then((list) => { at("model").textContent = list.data?.[0]?.id ?? ""; })
  .catch(() => {});
