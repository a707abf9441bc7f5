// The official `openai` package against a live server: node smoke.mjs BASE_URL. Prints what it got as one JSON object.
import OpenAI from "openai";

const client = new OpenAI({ baseURL: process.argv[2], apiKey: "none", maxRetries: 0, timeout: 30_000 });
const messages = [{ role: "user", content: "Hello" }];
const seeded = { model: "toy", seed: 7, max_tokens: 12 };
const got = { models: [] };

for await (const model of client.models.list()) got.models.push(model.id);

const completion = await client.completions.create({ ...seeded, prompt: "Hello", logprobs: 2, return_token_ids: true });
got.completion = completion.choices[0];
got.usage = completion.usage;

const chat = await client.chat.completions.create({ ...seeded, messages, min_p: 0.01 });
got.chat = chat.choices[0].message.content;

const stream = await client.chat.completions.create({
  ...seeded, messages, min_p: 0.01, stream: true, stream_options: { include_usage: true },
});
got.streamed = "";
for await (const chunk of stream) {
  got.streamed += chunk.choices[0]?.delta?.content ?? "";
  got.streamedUsage = chunk.usage;
}

const schema = {
  type: "object", properties: { yes: { type: "boolean" } }, required: ["yes"], additionalProperties: false,
};
const helper = client.chat.completions.stream({
  ...seeded, messages, max_tokens: 40,
  response_format: { type: "json_schema", json_schema: { name: "answer", schema, strict: true } },
});
got.helper = (await helper.finalChatCompletion()).choices[0].message.content;

const long = await client.completions.create({ ...seeded, prompt: "Hello", max_tokens: 200, ignore_eos: true, stream: true });
for await (const _ of long) break; // leaves

got.errors = [];
for (const change of [{ temperature: -1 }, { model: "other" }]) {
  try {
    await client.completions.create({ ...seeded, prompt: "x", ...change });
  } catch (error) {
    got.errors.push([error.constructor.name, error.status, error.param, error.code]);
  }
}
console.log(JSON.stringify(got));
