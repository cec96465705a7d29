"""A call of transformers' `model.generate()` that goes on by one token whenever it is told which.

`generate` runs in a thread of its own and stops in a logits processor after each forward pass: the logits go out, and
the tokens that come back are the only ones it can then choose. So sampling, and when a sequence ends, are up to others.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList

# How often a call that nobody lets go on looks whether it is still wanted.
_POLL_S = 0.05


class _Ended(Exception):
    """Unwinds `generate`, and with it its KV cache."""


class SteppedGenerate:
    """One call, from its prompts to `end`, or until `is_wanted` says no while it waits to go on.

    Args:
        input_ids: the prompts, padded on the left with `pad_token_id`  # [rows, longest prompt]
        attention_mask: 0 where they are padded, else 1  # [rows, longest prompt]
        max_new_tokens: the most forward passes.
    """

    def __init__(
        self,
        model: Any,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        pad_token_id: int,
        max_new_tokens: int,
        is_wanted: Callable[[], bool],
    ) -> None:
        self._is_wanted = is_wanted
        self._computed: queue.SimpleQueue[torch.Tensor | BaseException] = queue.SimpleQueue()
        self._chosen: queue.SimpleQueue[list[int] | None] = queue.SimpleQueue()
        # Without an end-of-sequence token it stops at no token by itself.
        config = GenerationConfig(
            do_sample=False, max_new_tokens=max_new_tokens, pad_token_id=pad_token_id, eos_token_id=None, use_cache=True
        )
        self.thread = threading.Thread(
            target=self._generate, args=(model, input_ids, attention_mask, config), name="generate"
        )
        self.thread.start()

    def logits(self) -> torch.Tensor:
        """Wait for a forward pass: the logits after the last token of each row, in float32 [rows, vocab].

        Raises:
            Exception: whatever `generate` has raised.
        """
        computed = self._computed.get()
        if isinstance(computed, torch.Tensor):
            return computed
        self.thread.join()
        try:
            raise computed
        finally:
            del computed  # else it and this frame would keep each other, and all that generate had allocated

    def advance(self, token_ids: list[int]) -> None:
        """Let it append one token to each row and compute the next forward pass."""
        self._chosen.put(token_ids)

    def end(self) -> None:
        """End it, if it has not ended yet; its memory is free then."""
        self._chosen.put(None)
        self.thread.join()

    def _generate(
        self,
        model: Any,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        config: GenerationConfig,
    ) -> None:
        try:
            model.generate(
                input_ids,
                attention_mask=attention_mask,
                generation_config=config,
                logits_processor=LogitsProcessorList([self._force]),
            )
            raise RuntimeError(f"generate() has ended by itself, after {config.max_new_tokens} tokens or before")
        except _Ended:
            pass
        except BaseException as error:
            self._computed.put(error)

    def _force(self, _: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Hand out the logits [rows, vocab], and leave nothing to choose but the tokens that come back."""
        self._computed.put(scores)
        token_ids = torch.tensor(self._wait(), device=scores.device)
        return scores.fill_(-torch.inf).scatter_(1, token_ids[:, None], 0.0)

    def _wait(self) -> list[int]:
        """The tokens to go on with."""
        while True:
            try:
                token_ids = self._chosen.get(timeout=_POLL_S)
            except queue.Empty:
                # When an interpreter exits, its main thread is over and waits for all others.
                if self._is_wanted() and threading.main_thread().is_alive():
                    continue
                raise _Ended from None
            if token_ids is None:
                raise _Ended
            return token_ids
