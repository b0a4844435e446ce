// The Node client: completions, chat, streams, tools, responses, errors. Arguments: URL, model.
import assert from "node:assert";
import OpenAI from "openai";

const [url, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "k", maxRetries: 0 });
const messages = [{ role: "user", content: "What is an octavo?" }];

for await (const one of client.models.list()) assert.equal(one.id, model);
const text = await client.completions.create({ model, prompt: "A book is", max_tokens: 8, temperature: 0, logprobs: 1 });
assert.ok(text.choices[0].text);
const whole = await client.chat.completions.create({ model, messages, max_tokens: 16, temperature: 0 });
let said = "";
const stream = await client.chat.completions.create({ model, messages, max_tokens: 16, temperature: 0, stream: true });
for await (const chunk of stream) said += chunk.choices[0]?.delta?.content ?? "";
assert.equal(said, whole.choices[0].message.content);

const parameters = {
  type: "object",
  properties: { times: { enum: [1, 2, 3] } },
  required: ["times"],
  additionalProperties: false,
};
const tools = [{ type: "function", function: { name: "fold", parameters } }];
const tool_choice = { type: "function", function: { name: "fold" } };
const runner = client.chat.completions.stream({ model, messages, tools, tool_choice, temperature: 0 });
const made = await runner.finalChatCompletion();
const call = made.choices[0].message.tool_calls[0];
assert.ok([1, 2, 3].includes(JSON.parse(call.function.arguments).times));

const response = await client.responses.create({ model, input: "A book is", max_output_tokens: 16, temperature: 0 });
let heard = "";
for await (const event of await client.responses.create({ model, input: "A book is", max_output_tokens: 16, temperature: 0, stream: true }))
  if (event.type === "response.output_text.delta") heard += event.delta;
assert.equal(heard, response.output_text);

await assert.rejects(client.completions.create({ model, prompt: "a", suffix: "b" }), (error) => {
  assert.equal(error.status, 400);
  assert.equal(error.param, "suffix");
  return true;
});
console.log("ok");
