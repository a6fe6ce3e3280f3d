// OpenAI's client for Node against a server: node openai_client.mjs URL MODEL (the package `openai` beside it or above).
// Prints what it found as JSON; whoever started it compares.
import OpenAI from "openai";

const [url, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL: url, apiKey: "unused", maxRetries: 0 });
const messages = [
  { role: "system", content: "Reverse the text character-by-character. Put your answer in <reversed_text> tags." },
  { role: "user", content: "hello" },
];
const drawing = { model, temperature: 0, max_tokens: 40 };
const tools = [{
  type: "function",
  function: {
    name: "add", description: "Adds.",
    parameters: { type: "object", properties: { a: { enum: [1, 2] } }, required: ["a"], additionalProperties: false },
  },
}];

const models = [];
for await (const card of client.models.list()) models.push(card.id);

const whole = await client.chat.completions.create({ ...drawing, messages, logprobs: true, top_logprobs: 2 });
let streamed = "", chunks = 0, usage = null;
const stream = await client.chat.completions.create({
  ...drawing, messages, stream: true, stream_options: { include_usage: true },
});
for await (const chunk of stream) {
  chunks += 1;
  streamed += chunk.choices[0]?.delta?.content ?? "";
  usage = chunk.usage ?? usage;
}

const called = await client.chat.completions.create({
  ...drawing, messages, tools, tool_choice: "required", max_tokens: 200,
});
const runner = client.chat.completions.stream({ ...drawing, messages, tools, tool_choice: "required", max_tokens: 200 });
const final = await runner.finalChatCompletion();

const text = await client.completions.create({ ...drawing, prompt: "abc", max_tokens: 5 });
const answer = await client.responses.create({ model, input: "hello", temperature: 0, max_output_tokens: 20 });
let refusal = null;
try {
  await client.chat.completions.create({ ...drawing, model: "other", messages });
} catch (error) {
  refusal = { status: error.status, name: error.constructor.name };
}

console.log(JSON.stringify({
  models, whole: whole.choices[0].message.content, entries: whole.choices[0].logprobs.content.length, streamed, chunks,
  usage, call: called.choices[0].message.tool_calls[0].function, reason: called.choices[0].finish_reason,
  streamedCall: final.choices[0].message.tool_calls[0].function, text: text.choices[0].text,
  answer: answer.output_text, refusal,
}));
