"""The sampler over the CPU's kernels, or over torch's if there is no compiler or a test takes it away."""

from __future__ import annotations

import functools

from manta.workers.kernels import cpu_sampler
from manta.workers.torch_worker import sampler

sample = functools.partial(sampler.sample, cpu_sampler)
prompt_logprobs = functools.partial(sampler.prompt_logprobs, cpu_sampler)
