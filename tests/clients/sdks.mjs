// Clients of npm's as libraries: node tests/clients/sdks.mjs CLIENT URL MODEL
//
// Each asks for a text whole and streamed, for an object of a schema, and for a tool, whose result it sends back. It
// asks for a model that does not exist too, and expects its own error. A server of tests/clients answers.

import assert from "node:assert/strict";
import { z } from "zod";

const [client, url, model] = process.argv.slice(2);
const QUESTION = "What do you say?";
const ASK = "Please book a trip.";
const SAID = "I say what I was told to say.";
const ANSWERED = "The tool has answered.";
const TRIP = z.strictObject({ city: z.enum(["Rome", "Oslo"]), days: z.literal([1, 2, 3]) });
const SCHEMA = {
  type: "object",
  properties: { city: { enum: ["Rome", "Oslo"] }, days: { enum: [1, 2, 3] } },
  required: ["city", "days"],
  additionalProperties: false,
};
const messages = (text) => [{ role: "user", content: text }];

async function joined(parts) {
  let text = "";
  for await (const part of parts) text += part ?? "";
  return text;
}

async function* mapped(parts, read) {
  for await (const part of parts) yield read(part);
}

async function openai() {
  const { default: OpenAI } = await import("openai");
  const { zodResponseFormat } = await import("openai/helpers/zod");
  const { chat } = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });
  const asked = await chat.completions.create({ model, messages: messages(QUESTION) });
  assert.equal(asked.choices[0].message.content, SAID);
  const chunks = await chat.completions.create({ model, messages: messages(QUESTION), stream: true });
  assert.equal(await joined(mapped(chunks, (chunk) => chunk.choices[0]?.delta.content)), SAID);
  const format = zodResponseFormat(TRIP, "trip");
  const parsed = await chat.completions.parse({ model, messages: messages(QUESTION), response_format: format });
  TRIP.parse(parsed.choices[0].message.parsed);
  let booked;
  const tool = { name: "book", parameters: SCHEMA, parse: JSON.parse, function: (trip) => ((booked = trip), "booked") };
  const tools = [{ type: "function", function: tool }];
  for (const stream of [false, true]) {
    booked = undefined;
    const runner = chat.completions.runTools({ model, messages: messages(ASK), tools, stream });
    assert.equal(await runner.finalContent(), ANSWERED);
    TRIP.parse(booked);
  }
  await assert.rejects(chat.completions.create({ model: "none", messages: messages(QUESTION) }), OpenAI.NotFoundError);
}

async function openaiResponses() {
  const { default: OpenAI } = await import("openai");
  const { zodTextFormat } = await import("openai/helpers/zod");
  const { responses } = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });
  assert.equal((await responses.create({ model, input: QUESTION })).output_text, SAID);
  const stream = responses.stream({ model, input: QUESTION });
  assert.equal(await joined(mapped(stream, (event) => event.type === "response.output_text.delta" && event.delta || "")), SAID);
  const parsed = await responses.parse({ model, input: QUESTION, text: { format: zodTextFormat(TRIP, "trip") } });
  TRIP.parse(parsed.output_parsed);
  const tools = [{ type: "function", name: "book", parameters: SCHEMA, strict: true }];
  const called = await responses.create({ model, input: messages(ASK), tools });
  const { call_id, arguments: written } = called.output.find((item) => item.type === "function_call");
  TRIP.parse(JSON.parse(written));
  const input = [...messages(ASK), ...called.output, { type: "function_call_output", call_id, output: "booked" }];
  assert.equal((await responses.create({ model, input, tools })).output_text, ANSWERED);
  await assert.rejects(responses.create({ model: "none", input: QUESTION }), OpenAI.NotFoundError);
}

async function anthropic() {
  const { default: Anthropic } = await import("@anthropic-ai/sdk");
  const { zodOutputFormat } = await import("@anthropic-ai/sdk/helpers/zod");
  const { betaZodTool } = await import("@anthropic-ai/sdk/helpers/beta/zod");
  const asked = new Anthropic({ baseURL: url, apiKey: "none", maxRetries: 0 });
  const given = { model, max_tokens: 200 };
  const whole = await asked.messages.create({ ...given, messages: messages(QUESTION) });
  assert.equal(whole.content[0].text, SAID);
  const stream = asked.messages.stream({ ...given, messages: messages(QUESTION) });
  assert.equal(await stream.finalText(), SAID);
  const output_config = { format: zodOutputFormat(TRIP) };
  const parsed = await asked.messages.parse({ ...given, messages: messages(QUESTION), output_config });
  TRIP.parse(parsed.parsed_output);
  let booked;
  const run = (trip) => ((booked = trip), "booked");
  const tools = [betaZodTool({ name: "book", description: "Books", inputSchema: TRIP, run })];
  for (const stream of [false, true]) {
    booked = undefined;
    const runner = asked.beta.messages.toolRunner({ ...given, messages: messages(ASK), tools, stream });
    const last = await runner.runUntilDone();
    assert.equal(last.content[0].text, ANSWERED);
    TRIP.parse(booked);
  }
  await assert.rejects(
    asked.messages.create({ ...given, model: "none", messages: messages(QUESTION) }),
    Anthropic.NotFoundError,
  );
}

async function ollama() {
  const { Ollama } = await import("ollama");
  const asked = new Ollama({ host: url });
  assert.ok((await asked.list()).models.some((each) => each.name.startsWith(model)));
  assert.ok((await asked.show({ model })).template);
  assert.ok((await asked.version()).version);
  assert.equal((await asked.generate({ model, prompt: QUESTION })).response, SAID);
  assert.equal((await asked.chat({ model, messages: messages(QUESTION) })).message.content, SAID);
  const parts = await asked.chat({ model, messages: messages(QUESTION), stream: true });
  assert.equal(await joined(mapped(parts, (part) => part.message.content)), SAID);
  const held = await asked.chat({ model, messages: messages(QUESTION), format: SCHEMA });
  TRIP.parse(JSON.parse(held.message.content));
  const tools = [{ type: "function", function: { name: "book", description: "Books", parameters: SCHEMA } }];
  for (const stream of [false, true]) {
    const answer = await asked.chat({ model, messages: messages(ASK), tools, stream });
    const called = [];
    for await (const part of stream ? answer : [answer]) called.push(...(part.message.tool_calls ?? []));
    TRIP.parse(called[0].function.arguments);
    const history = [...messages(ASK), { role: "assistant", content: "", tool_calls: called }];
    const result = { role: "tool", tool_name: "book", content: "booked" };
    const last = await asked.chat({ model, messages: [...history, result], tools });
    assert.equal(last.message.content, ANSWERED);
  }
  await assert.rejects(asked.chat({ model: "none", messages: messages(QUESTION) }), /none/);
}

// Vercel's `ai`, over one of the providers.
async function ai(provided) {
  const { generateText, streamText, tool, stepCountIs, Output } = await import("ai");
  const given = { model: provided(model), maxRetries: 0 };
  assert.equal((await generateText({ ...given, prompt: QUESTION })).text, SAID);
  assert.equal(await joined(streamText({ ...given, prompt: QUESTION }).textStream), SAID);
  const held = await generateText({ ...given, prompt: QUESTION, output: Output.object({ schema: TRIP }) });
  TRIP.parse(held.output);
  let booked;
  const execute = (trip) => ((booked = trip), "booked");
  const tools = { book: tool({ description: "Books", inputSchema: TRIP, execute }) };
  const stopWhen = stepCountIs(3);
  for (const ask of [generateText, streamText]) {
    booked = undefined;
    const answer = await ask({ ...given, prompt: ASK, tools, stopWhen });
    assert.equal(await answer.text, ANSWERED);
    TRIP.parse(booked);
  }
  await assert.rejects(generateText({ ...given, model: provided("none"), prompt: QUESTION }), { statusCode: 404 });
}

async function provider(name, create, options) {
  const module = await import(name);
  return module[create]({ apiKey: "none", ...options });
}

const v1 = { baseURL: `${url}/v1` };
const CLIENTS = {
  openai: openai,
  "openai: responses": openaiResponses,
  anthropic: anthropic,
  ollama: ollama,
  "@ai-sdk/openai": async () => ai(await provider("@ai-sdk/openai", "createOpenAI", v1)),
  "@ai-sdk/openai: chat": async () => ai((await provider("@ai-sdk/openai", "createOpenAI", v1)).chat),
  "@ai-sdk/openai-compatible": async () => {
    const options = { ...v1, name: "manta", supportsStructuredOutputs: true };
    await ai(await provider("@ai-sdk/openai-compatible", "createOpenAICompatible", options));
  },
  "@ai-sdk/anthropic": async () => ai(await provider("@ai-sdk/anthropic", "createAnthropic", v1)),
  "ollama-ai-provider-v2": async () =>
    ai(await provider("ollama-ai-provider-v2", "createOllama", { baseURL: `${url}/api` })),
};

await CLIENTS[client]();
