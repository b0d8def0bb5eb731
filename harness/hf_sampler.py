"""Sampling with Hugging Face's generate, each sample from a random stream of its own."""

from dataclasses import dataclass

import numpy as np
import torch
from tqdm import tqdm
from transformers import GenerationConfig, LogitsProcessorList

from harness.arrays import padded, to_device
from harness.engine import shows_progress

CALL_ROWS = 256  # samples of one call of generate


@dataclass
class Completion:
    ids: np.ndarray  # [T] int32, the sampled EOS included
    logps: np.ndarray  # [T] float32, after temperature
    finish_reason: str  # "stop" or "length"


class HFSampler:
    """Hugging Face's generate on the policy's own weights: slow, portable, always up to date."""

    def __init__(self, model, stop_ids: list[int], pad_id: int, cfg):
        self.model = model
        self.stop_ids = stop_ids
        self.pad_id = pad_id
        self.cfg = cfg
        # A model's own generation config may hold top-p or a repetition penalty: those would
        # sample from a distribution that is not the one being trained. Only its EOS tokens stay.
        self.model.generation_config = GenerationConfig(
            eos_token_id=model.generation_config.eos_token_id,
            do_sample=False,  # SeededSampling draws the tokens
        )

    def push(self, model):
        """Nothing to do: the weights are the policy's own."""

    def sleep(self):
        """Nothing to do: the sampler holds no memory of its own."""

    def close(self):
        """Nothing to do."""

    def generate(
        self,
        prompts: list[np.ndarray],
        n: int,
        seeds: list[int],
        temperature: float,
        limits: list[int] | None = None,
    ) -> list[list[Completion]]:
        """n completions for each prompt; temperature 0 is greedy.

        limits: most tokens of a completion, for each prompt; None: --max_completion_length.

        Sample i of a prompt is drawn from the random stream (seed of the prompt, i), so it does not
        depend on the other samples.
        """
        if limits is None:
            limits = [self.cfg.max_completion_length] * len(prompts)
        samples = [(p, i) for p in range(len(prompts)) for i in range(n)]
        samples.sort(key=lambda sample: len(prompts[sample[0]]))  # similar lengths in a call

        completions = {}
        for start in range(0, len(samples), CALL_ROWS):
            call = samples[start : start + CALL_ROWS]
            streams = [(seeds[p], i) for p, i in call]
            texts = [prompts[p] for p, _ in call]
            call_limits = [limits[p] for p, _ in call]
            results = self.generate_rows(texts, streams, temperature, call_limits)
            completions.update(zip(call, results, strict=True))
        return [[completions[p, i] for i in range(n)] for p in range(len(prompts))]

    @torch.no_grad()
    def generate_rows(
        self,
        prompts: list[np.ndarray],
        streams: list[tuple],
        temperature: float,
        limits: list[int],
    ) -> list[Completion]:
        """One completion for each prompt, drawn from its random stream."""
        device = self.model.device
        ids = padded(prompts, np.int64, self.pad_id, left=True)  # [N, P]
        mask = padded([np.ones(len(p)) for p in prompts], np.int64, left=True)
        inputs = to_device(dict(input_ids=ids, attention_mask=mask), device)
        bar = tqdm(total=max(limits), desc="tokens", disable=not shows_progress(), leave=False)
        sampling = SeededSampling(streams, temperature, max(limits), device, bar)
        bfloat16 = self.cfg.dtype == "bfloat16"

        # force_eager: the cache grows with every token, and each length would be compiled
        with (
            bar,
            torch.autocast(device.type, torch.bfloat16, enabled=bfloat16),
            torch.compiler.set_stance("force_eager"),
        ):
            out = self.model.generate(
                **inputs,
                max_new_tokens=max(limits),
                eos_token_id=self.stop_ids,
                pad_token_id=self.pad_id,
                logits_processor=LogitsProcessorList([sampling]),
            )

        tokens = out[:, ids.shape[1] :].cpu().numpy().astype(np.int32)  # [N, T]
        logps = torch.stack(sampling.logps, 1).cpu().numpy()  # [N, T]
        completions = []
        for row, row_logps, limit in zip(tokens, logps, limits, strict=True):
            completions.append(self.until_stop(row[:limit], row_logps[:limit]))
        return completions

    def until_stop(self, ids: np.ndarray, logps: np.ndarray) -> Completion:
        ends = np.flatnonzero(np.isin(ids, self.stop_ids))
        if len(ends) == 0:
            return Completion(ids, logps, "length")
        length = ends[0] + 1
        return Completion(ids[:length], logps[:length], "stop")


class SeededSampling:
    """Inverse-CDF sampling with one random number per sample and token.

    generate calls it as a logits processor. It draws the token, keeps its log-probability, and
    leaves the greedy search of generate no other choice.
    """

    def __init__(
        self,
        streams: list[tuple],
        temperature: float,
        max_length: int,
        device: torch.device,
        bar,  # advances by one for each token
    ):
        self.bar = bar
        self.cdf_device = device
        if device.type == "mps":
            self.cdf_device = "cpu"  # the CDF is in float64, which MPS lacks
        uniforms = np.stack([np.random.default_rng(s).random(max_length) for s in streams])
        self.uniforms = torch.from_numpy(uniforms).to(self.cdf_device)  # [N, T]
        self.temperature = temperature
        self.logps = []  # [N] for each token so far

    def __call__(self, input_ids, logits):
        """logits [N, V] of the next token -> 0 for the token drawn, -inf for all others."""
        temperature = 1.0 if self.temperature == 0 else self.temperature
        logps = (logits.float() / temperature).log_softmax(-1)  # [N, V]
        if self.temperature == 0:
            token = logits.argmax(-1, keepdim=True)  # [N, 1]
        else:
            token = self.draw(logps)  # [N, 1]
        self.logps.append(logps.gather(-1, token).squeeze(-1))
        self.bar.update()
        return torch.full_like(logits, -torch.inf).scatter(-1, token, 0.0)

    def draw(self, logps):
        """The first token at which the cumulative probability exceeds the random number."""
        cumulative = logps.to(self.cdf_device).double().exp_().cumsum(-1)  # [N, V]
        step = len(self.logps)
        point = self.uniforms[:, step, None] * cumulative[:, -1:]  # the sum is not exactly 1
        token = torch.searchsorted(cumulative, point, right=True)
        return token.clamp(max=logps.shape[-1] - 1).to(logps.device)
