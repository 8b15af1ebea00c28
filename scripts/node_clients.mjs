// The clients for node of OpenAI and Anthropic, each asking a server that runs: whole, streamed, with tools.
// scripts/node_clients.py installs them and runs this: node node_clients.mjs FOLDER URL KEY
import assert from "node:assert/strict";
import { createRequire } from "node:module";
import { join } from "node:path";

const [folder, url, apiKey] = process.argv.slice(2);
const from = createRequire(join(folder, "package.json"));
const { OpenAI } = from("openai");
const Anthropic = from("@anthropic-ai/sdk").Anthropic;
const question = [{ role: "user", content: "What is the weather in Paris?" }];
const city = { type: "object", properties: { city: { type: "string", maxLength: 12 } }, required: ["city"], additionalProperties: false };
const about = { name: "get_weather", description: "Weather of a city" };
const patient = { apiKey, maxRetries: 0, timeout: 600_000 };

const openai = new OpenAI({ baseURL: `${url}/v1`, ...patient });
const model = (await openai.models.list()).data[0].id;
const asked = { model, messages: question, max_tokens: 48, temperature: 0 };
const functions = { tools: [{ type: "function", function: { ...about, parameters: city } }], tool_choice: "required", parallel_tool_calls: false };

const anthropic = new Anthropic({ baseURL: url, ...patient });
const told = { model, messages: question, max_tokens: 48 };
const greedy = { body: { temperature: 0 } };
const tools = { tools: [{ ...about, input_schema: city }], tool_choice: { type: "any", disable_parallel_tool_use: true } };

async function gathered(stream) {
  const parts = [];
  for await (const part of stream) parts.push(part);
  return parts;
}

let said, written; // what was said whole, and the call
const cases = {
  "openai chat": async () => {
    const answer = await openai.chat.completions.create(asked);
    said = answer.choices[0].message.content;
    assert.ok(said.length > 0 && answer.usage.completion_tokens > 0 && answer.usage.prompt_tokens_details.cached_tokens >= 0);
    return JSON.stringify(said.slice(0, 60));
  },
  "openai stream": async () => {
    const chunks = await gathered(await openai.chat.completions.create({ ...asked, stream: true, stream_options: { include_usage: true } }));
    assert.equal(chunks.map((chunk) => chunk.choices[0]?.delta.content ?? "").join(""), said);
    assert.ok(chunks.at(-1).usage.completion_tokens > 0);
    return `${chunks.length} chunks`;
  },
  "openai tools": async () => {
    const [choice] = (await openai.chat.completions.create({ ...asked, ...functions })).choices;
    assert.equal(choice.finish_reason, "tool_calls");
    const [call] = choice.message.tool_calls;
    written = call.function.arguments;
    assert.equal(call.function.name, "get_weather");
    assert.equal(typeof JSON.parse(written).city, "string");
    const result = { role: "tool", tool_call_id: call.id, content: "18 degrees" };
    const next = await openai.chat.completions.create({ ...asked, tools: functions.tools, messages: [...question, choice.message, result] });
    assert.ok(["stop", "length", "tool_calls"].includes(next.choices[0].finish_reason));
    return written;
  },
  "openai tools, streamed": async () => {
    const runner = openai.chat.completions.stream({ ...asked, ...functions });
    const [call] = (await runner.finalChatCompletion()).choices[0].message.tool_calls;
    assert.equal(call.function.arguments, written);
    return written;
  },
  "openai responses": async () => {
    const answer = await openai.responses.create({ model, input: "Say hello.", max_output_tokens: 16, temperature: 0 });
    const events = await gathered(await openai.responses.create({ model, input: "Say hello.", max_output_tokens: 16, temperature: 0, stream: true }));
    assert.equal(events.filter((event) => event.type === "response.output_text.delta").map((event) => event.delta).join(""), answer.output_text);
    return `${events.length} events`;
  },
  "anthropic messages": async () => {
    const answer = await anthropic.messages.create({ ...told, ...greedy.body });
    const { input_tokens } = await anthropic.messages.countTokens({ model, messages: question });
    const { usage } = answer;
    assert.equal(usage.input_tokens + usage.cache_creation_input_tokens + usage.cache_read_input_tokens, input_tokens);
    said = answer.content[0].text;
    return JSON.stringify(said.slice(0, 60));
  },
  "anthropic stream": async () => {
    const stream = anthropic.messages.stream({ ...told, ...greedy.body });
    const events = [];
    stream.on("streamEvent", (event) => events.push(event.type));
    assert.equal((await stream.finalMessage()).content[0].text, said);
    assert.equal(events[0], "message_start");
    return `${events.length} events`;
  },
  "anthropic tools": async () => {
    const answer = await anthropic.messages.create({ ...told, ...tools, ...greedy.body });
    assert.equal(answer.stop_reason, "tool_use");
    const call = answer.content.find((block) => block.type === "tool_use");
    assert.equal(typeof call.input.city, "string");
    written = call.input;
    const result = [{ type: "tool_result", tool_use_id: call.id, content: "18 degrees" }];
    const messages = [...question, { role: "assistant", content: answer.content }, { role: "user", content: result }];
    const next = await anthropic.messages.create({ ...told, tools: tools.tools, messages, ...greedy.body });
    assert.ok(next.usage.output_tokens > 0);
    return JSON.stringify(written);
  },
  "anthropic tools, streamed": async () => {
    const final = await anthropic.messages.stream({ ...told, ...tools, ...greedy.body }).finalMessage();
    assert.deepEqual(final.content.find((block) => block.type === "tool_use").input, written);
    return JSON.stringify(written);
  },
  "anthropic error": async () => {
    await assert.rejects(anthropic.messages.create({ ...told, model: "no-such-model" }), Anthropic.NotFoundError);
    return "404";
  },
};

let failed = 0;
for (const [name, run] of Object.entries(cases)) {
  try {
    console.log(`${name}: ${await run()}`);
  } catch (problem) {
    failed += 1;
    console.log(`${name}: FAILED ${problem.stack ?? problem}`);
  }
}
process.exit(failed ? 1 : 0);
