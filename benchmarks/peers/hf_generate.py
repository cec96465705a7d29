"""transformers in fp32: `python -m benchmarks.peers.hf_generate HOW [...]` prints generated tokens/s as JSON.

HOW is `generate`, its one batch of equal prompts, or `generate_batch`, its continuous batching.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig
from transformers.utils import logging as transformers_logging

from benchmarks.peers.child import report
from benchmarks.prompts import prompt_ids
from slipstream.models.store import resolve

_PAGE, _BATCH_TOKENS = 256, 512


def main() -> None:
    """Measure one way to generate and report it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("how", choices=("generate", "generate_batch"))
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--sequences", default="1", help="comma-separated")
    parser.add_argument("--prompt", type=int, default=64, help="prompt tokens")
    parser.add_argument("--output", type=int, default=64, help="tokens generated of each sequence")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    model: Any = AutoModelForCausalLM.from_pretrained(
        resolve(arguments.model), dtype=torch.float32, use_safetensors=True, local_files_only=True
    )
    generate = _generate if arguments.how == "generate" else _generate_batch
    try:
        _tokens_per_s(generate, model, 1, arguments.prompt, 4)
    except Exception as error:  # whatever it is, this is how one finds out what it can do on this machine
        if arguments.how == "generate":
            raise
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        report({"unavailable": f"generate_batch of transformers does not run here ({reason[:200]})"})
        return
    counts = map(int, arguments.sequences.split(","))
    report({str(n): _tokens_per_s(generate, model, n, arguments.prompt, arguments.output) for n in counts})


def _tokens_per_s(generate: Callable[..., int], model: Any, count: int, prompt: int, output: int) -> float:
    """Generated tokens/s of sequences that all begin at once, their prompts computed within that time."""
    prompts = [prompt_ids(index, prompt) for index in range(count)]
    config = GenerationConfig(max_new_tokens=output, do_sample=False, eos_token_id=-1, pad_token_id=0)
    start = time.perf_counter()
    generated = generate(model, prompts, config)
    duration_s = time.perf_counter() - start
    if generated != count * output:
        raise RuntimeError(f"{generated} tokens were generated where {count * output} were asked for")
    return generated / duration_s


def _generate(model: Any, prompts: list[list[int]], config: GenerationConfig) -> int:
    ids = torch.tensor(prompts)  # [sequences, prompt tokens]
    with torch.inference_mode():
        answers = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
    return int(answers[:, ids.shape[1] :].numel())


def _generate_batch(model: Any, prompts: list[list[int]], config: GenerationConfig) -> int:
    # As large as is needed: by itself the cache takes most of the machine's memory, which takes long to get.
    pages = -(-(len(prompts[0]) + config.max_new_tokens) // _PAGE)
    batching = ContinuousBatchingConfig(
        page_size=_PAGE, num_blocks=len(prompts) * (pages + 1), max_batch_tokens=_BATCH_TOKENS
    )
    answers = model.generate_batch(inputs=prompts, generation_config=config, continuous_batching_config=batching)
    return sum(len(answer.generated_tokens) for answer in answers.values())


if __name__ == "__main__":
    main()
