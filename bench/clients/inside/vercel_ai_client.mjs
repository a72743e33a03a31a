// Vercel's AI SDK over OpenAI's interface: texts, streams, a tool loop, and the models of two packages.

import assert from "node:assert";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const ANSWER = "All of it is done.";
const options = { baseURL: `${process.argv[2]}/v1`, apiKey: "none", name: "tenuto" };
const openai = createOpenAI(options);
for (const model of [createOpenAICompatible(options)("gpt-4o"), openai.chat("gpt-4o"), openai.responses("gpt-4o")]) {
  const cities = [];
  const execute = async ({ city }) => {
    cities.push(city);
    return "It is large.";
  };
  const tools = { look_up: tool({ description: "Looks a city up.", inputSchema: z.object({ city: z.string() }), execute }) };
  const asked = { model, prompt: "Which city?", maxRetries: 0 };
  const whole = await generateText(asked);
  assert.equal(whole.text, ANSWER);
  assert.ok(whole.usage.outputTokens > 0);
  let streamed = "";
  for await (const piece of streamText(asked).textStream) streamed += piece;
  assert.equal(streamed, ANSWER);
  assert.equal((await generateText({ ...asked, tools, stopWhen: stepCountIs(3) })).text, ANSWER);
  assert.deepEqual(cities, ["Rome"]);
}
