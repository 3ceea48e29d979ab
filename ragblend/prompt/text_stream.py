"""The text of an answer while its token ids come in. Knows a Renderer and streaming detokenization."""

from __future__ import annotations

from tokenizers.decoders import DecodeStream

from ragblend.prompt.render import Renderer


class TextStream:
    """Turns an answer's ids into text as they come, and holds back bytes that do not yet make a character."""

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer
        self._steps = DecodeStream(skip_special_tokens=True)
        self._last: list[int] = []  # the ids of the last text given out
        self._held: list[int] = []  # those behind them
        self._begun = False

    def push(self, token_id: int) -> str:
        """Return the text that `token_id` completes; may be empty."""
        self._held.append(token_id)
        try:
            text = self._steps.step(self._renderer.backend, token_id) or ""
        # tokenizers has no class for it: bytes that a random model made undo an earlier character.
        except Exception:
            self._steps = DecodeStream(skip_special_tokens=True)
            text = self._held_text()
        return self._shown(text)

    def flush(self) -> str:
        """Return what is still held back at the end of the answer: an unfinished character, shown as U+FFFD."""
        return self._shown(self._held_text())

    def _held_text(self) -> str:
        known, whole = (self._renderer.plain_text(ids) for ids in (self._last, self._last + self._held))
        return whole[len(known) :]

    def _shown(self, text: str) -> str:
        """Return `text`, without the whitespace that the template writes before an answer."""
        if not text:
            return ""
        self._last, self._held = self._held, []
        text = text if self._begun else text.removeprefix(self._renderer.answer_lead)
        self._begun = True
        return text
