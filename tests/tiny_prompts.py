"""Chunks and a prompt in words of the tiny tokenizer's vocabulary. The chunks are long enough to be matched."""

from ragblend.prompt.types import Chunk, Prompt

CHUNKS = (
    Chunk("the theory of the other chunk is in the answer to the question of the chunk with that", source="one.txt"),
    Chunk("question the chunk with that theory and answer what the other question is in the other", source="two.txt"),
    Chunk("what the other question is and the answer to it is the chunk with the theory of that", source="three.txt"),
)
PROMPT = Prompt(CHUNKS, "what is that?")
