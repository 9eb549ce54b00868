"""Ten questions for instructed models: benchmarks and tests compare greedy answers to them."""

QUESTIONS = (
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "Explain in one sentence why the sky is blue.",
    "List three uses of a paper clip.",
    "Translate to German: Good morning, my friend.",
    "Write a Python function that reverses a string.",
    "Who wrote Romeo and Juliet?",
    "What is 17 + 25?",
    "Summarize: The cat sat on the mat, looked at the rain, and went back to sleep.",
    "Give me a name for a small brown dog.",
)
