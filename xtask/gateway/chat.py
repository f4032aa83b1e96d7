"""Chats through the OpenAI-compatible endpoint with the package openai: `chat.py BASE_URL MODEL`."""

import sys

import openai

BASE_URL, MODEL = sys.argv[1:3]
client = openai.OpenAI(base_url=f"{BASE_URL}/v1", api_key="tml-any", max_retries=0)
messages = [{"role": "user", "content": "What does a cow say?"}]

assert MODEL in [model.id for model in client.models.list()]
options = {"model": MODEL, "messages": messages, "max_tokens": 16, "temperature": 0}
whole = client.chat.completions.create(**options)
text = whole.choices[0].message.content
assert text and whole.usage.completion_tokens > 0, whole
streamed = client.chat.completions.create(**options, stream=True)
pieces = [chunk.choices[0].delta.content or "" for chunk in streamed if chunk.choices]
assert "".join(pieces) == text, (pieces, text)
print(f"answer: {text!r}")
