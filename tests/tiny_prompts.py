"""Chunks and prompts in the words that the tiny tokenizer has learned."""

from __future__ import annotations

from ragblend.prompt.prompt import Chunk, SegmentedPrompt

CHUNKS = (
    Chunk("the theory of the other chunk is in the answer", source="one.txt"),
    Chunk("question the chunk with that theory", source="two.txt"),
    Chunk("what the other question is and the answer to it", source="three.txt"),
)
PROMPT = SegmentedPrompt(CHUNKS, "what is that?")

LONG_CHUNKS = (
    Chunk("the theory of the other chunk is in the answer to the question of the chunk", source="one.txt"),
    Chunk("question the chunk with that theory and answer what the other question is", source="two.txt"),
    Chunk("what the other question is and the answer to it is the chunk with the theory", source="three.txt"),
)
LONG_PROMPT = SegmentedPrompt(LONG_CHUNKS, "what is that?")
