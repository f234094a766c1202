"""One engine: models, scheduler, runner, sampler. `mini_infer.LLM` and `AsyncLLM` run it in-process."""
