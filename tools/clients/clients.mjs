// npm's openai and @anthropic-ai/sdk against a server: tools/check_clients runs it with the address and a key.
import assert from "node:assert";
import Anthropic from "@anthropic-ai/sdk";
import OpenAI from "openai";

const [address, key] = process.argv.slice(2);
const chat = {
  model: "demo",
  messages: [{ role: "user", content: "What is a vector?" }],
  max_tokens: 24,
  temperature: 0,
};

const openai = new OpenAI({ baseURL: `${address}/v1`, apiKey: key });
const whole = await openai.chat.completions.create(chat);
const text = whole.choices[0].message.content;
assert(text);
let streamed = "";
for await (const chunk of await openai.chat.completions.create({ ...chat, stream: true })) {
  streamed += chunk.choices[0]?.delta?.content ?? "";
}
assert.equal(streamed, text);
await assert.rejects(openai.chat.completions.create({ ...chat, response_format: { type: "json_object" } }), { status: 400 });
console.log("  openai");

const anthropic = new Anthropic({ baseURL: address, apiKey: key });
const message = await anthropic.messages.create(chat);
assert.equal(message.content[0].text, text);
const final = await anthropic.messages.stream(chat).finalMessage();
assert.equal(final.content[0].text, text);
assert.equal(final.stop_reason, message.stop_reason);
await assert.rejects(anthropic.messages.create({ ...chat, model: "claude-9" }), { status: 404 });
console.log("  @anthropic-ai/sdk");
