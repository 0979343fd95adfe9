// npm's openai and @anthropic-ai/sdk against a server: tools/check_clients runs it with the address and a key.
import assert from "node:assert";
import Anthropic from "@anthropic-ai/sdk";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { embed, generateText, streamText } from "ai";
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
const schema = {
  type: "object",
  properties: { kind: { enum: ["buy", "sell"] }, count: { type: "integer", minimum: 0, maximum: 9 } },
  required: ["kind", "count"],
  additionalProperties: false,
};
const format = { type: "json_schema", json_schema: { name: "order", strict: true, schema } };
const held = await openai.chat.completions.create({ ...chat, max_tokens: 200, response_format: format });
const order = JSON.parse(held.choices[0].message.content);
assert(["buy", "sell"].includes(order.kind) && Number.isInteger(order.count) && order.count >= 0 && order.count < 10);
const wrong = { type: "json_schema", json_schema: { name: "x", schema: { not: {} } } };
await assert.rejects(openai.chat.completions.create({ ...chat, response_format: wrong }), { status: 400 });
console.log("  openai");

const anthropic = new Anthropic({ baseURL: address, apiKey: key });
const message = await anthropic.messages.create(chat);
assert.equal(message.content[0].text, text);
const final = await anthropic.messages.stream(chat).finalMessage();
assert.equal(final.content[0].text, text);
assert.equal(final.stop_reason, message.stop_reason);
const output_config = { format: { type: "json_schema", schema } };
const answer = JSON.parse((await anthropic.messages.create({ ...chat, max_tokens: 200, output_config })).content[0].text);
assert.deepEqual(Object.keys(answer), ["kind", "count"]);
await assert.rejects(anthropic.messages.create({ ...chat, model: "claude-9" }), { status: 404 });
console.log("  @anthropic-ai/sdk");

const lowbit = createOpenAICompatible({ name: "lowbit", baseURL: `${address}/v1`, apiKey: key });
const ask = { prompt: chat.messages[0].content, maxOutputTokens: chat.max_tokens, temperature: 0, maxRetries: 0 };
const said = await generateText({ model: lowbit.chatModel("demo"), ...ask });
assert.equal(said.text, text);
assert(said.usage.outputTokens > 0);
let pieces = "";
for await (const piece of streamText({ model: lowbit.chatModel("demo"), ...ask }).textStream) pieces += piece;
assert.equal(pieces, text);
const { embedding } = await embed({ model: lowbit.textEmbeddingModel("embedding"), value: "A vector", maxRetries: 0 });
assert(embedding.length > 8);
await assert.rejects(generateText({ model: lowbit.chatModel("gpt-9"), ...ask }), { statusCode: 404 });
console.log("  ai, @ai-sdk/openai-compatible");
