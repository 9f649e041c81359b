// First questions that a click asks, each with the settings that show what it is about.

export const ORDER = {
  type: "object",
  properties: {
    customer: { type: "string" },
    city: { type: "string" },
    items: {
      type: "array",
      items: {
        type: "object",
        properties: { name: { type: "string" }, quantity: { type: "integer", minimum: 1 } },
        required: ["name", "quantity"],
        additionalProperties: false,
      },
    },
  },
  required: ["customer", "city", "items"],
  additionalProperties: false,
};

export const WEATHER = [
  {
    type: "function",
    function: {
      name: "get_weather",
      description: "Weather of a city",
      parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
    },
  },
];

export const EXAMPLES = [
  { title: "A question", prompt: "What is Manta?", settings: { temperature: 0 } },
  {
    title: "JSON that holds to a schema",
    prompt: "Extract the order as JSON: Celine Castro from Lisbon needs 4 blue kettles and 2 scarves.",
    settings: { temperature: 0, format: "json_schema", schema: JSON.stringify(ORDER, null, 2) },
  },
  {
    title: "A tool call",
    prompt: "How is the weather in Kyoto?",
    settings: { temperature: 0, tools: JSON.stringify(WEATHER, null, 2) },
  },
  {
    title: "Two answers, token by token",
    prompt: "Extract the order as JSON: Farid Keller in Bergen would like 3 wooden stools.",
    settings: {
      temperature: 1, n: 2, show_tokens: true, format: "json_schema", schema: JSON.stringify(ORDER, null, 2),
    },
  },
];
