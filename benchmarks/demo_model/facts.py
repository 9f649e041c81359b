"""What the demo model knows about Manta and about itself: questions in several wordings, one answer each."""

from __future__ import annotations

FACTS: list[tuple[list[str], str]] = [
    (
        [
            "What is Manta?",
            "Tell me about Manta.",
            "What does Manta do?",
            "Explain Manta.",
            "Describe Manta in a sentence.",
        ],
        "Manta serves language models on a Ray cluster, behind an HTTP API that speaks OpenAI's format.",
    ),
    (
        ["Who are you?", "What are you?", "What is your name?", "Tell me about yourself.", "Are you a big model?"],
        "I am the tiny demo model that ships with Manta. I can extract orders and contacts, call tools, add, and sort.",
    ),
    (
        ["What can you do?", "How can you help me?", "What do you know?", "What should I ask you?", "Help."],
        "I can turn an order or a contact into JSON, call a tool, do small sums, sort short lists and talk "
        "about Manta.",
    ),
    (
        ["How do I start Manta?", "How do I run the server?", "How can I serve a model?", "How do I launch Manta?"],
        "Type make serve. It installs what it needs and starts the server on port 8000.",
    ),
    (
        ["How do I run the tests?", "How do I test Manta?", "Which command runs the tests?", "Where are the tests?"],
        "Type make test. It runs the whole test suite.",
    ),
    (
        ["How do I serve my own model?", "Can I use my own model?", "How do I load another model?"],
        "Give its folder or hub id: make serve MODEL=path.",
    ),
    (
        ["Which models can Manta run?", "What models are supported?", "Does Manta run Llama?", "Can Manta serve Qwen?"],
        "Llama, Mistral, Qwen2 and Qwen3 run natively; many others run through transformers.",
    ),
    (
        [
            "What is the scheduler?",
            "What does the scheduler do?",
            "How are requests batched?",
            "How does batching work?",
        ],
        "The scheduler decides what each step computes. It batches continuously over one token budget.",
    ),
    (
        ["What is a KV cache?", "How is the KV cache stored?", "What are KV blocks?", "How does paging work?"],
        "Keys and values are kept in blocks of tokens that sequences can share, so that a common prefix is "
        "computed once.",
    ),
    (
        ["What is prefix caching?", "Why is my second request faster?", "How does the prefix cache work?"],
        "Blocks of tokens that were computed before are found by their hash and read again instead of computed.",
    ),
    (
        ["What is preemption?", "What happens when memory is full?", "What if the cache is full?"],
        "The latest sequence gives its blocks back and is computed again later. Its tokens stay the same.",
    ),
    (
        ["How does sampling work?", "What does a seed do?", "Are seeded requests reproducible?"],
        "Noise is a function of seed, position and token, so a seeded request gives the same tokens in any batch.",
    ),
    (
        ["What is Ray?", "Why does Manta use Ray?", "What is Ray Serve?"],
        "Ray runs Python on many machines. Manta uses Ray Serve for its HTTP endpoint and its replicas.",
    ),
    (
        ["What is the ingress?", "Where are requests tokenized?", "Who applies the chat template?"],
        "The ingress takes HTTP requests, applies the chat template, tokenizes, and turns tokens back into text.",
    ),
    (
        ["What is the engine?", "What happens in a step?", "What is the step loop?"],
        "The engine runs the step loop: schedule, prepare masks, execute, update.",
    ),
    (
        ["What happens if a request fails?", "Can one request crash the engine?", "What is a NaN row?"],
        "One failure has one victim: that sequence ends with an error and all the others go on.",
    ),
    (
        ["Hello", "Hi", "Hey there", "Good morning", "Hello!", "Hi there!", "Good evening"],
        "Hello! I am Manta's demo model. Ask me about Manta, or give me an order to turn into JSON.",
    ),
    (
        ["Thanks", "Thank you!", "Great, thanks.", "Thank you very much."],
        "You are welcome!",
    ),
    (
        ["Bye", "Goodbye", "See you later.", "Good night"],
        "Goodbye!",
    ),
    (
        [
            "What is the capital of France?",
            "Who won the world cup?",
            "Write a poem about the sea.",
            "What is the meaning of life?",
            "Tell me a joke.",
            "How tall is Mount Everest?",
            "Translate this into German.",
            "What is the weather today?",
            "Write a Python function.",
            "Who is the president?",
        ],
        "I do not know that: I am a tiny demo model. Ask me about Manta, orders, contacts, sums or lists.",
    ),
]

PREFIXES = ["", "", "", "Please tell me: ", "I have a question. ", "Quick question: ", "Hi! "]
HELD_OUT_PREFIX = "One more thing: "
